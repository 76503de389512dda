"""A member's session in a group: it holds the group's lease, and confirms under it.

The subscriber's own thread acquires the lease, in ``hold``, so only members that poll compete for
it. A background thread renews it while the application shows that it is alive, and sends the newest
confirmed offset. What both threads use is guarded twice: the ``connection`` is held while one of
them talks to the server, the ``condition`` while one reads or changes what is known. A thread that
needs both takes the connection first. A signal handler may do any of it in the middle of any other.

The lease is ``Vacant``, ``Held`` or ``Lapsed``, and the session open, inactive or closed. A held
lease is trusted until ``valid_until``, which is before it expires on the server (see
``lease.BELIEF``). A lease that is no longer trusted is not lost: the next ``hold`` asks, and if no
other member has taken the lease, the term continues.
"""

from __future__ import annotations

import enum
import logging
import os
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from meteor_py.errors import LeaseLost, LogTruncated, MeteorError
from meteor_py.publish.ack import Ack
from meteor_py.redis import reply_errors
from meteor_py.redis.shared_connection import SharedConnection
from meteor_py.runtime.clock import now
from meteor_py.runtime.completion import forbid_waiting
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.subscribe.lease import BELIEF, Lease, LeaseUnavailable, Term
from meteor_py.subscribe.offset_confirms import OffsetConfirms
from meteor_py.subscribe.renewal_thread import Job, RenewalThread

if TYPE_CHECKING:
    from meteor_py.log.handle import StreamHandle
    from meteor_py.redis.connection import Connection
    from meteor_py.redis.connector import Connector

_log = logging.getLogger(__name__)

#: Renewals per lease TTL: two may fail.
_RENEWALS = 3
#: The longest wait of the thread when there is nothing to do.
_IDLE_S = 60.0
#: How often at most the thread looks whether the application is silent, in seconds.
_SILENCE_S = 0.05
#: Seconds to wait for the connection, before the lock of the condition is let go for a moment.
_TURN_S = 0.05
#: Seconds that closing waits for the thread.
_JOIN_S = 10.0


class _Mode(enum.Enum):
    """Whether the session competes for the lease."""

    ACTIVE = enum.auto()
    #: Until ``reactivate``.
    INACTIVE = enum.auto()
    CLOSED = enum.auto()


@dataclass
class Vacant:
    """There is no term."""

    term: ClassVar[None] = None
    #: Names the next term. A late 'acquire' with the nonce of an earlier state harms no one.
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    #: Whether 'acquire' was sent, and its outcome is not known: the lease may be ours.
    in_doubt: bool = False
    #: The reply to the last 'acquire', if another member has the lease.
    unavailable: LeaseUnavailable | None = None

    @property
    def to_release(self) -> str | None:
        """The nonce to release, if there is something to release."""
        return self.nonce if self.in_doubt else None


@dataclass(frozen=True)
class Held:
    """There is a term, and the thread renews its lease."""

    term: Term
    renew_at: float

    @property
    def to_release(self) -> str:
        return self.term.nonce


class Lapsed(Held):
    """The application was silent, so the lease was let go. ``hold`` may still get it back."""


