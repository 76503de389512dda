"""Leadership: a member's terms, and the tasks that run while it leads."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from meteor_py.errors import ConnectionFailed, PeerError, StaleTerm
from meteor_py.peers.member import Member
from meteor_py.records.config import check_seconds
from meteor_py.redis.scripts import PEERS_GUARDED_WRITE, PEERS_UPDATE_MEMBER
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition, SignalSafeEvent
from meteor_py.runtime.threads import JoinableThread

if TYPE_CHECKING:
    from meteor_py.peers.member_handle import MemberHandle
    from meteor_py.peers.protocol import HeartbeatReply
    from meteor_py.redis.connection import Connection

_log = logging.getLogger(__name__)

#: Maximum seconds to wait for leader functions to return when resigning.
TASKS_S = 5.0
#: If a leader function fails, its member resigns after at most this many seconds.
_FAILED_S = 1.0

Task = Callable[["Term"], object]


class Term:
    """One term during which a member in this process leads.

    >>> with me.leadership() as term:               # doctest: +SKIP
    ...     while term.valid:
    ...         write(record, fence=term.number)

    Once lost, a term stays lost. A member that is elected again gets another ``Term``. So does a
    leader that was cut off for so long that it had to give up its term. If no other member was
    elected in the meantime, the new ``Term`` has the same ``number``.
    """

    def __init__(self, member: MemberHandle, number: int) -> None:
        #: Increases with every election. Use it as a fencing token for writes.
        self.number = number
        #: Set as soon as this process knows that the member no longer leads.
        self.lost = SignalSafeEvent()
        self._member = member

    @property
    def leader(self) -> Member | None:
        """This member, as the group's view shows it; None if the view does not include it."""
        return self._member.group.view.members.get(self._member.id)

    @property
    def valid(self) -> bool:
        """Whether it is certain that no other member leads. Does not use the network.

        There is one exception: a client has removed this member or joined under its name, and this
        process has not received the event yet. So write with ``guard``, or use ``number`` as a
        fencing token. Always False in a forked child.
        """
        if self.remaining > 0:
            return True
        if not self._member.foreign:
            self._member.leadership.lose(self)  # lost for good, even if the server replies again
        return False

    @property
    def remaining(self) -> float:
        """Seconds for which the term stays valid even if no further heartbeat succeeds."""
        if self.lost.is_set() or self._member.foreign:
            return 0.0
        return max(self._member.valid_until - now(), 0.0)

    @property
    def guard(self) -> Guard:
        """The writer for values that only the leader of this term may write."""
        return Guard(self)

    def __repr__(self) -> str:
        return f"<Term {self.number} ({'valid' if self.valid else 'lost'})>"


class Guard:
    """Writes the group's guarded values while a term lasts. Read them with ``group.guarded()``."""

    def __init__(self, term: Term) -> None:
        self._term = term

    def set(self, name: str, value: bytes | str) -> None:
        """Write a value.

        Raises:
            StaleTerm: The member no longer leads in this term; nothing was written.
        """
        self._write("set", name, value)

    def delete(self, name: str) -> None:
        """Remove a value. Raises ``StaleTerm`` under the same condition as ``set``."""
        self._write("delete", name, b"")

    def _write(self, what: str, name: str, value: bytes | str) -> None:
        member = self._term._member
        if not self._term.valid:
            raise self._stale("this member has lost it")
        args = [self._term.number, member.session, what, name, value]
        reply = member.group.protocol.run(PEERS_GUARDED_WRITE, args)
        if reply[0] != b"OK":
            member.leadership.lose(self._term)
            raise self._stale(f"the current term is {reply[1]}")

    def _stale(self, why: str) -> StaleTerm:
        group = self._term._member.group.name
        return StaleTerm(
            f"Term {self._term.number} of group {group!r} is over: {why}. Nothing was written. "
            "Stop all work that only the leader may do.",
            group=group,
        )


class LeaderTask:
    """An application function that one thread calls with each term.

    The thread exists while there is a term to pass to the function. If several terms begin during a
    call, only the newest one waits; the others are already over.
    """

    def __init__(self, member: MemberHandle, function: Task) -> None:
        self._member = member
        self._function = function
        self._state = SignalSafeCondition()
        self._next: Term | None = None
        #: The thread that calls the function; None if no call is running or pending.
        self.thread: JoinableThread | None = None

    def start(self, term: Term) -> None:
        """Call the function with a term, once the previous call has returned."""
        group = self._member.group
        with self._state:
            self._next = term
            if self.thread is not None:
                return
            self.thread = JoinableThread(self._run, f"meteor-leader-{group.name}")
            group.track(self.thread)
            self.thread.start()

    def _run(self) -> None:
        while True:
            with self._state:
                term, self._next = self._next, None
                if term is None:
                    self.thread = None
                    return
            if term.valid:
                self._call(term)

    def _call(self, term: Term) -> None:
        group = self._member.group
        try:
            self._function(term)
        except BaseException:  # even SystemExit: otherwise an idle member would stay leader
            _log.exception("A leader function of group %r failed.", group.name)
            if not term.lost.wait(min(_FAILED_S, group.config.ttl / 3)):
                self._member.leadership.resign(term)


