"""Requests to a queue without a handler fail at once, unless the sender waits for one."""

from __future__ import annotations

import pytest

import meteor_py as meteor
from meteor_py.peers.group import PeerGroup
from meteor_py.peers.membership import Membership
from meteor_py.peers.messaging import declaration
from tests.support.mailing import Post, Record, failure, inbox_length, result, say
from tests.support.mailing import post as post
from tests.support.peer_scripts import inbox, send
from tests.support.peering import Peers, expel, on_key
from tests.support.peering import build as build
from tests.support.peering import peers as peers
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def _declare_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declaration, "_FIRST_S", 0.0)


def declared(group: PeerGroup, me: Membership) -> None:
    """Wait until the server knows a member's queues."""
    group._handle.heartbeat.hurry()
    session = f"{me._handle.session} ".encode()
    eventually(lambda: (on_key(group, "HGET", "handlers", me.id) or b"").startswith(session))


@pytest.mark.parametrize("verb", ["send", "ask"])
@pytest.mark.parametrize("to", ["member", "any", "all", "leader_proxy"])
def test_request_to_a_queue_without_a_handler_fails_at_once(post: Post, to: str, verb: str) -> None:
    group = post.group(ttl=60)
    me = group.join("a")
    me.on("known")(lambda message: message.body)
    declared(group, me)
    error = failure(say(group, to, verb, "unknown", timeout=3600))
    assert isinstance(error, meteor.NoHandler)
    assert (error.queue, error.group) == ("unknown", group.name)
    subject = {"member": "Member 'a'", "leader_proxy": "The leader"}.get(to, "No live member")
    assert str(error).startswith(f"{subject} of group {group.name!r}")
    assert inbox_length(group, "a") == 0
    outcome = result(say(group, to, "ask", "known", 7))
    assert (outcome.values["a"] if to == "all" else outcome) == 7


def test_sender_can_wait_for_a_handler(post: Post) -> None:
    group = post.group(ttl=60)
    me = group.join("a")
    me.on("known")(lambda message: None)
    declared(group, me)
    future = group.member("a").ask("later", 1, timeout=60, wait_for_handler=True)
    told = group.member("a").tell("later", 2)  # a tell waits by default
    result(told)
    assert isinstance(
        failure(group.member("a").tell("later", wait_for_handler=False)), meteor.NoHandler
    )
    assert not future.done()
    me.on("later")(lambda message: message.body)
    assert result(future) == 1
    assert result(group.member("a").ask("later", 3)) == 3  # on() returns after declaring the queue


def test_member_without_any_handler_can_still_register_one(post: Post) -> None:
    group = post.group(ttl=60)
    me = group.join("a")
    future = group.member("a").ask("q", 1, timeout=60)
    result(group.member("a").tell("other"))
    assert not future.done()
    me.on("q")(lambda message: message.body)
    assert result(future) == 1


def test_queues_are_not_declared_while_more_handlers_may_be_registered(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declaration, "_FIRST_S", 3600.0)
    group = post.group(ttl=0.5)
    me = group.join("a")
    me.on("first")(lambda message: message.body)
    before = me._handle.valid_until
    eventually(lambda: me._handle.valid_until > before + 0.3)
    declared = on_key(group, "HGET", "handlers", "a")
    # No queue is declared yet, because the program may register more handlers.
    assert declared == me._handle.session.encode()


def test_iterator_counts_as_a_handler(post: Post) -> None:
    group = post.group(ttl=60)
    me = group.join("a")
    messages = me.inbox("q", timeout=20)
    declared(group, me)
    future = group.member("a").ask("q", 1)
    next(messages).reply(2)
    assert result(future) == 2


def test_request_to_all_fails_only_for_members_without_a_handler(post: Post) -> None:
    group = post.group(ttl=60)
    with_it, without = group.join("with"), group.join("without")
    with_it.on("q")(lambda message: message.body)
    without.on("other")(lambda message: None)
    declared(group, with_it)
    declared(group, without)
    replies = result(group.all.ask("q", 1, timeout=3600))
    assert replies.values == {"with": 1}
    assert {member: type(error) for member, error in replies.failed.items()} == {
        "without": meteor.NoHandler
    }
    assert isinstance(failure(group.all.send("q", timeout=3600)), meteor.PartialFailure)
    result(group.all.tell("q", 2))
    assert inbox_length(group, "without") == 1  # a handler may be registered later


def test_messages_to_any_member_go_to_members_that_handle_the_queue(post: Post) -> None:
    group = post.group(ttl=60)
    got = Record()
    for number in range(4):
        me = group.join(f"m{number}")
        me.on("q" if number == 2 else "other")(got)
        declared(group, me)
    for number in range(20):
        result(group.any.send("q", number))
    assert {message.member for message in got.messages} == {"m2"}


def test_member_that_rejoined_declares_its_queues_again(post: Post) -> None:
    group, other = post.group(ttl=60), post.group()
    me = other.join("a")
    me.on("q")(lambda message: message.body)
    declared(other, me)
    session = me._handle.session
    expel(group, "a")
    # The server knows no queues for a dead member, so the request waits for the member.
    future = group.member("a").ask("q", 1, timeout=60)
    other._handle.heartbeat.hurry()
    eventually(lambda: me._handle.session != session)
    assert result(future) == 1
    declared(other, me)
    assert isinstance(failure(group.member("a").ask("x", timeout=3600)), meteor.NoHandler)


def test_declaration_from_an_earlier_session_does_not_count(peers: Peers) -> None:
    peers.join("a", named=True)
    assert peers.run("update_member", "a", "s-a", "handlers", "known ") == ["OK", 1]
    refused = send(peers, "m1", to="member", member="a", options="h", queue="q")
    assert refused == ["NOHANDLER"]
    assert send(peers, "m2", to="member", member="a", options="h", queue="known")[0] == "OK"
    assert send(peers, "m3", to="member", member="a", options="h", queue="now")[0] == "NOHANDLER"
    peers.join("a", "another", named=True, how="takeover")
    assert send(peers, "m4", to="member", member="a", options="h", queue="q")[0] == "OK"
    assert peers.run("update_member", "a", "s-a", "handlers", "known ") == ["FENCED"]
    assert inbox(peers, "a") == ["m2", "m4"]
