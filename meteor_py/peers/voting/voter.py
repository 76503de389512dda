"""A voter: one member of this process when it votes, and when it does what was agreed on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar

from meteor_py.errors import ConnectionFailed, PeerError
from meteor_py.peers.codec import UnknownType
from meteor_py.peers.event_reader import CallbackThread
from meteor_py.peers.voting.actions import Action, Handler, Task
from meteor_py.peers.voting.polls import remember
from meteor_py.peers.voting.proposal import Outcome, Proposal, read_outcome, read_proposal
from meteor_py.records.config import check_choice, check_function, check_seconds
from meteor_py.redis import keys
from meteor_py.redis.scripts import PEERS_VOTE
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition

if TYPE_CHECKING:
    from meteor_py.peers.membership import Membership

_log = logging.getLogger(__name__)

#: Seconds for which a server that is away is asked again for open votes.
_PATIENCE_S = 5.0

_F = TypeVar("_F", bound=Callable[..., object])
Vote = Callable[[Proposal], bool | None]


class Voter:
    """Owned by its membership. Has a thread from its first handler on: a slow one holds up only
    the votes of this member."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._vote: Vote | None = None
        self._handlers: dict[str, Handler] = {}
        self._missed: list[Callable[[Action], object]] = []
        #: Polls that it has voted in, or tried to, and those whose action was taken up.
        self._voted: dict[str, None] = {}
        self._acted: dict[str, None] = {}
        self._state = SignalSafeCondition()
        self._caller: CallbackThread | None = None
        self.ended = False

    # -- its handlers --------------------------------------------------------------------------

    def set_vote(self, function: Vote) -> None:
        check_function("on_vote", function)
        self._vote = function
        self._begin()

    def set_handler(self, name: str, handler: Handler) -> None:
        self._handlers[name] = handler
        self._begin()

    def add_missed(self, function: Callable[[Action], object]) -> None:
        self._missed.append(function)

    def _begin(self) -> None:
        with self._state:
            if self.ended:
                raise self._membership.lost_error()
            if self._caller is None:
                self._caller = CallbackThread(f"vote-{self._membership.group.name}")
                self._caller.start()
        self._membership.group.ballots.use(self)
        self.catch_up()

    # -- voting --------------------------------------------------------------------------------

    def ask(self, proposal: Proposal, deadline: float) -> None:
        """Have it vote, until a time by ``lease.now()``. Without any handler it will, later."""
        if self._caller is not None:
            self._caller.call(self._consider, proposal, deadline)

    def catch_up(self) -> None:
        """Look for what happened before it had a handler, or when events were lost."""
        if self._caller is not None:
            self._caller.call(self._catch_up)

    def _catch_up(self) -> None:
        ballots = self._membership.group.ballots
        try:
            found = list(ballots.look("member", self._membership.id, _PATIENCE_S))
        except (ConnectionFailed, PeerError) as error:
            _log.warning("%r could not look for open votes: %s", self._membership, error)
            return
        deadlines = [now() + left_s for left_s, _ in found]  # a handler may take its time
        for deadline, (_, fields) in zip(deadlines, found, strict=True):
            try:
                if fields["result"]:
                    self.act(read_outcome(fields, ballots.codec))
                else:
                    self._consider(read_proposal(fields, ballots.codec), deadline)
            except UnknownType as error:
                _log.warning("%r does not understand a vote: %s", self._membership, error)

    def _consider(self, proposal: Proposal, deadline: float) -> None:
        if proposal.id in self._voted or now() >= deadline or self._membership.going:
            return
        if self._vote is None and proposal.action is None:
            return  # a handler may come
        remember(self._voted, proposal.id)
        self._send(proposal.id, self._decide(proposal), deadline)

    def _decide(self, proposal: Proposal) -> str:
        """'y', 'n' or 'a'."""
        actions = self._membership.group.ballots.actions
        if proposal.max_error is not None and not actions.is_sure(proposal.max_error):
            _log.warning("%r says no: it does not know the time well enough.", self._membership)
            return "n"
        if self._vote is None:
            return "y" if proposal.action in self._handlers else "n"
        try:
            vote = self._vote(proposal)
        except BaseException:  # also SystemExit: a vote that is awaited
            _log.exception("The vote of %r failed, which is a no.", self._membership)
            return "n"
        return "a" if vote is None else "y" if vote else "n"

    def _send(self, poll: str, vote: str, deadline: float) -> None:
        membership = self._membership
        args = [poll, membership.id, membership.session, vote]
        try:
            answer = membership.group.ballots.run(PEERS_VOTE, args, deadline)
        except (ConnectionFailed, PeerError) as error:
            _log.warning("A vote of %r did not arrive: %s", membership, error)
            return
        if answer[0] != b"OK" or not answer[1]:
            _log.info("A vote of %r in poll %s came too late.", membership, poll)

    # -- acting --------------------------------------------------------------------------------

    def act(self, outcome: Outcome) -> None:
        """Something is to be done; in any thread."""
        handler = self._handlers.get(outcome.action or "")
        membership = self._membership
        actions = membership.group.ballots.actions
        with self._state:
            if handler is None or outcome.at is None:
                return
            was_asked = membership.id in outcome.voters
            if not was_asked and not set(membership.former_ids).intersection(outcome.voters):
                return
            if outcome.poll in self._acted or membership.going:
                return
            remember(self._acted, outcome.poll)
        task = Task(outcome.at, outcome, handler, self)
        if was_asked:
            actions.schedule(task)
        else:
            actions.miss(task)  # it was expelled since, and is another member now

    @property
    def gone(self) -> bool:
        """Whether it is not a member any more, or is about to leave."""
        return self._membership.going

    def missed(self, action: Action) -> None:
        """Tell that something is not done here."""
        _log.warning("%r misses %r (%+.3f s).", self._membership, action.name, action.late)
        for function in self._missed:
            if self._caller is not None:
                self._caller.call(function, action)

    # -- the end -------------------------------------------------------------------------------

    def end(self) -> None:
        with self._state:
            self.ended = True
            caller = self._caller
        if caller is not None:
            caller.end()

    def join(self, deadline: float) -> bool:
        return self._caller is None or self._caller.join(max(deadline - now(), 0.0))


class Voting:
    """What a member has to do with votes."""

    voter: Voter

    def on_vote(self, function: _F) -> _F:
        """Call a function with each ``Proposal``: it returns True, False, or None to abstain.

        What it raises is logged, and a no. It is called in a thread of this member, once for each
        proposal that was made while it was a member, also those that are open already; one that
        answers after ``proposal.deadline`` has not voted. Another one replaces it.
        """
        self.voter.set_vote(function)  # type: ignore[arg-type]  # as documented
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
        others. Each call has a thread of its own, which ends with it.

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
            self.voter.set_handler(name, handler)
            return function

        return register

    def on_missed(self, function: _F) -> _F:
        """Call a function with each ``Action`` that is not run here: its time was over, or this
        member, without a name, was taken for dead since it was asked, and is another one now."""
        check_function("on_missed", function)
        self.voter.add_missed(function)
        return function
