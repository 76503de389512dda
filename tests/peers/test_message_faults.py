"""Peer group messages under faults: none is stored or settled twice, and every future completes.

The faults are lost replies, cut connections, servers that hang, run out of memory, fail over or
lose state, and members that join and leave in the meantime.
"""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import pytest

from meteor_py.errors import (
    MessageExpired,
    OutOfMemory,
)
from meteor_py.peers.messaging.message import Message
from tests.conftest import ServerFactory
from tests.support.mailing import (
    SOON_S,
    VERBS,
    Gate,
    Post,
    Record,
    failure,
    inbox_length,
    result,
    say,
)
from tests.support.mailing import post as post
from tests.support.peering import LONG_S, Open
from tests.support.peering import open_group as open_group
from tests.support.proxied_stream import ReplicatedStream
from tests.support.proxy import Proxy
from tests.support.servers import HOST
from tests.support.waiting import eventually


@pytest.mark.parametrize("verb", VERBS)
def test_message_is_stored_once_if_the_reply_to_send_is_lost(
    private_server: ServerFactory, verb: str
) -> None:
    server = private_server()
    with Proxy(HOST, server.port) as proxy, Post(server.url) as post:
        got = Record(lambda message: message.body)
        post.group().join("a").on("q")(got)
        group = post.group(proxy.url)
        result(group.member("a").send("q", 0))
        for n in (1, 2, 3):
            proxy.cut_after_request(match=b"body-%d" % n)
            future = say(group, "member", verb, "q", f"body-{n}")
            assert future.exception(20) is None
        result(group.member("a").send("q", 9))
        assert got.bodies == [0, "body-1", "body-2", "body-3", 9]


