"""The options of the data source, checked whole before anything is read.

Spark hands them over as strings, with names in any case. One that nobody knows is refused: a typing
error would else change what is read, silently.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from meteor_py.records.times import to_ms
from meteor_py.redis import keys
from pyspark_meteor.server import ServerOptions

#: Places that Kafka's source has numbers for.
_NUMBERS = {-2: "earliest", -1: "latest"}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, None: 0.001}

#: How they are written, by what they are good for.
_EVERYWHERE = ("url", "passwordEnv", "passwordFile", "failOnDataLoss", "valueFormat")
_SELECTING = ("stream", "streams", "streamsPattern", "path")
_READING = ("minPartitions", "maxRecordsPerPartition", "includeHeaders")
_STARTING = ("startingOffsets", "startingTimestamp")
_STREAMING = (
    "group", "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay",
    "maxBytesPerTrigger",
)  # fmt: skip
_ENDING = ("endingOffsets", "endingTimestamp")


@dataclass(frozen=True, order=True)
class Place:
    """Where to start or to end in a stream, as it was asked for."""

    #: "earliest", "latest", "group", "offset", "before" (so many before the end), or "time".
    kind: str
    #: The offset, the number of records, or ms since 1970.
    number: int = 0


@dataclass(frozen=True)
class Places:
    """The same for all streams; some may have one of their own."""

    common: Place
    of: dict[str, Place] = field(default_factory=dict)

    def __getitem__(self, stream: str) -> Place:
        return self.of.get(stream, self.common)


@dataclass(frozen=True)
class Limits:
    """How much a micro-batch may have."""

    max_records: int | None = None
    min_records: int = 0
    max_delay_s: float = 900.0
    max_bytes: int | None = None

    def __bool__(self) -> bool:
        return bool(self.max_records or self.min_records or self.max_bytes)


@dataclass(frozen=True)
class ColumnOptions:
    """Which columns there are."""

    headers: bool
    text: bool


@dataclass(frozen=True)
class SourceOptions(ColumnOptions):
    """What to read, and how."""

    server: ServerOptions
    streams: tuple[str, ...]
    #: In place of names: a regular expression that they match as a whole.
    pattern: str | None
    group: str | None
    starting: Places
    ending: Places
    fail_on_data_loss: bool
    limits: Limits
    min_partitions: int
    #: None: nothing is said, and frames may stay whole.
    max_records_per_partition: int | None


def parse_source(given: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """Understand the options of a source.

    Raises:
        ValueError: One is unknown, wrong, or contradicts another.
    """
    own = (*_EVERYWHERE, *_SELECTING, *_READING, *_STARTING)
    known = (*own, *(_STREAMING if streaming else _ENDING))
    options = Given(given, known, other=_ENDING if streaming else _STREAMING)
    streams, pattern = _parse_streams(options)
    group = options.text("group")
    default = "latest" if streaming else "earliest"
    starting = _parse_places(options, *_STARTING, default)
    if not group and "group" in {starting.common.kind, *(p.kind for p in starting.of.values())}:
        hint = "name it with group" if streaming else "only readStream has groups"
        raise ValueError(f"startingOffsets=group goes on where a group is; {hint}.")
    ending = _parse_places(options, *_ENDING, "latest")
    for option, places in (("startingOffsets", starting), ("endingOffsets", ending)):
        _check_names(option, places, streams, pattern)
    _check_order(starting, ending)
    limits = Limits(
        max_records=options.number("maxOffsetsPerTrigger"),
        min_records=options.number("minOffsetsPerTrigger") or 0,
        max_delay_s=options.seconds("maxTriggerDelay", 900.0),
        max_bytes=options.number("maxBytesPerTrigger"),
    )
    if options.text("maxTriggerDelay") and not limits.min_records:
        raise ValueError(
            "maxTriggerDelay is how long to wait for minOffsetsPerTrigger; give that, too."
        )
    if limits.max_records and limits.min_records > limits.max_records:
        raise ValueError("minOffsetsPerTrigger is above maxOffsetsPerTrigger.")
    columns = _parse_columns(options)
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
        limits=limits,
        min_partitions=options.number("minPartitions") or 1,
        max_records_per_partition=options.number("maxRecordsPerPartition"),
    )


def parse_columns(given: Mapping[str, str]) -> ColumnOptions:
    """Understand what the schema depends on; whether it is a stream that is read is not known yet.

    Raises:
        ValueError: An option is unknown, or one of these is wrong.
    """
    own = (*_EVERYWHERE, *_SELECTING, *_READING, *_STARTING, *_STREAMING, *_ENDING)
    return _parse_columns(Given(given, own))


def _parse_columns(options: Given) -> ColumnOptions:
    return ColumnOptions(
        headers=options.flag("includeHeaders", False),
        text=options.choice("valueFormat", ("binary", "string")) == "string",
    )


class Given:
    """Options as Spark hands them over: strings, with names in any case.

    Raises:
        ValueError: One is not among those that are known, or is empty.
    """

    def __init__(
        self, given: Mapping[str, str], known: tuple[str, ...], other: tuple[str, ...] = ()
    ) -> None:
        names = {name.lower(): name for name in known}
        self._values: dict[str, str] = {}
        for name, value in given.items():
            if name.lower() in names:
                if not str(value).strip():
                    raise ValueError(f"The option {names[name.lower()]} is empty; leave it out.")
                self._values[names[name.lower()]] = str(value)
                continue
            elsewhere = {name.lower(): name for name in other}.get(name.lower())
            if elsewhere:
                raise ValueError(f"The option {elsewhere} has no meaning here; leave it out.")
            raise ValueError(
                f"The data source meteor has no option {name!r}; it has {', '.join(known)}."
            )

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def number(self, name: str) -> int | None:
        """A number of at least 1."""
        text = self.text(name)
        if text is None:
            return None
        if not text.isdecimal() or not 1 <= int(text) <= 2**53:
            raise ValueError(f"The option {name} is a number from 1 on, not {text!r}.")
        return int(text)

    def flag(self, name: str, default: bool) -> bool:
        text = self.text(name)
        if text is None:
            return default
        if text.lower() not in ("true", "false"):
            raise ValueError(f"The option {name} is true or false, not {text!r}.")
        return text.lower() == "true"

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        text = self.text(name) or choices[0]
        for choice in choices:
            if choice.lower() == text.lower():
                return choice
        raise ValueError(f"The option {name} is one of {', '.join(choices)}, not {text!r}.")

    def seconds(self, name: str, default: float) -> float:
        """A span of time as Spark writes it: 500ms, 30s, 15m; a bare number is in ms."""
        text = self.text(name)
        if text is None:
            return default
        found = _SPAN.fullmatch(text.strip().lower())
        if not found:
            raise ValueError(
                f"The option {name} is a span of time such as 30s or 15m, not {text!r}."
            )
        return float(found[1]) * _UNITS[found[2]]


def _parse_streams(options: Given) -> tuple[tuple[str, ...], str | None]:
    named = [name for name in _SELECTING if options.text(name)]
    if len(named) != 1:
        raise ValueError(
            "Name what to read by one of stream, streams (a,b,c), streamsPattern or load(), not "
            f"by {' and '.join(named) or 'none of them'}."
        )
    text = options.text(named[0]) or ""
    if named[0] == "streamsPattern":
        try:
            re.compile(text)
        except re.error as error:
            raise ValueError(f"streamsPattern is not a regular expression: {error}.") from None
        return (), text
    names = [name.strip() for name in text.split(",")] if named[0] != "stream" else [text]
    found = sorted(set(filter(None, names)))
    if not found:
        raise ValueError(f"The option {named[0]} has no name in it: {text!r}.")
    for name in found:
        keys.check_name(name)
    return tuple(found), None


def _parse_places(options: Given, by_offset: str, by_time: str, default: str) -> Places:
    offsets, time = options.text(by_offset), options.text(by_time)
    if offsets and time:
        raise ValueError(f"{by_offset} and {by_time} contradict each other; leave one out.")
    if time:
        return Places(Place("time", _parse_time(by_time, time)))
    text = offsets or default
    if not text.lstrip().startswith("{"):
        return Places(_parse_place(by_offset, text))
    try:
        table = json.loads(text)
        places = {name: _parse_place(by_offset, value) for name, value in table.items()}
    except json.JSONDecodeError as error:
        raise ValueError(f"{by_offset} is not JSON: {error}.") from None
    return Places(_parse_place(by_offset, default), places)


def _check_names(
    option: str, places: Places, streams: tuple[str, ...], pattern: str | None
) -> None:
    """A place of a stream that is not read is a typing error, which would go unnoticed."""
    for name in places.of:
        if not (name in streams if pattern is None else re.fullmatch(pattern, name)):
            raise ValueError(f"{option} has a place in stream {name!r}, which is not read.")


def _check_order(starting: Places, ending: Places) -> None:
    both = [(name, starting[name], ending[name]) for name in sorted({*starting.of, *ending.of})]
    for name, start, end in (*both, ("", starting.common, ending.common)):
        (scale, first), (other, last) = _rank(start), _rank(end)
        if scale == other and first > last:
            word = "Timestamp" if start.kind == "time" else "Offsets"
            of = f" of stream {name!r}" if name else ""
            raise ValueError(f"starting{word}{of} is behind ending{word}: nothing lies between.")


def _rank(place: Place) -> tuple[str, float]:
    """Where a place is among others of the same scale; which of two scales is first, nobody knows.

    >>> _rank(Place("earliest")) < _rank(Place("before", 10)) < _rank(Place("before", 5))
    True
    """
    match place.kind:
        case "earliest":
            return "end", -math.inf
        case "before":
            return "end", -place.number
        case "latest":
            return "end", 0
        case _:
            return place.kind, place.number


def _parse_place(name: str, value: str | int) -> Place:
    if isinstance(value, int) and not isinstance(value, bool):
        if value >= 0:
            return Place("offset", value)
        if value in _NUMBERS:
            return Place(_NUMBERS[value])
        raise ValueError(
            f'{name} has the number {value}; write "{value}", with quotes, for so many before the '
            "end. Numbers are offsets, or as in Kafka -1 (latest) and -2 (earliest)."
        )
    if isinstance(value, str):
        if value in ("earliest", "latest") or (value == "group" and name == "startingOffsets"):
            return Place(value)
        if re.fullmatch(r"-\d{1,15}", value):
            return Place("before", int(value[1:]))
    raise ValueError(
        f"{name} is earliest, latest, -N (so many before the end), or JSON such as "
        f'{{"orders": 17}}, not {value!r}.'
    )


def _parse_time(name: str, text: str) -> int:
    try:
        return to_ms(int(text) if text.isdecimal() else datetime.fromisoformat(text))
    except ValueError:
        raise ValueError(
            f"{name} is ms since 1970, or a time with its zone such as 2026-11-16T14:30:00Z, not "
            f"{text!r}."
        ) from None
