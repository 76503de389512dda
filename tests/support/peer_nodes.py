"""Child processes that use peer groups. A process can open several groups, have several members,
only observe, or join and leave under load.

    with Nodes(url) as nodes:
        one, two = nodes.start(2, "workers", ttl=60)
        member = one.ask("join", "workers")
        two.ask("watch", "workers")

The processes report what happened as plain lists, which tests compare between processes.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from itertools import count
from typing import Any, Self

import pytest

import meteor_py as meteor
from meteor_py.errors import MembershipLost, MeteorError
from meteor_py.peers.event import Event
from meteor_py.peers.group import PeerGroup
from meteor_py.peers.membership import Membership
from meteor_py.peers.messaging.message import Message
from meteor_py.peers.messaging.replies import Replies
from tests.support.group_members import Process, answer, serve
from tests.support.mailing import SOON_S
from tests.support.peering import Peer, step_clocks

#: The queue for which every member has a handler.
BOX = "box"
#: Timeout of a request in seconds. No test should need all of it.
PATIENCE_S = 30.0
#: Kinds of targets for the requests that nodes send under load.
TARGETS = ("leader", "any", "all", "member")
#: Seconds to wait for the reply to a slow command: only a failing test waits that long.
STORM_S = 90.0
#: Number of concurrent requests after which a process waits for the oldest one.
_OPEN = 8


class Node(Peer):
    """One process. The first command waits until the process is ready."""

    def __init__(self, url: str, *, stepped: bool = False) -> None:
        orders = {"url": url, "stepped": stepped}
        Process.__init__(self, "-m", "tests.support.peer_nodes", json.dumps(orders))
        self._ready = False

    def tell(self, command: str, /, *args: Any) -> None:
        if not self._ready:
            assert json.loads(self.read())["value"] == "ready"
            self._ready = True
        super().tell(command, *args)


class Nodes:
    """Starts processes in parallel, and stops them on exit."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(
        self, number: int, group: str = "", *, stepped: bool = False, **settings: Any
    ) -> list[Node]:
        """Start processes and, if ``group`` is given, have each open that group.

        Args:
            stepped: Call ``step_clocks`` in each process.
        """
        nodes = [Node(self._url, stepped=stepped) for _ in range(number)]
        for node in nodes:
            self._stack.callback(node.close)
        if group:
            ask_all(nodes, "open", group, settings)
        return nodes


@pytest.fixture
def nodes(url: str) -> Iterator[Nodes]:
    with Nodes(url) as nodes:
        yield nodes


def ask_all(
    nodes: list[Node], command: str, *args: Any, each: list[Any] | None = None
) -> list[Any]:
    """Send all processes the same command at once, and return their replies.

    Args:
        each: One more argument for each process.
    """
    for number, node in enumerate(nodes):
        node.tell(command, *args, *([] if each is None else [each[number]]))
    return [node.answer(STORM_S) for node in nodes]


def plain(event: Event) -> dict[str, Any]:
    """Return an event in a form that can be compared between processes."""
    found = asdict(event)
    found["fields"] = {name: value.decode() for name, value in event.fields.items()}
    return found


# The child process


