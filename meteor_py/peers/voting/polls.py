"""The polls of a group handle: what it proposes, what is open, and what was decided.

The server counts and decides, so a vote survives its proposer and the leader. Events report what
happens. If the event of an outcome was lost, the handle asks for the outcome when the time of the
vote is over, so every future ends. Nothing here runs, and no event is looked at, before this
process votes or proposes.
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

#: Seconds between the end of a vote on an action and the action: the decision has to get around.
LEAD_S = 0.2
#: Polls that are remembered as decided, so that each is told of once.
REMEMBERED = 1_000
#: Seconds after the end of a vote when its proposer asks for the outcome.
_ASK_S = 0.01
#: The same for other handles: one of them must ask if the proposer is dead, but not all at once.
_OTHERS_ASK_S = (0.3, 1.3)
#: Seconds after the end of a vote when an outcome that the server does not tell is given up.
_GIVE_UP_S = 10.0
_BACKOFF_S = (0.02, 0.64)


class Motion(NamedTuple):
    """What is put to the vote."""

    topic: bytes
    kind: Kind | int
    timeout: float
    require_leader: bool
    action: str = ""
    #: In ms by the clock of the group.
    at: int | None = None
    #: In us.
    max_error: int | None = None


@dataclass
class _Open:
    """A vote whose outcome is not known here."""

    #: When to ask for it, and when to give up, by ``now()``.
    ask_at: float
    give_up_at: float
    future: Future[Outcome] | None = None
    failures: int = 0


class Polls:
    """Owned by its group handle. Has a thread of its own, from the first use on."""

    def __init__(self, group: GroupHandle) -> None:
        self._group = group
        self.actions = Actions(group)
        self.codec = group.requests.codec
        self._jobs: deque[Callable[[], None]] = deque()
        self._open: dict[str, _Open] = {}
        self._decided: dict[str, None] = {}
        #: All that have threads, or had.
        self._voters: list[Voter] = []
        self._state = SignalSafeCondition()
        self._thread: JoinableThread | None = None
        self._stopped = False

    def use(self, voter: Voter | None = None) -> None:
        """From now on, events about votes matter here."""
        with self._state:
            if voter is not None and voter not in self._voters:
                self._voters = [v for v in self._voters if not v.stopped] + [voter]
            if self._thread is None and not self._stopped:
                name = f"meteor-polls-{self._group.name}"
                self._thread = JoinableThread(self._run, name)
                self._thread.start()
                self._group.heartbeat.hurry()  # the first reading of the clock is a bad one

    # -- proposing -----------------------------------------------------------------------------

    def propose(self, motion: Motion, by: MemberHandle | None) -> Future[Outcome]:
        """Put something to the vote. For what it raises see ``PeerGroup.propose``."""
        self.use()
        poll = secrets.token_hex(8)
        future: Future[Outcome] = Future()
        future.set_running_or_notify_cancel()  # it cannot be called back
        entry = _Open(now() + motion.timeout, now() + motion.timeout + _GIVE_UP_S, future)
        with self._state:
            if self._stopped:
                raise MeteorError(f"This handle of group {self._group.name!r} is closed.")
            self._open[poll] = entry  # now: the outcome may arrive before the reply
        try:
            left_s = self._put_to_vote(poll, motion, by)
        except BaseException:
            with self._state:
                self._open.pop(poll, None)
            raise
        with self._state:
            entry.ask_at = now() + left_s + _ASK_S
            entry.give_up_at = entry.ask_at + _GIVE_UP_S
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
            error.add_note(f"It may be that poll {poll} was begun; on_decision will tell of it.")
            raise
        if reply[0] != b"OK":
            raise self._refusal(reply, motion)
        return int(reply[1]) / 1000

    def _refusal(self, reply: list[Any], motion: Motion) -> MeteorError:
        name = self._group.name
        match reply[0]:
            case b"NOLEADER":
                return NoLeader(f"Group {name!r} has no leader now; try again later.", group=name)
            case b"TOOLATE":
                late = (motion.at or 0) / 1000 - int(reply[1]) / 1000
                return ActionRefused(
                    f"Action {motion.action!r} is to be done in {late:.3f} s, but a vote must end "
                    f"{LEAD_S:g} s before; choose a later time, at=group.now() + 2.",
                    group=name,
                )
            case b"PENDING":
                return ActionRefused(
                    f"Action {motion.action!r} is pending already, by poll {reply[1].decode()}; "
                    "propose it again when its time is over.",
                    group=name,
                )
            case b"NOMEMBER":
                return PeerError(f"Nobody in group {name!r} is alive to vote; join it.", group=name)
        return PeerError(f"Group {name!r} has {reply[1]} open votes; wait for them.", group=name)

    def run(self, script: Script, args: Sequence[Any], deadline: float) -> list[Any]:
        """Run a script that may be repeated, again and again until a time."""
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

    # -- news from the event reader ------------------------------------------------------------

    def proposed(self, event: Event) -> None:
        """Something was put to the vote. Under the lock of the group, which is as it was then."""
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
        """Something was decided."""
        if self._thread is not None:
            self._put(partial(self._decide, event.fields))

    def resync(self) -> None:
        """Events were lost: ask for what they may have told."""
        if self._thread is not None:
            self._put(self._ask_for_all)

    # -- in its thread -------------------------------------------------------------------------

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
                    _log.warning(
                        "A vote of group %r means nothing here: %s", self._group.name, error
                    )
                except BaseException:  # also SystemExit: of a callback of a future
                    if not self._stopped:
                        _log.exception("The polls of group %r failed.", self._group.name)

    def _pause(self) -> float | None:
        times = [entry.ask_at for entry in self._open.values()]
        return max(min(times) - now(), 0.001) if times else None

    def _ask(self, fields: Mapping[str, bytes], deadline: float, asked: list[Voter]) -> None:
        proposal = read_proposal(fields, self.codec)
        with self._state:
            if proposal.id in self._decided:
                return
            ask_at = deadline + random.uniform(*_OTHERS_ASK_S)
            self._open.setdefault(proposal.id, _Open(ask_at, ask_at + _GIVE_UP_S))
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
        finally:  # in any case: a caller waits for it
            if future is not None:
                future.set_result(outcome)

    def _act(self, outcome: Outcome) -> None:
        for member in self._group.local_members():
            try:
                member.voter.act(outcome)
            except Exception:  # the others have agreed to it, too
                _log.exception("%r cannot do %r.", member, outcome.action)

    def _ask_for(self, poll: str) -> None:
        with self._state:
            entry = self._open.get(poll)
        if entry is None:
            return
        try:
            found = next(self.look("poll", poll), None)
        except MeteorError as error:  # away, or it has forgotten the group, which will start again
            entry.failures += 1
            entry.ask_at = now() + pause_s(entry.failures, *_BACKOFF_S)
            if now() > entry.give_up_at:
                self._give_up(poll, f"could not be asked for in time ({error})")
            return
        if found is None:
            self._give_up(poll, "is lost, as the server has lost state")
        elif found.fields["result"]:
            self._decide(found.fields)
        else:  # the server was away for a while and gave voters more time
            entry.ask_at = now() + found.left_s + _ASK_S
            entry.give_up_at = entry.ask_at + _GIVE_UP_S

    def look(self, what: str, which: str, patience_s: float = 0.0) -> Iterator[Poll]:
        """One poll, or those that a member has to know of."""
        reply = self.run(PEERS_READ_POLLS, [what, which], now() + patience_s)
        for left_ms, flat in zip(reply[1::2], reply[2::2], strict=True):
            yield Poll(int(left_ms) / 1000, read_fields(flat))

    def _ask_for_all(self) -> None:
        with self._state:
            for entry in self._open.values():
                entry.ask_at = min(entry.ask_at, now())
        for member in self._group.local_members():
            member.voter.catch_up()

    def _give_up(self, poll: str, why: str) -> None:
        with self._state:
            entry = self._open.pop(poll, None)
        if entry is not None and entry.future is not None:
            name = self._group.name
            text = f"The outcome of poll {poll} in group {name!r} {why}; others may know it."
            entry.future.set_exception(PeerError(text, group=name))

    # -- the end -------------------------------------------------------------------------------

    def close(self, deadline: float) -> None:
        """End its threads, waiting until then by ``now()``; a future that is open fails."""
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
            self._give_up(poll, "is not known, as this handle was closed before")
        for voter in voters:
            if not voter.join(deadline):
                _log.warning("A handler of votes of group %r does not end.", self._group.name)


class Poll(NamedTuple):
    """A poll as the server has it now."""

    #: Seconds to vote in.
    left_s: float
    #: As in its events.
    fields: dict[str, bytes]


def remember(known: dict[str, None], poll: str) -> None:
    """Put a poll into a memory that is bounded."""
    known[poll] = None
    while len(known) > REMEMBERED:
        del known[next(iter(known))]
