"""Who leaves a peer group ends what it has begun, and is chosen for nothing new meanwhile.

Who is interrupted while it joins leaves nothing behind, and messages of a group that is deleted or
sent twice are neither lost nor doubled.
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
    on_key,
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
    """A handler of the member is at work; the message that it handles waits for its answer."""
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
    """It leaves, and waits for its handlers."""
    thread = threading.Thread(target=how or member.leave)
    thread.start()
    eventually(lambda: member._handle.announced, SOON_S, "the server was not told")
    try:
        yield
    finally:
        thread.join(SOON_S)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_handle, "LEAVE_S", LONG_S)


# Ending what was begun


@pytest.mark.parametrize("how", ["leave", "close", "group.close"])
def test_what_is_handled_is_answered_before_its_member_is_gone(post: Post, how: str) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    me = other.join("a")
    end = other.close if how == "group.close" else getattr(me, how)
    with busy(group, me) as (gate, future), leaving(me, end):
        assert (ids(group), future.done(), me.lost.is_set()) == (["a"], False, False)
        gate.open.set()
        assert result(future) == "done"
    assert me.lost.is_set()
    eventually(lambda: not any(member.alive for member in group.members))


def test_a_handler_that_closing_waits_for_may_send(post: Post) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    group.join("b").on("price")(lambda message: 12)
    me, entered, go_on = other.join("a"), threading.Event(), threading.Event()

    @me.on("order")
    def order(message: meteor.Message) -> int:
        entered.set()
        go_on.wait(SOON_S)
        return int(me.member("b").ask("price").result(SOON_S)) * 2

    future = group.member("a").ask("order", timeout=60)
    assert entered.wait(SOON_S)
    with leaving(me, other.close):
        go_on.set()
        assert result(future) == 24
    with pytest.raises(meteor.MeteorError, match="is closed; open another"):
        other.any.tell("price")


def test_a_member_whose_handler_hangs_leaves_at_last(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_handle, "LEAVE_S", 0.2)
    group, other = post.group(ttl=LONG_S), post.group()
    me = other.join("a")
    with busy(group, me) as (_, future):
        me.leave()
        assert isinstance(failure(future), meteor.MemberLeft)
        eventually(lambda: not group.members)


# Chosen for nothing new


def test_messages_for_anybody_or_all_are_not_for_one_who_leaves(post: Post) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    me = other.join("a")
    group.join("b").on("q")(lambda message: message.member)
    with busy(group, me) as (gate, _), leaving(me):
        assert {result(group.any.ask("q")) for _ in range(30)} == {"b"}
        assert result(group.all.ask("q")).values == {"b": "b"}
        gate.open.set()


def test_a_vote_does_not_wait_for_one_who_leaves(post: Post) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    me, you = other.join("a"), group.join("b")
    you.on_vote(lambda proposal: proposal.topic)
    begun = group.propose(False, kind=2, timeout=60)
    with busy(group, me) as (gate, _), leaving(me):
        assert result(begun).reason in ("rejected", "left")
        outcome = result(group.propose(True, kind="consensus", timeout=60))
        assert (outcome.passed, outcome.yes) == (True, ("b",))
        gate.open.set()


def test_another_leads_while_the_handlers_of_the_last_leader_take_their_time(post: Post) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    me = other.join("a")
    with busy(group, me) as (gate, _), leaving(me):
        eventually(lambda: group.leader is None)  # alone it is not elected again
        you = group.join("b")
        eventually(lambda: you.term is not None)
        you.resign()
        eventually(lambda: you.term is not None)  # and not the one who leaves
        assert not gate.messages
        gate.open.set()


def test_another_leads_when_what_leads_has_ended_though_handlers_have_not(post: Post) -> None:
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


def test_who_leaves_is_out_of_everything_but_keeps_what_it_has(peers: Peers) -> None:
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
    assert peers.leader == "a"  # it may lead again


def test_of_two_who_leave_one_after_the_other_the_last_keeps_what_was_for_anybody(
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


# Interrupted, refused, in vain


@pytest.mark.parametrize("place", ["join", "catch_up"])
@pytest.mark.parametrize("name", ["worker-7", None])
def test_who_is_interrupted_while_it_joins_is_no_member_and_keeps_its_messages(
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
            time.sleep(1)  # it comes in here
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


def test_what_the_server_refuses_does_not_keep_a_handle_from_closing(
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


def test_a_group_that_is_full_is_not_asked_all_the_time_by_who_cannot_come_back(
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


def test_a_group_that_is_gone_is_not_asked_for_all_the_time_by_who_looks_on(
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
    """Nobody calls scripts much more often than every third of the ttl."""
    time.sleep(2 * ttl)  # what it hastened to do is over
    before, began = scripts_run(server), time.monotonic()
    eventually(lambda: time.monotonic() - began > 4 * ttl)
    heartbeats = (time.monotonic() - began) / (ttl / 3) + 1
    assert scripts_run(server) - before < handles * 5 * heartbeats


def test_a_flag_may_be_set_by_a_signal_handler_at_any_time(post: Post) -> None:
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


# Once


def test_the_server_forgets_messages_that_are_over(post: Post) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    other.join("a").on("q")(lambda message: message.body)
    for verb in ("tell", "ask"):
        for number in range(50):
            result(getattr(group.member("a"), verb)("q", number))
    result(group.member("a").ask("q"))
    found: Any = group._handle.protocol.connector.redis.keys(
        group._handle.protocol.key("message:*")
    )
    assert len(found) <= 3  # the last ones, until more is sent
    args: list[Any] = [
        "m",
        group._handle.reply_session,
        "",
        "q",
        "tell",
        "member",
        "a",
        0,
        "0",
        128,
        9,
        1000,
    ]
    assert group._handle.protocol.run(PEERS_SEND, [*args, "json", "1", "", ""])[0] == b"OK"


def test_a_message_that_was_sent_twice_is_not_forgotten_before_its_time(
    server: Server, url: str
) -> None:
    with Proxy(HOST, server.port) as proxy, Post(url) as post:
        other = post.group(ttl=LONG_S)
        me = other.join("a")
        group = post.group(f"redis://{HOST}:{proxy.port}/0")
        result(group.member("a").tell("q", 0))
        proxy.cut_after_request(1, match=b"twice")
        message = result(group.member("a").tell("q", "twice"))
        result(group.member("a").tell("q", 1))  # tells what is over
        assert inbox_length(other, "a") == 3
        assert on_key(other, "EXISTS", f"message:{message}"), "the first try may arrive yet"
        me.leave()


def test_deleting_a_group_spares_what_is_sent_to_those_who_begin_it_anew(
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


def test_a_group_begun_anew_in_the_middle_of_a_delete_is_listed(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = post.group(ttl=LONG_S)
    client = group._handle.protocol.connector
    group.join("a")
    group.delete()
    run = client.run

    def late(*args: Any) -> Any:
        client.call("SREM", "meteor:groups", group.name)  # by who has found nothing to be there
        return run(*args)

    monkeypatch.setattr(client, "run", late)
    group._handle.protocol.open(group.config)
    assert peer_groups(group) == [group.name]


def test_a_group_begun_anew_brings_its_settings(post: Post) -> None:
    group, other = post.group(ttl=LONG_S, max_inbox=5), post.group()
    group.join("a")
    group.delete(force=True)
    anew = post.group(ttl=0.5, max_inbox=7)
    me = anew.join("b")
    other._handle.heartbeat.hurry()
    eventually(lambda: other.config == anew.config, SOON_S)
    mine = other.join("c")
    eventually(lambda: mine._handle.valid_until - time.monotonic() < 1, SOON_S)
    for _ in range(7):
        result(other.member("b").tell("q"))
    assert isinstance(failure(other.member("b").tell("q")), meteor.InboxFull)
    me.leave()


def test_for_anybody_goes_to_one_who_has_room(post: Post) -> None:
    group = post.group(ttl=LONG_S, max_inbox=5)
    for name in ("a", "b"):
        group.join(name)
    for _ in range(5):
        result(group.member("a").tell("q"))
    for _ in range(5):
        result(group.any.tell("q"))
    assert (inbox_length(group, "a"), inbox_length(group, "b")) == (5, 5)
    assert isinstance(failure(group.any.tell("q")), meteor.InboxFull)


def test_all_members_of_a_handle_leave_though_their_handlers_are_busy(
    open_group: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_handle, "_LEAVE_S", 0.3)  # for all of them together
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
