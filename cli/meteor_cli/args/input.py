"""Records as people write them: values, headers, and lines from a pipe, a file or a terminal."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from meteor_cli.render.jsonl import Columns

#: Bytes that are gathered at most before they are passed on.
BLOCK = 1024 * 1024
#: Characters of what was typed that an error shows.
_SHOWN_MAX = 60


def read_lines(fd: int, delimiter: bytes, limit: int) -> Iterator[list[bytes]]:
    """The lines, without their ends; the last one may have none.

    What has come is passed on at once: someone may be typing. What comes faster is gathered.

    Args:
        fd: A file descriptor.
        delimiter: What ends a line, one byte.
        limit: Bytes that a line may have.

    Raises:
        ValueError: A line is longer.
    """
    rest = bytearray()  # of a line whose end has not come; a long one comes in many pieces
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
                f"A line of more than {limit:,} bytes is too long for a record; --whole takes a "
                "file as one, and --max-bytes allows for larger ones."
            )
    if rest:
        yield [bytes(rest)]


def read_whole(fd: int, limit: int) -> bytes:
    """All there is.

    Raises:
        ValueError: It is more than ``limit`` bytes.
    """
    found = bytearray()
    while block := _read(fd):
        found += block
        if len(found) > limit:
            raise ValueError(
                f"The input has more than {limit:,} bytes, which is too much for a record; "
                "--max-bytes allows for larger ones."
            )
    return bytes(found)


def _read(fd: int) -> bytes:
    """What there is, after waiting for the first of it; nothing at the end."""
    blocks = [os.read(fd, BLOCK)]
    size = len(blocks[0])
    while blocks[-1] and size < BLOCK and select.select([fd], [], [], 0)[0]:
        blocks.append(os.read(fd, BLOCK - size))
        size += len(blocks[-1])
    return b"".join(blocks)


def to_bytes(text: str) -> bytes:
    """An argument as it was typed, be it text or not."""
    return text.encode(errors="surrogateescape")


def parse_headers(given: Sequence[str]) -> dict[str, bytes] | None:
    """Headers that are written NAME=VALUE.

    Raises:
        click.BadParameter: One is not.
    """
    pairs = [header.partition("=") for header in given]
    for name, equals, _ in pairs:
        if not equals:
            raise click.BadParameter(f"{name!r} is not NAME=VALUE.")
    return {name: to_bytes(value) for name, _, value in pairs} or None


def parse_body(text: str | None, what: str, *, as_text: bool = False) -> Any:
    """The body of a message, or a topic, as it is written on the command line.

    Raises:
        click.BadParameter: It begins as JSON does, and is none: a slip, as a rule.
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
    shown = text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}\u2026"
    raise click.BadParameter(
        f"{shown!r} begins like JSON, but is none: {why}. Nothing was sent; if it is meant as "
        "text, say --text.",
        param_hint=what,
    )


class RecordParser:
    """Makes records of what was read, such as readers of the stream will understand."""

    def __init__(
        self,
        codec: str,
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
        """From values, or lines of which the first has this number."""
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
        """From lines of JSON, of which the first has this number."""
        return self._jsonl.decode(lines, number, self._check)

    def _encode(self, values: list[bytes], number: int) -> list[bytes]:
        encoded = []
        for index, value in enumerate(values):
            try:
                encoded.append(self._encode_one(value))
            except ValueError as error:
                raise self._jsonl.Unreadable(
                    f"Record {number + index} of the input is refused: {error}", index
                ) from None
        return encoded

    def _encode_one(self, value: bytes) -> bytes:
        """As it is, if it can be read; for msgpack, which nobody can type, from JSON."""
        if self._codec != "msgpack":
            self._check(value)
            return value
        assert self._json is not None
        assert self._reader is not None
        try:
            return self._reader.encode(self._json.decode(value))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"For a stream of msgpack it has to be JSON ({error}).") from None

    def _check(self, value: bytes) -> None:
        try:
            if self._reader is not None:
                self._reader.decode(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"The stream takes {self._codec} ({error}).") from None
