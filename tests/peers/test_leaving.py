"""A member that leaves a peer group finishes its current work, and gets no new work.

A process that is interrupted while it joins leaves nothing behind. Messages that are sent twice, or
while another client deletes the group, are neither lost nor duplicated.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.peers import group_handle, member_handle
from meteor_py.peers.group import PeerGroup
from meteor_py.peers.group_handle import GroupHandle
from meteor_py.peers.member_handle import MemberHandle
from meteor_py.peers.membership import Membership
from meteor_py.redis.scripts import PEERS_SEND
from tests.conftest import ServerFactory
from tests.support.mailing import SOON_S, Gate, Post, Record, failure, inbox_length, result
from tests.support.mailing import post as post
from tests.support.peering import (
    LONG_S,
    Open,
    Peers,
    expel,
    ids,
    peer_groups,
)
from tests.support.peering import build as build
from tests.support.peering import open_group as open_group
from tests.support.peering import peers as peers
from tests.support.proxy import Proxy
from tests.support.servers import HOST, Server
from tests.support.waiting import eventually


@contextmanager
def busy(group: PeerGroup, member: Membership) -> Iterator[tuple[Gate, Future[Any]]]:
    """Keep one of the member's handlers running; yield its gate and the future for its reply."""
    gate = Gate(lambda message: "done")
    member.on("work")(gate)
    future = group.member(member.id).ask("work", timeout=60)
    gate.wait_until_entered()
    try:
        yield gate, future
    finally:
        gate.open.set()


@contextmanager
def leaving(member: Membership, how: Callable[[], None] | None = None) -> Iterator[None]:
    """Make the member leave, in a thread that waits for its handlers."""
    thread = threading.Thread(target=how or member.leave)
    thread.start()
    eventually(lambda: member._handle.announced, SOON_S, "the departure was not announced")
    try:
        yield
    finally:
        thread.join(SOON_S)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_handle, "LEAVE_S", LONG_S)


# Finishing work


@pytest.mark.parametrize("how", ["leave", "close", "group.close"])
def test_running_handlers_reply_before_their_member_leaves(post: Post, how: str) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    me = other.join("a")
    end = other.close if how == "group.close" else getattr(me, how)
    with busy(group, me) as (gate, future), leaving(me, end):
        assert (ids(group), future.done(), me.lost.is_set()) == (["a"], False, False)
        gate.open.set()
        assert result(future) == "done"
    assert me.lost.is_set()
    eventually(lambda: not any(member.alive for member in group.members))


def test_running_handler_can_send_while_its_handle_closes(post: Post) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    group.join("b").on("price")(lambda message: 12)
    me, entered, released = other.join("a"), threading.Event(), threading.Event()

    @me.on("order")
    def order(message: meteor.Message) -> int:
        entered.set()
        released.wait(SOON_S)
        return int(me.member("b").ask("price").result(SOON_S)) * 2

    future = group.member("a").ask("order", timeout=60)
    assert entered.wait(SOON_S)
    with leaving(me, other.close):
        released.set()
        assert result(future) == 24
    with pytest.raises(meteor.MeteorError, match=r"is closed\. Open another"):
        other.any.tell("price")


@pytest.mark.parametrize("how", ["client", "exit"])
def test_groups_that_close_together_finish_their_handlers_at_the_same_time(
    post: Post, how: str
) -> None:
    client, names = post.client(), ("one", "two")
    groups = [client.peer_group(name) for name in names]
    begun: list[meteor.Message] = []

    def handle(message: meteor.Message) -> str:
        begun.append(message)
        eventually(lambda: all(group.closed for group in groups), 60)
        return "done"

    for group in groups:
        group.join("a").on("work")(handle)
    sender = post.client()
    asked = [sender.peer_group(name).member("a").ask("work", timeout=60) for name in names]
    eventually(lambda: len(begun) == 2)
    if how == "client":
        client.close()
    else:
        group_handle._at_exit([group._handle for group in groups])
    assert [result(future) for future in asked] == ["done", "done"]


def test_member_whose_handler_hangs_leaves_after_the_timeout(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_handle, "LEAVE_S", 0.2)
    group, other = post.group(ttl=LONG_S), post.group()
    me = other.join("a")
    with busy(group, me) as (_, future):
        me.leave()
        assert isinstance(failure(future), meteor.MemberLeft)
        eventually(lambda: not group.members)


