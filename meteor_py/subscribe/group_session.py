"""A member's session in a group: holds the group's lease, and sends confirms.

The application's thread acquires the lease, in ``hold``, so only members that poll compete for it.
A background thread renews it while the application shows that it is alive, and sends the newest
confirmed offset. Two locks guard the state that the threads share. A thread holds the
``connection`` while it calls the server, and the ``condition`` while it reads or changes the
state. A thread that needs both takes the connection first. A signal handler may interrupt any
method and call another.

The lease is ``Vacant``, ``Held`` or ``Lapsed``; the session is active, inactive or closed. The
owner trusts a held lease until ``valid_until``, which is before it expires on the server (see
``lease.TRUSTED_FRACTION``). After that, the lease is not necessarily lost: the next ``hold`` asks
the server, and if no other member has taken the lease, the term continues.
"""

from __future__ import annotations

import enum
import logging
import os
import secrets
import time
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from meteor_py.errors import ConnectionFailed, LeaseLost, LogTruncated, MeteorError
from meteor_py.log.handle import StreamHandle
from meteor_py.publish.ack import Ack
from meteor_py.records.position import Position
from meteor_py.redis import reply_errors
from meteor_py.redis.connection import Connection
from meteor_py.redis.connector import Connector
from meteor_py.redis.shared_connection import ConnectionBusy, SharedConnection
from meteor_py.runtime.clock import now
from meteor_py.runtime.completion import forbid_waiting
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.subscribe.lease import TRUSTED_FRACTION, Lease, LeaseUnavailable, Term
from meteor_py.subscribe.offset_confirms import OffsetConfirms
from meteor_py.subscribe.renewal_thread import Job, RenewalThread

_log = logging.getLogger(__name__)

#: Renewals per lease TTL. If one times out, there is time for another before the lease expires.
_RENEWALS = 3
#: Maximum seconds that the thread waits when no job is due.
_IDLE_S = 60.0
#: Minimum seconds between the thread's checks that the application still polls.
_SILENCE_S = 0.05
#: Seconds to wait for the connection before briefly releasing the condition's lock.
_TURN_S = 0.05
#: Maximum number of replies that a confirm waits for if the epoch stays the same. The wait for each
#: takes at most one timeout.
_ROUND_TRIPS = 2
#: Seconds that closing waits for the thread.
_JOIN_S = 10.0


class _Mode(enum.Enum):
    """Whether the session competes for the lease."""

    ACTIVE = enum.auto()
    INACTIVE = enum.auto()  # until ``reactivate``
    CLOSED = enum.auto()


@dataclass
class Vacant:
    """The state of a member that has no term."""

    term: ClassVar[None] = None
    #: Identifies the next term. A delayed 'acquire' request is harmless, because it carries the
    #: nonce of an earlier state.
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    #: Whether the outcome of an 'acquire' is unknown, so that the lease may be ours.
    in_doubt: bool = False
    #: The reply to the last 'acquire', if the lease was not free.
    unavailable: LeaseUnavailable | None = None

    @property
    def to_release(self) -> str | None:
        """The nonce with which this member might hold the lease; None if it certainly does not."""
        return self.nonce if self.in_doubt else None


@dataclass(frozen=True)
class Held:
    """The state of a member that has a term. The thread renews its lease."""

    term: Term
    renew_at: float

    @property
    def to_release(self) -> str:
        return self.term.nonce


class Lapsed(Held):
    """The state after the lease was released because the application stopped polling.

    ``hold`` may reclaim the lease.
    """


class _LettersInDoubt(Exception):
    """Dead letters may have been lost. End the term, so that the group reads the records again."""

    def __init__(self, error: LeaseLost) -> None:
        self.error = error


