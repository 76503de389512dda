"""Members of a peer group that vote and act, in this or other processes.

with Panel(url) as panel:
    first, second = panel.processes(2)
    first.ask("vote", True)
    panel.peer_group.propose("lunch").result(RESULT_S)
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Self

import redis

import meteor_py as meteor
from meteor_py.peers.group import PeerGroup
from meteor_py.peers.membership import Membership
from meteor_py.peers.voting.actions import Action
from meteor_py.peers.voting.proposal import Outcome, Proposal
from tests.support.group_members import Member, Process, serve
from tests.support.group_members import answer as say

GROUP = "panel"
#: Seconds to wait for an outcome: only a failing test waits that long.
RESULT_S = 20.0
#: Timeout in seconds for votes that must not time out during a test.
LONG_S = 60.0


class Voters(Member):
    """One member of a group, in another process; ``name`` is its id."""

    def __init__(self, url: str, **options: Any) -> None:
        Process.__init__(
            self, "-m", "tests.support.peer_voters", json.dumps({"url": url} | options)
        )
        self._name = None
        self._unanswered = 0


class Panel:
    """A group, observed from here, and its members. Closes everything that it opened."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.url = url
        self._settings = settings
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.client = self._stack.enter_context(meteor.connect(self.url))
        self.peer_group = self._stack.enter_context(self.client.peer_group(GROUP, **self._settings))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def redis(self) -> redis.Redis:
        return self.client.redis

    def handle(self) -> PeerGroup:
        """Open another handle to the group, as another process would."""
        return self._stack.enter_context(self.client.peer_group(GROUP))

    def members(self, number: int) -> list[Membership]:
        """Let members join in this process, on one handle."""
        return [self.peer_group.join() for _ in range(number)]

    def process(self, *, url: str = "", **options: Any) -> Voters:
        process = Voters(url or self.url, **options)
        self._stack.callback(process.close)
        return process

    def processes(self, number: int, **options: Any) -> list[Voters]:
        """Start members in other processes concurrently; return them in joining order."""
        started = [self.process(**options) for _ in range(number)]
        assert len({process.name for process in started}) == number
        places = {
            member.id: member.index
            for member in self.peer_group._handle.protocol.look().members.values()
        }
        return sorted(started, key=lambda process: places[process.name])

    def run(self, script: Any, *args: Any) -> list[Any]:
        """Run a group script directly."""
        return self.peer_group._handle.protocol.run(script, list(args))

    def votes(self) -> str:
        """Return the votes in the only open poll, as codes such as "y" (see _group_state.lua)."""
        found: Any = self.redis.hvals(self.key(f"votes:{self.open_poll()}"))
        return b"".join(found).decode()

    def open_poll(self) -> str:
        polls: Any = self.redis.zrange(self.key("polls"), 0, -1)
        (poll,) = (name.decode() for name in polls)
        return str(poll)

    def key(self, part: str) -> str:
        return self.peer_group._handle.protocol.key(part)


class Hold:
    """A voter that withholds its vote until ``go()``."""

    def __init__(self, answer: bool | None = True) -> None:
        self.asked = threading.Event()
        self._answer = answer
        self._released = threading.Event()

    def __call__(self, proposal: Proposal) -> bool | None:
        self.asked.set()
        self._released.wait(LONG_S)
        return self._answer

    def go(self) -> None:
        self._released.set()


def always(answer: bool | None) -> Callable[[Proposal], bool | None]:
    return lambda proposal: answer


def ids(*members: Any) -> tuple[str, ...]:
    return tuple(sorted(member.id for member in members))


def outcome_of(future: Future[Outcome]) -> Outcome:
    return future.result(RESULT_S)


# The child process


class _Child:
    """The commands that a member executes, one method each."""

    def __init__(self, url: str, name: str | None = None) -> None:
        self.client = meteor.connect(url)
        self.peer_group = self.client.peer_group(GROUP)
        self.me = self.peer_group.join(name)
        self.asked_of: list[str] = []
        self.done: list[dict[str, Any]] = []
        self.lost: list[dict[str, Any]] = []
        self.seen: list[Outcome] = []
        self.peer_group.on_decision(self.seen.append)
        # One callback for all actions, whatever their names.
        self.me.on_missed(lambda action: self.lost.append(_facts(action)))

    def vote(self, answer: bool | None) -> None:
        @self.me.on_vote
        def vote(proposal: Proposal) -> bool | None:
            self.asked_of.append(proposal.id)
            return answer

    def hold(self) -> None:
        """Register a voter that does not vote during a test."""

        @self.me.on_vote
        def vote(proposal: Proposal) -> bool | None:
            self.asked_of.append(proposal.id)
            time.sleep(LONG_S)
            return None

    def asked(self) -> list[str]:
        return self.asked_of

    def act(self, name: str, late: Any = "skip") -> None:
        @self.me.on_action(name, late=late)
        def run(action: Action) -> None:
            # The server runs on this machine, so time.time() is the exact time on its clock.
            self.done.append(_facts(action) | {"true": time.time()})

    def actions(self) -> list[dict[str, Any]]:
        return self.done

    def missed(self) -> list[dict[str, Any]]:
        return self.lost

    def decisions(self) -> list[dict[str, Any]]:
        return [vars(outcome) for outcome in self.seen]

    def propose(self, topic: Any, kind: Any, timeout: float) -> None:
        self.me.propose(topic, kind=kind, timeout=timeout)

    def error_bound(self) -> float:
        self.peer_group.now()
        return self.peer_group._handle.clock.error_bound


def _facts(action: Action) -> dict[str, Any]:
    return vars(action) | {}


if __name__ == "__main__":
    child = _Child(**json.loads(sys.argv[1]))
    say({"value": child.me.id})
    serve(child)