# No new work


def test_leaving_member_gets_no_messages_to_any_or_all_members(post: Post) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    me = other.join("a")
    group.join("b").on("q")(lambda message: message.member)
    with busy(group, me) as (gate, _), leaving(me):
        assert {result(group.any.ask("q")) for _ in range(30)} == {"b"}
        assert result(group.all.ask("q")).values == {"b": "b"}
        gate.open.set()


def test_vote_does_not_wait_for_a_leaving_member(post: Post) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    me, you = other.join("a"), group.join("b")
    you.on_vote(lambda proposal: proposal.topic)
    begun = group.propose(False, kind=2, timeout=60)
    with busy(group, me) as (gate, _), leaving(me):
        assert result(begun).reason in ("rejected", "left")
        outcome = result(group.propose(True, kind="consensus", timeout=60))
        assert (outcome.passed, outcome.yes) == (True, ("b",))
        gate.open.set()


def test_another_member_leads_while_a_leaving_leaders_handlers_run(post: Post) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    me = other.join("a")
    with busy(group, me) as (gate, _), leaving(me):
        eventually(lambda: group.leader is None)  # a leaving member is not elected again
        you = group.join("b")
        eventually(lambda: you.term is not None)
        you.resign()
        eventually(lambda: you.term is not None)  # b is re-elected, because a is leaving
        assert not gate.messages
        gate.open.set()


def test_leaving_leader_hands_over_after_its_leader_task_but_before_its_handlers_end(
    post: Post,
) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    me, you = other.join("a"), group.join("b")
    stop, at_work = threading.Event(), threading.Event()

    @me.as_leader
    def lead(term: meteor.Term) -> None:
        at_work.set()
        stop.wait(SOON_S)

    assert at_work.wait(SOON_S)
    with busy(group, me) as (gate, _), leaving(me):
        assert (group.leader is not None and group.leader.id, you.term) == ("a", None)
        stop.set()
        eventually(lambda: you.term is not None)
        assert not gate.messages
        gate.open.set()


def test_leaving_member_is_not_elected_until_it_has_rejoined(peers: Peers) -> None:
    for member in ("a", "b"):
        peers.join(member, named=True)
    assert peers.run("update_member", "a", "s-a", "leave", "") == ["OK", 1]
    assert peers.run("update_member", "a", "s-a", "leave", "") == ["OK", 1]
    assert (peers.leader, peers.members()) == ("a", {"a", "b"})
    peers.resign("a")
    assert peers.leader == "b"
    assert peers.resign("b") == ["OK", 1]
    assert peers.leader == "b"
    peers.leave("a", how="stay")
    peers.join("a", "again", named=True)
    peers.resign("b")
    assert peers.leader == "a"  # a rejoined member may lead again


def test_last_of_two_leaving_members_keeps_messages_to_any_member(
    post: Post,
) -> None:
    group, one, two = post.group(ttl=LONG_S), post.group(), post.group()
    first, last = one.join(), two.join("last")
    with busy(group, last) as (gate, _), leaving(last, last.close):
        result(group.any.tell("jobs", 1))
        first.leave()
        gate.open.set()
    got = Record()
    post.group().join().on("jobs")(got)
    got.wait_for(1)
    assert group.dead_letters() == []


# Interruptions and refusals


@pytest.mark.parametrize("place", ["join", "catch_up"])
@pytest.mark.parametrize("name", ["worker-7", None])
def test_interrupted_join_leaves_no_member_and_keeps_its_messages(
    post: Post, monkeypatch: pytest.MonkeyPatch, place: str, name: str | None
) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    if name:
        other.join(name).close()
        for number in range(3):
            result(group.member(name).tell("jobs", number))
    owner = MemberHandle if place == "join" else GroupHandle
    original = getattr(owner, place)

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        found = original(self, *args, **options)
        if threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # the signal arrives here
        return found

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            other.join(name)
    eventually(lambda: not any(member.alive for member in group.members))
    assert other._handle.local_members() == []
    if name:
        got = Record()
        other.join(name).on("jobs")(got)
        got.wait_for(3)
        assert got.bodies == [0, 1, 2]


