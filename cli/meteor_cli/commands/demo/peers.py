"""The peer group step of the tour: kills the leader; the others then vote and act together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import meteor_py as meteor
from meteor_cli.commands.demo.worker import PATIENCE_S, Worker, run_worker, wait_until

MEMBERS = 3
TTL_S = 1.0
#: Steps of the progress bar: members, leader, vote, action.
STEPS = 4
#: Seconds from proposing an action to executing it.
_AHEAD_S = 1.0


class Done(NamedTuple):
    """A member's report that it has acted."""

    #: Time on the monotonic clock that all processes on a machine share.
    at_ns: int
    #: Maximum error, in seconds, of the group's clock in that process.
    error_bound: float


@dataclass(frozen=True)
class Outcome:
    #: The terms before and after the leader was killed.
    terms: tuple[int, int]
    #: Seconds from the kill until there was a new leader.
    pause_s: float
    vote: meteor.Outcome
    vote_s: float
    #: Seconds between the first member's action and the last member's.
    spread_s: float
    #: Upper bound, in seconds, on the difference between two members' clocks.
    bound_s: float
    acted: int


class Peer(Worker):
    """A process that joins the group."""

    @property
    def id(self) -> str:
        return self.lines[0][0] if self.lines else ""

    @property
    def done(self) -> list[Done]:
        return [Done(int(at), float(error)) for at, error in self.lines[1:]]


def coordinate(group: meteor.PeerGroup, url: str, advance: Callable[[int], None]) -> Outcome:
    """Start members, kill the leader, and make the others vote and act."""
    with ExitStack() as stack:
        peers = Peer.start(MEMBERS, stack, __name__, url, group.name)
        wait_until(
            lambda: len(group.members) == MEMBERS and all(peer.id for peer in peers),
            "The members of the peer group had not joined",
        )
        advance(1)
        leader, first = group.leader, group.term
        assert leader is not None, "a group with members has a leader"
        elected = threading.Event()

        @group.on_elected
        def note(member: meteor.Member, term: int) -> None:
            if term > first:
                elected.set()

        killed_at = time.perf_counter()
        next(peer for peer in peers if peer.id == leader.id).process.kill()
        if not elected.wait(PATIENCE_S):
            raise TimeoutError(f"No leader was elected within {PATIENCE_S:g} seconds.")
        pause_s = time.perf_counter() - killed_at
        wait_until(
            lambda: len(group.members) == MEMBERS - 1, "The killed member was still in the group"
        )
        advance(2)
        start = time.perf_counter()
        vote = group.propose("continue?", kind="consensus").result(PATIENCE_S)
        vote_s = time.perf_counter() - start
        advance(3)
        action = group.propose_action("act", at=group.now() + _AHEAD_S, timeout=_AHEAD_S)
        if action.result(PATIENCE_S).passed:
            wait_until(
                lambda: sum(len(peer.done) for peer in peers) == MEMBERS - 1,
                "Not all members of the peer group had acted",
            )
        advance(4)
        done = [each for peer in peers for each in peer.done]
    times = [each.at_ns for each in done] or [0]
    spread_s = (max(times) - min(times)) / 1e9
    bound_s = sum(sorted(each.error_bound for each in done)[-2:])
    terms = (first, group.term)
    return Outcome(terms, pause_s, vote, vote_s, spread_s, bound_s, len(done))


def _work(name: str) -> None:
    with meteor.connect() as m, m.peer_group(name, create=False) as group, group.join() as me:
        me.on_vote(lambda proposal: True)

        @me.on_action("act")
        def act(action: meteor.Action) -> None:
            at_ns = time.monotonic_ns()
            print(at_ns, action.error_bound, flush=True)

        print(me.id, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    run_worker(_work)
