"""Calls to a shared group's Lua scripts: join, step, maintain and convert."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from meteor_py.errors import AccessDenied, MeteorError, ServerRefused
from meteor_py.records.config import OFFSET_MAX, RECORD_BYTES_LIMIT
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import Connection
from meteor_py.redis.scripts import SHARED_CONVERT, SHARED_JOIN, SHARED_MAINTAIN, SHARED_STEP
from meteor_py.shared.group_state import read_batch, read_line

if TYPE_CHECKING:
    from meteor_py.log.handle import StreamHandle

#: The keys that the step and maintenance scripts take after the stream's keys.
_PARTS = (
    "meta members keys waiting ready blocked delayed leases idle unsettled failures letters dying "
    "purges"
)


#: Number of elements to read from a collection with one command.
PORTION = 200

#: The eight numbers in a reply from ``shared/step``.
_NUMBERS = struct.Struct("<8d")


class ConsumerGone(Exception):
    """The consumer's lease has expired, and other consumers may have its records."""

    def __init__(self, step: int, report: StepReport) -> None:
        super().__init__()
        #: The last step that the server executed; -1 if it does not know the consumer.
        self.step = step
        self.report = report


class UnknownStep(Exception):
    """The server expects another step number: a failover has lost steps."""

    def __init__(self, number: int) -> None:
        super().__init__()
        #: The last step that the server knows.
        self.number = number


class Entry(NamedTuple):
    """A replacement for an entry that the index lacks.

    It was built from records in the store or the ring, or it declares the records lost.
    """

    first: int
    #: The output of ``OrderingRule.index_rows``; empty if the records are lost or unreadable.
    strings: tuple[bytes, ...]
    #: The offset after the last record.
    stop: int
    #: Why the records cannot be read, if they exist but are unreadable; otherwise None.
    cause: MeteorError | None = None

    def covers(self, offset: int) -> bool:
        return self.first <= offset < self.stop


class DeadLetter(NamedTuple):
    """A record to publish as a dead letter."""

    offset: int
    failures: int
    ordering_key: bytes
    reason: str


class Settlement(NamedTuple):
    """The settlement of one record, or the acknowledgement of several records in a batch."""

    #: "A": acknowledged; "R": failed; "U": returned without a failure; "X": rejected; "G": lost or
    #: unreadable; "D": dead letter published (``detail`` is the history in which the server stored
    #: it); "L": dead letter whose record is lost or unreadable. The detail of "R" and "U" is "delay
    #: in ms:reason", and the detail of "X" is the reason.
    kind: str
    #: The number of the record's batch; 0 for a dead letter.
    batch: int
    offsets: tuple[int, ...]
    detail: bytes = b""
    #: The ordering key that this settlement rewinds to the record's offset; None if it rewinds no
    #: key.
    rewinds: bytes | None = None
    #: False if the record is returned only because an earlier record of its key is returned.
    asked_for: bool = True

    @property
    def asked(self) -> tuple[int, ...]:
        """The offsets that the application settled, to be reported if the server refuses them."""
        return self.offsets if self.asked_for and self.kind not in "GDL" else ()

    def arguments(self) -> tuple[str, int | str, bytes]:
        """Return the three arguments of ``shared/step`` that encode this settlement."""
        listed = ",".join(map(str, self.offsets)).encode()
        detail = b"" if self.kind in "AGDL" else b":" + self.detail
        return self.kind, self.batch or "", listed + detail


class StepRequest(NamedTuple):
    """One step. If its reply is lost, the consumer sends it again, but the server runs it once."""

    #: The number of this step. It is one higher than the last one, unless numbers are ``skipped``.
    number: int
    want: int = 0
    #: "wait" if the consumer will wait for a wake-up in case it gets no records, "busy" if it no
    #: longer waits.
    mode: str = ""
    #: The batches to acknowledge as a whole.
    acks: tuple[int, ...] = ()
    #: Other settlements, partial acknowledgements first.
    settlements: tuple[Settlement, ...] = ()
    entry: Entry | None = None
    #: How many numbers were left out between the last step and this one.
    skipped: int = 0