class GroupSession:
    """A member's session in a group. The subscriber or archiver that opens it also closes it."""

    def __init__(
        self, connector: Connector, lease: Lease, confirmed: int, max_poll_interval_s: float
    ) -> None:
        self.lease = lease
        #: The time, on the ``now()`` clock, until which the lease is trusted. Read without a lock.
        self.valid_until = 0.0
        #: When the application last showed that it is alive, on the ``now()`` clock, and whether it
        #: is currently polling.
        self.alive_at = now()
        self.polling = False
        #: The position after the last fetch. Confirms carry this position's epoch.
        self.read_in = Position(lease.incarnation, 0, 0)
        self._max_poll_interval_s = max_poll_interval_s
        # Two attempts must fit into a lease's TTL.
        self._timeout_s = min(connector.timeout_s, max(lease.ttl_s / 3, 0.1))
        self._connector = connector
        self.connection = SharedConnection(self._open_connection)
        self._events = connector.open_connection(lease.stream)  # for waiting for the lease
        self.condition = SignalSafeCondition()
        self.confirms = OffsetConfirms(self.condition, confirmed, self._confirm_now)
        self._thread: RenewalThread | None = None
        self._pid = os.getpid()
        self._mode = _Mode.ACTIVE
        self._interrupted = False
        self._leave_by: float | None = None  # on the ``now()`` clock; see ``start_closing``
        # Every transition replaces this object. A signal handler may run between any two
        # statements, so methods compare the object to find out whether the state has changed.
        self._state: Vacant | Held = Vacant()
        # By replication history: the last record in this term whose dead letter the group's server
        # stored.
        self._letters: dict[str, int] = {}

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
        """Join an existing group as ``member``, without acquiring the lease yet.

        Args:
            confirmed: The group's next offset to process.
            max_poll_interval_s: The lease lapses if the application does not poll for this long.
            above: The next term's number will be higher than this.
        """
        lease = Lease(stream.name, stream.incarnation, group, member, lease_ttl_s, above)
        return cls(stream.connector, lease, confirmed, max_poll_interval_s)

    # -- for the polling thread ----------------------------------------------------------------

    @property
    def term(self) -> Term | None:
        """This member's term. The server may already have ended it."""
        return self._state.term

    @property
    def closed(self) -> bool:
        return self._mode is _Mode.CLOSED

    @property
    def confirmed(self) -> int:
        """The next offset to process, according to the server's last reply."""
        return self.confirms.confirmed

    @property
    def wanted(self) -> int:
        """The next offset to process, including confirms that are not sent yet."""
        return self.confirms.wanted

    def hold(self, timeout_s: float) -> Term | None:
        """Wait up to ``timeout_s`` seconds for the lease; return its term, or None.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: The group or the stream is gone.
            LeaseLost: See ``raise_refusal``.
            ConnectionFailed: The server did not reply.
        """
        self.check_process()
        deadline = time.monotonic() + timeout_s
        checked = False  # check events at least once, or polls with timeout 0 never see a release
        while not self.closed:
            term = self._state.term
            if term is not None and now() < self.valid_until:
                return term
            term = self.connection.use(self._renew_or_acquire)
            self.raise_refusal()  # the reply may have shown that the term is over
            if term is not None:
                return term
            left = max(deadline - time.monotonic(), 0.0)
            if (left == 0 and checked) or self._interrupted:
                break
            checked = True
            self._wait_for_lease(left)
        if self.closed:
            self._events.close()
        return None

    def distrust(self) -> None:
        """Make the next ``hold`` ask the server: the lease may have been lost."""
        with self.condition:
            self.valid_until = 0.0

    def check_process(self) -> None:
        """Raise an error in a forked child."""
        if self._pid != os.getpid():
            raise self._opened_before_fork()

    def _opened_before_fork(self) -> MeteorError:
        return MeteorError(
            f"This subscriber in group {self.lease.group!r} belongs to the parent process. Open "
            "another in this process with stream.subscriber()."
        )

    def raise_refusal(self) -> None:
        """Raise the error from a refused confirm whose Ack was never checked."""
        self.confirms.raise_refusal()

    def _renew_or_acquire(self, connection: Connection) -> Term | None:
        """Renew the lease if there is a term. Otherwise acquire the lease if it is free."""
        term = self._state.term
        if self._mode is not _Mode.ACTIVE:
            return None
        if term is not None and (now() < self.valid_until or self.renew(connection, term)):
            return self._state.term
        vacant = self._state
        if isinstance(vacant, Held):
            return vacant.term  # a poll in a signal handler has acquired the lease
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
                _log.info("Waiting for the lease for %s, held by %s.", self.lease, reply.owner)
            vacant.unavailable = reply
            return None
        state = self._state
        if isinstance(state, Held) and state.term.nonce == reply.nonce:
            return state.term  # a poll in a signal handler has acquired the same lease
        if state is not vacant or self._mode is not _Mode.ACTIVE:
            # A signal handler has released the lease or deactivated the session, so give up the
            # new lease.
            self._try_release(connection, reply.nonce)
            return None
        with self.condition:
            if self._thread is None:  # start it first: without a thread, no lease is renewed
                thread = RenewalThread(self)
                thread.start()
                self._thread = thread
            self.read_in = reply.start
            self._letters = {}  # this term reads the records of those dead letters again
            self.confirms.start(reply.start.offset)
            if self._state is vacant:  # if not, a signal handler has just released the lease
                self._trust(reply, sent_at)
        self._events.close()
        start = reply.start.offset
        _log.info("Acquired the lease for %s: term %d, offset %d.", self.lease, reply.number, start)
        return self._state.term

    def _wait_for_lease(self, left_s: float) -> None:
        """Wait until the lease may be free, for at most ``left_s`` seconds."""
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
        """Confirm all records below ``offset``, as read in ``term``. The thread sends the confirm.

        Raises:
            LeaseLost: The term is already known to be over.
        """
        with self.condition:
            if offset <= self.confirmed:
                return self.confirms.add(offset)  # changes nothing, so the term does not matter
            if term is None or self._state.term is not term:
                raise reply_errors.lease_not_held(self.lease.stream, self.lease.group)
            ack = self.confirms.add(offset)
            if self._state.term is not term:  # a signal handler ended it, so fail the confirm
                self.confirms.succeed(self.confirmed)
                self.confirms.fail(reply_errors.lease_not_held(self.lease.stream, self.lease.group))
            return ack

    def _confirm_now(self, timeout_s: float | None) -> None:
        """Send the newest confirm in the thread that waits for it, if the connection is free.

        This saves two thread switches. In any other case, and after any failure, the background
        thread sends the confirm, so that renewals come first and retries are paced.
        """
        state, at = self._state, now()
        if type(state) is not Held or self._mode is not _Mode.ACTIVE or self.connection.is_mine():
            return
        if self._letters or (timeout_s is not None and timeout_s < _ROUND_TRIPS * self._timeout_s):
            return  # the confirm might take longer than the caller waits
        if at < state.renew_at and at < self.valid_until:
            try:
                self.connection.use(partial(self._send_directly, state.term), timeout_s=0.0)
            except (ConnectionBusy, MeteorError):
                pass

    def _send_directly(self, term: Term, connection: Connection) -> None:
        if self._state.term is term and connection.connected and self.confirms.due is not None:
            self._send_confirm(connection, term)

    def confirm_silently(self, offset: int, term: Term | None) -> None:
        """Confirm without an Ack. A refusal is not reported."""
        with self.condition:
            if term is not None and self._state.term is term:
                self.confirms.want(offset)

    def note_letter(self, offset: int, history: str, term: Term | None) -> None:
        """Note that the group's server stored a record's dead letter in this replication history.

        If the server's history has changed by the time this member confirms the record, the dead
        letter may be lost, and the confirm must not be sent; see ``_check_letters``.
        """
        with self.condition:
            if term is not None and self._state.term is term:
                self._letters[history] = max(offset, self._letters.get(history, 0))

    def deactivate(self, timeout_s: float) -> None:
        """Send the last confirm, release the lease, and do not compete until ``reactivate``."""
        forbid_waiting()
        self._enter(_Mode.INACTIVE)
        self._give_up(timeout_s)

    def reactivate(self) -> None:
        with self.condition:
            state = self._state
            if isinstance(state, Vacant):
                state.unavailable = None
            self._enter(_Mode.ACTIVE)

    def start_closing(self, timeout_s: float) -> None:
        """Make the thread send the last confirm, within ``timeout_s``, and release the lease.

        Does not wait, so that all of a client's sessions leave their groups at the same time. Then
        ``close`` joins each thread.
        """
        if self._pid != os.getpid():
            return
        self._enter(_Mode.INACTIVE)
        self.interrupt()
        self.confirms.drain()
        with self.condition:
            self._leave_by = now() + timeout_s
            if self._thread is None and self._state.to_release is not None:
                thread = RenewalThread(self)
                thread.start()
                self._thread = thread
            self.condition.notify_all()

    def close(self, timeout_s: float) -> None:
        """Send the last confirm, release the lease, and end the thread. Idempotent.

        Raises:
            TimeoutError: The thread did not end in time.
        """
        if self._pid != os.getpid():
            return  # a forked child: lease, thread and connections belong to the parent
        forbid_waiting()
        self._enter(_Mode.INACTIVE)
        self.interrupt()
        try:
            self._wait_until_left()
            self._give_up(timeout_s)
        finally:
            self.stop()
        self._join()
        if not self.polling:  # a polling thread closes the connection itself
            self._events.close()

    def interrupt(self) -> None:
        """Interrupt a thread that is waiting for the lease, and make later waits end at once."""
        with self.condition:
            self._interrupted = True
            self.condition.notify_all()
        self._events.interrupt()

    def stop(self) -> None:
        """Make the thread release the lease and end, without waiting for it."""
        if self._pid == os.getpid():
            self._enter(_Mode.CLOSED)

    def abandon(self) -> None:
        """Distrust the lease in a forked child, and fail the confirms that callers wait for."""
        self.valid_until = 0.0
        self.condition = SignalSafeCondition()  # a parent thread may have held the lock
        self.confirms.abandon(self.condition, self._opened_before_fork())

    def _enter(self, mode: _Mode) -> None:
        with self.condition:
            if not self.closed:
                self._mode = mode
            self.condition.notify_all()

    def _join(self) -> None:
        if self.connection.is_mine():
            return  # in a signal handler; the thread ends after the interrupted call
        thread = self._thread
        if thread is None:
            self.connection.close()
            return
        with self.condition:  # the wait releases this lock, which our interrupted code may hold
            ended = self.condition.wait_for(lambda: self._thread is None, _JOIN_S)
        if not ended:
            raise TimeoutError(
                f"The thread that renews the lease for {self.lease} did not end within {_JOIN_S:g} "
                "seconds. Check that no callback on a confirm's Ack is blocking."
            )
        thread.join(_JOIN_S)

    def _wait_until_left(self) -> None:
        """Wait for the thread to finish if ``start_closing`` was called."""
        if self._leave_by is None or self.connection.is_mine():
            return  # in a signal handler; the thread waits for the interrupted call
        # Allow for a confirm that is in flight when ``_leave_by`` is reached, and for the release.
        left_s = max(self._leave_by - now(), 0.0) + 3 * self._timeout_s
        with self.condition:
            self.condition.wait_for(lambda: self._thread is None, left_s)

    def _give_up(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self.confirms.drain()
        with self.condition:
            self.condition.wait_for(
                lambda: self._state.term is None or self.confirms.due is None, timeout_s
            )
        left_s = max(deadline - time.monotonic(), self._timeout_s)
        try:
            self._release_within(left_s)
        except TimeoutError:
            self.connection.interrupt()  # makes the other thread's call fail
            self._release_within(_JOIN_S)

    def _release_within(self, timeout_s: float) -> None:
        """Wait for the connection, then release the lease.

        Releases the condition's lock briefly and repeatedly while it waits. If this runs in a
        signal handler, the interrupted code may hold that lock, and the thread that uses the
        connection may need it.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self.connection.use(self._release, timeout_s=_TURN_S)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
            with self.condition:
                self.condition.wait(_TURN_S / 10)

    def _release(self, connection: Connection) -> None:
        """Release the lease if it is, or may be, ours, and end the term."""
        state = self._state
        if state.to_release is not None:
            self._try_release(connection, state.to_release)
        self._end_term(
            state.term,
            reply_errors.confirm_not_sent(
                self.lease.stream, self.lease.group, str(connection.address)
            ),
        )

    def _try_release(self, connection: Connection, nonce: str) -> bool:
        """Release the lease; return whether the release succeeded."""
        try:
            self.lease.release(connection, nonce)
        except MeteorError as error:
            _log.info("Cannot release the lease for %s, so it will expire: %s", self.lease, error)
            return False
        return True

    # -- for the background thread -------------------------------------------------------------

    def next_job(self, retry_at: float) -> tuple[Job | None, float]:
        """Return the job that is due, or None and the seconds to wait. The caller holds the lock.

        Args:
            retry_at: The earliest time, on the ``now()`` clock, at which a job may run.
        """
        state = self._state
        at = now()
        if self._leave_by is not None and (self.confirms.due is None or at >= self._leave_by):
            self._mode = _Mode.CLOSED
        if isinstance(state, Vacant) or self.closed:
            return None, _IDLE_S
        jobs: list[tuple[float, Job]] = []  # the confirm comes last, because it needs the lease
        if not isinstance(state, Lapsed):
            if not self.polling:
                jobs.append((self.alive_at + self._max_poll_interval_s, self.lapse))
            jobs.append((state.renew_at, self.renew))
        confirm_at = self.confirms.due
        if confirm_at is not None:
            jobs.append((confirm_at, self._send_confirm))
        # Check again later, even if the application is currently polling.
        wait_s = min(_IDLE_S, max(self._max_poll_interval_s, _SILENCE_S))
        wait_s = min(wait_s, self.confirms.watch_s(at))
        if self._leave_by is not None:
            wait_s = min(wait_s, self._leave_by - at)
        for due, job in jobs:
            left_s = max(due, retry_at) - at
            if left_s <= 0:
                return job, 0.0
            wait_s = min(wait_s, left_s)
        return None, wait_s

    def renew(self, connection: Connection, term: Term) -> bool:
        """Renew the lease and return whether it is still ours."""
        sent_at = now()
        try:
            self.lease.renew(connection, term)
        except LeaseLost as error:
            self._lose_term(connection, term, error)
            return False
        with self.condition:
            if self._state.term is term:
                self._trust(term, sent_at)
        return True

    def _lose_term(self, connection: Connection, term: Term, error: LeaseLost) -> None:
        """End a term that is over on the server.

        Ask the server about a confirm whose reply was lost, because the confirm may have taken
        effect. The answer is final: the server refuses all later confirms from this term.
        """
        if self.confirms.in_doubt:
            confirmed = self.lease.confirmed_in(connection, term)
            if confirmed is not None:
                self.confirms.resolve_doubts(confirmed)
        _log.warning("%s", error)
        self._end_term(term, error)

    def lapse(self, connection: Connection, term: Term) -> None:
        """Release the lease for other members, because the application stopped polling."""
        with self.condition:
            if self.polling or now() < self.alive_at + self._max_poll_interval_s:
                return  # the application has just shown that it is alive
            self._state = Lapsed(term, 0.0)
            self.valid_until = 0.0
        _log.warning(
            "The subscriber in %s was not polled for %g seconds (max_poll_interval), so its lease "
            "was released.",
            *(self.lease, self._max_poll_interval_s),
        )
        self.lease.lapse(connection, term)

    def give_up_term(self, connection: Connection, term: Term, error: MeteorError) -> None:
        """End the term because of an error that a retry cannot fix."""
        released = self._try_release(connection, term.nonce)
        # If the release failed, the next 'acquire' reclaims the lease by its nonce, or close()
        # releases it.
        self._end_term(term, error, Vacant() if released else Vacant(term.nonce, in_doubt=True))

    def leave(self) -> None:
        """Release the lease when the thread ends, after sending a confirm that is still due."""
        try:
            if self._state.to_release is not None:
                self.connection.use(self._leave_group)
            self.connection.close()
        finally:
            with self.condition:
                self._thread = None  # the next term starts another thread
                self.condition.notify_all()

    def _leave_group(self, connection: Connection) -> None:
        term = self._state.term
        if term is not None and self.confirms.due is not None and self._leave_by is None:
            try:  # the subscriber was garbage-collected, so close() has not sent this confirm
                self._send_confirm(connection, term)
            except MeteorError as error:
                _log.warning("The last confirm in %s was lost: %s", self.lease, error)
        self._release(connection)

    def _send_confirm(self, connection: Connection, term: Term) -> None:
        _ = connection.history  # connect first: if this fails, no confirm is in doubt
        with self.condition:
            position = self.read_in._replace(offset=self.confirms.take())
        check = partial(self._check_letters, connection)
        try:
            self.confirms.succeed(self.lease.confirm(connection, term, position, check))
        except _LettersInDoubt as doubt:
            _log.warning("%s", doubt.error)
            self.give_up_term(connection, term, doubt.error)
        except ConnectionFailed as error:
            if not error.answered:
                self.confirms.doubt_sent()
            raise
        except LeaseLost as error:
            self._lose_term(connection, term, error)
        except LogTruncated as error:
            self.confirms.fail(error)
        except MeteorError:
            raise
        except BaseException:  # Ctrl-C: the reply was lost
            self.confirms.doubt_sent()
            raise

    def _check_letters(self, connection: Connection) -> None:
        """Raise if a failover may have lost this term's dead letters.

        As long as the history is the same, every replica gets a dead letter before the confirm. If
        the history has changed, but the group's position is already after the record, then an
        earlier confirm survived, and so did the dead letter.
        """
        if not self._letters:
            return
        # Read the history again: a server can be promoted while a connection is open.
        history = connection.refresh_history()
        with self.condition:
            elsewhere = {h: last for h, last in self._letters.items() if h != history}
        if not history or not elsewhere:
            return
        position = self.lease.position(connection)
        if any(last >= position for last in elsewhere.values()):
            stream, group = self.lease.stream, self.lease.group
            raise _LettersInDoubt(reply_errors.letters_in_doubt(stream, group, position))
        with self.condition:
            for survived in elsewhere:
                self._letters.pop(survived, None)

    def _open_connection(self) -> Connection:
        connection = self._connector.open_connection(self.lease.stream)
        connection.timeout_s = self._timeout_s
        return connection

    def _trust(self, term: Term, sent_at: float) -> None:
        """Trust the lease for longer, counted from ``sent_at``. The caller holds the lock."""
        self._state = Held(term, sent_at + self.lease.ttl_s / _RENEWALS)
        self.valid_until = sent_at + self.lease.ttl_s * TRUSTED_FRACTION
        self.condition.notify_all()

    def _end_term(
        self, term: Term | None, error: MeteorError, vacant: Vacant | None = None
    ) -> None:
        """End the term, and fail the confirms that the server has not accepted."""
        with self.condition:
            if self._state.term is not term:
                return
            self._state = vacant or Vacant()
            self.valid_until = 0.0
        lost = isinstance(error, LeaseLost)  # only this error proves that confirms had no effect
        stream, group = self.lease.stream, self.lease.group
        unknown = reply_errors.confirm_unknown(stream, group) if lost else None
        self.confirms.fail(error, in_doubt=unknown)
