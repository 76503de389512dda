"""The deliveries of one consumer: its exchanges with the server about what it holds and settles.

Each step has a number, one above the last that the server knows of this consumer, so the server
never takes a step twice. If a reply is lost, the consumer asks for its state, which
``SharedProtocol.join`` returns, and adopts it: the server decides which consumer holds a record.
"""

from __future__ import annotations

import enum
import logging
import secrets
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from meteor_py.errors import ConnectionFailed, MeteorError
from meteor_py.records.config import check_seconds
from meteor_py.records.ordering_index import OrderingRule
from meteor_py.redis import reply_errors
from meteor_py.redis.shared_connection import SharedConnection
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.shared.config import SharedConfig
from meteor_py.shared.gaps import Gap, Gaps, Unreadable
from meteor_py.shared.holdings import Holdings, Sync
from meteor_py.shared.protocol import (
    DeadLetter,
    Entry,
    Refused,
    Settlement,
    SharedProtocol,
    StepReply,
)
from meteor_py.shared.record import SharedRecord, Standing
from meteor_py.subscribe.lease import BELIEF

if TYPE_CHECKING:
    from meteor_py.records.codec import Codec
    from meteor_py.records.record import Record
    from meteor_py.redis.connection import Connection

_log = logging.getLogger(__name__)

#: Refused steps in one exchange, more than anything but an error can cause.
_ROUNDS = 5
#: Seconds to wait for the connection before the lock is let go.
_TURN_S = 0.05
#: Characters of a reason that are kept.
_REASON_MAX = 1_000


class _Stage(enum.Enum):
    #: A consumer, or about to join as one with the next exchange.
    ACTIVE = "active"
    #: It has left the group for good.
    LEFT = "left"
    #: In a forked child: everything is the parent's.
    FORKED = "forked"