class StepReport(NamedTuple):
    """The report of a step, which the server repeats if its first reply was lost."""

    #: Failure counts of granted records that have failed before.
    failures: dict[int, int]
    #: Offsets whose settlements were refused, because the batch no longer has them.
    refused: list[int]
    #: First and last offset of each range of lost or unreadable records.
    lost: list[tuple[int, int]]
    #: Offset and failure count of records that were discarded without a dead letter.
    dropped: list[tuple[int, int]]

    @classmethod
    def parse(cls, raw: bytes) -> StepReport:
        if not raw:
            return cls({}, [], [], [])
        failed, refused, lost, dropped = raw.split(b";")
        offsets = [int(offset) for offset in refused.split(b",")] if refused else []
        return cls(dict(_pairs(failed)), offsets, _pairs(lost), _pairs(dropped))


@dataclass(frozen=True)
class StepReply:
    """The server's reply to a step."""

    #: The first offset that was not scanned.
    next: int
    #: The end of the stream.
    end: int
    #: The granted offsets by batch.
    batches: dict[int, list[int]]
    report: StepReport
    #: The index lacks the records from ``next`` up to this offset, but the store or the ring may
    #: have them. 0 if there are no such records.
    stored_stop: int
    #: Whether maintenance is due.
    maintenance_due: bool
    #: Whether the server will wake this consumer. If false and nothing was granted, claim again.
    idle: bool
    #: Whether this consumer watches the index and the clock on behalf of all idle consumers.
    watches: bool
    #: Seconds until maintenance is due. None means that it is never due, or that this consumer does
    #: not watch. 0 means unknown, because the server repeated an earlier reply.
    wait_s: float | None
    #: The stream's epoch. In another epoch, offsets may refer to other records.
    epoch: int
    #: The end of the last large frame, and the largest frame's size in bytes (see ``_append.lua``).
    large: tuple[int, int]

    @property
    def repeated(self) -> bool:
        """Whether an earlier call executed this step. If so, parts of the reply may be outdated."""
        return self.wait_s == 0

    @property
    def granted(self) -> int:
        """Number of records granted."""
        return sum(map(len, self.batches.values()))


class Maintenance(NamedTuple):
    """The server's reply to a ``maintain`` call."""

    #: Whether another call is needed.
    due: bool
    dead_letters: list[DeadLetter]
    #: Whether the consumer has left.
    left: bool
    dropped: list[tuple[int, int]]


