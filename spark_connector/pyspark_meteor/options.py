"""Source options. All of them are checked before any record is read.

Spark passes options as strings, with names in any case. Unknown options are refused, because a
misspelled name would silently change which records are read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from meteor_py.records.times import to_ms
from meteor_py.redis import keys
from pyspark_meteor.server import SERVER_OPTIONS, ServerOptions

T = TypeVar("T", int, None)

#: Numbers that have a special meaning in offsets for Kafka's source.
_KAFKA_OFFSETS = {-2: "earliest", -1: "latest"}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, None: 0.001}

#: Explains why options are missing if a source was created as a table.
NO_TABLES = (
    "Spark does not pass table options to a data source written in Python. Use CREATE TEMPORARY "
    "VIEW name USING meteor OPTIONS (stream 'orders')."
)
_EVERYWHERE = (*SERVER_OPTIONS, "failOnDataLoss", "valueFormat")
_SELECTING = ("stream", "streams", "streamsPattern", "path")
_READING = ("minPartitions", "maxRecordsPerPartition", "includeHeaders")
_STARTING = ("startingOffsets", "startingTimestamp")
_STREAMING = (
    "group", "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay",
    "maxBytesPerTrigger",
)  # fmt: skip
_ENDING = ("endingOffsets", "endingTimestamp")
_COMMON = (*_EVERYWHERE, *_SELECTING, *_READING, *_STARTING)


@dataclass(frozen=True, order=True)
class OffsetSpec:
    """Where to start or end in a stream, as the user wrote it. ``Planner`` resolves it."""

    #: "earliest", "latest", "group", "offset", "before" (records before the end), or "time".
    kind: str
    #: The offset, the number of records, or ms since 1970.
    number: int = 0


@dataclass(frozen=True)
class OffsetSpecs:
    """The specs for all streams: a default, and exceptions for particular streams."""

    default: OffsetSpec
    by_stream: dict[str, OffsetSpec] = field(default_factory=dict)

    def __getitem__(self, stream: str) -> OffsetSpec:
        return self.by_stream.get(stream, self.default)


@dataclass(frozen=True)
class Limits:
    """Micro-batch limits."""

    max_records: int | None = None
    min_records: int = 0
    max_delay_s: float = 900.0
    max_bytes: int | None = None

    def __bool__(self) -> bool:
        return bool(self.max_records or self.min_records or self.max_bytes)


@dataclass(frozen=True)
class ColumnOptions:
    """The options that the schema depends on."""

    headers: bool
    text: bool


@dataclass(frozen=True)
class SourceOptions(ColumnOptions):
    """All options for a source."""

    server: ServerOptions
    streams: tuple[str, ...]
    #: Instead of names: a regular expression that matches whole names.
    pattern: str | None
    group: str | None
    starting: OffsetSpecs
    ending: OffsetSpecs
    fail_on_data_loss: bool
    limits: Limits
    min_partitions: int
    #: None means the default. With the default, frames are split only for ``min_partitions``.
    max_records_per_partition: int | None


def parse_source(given: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """Parse source options.

    Raises:
        ValueError: An option is unknown, invalid, or contradicts another.
    """
    known, other = (_STREAMING, _ENDING) if streaming else (_ENDING, _STREAMING)
    options = RawOptions(given, (*_COMMON, *known), other)
    streams, pattern = _parse_streams(options)
    group = options.text("group")
    starting = _parse_specs(options, *_STARTING, "latest" if streaming else "earliest")
    kinds = {starting.default.kind, *(spec.kind for spec in starting.by_stream.values())}
    if not group and "group" in kinds:
        raise ValueError(
            'startingOffsets=group needs the option "group".'
            if streaming
            else "startingOffsets=group works only with readStream: batch reads have no group."
        )
    ending = _parse_specs(options, *_ENDING, "latest")
    for option, specs in (("startingOffsets", starting), ("endingOffsets", ending)):
        _check_names(option, specs, streams, pattern)
    _check_order(starting, ending)
    columns = parse_columns(given)
    return SourceOptions(
        headers=columns.headers,
        text=columns.text,
        server=ServerOptions.parse(options),
        streams=streams,
        pattern=pattern,
        group=group,
        starting=starting,
        ending=ending,
        fail_on_data_loss=options.flag("failOnDataLoss", True),
        limits=_parse_limits(options),
        min_partitions=options.number("minPartitions", 1),
        max_records_per_partition=options.number("maxRecordsPerPartition", None),
    )


def parse_columns(given: Mapping[str, str]) -> ColumnOptions:
    """Parse schema options. At this point, the type of query is unknown.

    Raises:
        ValueError: An option is unknown, or a schema option is invalid.
    """
    options = RawOptions(given, (*_COMMON, *_STREAMING, *_ENDING))
    return ColumnOptions(
        headers=options.flag("includeHeaders", False),
        text=options.choice("valueFormat", ("binary", "string")) == "string",
    )


class RawOptions:
    """Options as Spark passes them: strings, with names in any case.

    Args:
        known: Options that are valid here.
        other: Options that are valid elsewhere, for a better error message.

    Raises:
        ValueError: An option is unknown or empty.
    """

    def __init__(
        self, given: Mapping[str, str], known: tuple[str, ...], other: tuple[str, ...] = ()
    ) -> None:
        names = {name.lower(): name for name in (*known, *other)}
        self._values: dict[str, str] = {}
        for name, value in given.items():
            option = names.get(name.lower())
            if option is None:
                raise ValueError(
                    f"The meteor data source has no option {name!r}. The options are "
                    f"{', '.join(known)}."
                )
            if option not in known:
                raise ValueError(f"The option {option} does not apply here. Leave it out.")
            if not str(value).strip():
                raise ValueError(f"The option {option} is empty. Leave it out.")
            self._values[option] = str(value)

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def number(self, name: str, default: T, least: int = 1, most: int = 2**53) -> int | T:
        text = self.text(name)
        if text is None:
            return default
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"The option {name} must be from {least} to {most}, not {text!r}.")
        return int(text)

    def flag(self, name: str, default: bool) -> bool:
        text = self.text(name)
        if text is None:
            return default
        if text.lower() not in ("true", "false"):
            raise ValueError(f"The option {name} must be true or false, not {text!r}.")
        return text.lower() == "true"

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of the choices; the first is the default."""
        text = self.text(name) or choices[0]
        for choice in choices:
            if choice.lower() == text.lower():
                return choice
        raise ValueError(f"The option {name} must be one of {', '.join(choices)}, not {text!r}.")

    def seconds(self, name: str, default: float, most: float = math.inf) -> float:
        """Return a duration in seconds. Spark's format is 500ms, 30s, 15m, or a number of ms."""
        text = self.text(name)
        if text is None:
            return default
        found = _DURATION.fullmatch(text.strip().lower())
        if not found:
            raise ValueError(
                f"The option {name} must be a duration such as 30s or 15m, not {text!r}."
            )
        seconds = float(found[1]) * _UNITS[found[2]]
        if seconds > most:
            raise ValueError(f"The option {name} must be at most {most:g} seconds, not {text!r}.")
        return seconds


