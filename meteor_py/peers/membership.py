"""``Membership``: a group member that joined in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from meteor_py.peers.leadership import Term
from meteor_py.peers.member import dump_metadata
from meteor_py.peers.member_handle import MemberHandle
from meteor_py.peers.messaging.inbox import Ack
from meteor_py.peers.messaging.message import Message
from meteor_py.peers.sender import Sender
from meteor_py.peers.voting.actions import Handler
from meteor_py.records.config import check_choice, check_function, check_seconds
from meteor_py.redis import keys
from meteor_py.runtime.clock import now

if TYPE_CHECKING:
    from meteor_py.peers.group import PeerGroup

_F = TypeVar("_F", bound=Callable[..., object])

#: If a member was expelled, a call waits at most this many seconds for it to rejoin.
_BACK_S = 5.0


class Membership(Sender):
    """A member that joined in this process. Get it with ``group.join()``.

    At the end of a ``with`` block, the member leaves. If the process ends without ``leave()``, a
    named member stays in the group, marked as dead, until a process joins under its name again or
    the member expires (``member_expiration``).
    """

    def __init__(self, group: PeerGroup, handle: MemberHandle) -> None:
        super().__init__(handle.group, handle)
        self.group = group
        #: Whether it has a name. A named member stays in the group when it dies, and can rejoin.
        self.persistent = handle.persistent
        #: Members with a higher priority are elected before others.
        self.priority = handle.priority
        #: Set once the membership has ended and the member will not rejoin automatically.
        self.lost = handle.lost
        self._handle = handle

    @property
    def id(self) -> str:
        """The member's name. A member without a name has a random id instead, which changes if the
        server drops the member and it rejoins."""
        return self._handle.id

    @property
    def reason(self) -> str | None:
        """Why the membership was lost; None if it was not."""
        return self._handle.reason

    def update(self, metadata: Any) -> None:
        """Change the member's metadata; listeners get an "updated" event.

        Raises:
            MembershipLost: The member is no longer in the group.
            TypeError: The metadata cannot be written as JSON.
            ValueError: The metadata is too long or nested too deeply, or contains NaN or infinity,
                which JSON lacks.
        """
        self._handle.check_owned()
        self._handle.update(dump_metadata(metadata), now() + _BACK_S)

    # -- leading -----------------------------------------------------------------------------------

    @property
    def term(self) -> Term | None:
        """The member's current term; None if it is not the leader."""
        return self._handle.leadership.term

    @contextmanager
    def leadership(self, timeout: float | None = None) -> Iterator[Term]:
        """Wait until the member is elected; resign at the end of the block.

        >>> with me.leadership(timeout=10) as term:     # doctest: +SKIP
        ...     while term.valid:
        ...         write(record, fence=term.number)

        Args:
            timeout: Seconds to wait; None waits indefinitely.

        Raises:
            TimeoutError: The member was not elected in time.
            MembershipLost: The member is no longer in the group.
            PeerError: The group elects no leaders (``election=None``).
        """
        self._handle.check_owned()
        term = self._handle.leadership.wait(timeout)
        try:
            yield term
        finally:
            self._handle.leadership.resign(term)

    def as_leader(self, function: Callable[[Term], object]) -> Callable[[Term], object]:
        """Call a function with each of this member's terms, in a separate thread.

        The function should return when ``term.lost`` is set. Calls do not overlap: the call for the
        next term waits until the function has returned. If the function returns early, the member
        stays the leader. If it raises an exception, even ``SystemExit``, the member resigns so that
        others can lead.
        """
        self._handle.check_owned()
        check_function("as_leader", function)
        self._handle.leadership.add_task(function)
        return function

    def resign(self) -> bool:
        """Stop leading, and move to the end of the election order.

        Waits up to 5 seconds for leader functions to return; no other member is elected before
        that. If there is no other candidate, this member is elected again at once, in another term.

        Returns:
            Whether this member was the leader.
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
        """Register a function for the messages in a queue. Use it as a decorator.

        The function receives a ``Message``. The function's return value is the reply; an exception
        fails the message. Messages from one sender arrive in order if they have the same priority
        and there is one worker. Delivery is at least once: if the member dies or is cut off, a
        message may arrive again with the same ``id``. A queue without a function keeps its
        messages.

        >>> @me.on("price", workers=4)                  # doctest: +SKIP
        ... def price(message):
        ...     return PRICES[message.body]

        Args:
            queue: 1 to 128 characters of A-Z a-z 0-9 . _ -, not starting with a dot.
            workers: Number of threads that call the function: 1 to 256.
            priority: 1 to 256. All of the member's functions with a priority share one thread,
                which handles messages for the lowest number first; ``workers`` must be 1. A
                function without a priority has its own threads, and waits for no other function.
            ack: With "auto", the message is settled when the function returns. With "manual", the
                function or other code calls ``message.ack()``, ``reply()``, ``fail()`` or
                ``retry()``; at most 1,000 messages can be unsettled at a time.
            timeout: Seconds after which an unsettled message fails. The function keeps running.

        Raises:
            ValueError, TypeError: The queue already has a function or an iterator, or an argument
                is out of range or of the wrong type.
            MembershipLost: The member is no longer in the group.
        """
        inbox = self._handle.inbox()

        def register(function: _F) -> _F:
            inbox.on(queue, function, workers=workers, priority=priority, ack=ack, timeout=timeout)
            return function

        return register

    def inbox(self, queue: str, timeout: float | None = None) -> Iterator[Message]:
        """Iterate over the messages in a queue that has no function. Settle each message.

        Args:
            timeout: Seconds without a message after which the iteration ends; None iterates until
                the member leaves.

        Raises:
            ValueError, TypeError: The queue has a function, or an argument is out of range or of
                the wrong type.
            MembershipLost: The member is no longer in the group.
        """
        return self._handle.inbox().pull(queue, timeout)

    # -- votes and actions -------------------------------------------------------------------------

    def on_vote(self, function: _F) -> _F:
        """Register the function that casts this member's votes.

        It receives a ``Proposal`` and returns True, False, or None to abstain. A thread calls it
        once for each open proposal made since this member joined. An exception is logged and counts
        as a vote against. A vote after ``proposal.deadline`` does not count. Registering another
        function replaces this one.
        """
        self._handle.check_owned()
        check_function("on_vote", function)
        # The docstring gives the function's signature.
        self._handle.voter.set_vote(function)  # type: ignore[arg-type]
        return function

    def on_action(
        self,
        name: str,
        *,
        early: float = 0.002,
        late: Literal["skip", "run"] = "skip",
        max_late: float = 0.1,
    ) -> Callable[[_F], _F]:
        """Register a function that runs an ``Action`` at the agreed time. Use it as a decorator.

        Each call has its own thread. A member with action handlers but no ``on_vote`` function
        votes yes to the actions that it has handlers for, and no to others.

        >>> @me.on_action("open")                       # doctest: +SKIP
        ... def open_breaker(action):
        ...     relay(action.params["relay"]).open()

        Args:
            name: The action's name. Another handler registered for the same action replaces this
                one.
            early: Seconds before the agreed time at which the thread stops sleeping and starts
                spinning, at most 1. Spinning occupies a CPU core, but starts the function within
                microseconds of the agreed time.
            late: What to do if the process learns the decision too late, or was suspended: "skip"
                the action and call the ``on_missed`` functions, or "run" it anyway.
            max_late: With "skip", the maximum delay in seconds of an action that was scheduled in
                time. An action that would start later counts as missed.
        """
        self._handle.check_owned()
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
        """Call a function with each ``Action`` that this member does not run.

        Either the action's time had passed, or the member has no name and rejoined under a
        different id, because the server had presumed it dead after the vote started.
        """
        self._handle.check_owned()
        check_function("on_missed", function)
        self._handle.voter.add_missed(function)
        return function

    # -- the end -----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the group permanently, even if the member has a name. A second call does nothing.

        Waits up to 5 seconds for handlers and leader functions. Of the remaining messages, those
        sent to ``any`` move to another member, and all others fail.
        """
        if self._handle.leave(""):
            self._handle.group.catch_up()

    def close(self) -> None:
        """End the membership. An unnamed member leaves; a named one becomes dead and can rejoin."""
        self._handle.leave()

    def _end_block(self) -> None:
        self.leave()

    def __repr__(self) -> str:
        return repr(self._handle)
