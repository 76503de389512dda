"""The keeper: holds the lease of a group for one subscriber, and confirms under it.

The subscriber's own thread wins the lease, in ``hold``: so only who polls competes. A thread of
the keeper's renews it while the application gives signs of life, and sends what is confirmed,
merged to the newest. What both use is guarded twice: the ``_line`` is held while one of them talks
to the server, ``_state`` while one looks at or changes what is known. Whoever needs both takes the
line first. A signal handler may do any of it in the middle of any other.

What is believed here ends before it does on the server (see ``lease.BELIEF``). A belief that ran
out is not a loss: the next ``hold`` asks, and if nobody else has the lease the term goes on.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from meteor_py.errors import ConnectionFailed, LeaseLost, LogTruncated, MeteorError
from meteor_py.publish.ack import Ack
from meteor_py.redis import reply_errors
from meteor_py.redis.shared_connection import SharedConnection
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.runtime.completion import KEEPER_PREFIX, forbid_waiting
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread
from meteor_py.subscribe.lease import BELIEF, Lease, Standing, Term
from meteor_py.subscribe.offset_confirms import OffsetConfirms

if TYPE_CHECKING:
    from meteor_py.redis.connection import Connection
    from meteor_py.redis.connector import Connector

_log = logging.getLogger(__name__)

#: Renewals in the life of a lease: two may fail.
_RENEWALS = 3
#: The longest wait of the thread when there is nothing to do.
_IDLE_S = 60.0
#: How often at most the thread looks whether the application is silent, in seconds.
_SILENCE_S = 0.05
#: Seconds between two tries, doubled each time up to the second figure.
_BACKOFF_S = (0.02, 0.5)
#: Seconds to wait for the line, before others are let have the state.
_TURN_S = 0.05
#: Seconds that closing waits for the thread.
_JOIN_S = 10.0

Job = Callable[["Connection", Term], object]


class GroupSession:
    """Owned by a subscriber: it starts with the first term, and is closed with its owner."""

    def __init__(
        self, connector: Connector, lease: Lease, confirmed: int, max_poll_interval_s: float
    ) -> None:
        self.lease = lease
        #: Until when the lease is believed in, by ``now()``. Read without a lock.
        self.valid_until = 0.0
        #: The last sign of life of the application, by ``now()``; and whether it is in a poll.
        self.alive_at = now()
        self.reading = False
        #: The epoch of the stream that all which was handed out is known to be part of.
        self.epoch = 0
        self._max_poll_interval_s = max_poll_interval_s
        # Two tries must fit into the life of a lease.
        self._timeout_s = min(connector.timeout_s, max(lease.ttl_s / 3, 0.1))
        self._connector = connector
        self._line = SharedConnection(self._open_link)
        self._watch = connector.open_connection()
        self._state = SignalSafeCondition()
        self._confirms = OffsetConfirms(self._state, confirmed)
        self._thread: JoinableThread | None = None
        self._pid = os.getpid()
        self._active = True
        self._interrupted = False
        self._closed = False
        # The term, and what belongs to it.
        self._term: Term | None = None
        self._nonce = secrets.token_hex(8)
        self._maybe_ours = False  # 'acquire' was sent, and what came of it is not known
        self._standing: Standing | None = None
        self._lapsed = False
        self._renew_at = 0.0
        # Failures in a row, and when to try again.
        self._failures = 0
        self._retry_at = 0.0

    # -- for the thread that polls -------------------------------------------------------------

    @property
    def term(self) -> Term | None:
        """The term that we have, or had until somebody says otherwise."""
        return self._term

    @property
    def confirmed(self) -> int:
        """The next offset to process, as far as the server has said."""
        return self._confirms.confirmed

    @property
    def wanted(self) -> int:
        """What was asked to be confirmed, whether or not the server knows it yet."""
        return self._confirms.wanted

    def hold(self, timeout_s: float) -> Term | None:
        """Have the lease, waiting for it if need be; None if it cannot be had in that time.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: There is nothing to hold any more.
            LeaseLost: A confirm was refused, as by ``raise_refusal``.
            ConnectionFailed: No answer.
        """
        self.check_process()
        deadline = time.monotonic() + timeout_s
        while not self._closed:
            if self._term is not None and now() < self.valid_until:
                return self._term
            term = self._line.use(self._try)
            self.raise_refusal()  # it may have been learnt just now
            if term is not None:
                return term
            left = deadline - time.monotonic()
            if left <= 0 or self._interrupted:
                break
            self._stand_by(left)
        if self._closed:
            self._watch.close()
        return None

    def doubt(self) -> None:
        """There is reason to think that the lease is lost: let the next ``hold`` ask."""
        with self._state:
            self.valid_until = 0.0

    def check_process(self) -> None:
        """Raise in a forked child."""
        if self._pid != os.getpid():
            raise self._foreign()

    def _foreign(self) -> MeteorError:
        return MeteorError(
            f"This subscriber of group {self.lease.group!r} belongs to the parent process; open "
            "another here with stream.subscriber()."
        )

    def raise_refusal(self) -> None:
        """Raise the error of a confirm that was refused, unless somebody was told already."""
        self._confirms.raise_refusal()

    def _try(self, connection: Connection) -> Term | None:
        """Renew the lease that we had, or else take it if it is free."""
        term = self._term
        if self._closed or not self._active:
            return None
        if term is not None and (now() < self.valid_until or self._renew(connection, term)):
            return self._term
        standing = self._standing
        if standing is not None and now() < standing.retry_at:
            return None
        return self._acquire(connection, None if standing is None else standing.expired)

    def _acquire(self, connection: Connection, expired: int | None) -> Term | None:
        sent_at = now()
        self._maybe_ours = True
        answer = self.lease.acquire(connection, self._nonce, expired)
        if isinstance(answer, Standing):
            self._maybe_ours = False
            if self._standing is None:
                _log.info("Waiting for the lease of %s, which %s has.", self.lease, answer.owner)
            self._standing = answer
            return None
        if answer.nonce != self._nonce or not self._active:  # a signal handler has given it up
            self._let_go(connection, answer.nonce)
            return None
        with self._state:
            if self._thread is None:  # first of all: without it there is no term
                name = f"{KEEPER_PREFIX}-{self.lease.stream}-{self.lease.group}"
                thread = JoinableThread(self._run, name)
                thread.start()
                self._thread = thread
            self._term = answer
            self._standing = None
            self.epoch = answer.position.epoch
            self._confirms.start(answer.position.offset)
            self._believe(sent_at)
        self._watch.close()
        start = answer.position.offset
        _log.info("Got the lease of %s: term %d, from offset %d.", self.lease, answer.number, start)
        return answer

    def _stand_by(self, left_s: float) -> None:
        """Sleep until the lease may be free."""
        standing = self._standing
        if not self._active:
            with self._state:
                self._state.wait_for(lambda: self._active or self._interrupted, left_s)
        elif standing is not None:
            wait_s = min(left_s, standing.retry_at - now(), self._watch.block_max_s)
            event, freed = self.lease.watch(self._watch, standing.event, max(wait_s, 0.0))
            self._standing = None if freed else standing._replace(event=event)

    # -- for any thread ------------------------------------------------------------------------

    def confirm(self, offset: int, term: Term | None) -> Ack:
        """Note that all below ``offset`` was done in ``term``; the thread sends it.

        Raises:
            LeaseLost: It is known already that the term is over.
        """
        with self._state:
            if offset <= self.confirmed:
                return self._confirms.add(offset)  # whatever the term: that changes nothing
            if self._term is None or self._term is not term:
                raise reply_errors.not_held(self.lease.stream, self.lease.group)
            ack = self._confirms.add(offset)
            if self._term is not term:  # a signal handler has ended it in between: nobody sends now
                self._confirms.succeed(self.confirmed)
                self._confirms.fail(reply_errors.not_held(self.lease.stream, self.lease.group))
            return ack

    def want(self, offset: int, term: Term | None) -> None:
        """The same for ourselves: if it is refused, nobody has to be told."""
        with self._state:
            if self._term is not None and self._term is term:
                self._confirms.want(offset)

    def deactivate(self, timeout_s: float) -> None:
        """Send what is confirmed, give up the lease, and do not compete until ``reactivate``."""
        forbid_waiting()
        with self._state:
            self._active = False
            self._state.notify_all()
        self._give_up(timeout_s)

    def reactivate(self) -> None:
        with self._state:
            self._active = True
            self._standing = None
            self._state.notify_all()

    def close(self, timeout_s: float) -> None:
        """Send what is confirmed, give up the lease, end the thread. Twice is fine.

        Raises:
            TimeoutError: The thread does not end.
        """
        if self._pid != os.getpid():
            return  # a forked child: lease, thread and connections are the parent's
        forbid_waiting()
        with self._state:
            self._active = False
            self._state.notify_all()
        self.interrupt()
        try:
            self._give_up(timeout_s)
        finally:
            self.abandon()
        self._join()
        if not self.reading:  # else its reader closes it
            self._watch.close()

    def _join(self) -> None:
        if self._line.is_mine():
            return  # the call that this signal handler came into has to end before the thread can
        thread = self._thread
        if thread is None:
            self._line.close()
            return
        with self._state:  # a wait, which lets the lock go: this may be a signal handler, too
            ended = self._state.wait_for(lambda: self._thread is None, _JOIN_S)
        if not ended:
            raise TimeoutError(
                f"The keeper of {self.lease} does not end; does a callback of a confirm wait for "
                "something?"
            )
        thread.join(_JOIN_S)

    def disown(self) -> None:
        """In a forked child: hand out nothing more, and let nobody wait."""
        self.valid_until = 0.0
        self._state = SignalSafeCondition()  # its holder may not be here
        self._confirms.disown(self._state, self._foreign())

    def interrupt(self) -> None:
        """End a wait for the lease in another thread; there will be no other."""
        with self._state:
            self._interrupted = True
            self._state.notify_all()
        self._watch.interrupt()

    def abandon(self) -> None:
        """End the thread without waiting; it gives up the lease on its way out."""
        if self._pid != os.getpid():
            return
        with self._state:
            self._closed = True
            self._active = False
            self._state.notify_all()

    def _give_up(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._confirms.hurry()
        with self._state:
            self._state.wait_for(self._all_sent, timeout_s)
        left_s = max(deadline - time.monotonic(), self._timeout_s)
        try:
            self._release_within(left_s)
        except TimeoutError:
            self._line.interrupt()  # whoever has it waits for the server, and fails now
            self._release_within(_JOIN_S)

    def _release_within(self, timeout_s: float) -> None:
        """Wait for the line, and let the state go now and then: a signal handler may have come
        while its thread had that, and whoever has the line may need it."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._line.use(self._release, timeout_s=_TURN_S)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
            with self._state:
                self._state.wait(_TURN_S / 10)

    def _all_sent(self) -> bool:
        return self._term is None or self._confirms.due is None

    def _release(self, connection: Connection) -> None:
        """Give up the lease, if it is ours or may be."""
        term = self._term
        if term is not None or self._maybe_ours:
            self._let_go(connection, self._nonce if term is None else term.nonce)
        self._end_term(
            term,
            reply_errors.not_sent(self.lease.stream, self.lease.group, str(connection.address)),
        )

    def _let_go(self, connection: Connection, nonce: str) -> bool:
        """Give up the lease; tell whether that worked."""
        try:
            self.lease.release(connection, nonce)
        except MeteorError as error:
            _log.info("The lease of %s will run out: %s", self.lease, error)
            return False
        return True

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                with self._state:
                    job, wait_s = self._next_job()
                    if job is None:
                        if not self._closed:  # before the lock was taken: nobody would wake us
                            self._state.wait(wait_s)
                        continue
                self._do(job)
        except BaseException as error:
            _log.exception("The keeper of %s died.", self.lease)
            failure = MeteorError(
                f"The keeper of group {self.lease.group!r} of stream {self.lease.stream!r} failed "
                f"unexpectedly: {error!r}."
            )
            failure.__cause__ = error
            self._confirms.fail(failure)
            self._confirms.report(failure)
        finally:
            if self._term is not None or self._maybe_ours:
                self._line.use(self._leave)
            self._line.close()
            with self._state:
                self._thread = None  # another term gets another
                self._state.notify_all()

    def _leave(self, connection: Connection) -> None:
        self._send_rest(connection)
        self._release(connection)

    def _send_rest(self, connection: Connection) -> None:
        """For a subscriber that was dropped: what it has confirmed, tried once."""
        term = self._term
        if term is not None and self._confirms.due is not None:
            try:
                self._send_confirm(connection, term)
            except MeteorError as error:
                _log.warning("The last confirm of %s is lost: %s", self.lease, error)

    def _next_job(self) -> tuple[Job | None, float]:
        """What to do, or how long to wait. With the state."""
        if self._term is None or self._closed:
            return None, _IDLE_S
        at = now()
        jobs: list[tuple[float, Job]] = []  # the lease comes before what is done under it
        if not self._lapsed:
            if not self.reading:
                jobs.append((self.alive_at + self._max_poll_interval_s, self._lapse))
            jobs.append((self._renew_at, self._renew))
        confirm_at = self._confirms.due
        if confirm_at is not None:
            jobs.append((confirm_at, self._send_confirm))
        # Who reads now may hang next.
        wait_s = min(_IDLE_S, max(self._max_poll_interval_s, _SILENCE_S))
        for due, job in jobs:
            left_s = max(due, self._retry_at) - at
            if left_s <= 0:
                return job, 0.0
            wait_s = min(wait_s, left_s)
        return None, wait_s

    def _do(self, job: Job) -> None:
        self._line.use(lambda connection: self._do_on(connection, job))

    def _do_on(self, connection: Connection, job: Job) -> None:
        term = self._term
        if term is None or self._closed:
            return
        try:
            job(connection, term)
            self._failures = 0
            self._retry_at = 0.0
        except ConnectionFailed as error:
            self._confirms.fail_overdue(error)
            if not self._failures:  # once per outage
                _log.warning("The lease of %s cannot be renewed now: %s", self.lease, error)
            self._failures += 1
            self._retry_at = now() + pause_s(self._failures, *_BACKOFF_S)
        except MeteorError as error:  # gone, or forbidden: it will not get better by itself
            _log.warning("The lease of %s is lost: %s", self.lease, error)
            released = self._let_go(connection, term.nonce)
            self._end_term(term, error)
            if not released:  # the next 'acquire' gets it back by its nonce, or close() gives it up
                self._nonce, self._maybe_ours = term.nonce, True

    def _renew(self, connection: Connection, term: Term) -> bool:
        """Renew the lease; tell whether it is still ours."""
        sent_at = now()
        try:
            self.lease.touch(connection, term)
        except LeaseLost as error:
            _log.warning("%s", error)
            self._end_term(term, error)
            return False
        with self._state:
            self._believe(sent_at)
        return True

    def _lapse(self, connection: Connection, term: Term) -> None:
        """The application is silent: let others have the lease, if they want it."""
        with self._state:
            if self.reading or now() < self.alive_at + self._max_poll_interval_s:
                return  # it has just spoken
            self._lapsed = True
            self.valid_until = 0.0
        _log.warning(
            "The subscriber of %s was not polled for %g seconds (max_poll_interval): its lease is "
            "given up.",
            *(self.lease, self._max_poll_interval_s),
        )
        self.lease.lapse(connection, term)

    def _send_confirm(self, connection: Connection, term: Term) -> None:
        with self._state:
            offset, epoch = self._confirms.take(), self.epoch
        try:
            self._confirms.succeed(self.lease.confirm(connection, term, epoch, offset))
        except LeaseLost as error:
            _log.warning("%s", error)
            self._end_term(term, error)
        except LogTruncated as error:
            self._confirms.fail(error)

    # -- small parts ---------------------------------------------------------------------------

    def _open_link(self) -> Connection:
        connection = self._connector.open_connection()
        connection.timeout_s = self._timeout_s
        return connection

    def _believe(self, sent_at: float) -> None:
        """The lease was ours when the server answered what was sent then. With the state."""
        self.valid_until = sent_at + self.lease.ttl_s * BELIEF
        self._renew_at = sent_at + self.lease.ttl_s / _RENEWALS
        self._lapsed = False
        self._state.notify_all()

    def _end_term(self, term: Term | None, error: MeteorError) -> None:
        """The term is over; what is still to be confirmed fails."""
        with self._state:
            if self._term is not term:
                return
            self._term = None
            self.valid_until = 0.0
            self._nonce = secrets.token_hex(8)  # a late 'acquire' of the old one harms nobody
            self._maybe_ours = False
            self._standing = None
        self._confirms.fail(error)