class SharedProtocol:
    """The keys and scripts of one shared group."""

    def __init__(self, stream: StreamHandle, group: str) -> None:
        self.stream = stream
        self.group = group
        self.prefix = keys.shared(stream.name, group, "")
        #: The stream's incarnation. Once the group is open, a dot and the group's id follow.
        self.incarnation = stream.incarnation
        #: Whether the state is known to have the current format.
        self.converted = False

    def key(self, part: str) -> str:
        return self.prefix + part

    def keys(self, parts: str) -> list[str]:
        return [self.prefix + part for part in parts.split()]

    def whole(self, part: bytes) -> bytes:
        """Return the key of a part whose name contains arbitrary bytes."""
        return self.prefix.encode() + part

    def find(self) -> set[bytes]:
        """Return the names of all existing parts."""
        size = len(self.prefix)
        return {key[size:] for key in self.stream.connector.find_keys(self.prefix)}

    def scan(
        self, command: str, part: str, connection: Connection | None = None
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield the pairs of a hash (HSCAN) or a sorted set (ZSCAN) in chunks.

        A pair may appear more than once. Pairs that are added or removed during the scan may be
        missed.
        """
        call = self.stream.connector.call if connection is None else connection.call
        cursor = b"0"
        while True:
            cursor, flat = call(command, self.key(part), cursor, "COUNT", PORTION)
            yield list(zip(flat[::2], flat[1::2], strict=True))
            if cursor == b"0":
                return

    def require(self) -> None:
        """Raise an error if the group does not exist. Tolerates flaws in the group's state.

        Raises:
            GroupNotFound, StreamNotFound: The group or the stream was deleted.
            LogTruncated: The stream was deleted and recreated.
        """
        self.ensure_converted()
        call = self.stream.connector.call
        found = call("HGET", self.meta, "incarnation")
        try:
            state = call("HGET", self.key("meta"), "incarnation") or b""
        except AccessDenied:
            raise
        except ServerRefused:
            state = None  # the key is not a hash: fsck reports that
        self.check_incarnations(found, state)

    def check_incarnations(self, stream: bytes | None, group: bytes | None) -> None:
        """Raise an error unless the stored incarnations match this stream and group.

        ``group`` is empty if the group has no incarnation, and None if it cannot be read.
        """
        if stream != self.stream.incarnation.encode():
            code = b"INCARNATION" if stream else b"NOSTREAM"
            raise reply_errors.stream_gone(self.stream.name, code)
        found = None if group is None else group.decode(errors="replace")
        if found is not None and self.incarnation not in (found, found.partition(".")[0]):
            raise reply_errors.group_not_found(self.stream.name, self.group)

    @property
    def meta(self) -> str:
        """The key of the stream's meta."""
        return keys.meta(self.stream.name)

    def join(self, connection: Connection, consumer: str, name: str) -> bool:
        """Join the group; return False if another consumer has that id. Safe to repeat.

        Raises:
            GroupNotFound, StreamNotFound: The group or the stream was deleted.
            LogTruncated: The stream was deleted and recreated.
        """
        names = [self.meta, *self.keys(f"meta members leases batches:{consumer}")]
        reply = connection.run(SHARED_JOIN, names, [self.incarnation, consumer, name])
        return reply[0] != b"TAKEN" and bool(self.check(reply))

    def step(self, connection: Connection, consumer: str, request: StepRequest) -> StepReply:
        """Execute a step. If the server has executed it before, get the earlier reply again.

        Raises:
            ConsumerGone: The consumer's lease has expired.
            UnknownStep: The server expects another number.
            GroupNotFound, StreamNotFound: The group or the stream was deleted.
            LogTruncated: The stream was deleted and recreated.
        """
        number, want, mode, acks, settlements, entry, skipped = request
        names, args = self._call(consumer)
        args.append(f"{number}:{number - skipped - 1}" if skipped else number)
        args += [mode, want, ",".join(map(str, acks))]
        if entry is None:
            args += ["", "", ""]
        elif entry.strings:
            args += [entry.first, *entry.strings]
        else:
            args += [entry.first, "lost", entry.stop]
        for settlement in settlements:
            args += settlement.arguments()
        return _parse_reply(self.check(connection.run(SHARED_STEP, names, args)))

    def read_epochs(self, connection: Connection) -> tuple[str, int]:
        """Return the stream's epoch table and its end.

        Raises:
            StreamNotFound: The stream was deleted.
            LogTruncated: The stream was deleted and recreated.
        """
        fields = ("incarnation", "epochs", "next")
        incarnation, epochs, end = connection.call("HMGET", self.meta, *fields)
        reply_errors.check_incarnation(self.stream.name, self.stream.incarnation, incarnation)
        return epochs.decode(), int(end)

    def maintain(
        self, connection: Connection, consumer: str, *, leave: bool = False
    ) -> Maintenance:
        """Do one portion of the maintenance, or of leaving the group. Safe to repeat.

        Raises the same errors as ``step``, except ``UnknownStep``.
        """
        names, args = self._call(consumer)
        args.append("leave" if leave else "")
        _, due, letters, staying, dropped = self.check(connection.run(SHARED_MAINTAIN, names, args))
        pairs = zip(letters[::2], letters[1::2], strict=True)
        found = [_dead_letter(int(offset), detail) for offset, detail in pairs if detail]
        return Maintenance(bool(due), found, not staying, _pairs(dropped))

    def batches(
        self, consumer: str, connection: Connection | None = None
    ) -> dict[int, list[tuple[int, bytes]]]:
        """Return the offsets and ordering keys of the records that a consumer holds, by batch."""
        portions = self.scan("HSCAN", f"batches:{consumer}", connection)
        return {int(number): read_batch(raw) for portion in portions for number, raw in portion}

    def ensure_converted(self) -> None:
        """Convert the state if a release before 0.3 wrote it."""
        if self.converted:
            return
        call = self.stream.connector.call
        try:
            progress, unfinished = call("HMGET", self.key("meta"), "progress", "converting")
        except ServerRefused:
            return  # the key is not a hash: fsck reports that
        if unfinished or (progress is None and call("TYPE", self.key("state")) == b"hash"):
            self.convert()
        self.converted = True

    def convert(self) -> None:
        """Convert the state that a release before 0.3 wrote, one portion per script call."""
        names = [self.meta, *self.keys(_PARTS)]
        while True:
            args = [self.stream.incarnation, self.prefix]
            reply = self.check(self.stream.connector.run(SHARED_CONVERT, names, args))
            if not reply[1]:
                return

    def check(self, reply: list[Any]) -> list[Any]:
        """Return the reply, or raise the error that its code stands for."""
        match reply[0]:
            case b"OK" | b"AGAIN":
                return reply
            case b"NOGROUP":
                raise reply_errors.group_not_found(self.stream.name, self.group)
            case b"NOSTREAM" | b"INCARNATION":
                raise reply_errors.stream_gone(self.stream.name, reply[0])
            case b"FENCED":
                raise ConsumerGone(int(reply[1]), StepReport.parse(reply[2]))
            case b"REPEAT":
                raise UnknownStep(int(reply[1]))
            case code:
                raise ServerRefused(
                    f"A script refused a call for shared group {self.group!r}: {code.decode()}. "
                    "Check that all consumers of the group run the same version of meteor-py."
                )

    def _call(self, consumer: str) -> tuple[list[str], list[Any]]:
        names = [self.meta, keys.index(self.stream.name)]
        names += self.keys(f"{_PARTS} batches:{consumer} more:{consumer}")
        return names, [self.prefix, self.incarnation, consumer]


def _parse_reply(raw: list[Any]) -> StepReply:
    _, numbers, lines, report, large = raw
    nxt, end, first, stored_stop, due, idle, wait, epoch = map(int, _NUMBERS.unpack(numbers))
    return StepReply(
        next=nxt,
        end=end,
        batches={number: read_line(line) for number, line in enumerate(lines, first) if line},
        report=StepReport.parse(report),
        stored_stop=stored_stop,
        maintenance_due=bool(due),
        idle=idle > 0,
        watches=idle == 2,
        wait_s=wait / 1000 if wait >= 0 else None,
        epoch=epoch,
        large=_parse_large(large),
    )


def _parse_large(large: bytes | None) -> tuple[int, int]:
    """Parse ``large``. Older releases did not write it, and their frames may have any size."""
    end, _, size = (large or b"").partition(b":")
    return (int(end), int(size)) if size else (OFFSET_MAX, RECORD_BYTES_LIMIT)


def _dead_letter(offset: int, detail: bytes) -> DeadLetter:
    failures, size, rest = detail.split(b":", 2)
    key, reason = rest[: int(size)], rest[int(size) :]
    return DeadLetter(offset, int(failures), key, reason.decode(errors="replace"))


def _pairs(listed: bytes) -> list[tuple[int, int]]:
    pairs: Iterable[list[bytes]] = (pair.split(b":") for pair in listed.split(b",") if pair)
    return [(int(first), int(second)) for first, second in pairs]
