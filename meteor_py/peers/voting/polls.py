"""A group handle's polls: its proposals, the open votes, and the outcomes.

The server counts the votes and decides, so a vote survives the death of its proposer or the leader.
Events report proposals and outcomes. If the event for an outcome was lost, the handle asks for the
outcome when the vote is over, so every future completes. Until this process first uses votes, no
thread runs and events about votes are ignored.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from meteor_py.errors import ActionRefused, ConnectionFailed, MeteorError, NoLeader, PeerError
from meteor_py.peers.codec import UnknownType
from meteor_py.peers.event import Event
from meteor_py.peers.protocol import read_fields
from meteor_py.peers.voting.actions import Actions
from meteor_py.peers.voting.proposal import Kind, Outcome, read_outcome, read_proposal
from meteor_py.redis.scripts import PEERS_PROPOSE, PEERS_READ_POLLS, Script
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread

if TYPE_CHECKING:
    from meteor_py.peers.group_handle import GroupHandle
    from meteor_py.peers.member_handle import MemberHandle
    from meteor_py.peers.voting.voter import Voter

_log = logging.getLogger(__name__)

#: A vote on an action ends at least this many seconds before the action, so that all members learn
#: the decision in time.
LEAD_S = 0.2
#: Number of decided polls to remember, so that each outcome is reported once.
REMEMBERED = 1_000
#: The proposer asks for the outcome this many seconds after the vote ends.
_ASK_S = 0.01
#: Other handles ask after a random number of seconds in this range, in case the proposer is dead.
_OTHERS_ASK_S = (0.3, 1.3)
#: A handle stops asking for the outcome this many seconds after the vote ends.
_ABANDON_S = 10.0
_BACKOFF_S = (0.02, 0.64)


class VoteFuture(Future[Outcome]):
    """A future for a vote's outcome. ``poll`` is the poll's id. Voters see the same id as
    ``proposal.id``, and ``outcome.poll`` repeats it."""

    def __init__(self, poll: str) -> None:
        super().__init__()
        self.poll = poll


class Motion(NamedTuple):
    """A proposal to send to the server."""

    topic: bytes
    kind: Kind | int
    timeout: float
    require_leader: bool
    action: str = ""
    #: When the action is due, in ms on the group's clock; None for a plain vote.
    at: int | None = None
    #: Maximum error of a voter's clock in us; None for no limit.
    max_error: int | None = None


@dataclass
class _Open:
    """A vote whose outcome this process does not know yet."""

    #: When to ask for the outcome, and when to stop asking, on the ``now()`` clock.
    ask_at: float
    abandon_at: float
    future: VoteFuture | None = None
    failures: int = 0


class Polls:
    """One group handle's polls. The first use starts a thread."""

    def __init__(self, group: GroupHandle) -> None:
        self._group = group
        self.actions = Actions(group)
        self.codec = group.requests.codec
        self._jobs: deque[Callable[[], None]] = deque()
        self._open: dict[str, _Open] = {}
        self._decided: dict[str, None] = {}
        #: Voters whose threads ``close`` must stop.
        self._voters: list[Voter] = []
        self._state = SignalSafeCondition()
        self._thread: JoinableThread | None = None
        self._stopped = False

    def use(self, voter: Voter | None = None) -> None:
        """Start processing events about votes."""
        with self._state:
            if voter is not None and voter not in self._voters:
                self._voters = [v for v in self._voters if not v.stopped] + [voter]
            if self._thread is None and not self._stopped:
                name = f"meteor-polls-{self._group.name}"
                self._thread = JoinableThread(self._run, name)
                self._thread.start()
                self._group.heartbeat.hurry()  # read the clock again: the first reading is inexact

    # -- proposing -----------------------------------------------------------------------------

    def propose(self, motion: Motion, by: MemberHandle | None) -> VoteFuture:
        """Start a vote on a proposal. See ``PeerGroup.propose`` for errors."""
        self.use()
        poll = secrets.token_hex(8)
        future = VoteFuture(poll)
        future.set_running_or_notify_cancel()  # a proposal cannot be cancelled
        entry = _Open(now() + motion.timeout, now() + motion.timeout + _ABANDON_S, future)
        with self._state:
            if self._stopped:
                raise MeteorError(
                    f"This handle for group {self._group.name!r} is closed. Open another with "
                    "client.peer_group()."
                )
            self._open[poll] = entry  # before the call: the outcome may arrive before the reply
        try:
            left_s = self._put_to_vote(poll, motion, by)
        except BaseException:
            with self._state:
                self._open.pop(poll, None)
            raise
        with self._state:
            entry.ask_at = now() + left_s + _ASK_S
            entry.abandon_at = entry.ask_at + _ABANDON_S
            self._state.notify_all()
        return future

    def _put_to_vote(self, poll: str, motion: Motion, by: MemberHandle | None) -> float:
        deadline = now() + motion.timeout

        def put() -> list[Any]:
            args = [
                *(poll, motion.kind, max(int(motion.timeout * 1000), 1)),
                *("" if motion.at is None else motion.at, int(LEAD_S * 1000)),
                *(motion.action, motion.topic),
                *(("", "") if by is None else (by.id, by.session)),
                "1" if motion.require_leader else "0",
                "" if motion.max_error is None else motion.max_error,
            ]
            return self.run(PEERS_PROPOSE, args, deadline)

        try:
            reply = put() if by is None else by.retry_fenced(put, deadline)
        except ConnectionFailed as error:
            error.add_note(f"Poll {poll} may be open. If so, on_decision reports its outcome.")
            raise
        if reply[0] != b"OK":
            raise self._refusal(reply, motion)
        return int(reply[1]) / 1000

    def _refusal(self, reply: list[Any], motion: Motion) -> MeteorError:
        name = self._group.name
        match reply[0]:
            case b"NOLEADER":
                text = f"Group {name!r} currently has no leader. Try again later."
                return NoLeader(text, group=name)
            case b"TOOLATE":
                late = (motion.at or 0) / 1000 - int(reply[1]) / 1000
                return ActionRefused(
                    f"Action {motion.action!r} is due in {late:.3f} s, but its vote must end "
                    f"{LEAD_S:g} s before that. Choose a later time, such as at=group.now() + 2.",
                    group=name,
                )
            case b"PENDING":
                return ActionRefused(
                    f"Action {motion.action!r} is already pending (poll {reply[1].decode()}). "
                    "Propose it again after its scheduled time.",
                    group=name,
                )
            case b"NOMEMBER":
                text = f"Group {name!r} has no live member that could vote. Join it first."
                return PeerError(text, group=name)
        text = f"Group {name!r} already has {reply[1]} open votes. Wait until one of them ends."
        return PeerError(text, group=name)

    def run(self, script: Script, args: Sequence[Any], deadline: float) -> list[Any]:
        """Run a script that is safe to repeat; retry until ``deadline`` (``now()`` clock)."""
        failures = 0
        while True:
            try:
                return self._group.protocol.run(script, args)
            except ConnectionFailed:
                failures += 1
                pause = pause_s(failures, *_BACKOFF_S)
                if self._stopped or now() + pause >= deadline:
                    raise
                time.sleep(pause)

    # -- events --------------------------------------------------------------------------------

    def proposed(self, event: Event) -> None:
        """Process a proposal. The caller holds the group's lock, so the view matches the
        proposal."""
        if self._thread is None:
            return
        members = self._group.view.members
        asked = [
            member.voter
            for member in self._group.local_members()
            if (found := members.get(member.id)) is not None
            and found.alive
            and found.session == member.session
        ]
        left_s = (int(event.fields["until"]) - event.at) / 1000
        self._put(partial(self._ask, event.fields, now() + left_s, asked))

    def decided(self, event: Event) -> None:
        """Process an outcome."""
        if self._thread is not None:
            self._put(partial(self._decide, event.fields))

    def resync(self) -> None:
        """Ask the server for open votes and outcomes, because events were lost."""
        if self._thread is not None:
            self._put(self._ask_for_all)

    # -- in the thread -------------------------------------------------------------------------

    def _put(self, job: Callable[[], None]) -> None:
        with self._state:
            self._jobs.append(job)
            self._state.notify_all()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._stopped or self._jobs, self._pause())
                if self._stopped:
                    return
                job = self._jobs.popleft() if self._jobs else None
                due = [poll for poll, entry in self._open.items() if entry.ask_at <= now()]
            for work in [job] if job is not None else [partial(self._ask_for, p) for p in due]:
                try:
                    work()
                except UnknownType as error:
                    _log.warning("Cannot decode a vote in group %r: %s", self._group.name, error)
                except BaseException:  # even SystemExit, from a future's callback
                    if not self._stopped:
                        _log.exception("Processing votes in group %r failed.", self._group.name)

    def _pause(self) -> float | None:
        times = [entry.ask_at for entry in self._open.values()]
        return max(min(times) - now(), 0.001) if times else None

    def _ask(self, fields: Mapping[str, bytes], deadline: float, asked: list[Voter]) -> None:
        proposal = read_proposal(fields, self.codec)
        with self._state:
            if proposal.id in self._decided:
                return
            ask_at = deadline + random.uniform(*_OTHERS_ASK_S)
            self._open.setdefault(proposal.id, _Open(ask_at, ask_at + _ABANDON_S))
        for voter in asked:
            voter.ask(proposal, deadline)

    def _decide(self, fields: Mapping[str, bytes]) -> None:
        poll = fields["poll"].decode()
        with self._state:
            entry = self._open.pop(poll, None)
            if poll in self._decided:
                return
            remember(self._decided, poll)
        future = None if entry is None else entry.future
        try:
            outcome = read_outcome(fields, self.codec)
        except BaseException as error:
            if future is not None:
                future.set_exception(error)
            raise
        try:
            self._group.listeners.tell("decision", outcome)
            if outcome.passed and outcome.action is not None:
                self._act(outcome)
        finally:  # complete the future in any case, because a caller is waiting
            if future is not None:
                future.set_result(outcome)

    def _act(self, outcome: Outcome) -> None:
        for member in self._group.local_members():
            try:
                member.voter.act(outcome)
            except Exception:  # the other members must still act
                _log.exception("%r could not schedule action %r.", member, outcome.action)

    def _ask_for(self, poll: str) -> None:
        with self._state:
            entry = self._open.get(poll)
        if entry is None:
            return
        try:
            found = next(self.read("poll", poll), None)
        except MeteorError as error:  # the server is unreachable, or the group must be restored
            entry.failures += 1
            entry.ask_at = now() + pause_s(entry.failures, *_BACKOFF_S)
            if now() > entry.abandon_at:
                self._abandon(poll, f"could not be read in time ({error})")
            return
        if found is None:
            self._abandon(poll, "was lost, because the server lost state")
            return
        left_s, fields = found
        if fields["result"]:
            self._decide(fields)
        else:  # the server was down for a while, and gave voters more time
            entry.ask_at = now() + left_s + _ASK_S
            entry.abandon_at = entry.ask_at + _ABANDON_S

    def read(
        self, what: str, which: str, patience_s: float = 0.0
    ) -> Iterator[tuple[float, dict[str, bytes]]]:
        """Read one poll, or the polls that a member must catch up on. For each poll, yield the
        seconds left to vote (0 if voting has ended) and the same fields as in the poll's events."""
        reply = self.run(PEERS_READ_POLLS, [what, which], now() + patience_s)
        for left_ms, flat in zip(reply[1::2], reply[2::2], strict=True):
            yield int(left_ms) / 1000, read_fields(flat)

    def _ask_for_all(self) -> None:
        with self._state:
            for entry in self._open.values():
                entry.ask_at = min(entry.ask_at, now())
        for member in self._group.local_members():
            member.voter.catch_up()

    def _abandon(self, poll: str, why: str) -> None:
        with self._state:
            entry = self._open.pop(poll, None)
        if entry is not None and entry.future is not None:
            name = self._group.name
            text = (
                f"The outcome of poll {poll} in group {name!r} {why}. Other processes may have "
                "received it."
            )
            entry.future.set_exception(PeerError(text, group=name))

    # -- the end -------------------------------------------------------------------------------

    def close(self, deadline: float) -> None:
        """Stop the threads, waiting until ``deadline`` (``now()`` clock), and fail open futures."""
        with self._state:
            self._stopped = True
            self._state.notify_all()
            thread, voters = self._thread, list(self._voters)
        self.actions.close(deadline)
        for voter in voters:
            voter.stop()
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(deadline - now(), 0.0))
        for poll in list(self._open):
            self._abandon(poll, "is unknown, because this handle was closed first")
        for voter in voters:
            if not voter.join(deadline):
                _log.warning("A vote handler for group %r did not end in time.", self._group.name)


def remember(known: dict[str, None], poll: str) -> None:
    """Add a poll to a bounded set, dropping the oldest if the set is full."""
    known[poll] = None
    while len(known) > REMEMBERED:
        del known[next(iter(known))]
