"""The state of a shared group in Redis, and the scripts that read and change it."""

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

#: The most records that one step scans: all other clients wait meanwhile.
SCAN = 4_096
#: Records of one ordering key that are granted before other keys get their turn.
QUANTUM = 16


class Refused(Exception):
    """The consumer's lease has expired, or the server expects another step number."""


class Entry(NamedTuple):
    """An entry that the index has dropped, rebuilt from the store, or a notice that it is lost."""

    first: int
    #: As ``OrderingRule.index`` makes them; empty if neither ring nor store has the records.
    strings: Sequence[bytes]
    #: The offset after the last record.
    stop: int
    #: Why records that exist are unreadable.
    cause: MeteorError | None = None

    def covers(self, offset: int) -> bool:
        return self.first <= offset < self.stop


class ConsumerState(NamedTuple):
    """A consumer as the server knows it."""

    #: Number of its last step.
    number: int
    #: The offsets that it holds, by ordering key.
    held: dict[bytes, list[int]]
    #: Failure counts of those offsets that have failed.
    failures: dict[int, int]


class DeadLetter(NamedTuple):
    """A record to publish as a dead letter."""

    offset: int
    failures: int
    ordering_key: bytes
    reason: str


class Settlement(NamedTuple):
    """Disposition of a record that was not acknowledged."""

    #: "R" rewind its ordering key to it, "U" the same without counting a failure, "Q" return only
    #: this record, "X" reject, "G" gone, "D" dead letter published (``detail`` is the history in
    #: which the server stored it), "L" dead letter's record lost.
    kind: str
    ordering_key: bytes
    offset: int
    detail: bytes = b""


@dataclass(frozen=True)
class StepReply:
    """The server's reply to a step."""

    #: The first offset that was not scanned.
    next: int
    #: The end of the stream.
    end: int
    waiting: int
    bell: int
    #: Seconds until records may become available without a new entry in ``bell``; None = never.
    wait_s: float | None
    granted: list[int]
    failures: dict[int, int]
    #: Records from ``next`` to before this are only in the store; 0 if the index has them.
    stored_stop: int
    refused: list[int]
    lost: list[tuple[int, int]]
    #: Offset and failure count of records that were discarded without a dead letter.
    dropped: list[tuple[int, int]]
    dead_letters: list[DeadLetter]
    #: The stream's epoch. In another epoch, offsets may refer to other records.
    epoch: int


class SharedProtocol:
    """The keys and scripts of one shared group."""

    def __init__(self, stream: StreamHandle, group: str) -> None:
        self.stream = stream
        self.group = group
        self.prefix = keys.shared(stream.name, group, "")
        #: The stream's incarnation; once the group is open, followed by the group's.
        self.incarnation = stream.incarnation

    def key(self, part: str) -> str:
        return self.prefix + part

    def keys(self, parts: str) -> list[str]:
        return [self.prefix + part for part in parts.split()]

    def whole(self, part: bytes) -> bytes:
        """Return the key of a part whose name contains an ordering key."""
        return self.prefix.encode() + part

    def find(self) -> set[bytes]:
        """Return the names of all existing parts."""
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
        """Raise if the group does not exist. Tolerates flaws in its state.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: The group or the stream was deleted.
        """
        call = self.stream.connector.call
        found = call("HGET", self.meta, "incarnation")
        try:
            state = call("HGET", self.key("state"), "incarnation") or b""
        except AccessDenied:
            raise
        except ServerRefused:
            state = None  # the key is not a hash: fsck reports that
        self.check_incarnations(found, state)

    def check_incarnations(self, stream: bytes | None, group: bytes | None) -> None:
        """Raise unless the stored incarnations are those of this stream and group.

        ``group`` is empty if the group has none, and None if it cannot be read.
        """
        if stream != self.stream.incarnation.encode():
            code = b"INCARNATION" if stream else b"NOSTREAM"
            raise reply_errors.stream_gone(self.stream.name, code)
        found = None if group is None else group.decode(errors="replace")
        if found is not None and self.incarnation not in (found, found.partition(".")[0]):
            raise reply_errors.group_not_found(self.stream.name, self.group)

    @property
    def meta(self) -> str:
        return keys.meta(self.stream.name)

    def join(self, connection: Connection, consumer: str, name: str = "") -> ConsumerState:
        """Join if a name is given; return the consumer as the server knows it.

        Raises:
            Refused: The consumer's lease has expired.
            GroupNotFound, StreamNotFound, LogTruncated: The group or the stream was deleted.
        """
        names = [self.meta, *self.keys(f"state leases consumers held:{consumer} failures")]
        args = [self.incarnation, consumer, name, "join" if name else ""]
        reply = self.check(connection.run(SHARED_JOIN, names, args))
        pairs = zip(reply[2][::2], reply[2][1::2], strict=True)
        counts = iter(map(int, reply[3]))
        return ConsumerState(
            int(reply[1]),
            {key: _offsets(held) for key, held in pairs if key and held},
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
    ) -> StepReply:
        """Take a step (see redis/lua/shared/step); without a consumer, only scan the index.

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
        for key, offsets in acks.items():
            args += [key, ",".join(map(str, offsets))]
        for other in others:
            args += [other.kind, other.ordering_key, b"%d:%b" % (other.offset, other.detail)]
        return _parse_reply(self.check(connection.run(SHARED_STEP, names, args)))

    def check(self, reply: list[Any]) -> list[Any]:
        """Return the reply, or raise the error that its code stands for."""
        match reply[0]:
            case b"OK":
                return reply
            case b"NOGROUP":
                raise reply_errors.group_not_found(self.stream.name, self.group)
            case b"NOSTREAM" | b"INCARNATION":
                raise reply_errors.stream_gone(self.stream.name, reply[0])
            case _:
                raise Refused(reply[0].decode())


def _parse_reply(raw: list[Any]) -> StepReply:
    nxt, end, waiting, bell, wait, base, steps, failed, stored_stop, refused, lost, dropped = raw[
        1:13
    ]
    base = int(base)
    letters = zip(raw[13][::2], raw[13][1::2], strict=True)
    return StepReply(
        next=int(nxt),
        end=int(end),
        waiting=int(waiting),
        bell=int(bell),
        wait_s=int(wait) / 1000 if int(wait) >= 0 else None,
        granted=[base + int(step) for step in steps.split(b",")] if steps else [],
        failures=dict(_pairs(failed)),
        stored_stop=int(stored_stop),
        refused=_offsets(refused),
        lost=list(_pairs(lost)),
        dropped=list(_pairs(dropped)),
        dead_letters=[_dead_letter(int(offset), detail) for offset, detail in letters],
        epoch=int(raw[14]),
    )


def _dead_letter(offset: int, detail: bytes) -> DeadLetter:
    failures, size, rest = detail.split(b":", 2)
    key, reason = rest[: int(size)], rest[int(size) :]
    return DeadLetter(offset, int(failures), key, reason.decode(errors="replace"))


def _offsets(listed: bytes) -> list[int]:
    return [int(offset) for offset in listed.split(b",")] if listed else []


def _pairs(listed: bytes) -> Iterable[tuple[int, int]]:
    if not listed:
        return []
    pairs = (pair.split(b":") for pair in listed.split(b","))
    return [(int(first), int(second)) for first, second in pairs]
