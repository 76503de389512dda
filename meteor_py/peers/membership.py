"""A membership: this process, or a part of it, as a member of a group."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from meteor_py.closing import Closing
from meteor_py.errors import ConnectionFailed, MembershipLost, MeteorError
from meteor_py.lease import BELIEF, now
from meteor_py.peers.books import Beat
from meteor_py.peers.member import dump_metadata
from meteor_py.peers.term import Term
from meteor_py.scripts import PEERS_JOIN, PEERS_LEAVE, PEERS_UPDATE
from meteor_py.state import State

if TYPE_CHECKING:
    from meteor_py.link import Link
    from meteor_py.peers.group import PeerGroup

_log = logging.getLogger(__name__)


class Membership(Closing):
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
        self._metadata: bytes = b""
        self._term: Term | None = None
        self._state = State()
        self._leaders: list[Callable[[Term], object]] = []

    # -- what it says of itself ----------------------------------------------------------------

    def update(self, metadata: Any) -> None:
        """Change its metadata; all who watch are told.

        Raises:
            MembershipLost: It is not a member any more.
            TypeError: It cannot be written as JSON.
        """
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
        """
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
        """Call a function with the term whenever it is elected, in a thread of its own."""
        self._leaders.append(function)
        term = self.term
        if term is not None:
            self._lead(function, term)
        return function

    def resign(self) -> bool:
        """Lay down the office, if it is the leader, and go to the back of the queue.

        Returns:
            Whether it was the leader.
        """
        term = self.term
        return term is not None and self._resign(term)

    def _resign(self, term: Term) -> bool:
        was_valid = term.valid
        self.lose_term(term)  # first: nobody may believe in it while another is elected
        if not was_valid or self.lost.is_set():
            return False
        args = [self.id, self.session, "resign", term.number]
        answer = self.group.books.run(PEERS_UPDATE, args)
        return answer[0] == b"OK" and bool(answer[1])

    def _lead(self, function: Callable[[Term], object], term: Term) -> None:
        def lead() -> None:
            try:
                function(term)
            except Exception:
                _log.exception("What leads group %r failed.", self.group.name)

        threading.Thread(target=lead, name=f"meteor-leader-{self.group.name}", daemon=True).start()

    # -- the end -------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave for good, named or not. Its messages fail; leaving twice is fine."""
        self._go("")

    def close(self) -> None:
        """End the membership: one without a name leaves, a named one may come back."""
        self._go("stay" if self.persistent else "")

    def __exit__(self, *error: Any) -> None:
        self.leave()

    def _go(self, how: str) -> None:
        if self.lost.is_set():
            return
        self.lose("left")
        try:
            self.group.books.run(PEERS_LEAVE, [self.id, self.session, how])
        except ConnectionFailed as error:
            _log.warning("%r could not say that it leaves: %s", self, error)

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
        args = [self.id, self.session, "1" if self.persistent else "0", self.priority]
        answer = self.group.books.run(PEERS_JOIN, [*args, self._metadata, on_conflict], link)
        if answer[0] == b"TAKEN":
            return False
        self._renew(sent)
        return True

    def heard(self, sent: float, beat: Beat, here: bool) -> bool:
        """Take in an answer of the server; False if it is not a member any more."""
        if not here:
            return False
        self._renew(sent)
        leads = beat.leader == self.id and beat.session == self.session
        with self._state:
            term = self._term
            if term is not None and (not leads or term.number != beat.term):
                self.lose_term(term)
            if leads and (self._term is None or self._term.lost.is_set()):
                self._elected(beat.term)
        return True

    def elected(self, number: int) -> None:
        """An event says that it leads."""
        with self._state:
            if self._term is None or self._term.number != number or self._term.lost.is_set():
                self._elected(number)

    def _elected(self, number: int) -> None:
        self._term = term = Term(self, number)
        self._state.notify_all()
        if term.valid:
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
        self.group.forget(self)

    def begin_anew(self) -> None:
        """Expelled, but not on purpose: another session, and another id if it has no name."""
        with self._state:
            if self._term is not None:
                self.lose_term(self._term)
            self.session = secrets.token_hex(8)
            if not self.persistent:
                self.id = new_id()

    def lost_error(self) -> MeteorError:
        return MembershipLost(
            f"Member {self.id!r} is not in group {self.group.name!r} any more ({self.reason}); "
            "join again if it should be.",
            group=self.group.name,
        )

    def _renew(self, sent: float) -> None:
        self.valid_until = max(self.valid_until, sent + self.group.config.ttl * BELIEF)

    def _check(self, answer: list[Any]) -> None:
        if answer[0] == b"FENCED":
            self.reason = self.reason or "expelled, or joined again elsewhere"
            raise self.lost_error()


def new_id() -> str:
    """An id for a member that was not given a name."""
    return secrets.token_hex(8)