class Leadership:
    """Manages one member's term, under the member's lock."""

    def __init__(self, member: MemberHandle) -> None:
        self._member = member
        self._state = member.state
        self._term: Term | None = None
        #: Terms up to this number are over for the member: late events cannot revive them.
        self._over = 0
        self._tasks: dict[Task, LeaderTask] = {}
        #: Number of callers that wait for tasks to end before they report a resignation.
        self._handing_over = 0
        #: The term number that the member had when it started leaving.
        self._last: int | None = None

    @property
    def term(self) -> Term | None:
        """The member's current term; None if it is not the leader."""
        term = self._term
        return term if term is not None and term.valid else None

    @property
    def busy(self) -> bool:
        """Whether leaving would have to wait for a running task."""
        return any(task.thread is not None for task in self._tasks.values())

    def wait(self, timeout: float | None) -> Term:
        """Wait until the member is elected. See ``Membership.leadership``."""
        member = self._member
        if member.group.config.election == "none":
            name = member.group.name
            raise PeerError(
                f"Group {name!r} elects no leader (election=None). Use a group that elects one.",
                group=name,
            )
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        terms: deque[Term] = deque(maxlen=1)

        def decided() -> bool:
            if (term := self.term) is not None:
                terms.append(term)  # keep a reference: the term may be lost a moment later
            return bool(terms) or not member.active

        with self._state:
            self._state.wait_for(decided, timeout)
        if terms:
            return terms[0]
        if not member.active:
            raise member.lost_error()
        raise TimeoutError(f"Member {member.id!r} was not elected within {timeout:g} seconds.")

    def add_task(self, function: Task) -> None:
        with self._state:
            if function not in self._tasks:
                self._tasks[function] = task = LeaderTask(self._member, function)
                term = self.term
                if term is not None:
                    task.start(term)

    def resign(self, term: Term) -> bool:
        """Resign from one term; return False if it was already over."""
        if self._member.foreign:
            return False
        with self._state:
            is_over = term.remaining <= 0
            self.lose(term)  # do this first: the term must not look valid during the election
            self._over = max(self._over, term.number)
            if is_over or self._member.lost.is_set():
                # If the server still regards this member as the leader, the next heartbeat reports
                # the resignation.
                return False
            # The heartbeat must not report the resignation before the tasks have ended.
            self._handing_over += 1
        try:
            self.await_tasks(now() + TASKS_S)
            return self.lay_down(term.number)
        except ConnectionFailed as error:
            _log.warning("%r could not report its resignation: %s", self._member, error)
            return True
        finally:
            with self._state:
                self._handing_over -= 1

    def lay_down(self, number: int, connection: Connection | None = None) -> bool:
        """Report a resignation to the server; return whether the member still led in that term."""
        member = self._member
        args = [member.id, member.session, "resign", number, self._over]
        reply = member.group.protocol.run(PEERS_UPDATE_MEMBER, args, connection)
        return reply[0] == b"OK" and bool(reply[1])

    def await_tasks(self, deadline: float) -> None:
        """Wait for the tasks to end: until ``deadline`` (``now()`` clock), or until the server may
        have dropped this member and elected another."""
        for task in list(self._tasks.values()):
            thread = task.thread
            if thread is None or thread is threading.current_thread():
                continue
            member = self._member
            while thread.is_alive() and (left_s := min(deadline, member.valid_until) - now()) > 0:
                thread.join(left_s)

    def stop(self) -> None:
        """End the term when the member starts leaving, and begin no other term."""
        # Never reset: the heartbeat must not report the resignation before the tasks have ended.
        self._handing_over += 1
        if self._term is not None:
            self._last = self._term.number
            self.lose(self._term)

    def lay_down_last(self) -> None:
        """Report the resignation, so that the server can elect another member before this one has
        left."""
        if self._last is not None:
            self.lay_down(self._last)

    # -- reports from the server -----------------------------------------------------------------

    def observe(self, reply: HeartbeatReply) -> bool:
        """Process a heartbeat reply; return whether the server still regards the member as leader
        although it has resigned. The caller holds the member's lock."""
        leads = reply.leader == self._member.id and reply.session == self._member.session
        term = self._term
        if term is not None and not leads and reply.term >= term.number:
            self.lose(term)
        if leads:
            self._begin(reply.term)
            return reply.term <= self._over and not self._handing_over
        self._over = max(self._over, reply.term)
        return False

    def elected(self, number: int) -> None:
        """Process the event that made the member the leader in a term."""
        with self._state:
            self._begin(number)

    def deposed(self, number: int) -> None:
        """Process the event that ended the member's leadership in a term."""
        with self._state:
            self._over = max(self._over, number)
            if self._term is not None and self._term.number <= number:
                self.lose(self._term)

    def _begin(self, number: int) -> None:
        """Begin a term, unless the report is outdated or the member may have been replaced."""
        known = self._term
        if number <= self._over or (known is not None and known.number >= number):
            return
        if self._member.valid_until <= now() or not self._member.active:
            return
        if known is not None:
            self.lose(known)
        self._term = term = Term(self._member, number)
        self._state.notify_all()
        for task in self._tasks.values():
            task.start(term)

    def lose(self, term: Term) -> None:
        """Mark a term as lost."""
        with self._state:
            term.lost.set()
            if self._term is term:
                self._term = None

    def drop_expired(self) -> None:
        """Give up a term that was not renewed in time, as another member may have been elected."""
        term = self._term
        if term is not None and not term.valid:
            self.lose(term)

    def reset(self, *, expelled: bool = False) -> None:
        """Lose the term. After an expulsion, term numbers may restart, because the server may have
        lost the group."""
        if self._term is not None:
            self.lose(self._term)
        if expelled:
            self._over = 0
