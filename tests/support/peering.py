"""Peer groups for tests: direct script calls with a fake clock, handles, and child processes.

peers = Peers(client)
peers.join("a")
peers.pass_ms(400)
assert peers.events() == [("joined", "a"), ("elected", "a")]
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import pytest

import meteor_py as meteor
from meteor_py.log.catalog import list_names
from meteor_py.peers.config import PeersConfig
from meteor_py.peers.event import Event
from meteor_py.peers.group import PeerGroup
from meteor_py.peers.membership import Membership
from meteor_py.peers.protocol import PARTS
from meteor_py.redis import keys, scripts
from meteor_py.redis.scripts import PEERS_GUARDED_WRITE, Script
from meteor_py.runtime.clock import now
from tests.support.forking import exit_code, fork
from tests.support.group_members import ANSWER_S, Process, Refused, answer, serve
from tests.support.waiting import eventually

GROUP = "workers"
#: The default ttl in `Peers`, in milliseconds.
TTL_MS = 1000
HOUR_MS = 3_600_000
#: A ttl in seconds that is so long that no member expires during a test.
LONG_S = 60.0

Open = Callable[..., PeerGroup]

#: Lua code that replaces the TIME command in scripts. `_SET` reads the time from a key that the
#: test sets. `_STEPPED` adds a key's value to the real time.
_SET = b"""(function()
  local ms = tonumber(call('GET', P .. 'clock'))
  return {format('%.0f', math.floor(ms / 1000)), format('%.0f', ms % 1000 * 1000)}
end)()"""
_STEPPED = b"""(function()
  local time = call('TIME')
  return {format('%.0f', time[1] + (tonumber(call('GET', P .. 'step') or nil) or 0)), time[2]}
end)()"""

PEERS_SCRIPTS = [
    script
    for script in scripts.ALL
    if script.name.startswith("peers/") and script.name != "peers/open"
]


def rebuilt(script: Script, clock: bytes) -> Script:
    """Return a copy of a script that reads ``clock`` instead of the server's time."""
    build = object.__new__(Script)
    build.name, build.read_only = script.name, script.read_only
    build.source = script.source.replace(b"call('TIME')", clock)
    is_timeless = script.name == "peers/settle"
    assert is_timeless or build.source != script.source, "the script has no clock to replace"
    build.sha = hashlib.sha1(build.source, usedforsecurity=False).hexdigest()
    build.plain_source = build.source.split(b"\n", 1)[1]
    return build


def step_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make scripts add a group's ``step`` key, in seconds, to the clock."""
    for script in PEERS_SCRIPTS:
        build = rebuilt(script, _STEPPED)
        for attribute in ("source", "sha", "plain_source"):
            monkeypatch.setattr(script, attribute, getattr(build, attribute))


