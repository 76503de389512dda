"""A membership: this process, or a part of it, as a member of a group."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from meteor_py.closing import Closing
from meteor_py.errors import ConnectionFailed, MembershipLost, MeteorError, PeerError
from meteor_py.lease import BELIEF, now
from meteor_py.peers.books import Beat
from meteor_py.peers.config import MEMBERS_MAX
from meteor_py.peers.inbox import Inbox
from meteor_py.peers.member import dump_metadata
from meteor_py.peers.proposing import Proposing
from meteor_py.peers.receiving import Receiving
from meteor_py.peers.target import Sending
from meteor_py.peers.term import Term
from meteor_py.peers.voter import Voter, Voting
from meteor_py.scripts import PEERS_JOIN, PEERS_LEAVE, PEERS_UPDATE
from meteor_py.state import State

if TYPE_CHECKING:
    from meteor_py.link import Link
    from meteor_py.peers.group import PeerGroup
    from meteor_py.peers.mail import Mail

_log = logging.getLogger(__name__)

#: Seconds at most that leaving waits for what leads to end.
_WORK_S = 5.0
#: Seconds after which what leads and failed lets others try.
_FAILED_S = 1.0


class Membership(Closing, Proposing, Voting, Sending, Receiving):
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
        self.lost = threading.Event()
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
        self._state = State()
        #: What leads, and the threads that do it now, or did last.
        self._leaders: dict[Callable[[Term], object], threading.Thread | None] = {}
        self._how = ""
        self._pid = os.getpid()
        self.voter = Voter(self)

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child: the membership is its parent's."""
        return self._pid != os.getpid()

    # -- what it says of itself ----------------------------------------------------------------

    def update(self, metadata: Any) -> None:
        """Change its metadata; all who watch are told.

        Raises:
            MembershipLost: It is not a member any more.
            TypeError: It cannot be written as JSON.
            ValueError: It is too long.
        """
        self._check_owned()
        data = dump_metadata(metadata)
        answer = self.group.books.run(PEERS_UPDATE, [self.id, self.session, "metadata", data])
        self._check(answer)
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
        with self._state:
            self._state.wait_for(lambda: self.term is not None or self.lost.is_set(), timeout)
            term = self.term
        if term is None:
            if self.lost.is_set():
                raise self.lost_error()
            raise TimeoutError(f"Member {self.id!r} was not elected within {timeout:g} seconds.")
        try:
            yield term
        finally:
            self._resign(term)

    def as_leader(self, function: Callable[[Term], object]) -> Callable[[Term], object]:
        """Call a function with the term whenever it is elected, in a thread of its own.

        One call at a time: it should end when ``term.lost`` is set, and the next waits for that.
        When it returns, the office stays; if it raises, others may try.
        """
        self._check_owned()
        with self._state:
            self._leaders.setdefault(function, None)
            term = self.term
            if term is not None:
                self._lead(function, term)
        return function

    def resign(self) -> bool:
        """Lay down the office, if it is the leader, and go to the back of the queue.

        Alone it is elected again at once, in another term.

        Returns:
            Whether it was the leader.
        """
        self._check_owned()
        term = self.term
        return term is not None and self._resign(term)

    def _resign(self, term: Term) -> bool:
        if self.foreign:
            return False
        left_s = term.remaining
        with self._state:
            self.lose_term(term)  # first: nobody may believe in it while another is elected
            self._over = max(self._over, term.number)
        if left_s <= 0 or self.lost.is_set():
            return False  # should the server think otherwise, the heart will tell it
        self._await_leaders(left_s)
        try:
            return self.lay_down(term.number)
        except ConnectionFailed as error:
            _log.warning("%r could not say yet that it resigns: %s", self, error)
            return True

    def lay_down(self, number: int, link: Link | None = None) -> bool:
        """Tell the server that it does not lead any more in a term."""
        args = [self.id, self.session, "resign", number, self._over]
        answer = self.group.books.run(PEERS_UPDATE, args, link)
        return answer[0] == b"OK" and bool(answer[1])

    def _lead(self, function: Callable[[Term], object], term: Term) -> None:
        thread = threading.Thread(
            target=self._run_leader,
            args=(function, term, self._leaders[function]),
            name=f"meteor-leader-{self.group.name}",
            daemon=True,
        )
        thread.start()
        self._leaders[function] = thread
        self.group.own(thread)

    def _run_leader(
        self, function: Callable[[Term], object], term: Term, before: threading.Thread | None
    ) -> None:
        if before is not None:
            before.join()
        if not term.valid:
            return
        try:
            function(term)
        except Exception:
            _log.exception("What leads group %r failed.", self.group.name)
            if not term.lost.wait(min(_FAILED_S, self.group.config.ttl / 3)):
                self._resign(term)

    def _await_leaders(self, timeout_s: float) -> bool:
        """Wait for what leads to end; nobody else is elected meanwhile, if that is not too long."""
        deadline = now() + min(timeout_s, _WORK_S)
        for thread in list(self._leaders.values()):
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(deadline - now(), 0.0))
        return not any(thread and thread.is_alive() for thread in self._leaders.values())

    # -- the end -------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave for good, named or not. Its messages fail; leaving twice is fine."""
        if self._go(""):
            self.group.catch_up()

    def close(self) -> None:
        """End the membership: one without a name leaves, a named one may come back."""
        self._go("stay" if self.persistent else "")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.leave()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"While leaving group {self.group.name!r}: {failure}")

    def _go(self, how: str) -> bool:
        """Leave; tell whether the server knows. In this order: nobody believes in a term that is
        given up, what leads has ended, another is elected."""
        if self.foreign or self.lost.is_set():
            self.join_inbox(0.0 if self.foreign else _WORK_S)
            return False
        term = self._term
        left_s = 0.0 if term is None else term.remaining
        self._how = how
        self.lose("left")
        self._await_leaders(left_s)
        try:
            self.withdraw()
        except (ConnectionFailed, PeerError) as error:
            _log.warning("%r could not say that it leaves: %s", self, error)
            return False
        finally:
            self.join_inbox(_WORK_S)
        return True

    def withdraw(self, link: Link | None = None) -> None:
        """Have the server take it out, in the way it left."""
        self.group.books.run(PEERS_LEAVE, [self.id, self.session, self._how], link)

    def __repr__(self) -> str:
        state = f"lost: {self.reason}" if self.lost.is_set() else "alive"
        return f"<Membership {self.id!r} in {self.group.name!r} ({state})>"

    # -- for the group's threads ---------------------------------------------------------------

    def join(
        self, on_conflict: str, metadata: bytes | None = None, link: Link | None = None
    ) -> bool:
        """Become a member; False if somebody has the name."""
        if metadata is not None:
            self._metadata = metadata
        sent = now()
        args: list[Any] = [self.id, self.session, "1" if self.persistent else "0", self.priority]
        args += [self._metadata, on_conflict, MEMBERS_MAX]
        answer = self.group.books.run(PEERS_JOIN, args, link)
        if answer[0] == b"FULL":
            raise PeerError(
                f"Group {self.group.name!r} has {answer[1]:,} members, and may not have more.",
                group=self.group.name,
            )
        if answer[0] == b"TAKEN":
            return False
        with self._state:
            self.index = answer[1]
            self._renew(sent)
        return True

    def heard(self, sent: float, beat: Beat) -> bool:
        """The server says that it is a member; tell whether it leads there, though it resigned."""
        with self._state:
            self._renew(sent)
            leads = beat.leader == self.id and beat.session == self.session
            term = self._term
            if term is not None and not leads and beat.term >= term.number:
                self.lose_term(term)
            if leads:
                self._elected(beat.term)
                return beat.term <= self._over
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
        if self.valid_until <= now() or self.lost.is_set():
            return
        if known is not None:
            self.lose_term(known)
        self._term = term = Term(self, number)
        self._state.notify_all()
        for function in self._leaders:
            self._lead(function, term)

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
        self.end_inbox()
        self.group.forget(self)

    def begin_anew(self) -> None:
        """Expelled, but not on purpose: another session, and another id if it has no name."""
        with self._state:
            if self._term is not None:
                self.lose_term(self._term)
            self.session = secrets.token_hex(8)
            self.recovering = True
            self._over = 0
            if not self.persistent:
                self.id = new_id()

    def lost_error(self) -> MeteorError:
        reason = self.reason or "expelled, or joined again elsewhere"
        return MembershipLost(
            f"Member {self.id!r} is not in group {self.group.name!r} any more ({reason}); "
            "join again if it should be.",
            group=self.group.name,
        )

    def _mail_of(self) -> tuple[Mail, Membership]:
        return self.group.mail, self

    def _open_inbox(self) -> Inbox:
        self._check_owned()
        with self._state:
            if self.lost.is_set():  # under the lock: nobody would end it
                raise self.lost_error()
            if self._inbox is None:
                self._inbox = Inbox(self)
            return self._inbox

    def _proposer(self) -> tuple[PeerGroup, Membership]:
        self._check_owned()
        return self.group, self

    def _renew(self, sent: float) -> None:
        self.check_belief()  # who was not sure for a moment begins another term
        self.valid_until = max(self.valid_until, sent + self.group.config.ttl * BELIEF)

    def _check(self, answer: list[Any]) -> None:
        if answer[0] == b"FENCED":
            raise self.lost_error()

    def _check_owned(self) -> None:
        if self.foreign:
            raise MeteorError(
                f"Member {self.id!r} of group {self.group.name!r} is the parent process; open the "
                "group here with client.group(), and join."
            )
        if self.lost.is_set():
            raise self.lost_error()


def new_id() -> str:
    """An id for a member that was not given a name."""
    return secrets.token_hex(8)
