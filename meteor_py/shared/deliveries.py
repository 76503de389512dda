"""One consumer's deliveries: the records that the server grants it, and how it settles them.

The consumer calls the server in steps. Each step has a number that is higher than that of the last
step, so the server never executes a step twice. If a reply is lost, the consumer sends the same
step again and gets the same reply. If the consumer's lease has expired in the meantime, the server
replies with the number of the last step that it executed, as long as it remembers the consumer. The
consumer then knows which settlements took effect.
"""

from __future__ import annotations

import enum
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING

from meteor_py.errors import ConnectionFailed, Fenced, MeteorError
from meteor_py.records.config import check_seconds
from meteor_py.records.ordering_index import OrderingRule
from meteor_py.records.position import newest_epoch
from meteor_py.redis import reply_errors
from meteor_py.redis.shared_connection import SharedConnection
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.shared.ack_timeouts import AckTimeouts, TimeLimit
from meteor_py.shared.config import SharedConfig
from meteor_py.shared.delivered_position import DeliveredPosition
from meteor_py.shared.gaps import Gap, Gaps, Unreadable
from meteor_py.shared.holdings import Holdings
from meteor_py.shared.protocol import (
    ConsumerGone,
    DeadLetter,
    Entry,
    Settlement,
    SharedProtocol,
    StepReply,
    StepRequest,
    UnknownStep,
)
from meteor_py.shared.record import SharedRecord, Standing
from meteor_py.subscribe.lease import TRUSTED_FRACTION

if TYPE_CHECKING:
    from meteor_py.records.codec import Codec
    from meteor_py.records.record import Record
    from meteor_py.redis.connection import Connection

_log = logging.getLogger(__name__)

#: Maximum number of refused steps in one exchange, so that a bug cannot cause an endless loop.
_ROUNDS = 5
#: Maximum number of maintenance calls after one step. If more work is due, the next reply says so.
_PORTIONS = 64
#: Seconds that a signal handler waits for the connection before it briefly releases the lock.
_TURN_S = 0.05
#: Maximum length of a stored failure reason, in characters.
_REASON_MAX = 1_000


class _Stage(enum.Enum):
    #: The consumer has joined, or will join with the next exchange.
    ACTIVE = "active"
    #: The consumer has left the group for good.
    LEFT = "left"
    #: This object is a copy in a forked child. The records belong to the parent.
    FORKED = "forked"


# Module-level names, because looking up an enum member is slower.
_FORKED, _HELD = _Stage.FORKED, Standing.HELD