class Peers:
    """One group whose scripts the test calls directly."""

    def __init__(self, client: meteor.Client, **settings: Any) -> None:
        self.client = client
        self.prefix = keys.peers(GROUP)
        self._builds = {script.name: rebuilt(script, _SET) for script in PEERS_SCRIPTS}
        self.clock = 1_700_000_000_000
        self.pass_ms(0)
        self.open(**settings)

    def open(self, **settings: Any) -> dict[bytes, bytes]:
        config = PeersConfig(**({"ttl": 1.0} | settings))
        fields = [item for pair in config.to_fields().items() for item in pair]
        names = [self.prefix + part for part in PARTS]
        flat = self.client._connector.run(scripts.PEERS_OPEN, names, [os.urandom(8).hex(), *fields])
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def pass_ms(self, ms: int) -> None:
        """Advance the clock, or set it back."""
        self.clock += ms
        self.client._connector.call("SET", self.prefix + "clock", self.clock)

    def run(self, name: str, *args: Any) -> list[Any]:
        found = self.client._connector.run(self._builds["peers/" + name], [self.prefix], args)
        return [item.decode() if isinstance(item, bytes) else item for item in found]

    def join(
        self,
        member: str,
        session: str = "",
        *,
        named: bool = False,
        priority: int = 0,
        metadata: str = "",
        how: str = "fail",
        most: int = 1000,
    ) -> list[Any]:
        kind = "1" if named else "0"
        session = session or "s-" + member
        return self.run("join", member, session, kind, priority, metadata, how, most)

    def heartbeat(self, *members: str, session: str = "") -> list[int]:
        """Send a heartbeat for each member, and return each one's number from the reply: 1 if it is
        still a member; see heartbeat.lua. Without members, send an observer's heartbeat."""
        sessions = [session or "s-" + member for member in members] or [""]
        found: list[int] = []
        for one, member in zip(sessions, members or ("",), strict=True):
            args = [member] if member else []
            found += self.run("heartbeat", one, *args)[8]
        return found

    def leave(self, member: str, session: str | None = None, how: str = "") -> list[Any]:
        return self.run("leave", member, "s-" + member if session is None else session, how)

    def resign(self, member: str, term: int | None = None, above: int = 0) -> list[Any]:
        number = self.term if term is None else term
        return self.run("update_member", member, "s-" + member, "resign", number, above)

    def guard(self, term: int, session: str, value: str) -> list[Any]:
        return self.run("guarded_write", term, session, "set", "x", value)

    def live(self, ms: int, *members: str) -> list[int]:
        """Advance the clock in steps of 100 ms. Send heartbeats from these members before the first
        step and after each step; return the result of the last ``heartbeat``."""
        here = self.heartbeat(*members)
        for _ in range(ms // 100):
            self.pass_ms(100)
            here = self.heartbeat(*members)
        return here

    def state(self, field: str) -> str:
        return (self.client._connector.call("HGET", self.prefix + "state", field) or b"").decode()

    @property
    def leader(self) -> str:
        return self.state("leader")

    @property
    def term(self) -> int:
        return int(self.state("term") or 0)

    def entries(self) -> list[tuple[bytes, dict[str, str]]]:
        found = self.client._connector.call("XRANGE", self.prefix + "events", "-", "+")
        return [
            (entry, {k.decode(): v.decode() for k, v in zip(flat[::2], flat[1::2], strict=True)})
            for entry, flat in found
        ]

    def events(self, since: int = 0) -> list[tuple[str, str]]:
        """Return the kind and member of each event, starting at index ``since``."""
        return [(fields["kind"], fields["member"]) for _, fields in self.entries()[since:]]

    def members(self) -> set[str]:
        flat = self.client._connector.call("HKEYS", self.prefix + "members")
        return {name.decode() for name in flat}

    def everything(self) -> dict[str, bytes]:
        """Return the contents of all the group's keys, except for the clock and the state."""
        client = self.client.redis
        names: Any = client.keys("meteor:*")
        kinds: dict[bytes, Any] = {
            b"hash": lambda name: sorted(client.hgetall(name).items()),
            b"zset": lambda name: client.zrange(name, 0, -1, withscores=True),
            b"stream": client.xrange,
            b"string": client.get,
            b"set": client.smembers,
        }
        found = {}
        for name in names:
            if not name.endswith((b":clock", b":state")):
                kind: Any = client.type(name)
                found[name.decode()] = repr(kinds[kind](name)).encode()
        return found


Build = Callable[..., Peers]


@pytest.fixture
def build(any_url: str) -> Iterator[Build]:
    with meteor.connect(any_url) as client:
        yield lambda **settings: Peers(client, **settings)


@pytest.fixture
def peers(build: Build) -> Peers:
    return build()


# Handles in this process


@pytest.fixture
def open_group(url: str) -> Iterator[Open]:
    """Open handles to a group, each with its own client. The first handle's settings apply."""
    with ExitStack() as stack:

        def opened(at: str = "", name: str = GROUP, **settings: Any) -> PeerGroup:
            client = stack.enter_context(meteor.connect(at or url))
            return stack.enter_context(client.peer_group(name, **settings))

        yield opened


def peer_groups(group: PeerGroup) -> list[str]:
    """Return the names of all peer groups on a group's server."""
    connector = group._handle.protocol.connector
    return list_names(connector, keys.PEERS, lambda name: keys.peers(name, "config"))


def ids(group: PeerGroup) -> list[str]:
    return [member.id for member in group.members]


def on_key(group: PeerGroup, command: str, part: str, *args: Any) -> Any:
    """Run a command on one of a group's keys."""
    protocol = group._handle.protocol
    return protocol.connector.call(command, protocol.key(part), *args)


def await_heartbeat(group: PeerGroup, me: Membership) -> None:
    """Wait until a member's heartbeat has been sent and processed."""
    for _ in range(2):  # the first heartbeat's effects are complete when the second is sent
        before = me._handle.valid_until
        group._handle.heartbeat.hurry()
        eventually(lambda before=before: me._handle.valid_until > before, 20)  # type: ignore[misc]


def expel(group: PeerGroup, *members: str) -> None:
    """Make the server drop members, as if their ttl had expired."""
    client, key = group._handle.protocol.connector, group._handle.protocol.key
    overdue = [item for member in members for item in (1, member)]
    # Send both commands in one write, so that (in practice) no heartbeat runs between them.
    client.pipeline([("ZADD", key("deadlines"), *overdue), ("HDEL", key("state"), "due")])
    group._handle.protocol.look()


class Heard:
    """Records the calls to a group's callbacks, in order."""

    def __init__(self, group: PeerGroup) -> None:
        self.calls: list[tuple[Any, ...]] = []
        #: The member ids at the time of each call.
        self.members: list[list[str]] = []

        def note(*call: Any) -> None:
            self.members.append([member.id for member in group.members])
            self.calls.append(call)

        group.on_join(lambda member: note("join", member.id))
        group.on_leave(lambda member, reason: note("leave", member.id, reason))
        group.on_status(lambda member, status: note("status", member.id, status.value))
        group.on_elected(lambda leader, term: note("elected", leader.id))
        group.on_resigned(lambda member, term, reason: note("resigned", member, reason))
        group.on_reset(lambda: note("reset"))

    def count(self, *call: Any) -> int:
        return self.calls.count(call)


@contextmanager
def watching(group: PeerGroup) -> Iterator[list[Event]]:
    """Yield a list that receives all events from now on."""
    events: list[Event] = []
    group.on_event(events.append)
    yield events


# Members in other processes


class Peer(Process):
    """A child process with one handle to a group, controlled by commands."""

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(
            "-m", "tests.support.peering", json.dumps({"url": url, "settings": settings})
        )
        assert json.loads(self.read())["value"] == "ready"

    def ask(self, command: str, /, *args: Any, within_s: float = ANSWER_S) -> Any:
        self.tell(command, *args)
        return self.answer(within_s)

    def tell(self, command: str, /, *args: Any) -> None:
        self.write(json.dumps([command, *args]))

    def answer(self, within_s: float = ANSWER_S) -> Any:
        found = json.loads(self.read(within_s))
        if "error" in found:
            raise Refused(found["error"], found["text"])
        return found["value"]


class _Child:
    def __init__(self, url: str, settings: dict[str, Any]) -> None:
        self.client = meteor.connect(url)
        self.peer_group = self.client.peer_group(GROUP, **settings)
        self.me: Any = None

    def join(self, name: str | None) -> str:
        self.me = self.peer_group.join(name)
        return str(self.me.id)

    def leave(self) -> None:
        self.me.leave()

    def state(self) -> dict[str, Any]:
        term = self.me and self.me.term
        return {
            "id": self.me and self.me.id,
            "lost": bool(self.me and self.me.lost.is_set()),
            "term": term.number if term else None,
            "leader": self.peer_group.leader.id if self.peer_group.leader else None,
            "members": [member.id for member in self.peer_group.members],
        }

    def lead(self, ttl_s: float) -> list[Any]:
        """Reply with the term's number, then lead until the process has been paused for a ttl.

        Return the state of the term, and the outcomes of two writes: one with the local check,
        and one without.
        """
        with self.me.leadership(timeout=ANSWER_S) as term:
            session = self.me._handle.session
            last = at = now()
            answer({"value": term.number})
            while at - last < ttl_s:
                last, at = at, now()
            found = [term.valid, term.lost.is_set(), term.remaining, self._write(term)]
            args = [term.number, session, "set", "config", b"from a zombie"]
            # Bypass the local check, like a write that was already sent.
            code = self.peer_group._handle.protocol.run(PEERS_GUARDED_WRITE, args)[0]
            return [*found, code.decode()]

    def write(self, name: str, value: str) -> str:
        return self._write(self.me.term, name, value)

    def _write(self, term: Any, name: str = "config", value: str = "old") -> str:
        try:
            term.guard.set(name, value)
        except meteor.MeteorError as error:
            return type(error).__name__
        return "written"

    def hold(self) -> None:
        """Register a callback that raises, and one that never returns."""

        def fail(*_: object) -> NoReturn:
            raise ValueError("no")

        self.peer_group.on_join(fail)
        self.peer_group.on_join(lambda *_: threading.Event().wait())

    def fork(self) -> list[str]:
        """Fork a child that uses the inherited group and exits.

        Return the errors from its calls, the state that it sees, and its exit code.
        """
        reading, writing = os.pipe()
        term = self.me.term
        pid = fork()
        if pid == 0:
            os.close(reading)
            tries = (
                self.peer_group.join,
                lambda: self.peer_group.remove(self.me.id),
                self.peer_group.watch,
                lambda: self.peer_group.guarded("x"),
                lambda: self.me.update({"child": True}),
                self.me.resign,
                lambda: self.me.as_leader(print),
                lambda: self.me.leadership(1).__enter__(),
                lambda: term.guard.set("x", "from the child"),
            )
            told = [_error_of(each) for each in tries] + [str(term.valid), str(self.me.term)]
            self.me.leave()
            self.me.close()
            self.peer_group.close()
            own = self.client.peer_group(GROUP)
            told.append(str(len(own.members)))
            own.close()
            os.write(writing, "\n".join(told).encode())
            os.close(writing)
            raise SystemExit(0)
        os.close(writing)
        code = exit_code(pid)
        with os.fdopen(reading) as pipe:
            return [*pipe.read().split("\n"), str(code)]

    def serve_until_terminated(self) -> None:
        """Run like a service that exits on SIGTERM without closing anything."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        answer({"value": "serving"})
        while True:
            time.sleep(60)


def _error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "none"


def main() -> None:
    child = _Child(**json.loads(sys.argv[1]))
    answer({"value": "ready"})
    serve(child)


if __name__ == "__main__":
    main()
