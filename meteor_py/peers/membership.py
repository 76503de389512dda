"""A membership: this process, or a part of it, as a member of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from meteor_py.peers.leadership import Term
from meteor_py.peers.member import dump_metadata
from meteor_py.peers.member_handle import MemberHandle
from meteor_py.peers.messaging.inbox import Ack
from meteor_py.peers.messaging.message import Message
from meteor_py.peers.messaging.target import Everybody, Target, Targets
from meteor_py.peers.voting.actions import Handler
from meteor_py.peers.voting.proposal import Kind, Outcome
from meteor_py.peers.voting.proposing import Proposer
from meteor_py.records.config import check_choice, check_function, check_seconds
from meteor_py.redis import keys
from meteor_py.runtime.clock import now
from meteor_py.runtime.lifecycle import Closeable

if TYPE_CHECKING:
    from meteor_py.peers.group import PeerGroup

_F = TypeVar("_F", bound=Callable[..., object])

#: Seconds at most that a call waits for a member that was expelled, and does not know it yet.
_BACK_S = 5.0


class Membership(Closeable):
    """One member, held by the process that joined. Get it with ``group.join()``.

    Leaves at the end of a ``with`` block. A member that was given a name stays one, dead, when its
    process ends without ``leave()``; joining again under that name, anywhere, continues it.
    """

    def __init__(self, group: PeerGroup, handle: MemberHandle) -> None:
        self.group = group
        #: Whether it was given a name: then it stays a member when it dies, and can come back.
        self.persistent = handle.persistent
        #: Members with a higher one lead before others.
        self.priority = handle.priority
        #: Set when it is not a member any more, and will not be by itself.
        self.lost = handle.lost
        self._handle = handle
        self._targets = Targets(handle.group.requests, handle)
        self._proposer = Proposer(handle.group, handle)

    @property
    def id(self) -> str:
        """Its name, or a random id; another one after the server took it for dead."""
        return self._handle.id

    @property
    def reason(self) -> str | None:
        """Why it is lost."""
        return self._handle.reason

    def update(self, metadata: Any) -> None:
        """Change its metadata; all listeners are told.

        Raises:
            MembershipLost: It is not a member any more.
            TypeError: It cannot be written as JSON.
            ValueError: It is too long, or has a number that JSON has not (NaN, infinity).
        """
        self._handle.check_owned()
        self._handle.update(dump_metadata(metadata), now() + _BACK_S)

    # -- leading -----------------------------------------------------------------------------------

    @property
    def term(self) -> Term | None:
        """Its term, if it is the leader now."""
        return self._handle.leadership.term

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
        self._handle.check_owned()
        term = self._handle.leadership.wait(timeout)
        try:
            yield term
        finally:
            self._handle.leadership.resign(term)

    def as_leader(self, function: Callable[[Term], object]) -> Callable[[Term], object]:
        """Call a function with the term whenever it is elected, in a separate thread.

        One call at a time: it should end when ``term.lost`` is set, and the next waits for that.
        When it returns, the member stays the leader; if it raises, also ``SystemExit``, others may
        try.
        """
        self._handle.check_owned()
        check_function("as_leader", function)
        self._handle.leadership.add_task(function)
        return function

    def resign(self) -> bool:
        """Stop leading, if it is the leader, and go to the back of the queue.

        Waits for leader tasks to end, up to 5 seconds: no other member is elected before. Alone it
        is elected again at once, in another term.

        Returns:
            Whether it was the leader.
        """
        self._handle.check_owned()
        term = self.term
        return term is not None and self._handle.leadership.resign(term)

    # -- messages ----------------------------------------------------------------------------------

    def on(
        self,
        queue: str,
        *,
        workers: int = 1,
        priority: int | None = None,
        ack: Ack = "auto",
        timeout: float | None = None,
    ) -> Callable[[_F], _F]:
        """Call a function with each ``Message`` of a queue: a decorator.

        Its return value is the reply, and an exception fails the message. Messages of one sender
        arrive in the order in which they were sent, if they have the same priority and there is one
        worker. Each is delivered at least once: if its member dies, or loses its connection for
        long, it may be delivered again, with the same ``id``. A queue without a function keeps its
        messages.

        Args:
            queue: 1 to 128 of A-Z a-z 0-9 . _ -
            workers: Threads that call it.
            priority: 1 to 256: functions with a priority take turns in one thread of the member,
                and of the messages that wait those for the lowest priority come first. Without
                one it has its own threads, and waits for no other function.
            ack: "auto", or "manual": the function, or other code later, calls ``message.ack()``,
                ``reply()``, ``fail()`` or ``retry()``. Up to 1,000 messages may be open then.
            timeout: Seconds after which a message is failed that it has not settled. The function
                is not stopped.

        Raises:
            ValueError: The queue has a function already.
            MembershipLost: It is not a member any more.
        """
        inbox = self._handle.inbox()

        def register(function: _F) -> _F:
            inbox.on(queue, function, workers=workers, priority=priority, ack=ack, timeout=timeout)
            return function

        return register

    def inbox(self, queue: str, timeout: float | None = None) -> Iterator[Message]:
        """Iterate over the messages of a queue, instead of a function; settle each of them.

        Args:
            timeout: Ends when none arrives for so many seconds; None waits for as long as this is a
                member.
        """
        return self._handle.inbox().pull(queue, timeout)

    def member(self, member: str) -> Target:
        """As ``group.member``; the receiver sees this member as the sender."""
        return self._targets.member(member)

    @property
    def any(self) -> Target:
        """As ``group.any``; the receiver sees this member as the sender."""
        return self._targets.any

    @property
    def all(self) -> Everybody:
        """As ``group.all``; the receivers see this member as the sender."""
        return self._targets.all

    @property
    def leader_proxy(self) -> Target:
        """As ``group.leader_proxy``; the receiver sees this member as the sender."""
        return self._targets.leader

    # -- votes and actions -------------------------------------------------------------------------

    def propose(
        self,
        topic: Any,
        *,
        kind: Kind | int = "majority",
        timeout: float = 5.0,
        require_leader: bool = False,
    ) -> Future[Outcome]:
        """As ``group.propose``; ``by`` names this member."""
        self._handle.check_owned()
        return self._proposer.propose(topic, kind, timeout, require_leader)

    def propose_action(
        self,
        name: str,
        params: Any = None,
        *,
        at: float,
        kind: Kind | int = "consensus",
        timeout: float = 1.0,
        max_error: float | None = None,
        require_leader: bool = False,
    ) -> Future[Outcome]:
        """As ``group.propose_action``; ``by`` names this member."""
        self._handle.check_owned()
        return self._proposer.propose_action(
            name, params, at, kind, timeout, max_error, require_leader
        )

    def on_vote(self, function: _F) -> _F:
        """Call a function with each ``Proposal``: it returns True, False, or None to abstain.

        An exception is logged, and counts as a no. The function is called in a thread of this
        member, once for each proposal that was made while it was a member, also those that are open
        already. A vote after ``proposal.deadline`` does not count. Another function replaces it.
        """
        check_function("on_vote", function)
        self._handle.voter.set_vote(function)  # type: ignore[arg-type]  # as documented
        return function

    def on_action(
        self,
        name: str,
        *,
        early: float = 0.002,
        late: Literal["skip", "run"] = "skip",
        max_late: float = 0.1,
    ) -> Callable[[_F], _F]:
        """Call a function with an ``Action`` of that name, at the time that was agreed on.

        A member that has such handlers, and no ``on_vote``, votes yes to their actions, and no to
        others. Each call runs in its own thread, which ends with it.

        >>> @me.on_action("open")                       # doctest: +SKIP
        ... def open_breaker(action):
        ...     relay(action.params["relay"]).open()

        Args:
            name: Of the action. Another handler of that name replaces it.
            early: Seconds before the time when it stops sleeping, and spins: that costs a
                processor, and starts within microseconds rather than when the system likes.
            late: If the decision is known only after the time, or the process has slept: "skip" it
                and call ``on_missed``, or "run" it nevertheless.
            max_late: Seconds after the time from which on it counts as slept through.
        """
        keys.check_name(name, "action")
        check_choice("late", late, ("skip", "run"))
        if check_seconds("early", early, zero=True) > 1:
            raise ValueError(f"early must be at most 1 second, not {early}.")
        check_seconds("max_late", max_late)

        def register(function: _F) -> _F:
            check_function("on_action", function)
            handler = Handler(function, early, late == "run", max_late, now())
            self._handle.voter.set_handler(name, handler)
            return function

        return register

    def on_missed(self, function: _F) -> _F:
        """Call a function with each ``Action`` that is not run here: its time was over, or this
        member, without a name, was taken for dead since it was asked, and is another one now."""
        check_function("on_missed", function)
        self._handle.voter.add_missed(function)
        return function

    # -- the end -----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave for good, named or not: handlers may finish, in 5 seconds; other messages to it
        fail. Leaving twice is fine."""
        if self._handle.leave(""):
            self._handle.group.catch_up()

    def close(self) -> None:
        """End the membership: one without a name leaves, a named one may come back."""
        self._handle.leave("stay" if self.persistent else "")

    def _end_block(self) -> None:
        self.leave()

    def __repr__(self) -> str:
        return repr(self._handle)