def test_message_is_settled_once_if_the_reply_to_settle_is_lost(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with Proxy(HOST, server.port) as proxy, Post(server.url) as post:
        got = Record(lambda message: f"answer-{message.body}")
        post.group(proxy.url).join("a").on("q")(got)
        group = post.group()
        assert result(group.member("a").ask("q", 0)) == "answer-0"
        proxy.cut_after_request(match=b"answer-1")
        assert result(group.member("a").ask("q", 1)) == "answer-1"
        proxy.cut_before_request(match=b"answer-2")
        assert result(group.member("a").ask("q", 2)) == "answer-2"
        assert result(group.member("a").ask("q", 3)) == "answer-3"
        assert got.bodies == [0, 1, 2, 3]


def test_futures_complete_if_the_server_does_not_reply(private_server: ServerFactory) -> None:
    server = private_server()
    with Proxy(HOST, server.port) as proxy, Post(server.url) as post:
        post.group().join("a")
        group = post.group(proxy.url)
        stored = group.member("a").ask("q", timeout=0.5)
        proxy.stall()
        unstored = group.member("a").ask("q", timeout=0.2)
        for future in (stored, unstored):
            assert isinstance(failure(future), MessageExpired)
        proxy.resume()


@pytest.mark.parametrize("cut", [0.02, 0.1])
def test_messages_stay_in_order_and_get_replies_while_connections_are_cut(
    private_server: ServerFactory, rng: random.Random, cut: float
) -> None:
    server = private_server()
    with Proxy(HOST, server.port) as proxy, Post(proxy.url) as post:
        got = Record(lambda message: message.body)
        post.group().join("a").on("q")(got)
        group = post.group()
        proxy.chaos(rng, cut, ("lost_reply", "lost_request", "torn_reply"))
        futures = [group.member("a").ask("q", n, timeout=60) for n in range(100)]
        assert [future.result(60) for future in futures] == list(range(100))
        proxy.heal()
        firsts = list(dict.fromkeys(got.bodies))
        assert firsts == list(range(100))


def test_requests_get_replies_after_a_failover_that_lost_earlier_ones(
    replicated: ReplicatedStream,
) -> None:
    url = replicated.proxied.proxy.url
    with Post(url) as post:
        got = Record(lambda message: message.body)
        group, other = post.group(ttl=2), post.group()
        other.join("a").on("q")(got)
        assert result(group.member("a").ask("q", "before")) == "before"
        replicated.lag()
        # The primary executes this request; its replica never receives it.
        assert result(group.member("a").ask("q", "lost with the primary")) is not None
        replicated.fail_over()
        assert group.member("a").ask("q", "after", timeout=60).result(60) == "after"
        assert got.bodies[-1] == "after"


def test_full_server_refuses_messages_but_accepts_replies(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with Post(server.url) as post:
        group, gate = post.group(), Gate(lambda message: message.body)
        group.join("a").on("q")(gate)
        asked = group.member("a").ask("q", "before", timeout=60)
        gate.wait_until_entered()
        server.client().config_set("maxmemory", 1)
        for verb in VERBS:
            assert isinstance(failure(say(group, "member", verb, "q")), OutOfMemory)
        gate.open.set()
        assert result(asked) == "before"
        server.client().config_set("maxmemory", 0)
        assert result(group.member("a").ask("q", "after")) == "after"
        assert gate.bodies == ["before", "after"]


def test_every_request_completes_while_members_come_and_go(post: Post, rng: random.Random) -> None:
    group, others = post.group(), [post.group() for _ in range(3)]
    handled: list[str] = []

    def note(message: Message) -> str:
        handled.append(message.id)
        return message.id

    steady = group.join("steady")
    steady.on("q")(note)
    asked: list[Future[Any]] = []
    passing: list[Any] = []
    for _ in range(60):
        if len(passing) < 4:
            passing.append(rng.choice(others).join())
            passing[-1].on("q")(note)
        else:
            passing.pop(rng.randrange(4)).leave()
        asked += [group.any.ask("q", timeout=60) for _ in range(5)]
    answers = [result(future) for future in asked]
    assert len(set(answers)) == len(asked) == 300, "two futures got the same reply"
    assert set(answers) == set(handled)
    assert inbox_length(group, "steady") == 0


def test_messages_continue_after_the_server_has_lost_everything(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with Post(server.url) as post:
        group, other = post.group(ttl=0.5), post.group()
        gate = Gate(lambda message: message.body)
        other.join("a").on("q")(gate)
        lost = group.member("a").ask("q", "lost", timeout=1)
        gate.wait_until_entered()
        server.client().flushall()
        gate.open.set()
        assert isinstance(failure(lost), MessageExpired)

        def asked() -> bool:
            return group.member("a").ask("q", "found", timeout=5).exception() is None

        eventually(asked, 30, "the group did not recover")


def test_request_to_a_member_that_just_joined_gets_a_reply(post: Post) -> None:
    group, other = post.group(), post.group()
    answers: list[Any] = []

    @group.on_join
    def joined(member: Any) -> None:
        answers.append(group.member(member.id).ask("q", timeout=20).result())

    me = other.join("a")
    eventually(lambda: inbox_length(group, "a") == 1, message="the request was not stored")
    me.on("q")(lambda message: "here")
    eventually(lambda: answers == ["here"], message="no reply arrived")


@pytest.mark.parametrize("how", ["resync", "connection"])
def test_replies_are_read_from_the_start_after_a_reset(open_group: Open, how: str) -> None:
    group = open_group(ttl=LONG_S)
    group.join("a").on("q")(Record(lambda message: message.body))
    assert result(group.member("a").ask("q", 1)) == 1
    watcher = group._handle.event_reader
    watcher._reply_position = "9999999999999-0"  # as assigned by a former server with another clock

    def lost() -> bool:
        if how == "resync":
            group._handle.resync(reset=True)
            group.join().leave()  # wakes the event reader
        else:
            watcher._connection.interrupt()
        return watcher._reply_position != "9999999999999-0"

    eventually(lost, SOON_S)
    assert result(group.member("a").ask("q", 2, timeout=LONG_S)) == 2