def _parse_limits(options: RawOptions) -> Limits:
    limits = Limits(
        max_records=options.number("maxOffsetsPerTrigger", None),
        min_records=options.number("minOffsetsPerTrigger", 0),
        max_delay_s=options.seconds("maxTriggerDelay", 900.0),
        max_bytes=options.number("maxBytesPerTrigger", None),
    )
    if options.text("maxTriggerDelay") and not limits.min_records:
        raise ValueError(
            "maxTriggerDelay limits the wait for minOffsetsPerTrigger. Pass both, or neither."
        )
    if limits.max_records and limits.min_records > limits.max_records:
        raise ValueError(
            "minOffsetsPerTrigger is greater than maxOffsetsPerTrigger. Lower the minimum, or "
            "raise the maximum."
        )
    return limits


def _parse_streams(options: RawOptions) -> tuple[tuple[str, ...], str | None]:
    selectors = [name for name in _SELECTING if options.text(name)]
    if len(selectors) != 1:
        raise ValueError(
            "Select the streams with exactly one of stream, streams (a,b,c), streamsPattern or "
            f"load(). You used {' and '.join(selectors) or 'none of them'}."
            + ("" if selectors else f" If this is a table: {NO_TABLES}")
        )
    (selector,) = selectors
    text = options.text(selector) or ""
    if selector == "streamsPattern":
        try:
            re.compile(text)
        except re.error as error:
            raise ValueError(f"streamsPattern is not a regular expression: {error}.") from None
        return (), text
    names = [text] if selector == "stream" else [name.strip() for name in text.split(",")]
    streams = sorted(set(filter(None, names)))
    if not streams:
        raise ValueError(f"The option {selector} contains no name: {text!r}.")
    for name in streams:
        keys.check_name(name)
    return tuple(streams), None