class _Child:
    """The commands that a process executes, one method each."""

    def __init__(self, url: str, *, stepped: bool) -> None:
        if stepped:
            step_clocks(pytest.MonkeyPatch())  # never undone: it lasts until the process ends
        self.client = meteor.connect(url)
        self.groups: dict[str, PeerGroup] = {}
        self.mine: dict[str, Membership] = {}
        self.seen: list[Event] = []
        self.got: list[dict[str, Any]] = []
        #: Ids of members that have left, and bodies of messages that reached them afterwards.
        self.gone: set[str] = set()
        self.too_late: list[Any] = []

    # -- members and observers

    def open(self, group: str, settings: dict[str, Any]) -> None:
        name, _, instance = group.partition("/")
        self.groups[group] = self.client.peer_group(name, instance=instance or None, **settings)

    def join(self, group: str, name: str | None = None) -> str:
        me = self.mine[group] = self.groups[group].join(name)

        def note(message: Message) -> Any:
            if message.member in self.gone:
                self.too_late.append(message.body)
            facts = {name: getattr(message, name) for name in _FACTS}
            self.got.append(facts | {"group": group, "sent_ms": round(message.sent_at * 1000)})
            return {"by": message.member, "body": message.body}

        me.on(BOX)(note)
        return me.id

    def leave(self, group: str) -> None:
        me = self.mine.pop(group)
        me.leave()
        self.gone.add(me.id)

    def watch(self, group: str, how: str = "callback") -> None:
        """Record all events from now on."""
        if how == "callback":
            self.groups[group].on_event(self.seen.append)
        else:
            events = self.groups[group].watch()
            threading.Thread(target=self.seen.extend, args=(events,), daemon=True).start()

    def view(self) -> int:
        return self.seen[-1].view if self.seen else 0

    def events(self) -> list[dict[str, Any]]:
        return [plain(event) for event in self.seen]

    def state(self, group: str) -> dict[str, Any]:
        handle, me = self.groups[group], self.mine.get(group)
        return {
            "members": [member.id for member in handle.members],
            "leader": handle.leader.id if handle.leader else None,
            "valid_until": me._handle.valid_until if me else 0.0,
            "lost": bool(me and me.lost.is_set()),
        }

    # -- messages

    def heard(self) -> list[dict[str, Any]]:
        return self.got

    def heard_after_leaving(self) -> list[Any]:
        return self.too_late

    def tell_all(self, group: str, bodies: list[Any]) -> None:
        for body in bodies:
            self.mine[group].all.tell(BOX, body).result(SOON_S)

    # -- joining and leaving

    def storm(self, group: str, members: int, times: int, seed: float) -> None:
        """Make members join and leave ``times`` times each, in two threads."""
        with ThreadPoolExecutor(2) as threads:
            halves = [
                threads.submit(self._toggle, group, f"{seed}-{half}", members // 2, times)
                for half in range(2)
            ]
            for half in halves:
                half.result()

    def _toggle(self, group: str, seed: str, members: int, times: int) -> None:
        rng = random.Random(seed)
        turns = [place for place in range(members) for _ in range(2 * times)]
        rng.shuffle(turns)
        here: dict[int, Membership] = {}
        for place in turns:
            if place in here:
                here.pop(place).leave()
            else:
                name = f"{seed}-{place}" if rng.random() < 0.5 else None
                here[place] = self.groups[group].join(name)

    def roam(self, group: str, turns: int, seed: float) -> dict[str, list[Any]]:
        """Join, leave, resign and send messages to all members at random; end as a member.

        Return the messages that were sent, and the ids of the members that joined.
        """
        return self._roam(group, turns, seed, lambda: False)

    def roam_and_ask(
        self, group: str, turns: int, questions: int, seed: float
    ) -> dict[str, list[Any]]:
        """Like ``roam``, while another thread sends requests; also returns their outcomes."""
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(self._ask, group, questions, seed)
            found = self._roam(group, turns, seed, lambda: not asking.done())
            return found | {"asked": asking.result()}

    def _roam(
        self, group: str, turns: int, seed: float, goes_on: Callable[[], bool]
    ) -> dict[str, list[Any]]:
        rng = random.Random(seed)
        told: list[str] = []
        ids: list[str] = []
        for turn in count():
            if turn >= turns and not goes_on() and group in self.mine:
                return {"told": told, "ids": ids}
            me = self.mine.get(group)
            what = rng.choice(("leave", "leave", "tell", "tell", "tell", "resign"))
            if me is None:
                ids.append(self.join(group))
            elif what == "leave":
                self.leave(group)
            elif what == "resign":
                me.resign()
            else:
                told.append(f"{seed}-{turn}")
                me.all.tell(BOX, told[-1]).result(SOON_S)
        raise AssertionError  # count() never ends

    def _ask(self, group: str, questions: int, seed: float) -> list[list[Any]]:
        """Send requests; return each request's target, body, and replies or error name."""
        rng = random.Random(-seed)
        asked: list[tuple[str, str, Future[Any]]] = []
        for number in range(questions):
            to, body = rng.choice(TARGETS), f"{seed}?{number}"
            try:
                future = self._target(group, to, rng).ask(BOX, body, timeout=PATIENCE_S)
            except MembershipLost as error:  # the member left just before
                future = Future()
                future.set_exception(error)
            asked.append((to, body, future))
            if number >= _OPEN:
                asked[number - _OPEN][2].exception(2 * PATIENCE_S)
        return [[to, body, *outcome(future)] for to, body, future in asked]

    def _target(self, group: str, to: str, rng: random.Random) -> Any:
        handle = self.groups[group]
        sender: Any = self.mine.get(group, handle) if rng.random() < 0.5 else handle
        if to == "member":
            members = handle.members
            return sender.member(rng.choice(members).id if members else "nobody")
        return sender.leader_proxy if to == "leader" else getattr(sender, to)


#: The recorded fields of a message.
_FACTS = ("member", "body", "sender", "from_leader", "queue")


def outcome(future: Future[Any]) -> tuple[str, Any]:
    """Return the outcome of a request: replies by member, or the error name."""
    try:
        value = future.result(2 * PATIENCE_S)
    except MeteorError as error:
        return type(error).__name__, None
    except TimeoutError:
        return "it did not end", None
    if isinstance(value, Replies):
        failed = {member: type(error).__name__ for member, error in value.failed.items()}
        return "answered", {"values": value.values, "failed": failed}
    return "answered", {"values": {value["by"]: value}, "failed": {}}


def main() -> None:
    child = _Child(**json.loads(sys.argv[1]))
    answer({"value": "ready"})
    serve(child)


if __name__ == "__main__":
    main()
