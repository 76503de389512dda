"""Lines from a pipe, a file or a terminal, as soon as they are there and many at a time."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

#: Bytes that are gathered at most before they are passed on.
BLOCK = 1024 * 1024


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