class GroupSession:
    """A member's session in a group. Closed by its owner, a subscriber or an archiver."""

    def __init__(
        self, connector: Connector, lease: Lease, confirmed: int, max_poll_interval_s: float
    ) -> None:
        self.lease = lease
        #: Until when the lease is trusted, by ``now()``. Read without a lock.
        self.valid_until = 0.0
        #: When the application last showed that it is alive, by ``now()``; and whether it polls.
        self.alive_at = now()
        self.polling = False
        #: The epoch of the stream that all records handed out are known to be part of.
        self.epoch = 0
        self._max_poll_interval_s = max_poll_interval_s
        # Two tries must fit into the TTL of a lease.
        self._timeout_s = min(connector.timeout_s, max(lease.ttl_s / 3, 0.1))
        self._connector = connector
        self.connection = SharedConnection(self._open_connection)
        self._events = connector.open_connection()  # waits for the lease
        self.condition = SignalSafeCondition()
        self.confirms = OffsetConfirms(self.condition, confirmed)
        self._thread: RenewalThread | None = None
        self._pid = os.getpid()
        self._mode = _Mode.ACTIVE
        self._interrupted = False
        # Replaced as a whole: a signal handler may come between any two statements.
        self._state: Vacant | Held = Vacant()

    @classmethod
    def join(
        cls,
        stream: StreamHandle,
        group: str,
        member: str,
        *,
        confirmed: int,
        lease_ttl_s: float,
        max_poll_interval_s: float,
        above: int = 0,
    ) -> GroupSession:
        """Join a group that exists, as ``member``, without acquiring its lease yet.

        Args:
            confirmed: The next offset that the group has to process.
            max_poll_interval_s: Seconds without a sign of the application after which the lease
                lapses.
            above: The next term gets a higher number than this.
        """
        lease = Lease(stream.name, stream.incarnation, group, member, lease_ttl_s, above)
        return cls(stream.connector, lease, confirmed, max_poll_interval_s)

    # -- for the thread that polls -------------------------------------------------------------

    @property
    def term(self) -> Term | None:
        """The term that this member has, or had as far as is known."""
        return self._state.term

    @property
    def closed(self) -> bool:
        return self._mode is _Mode.CLOSED

    @property
    def confirmed(self) -> int:
        """The next offset to process, as far as the server has replied."""
        return self.confirms.confirmed

    @property
    def wanted(self) -> int:
        """What was asked to be confirmed, whether or not the server knows it yet."""
        return self.confirms.wanted

    def hold(self, timeout_s: float) -> Term | None:
        """Hold the lease, waiting for it if need be; None if that takes too long.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: There is nothing to hold any more.
            LeaseLost: A confirm was refused, as by ``raise_refusal``.
            ConnectionFailed: No reply.
        """
        self.check_process()
        deadline = time.monotonic() + timeout_s
        while not self.closed:
            term = self._state.term
            if term is not None and now() < self.valid_until:
                return term
            term = self.connection.use(self._try)
            self.raise_refusal()  # it may have been learnt just now
            if term is not None:
                return term
            left = deadline - time.monotonic()
            if left <= 0 or self._interrupted:
                break
            self._stand_by(left)
        if self.closed:
            self._events.close()
        return None

    def distrust(self) -> None:
        """There is reason to think that the lease is lost: let the next ``hold`` ask."""
        with self.condition:
            self.valid_until = 0.0

    def check_process(self) -> None:
        """Raise in a forked child."""
        if self._pid != os.getpid():
            raise self._of_parent()

    def _of_parent(self) -> MeteorError:
        return MeteorError(
            f"This subscriber of group {self.lease.group!r} belongs to the parent process; open "
            "another here with stream.subscriber()."
        )

    def raise_refusal(self) -> None:
        """Raise the error of a refused confirm whose Ack was never checked."""
        self.confirms.raise_refusal()

    def _try(self, connection: Connection) -> Term | None:
        """Renew the lease of a term, or else acquire it if it is free."""
        term = self._state.term
        if self._mode is not _Mode.ACTIVE:
            return None
        if term is not None and (now() < self.valid_until or self.renew(connection, term)):
            return self._state.term
        vacant = self._state
        if isinstance(vacant, Held):
            return vacant.term  # a signal handler has polled
        unavailable = vacant.unavailable
        if unavailable is not None and now() < unavailable.retry_at:
            return None
        return self._acquire(connection, vacant)

    def _acquire(self, connection: Connection, vacant: Vacant) -> Term | None:
        sent_at = now()
        expired = None if vacant.unavailable is None else vacant.unavailable.expired
        vacant.in_doubt = True
        reply = self.lease.acquire(connection, vacant.nonce, expired)
        if isinstance(reply, LeaseUnavailable):
            vacant.in_doubt = False
            if vacant.unavailable is None:
                _log.info("Waiting for the lease of %s, which %s has.", self.lease, reply.owner)
            vacant.unavailable = reply
            return None
        state = self._state
        if isinstance(state, Held) and state.term.nonce == reply.nonce:
            return state.term  # a signal handler has polled, and got the same lease
        if state is not vacant or self._mode is not _Mode.ACTIVE:
            self._let_go(connection, reply.nonce)  # a signal handler has given it up
            return None
        with self.condition:
            if self._thread is None:  # first of all: without it there is no term
                thread = RenewalThread(self)
                thread.start()
                self._thread = thread
            self.epoch = reply.start.epoch
            self.confirms.start(reply.start.offset)
            if self._state is vacant:  # else a signal handler has given it up just now
                self._trust(reply, sent_at)
        self._events.close()
        start = reply.start.offset
        _log.info("Got the lease of %s: term %d, from offset %d.", self.lease, reply.number, start)
        return self._state.term

    def _stand_by(self, left_s: float) -> None:
        """Sleep until the lease may be free."""
        state = self._state
        if self._mode is not _Mode.ACTIVE:
            with self.condition:
                self.condition.wait_for(
                    lambda: self._mode is _Mode.ACTIVE or self._interrupted, left_s
                )
        elif isinstance(state, Vacant) and state.unavailable is not None:
            unavailable = state.unavailable
            wait_s = min(left_s, unavailable.retry_at - now(), self._events.block_max_s)
            event, freed = self.lease.wait_event(self._events, unavailable.event, max(wait_s, 0.0))
            state.unavailable = None if freed else unavailable._replace(event=event)

    # -- for any thread ------------------------------------------------------------------------

    def confirm(self, offset: int, term: Term | None) -> Ack:
        """Note that all below ``offset`` was processed in ``term``; the thread sends it.

        Raises:
            LeaseLost: It is known already that the term is over.
        """
        with self.condition:
            if offset <= self.confirmed:
                return self.confirms.add(offset)  # whatever the term: that changes nothing
            if term is None or self._state.term is not term:
                raise reply_errors.lease_not_held(self.lease.stream, self.lease.group)
            ack = self.confirms.add(offset)
            if self._state.term is not term:  # a signal handler has ended it: nothing sends now
                self.confirms.succeed(self.confirmed)
                self.confirms.fail(reply_errors.lease_not_held(self.lease.stream, self.lease.group))
            return ack

    def confirm_silently(self, offset: int, term: Term | None) -> None:
        """The same without an Ack: if it is refused, the application is not told."""
        with self.condition:
            if term is not None and self._state.term is term:
                self.confirms.want(offset)

    def deactivate(self, timeout_s: float) -> None:
        """Send what is confirmed, give up the lease, and do not compete until ``reactivate``."""
        forbid_waiting()
        self._enter(_Mode.INACTIVE)
        self._give_up(timeout_s)

    def reactivate(self) -> None:
        with self.condition:
            state = self._state
            if isinstance(state, Vacant):
                state.unavailable = None
            self._enter(_Mode.ACTIVE)

    def close(self, timeout_s: float) -> None:
        """Send what is confirmed, give up the lease, end the thread. Twice is fine.

        Raises:
            TimeoutError: The thread does not end.
        """
        if self._pid != os.getpid():
            return  # a forked child: lease, thread and connections are the parent's
        forbid_waiting()
        self._enter(_Mode.INACTIVE)
        self.interrupt()
        try:
            self._give_up(timeout_s)
        finally:
            self.stop()
        self._join()
        if not self.polling:  # else the thread that polls closes it
            self._events.close()

    def interrupt(self) -> None:
        """End a wait for the lease in another thread; there will be no other."""
        with self.condition:
            self._interrupted = True
            self.condition.notify_all()
        self._events.interrupt()

    def stop(self) -> None:
        """End the thread without waiting; it gives up the lease on its way out."""
        if self._pid == os.getpid():
            self._enter(_Mode.CLOSED)

    def abandon(self) -> None:
        """In a forked child: hand out nothing more, and let no caller wait."""
        self.valid_until = 0.0
        self.condition = SignalSafeCondition()  # its holder may not be here
        self.confirms.abandon(self.condition, self._of_parent())

    def _enter(self, mode: _Mode) -> None:
        with self.condition:
            if not self.closed:
                self._mode = mode
            self.condition.notify_all()

    def _join(self) -> None:
        if self.connection.is_mine():
            return  # the call that this signal handler came into has to end before the thread can
        thread = self._thread
        if thread is None:
            self.connection.close()
            return
        with self.condition:  # a wait, which lets the lock go: this may be a signal handler, too
            ended = self.condition.wait_for(lambda: self._thread is None, _JOIN_S)
        if not ended:
            raise TimeoutError(
                f"The thread that renews the lease of {self.lease} does not end; does a callback "
                "of a confirm wait for something?"
            )
        thread.join(_JOIN_S)

    def _give_up(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self.confirms.hurry()
        with self.condition:
            self.condition.wait_for(self._all_sent, timeout_s)
        left_s = max(deadline - time.monotonic(), self._timeout_s)
        try:
            self._release_within(left_s)
        except TimeoutError:
            self.connection.interrupt()  # its user waits for the server, and fails now
            self._release_within(_JOIN_S)

    def _release_within(self, timeout_s: float) -> None:
        """Wait for the connection, and let the lock go now and then: a signal handler may have come
        while its thread had that, and the user of the connection may need it."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self.connection.use(self._release, timeout_s=_TURN_S)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
            with self.condition:
                self.condition.wait(_TURN_S / 10)

    def _all_sent(self) -> bool:
        return self._state.term is None or self.confirms.due is None

    def _release(self, connection: Connection) -> None:
        """Give up the lease, if it is ours or may be."""
        state = self._state
        if state.to_release is not None:
            self._let_go(connection, state.to_release)
        self._end_term(
            state.term,
            reply_errors.confirm_not_sent(
                self.lease.stream, self.lease.group, str(connection.address)
            ),
        )

    def _let_go(self, connection: Connection, nonce: str) -> bool:
        """Give up the lease; tell whether that worked."""
        try:
            self.lease.release(connection, nonce)
        except MeteorError as error:
            _log.info("The lease of %s will run out: %s", self.lease, error)
            return False
        return True

    # -- for the background thread -------------------------------------------------------------

    def next_job(self, retry_at: float) -> tuple[Job | None, float]:
        """Return the job that is due, or the seconds to wait. With the lock.

        Args:
            retry_at: No job is due before that, by ``now()``.
        """
        state = self._state
        if isinstance(state, Vacant) or self.closed:
            return None, _IDLE_S
        at = now()
        jobs: list[tuple[float, Job]] = []  # the lease comes before what is done under it
        if not isinstance(state, Lapsed):
            if not self.polling:
                jobs.append((self.alive_at + self._max_poll_interval_s, self.lapse))
            jobs.append((state.renew_at, self.renew))
        confirm_at = self.confirms.due
        if confirm_at is not None:
            jobs.append((confirm_at, self._send_confirm))
        # An application that polls now may hang next.
        wait_s = min(_IDLE_S, max(self._max_poll_interval_s, _SILENCE_S))
        for due, job in jobs:
            left_s = max(due, retry_at) - at
            if left_s <= 0:
                return job, 0.0
            wait_s = min(wait_s, left_s)
        return None, wait_s

    def renew(self, connection: Connection, term: Term) -> bool:
        """Renew the lease; tell whether it is still ours."""
        sent_at = now()
        try:
            self.lease.renew(connection, term)
        except LeaseLost as error:
            _log.warning("%s", error)
            self._end_term(term, error)
            return False
        with self.condition:
            if self._state.term is term:
                self._trust(term, sent_at)
        return True

    def lapse(self, connection: Connection, term: Term) -> None:
        """The application is silent: let other members have the lease, if they want it."""
        with self.condition:
            if self.polling or now() < self.alive_at + self._max_poll_interval_s:
                return  # it has just shown that it is alive
            self._state = Lapsed(term, 0.0)
            self.valid_until = 0.0
        _log.warning(
            "The subscriber of %s was not polled for %g seconds (max_poll_interval): its lease is "
            "given up.",
            *(self.lease, self._max_poll_interval_s),
        )
        self.lease.lapse(connection, term)

    def give_up_term(self, connection: Connection, term: Term, error: MeteorError) -> None:
        """End the term because of an error that will not pass."""
        released = self._let_go(connection, term.nonce)
        # Not released: the next 'acquire' gets it back by its nonce, or close() gives it up.
        self._end_term(term, error, Vacant() if released else Vacant(term.nonce, in_doubt=True))

    def leave(self) -> None:
        """The thread ends: send the last confirm, and give up the lease."""
        try:
            if self._state.to_release is not None:
                self.connection.use(self._leave_group)
            self.connection.close()
        finally:
            with self.condition:
                self._thread = None  # another term gets another
                self.condition.notify_all()

    def _leave_group(self, connection: Connection) -> None:
        term = self._state.term
        if term is not None and self.confirms.due is not None:  # of a subscriber that was dropped
            try:
                self._send_confirm(connection, term)
            except MeteorError as error:
                _log.warning("The last confirm of %s is lost: %s", self.lease, error)
        self._release(connection)

    def _send_confirm(self, connection: Connection, term: Term) -> None:
        with self.condition:
            offset, epoch = self.confirms.take(), self.epoch
        try:
            self.confirms.succeed(self.lease.confirm(connection, term, epoch, offset))
        except LeaseLost as error:
            _log.warning("%s", error)
            self._end_term(term, error)
        except LogTruncated as error:
            self.confirms.fail(error)

    # -- small parts ---------------------------------------------------------------------------

    def _open_connection(self) -> Connection:
        connection = self._connector.open_connection()
        connection.timeout_s = self._timeout_s
        return connection

    def _trust(self, term: Term, sent_at: float) -> None:
        """The lease was ours when the server replied to what was sent then. With the lock."""
        self._state = Held(term, sent_at + self.lease.ttl_s / _RENEWALS)
        self.valid_until = sent_at + self.lease.ttl_s * BELIEF
        self.condition.notify_all()

    def _end_term(
        self, term: Term | None, error: MeteorError, vacant: Vacant | None = None
    ) -> None:
        """The term is over; what is still to be confirmed fails."""
        with self.condition:
            if self._state.term is not term:
                return
            self._state = vacant or Vacant()
            self.valid_until = 0.0
        self.confirms.fail(error)