def _parse_specs(options: RawOptions, by_offset: str, by_time: str, default: str) -> OffsetSpecs:
    offsets, time = options.text(by_offset), options.text(by_time)
    if offsets and time:
        raise ValueError(f"{by_offset} and {by_time} contradict each other. Leave one out.")
    if time:
        return OffsetSpecs(OffsetSpec("time", _parse_time(by_time, time)))
    text = offsets or default
    if not text.lstrip().startswith("{"):
        return OffsetSpecs(_parse_spec(by_offset, text))
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{by_offset} is not JSON: {error}.") from None
    specs = {name: _parse_spec(by_offset, value) for name, value in table.items()}
    return OffsetSpecs(_parse_spec(by_offset, default), specs)


def _parse_spec(option: str, value: str | int) -> OffsetSpec:
    if isinstance(value, int) and not isinstance(value, bool):
        if value >= 0:
            return OffsetSpec("offset", value)
        if value in _KAFKA_OFFSETS:
            return OffsetSpec(_KAFKA_OFFSETS[value])
        raise ValueError(
            f'{option} has the number {value}. For {-value} records before the end, write "{value}"'
            ", with quotes. Numbers are offsets or, as in Kafka, -1 (latest) and -2 (earliest)."
        )
    if isinstance(value, str):
        if value in ("earliest", "latest") or (value == "group" and option == "startingOffsets"):
            return OffsetSpec(value)
        if re.fullmatch(r"-\d{1,15}", value):
            return OffsetSpec("before", int(value[1:]))
    names = "earliest, latest, group" if option == "startingOffsets" else "earliest, latest"
    raise ValueError(
        f"{option} must be {names}, -N (N records before the end), or JSON such as "
        f'{{"orders": 17}}, not {value!r}.'
    )


def _parse_time(option: str, text: str) -> int:
    try:
        return to_ms(int(text) if text.isdecimal() else datetime.fromisoformat(text))
    except ValueError:
        raise ValueError(
            f"{option} must be ms since 1970, or a time with a time zone, such as "
            f"2026-11-16T14:30:00Z, not {text!r}."
        ) from None


def _check_names(
    option: str, specs: OffsetSpecs, streams: tuple[str, ...], pattern: str | None
) -> None:
    """Refuse the name of a stream that the query does not read: it is probably misspelled."""
    for name in specs.by_stream:
        if not (name in streams if pattern is None else re.fullmatch(pattern, name)):
            raise ValueError(
                f"{option} names stream {name!r}, which the query does not read. Check the name."
            )


def _check_order(starting: OffsetSpecs, ending: OffsetSpecs) -> None:
    names = sorted({*starting.by_stream, *ending.by_stream})
    both = [(f" for stream {name!r}", starting[name], ending[name]) for name in names]
    for of, start, end in (*both, ("", starting.default, ending.default)):
        (scale, first), (other, last) = _rank(start), _rank(end)
        if scale == other and first > last:
            word = "Timestamp" if start.kind == "time" else "Offsets"
            raise ValueError(f"starting{word}{of} is after ending{word}, so nothing can be read.")


def _rank(spec: OffsetSpec) -> tuple[str, float]:
    """Return a scale, and a rank on that scale. Specs on different scales are not comparable.

    >>> _rank(OffsetSpec("before", 10)) < _rank(OffsetSpec("before", 5))
    True
    """
    match spec.kind:
        case "earliest":
            return "end", -math.inf
        case "before":
            return "end", -spec.number
        case "latest":
            return "end", 0
        case _:
            return spec.kind, spec.number
