"""Messages in an inbox are handled even if the receiving member dies or the server fails."""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from meteor_py.runtime.clock import now
from tests.conftest import ServerFactory
from tests.support.mailing import NAME, Gate, Post, Record, abandon, inbox_length, result
from tests.support.mailing import post as post
from tests.support.peering import LONG_S, expel
from tests.support.proxied_stream import ReplicatedStream
from tests.support.proxy import Proxy
from tests.support.servers import HOST
from tests.support.waiting import eventually

# Members that come and go


@pytest.mark.parametrize("how", ["takeover", "close", "crash"])
def test_unsettled_messages_to_a_named_member_reach_its_successor(post: Post, how: str) -> None:
    group, first, second = post.group(ttl=0.5), post.group(), post.group()
    me, gate = first.join("a"), Gate(lambda message: "first")
    me.on("q")(gate)
    futures = [group.member("a").ask("q", n, timeout=60) for n in range(3)]
    gate.wait_until_entered()
    if how == "close":
        gate_opener = threading.Timer(0.2, gate.open.set)
        gate_opener.start()
        me.close()
        gate_opener.join()
    elif how == "crash":
        abandon(first)
        eventually(lambda: not group.members[0].alive)
    got = Record(lambda message: f"second {message.body}")
    second.join("a").on("q")(got)
    begun = "first" if how == "close" else "second 0"  # close() finishes running handlers
    assert [result(future) for future in futures] == [begun, "second 1", "second 2"]
    gate.open.set()
    if how == "close":
        assert [message.body for message in gate.messages] == [0]
        assert [message.body for message in got.messages] == [1, 2]
    else:
        assert {message.id for message in gate.messages} <= {m.id for m in got.messages}


def test_reply_from_a_replaced_member_is_refused_and_logged(
    post: Post, caplog: pytest.LogCaptureFixture
) -> None:
    group, first, second = post.group(), post.group(), post.group()
    old = Record()
    first.join("a").on("q", ack="manual")(old)
    future = group.member("a").ask("q", timeout=60)
    (message,) = old.wait_for(1)
    new = Record()
    second.join("a").on("q", ack="manual")(new)
    new.wait_for(1)
    with caplog.at_level(logging.WARNING):
        assert not message.reply("old")
    assert "no longer belongs to this process" in caplog.text
    assert not future.done()
    assert inbox_length(group, "a") == 1
    assert new.messages[0].reply("new")
    assert result(future) == "new"


def test_expelled_named_member_continues_with_its_messages(post: Post) -> None:
    group, other = post.group(ttl=1), post.group()
    me, got = other.join("a"), Record(lambda message: message.body)
    me.on("q")(got)
    assert result(group.member("a").ask("q", 1)) == 1
    session = me._handle.session
    expel(group, "a")
    asked = group.member("a").ask("q", 2, timeout=60)
    assert result(asked) == 2
    eventually(lambda: me._handle.session != session, message="the member has not rejoined")
    assert result(group.member("a").ask("q", 3, timeout=60)) == 3
    assert not me.lost.is_set()


@pytest.mark.parametrize("begun", [False, True])
def test_member_presumed_dead_handles_no_message_before_older_ones(post: Post, begun: bool) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    me, gate = other.join("a"), Gate()
    me.on("q")(gate)
    result(group.member("a").tell("q", 0))
    gate.wait_until_entered()
    if not begun:
        gate.open.set()
        eventually(lambda: inbox_length(group, "a") == 0)
    heartbeat: Any = other._handle.heartbeat
    send_all, quiet = heartbeat._send_all, threading.Event()
    heartbeat._send_all = lambda: None if quiet.is_set() else send_all()
    quiet.set()
    expel(group, "a")
    for n in (1, 2, 3):
        result(group.member("a").tell("q", n))
    gate.open.set()
    reads = me._handle.inbox()
    eventually(
        lambda: reads._fenced_until > now(), message="the inbox did not notice the expulsion"
    )
    result(group.member("a").tell("q", 4))
    # The member must not handle messages 1 to 4 yet: another process may have taken over its name.
    assert gate.bodies in ([], [0])
    quiet.clear()
    heartbeat.hurry()
    eventually(lambda: 4 in gate.bodies, 30)
    assert list(dict.fromkeys(gate.bodies)) == [0, 1, 2, 3, 4]
    assert gate.bodies.count(0) <= 2


