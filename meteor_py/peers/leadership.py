"""A term of office: what a leader holds, and how it knows that it does not any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meteor_py.errors import StaleTerm
from meteor_py.peers.member import Member
from meteor_py.redis.scripts import PEERS_GUARDED_WRITE
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeEvent

if TYPE_CHECKING:
    from meteor_py.peers.membership import Membership


class Term:
    """One term of this process as the leader.

    >>> with me.leadership() as term:               # doctest: +SKIP
    ...     while term.valid:
    ...         write(record, fence=term.number)

    Once lost, it stays lost: who is elected again gets another. So does a leader that was cut off
    too long to be sure, and then finds that nobody was elected in its place: another with the same
    ``number``, which is still its own.
    """

    def __init__(self, membership: Membership, number: int) -> None:
        #: Higher than that of every term before it: the number to fence writes with.
        self.number = number
        #: Set as soon as this process knows that it is not the leader any more.
        self.lost = SignalSafeEvent()
        self._membership = membership

    @property
    def leader(self) -> Member | None:
        """The member that leads, which is this one."""
        return self._membership.group.picture.members.get(self._membership.id)

    @property
    def valid(self) -> bool:
        """Whether nobody else can be the leader now. Answered here, without the network.

        Unless somebody removes it or joins under its name: the news of that has to come here
        first. So write with ``guard``, or with ``number``. False in a forked child.
        """
        if self.remaining > 0:
            return True
        if not self._membership.foreign:
            self._membership.lose_term(self)  # for good, even if the server is heard of again
        return False

    @property
    def remaining(self) -> float:
        """Seconds for which it is valid even if the server is not heard of again."""
        if self.lost.is_set() or self._membership.foreign:
            return 0.0
        return max(self._membership.valid_until - now(), 0.0)

    @property
    def guard(self) -> Guard:
        """Writes that only the leader of this term can make."""
        return Guard(self._membership, self)

    def __repr__(self) -> str:
        return f"<Term {self.number} ({'valid' if self.valid else 'lost'})>"


class Guard:
    """A few values of the group, written under a term and read by anybody (``group.guarded``)."""

    def __init__(self, membership: Membership, term: Term) -> None:
        self._membership = membership
        self._term = term

    def set(self, name: str, value: bytes | str) -> None:
        """Write a value.

        Raises:
            StaleTerm: This is not the leader of the term any more; nothing was written.
        """
        self._write("set", name, value)

    def delete(self, name: str) -> None:
        """Remove a value. Raises as ``set``."""
        self._write("delete", name, b"")

    def _write(self, what: str, name: str, value: bytes | str) -> None:
        membership = self._membership
        if not self._term.valid:
            raise self._stale("this process has given it up")
        args = [self._term.number, membership.session, what, name, value]
        answer = membership.group.books.run(PEERS_GUARDED_WRITE, args)
        if answer[0] != b"OK":
            membership.lose_term(self._term)
            raise self._stale(f"the present one is {answer[1]}")

    def _stale(self, why: str) -> StaleTerm:
        group = self._membership.group.name
        return StaleTerm(
            f"Term {self._term.number} of group {group!r} is over, {why}; nothing was written. "
            "Stop what only the leader may do.",
            group=group,
        )
