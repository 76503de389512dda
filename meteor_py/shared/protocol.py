"""The books of a shared group: its keys in Redis, and what may be done to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from meteor_py.errors import AccessDenied, MeteorError, ServerRefused
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import Connection
from meteor_py.redis.scripts import SHARED_JOIN, SHARED_STEP

if TYPE_CHECKING:
    from meteor_py.log.handle import StreamHandle

#: Records that a step looks at, at most: others wait as long.
SCAN = 4_096
#: Records that are taken of a group before others get their turn.
QUANTUM = 16


class Refused(Exception):
    """The answer to a consumer that is taken for dead, or whose count of steps is another."""


class Entry(NamedTuple):
    """What the index does not have any more: an entry made from the store, or that it is lost."""

    first: int
    #: As ``OrderingRule.index`` makes them; empty if nobody has the records.
    strings: Sequence[bytes]
    #: The offset behind the records.
    stop: int
    #: Why they are lost, if not because nobody has them.
    cause: MeteorError | None = None

    def covers(self, offset: int) -> bool:
        return self.first <= offset < self.stop


class Stand(NamedTuple):
    """Where a consumer stands."""

    #: Of its last step.
    number: int
    #: The offsets that it holds of each group.
    held: dict[bytes, list[int]]
    #: How often those of them failed that did.
    failures: dict[int, int]


class Letter(NamedTuple):
    """A record that was given up, to be published as a dead letter."""

    offset: int
    failures: int
    group: bytes
    reason: str


class Settlement(NamedTuple):
    """What is to be done with a record that is not acknowledged."""

    #: "R" rewind its group to it, "U" that without a failure, "Q" return only it, "X" reject, "G"
    #: gone, "D" letter published, "L" its record lost.
    kind: str
    group: bytes
    offset: int
    detail: bytes = b""


@dataclass(frozen=True)
class Answer:
    """What a step has brought."""

    next: int
    end: int
    waiting: int
    bell: int
    #: Seconds until there may be something without anybody ringing; None: nothing is awaited.
    wait_s: float | None
    granted: list[int]
    failures: dict[int, int]
    #: Records from ``next`` to before this are only in the store; 0 if the index has them.
    cold: int
    refused: list[int]
    lost: list[tuple[int, int]]
    #: Offset and failures of those that were given up without a dead letter.
    dropped: list[tuple[int, int]]
    letters: list[Letter]
    #: Of the stream: in another one, offsets may mean other records.
    epoch: int


class SharedProtocol:
    """One shared group of one stream."""

    def __init__(self, stream: StreamHandle, group: str) -> None:
        self.stream = stream
        self.group = group
        self.prefix = keys.shared(stream.name, group, "")
        #: Of the stream, and once it is known of this life of the group, which may begin anew.
        self.incarnation = stream.incarnation

    def key(self, part: str) -> str:
        return self.prefix + part

    def keys(self, parts: str) -> list[str]:
        return [self.prefix + part for part in parts.split()]

    def whole(self, part: bytes) -> bytes:
        """The key of a part that a group gives its name to."""
        return self.prefix.encode() + part

    def find(self) -> set[bytes]:
        """The parts that exist now."""
        cursor, found = b"0", set[bytes]()
        pattern, size = f"{self.prefix}*", len(self.prefix)
        while True:
            cursor, part = self.stream.connector.call(
                "SCAN", cursor, "MATCH", pattern, "COUNT", 1000
            )
            found.update(key[size:] for key in part)
            if cursor == b"0":
                return found

    def require(self) -> None:
        """Raise if there is no such group. What is wrong in its books is no matter here.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
        """
        call = self.stream.connector.call
        found = call("HGET", self.meta, "incarnation")
        if found != self.stream.incarnation.encode():
            raise reply_errors.gone(self.stream.name, b"INCARNATION" if found else b"NOSTREAM")
        try:
            state = call("HGET", self.key("state"), "incarnation") or b""
        except AccessDenied:
            raise
        except ServerRefused:
            return  # it is no hash
        if self.incarnation not in (state.decode(), state.decode().partition(".")[0]):
            raise reply_errors.no_group(self.stream.name, self.group)

    @property
    def meta(self) -> str:
        return keys.meta(self.stream.name)

    def join(self, connection: Connection, consumer: str, name: str = "") -> Stand:
        """Join if there is a name; return where the consumer stands.

        Raises:
            Refused: It is taken for dead.
            GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
        """
        names = [self.meta, *self.keys(f"state leases consumers held:{consumer} failures")]
        args = [self.incarnation, consumer, name, "join" if name else ""]
        answer = self.check(connection.run(SHARED_JOIN, names, args))
        pairs = zip(answer[2][::2], answer[2][1::2], strict=True)
        counts = iter(map(int, answer[3]))
        return Stand(
            int(answer[1]),
            {group: _offsets(held) for group, held in pairs if group and held},
            dict(zip(counts, counts, strict=True)),
        )

    def step(
        self,
        connection: Connection,
        consumer: str,
        number: int,
        *,
        want: int,
        leave: bool = False,
        wake: bool = False,
        entry: Entry | None = None,
        acks: dict[bytes, list[int]],
        others: Sequence[Settlement] = (),
        scan: int = SCAN,
    ) -> Answer:
        """Take a step (see shared_step.lua); without a consumer, only look ahead.

        Raises as ``join``.
        """
        names = [self.meta, keys.index(self.stream.name)]
        names += self.keys(
            "state groups ready blocked delayed leases consumers failures dying letters bell "
            f"held:{consumer} more:{consumer} suspects"
        )
        args: list[Any] = [self.prefix, self.incarnation, consumer, number]
        args += ["leave" if leave else "wake" if wake else "", want, scan, QUANTUM]
        if entry is None:
            args += ["", 0]
        elif entry.strings:
            args += [entry.first, len(entry.strings), *entry.strings]
        else:
            args += [entry.first, "lost", entry.stop]
        args.append(len(acks))
        for group, offsets in acks.items():
            args += [group, ",".join(map(str, offsets))]
        for other in others:
            args += [other.kind, other.group, b"%d:%b" % (other.offset, other.detail)]
        return _answer(self.check(connection.run(SHARED_STEP, names, args)))

    def check(self, answer: list[Any]) -> list[Any]:
        """The answer, unless it says why not."""
        match answer[0]:
            case b"OK":
                return answer
            case b"NOGROUP":
                raise reply_errors.no_group(self.stream.name, self.group)
            case b"NOSTREAM" | b"INCARNATION":
                raise reply_errors.gone(self.stream.name, answer[0])
            case _:
                raise Refused(answer[0].decode())


def _answer(raw: list[Any]) -> Answer:
    nxt, end, waiting, bell, wait, base, steps, failed, cold, refused, lost, dropped = raw[1:13]
    base = int(base)
    letters = zip(raw[13][::2], raw[13][1::2], strict=True)
    return Answer(
        next=int(nxt),
        end=int(end),
        waiting=int(waiting),
        bell=int(bell),
        wait_s=int(wait) / 1000 if int(wait) >= 0 else None,
        granted=[base + int(step) for step in steps.split(b",")] if steps else [],
        failures=dict(_pairs(failed)),
        cold=int(cold),
        refused=_offsets(refused),
        lost=list(_pairs(lost)),
        dropped=list(_pairs(dropped)),
        letters=[_letter(int(offset), detail) for offset, detail in letters],
        epoch=int(raw[14]),
    )


def _letter(offset: int, detail: bytes) -> Letter:
    failures, size, rest = detail.split(b":", 2)
    group, reason = rest[: int(size)], rest[int(size) :]
    return Letter(offset, int(failures), group, reason.decode(errors="replace"))


def _offsets(listed: bytes) -> list[int]:
    return [int(offset) for offset in listed.split(b",")] if listed else []


def _pairs(listed: bytes) -> Iterable[tuple[int, int]]:
    if not listed:
        return []
    pairs = (pair.split(b":") for pair in listed.split(b","))
    return [(int(first), int(second)) for first, second in pairs]