def test_expelled_unnamed_member_gets_messages_under_its_new_id(
    post: Post,
) -> None:
    group, other = post.group(ttl=1), post.group()
    me = other.join()
    me.on("q")(lambda message: message.body)
    before = me.id
    assert result(group.member(before).ask("q", 1)) == 1
    expel(group, before)
    eventually(lambda: me.id != before and group.find(me.id) is not None)
    assert result(group.member(me.id).ask("q", 2, timeout=60)) == 2
    assert result(me.member(me.id).ask("q", 3, timeout=60)) == 3


_HOLDER = """
import sys, time
import meteor_py as meteor
with meteor.connect(sys.argv[1]) as m, m.peer_group(sys.argv[2]) as group:
    me = group.join("a")
    @me.on("q")
    def hold(message):
        print("got it", flush=True)
        time.sleep(3600)
    time.sleep(3600)
"""


@pytest.mark.parametrize("to", ["member", "any"])
def test_messages_to_a_killed_process_are_handled_by_another(post: Post, to: str) -> None:
    group, other = post.group(ttl=0.5), post.group()
    arguments = [sys.executable, "-c", _HOLDER, post.url, NAME]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        try:
            eventually(lambda: group.find("a") is not None, 30)
            target = group.any if to == "any" else group.member("a")
            future = target.ask("q", timeout=60)
            assert process.stdout is not None
            assert process.stdout.readline() == b"got it\n"
        finally:
            process.send_signal(signal.SIGKILL)
    other.join("b" if to == "any" else "a").on("q")(lambda message: "done")
    assert result(future) == "done"


# Server outages and failovers


def test_messages_continue_after_a_server_outage(private_server: ServerFactory) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    with Post(server.url) as post:
        group, other = post.group(ttl=2), post.group()
        gate = Gate(lambda message: message.body)
        other.join("a").on("q")(gate)
        futures = [group.member("a").ask("q", n, timeout=60) for n in range(3)]
        gate.wait_until_entered()
        server.kill()
        gate.open.set()
        server.restart()
        assert [future.result(60) for future in futures] == [0, 1, 2]
        assert list(dict.fromkeys(gate.bodies)) == [0, 1, 2]


def test_messages_on_a_promoted_replica_are_read_even_if_others_were_lost(
    replicated: ReplicatedStream,
) -> None:
    with Post(replicated.proxied.proxy.url) as post:
        group, other = post.group(ttl=2), post.group()
        got = Record(lambda message: message.body)
        other.join("a").on("q")(got)
        assert result(group.member("a").ask("q", "before")) == "before"
        replicated.lag()
        assert result(group.member("a").ask("q", "not replicated")) == "not replicated"
        replicated.fail_over()
        for n in range(3):
            assert group.member("a").ask("q", n, timeout=60).result(60) == n
        assert [body for body in got.bodies if isinstance(body, int)] == [0, 1, 2]


def test_no_message_is_lost_while_a_member_is_expelled_and_disconnected(
    private_server: ServerFactory, rng: random.Random
) -> None:
    server = private_server()
    with Proxy(HOST, server.port) as proxy, Post(proxy.url) as post:
        group, other, direct = post.group(ttl=0.5), post.group(), post.group(server.url)
        got = Record(lambda message: message.body)
        me = other.join("a")
        me.on("q")(got)
        proxy.chaos(rng, 0.03, ("lost_reply", "lost_request", "torn_reply", "late_reply"))
        asked = []
        for n in range(200):
            asked.append(group.member("a").ask("q", n, timeout=60))
            if n % 40 == 7:
                expel(direct, "a")
            elif n % 50 == 9:
                proxy.cut()
        assert [future.result(60) for future in asked] == list(range(200))
        proxy.heal()
        assert set(got.bodies) == set(range(200))
        held = me._handle.inbox()._queues["q"].held
        eventually(lambda: not held, message="a settled message is still held")
        assert inbox_length(direct, "a") == 0


def test_cut_connection_neither_loses_nor_duplicates_messages(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with Proxy(HOST, server.port) as proxy, Post(server.url) as post:
        got = Record(lambda message: message.body)
        me = post.group(proxy.url).join("a")
        me.on("q")(got)
        group = post.group()
        for n in range(20):
            if n % 4 == 1:
                proxy.cut()
            assert result(group.member("a").ask("q", n)) == n
        assert got.bodies == list(range(20))