class Deliveries:
    """One consumer's records, which its threads share. Only ``exchange`` calls the server."""

    def __init__(
        self,
        protocol: SharedProtocol,
        config: SharedConfig,
        ordering_rule: OrderingRule,
        codec: Codec | None,
        name: str,
    ) -> None:
        self.protocol = protocol
        self.config = config
        self.name = name
        self._ordering_rule = ordering_rule
        self._codec = codec
        self._connection = SharedConnection(protocol.stream.open_connection)
        #: Guards ``holdings`` and the fields below. Notified when a waiting thread may have
        #: something to do, for example after a settlement.
        self.condition = SignalSafeCondition()
        self.holdings = Holdings(reject_rewinds=config.on_poison == "park")
        self._ack_timeouts = AckTimeouts()
        #: The time of the first settlement since the last step began; None if there was none.
        self.unsent_since: float | None = None
        #: Whether the application is polling. If it is, settlements are sent sooner, because they
        #: may make records available to the poll.
        self.polling = False
        #: Whether the lease renewer is waiting, so that the next settlement must notify it.
        self.renewer_waits = False
        #: Whether a thread is waiting until fewer records are held.
        self.waits_for_room = False
        self._stage = _Stage.ACTIVE
        self._consumer = ""
        # Not reported to the application yet: offsets of settlements that had no effect, offsets of
        # settlements that may have taken effect, and records that cannot be delivered.
        self._refused: list[int] = []
        self._unknown: list[int] = []
        self._lost = Gaps()
        self._delivered = DeliveredPosition(protocol.stream.incarnation, protocol.stream.epochs)
        # The first and last offset of each loss of delivered records, not reported yet either.
        self._truncated: list[tuple[int, int]] = []
        #: The last reply, if the server will wake this consumer when there are records; otherwise
        #: None.
        self.idle: StepReply | None = None
        #: An error in the lease renewer, to be raised in the application.
        self.failure: MeteorError | None = None
        #: Dead letters that this consumer is to publish.
        self.dead_letters: list[DeadLetter] = []
        #: The time (``clock.now()``) until which no other consumer can get this consumer's records.
        self.valid_until = 0.0
        #: The time at which the last step that got a reply was sent.
        self.spoke_at = 0.0
        #: The time at which the application last polled or settled a record.
        self.alive_at = now()

    @property
    def consumer(self) -> str:
        """The id of this consumer in the group; empty while it is not a member."""
        return self._consumer

    # -- for the application -------------------------------------------------------------------

    def ack(self, record: SharedRecord) -> None:
        with self.condition:
            self._check_held(record)
            self.holdings.ack((record,))
            if self.unsent_since is None or self.renewer_waits or self.waits_for_room:
                self._notify()

    def release(
        self,
        record: SharedRecord,
        delay: float,
        *,
        only_this: bool = False,
        failed: bool = True,
        reason: str = "",
    ) -> None:
        check_seconds("delay", delay, zero=True)
        if only_this and delay:
            raise ValueError(
                "release() got both only_this and a delay, but a delay applies to the whole "
                "ordering key. Omit one of the two."
            )
        detail = b"%d:%b" % (delay * 1000, _encoded(reason))
        self._settle(record, "R" if failed else "U", detail, alone=only_this)

    def reject(self, record: SharedRecord, reason: str) -> None:
        self._settle(record, "X", _encoded(reason))

    def extend(self, record: SharedRecord, seconds: float) -> None:
        """Keep a record for at least this many seconds from now."""
        check_seconds("seconds", seconds)
        with self.condition:
            self._check_held(record)
            record.extended_until = max(record.extended_until, now() + seconds)
            if record.extended_until > record.deadline:
                record.deadline = record.extended_until
                record.time_limit = TimeLimit("extend", seconds)

    def settle_all(
        self, records: Iterable[SharedRecord], settle: Callable[[SharedRecord], None]
    ) -> None:
        """Settle the records that are still held."""
        with self.condition:
            for record in records:
                if record.standing is Standing.HELD:
                    settle(record)

    def settle_batch(
        self, records: Sequence[SharedRecord], settle: Callable[[SharedRecord], None]
    ) -> list[SharedRecord]:
        """Settle the records that the consumer still holds.

        Returns:
            The other records, which had already gone back to the group.

        Raises:
            ValueError: One of the records was already settled, or belongs to another consumer. The
                call then settles none of them.
        """
        with self.condition:
            others = self._check_batch(records)
            self.settle_all(sorted(set(records), key=attrgetter("offset")), settle)
        return others

    def ack_batch(self, records: Sequence[SharedRecord]) -> list[SharedRecord]:
        """Acknowledge the records that are still held; return the others.

        Raises:
            ValueError: As for ``settle_batch``.
        """
        with self.condition:
            others = self._check_batch(records)
            self.holdings.ack(records)
            self.alive_at = now()
            self._notify()
        return others

    def _check_batch(self, records: Sequence[SharedRecord]) -> list[SharedRecord]:
        """Return the records that are neither held nor settled. The caller holds the lock.

        Raises:
            ValueError: As for ``settle_batch``.
        """
        if self._stage is _FORKED:
            raise reply_errors.opened_before_fork(self.protocol.stream.name)
        others: list[SharedRecord] = []
        for record in records:
            if record._deliveries is not self:
                raise ValueError(f"Record {record.offset} belongs to another consumer.")
            if record.standing is not _HELD:
                if record.standing is Standing.SETTLED:
                    raise _settled_before(record)
                others.append(record)
        return others

    def deliver(self, records: Sequence[SharedRecord], limit: TimeLimit) -> list[SharedRecord]:
        """Start the time limit for records that the application is about to get.

        Args:
            records: In the order of their offsets.
            limit: Their time limit.

        Returns:
            The records that are still held. The caller must not pass others to the application.
        """
        with self.condition:
            held = [record for record in records if record.standing is _HELD]
            if held:
                self._delivered.advance(held[-1].offset)
            if self._ack_timeouts.start(held, limit):
                self.condition.notify_all()  # the lease renewer must not wait past the deadline
        return held

    def expire_records(self) -> float:
        """Give records back to the group if their time limit has expired.

        Return the number of seconds until another time limit may expire. The caller holds the
        lock.
        """
        for record in self._ack_timeouts.expired(self.holdings.held()):
            if record.standing is not Standing.HELD:
                continue  # rewound with an earlier record of its key
            assert record.time_limit is not None, "a record with a deadline has a time limit"
            setting, seconds = record.time_limit
            reason = f"It was not settled within {seconds:g} seconds ({setting})."
            self.holdings.settle(record, "R", b"0:%b" % _encoded(reason))
            record.standing = Standing.EXPIRED
            _log.error(
                "Record %d of stream %r was not settled within %g seconds (%s). The consumer "
                "returned it to shared group %r as failed.",
                *(record.offset, self.protocol.stream.name, seconds, setting, self.protocol.group),
            )
        return self._ack_timeouts.due_s()

    def extended(self) -> bool:
        """Whether an ``extend`` of a held record is still in effect. The caller holds the lock."""
        time = now()
        return any(record.extended_until > time for record in self.holdings.held())

    def receive(
        self,
        records: Mapping[int, Record],
        lost: Iterable[int],
        unreadable: Mapping[int, Unreadable] | None = None,
    ) -> list[SharedRecord]:
        """Hold the granted records that were fetched, and return them.

        Also settle the granted records that are lost or unreadable.
        """
        with self.condition:
            # Use a copy: a signal handler may close the subscriber, which clears the original.
            granted = self.holdings.granted.copy()
            failures = map(granted.get, records, repeat(0))
            received = self.holdings.receive(
                map(
                    SharedRecord,
                    *(repeat(self), repeat(self._codec), records.values(), records, failures),
                )
            )
            causes: dict[int, Unreadable | None] = {**dict.fromkeys(lost), **(unreadable or {})}
            for offset, cause in causes.items():
                if self.holdings.lose(offset):
                    self._lost.add(offset, offset, cause)
        return received

    def dead_letter_settled(self, letter: DeadLetter, history: str | None) -> None:
        """Settle a dead letter, unless a failover has withdrawn it from this consumer.

        ``history`` is the server's replication history in which the dead letter was published, or
        '' if the dead letter is on another node. It is None if the record is lost or unreadable.
        """
        lost = history is None
        detail = b"" if history is None else history.encode()
        with self.condition:
            if letter in self.dead_letters:
                self.dead_letters.remove(letter)
                self.holdings.add(Settlement("L" if lost else "D", 0, (letter.offset,), detail))
                self._notify()

    def raise_failure(self) -> None:
        """Raise the lease renewer's error once, if there is one."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure.with_traceback(None)

    def take_refused(self) -> list[int]:
        """Remove and return the offsets of refused settlements."""
        with self.condition:
            refused, self._refused = self._refused, []
        return sorted(refused)

    def take_unknown(self) -> list[int]:
        """Remove and return the offsets of settlements that may have taken effect."""
        with self.condition:
            unknown, self._unknown = self._unknown, []
        return sorted(unknown)

    def take_lost(self) -> Gap | None:
        """Remove and return the first unreported gap."""
        with self.condition:
            return self._lost.take()

    def take_truncated(self) -> tuple[int, int] | None:
        """Remove and return the first unreported loss of delivered records."""
        with self.condition:
            return self._truncated.pop(0) if self._truncated else None

    def note_lost(self, offset: int, cause: Unreadable | None) -> None:
        with self.condition:
            self._lost.add(offset, offset, cause)

    # -- with the server -----------------------------------------------------------------------

    def exchange(
        self,
        want: int = 0,
        *,
        leave: bool = False,
        mode: str = "",
        entry: Entry | None = None,
    ) -> StepReply:
        """Send settlements, renew the lease and claim records.

        Args:
            want: The maximum number of records to claim.
            leave: Return all held records and leave the group.
            mode: See ``StepRequest``.
            entry: A replacement for an entry that the index lacks.

        Raises:
            ConnectionFailed: The server did not reply. The next exchange finds out whether it
                executed the step.
            GroupNotFound, StreamNotFound: The group or the stream was deleted.
            LogTruncated: The stream was deleted and recreated.
        """
        most = want + len(self.holdings)
        exchange = partial(
            self._exchange, want=want, most=most, leave=leave, mode=mode, entry=entry
        )

        def work(connection: Connection) -> StepReply:
            return connection.retry_redirected(exchange, connection)

        while self.condition.is_mine():
            # This is a signal handler that interrupted its thread while that thread held the lock.
            # If another thread is using the connection, it may need the lock, so release the lock
            # now and then.
            try:
                return self._connection.use(work, timeout_s=_TURN_S)
            except TimeoutError:
                with self.condition:
                    self.condition.wait(_TURN_S / 10)
        return self._connection.use(work)

    def talks_here(self) -> bool:
        """Whether the caller is a signal handler that interrupted an exchange in this thread."""
        return self._connection.is_mine()

    @property
    def exchanging(self) -> bool:
        """Whether a thread is in the middle of an exchange."""
        return self._connection.busy

    def close(self) -> None:
        self._connection.close()

    def abandon(self) -> None:
        """Drop everything in a forked child, because the records belong to the parent."""
        self.condition = SignalSafeCondition()
        self.holdings = Holdings(reject_rewinds=False)
        self._stage = _Stage.FORKED

    def _exchange(
        self,
        connection: Connection,
        want: int,
        most: int,
        leave: bool,
        mode: str,
        entry: Entry | None,
    ) -> StepReply:
        refusals_left, maintained = _ROUNDS, False
        # Terminates: each step sends more settlements, and only the last one claims records.
        while refusals_left:
            self._join(connection)
            self._drop_lost_letters(connection)
            with self.condition:
                # A repeated step, perhaps in another thread, may have granted records meanwhile.
                room = max(most - len(self.holdings), 0)
                request, last = self.holdings.begin_step(min(want, room), mode, entry)
                self.unsent_since = None
            started = now()
            try:
                reply = self.protocol.step(connection, self._consumer, request)
            except ConsumerGone as gone:
                self._fence(gone)
            except UnknownStep as step:
                batches = self.protocol.batches(self._consumer, connection)
                held = {number: [o for o, _ in batch] for number, batch in batches.items()}
                with self.condition:
                    self._refused += self.holdings.reconcile(step.number, held)
                    self.dead_letters.clear()  # the server reassigns those that it still has
            except MeteorError as error:
                if not isinstance(error, ConnectionFailed) or error.answered:
                    with self.condition:
                        self.holdings.withdraw_step()  # the server changed nothing
                raise
            else:
                self._check_delivered(connection, reply)
                self._apply(reply, request, started)
                if last:
                    self._maintain(connection, leave=leave, due=reply.maintenance_due)
                    if maintained or leave or not (want and reply.maintenance_due) or reply.granted:
                        return reply
                    maintained = True  # claim again: maintenance may have made records available
                continue
            refusals_left -= 1
        raise ConnectionFailed(
            f"The server refused {_ROUNDS} requests from this consumer in shared group "
            f"{self.protocol.group!r}. Try again, or open another consumer."
        )

    def _check_delivered(self, connection: Connection, reply: StepReply) -> None:
        """Note the delivered records that the server has lost, before the reply is applied.

        All records that the consumer still holds exist on this server. It has either granted them
        itself, or replicated the steps that granted them. A failover that loses a record also loses
        the step that granted it, and ``reconcile`` or ``_fence`` then drops the record.
        """
        with self.condition:
            if self._delivered.is_valid(reply.epoch, reply.end):
                return
        epochs, end = self.protocol.read_epochs(connection)
        if newest_epoch(epochs) != reply.epoch:  # the next exchange repeats the step
            raise ConnectionFailed(
                f"The server for stream {self.protocol.stream.name!r} is failing over. Try again."
            )
        with self.condition:
            self.dead_letters.clear()  # their offsets may now refer to other records
            self.holdings.drop_letters()
            truncated = self._delivered.loss(epochs, end)
            if truncated is not None and truncated not in self._truncated:
                self._truncated.append(truncated)
            if truncated is not None:
                # The error about this loss also covers the settlements of the lost records.
                self._refused = [o for o in self._refused if o < truncated[0]]
                self._unknown = [o for o in self._unknown if o < truncated[0]]
            # Enter the epoch last: after that, the next exchange considers the delivered position
            # valid and skips this block. A Ctrl-C in this block only makes it run again.
            self._delivered.enter(epochs, end)

    def _apply(self, reply: StepReply, request: StepRequest, started: float) -> None:
        report, entry = reply.report, request.entry
        with self.condition:
            if self.holdings.request is not request:
                return  # a signal handler has sent the step again and applied the reply
            self.holdings.apply(reply, request)
            self.spoke_at = started
            self.valid_until = started + self.config.lease_ttl * TRUSTED_FRACTION
            self._refused += [o for o in report.refused if o not in self._refused]
            for first, last in report.lost:
                self._lost.add(first, last, entry.cause if entry and entry.covers(first) else None)
            if request.want or request.mode == "busy":
                self.idle = reply if reply.idle else None
            if self._stage is _Stage.LEFT:
                self.holdings.take_all()  # a signal handler has just closed the subscriber
            self.holdings.end_step()  # must be last: a Ctrl-C may interrupt the lines above
        self._log_dropped(report.dropped)

    def _maintain(self, connection: Connection, *, leave: bool, due: bool) -> None:
        """Do the maintenance that is due, one portion per call, or leave the group."""
        portions = 0
        while leave or (due and portions < _PORTIONS):
            try:
                done = self.protocol.maintain(connection, self._consumer, leave=leave)
            except ConsumerGone:
                break  # the lease has expired, which the next step will detect
            with self.condition:
                # If a dead letter is not published within lease_ttl, the server assigns it again.
                # List it only once.
                self.dead_letters += [
                    letter for letter in done.dead_letters if letter not in self.dead_letters
                ]
            self._log_dropped(done.dropped)
            due, portions = done.due, portions + 1
            if done.left:
                break
        if leave:
            with self.condition:
                self.holdings.take_all()
                self._consumer, self._stage = "", _Stage.LEFT

    def _log_dropped(self, dropped: Iterable[tuple[int, int]]) -> None:
        for offset, failures in dropped:
            _log.warning(
                "Shared group %r discarded record %d of stream %r after %d failures, because the "
                "group has no dead_letter stream.",
                *(self.protocol.group, offset, self.protocol.stream.name, failures),
            )

    def _join(self, connection: Connection) -> None:
        """Join the group, unless this consumer is already a member."""
        if self._stage is _Stage.LEFT:  # it left while this thread waited for the connection
            raise ConnectionFailed(f"This consumer has left shared group {self.protocol.group!r}.")
        while not self._consumer:
            consumer = secrets.token_urlsafe(6)[:6]
            if self.protocol.join(connection, consumer, self.name):
                self.holdings.start()
                self._consumer = consumer

    def _fence(self, gone: ConsumerGone) -> None:
        """Drop all records and pending settlements, because the lease has expired."""
        with self.condition:
            void, unknown = self.holdings.fence(gone.step, gone.report)
            self._refused += void
            self._unknown += unknown
            self._consumer, self.idle = "", None

    def _drop_lost_letters(self, connection: Connection) -> None:
        """Drop the settlements of dead letters that a failover may have lost.

        The server assigns such dead letters again after ``lease_ttl``, and publishing them again is
        harmless.
        """
        if self.holdings.has_letters:
            history = connection.refresh_history().encode()
            with self.condition:
                self.holdings.keep_letters(history)

    # -- internals -----------------------------------------------------------------------------

    def _settle(
        self, record: SharedRecord, kind: str, detail: bytes, *, alone: bool = False
    ) -> None:
        with self.condition:
            self._check_held(record)
            self.holdings.settle(record, kind, detail, alone=alone)
            self._notify()

    def _check_held(self, record: SharedRecord) -> None:
        """Raise an error unless this consumer may settle the record. The caller holds the lock."""
        if self._stage is _FORKED:
            raise reply_errors.opened_before_fork(self.protocol.stream.name)
        if record.standing is not _HELD:
            if record.standing is Standing.SETTLED:
                raise _settled_before(record)
            raise self.not_held([record])
        self.alive_at = now()

    def not_held(self, records: Sequence[SharedRecord]) -> Fenced:
        """Return the error for records that are neither held nor settled."""
        names = (self.protocol.stream.name, self.protocol.group)
        offsets = sorted(record.offset for record in records)
        standings = {record.standing for record in records}
        limit = records[0].time_limit
        if standings == {Standing.REWOUND}:
            return reply_errors.records_rewound(*names, offsets)
        if standings == {Standing.EXPIRED} and limit is not None:
            return reply_errors.records_timed_out(*names, offsets, *limit)
        return reply_errors.records_fenced(*names, offsets)

    def _notify(self) -> None:
        """Wake the lease renewer, and threads that wait for room. The caller holds the lock."""
        is_first = self.unsent_since is None
        if is_first:
            self.unsent_since = now()
        if self.renewer_waits or self.waits_for_room or (is_first and self.polling):
            self.renewer_waits = False
            self.condition.notify_all()

    def ordering_key(self, record: Record) -> bytes:
        """Return the ordering key of a record, or the key that a keyless record gets."""
        key = self._ordering_rule.key_of(record)
        if key:
            return key
        if self.config.keyless == "free":
            return b"\0%d" % record.offset
        return self.config.default_key.encode()


def _encoded(reason: str) -> bytes:
    return reason[:_REASON_MAX].encode(errors="backslashreplace")


def _settled_before(record: SharedRecord) -> ValueError:
    return ValueError(f"Record {record.offset} was already settled. Settle each record once.")
