"""A membership: this process, or a part of it, as a member of a group."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from meteor_py.errors import ConnectionFailed, MembershipLost, MeteorError, PeerError
from meteor_py.peers.config import MEMBERS_MAX
from meteor_py.peers.leader_task import LeaderTask
from meteor_py.peers.leadership import Term
from meteor_py.peers.member import dump_metadata
from meteor_py.peers.messaging.inbox import Inbox
from meteor_py.peers.messaging.target import Sending
from meteor_py.peers.protocol import Beat
from meteor_py.peers.receiving import Receiving
from meteor_py.peers.voting.proposing import Proposing
from meteor_py.peers.voting.voter import Voter, Voting
from meteor_py.records.config import check_function, check_seconds
from meteor_py.redis.scripts import PEERS_JOIN, PEERS_LEAVE, PEERS_UPDATE_MEMBER
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.runtime.lifecycle import Closeable
from meteor_py.runtime.locks import SignalSafeCondition, SignalSafeEvent
from meteor_py.subscribe.lease import BELIEF

if TYPE_CHECKING:
    from meteor_py.peers.group import PeerGroup
    from meteor_py.peers.messaging.requests import Requests
    from meteor_py.redis.connection import Connection

_log = logging.getLogger(__name__)

#: Seconds at most that leaving waits for what leads, or is handled, to end.
WORK_S = 5.0
#: Seconds at most that one who was expelled, and does not know it yet, is waited for.
_BACK_S = 5.0
_BACKOFF_S = (0.01, 0.16)
#: Ids of a member without a name that are remembered after it got another.
_FORMER_MAX = 16


class Membership(Closeable, Proposing, Voting, Sending, Receiving):
    """One member, in the hands of the process that joined. Get it with ``group.join()``.

    Leaves at the end of a ``with`` block. A member that was given a name stays one, dead, when its
    process ends without ``leave()``; joining again under that name, anywhere, goes on with it.
    """

    def __init__(self, group: PeerGroup, member: str, *, persistent: bool, priority: int) -> None:
        self.group = group
        self.id = member
        self.persistent = persistent
        self.priority = priority
        self.session = secrets.token_hex(8)
        #: Until then the server keeps it, even if it is not heard of, by ``lease.now()``.
        self.valid_until = 0.0
        #: Set when it is not a member any more, and will not be by itself.
        self.lost = SignalSafeEvent()
        #: Why.
        self.reason: str | None = None
        #: Its place in the order of joining when it joined.
        self.index = 0
        #: Expelled, and not back yet.
        self.recovering = False
        self._metadata: bytes = b""
        self._term: Term | None = None
        #: Terms up to this number are over for it: no late news makes it believe in them.
        self._over = 0
        self._state = SignalSafeCondition()
        #: Its ids before this one: each time that it was expelled, it got another.
        self.former_ids: deque[str] = deque(maxlen=_FORMER_MAX)
        #: What leads.
        self._works: dict[Callable[[Term], object], LeaderTask] = {}
        #: How many wait for what leads to end before the office is laid down.
        self._handing_over = 0
        #: Whether it leaves: it takes on nothing new, and is a member until the server knows.
        self._leaving = False
        self._how = "stay" if persistent else ""
        #: Whether the server knows that.
        self._announced = False
        #: The term that it had when it began to leave.
        self._office: int | None = None
        self._pid = os.getpid()
        self.voter = Voter(self)

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child: the membership is its parent's."""
        return self._pid != os.getpid()

    @property
    def going(self) -> bool:
        """Whether it is not a member any more, or is about to leave."""
        return self._leaving or self.lost.is_set()

    @property
    def busy(self) -> bool:
        """Whether something leads, or is handled, that leaving would wait for."""
        return self.handles or any(work.thread is not None for work in self._works.values())

    # -- what it says of itself ----------------------------------------------------------------

    def update(self, metadata: Any) -> None:
        """Change its metadata; all who watch are told.

        Raises:
            MembershipLost: It is not a member any more.
            TypeError: It cannot be written as JSON.
            ValueError: It is too long, or has a number that JSON has not (NaN, infinity).
        """
        self._check_owned()
        data = dump_metadata(metadata)
        books = self.group.books
        self.do(
            lambda: books.run(PEERS_UPDATE_MEMBER, [self.id, self.session, "metadata", data]),
            now() + _BACK_S,
        )
        self._metadata = data

    # -- leading -------------------------------------------------------------------------------

    @property
    def term(self) -> Term | None:
        """Its term, if it is the leader now."""
        term = self._term
        return term if term is not None and term.valid else None

    @contextmanager
    def leadership(self, timeout: float | None = None) -> Iterator[Term]:
        """Wait until it is elected; resign at the end of the block.

        Args:
            timeout: Seconds to wait; None waits for as long as it takes.

        Raises:
            TimeoutError: It was not elected in time.
            MembershipLost: It is not a member any more.
            PeerError: The group has no leaders.
        """
        self._check_owned()
        if self.group.config.election == "none":
            raise PeerError(
                f"Group {self.group.name!r} elects nobody (election=None).", group=self.group.name
            )
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        terms: deque[Term] = deque(maxlen=1)

        def decided() -> bool:
            if (term := self.term) is not None:
                terms.append(term)  # now: a moment later it may be lost
            return bool(terms) or self.going

        with self._state:
            self._state.wait_for(decided, timeout)
        if not terms:
            if self.going:
                raise self.lost_error()
            raise TimeoutError(f"Member {self.id!r} was not elected within {timeout:g} seconds.")
        term = terms[0]
        try:
            yield term
        finally:
            self.resign_from(term)

    def as_leader(self, function: Callable[[Term], object]) -> Callable[[Term], object]:
        """Call a function with the term whenever it is elected, in a thread of its own.

        One call at a time: it should end when ``term.lost`` is set, and the next waits for that.
        When it returns, the office stays; if it raises, also ``SystemExit``, others may try.
        """
        self._check_owned()
        check_function("as_leader", function)
        with self._state:
            if function not in self._works:
                self._works[function] = work = LeaderTask(self, function)
                term = self.term
                if term is not None:
                    work.begin(term)
        return function

    def resign(self) -> bool:
        """Lay down the office, if it is the leader, and go to the back of the queue.

        Waits for what leads to end, up to 5 seconds: nobody else is elected before. Alone it is
        elected again at once, in another term.

        Returns:
            Whether it was the leader.
        """
        self._check_owned()
        term = self.term
        return term is not None and self.resign_from(term)

    def resign_from(self, term: Term) -> bool:
        """Lay down one term; tell whether it had not ended before."""
        if self.foreign:
            return False
        with self._state:
            is_over = term.remaining <= 0
            self.lose_term(term)  # first: nobody may believe in it while another is elected
            self._over = max(self._over, term.number)
            if is_over or self.lost.is_set():
                return False  # should the server think otherwise, the heart will tell it
            self._handing_over += 1  # until then the heart must not tell it
        try:
            self._await_works(now() + WORK_S)
            return self.lay_down(term.number)
        except ConnectionFailed as error:
            _log.warning("%r could not say yet that it resigns: %s", self, error)
            return True
        finally:
            with self._state:
                self._handing_over -= 1

    def lay_down(self, number: int, connection: Connection | None = None) -> bool:
        """Tell the server that it does not lead any more in a term."""
        args = [self.id, self.session, "resign", number, self._over]
        answer = self.group.books.run(PEERS_UPDATE_MEMBER, args, connection)
        return answer[0] == b"OK" and bool(answer[1])

    def _await_works(self, deadline: float) -> None:
        """Wait for what leads to end, while nobody else is elected: as long as the server keeps
        it, but not for too long."""
        for work in list(self._works.values()):
            thread = work.thread
            if thread is None or thread is threading.current_thread():
                continue
            while thread.is_alive() and (left_s := min(deadline, self.valid_until) - now()) > 0:
                thread.join(left_s)

    # -- the end -------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave for good, named or not: what is being handled is finished, in 5 seconds; other
        messages to it fail. Leaving twice is fine."""
        if self._go(""):
            self.group.catch_up()

    def close(self) -> None:
        """End the membership: one without a name leaves, a named one may come back."""
        self._go("stay" if self.persistent else "")

    def _end_block(self) -> None:
        self.leave()

    def _go(self, how: str) -> bool:
        """Leave; tell whether the server knows."""
        if self.begin_to_go(how):
            return self.finish_going(now() + WORK_S)
        if not self.foreign:
            self.join_inbox(WORK_S)
        return False

    def begin_to_go(self, how: str) -> bool:
        """Take on nothing new; whether there is something to be finished. In this order: nobody
        believes in a term that is given up, what leads has ended, another is elected."""
        if self.foreign or self.lost.is_set():
            return False
        with self._state:
            if not self._leaving:  # else that was interrupted
                self._how = how
                self._handing_over += 1  # for good: the heart must not lay down the office first
                self._leaving = True
                if self._term is not None:
                    self._office = self._term.number
                    self.lose_term(self._term)
            self._state.notify_all()
        self.voter.end()
        self.end_inbox()
        return True

    def announce(self) -> bool:
        """If it has to end something first, have the server choose it for nothing new: messages
        for anybody or all, votes, office. Whether the server answered, if it was asked."""
        if self._announced or not self.busy:
            return True
        try:
            self.group.books.run(PEERS_UPDATE_MEMBER, [self.id, self.session, "leave", ""])
            self._announced = True
        except MeteorError as error:
            _log.warning("%r could not say that it will leave: %s", self, error)
        return self._announced

    def finish_going(self, deadline: float) -> bool:
        """When what is at work here has ended, or at that time by ``now()``, tell the server;
        whether that knows it then. Until then this is a member, and is heard of."""
        self.announce()
        self._await_works(deadline)
        try:
            if self._office is not None and self.handles:
                self.lay_down(self._office)  # let others lead while handlers take their time
            self.join_inbox(max(deadline - now(), 0.0))
            self.withdraw()
            told = True
        except MeteorError as error:
            _log.warning("%r could not say that it leaves: %s", self, error)
            told = False
        self.lose("left")  # not if it was interrupted: then the group tells the server at its end
        return told

    def withdraw(self, connection: Connection | None = None) -> None:
        """Have the server take it out, in the way it left."""
        self.group.books.run(PEERS_LEAVE, [self.id, self.session, self._how], connection)

    def __repr__(self) -> str:
        state = f"lost: {self.reason}" if self.lost.is_set() else "alive"
        return f"<Membership {self.id!r} in {self.group.name!r} ({state})>"

    # -- for the group's threads ---------------------------------------------------------------

    def join(
        self, on_conflict: str, metadata: bytes | None = None, connection: Connection | None = None
    ) -> bool:
        """Become a member; False if somebody has the name."""
        if metadata is not None:
            self._metadata = metadata
        sent = now()
        args: list[Any] = [self.id, self.session, "1" if self.persistent else "0", self.priority]
        args += [self._metadata, on_conflict, MEMBERS_MAX]
        answer = self.group.books.run(PEERS_JOIN, args, connection)
        if answer[0] == b"FULL":
            raise PeerError(
                f"Group {self.group.name!r} has {answer[1]:,} members, and may not have more; "
                "remove those who are dead, or begin another instance.",
                group=self.group.name,
            )
        if answer[0] == b"TAKEN":
            return False
        with self._state:
            self.index = answer[1]
            self._renew(sent, answer[2] / 1000)
        return True

    def heard(self, sent: float, beat: Beat) -> bool:
        """The server says that it is a member; tell whether it leads there, though it resigned."""
        with self._state:
            self._renew(sent, beat.ttl)
            leads = beat.leader == self.id and beat.session == self.session
            term = self._term
            if term is not None and not leads and beat.term >= term.number:
                self.lose_term(term)
            if leads:
                self._elected(beat.term)
                return beat.term <= self._over and not self._handing_over
            self._over = max(self._over, beat.term)
            return False

    def elected(self, number: int) -> None:
        """An event says that it leads."""
        with self._state:
            self._elected(number)

    def deposed(self, number: int) -> None:
        """An event says that it leads no more, in that term."""
        with self._state:
            self._over = max(self._over, number)
            if self._term is not None and self._term.number <= number:
                self.lose_term(self._term)

    def _elected(self, number: int) -> None:
        """Begin a term, unless that is old news, or it is too late to believe in it."""
        known = self._term
        if number <= self._over or (known is not None and known.number >= number):
            return
        if self.valid_until <= now() or self.going:
            return
        if known is not None:
            self.lose_term(known)
        self._term = term = Term(self, number)
        self._state.notify_all()
        for work in self._works.values():
            work.begin(term)

    def lose_term(self, term: Term) -> None:
        """It does not lead any more, in that term."""
        with self._state:
            term.lost.set()
            if self._term is term:
                self._term = None

    def check_belief(self) -> None:
        """Give up the term if it was not renewed: the server may have replaced it by now."""
        term = self._term
        if term is not None and not term.valid:
            self.lose_term(term)

    def lose(self, reason: str) -> None:
        """It is not a member any more, for good."""
        with self._state:
            self.reason = self.reason or reason
            if self._term is not None:
                self.lose_term(self._term)
            self.valid_until = 0.0
            self.lost.set()
            self._state.notify_all()
        self.voter.end()
        self.end_inbox(close=True)
        self.group.forget(self)

    def begin_anew(self) -> None:
        """Expelled, but not on purpose: another session, and another id if it has no name."""
        with self._state:
            if self._term is not None:
                self.lose_term(self._term)
            self.session = secrets.token_hex(8)
            self.recovering = True
            self.valid_until = 0.0
            self._over = 0
            if not self.persistent:
                self.former_ids.append(self.id)
                self.id = new_id()

    def do(self, call: Callable[[], list[Any]], deadline: float) -> list[Any]:
        """Have the server do something for it; again, until a time by ``now()``, if that says it
        is not a member: expelled ones join again by themselves.

        Raises:
            MembershipLost: It has not until then, or it is one no more for good.
        """
        failures = 0
        while not self.lost.is_set():
            answer = call()
            if answer[0] != b"FENCED":
                return answer
            failures += 1
            pause = pause_s(failures, *_BACKOFF_S)
            if now() + pause >= deadline:
                break
            self.group.hurry()
            self.lost.wait(pause)
        raise self.lost_error()

    def lost_error(self) -> MeteorError:
        reason = self.reason or ("left" if self._leaving else "expelled, or joined again elsewhere")
        return MembershipLost(
            f"Member {self.id!r} is not in group {self.group.name!r} any more ({reason}); "
            "join again if it should be.",
            group=self.group.name,
        )

    def _mail_of(self) -> tuple[Requests, Membership]:
        return self.group.mail, self

    def _open_inbox(self) -> Inbox:
        self._check_owned()
        with self._state:
            if self.going:  # under the lock: nobody would end it
                raise self.lost_error()
            if self._inbox is None:
                self._inbox = Inbox(self)
            return self._inbox

    def _proposer(self) -> tuple[PeerGroup, Membership]:
        self._check_owned()
        return self.group, self

    def _renew(self, sent: float, ttl: float) -> None:
        self.check_belief()  # who was not sure for a moment begins another term
        self.valid_until = max(self.valid_until, sent + ttl * BELIEF)

    def _check_owned(self) -> None:
        if self.foreign:
            raise MeteorError(
                f"Member {self.id!r} of group {self.group.name!r} belongs to the parent process; "
                "open the group here with client.peer_group(), and join."
            )
        if self.lost.is_set():
            raise self.lost_error()


def new_id() -> str:
    """An id for a member that was not given a name."""
    return secrets.token_hex(8)