def test_handle_closes_even_if_the_server_refuses_commands(
    private_server: ServerFactory,
) -> None:
    running = private_server()
    client, groups = meteor.connect(running.url), []
    for name in ("one", "two"):
        groups.append(client.peer_group(name))
        groups[-1].join()
    with running.client() as plain:
        plain.acl_setuser("default", enabled=True, commands=["-evalsha", "-eval"])
        client.close()
        plain.acl_setuser("default", enabled=True, commands=["+evalsha", "+eval"])
    for group in groups:
        assert group._handle.local_members() == []
        assert not [one for one in threading.enumerate() if group.name in one.name.split("-")]


def scripts_run(server: Server) -> int:
    with server.client() as plain:
        stats: Any = plain.info("commandstats")
    return int(stats["cmdstat_evalsha"]["calls"])


def test_member_that_cannot_rejoin_a_full_group_does_not_busy_loop(
    private_server: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = private_server()
    ttl = 0.3
    with Post(running.url) as post:
        one, two = post.group(ttl=ttl), post.group()
        me = one.join()
        two.join()
        monkeypatch.setattr(member_handle, "MEMBERS_MAX", 1)
        expel(two, me.id)
        eventually(lambda: me._handle.recovering)
        check_calm(running, ttl, handles=2)


def test_observer_of_a_deleted_group_does_not_busy_loop(
    private_server: ServerFactory,
) -> None:
    running = private_server()
    ttl = 0.3
    with Post(running.url) as post:
        post.group(ttl=ttl)
        other = post.group()
        other.join()
        other.delete()
        check_calm(running, ttl, handles=1)


def check_calm(server: Server, ttl: float, handles: int) -> None:
    """Check that no handle runs scripts much more often than every third of the ttl."""
    time.sleep(2 * ttl)  # wait out the extra heartbeats that the test has caused
    before, began = scripts_run(server), time.monotonic()
    eventually(lambda: time.monotonic() - began > 4 * ttl)
    heartbeats = (time.monotonic() - began) / (ttl / 3) + 1
    assert scripts_run(server) - before < handles * 5 * heartbeats


def test_signal_handler_can_set_the_lost_event_at_any_time(post: Post) -> None:
    me = post.group(ttl=LONG_S).join()
    eventually(lambda: me.term is not None)
    term = me.term
    assert term is not None
    calls = 0

    def handler(*_: object) -> None:
        nonlocal calls
        calls += 1
        term.lost.set()

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        deadline = time.monotonic() + SOON_S
        while calls < 300 and time.monotonic() < deadline:
            term.lost.wait(0.0002)
            term.lost._is_set = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert calls >= 300


# Exactly once


def test_server_deletes_finished_messages(post: Post) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    other.join("a").on("q")(lambda message: message.body)
    for verb in ("tell", "ask"):
        for number in range(50):
            result(getattr(group.member("a"), verb)("q", number))
    result(group.member("a").ask("q"))
    found: Any = group._handle.protocol.connector.redis.keys(
        group._handle.protocol.key("message:*")
    )
    assert len(found) <= 3  # the next send deletes these


def test_repeated_send_of_a_finished_message_stores_nothing(server: Server, url: str) -> None:
    with Proxy(HOST, server.port) as proxy, Post(url) as post:
        other = post.group(ttl=LONG_S)
        me = other.join("a")
        group = post.group(f"redis://{HOST}:{proxy.port}/0")
        result(group.member("a").tell("q", 0))
        proxy.cut_after_request(1, match=b"twice")
        result(group.member("a").tell("q", "twice"))
        result(group.member("a").tell("q", 1))  # this send also reports finished messages
        assert inbox_length(other, "a") == 3
        # A delayed first copy of an earlier send may reach the server only now.
        session = group._handle.reply_session
        args = ["late", "", "", "q", "tell", "member", "a", 0, "", 128, 1000, "", b""]
        protocol = group._handle.protocol
        assert protocol.run(PEERS_SEND, [session, session, 1, "", "", *args]) == [b"OLD"]
        assert inbox_length(other, "a") == 3
        me.leave()


def test_deleting_a_group_spares_messages_sent_after_it_is_recreated(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, other = post.group(ttl=0.5), post.group()
    me = group.join("a")
    result(other.member("a").tell("q", "old"))
    call = other._handle.protocol.connector.call

    def late(*command: Any) -> Any:
        if command[0] == "UNLINK":
            eventually(lambda: inbox_length(group, "a") == 1, SOON_S)
        return call(*command)

    def tell() -> None:
        view = group._handle.view
        eventually(lambda: view.incarnation != incarnation and group.find("a"), SOON_S)
        result(group.member("a").tell("q", "new"))

    incarnation = group._handle.view.incarnation
    teller = threading.Thread(target=tell)
    teller.start()
    with monkeypatch.context() as patch:
        patch.setattr(other._handle.protocol.connector, "call", late)
        other.delete(force=True)
    teller.join(SOON_S)
    got = Record()
    me.on("q")(got)
    got.wait_for(1)
    assert got.bodies == ["new"]


def test_new_group_is_listed_despite_a_late_removal_of_its_name(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = post.group(ttl=LONG_S)
    client = group._handle.protocol.connector
    group.join("a")
    group.delete()
    run = client.run

    def late(*args: Any) -> Any:
        # Simulates a late command from a client that had found no such group.
        client.call("SREM", "meteor:groups", group.name)
        return run(*args)

    monkeypatch.setattr(client, "run", late)
    group._handle.protocol.open(group.config)
    assert peer_groups(group) == [group.name]


def test_recreated_group_has_its_creators_settings(post: Post) -> None:
    group, other = post.group(ttl=LONG_S, max_inbox=5), post.group()
    group.join("a")
    group.delete(force=True)
    recreated = post.group(ttl=0.5, max_inbox=7)
    me = recreated.join("b")
    other._handle.heartbeat.hurry()
    eventually(lambda: other.config == recreated.config, SOON_S)
    mine = other.join("c")
    eventually(lambda: mine._handle.valid_until - time.monotonic() < 1, SOON_S)
    for _ in range(7):
        result(other.member("b").tell("q"))
    assert isinstance(failure(other.member("b").tell("q")), meteor.InboxFull)
    me.leave()


def test_message_to_any_member_goes_to_a_member_with_room(post: Post) -> None:
    group = post.group(ttl=LONG_S, max_inbox=5)
    for name in ("a", "b"):
        group.join(name)
    for _ in range(5):
        result(group.member("a").tell("q"))
    for _ in range(5):
        result(group.any.tell("q"))
    assert (inbox_length(group, "a"), inbox_length(group, "b")) == (5, 5)
    assert isinstance(failure(group.any.tell("q")), meteor.InboxFull)


def test_all_members_on_a_handle_leave_even_if_handlers_are_busy(
    open_group: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_handle, "_LEAVE_S", 0.3)  # one timeout for all members together
    one, two = open_group(ttl=LONG_S), open_group()
    gates = [Gate() for _ in range(3)]
    for gate in gates:
        me = one.join()
        me.on("q")(gate)
        two.member(me.id).tell("q").result(SOON_S)
        gate.wait_until_entered()
    one.close()
    eventually(lambda: not two.members, SOON_S)
    assert not any(gate.messages for gate in gates)
    for gate in gates:
        gate.open.set()


# Closing while a slow callback runs


def close_beside_a_callback(url: str, callback_s: float) -> tuple[float, bool]:
    """Close a group while a callback runs.

    Returns:
        The seconds that closing took, and whether the callback had ended by then.
    """
    begun, let_go, ended = threading.Event(), threading.Event(), threading.Event()
    with meteor.connect(url) as client:
        group = client.peer_group("callbacks", election=None)

        @group.on_join
        def _(member: meteor.Member) -> None:
            begun.set()
            let_go.wait(callback_s)
            ended.set()

        group.join("m")
        assert begun.wait(20)
        start = time.monotonic()
        group.close()
        took_s, in_time = time.monotonic() - start, ended.is_set()
        let_go.set()
        assert ended.wait(20)
    return took_s, in_time


def test_close_waits_for_a_callback_that_ends_in_time(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_handle, "_LAST_S", 0.01)
    took_s, in_time = close_beside_a_callback(url, callback_s=1.0)
    assert in_time
    assert took_s < 4


def test_close_does_not_wait_forever_for_a_callback(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group_handle, "_JOIN_S", 0.8)
    monkeypatch.setattr(group_handle, "_LAST_S", 0.01)
    took_s, in_time = close_beside_a_callback(url, callback_s=30.0)
    assert not in_time
    assert 0.7 < took_s < 5
    assert "A thread for group 'callbacks' did not end in time" in caplog.text
