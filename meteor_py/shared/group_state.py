"""Parsers for a shared group's state in Redis, which the scripts in ``redis/lua/shared`` write."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from meteor_py.records.ordering_index import unpack_keys

#: Stored as the owner of an ordering key that no consumer owns.
NOBODY = b"......"

_PROGRESS = struct.Struct("<16d6s6s")
_MEMBER = struct.Struct("<5d3B")
_PLAIN = struct.Struct("<6sH")
_EXTENDED = struct.Struct("<B6sHB6d")
#: Reasons why an ordering key is stopped. BEHIND means that a returned record is waiting while its
#: key's owner holds later records.
DELAYED, PARKED, BEHIND = 1, 2, 3


class Progress(NamedTuple):
    """The ``progress`` field of the group's meta; see ``redis/lua/shared/_group.lua``."""

    next: int
    waiting: int
    clock: int
    tick: int
    last: int
    reap_at: int
    due: int
    watch_until: int
    failing: int
    purging: int
    acked: int
    dead: int
    lost: int
    purged: int
    returned: int
    reaped: int
    reaping: bytes
    watcher: bytes

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Parse the field. Raises ``ValueError`` if it is malformed."""
        *numbers, reaping, watcher = _unpack(_PROGRESS, raw)
        return cls._make([*map(int, numbers), reaping, watcher])


class Member(NamedTuple):
    """A consumer, stored as a field of ``members``."""

    step: int
    #: The end of its lease, on the ``Progress.tick`` clock.
    deadline: int
    holding: int
    #: The first and last batch that its last step granted.
    first: int
    last: int
    idle: bool
    alone: bool
    #: Whether its lease has expired. The server keeps the entry for a while, so that the consumer
    #: can learn the outcome of its last step.
    dead: bool
    #: The ordering key that it reserves for a record's last delivery attempt; empty if none.
    kept: bytes
    name: str

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Parse a field. Raises ``ValueError`` if it is malformed."""
        step, deadline, holding, first, last, *flags = _unpack(_MEMBER, raw)
        texts, at = [], _MEMBER.size
        for _ in range(2):
            size = int.from_bytes(raw[at : at + 2], "little")
            texts.append(raw[at + 2 : at + 2 + size])
            at += 2 + size
        if at > len(raw):
            raise ValueError("It is cut off.")
        name = texts[1].decode(errors="replace")
        numbers = map(int, (step, deadline, holding, first, last))
        return cls._make([*numbers, *map(bool, flags), texts[0], name])


class KeyEntry(NamedTuple):
    """An ordering key that has unsettled records or is stopped, stored as a field of ``keys``."""

    owner: bytes
    held: int
    #: The first waiting offsets; further ones are in chunks.
    waiting: list[int]
    stop: int = 0
    suspect: int = -1
    blame: int = -1
    top: int = -1
    #: The first and last number of its chunks, and the number of offsets in them.
    first: int = 0
    last: int = -1
    far: int = 0

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Parse a field. Raises ``ValueError`` if it is malformed."""
        if raw[:1] != b"\xff":
            owner, held = _unpack(_PLAIN, raw)
            return cls(owner, held, read_line(raw[_PLAIN.size :]))
        _, owner, held, stop, *rest = _unpack(_EXTENDED, raw)
        return cls(owner, held, read_line(raw[_EXTENDED.size :]), stop, *map(int, rest))

    @property
    def total(self) -> int:
        """The number of waiting records."""
        return len(self.waiting) + self.far

    def chunks(self, key: bytes) -> Iterator[bytes]:
        """Yield the names of the ``waiting`` fields that hold the key's further offsets."""
        numbers = range(self.first, self.last + 1) if self.far else ()
        return (b"%b:%d" % (key, number) for number in numbers)


def read_line(line: bytes) -> list[int]:
    """Parse offsets of seven bytes each. Raises ``ValueError`` if any bytes are left over."""
    if len(line) % 7:
        raise ValueError("Its offsets are cut off.")
    count = len(line) // 7
    if count < 16:
        return [int.from_bytes(line[at : at + 7], "little") for at in range(0, len(line), 7)]
    wide = bytearray(8 * count)  # for longer lines, it is faster to insert a zero after each offset
    for at in range(7):
        wide[at::8] = line[at::7]
    return list(struct.unpack(f"<{count}Q", wide))


def read_batch(raw: bytes) -> list[tuple[int, bytes]]:
    """Parse a field of ``batches``; return each offset with its ordering key, b'' if keyless.

    Raises:
        ValueError: The field is malformed.
    """
    start = 1 + 7 * raw[0] if raw else 0
    offsets, keys = read_line(raw[1:start]), unpack_keys(raw[start:])
    if not raw or len(offsets) != raw[0] or len(keys) != len(offsets):
        raise ValueError("Its offsets and its keys do not match.")
    return list(zip(offsets, keys, strict=True))


def _unpack(form: struct.Struct, raw: bytes) -> tuple[Any, ...]:
    try:
        return form.unpack_from(raw)
    except struct.error as error:
        raise ValueError(f"It has only {len(raw)} bytes.") from error
