"""Parsers that turn input into records: values, headers, and lines from a pipe or a terminal."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from meteor_cli.render.jsonl import Columns
    from meteor_py.records.codec import CodecName

#: Maximum number of bytes to read at a time.
BLOCK = 1024 * 1024
#: Number of characters of invalid input to quote in an error message.
_QUOTED_MAX = 60


def read_lines(fd: int, delimiter: bytes, limit: int) -> Iterator[list[bytes]]:
    """Yield lists of lines, without line ends, as soon as they are available.

    Args:
        fd: A file descriptor.
        delimiter: The byte that ends a line; the last line may lack it.
        limit: The maximum number of bytes to buffer for an incomplete line.

    Raises:
        ValueError: An incomplete line is longer than ``limit``. Callers check complete lines.
    """
    rest = bytearray()  # the incomplete last line
    while block := _read(fd):
        lines = block.split(delimiter)
        if len(lines) > 1:
            rest += lines[0]
            lines[0] = bytes(rest)
            rest.clear()
        rest += lines.pop()
        if lines:
            yield lines
        if len(rest) > limit:
            raise ValueError(
                f"A line in the input is longer than {limit:,} bytes. Raise --max-bytes. To "
                "publish the input as one record, also pass --whole."
            )
    if rest:
        yield [bytes(rest)]


def read_whole(fd: int, limit: int) -> bytes:
    """Return the whole input; raise ``ValueError`` if it is longer than ``limit`` bytes."""
    found = bytearray()
    while block := _read(fd):
        found += block
        if len(found) > limit:
            raise ValueError(
                f"The input is longer than {limit:,} bytes. Raise --max-bytes (up to 32 MiB)."
            )
    return bytes(found)


def _read(fd: int) -> bytes:
    """Wait for input and return the available bytes, up to ``BLOCK``, or ``b""`` at the end."""
    blocks = [os.read(fd, BLOCK)]
    size = len(blocks[0])
    while blocks[-1] and size < BLOCK and select.select([fd], [], [], 0)[0]:
        blocks.append(os.read(fd, BLOCK - size))
        size += len(blocks[-1])
    return b"".join(blocks)


def to_bytes(text: str) -> bytes:
    """Return a command-line argument as bytes, which may be invalid UTF-8."""
    return text.encode(errors="surrogateescape")


def parse_headers(given: Sequence[str]) -> dict[str, bytes] | None:
    """Parse headers; raise ``click.BadParameter`` if one does not have the form NAME=VALUE."""
    pairs = [header.partition("=") for header in given]
    for name, equals, _ in pairs:
        if not equals:
            raise click.BadParameter(f"{name!r} does not have the form NAME=VALUE.")
    return {name: to_bytes(value) for name, _, value in pairs} or None


def parse_body(text: str | None, what: str, *, as_text: bool = False) -> Any:
    """Parse a message body or a topic as JSON. Return text if it is not JSON or ``as_text`` is set.

    Raises:
        click.BadParameter: The text starts like JSON but is invalid, probably because of a typo.
    """
    import msgspec

    if text is None or as_text:
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        why = str(error).removeprefix("JSON is malformed: ")
        why = why.replace("Input data was truncated", "it ends too early")
    except UnicodeError:
        why = "it is not UTF-8"
    except RecursionError:
        why = "it is nested too deeply"
    if not text.lstrip().startswith(("{", "[", '"')):
        return text
    quoted = text if len(text) <= _QUOTED_MAX else f"{text[:_QUOTED_MAX]}\u2026"
    raise click.BadParameter(
        f"{quoted!r} starts like JSON but is invalid: {why}. Nothing was sent. Use --text to send "
        "it as text.",
        param_hint=what,
    )


class RecordParser:
    """Converts input into records that the stream's codec can decode.

    Invalid input raises ``jsonl.Unreadable``.
    """

    def __init__(
        self,
        codec: CodecName,
        key: str | None = None,
        separator: str | None = None,
        headers: dict[str, bytes] | None = None,
    ) -> None:
        from meteor_cli.render import jsonl
        from meteor_py.records.codec import find_codec

        self._jsonl = jsonl
        self._codec = codec
        self._key = None if key is None else to_bytes(key)
        self._separator = to_bytes(separator) if separator else None
        self._headers = headers
        self._reader = find_codec(codec)
        self._json = find_codec("json")

    def columns(self, lines: list[bytes], number: int) -> Columns:
        """Convert values or lines. Error messages number them, starting at ``number``."""
        keys: Sequence[bytes | None] | None = None
        values = lines
        if self._separator is not None:
            parts = [line.partition(self._separator) for line in lines]
            keys = [key if found else None for key, found, _ in parts]
            values = [value if found else key for key, found, value in parts]
        elif self._key is not None:
            keys = [self._key] * len(lines)
        headers = None if self._headers is None else [self._headers] * len(lines)
        if self._reader is not None:
            values = self._encode(values, number)
        return self._jsonl.Columns(values, keys, headers, None)

    def records(self, lines: list[bytes], number: int) -> Columns:
        """Convert the output of ``meteor tail --json``. ``number`` is the first line's number."""
        return self._jsonl.decode(lines, number, self._check)

    def _encode(self, values: list[bytes], number: int) -> list[bytes]:
        encoded = []
        for index, value in enumerate(values):
            try:
                encoded.append(self._encode_one(value))
            except ValueError as error:
                raise self._jsonl.Unreadable(
                    f"Record {number + index} in the input is invalid: {error}", index
                ) from None
        return encoded

    def _encode_one(self, value: bytes) -> bytes:
        """Validate a value. For a msgpack stream, convert it from JSON, which users can type."""
        if self._codec != "msgpack":
            self._check(value)
            return value
        assert self._json is not None
        assert self._reader is not None
        try:
            return self._reader.encode(self._json.decode(value))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"For a msgpack stream, values must be JSON ({error}).") from None

    def _check(self, value: bytes) -> None:
        try:
            if self._reader is not None:
                self._reader.decode(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"The stream accepts only {self._codec} ({error}).") from None
