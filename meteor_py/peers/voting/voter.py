"""A voter: the part of a member that votes and runs agreed actions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from meteor_py.errors import ConnectionFailed, PeerError
from meteor_py.peers.codec import UnknownType
from meteor_py.peers.listeners import CallbackThread
from meteor_py.peers.voting.actions import Action, Handler, Task
from meteor_py.peers.voting.polls import remember
from meteor_py.peers.voting.proposal import Outcome, Proposal, read_outcome, read_proposal
from meteor_py.redis.scripts import PEERS_VOTE
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition

if TYPE_CHECKING:
    from meteor_py.peers.member_handle import MemberHandle

_log = logging.getLogger(__name__)

#: Keep trying to read open votes for this many seconds while the server is unreachable.
_PATIENCE_S = 5.0

_F = TypeVar("_F", bound=Callable[..., object])
Vote = Callable[[Proposal], bool | None]


class Voter:
    """One member's voter. The first handler starts the voter's own thread, so a slow handler delays
    only this member's votes."""

    def __init__(self, member: MemberHandle) -> None:
        self._member = member
        self._vote: Vote | None = None
        self._handlers: dict[str, Handler] = {}
        self._missed: list[Callable[[Action], object]] = []
        #: Polls in which the member voted or tried to, and polls whose action it has scheduled or
        #: missed.
        self._voted: dict[str, None] = {}
        self._acted: dict[str, None] = {}
        self._state = SignalSafeCondition()
        self._thread: CallbackThread | None = None
        self.stopped = False

    def set_vote(self, function: Vote) -> None:
        self._vote = function
        self._begin()

    def set_handler(self, name: str, handler: Handler) -> None:
        self._handlers[name] = handler
        self._begin()

    def add_missed(self, function: Callable[[Action], object]) -> None:
        self._missed.append(function)

    def _begin(self) -> None:
        with self._state:
            if self.stopped:
                raise self._member.lost_error()
            if self._thread is None:
                self._thread = CallbackThread(f"vote-{self._member.group.name}")
                self._thread.start()
        self._member.group.polls.use(self)
        self.catch_up()

    def ask(self, proposal: Proposal, deadline: float) -> None:
        """Queue a proposal for a vote before ``deadline`` (``now()`` clock). If there is no handler
        yet, ``catch_up`` votes later."""
        if self._thread is not None:
            self._thread.call(self._consider, proposal, deadline)

    def catch_up(self) -> None:
        """Find votes and actions that began before the first handler was registered, or whose
        events were lost."""
        if self._thread is not None:
            self._thread.call(self._catch_up)

    def _catch_up(self) -> None:
        polls = self._member.group.polls
        try:
            found = list(polls.read("member", self._member.id, _PATIENCE_S))
        except (ConnectionFailed, PeerError) as error:
            _log.warning("%r could not read the open votes: %s", self._member, error)
            return
        deadlines = [now() + left_s for left_s, _ in found]  # compute now: a handler may be slow
        for deadline, (_, fields) in zip(deadlines, found, strict=True):
            try:
                if fields["result"]:
                    self.act(read_outcome(fields, polls.codec))
                else:
                    self._consider(read_proposal(fields, polls.codec), deadline)
            except UnknownType as error:
                _log.warning("%r cannot decode a vote: %s", self._member, error)

    def _consider(self, proposal: Proposal, deadline: float) -> None:
        if proposal.id in self._voted or now() >= deadline or not self._member.active:
            return
        if self._vote is None and proposal.action is None:
            return  # a handler may be registered later
        remember(self._voted, proposal.id)
        self._send(proposal.id, self._decide(proposal), deadline)

    def _decide(self, proposal: Proposal) -> str:
        """Return 'y', 'n', or 'a' to abstain."""
        actions = self._member.group.polls.actions
        if proposal.max_error is not None and not actions.is_sure(proposal.max_error):
            _log.warning("%r votes no: its clock is not accurate enough.", self._member)
            return "n"
        if self._vote is None:
            return "y" if proposal.action in self._handlers else "n"
        try:
            vote = self._vote(proposal)
        except BaseException:  # even SystemExit: the proposer is waiting
            _log.exception(
                "The vote handler for %r failed, which counts as a no vote.", self._member
            )
            return "n"
        return "a" if vote is None else "y" if vote else "n"

    def _send(self, poll: str, vote: str, deadline: float) -> None:
        member = self._member
        args = [poll, member.id, member.session, vote]
        try:
            reply = member.group.polls.run(PEERS_VOTE, args, deadline)
        except (ConnectionFailed, PeerError) as error:
            _log.warning("A vote by %r may not have reached the server: %s", member, error)
            return
        if reply[0] != b"OK" or not reply[1]:
            _log.info("A vote by %r in poll %s did not count.", member, poll)

    def act(self, outcome: Outcome) -> None:
        """Schedule an agreed action. Safe to call from any thread."""

        handler = self._handlers.get(outcome.action or "")
        member = self._member
        actions = member.group.polls.actions
        with self._state:
            if handler is None or outcome.at is None:
                return
            was_asked = member.id in outcome.voters
            if not was_asked and not set(member.former_ids).intersection(outcome.voters):
                return
            if outcome.poll in self._acted or not member.active:
                return
            remember(self._acted, outcome.poll)
        task = Task(outcome.at, outcome, handler, member)
        if was_asked:
            actions.schedule(task)
        else:
            actions.miss(task)  # since the vote began, the member was expelled and got a new id

    def missed(self, action: Action) -> None:
        """Report an action that this member does not run."""
        _log.warning("%r missed action %r (%+.3f s late).", self._member, action.name, action.late)
        for function in self._missed:
            if self._thread is not None:
                self._thread.call(function, action)

    def stop(self) -> None:
        with self._state:
            self.stopped = True
            thread = self._thread
        if thread is not None:
            thread.stop()

    def join(self, deadline: float) -> bool:
        thread = self._thread
        return thread is None or thread.ends_within(max(deadline - now(), 0.0), thread.stop)
