"""``tail --json`` writes records as JSON lines, and ``publish --jsonl`` reads them.

    {"stream":"orders","offset":17,"timestamp":1794836508123,"appended":1794836508123,
     "key":"customer-7","value":"hello","headers":{"trace":"42"}}

Times are in ms since 1970. A missing key and missing headers are ``null``. Keys, values and header
values are strings if they are valid UTF-8, and otherwise objects: ``{"b64": "..."}``. Every record
can therefore be read back unchanged. Characters that are unsafe on a terminal are written as
``\\u`` escapes. Later versions may add fields, but never remove one or change its meaning.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from meteor_cli.render.sanitize import sanitize_json
from meteor_py import Record
from meteor_py.records.times import check_ms


class Binary(msgspec.Struct, forbid_unknown_fields=True):
    """Bytes that are not valid UTF-8, encoded as base64."""

    b64: str


Data = str | Binary


class Line(msgspec.Struct):
    """A record in the output."""

    stream: str
    offset: int
    timestamp: int
    appended: int
    key: Data | None
    value: Data
    headers: dict[str, Data] | None


class InputLine(msgspec.Struct):
    """A record in the input: only the fields that a publisher sets."""

    value: Data
    key: Data | None = None
    headers: dict[str, Data] | None = None
    timestamp: int | None = None


class Columns(msgspec.Struct):
    """Records in the form that ``publish_many`` takes."""

    values: list[bytes]
    keys: Sequence[bytes | None] | None
    headers: Sequence[dict[str, bytes] | None] | None
    timestamps: Sequence[int | None] | None

    def part(self, start: int, stop: int) -> Columns:
        columns = msgspec.structs.astuple(self)
        return Columns(*(column and column[start:stop] for column in columns))


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(InputLine)


def encode(stream: str, records: Iterable[Record]) -> bytes:
    """Return a line for each record."""
    lines = [
        Line(
            stream,
            record.offset,
            record.timestamp,
            record.appended,
            None if record.key is None else to_data(record.key),
            to_data(record.value),
            _each(to_data, record.headers),
        )
        for record in records
    ]
    return sanitize_json(_encoder.encode_lines(lines).decode()).encode()


def decode(
    lines: Sequence[bytes], number: int = 1, accept: Callable[[bytes], object] | None = None
) -> Columns:
    """Parse lines into records, skipping empty lines.

    Args:
        lines: The lines, without line ends.
        number: The number of the first line, for error messages.
        accept: Called with each value. Raises ``ValueError`` to refuse it.

    Raises:
        Unreadable: A line is not a record, or ``accept`` refused its value.
    """
    rows = []
    for index, line in enumerate(lines):
        if not line or line.isspace():
            continue
        try:
            row = _to_row(_decoder.decode(line))
            if accept is not None:
                accept(row[0])
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise Unreadable(
                f"Line {number + index} is not a record in the format of `meteor tail --json`, "
                f'with bytes as a string or {{"b64": "..."}}: {str(error).rstrip(".")}.',
                index,
            ) from None
        rows.append(row)
    values, keys, headers, timestamps = map(list, zip(*rows, strict=True)) if rows else ([],) * 4
    return Columns(values, _some(keys), _some(headers), _some(timestamps))


class Unreadable(ValueError):
    """A line cannot be published; the lines before ``index`` can."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


def _to_row(given: InputLine) -> tuple[Any, ...]:
    return (
        _to_bytes(given.value),
        None if given.key is None else _to_bytes(given.key),
        _each(_to_bytes, given.headers),
        None if given.timestamp is None else check_ms(given.timestamp),
    )


def _each(convert: Callable[[Any], Any], headers: dict[str, Any] | None) -> dict[str, Any] | None:
    return headers and {name: convert(value) for name, value in headers.items()}


def _some(column: list[Any]) -> list[Any] | None:
    """Return the column, or None if it holds only None."""
    return None if column.count(None) == len(column) else column


def to_data(data: bytes) -> Data:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return Binary(b64encode(data).decode())


def _to_bytes(data: Data) -> bytes:
    if isinstance(data, str):
        return data.encode()
    try:
        return b64decode(data.b64, validate=True)
    except binascii.Error as error:
        raise ValueError(f"b64 is not base64 ({error})") from None
