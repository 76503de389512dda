"""Messages that wait in one process share calls to the server.

Each message is still stored and settled once, in order.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.peers.messaging import requests as requests_module
from tests.conftest import ServerFactory
from tests.support.mailing import SOON_S, Gate, Post, Record, failure, inbox_length, result
from tests.support.mailing import post as post
from tests.support.peer_scripts import commands, entries, inbox, leftovers, send
from tests.support.peering import LONG_S, Build, Peers, expel, on_key
from tests.support.peering import build as build
from tests.support.peering import peers as peers
from tests.support.proxy import Proxy
from tests.support.servers import HOST
from tests.support.waiting import eventually

MIB = "x" * 1_048_576


def batch(peers: Peers, number: int, *messages: str, handle: str = "handle", **how: Any) -> Any:
    """Send several messages in one call, by default to member ``a``."""
    args: list[Any] = []
    for message in messages:
        args += [message, "", "", "q", how.get("verb", "tell"), how.get("to", "member")]
        args += [how.get("member", "a"), 0, "", 128, 60_000, "json", how.get("body", "1")]
    return peers.run("send", handle, handle, number, "", "", *args)


# The scripts


def test_repeated_call_returns_the_same_results_and_stores_nothing(peers: Peers) -> None:
    peers.join("a")
    first = batch(peers, 1, "m1", "m2")
    assert first == ["OK", "OK\na", "OK\na"]
    before = peers.everything()
    assert batch(peers, 1, "m1", "m2") == first
    assert peers.everything() == before
    assert batch(peers, 2, "m3") == ["OK", "OK\na"]
    assert batch(peers, 1, "m1", "m2") == ["OLD"]
    assert inbox(peers, "a") == ["m1", "m2", "m3"]


def test_call_handles_only_part_of_a_large_batch_and_reports_how_much(build: Build) -> None:
    peers = build(max_inbox=100_000)
    for number in range(3):
        peers.join(f"m{number}")
    names = [f"n{number}" for number in range(100)]
    # A call ends after 500 deliveries, or after 1 MiB of message bodies.
    assert len(batch(peers, 1, *names, to="all")) == 1 + 100  # 300 deliveries
    assert len(batch(peers, 2, *names[:4], to="any", body=MIB[: 600 * 1024])) == 1 + 2
    assert len(batch(peers, 3, *names[2:4], to="any", body=MIB)) == 1 + 1


def test_each_message_in_a_call_has_its_own_result(build: Build) -> None:
    peers = build(max_inbox=2)
    peers.join("a")
    found = batch(peers, 1, "m1", "m2", "m3")
    assert found == ["OK", "OK\na", "OK\na", "FULL\na"]
    assert batch(peers, 2, "m4", member="b") == ["OK", "NOMEMBER"]


def test_send_after_a_clock_step_asks_for_a_heartbeat_first(peers: Peers) -> None:
    peers.join("a")
    peers.pass_ms(3_600_000)
    assert batch(peers, 1, "m1", to="any") == ["IDLE"]
    peers.heartbeat("a")
    assert batch(peers, 1, "m1", to="any") == ["OK", "OK\na"]


# A body shared by many receivers


def test_long_broadcast_is_stored_once_and_deleted_after_its_last_reader(peers: Peers) -> None:
    for member in "abc":
        peers.join(member, named=True)
    body = "x" * 5_000
    assert send(peers, "m", to="all", body=body) == ["OK", "a", "b", "c"]
    assert {fields[b"body"] for m in "abc" for fields in entries(peers, f"inbox:{m}")} == {b""}
    key = peers.prefix + "body:m"
    assert peers.client._connector.call("HGET", key, "body") == body.encode()
    (place, _), *_ = peers.client._connector.call("XRANGE", peers.prefix + "inbox:a", "-", "+")
    assert peers.run("settle", "a", "s-a", "settle", place, "m", "ok", "", "") == ["OK", 1]
    peers.run("leave", "b", "", "")  # the member is removed with its messages
    assert peers.client._connector.call("HGET", key, "holders") == b"1"
    (place, _), *_ = peers.client._connector.call("XRANGE", peers.prefix + "inbox:c", "-", "+")
    reply = peers.run("settle", "c", "s-c", "settle", place, "m", "unknown", "", "why")
    assert reply == ["OK", 1]
    (letter,) = entries(peers, "dead")
    assert letter[b"body"] == body.encode()
    assert not [part for part in leftovers(peers) if part.startswith(("body", "shared"))]


@pytest.mark.parametrize("how", ["deleted", "recreated"])
def test_shared_bodies_are_deleted_with_their_group(post: Post, how: str) -> None:
    group = post.group(ttl=LONG_S)
    for number in range(3):
        group.join(f"m{number}")
    result(group.all.tell("q", MIB[:10_000]))
    key = group._handle.protocol.key("*")
    assert group._handle.protocol.connector.redis.keys(key.replace("*", "body:*"))
    if how == "deleted":
        group.delete(force=True)
        assert group._handle.protocol.connector.redis.keys(key) == []
    else:
        on_key(group, "DEL", "state")
        eventually(lambda: on_key(group, "EXISTS", "state"), SOON_S)
        left = group._handle.protocol.connector.redis.keys(key.replace("*", "body:*"))
        assert left == []


def test_long_broadcast_arrives_whole_at_every_member(post: Post) -> None:
    group = post.group(ttl=LONG_S)
    got = Record(lambda message: len(message.body))
    for number in range(5):
        group.join(f"m{number}").on("q")(got)
    replies = result(group.all.ask("q", MIB[:500_000], timeout=60))
    assert replies.values == {f"m{number}": 500_000 for number in range(5)}
    eventually(lambda: not group._handle.protocol.connector.redis.keys("*:body:*"))


# Handing over


def test_messages_move_in_portions_limited_by_size(url: str) -> None:
    with meteor.connect(url) as client:
        peers = Peers(client)
        peers.join("a")
        for number in range(6):
            send(peers, f"m{number}", body=MIB[: 200 * 1024])
        peers.join("b")
        moved = []
        peers.leave("a")
        while len(inbox(peers, "b")) < 6:
            moved.append(len(inbox(peers, "b")))
            before = commands(peers, "xrange")
            peers.run("heartbeat", "")
            assert commands(peers, "xrange") - before <= 2
        assert moved == [2, 4]
        assert inbox(peers, "b") == [f"m{number}" for number in range(6)]


# Processes


def count_scripts(group: Any) -> int:
    stats: Any = group._handle.protocol.connector.redis.info("commandstats")
    return int(stats["cmdstat_evalsha"]["calls"])


def test_waiting_messages_share_calls(post: Post) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    gate, got = Gate(), Record()
    me = other.join("a")
    me.on("gate")(gate)
    me.on("q")(got)
    result(group.member("a").tell("gate"))
    gate.wait_until_entered()
    before = count_scripts(group)
    futures = [group.member("a").tell("q", n) for n in range(1_000)]
    for future in futures:
        result(future)
    got.wait_for(1_000)
    eventually(lambda: inbox_length(group, "a") == 1)
    gate.open.set()
    assert got.bodies == list(range(1_000))
    assert count_scripts(group) - before < 1_000, "each message took a separate call"


def test_messages_stay_in_order_across_lost_replies_and_partial_calls(
    private_server: ServerFactory, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests_module, "_BATCH_BYTES", 4 * 1_048_576)
    server = private_server()
    with Proxy(HOST, server.port) as proxy, Post(server.url) as post:
        other, group = post.group(ttl=LONG_S), post.group(proxy.url)
        got = Record()
        other.join("a").on("q")(got)
        proxy.chaos(rng, 0.1, ("lost_reply", "lost_request", "torn_reply"))
        sizes = [rng.choice((1, 1, 1, 400_000)) for _ in range(200)]
        futures = [
            group.member("a").tell("q", [n, MIB[:size]], timeout=60) for n, size in enumerate(sizes)
        ]
        for future in futures:
            future.result(60)
        proxy.heal()
        got.wait_for(200)
        assert [body[0] for body in got.bodies] == list(range(200))
        assert [len(body[1]) for body in got.bodies] == sizes


def test_messages_from_an_expelled_sender_stay_in_order(post: Post) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    got = Record()
    other.join("a").on("q")(got)
    me = group.join("sender")
    futures = []
    for number in range(200):
        futures.append(me.member("a").tell("q", number, timeout=60))
        if number in (50, 120):
            expel(other, "sender")
    for future in futures:
        result(future)
    got.wait_for(200)
    assert got.bodies == list(range(200))


def test_message_sent_with_tell_before_leaving_is_stored(post: Post) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    other.join("a")
    for number in range(20):
        with group.join() as me:
            future = me.member("a").tell("q", number)
        assert future.done()
        result(future)
    group.member("a").tell("q", "last")
    group.close()
    assert inbox_length(other, "a") == 21


def test_blocking_future_callback_does_not_delay_other_messages(post: Post) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    other.join("a").on("q")(lambda message: message.body)
    entered, leave = threading.Event(), threading.Event()

    def block(_: object) -> None:
        entered.set()
        leave.wait(SOON_S)

    asked = group.member("a").ask("q", 1)
    asked.add_done_callback(block)
    assert entered.wait(SOON_S) or asked.done()
    try:
        assert result(group.member("a").ask("q", 2)) == 2
        result(group.member("a").tell("q", 3))
        eventually(lambda: group.find("a") is not None)
    finally:
        leave.set()


def test_settlements_are_retried_while_the_server_is_unreachable(
    private_server: ServerFactory,
) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    with Post(server.url) as post:
        group, other = post.group(ttl=2), post.group()
        gate = Gate()
        other.join("a").on("q")(gate)
        for number in range(20):
            result(group.member("a").tell("q", number))
        gate.wait_until_entered()
        server.kill()
        gate.open.set()
        eventually(lambda: len(gate.messages) >= 2, SOON_S)  # handlers do not wait for the server
        server.restart()
        eventually(lambda: inbox_length(post.group(), "a") == 0, 60)
        assert list(dict.fromkeys(gate.bodies)) == list(range(20))


def test_messages_beyond_the_limit_on_unsent_bytes_are_all_stored(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests_module, "_UNSENT_BYTES_MAX", 100_000)
    group = post.group(ttl=LONG_S)
    group.join("a")
    futures = [group.member("a").tell("q", MIB[:60_000], timeout=60) for _ in range(50)]
    for future in futures:
        result(future)
    assert group._handle.requests._unsent_bytes == 0
    assert inbox_length(group, "a") == 50


def test_message_that_cannot_be_stored_in_time_expires(post: Post) -> None:
    group = post.group(ttl=LONG_S)
    me = group.join("a")
    group._handle.heartbeat.stop()
    group._handle.heartbeat.join()
    expel(group, "a")  # without heartbeats, the member cannot rejoin
    error = failure(me.member("a").tell("q", timeout=0.3))
    assert isinstance(error, meteor.MessageExpired)
    assert error.timeout == 0.3
