"""A message that kills its process becomes a dead letter after ``max_deliveries`` deliveries."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

import meteor_py as meteor
from meteor_py.peers.group import PeerGroup
from tests.support.mailing import NAME, SOON_S, Gate, Post, Record, failure, inbox_length, result
from tests.support.mailing import post as post
from tests.support.peer_scripts import answer, entries, leftovers, send
from tests.support.peering import Build, Peers, expel
from tests.support.peering import build as build
from tests.support.waiting import eventually

# The script


def begin(peers: Peers, member: str, token: str, session: str = "") -> int:
    """Count a delivery of a member's first message; return the count, or -1 for a dead letter."""
    (place, flat), *_ = peers.client._connector.call(
        "XRANGE", peers.prefix + f"inbox:{member}", "-", "+"
    )
    session = session or f"s-{member}"
    reply = peers.run("settle", member, session, "begin", place, flat[1], token, "", "")
    return int(reply[1])


def test_message_becomes_a_dead_letter_when_another_delivery_would_exceed_the_limit(
    build: Build,
) -> None:
    peers = build(max_deliveries=3)
    peers.join("a", named=True)
    send(peers, "m", to="member", member="a", verb="ask")
    assert [begin(peers, "a", f"t{n}") for n in range(3)] == [2, 3, -1]
    (letter,) = entries(peers, "dead")
    assert (letter[b"id"], letter[b"member"], letter[b"body"]) == (b"m", b"a", b"1")
    assert letter[b"reason"] == b"it was delivered 3 times and never settled"
    assert answer(peers, "m", "a") == b"poison::3"
    assert [part for part in leftovers(peers) if part.endswith(":a")] == ["inbox:a"]
    assert entries(peers, "inbox:a") == []


def test_call_repeated_after_a_lost_reply_counts_no_delivery(build: Build) -> None:
    peers = build()
    peers.join("a", named=True)
    send(peers, "m", to="member", member="a")
    assert [begin(peers, "a", token) for token in ("t1", "t1", "t2", "t2")] == [2, 2, 3, 3]


def test_message_never_becomes_a_dead_letter_in_a_group_without_a_limit(build: Build) -> None:
    peers = build(max_deliveries=0)
    peers.join("a", named=True)
    send(peers, "m", to="member", member="a")
    assert [begin(peers, "a", f"t{n}") for n in range(20)] == list(range(2, 22))


def test_delivery_count_moves_with_a_message(build: Build) -> None:
    peers = build(max_deliveries=3)
    peers.join("a")
    send(peers, "m")
    peers.join("b")
    peers.leave("a")  # member a may have begun to handle the message
    assert begin(peers, "b", "t1") == 2
    peers.join("c")
    peers.leave("b")
    assert begin(peers, "c", "t2") == 3
    peers.join("d")
    peers.leave("c")
    assert begin(peers, "d", "t3") == -1
    assert [letter[b"member"] for letter in entries(peers, "dead")] == [b"d"]
    assert not [part for part in leftovers(peers) if part.startswith(("begun", "movable"))]
    assert entries(peers, "inbox:d") == []


def test_only_the_session_that_owns_a_member_counts_deliveries(build: Build) -> None:
    peers = build()
    peers.join("a", named=True)
    send(peers, "m", to="member", member="a")
    args = ("settle", "a", "another", "begin", "1-1", "m", "t", "", "")
    assert peers.run(*args) == ["FENCED"]
    assert peers.run("settle", "a", "s-a", "begin", "1-1", "m", "t", "", "") == ["OK", 0]


@pytest.mark.parametrize("value", [-1, 1, 1_001])
def test_invalid_max_deliveries_is_refused(url: str, value: int) -> None:
    with meteor.connect(url) as m, pytest.raises(ValueError, match="max_deliveries"):
        m.peer_group("g", max_deliveries=value)


# Members


def test_deliveries_are_counted_across_a_takeover(post: Post) -> None:
    group, first, second = post.group(ttl=60), post.group(), post.group()
    gate, got = Gate(), Record(lambda message: message.deliveries)
    first.join("a").on("q")(gate)
    held = group.member("a").ask("q", "held", timeout=60)
    gate.wait_until_entered()
    second.join("a").on("q")(got)  # takes over, as after a restart
    assert result(held) == 2
    assert result(group.member("a").ask("q", "new")) == 1
    gate.open.set()
    assert [message.deliveries for message in gate.wait_for(1)] == [1]


def test_expelled_member_counts_messages_that_it_gets_again(post: Post) -> None:
    group, other = post.group(ttl=60), post.group()
    me, gate = other.join("a"), Gate(lambda message: message.deliveries)
    me.on("q")(gate)
    begun, waiting = (group.member("a").ask("q", n, timeout=60) for n in range(2))
    gate.wait_until_entered()
    eventually(lambda: inbox_length(group, "a") == 2)
    session = me._handle.session
    expel(group, "a")
    other._handle.heartbeat.hurry()
    inbox = me._handle.inbox()
    # Wait until the inbox has dropped its messages. It then reads them again.
    eventually(lambda: me._handle.session != session and inbox._identity[1] == me._handle.session)
    gate.open.set()
    assert result(begun) == 1  # its handler was running all along
    assert result(waiting) == 2  # the server cannot know that no handler had begun it


_DEADLY = """
import os, signal, sys, time
import meteor_py as meteor
with meteor.connect(sys.argv[1]) as m, m.peer_group(sys.argv[2]) as group:
    me = group.join(sys.argv[3] or None)
    @me.on("q")
    def handle(message):
        if message.body == "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        return message.body
    time.sleep(3600)
"""


class Victims:
    """Processes that the message "poison" kills."""

    def __init__(self, post: Post, group: PeerGroup) -> None:
        self._url = post.url
        self.processes: list[subprocess.Popen[bytes]] = []
        self._group = group

    def start(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _DEADLY, self._url, NAME, name]
        self.processes.append(subprocess.Popen(command))
        return self.processes[-1]

    def __enter__(self) -> Victims:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def test_named_member_survives_a_poison_message_after_max_deliveries(post: Post) -> None:
    group = post.group(ttl=0.5, max_deliveries=2)
    with Victims(post, group) as victims:
        victims.start("a")
        eventually(lambda: group.find("a") is not None, 30)
        poison = group.member("a").ask("q", "poison", timeout=60, wait_for_handler=True)
        behind = group.member("a").ask("q", "behind", timeout=60, wait_for_handler=True)
        for _ in range(3):
            process = victims.processes[-1]
            eventually(lambda process=process: process.poll() or behind.done(), 30)  # type: ignore[misc]
            if behind.done():
                break
            victims.start("a")
        assert result(behind) == "behind"
        assert [process.poll() for process in victims.processes] == [-signal.SIGKILL] * 2 + [None]
        error = failure(poison)
        assert isinstance(error, meteor.HandlerFailed)
        assert "delivered 2 times" in str(error)
        (letter,) = group.dead_letters()
        assert (letter.member, letter.body) == ("a", b'"poison"')
        eventually(lambda: inbox_length(group, "a") == 0)


def test_poison_message_to_any_member_kills_at_most_max_deliveries_processes(post: Post) -> None:
    group = post.group(ttl=0.5, max_deliveries=2)
    with Victims(post, group) as victims:
        for _ in range(4):
            victims.start("")
        eventually(lambda: len(group.members) == 4, 30)
        group.any.tell("q", "poison").result(SOON_S)
        eventually(lambda: group.dead_letters(), 30)
        dead = [process for process in victims.processes if process.poll() is not None]
        assert len(dead) == 2
