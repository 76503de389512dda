"""Peer groups survive failing processes and servers.

Member processes are killed, paused, forked or terminated. Servers have outages or clock steps. When
a test checks how long a process took to react, it compares times on the server's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.errors import StaleTerm
from meteor_py.peers.event import Event
from meteor_py.peers.group import PeerGroup
from meteor_py.runtime.clock import now
from tests.conftest import ServerFactory
from tests.support.peering import (
    GROUP,
    LONG_S,
    Heard,
    Open,
    Peer,
    ids,
    on_key,
    step_clocks,
    watching,
)
from tests.support.peering import open_group as open_group
from tests.support.servers import Server
from tests.support.waiting import eventually

#: Ttls in seconds: one so short that members expire during a test, and one long enough for the
#: heartbeats of a busy machine.
SHORT_S = 1.0
STEADY_S = 1.5
#: Tolerance in seconds for a busy machine.
SLACK_S = 3.0

Start = Callable[..., Peer]


@pytest.fixture
def start(url: str) -> Iterator[Start]:
    """Start processes that open the group, and stop them after the test."""
    with ExitStack() as stack:

        def started(at: str = "", **settings: Any) -> Peer:
            peer = Peer(at or url, **settings)
            stack.callback(peer.close)
            return peer

        yield started


def find(events: list[Event], kind: str, member: str) -> Event:
    """Wait for an event of this kind about a member; return the first one."""
    found: list[Event] = []

    def there() -> bool:
        found[:] = [event for event in events if (event.kind, event.member) == (kind, member)]
        return bool(found)

    eventually(there, 30, f"no {kind!r} event for {member} arrived")
    return found[0]


def server_ms(group: PeerGroup) -> float:
    seconds, micros = group._handle.protocol.connector.call("TIME")
    return int(seconds) * 1000 + int(micros) / 1000


# Processes


def test_killed_leader_is_replaced_soon_after_the_ttl(start: Start, open_group: Open) -> None:
    group = open_group(ttl=SHORT_S)
    leader, other = start(), start()
    first, second = leader.ask("join", None), other.ask("join", None)
    eventually(lambda: ids(group) == [first, second])
    with watching(group) as events:
        leader.kill()
        killed_ms = server_ms(group)
        assert find(events, "left", first).reason == "expired"
        elected = find(events, "elected", second)
        assert elected.at <= killed_ms + (SHORT_S + 1 + SLACK_S) * 1000
        eventually(lambda: other.ask("state")["term"] == elected.term)


def test_some_process_leads_however_often_the_leader_is_killed(
    start: Start, open_group: Open
) -> None:
    group = open_group(ttl=SHORT_S)
    peers = {}
    for _ in range(3):
        peer = start()
        peers[peer.ask("join", None)] = peer
    terms = []
    while peers:
        eventually(lambda: group.leader is not None and group.leader.id in peers, 20)
        assert group.leader is not None
        terms.append(group.term)
        peers.pop(group.leader.id).kill()
    eventually(lambda: not group.members, 20)
    assert group.leader is None
    assert terms == sorted(set(terms))
    assert len(terms) >= 3


def test_leader_paused_too_long_notices_at_once_and_cannot_write(
    start: Start, open_group: Open
) -> None:
    group = open_group(ttl=SHORT_S)
    zombie = start()
    zombie.ask("join", "zombie")
    zombie.tell("lead", SHORT_S)
    number = zombie.answer()
    me = group.join()
    with watching(group) as events:
        zombie.pause()
        paused = now()
        assert find(events, "elected", me.id).term > number
        assert me.term is not None
        me.term.guard.set("config", "new")
        eventually(lambda: now() > paused + 1.2 * SHORT_S)
        zombie.resume()
        valid, lost, remaining, written, by_the_server = zombie.answer()
    assert (valid, remaining) == (False, 0)
    assert lost is True
    assert (written, by_the_server) == ("StaleTerm", "STALE")
    assert group.guarded("config") == b"new"
    eventually(lambda: "zombie" in [member.id for member in group.members if member.alive])


def test_leader_hands_over_at_once_on_sigterm(start: Start, open_group: Open) -> None:
    group = open_group(ttl=LONG_S)  # no timeout can cause the handover
    service, other = start(), start()
    first, second = service.ask("join", None), other.ask("join", "b")
    eventually(lambda: ids(group) == [first, second])
    service.tell("serve_until_terminated")
    assert service.answer() == "serving"
    with watching(group) as events:
        service.terminate()
        assert service.wait() == 0
        assert find(events, "left", first).reason == "left"
        assert find(events, "resigned", first).reason == "left"
        find(events, "elected", second)
    other.tell("serve_until_terminated")
    assert other.answer() == "serving"
    heard = Heard(group)
    other.terminate()
    eventually(lambda: heard.count("status", "b", "dead") == 1)  # but still a member
    assert group.leader is None


def test_named_member_continues_in_another_process_and_leads_again(
    start: Start, open_group: Open
) -> None:
    group = open_group(ttl=SHORT_S)
    first, second = start(), start()
    first.ask("join", "a")
    second.ask("join", "b")
    first.kill()
    eventually(lambda: group.leader is not None and group.leader.id == "b", 20)
    assert [member.alive for member in group.members] == [False, True]
    again = start()
    again.ask("join", "a")
    second.kill()
    eventually(lambda: group.leader is not None and group.leader.id == "a", 20)
    eventually(lambda: again.ask("state")["term"] == group.term)


def test_forked_child_cannot_use_its_parents_membership(start: Start, open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    parent = start()
    member = parent.ask("join", "a")
    eventually(lambda: group.leader is not None)
    with watching(group) as events:
        told = parent.ask("fork")
        assert told == [
            *["MeteorError"] * 8,
            "StaleTerm",
            *("False", "None"),  # term.valid and me.term in the child
            "1",  # number of members that the child's own handle sees
            "0",  # the child's exit code
        ]
        group.join("last")
        find(events, "joined", "last")
    assert {event.member for event in events} == {"last"}  # the parent is still a member
    assert parent.ask("state")["id"] == member
    assert parent.ask("write", "x", "from the parent") == "written"


# Servers


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_server_outage_lasting_two_ttls_expels_no_member(
    private_server: ServerFactory, start: Start, open_group: Open, how: str
) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    group = open_group(server.url, ttl=STEADY_S)
    peers = [start(server.url) for _ in range(2)]
    members = [peer.ask("join", None) for peer in peers]
    me = group.join()
    eventually(lambda: len(ids(group)) == 3)
    number = group.term
    with watching(group) as events:
        take_away(server, how)
        begun = now()
        eventually(lambda: now() > begun + 2 * STEADY_S, 30)
        assert all(peer.ask("state")["term"] is None for peer in peers)
        bring_back(server, how)
        eventually(lambda: peers[0].ask("state")["term"] == number, 20)
        # A full ttl later, all members are still alive.
        begun = now()
        eventually(lambda: now() > begun + 1.1 * STEADY_S)
        last = group.join("last")
        find(events, "joined", "last")
    assert [(event.kind, event.member) for event in events] == [("joined", "last")]
    assert ids(group) == [*members, me.id, last.id]
    assert [peer.ask("state")["lost"] for peer in peers] == [False] * 2


def take_away(server: Server, how: str) -> None:
    server.pause() if how == "stopped" else server.kill()


def bring_back(server: Server, how: str) -> None:
    server.resume() if how == "stopped" else server.restart()


@pytest.mark.parametrize("step_s", [3600, -3600])
def test_clock_step_expels_no_member_and_deaths_are_still_detected(
    url: str, open_group: Open, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    step_clocks(monkeypatch)  # in this process only, which runs all members
    one, two = open_group(ttl=STEADY_S), open_group()
    me, other = one.join("a"), two.join("b")
    eventually(lambda: ids(one) == ["a", "b"])
    term = me.term
    assert term is not None
    with watching(one) as events:
        on_key(one, "SET", "step", step_s)
        before = other._handle.valid_until
        eventually(lambda: other._handle.valid_until > before + STEADY_S, 20)
        assert events == []
        assert me.term is term
        assert term.valid
        with two._handle.lock:  # keeps this handle from sending heartbeats
            assert find(events, "dead", "b").reason == "expired"
        eventually(lambda: two.find("b") is not None and two.members[-1].alive)
    assert me.term is term
    assert not any(event.member == "a" for event in events)


def test_term_ends_and_another_begins_when_the_server_restarts_empty(
    private_server: ServerFactory, open_group: Open
) -> None:
    server = private_server("--save", "")
    one, two = open_group(server.url, ttl=SHORT_S), open_group(server.url)
    me, other = one.join("a"), two.join("b")
    term = me.term
    assert term is not None
    heard = Heard(two)
    server.kill()
    server.restart()
    eventually(lambda: heard.count("reset") >= 1, 20)
    eventually(lambda: (me.term is None) != (other.term is None), 20)
    eventually(lambda: sorted(ids(one)) == sorted(ids(two)) == ["a", "b"], 20)
    assert not term.valid
    with pytest.raises(StaleTerm):
        term.guard.set("x", "old")
    assert one.guarded("x") is None
    eventually(lambda: one.term == two.term > term.number)


def test_member_leaves_when_its_process_ends_without_closing(url: str, open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    peer = Peer(url)
    try:
        member = peer.ask("join", None)
        eventually(lambda: ids(group) == [member])
        peer._process.stdin.close()  # type: ignore[union-attr]  # ends its command loop
        assert peer.wait() == 0
    finally:
        peer.close()
    eventually(lambda: not group.members)
    assert meteor.connect(url).peer_groups() == [GROUP]