class Deliveries:
    """For several threads. ``exchange`` talks to the server, nothing else does."""

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
        self._connection = SharedConnection(protocol.stream.connector.open_connection)
        #: Guards ``holdings``; notified when something is settled.
        self.condition = SignalSafeCondition()
        self.holdings = Holdings(reject_rewinds=config.on_poison == "park")
        self._notified = False  # since the last step
        #: A thread waits until less is held.
        self.waits_for_room = False
        self._stage = _Stage.ACTIVE
        self._consumer = ""
        # Offsets of settlements that were refused, and what was lost, until the application knows.
        self._refused: list[int] = []
        self._lost = Gaps()
        #: An error of the lease renewer, for the application.
        self.failure: MeteorError | None = None
        #: Dead letters to publish.
        self.dead_letters: list[DeadLetter] = []
        #: Until then, by ``clock.now()``, no other consumer is given what is held here.
        self.valid_until = 0.0
        #: The last step that was answered was sent then.
        self.spoke_at = 0.0
        #: The application polled or settled something then.
        self.alive_at = now()

    # -- for the application -------------------------------------------------------------------

    def ack(self, record: SharedRecord) -> None:
        with self.condition:
            self._check_held(record)
            self.holdings.ack(record)
            self._notify()

    def release(
        self, record: SharedRecord, delay: float, *, only_this: bool = False, failed: bool = True
    ) -> None:
        check_seconds("delay", delay, zero=True)
        if only_this and delay:
            raise ValueError(
                "A delay is for a whole ordering key; leave out delay, or only_this, in release()."
            )
        kind = "Q" if only_this else "R" if failed else "U"
        self._settle(record, kind, b"%d" % (delay * 1000))

    def reject(self, record: SharedRecord, reason: str) -> None:
        self._settle(record, "X", reason[:_REASON_MAX].encode(errors="backslashreplace"))

    def settle_all(self, *, handed: Iterable[SharedRecord], ack: bool) -> None:
        """Acknowledge, or return, those of some records that are still held."""
        with self.condition:
            for record in handed:
                if record.standing is Standing.HELD:
                    if ack:
                        self.ack(record)
                    else:
                        self.release(record, 0.0, only_this=False)

    def receive(
        self,
        records: Mapping[int, Record],
        lost: Iterable[int],
        unreadable: Mapping[int, Unreadable] | None = None,
    ) -> list[SharedRecord]:
        """Hold records that were granted and fetched; settle those that are lost or unreadable.

        None of them, while it is not known which are still this consumer's: see
        ``Holdings.unsure``.
        """
        with self.condition:
            granted = self.holdings.granted
            received = self.holdings.receive(
                SharedRecord(self, record, self._key_of(record), granted[offset], self._codec)
                for offset, record in records.items()
                if offset in granted
            )
            causes: dict[int, Unreadable | None] = {**dict.fromkeys(lost), **(unreadable or {})}
            for offset, cause in causes.items():
                if self.holdings.lose(offset):
                    self._lost.add(offset, offset, cause)
        return received

    def dead_letter_published(self, letter: DeadLetter, *, lost: bool = False) -> None:
        """Say that a dead letter needs no publishing any more, perhaps as its record is lost."""
        with self.condition:
            self.holdings.say(Settlement("L" if lost else "D", b"", letter.offset))
            self._notify()

    def raise_failure(self) -> None:
        """Raise an error of the lease renewer, once."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure.with_traceback(None)

    def take_refused(self) -> list[int]:
        """Return the offsets of settlements that were refused, once."""
        with self.condition:
            refused, self._refused = self._refused, []
        return sorted(refused)

    def take_lost(self) -> Gap | None:
        """Return a gap that was not reported yet, once."""
        with self.condition:
            return self._lost.take()

    def note_lost(self, offset: int, cause: Unreadable | None) -> None:
        with self.condition:
            self._lost.add(offset, offset, cause)

    # -- with the server -----------------------------------------------------------------------

    def exchange(
        self,
        want: int = 0,
        *,
        leave: bool = False,
        wake: bool = False,
        entry: Entry | None = None,
    ) -> StepReply:
        """Say what was settled, renew the lease, claim up to ``want`` records.

        Args:
            leave: Give back what is held, and be no consumer any more.
            wake: Wake another thread that waits here, if there may be more for it now.

        Raises:
            ConnectionFailed: No reply; the next exchange finds out what became of the step.
            GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
        """
        work = partial(self._exchange, want=want, leave=leave, wake=wake, entry=entry)
        while self.condition.is_mine():
            # This is a signal handler that interrupted its own thread inside the lock, and the
            # thread that has the connection may need the lock: let it go now and then.
            try:
                return self._connection.use(work, timeout_s=_TURN_S)
            except TimeoutError:
                with self.condition:
                    self.condition.wait(_TURN_S / 10)
        return self._connection.use(work)

    def talks_here(self) -> bool:
        """Whether a signal handler asks that has interrupted an exchange of this thread."""
        return self._connection.is_mine()

    def close(self) -> None:
        self._connection.close()

    def abandon(self) -> None:
        """In a forked child: all this is the parent's."""
        self.condition = SignalSafeCondition()
        self.holdings = Holdings(reject_rewinds=False)
        self._stage = _Stage.FORKED

    def _exchange(
        self, connection: Connection, want: int, leave: bool, wake: bool, entry: Entry | None
    ) -> StepReply:
        refusals_left = _ROUNDS
        while refusals_left:  # ends: nothing new is claimed before all is said
            self._synchronize(connection)
            self._name_lost(connection)
            with self.condition:
                last = self.holdings.begin_step()
                self._notified = False
            started = now()
            acks, others = self.holdings.sent
            try:
                reply = self.protocol.step(
                    connection,
                    self._consumer,
                    self.holdings.number + 1,
                    want=want if last else 0,
                    leave=leave and last,
                    wake=wake and last,
                    entry=entry if last else None,
                    acks={key: sorted(offsets) for key, offsets in acks.items()},
                    others=others,
                )
            except Refused:
                refusals_left -= 1
                continue  # ask the server for its state
            except ConnectionFailed as error:
                if error.answered:
                    self._withdraw()  # it did nothing
                raise
            except MeteorError:
                self._withdraw()
                raise
            self._apply(reply, started, left=leave and last, entry=entry)
            if last:
                return reply
        raise ConnectionFailed(
            f"The server does not agree with this consumer of {self.protocol.group!r} about its "
            "steps."
        )

    def _apply(self, reply: StepReply, started: float, *, left: bool, entry: Entry | None) -> None:
        with self.condition:
            self.holdings.apply(reply)
            self.spoke_at = started
            self.valid_until = started + self.config.lease_ttl * BELIEF
            self._refused += reply.refused
            for first, last in reply.lost:
                self._lost.add(first, last, entry.cause if entry and entry.covers(first) else None)
            # The server repeats a dead letter that is not published within a lease.
            self.dead_letters += [
                letter for letter in reply.dead_letters if letter not in self.dead_letters
            ]
            if left:
                self.holdings.take_all()
                self._consumer, self._stage = "", _Stage.LEFT
            self.holdings.end_step()  # last: a Ctrl-C may come in between
        for offset, failures in reply.dropped:
            _log.warning(
                "Record %d of stream %r was given up by shared group %r after %d failures, and "
                "there is no dead_letter stream for it.",
                *(offset, self.protocol.stream.name, self.protocol.group, failures),
            )

    def _synchronize(self, connection: Connection) -> None:
        """Be a consumer, and agree with the server about the last step and what is held."""
        if self._stage is _Stage.LEFT:  # another thread was waiting for the connection meanwhile
            raise ConnectionFailed(f"This consumer of {self.protocol.group!r} has left.")
        if self._consumer and self.holdings.sync is Sync.AGREED:
            return
        try:
            if self._consumer:
                known = self.protocol.join(connection, self._consumer)
                with self.condition:
                    self.holdings.reconcile(known)
                return
        except Refused:
            self._fence()
        consumer = secrets.token_hex(6)
        number = self.protocol.join(connection, consumer, self.name).number
        self.holdings.start(number)
        self._consumer = consumer

    def _fence(self) -> None:
        """The lease has expired: nothing is held any more, and what was not said does not count."""
        with self.condition:
            # First: a Ctrl-C in between must not hide that settling was in vain.
            self._refused += self.holdings.settled_in_vain()
            self.holdings.fence()
            self._consumer = ""

    def _name_lost(self, connection: Connection) -> None:
        """Find the ordering keys of records that could not be fetched."""
        if not self.holdings.has_unnamed_lost:
            return
        try:
            held = self.protocol.join(connection, self._consumer).held
        except Refused:
            self._fence()
            self._synchronize(connection)
            return
        with self.condition:
            self.holdings.name_lost(held)

    def _withdraw(self) -> None:
        with self.condition:
            self.holdings.withdraw_step()

    # -- inside --------------------------------------------------------------------------------

    def _settle(self, record: SharedRecord, kind: str, detail: bytes) -> None:
        with self.condition:
            self._check_held(record)
            self.holdings.settle(record, kind, detail)
            self._notify()

    def _check_held(self, record: SharedRecord) -> None:
        """With the lock held: raise unless the record may be settled here."""
        if self._stage is _Stage.FORKED:
            raise reply_errors.opened_before_fork(self.protocol.stream.name)
        if record.standing is Standing.SETTLED:
            raise ValueError(f"Record {record.offset} was settled before.")
        if record.standing is not Standing.HELD:
            raise reply_errors.records_fenced(
                self.protocol.stream.name, self.protocol.group, [record.offset]
            )
        self.alive_at = now()

    def _notify(self) -> None:
        """With the lock held: let the lease renewer say what was settled, and waiters look."""
        if not self._notified or self.waits_for_room:
            self._notified = True
            self.condition.notify_all()

    def _key_of(self, record: Record) -> bytes:
        key = self._ordering_rule.key_of(record)
        if key:
            return key
        if self.config.keyless == "free":
            return b"\0%d" % record.offset
        return self.config.default_key.encode()
