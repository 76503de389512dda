"""The result of each message to a peer group: a reply or an error."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from meteor_py.errors import (
    HandlerFailed,
    InboxFull,
    MemberLeft,
    MessageExpired,
    MessageFailed,
    MeteorError,
    PartialFailure,
)
from meteor_py.peers import member_handle
from meteor_py.peers.messaging import requests
from meteor_py.peers.messaging.message import Message
from tests.support.mailing import (
    SOON_S,
    Gate,
    Post,
    Record,
    abandon,
    failure,
    inbox_length,
    result,
    say,
)
from tests.support.mailing import post as post
from tests.support.peering import LONG_S, Open
from tests.support.peering import open_group as open_group
from tests.support.waiting import eventually

# Failures


def test_handler_exception_fails_the_message_with_its_text(post: Post) -> None:
    group = post.group()

    def broken(message: Message) -> None:
        raise LookupError("no such shelf")

    group.join("a").on("q")(broken)
    for verb in ("send", "ask"):
        error = failure(say(group, "member", verb, "q"))
        assert isinstance(error, HandlerFailed)
        assert error.member == "a"
        assert "LookupError: no such shelf" in str(error)


def test_return_value_that_cannot_be_sent_fails_ask_but_not_send(post: Post) -> None:
    group = post.group()
    group.join("a").on("q")(lambda message: object())
    assert "cannot be sent" in str(failure(group.member("a").ask("q")))
    assert result(group.member("a").send("q")) is None


@pytest.mark.parametrize("how", ["leave", "remove", "expire"])
def test_message_fails_when_its_member_leaves(
    post: Post, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(member_handle, "LEAVE_S", 0.2)
    group, other = post.group(ttl=0.5), post.group()
    me, gate = other.join(), Gate()
    me.on("q")(gate)
    future = group.member(me.id).send("q", timeout=60)
    gate.wait_until_entered()
    if how == "leave":
        me.leave()  # waits 0.2 s, then leaves while the handler is still running
    elif how == "remove":
        group.remove(me.id)
    else:
        abandon(other)
    error = failure(future)
    gate.open.set()
    assert isinstance(error, MemberLeft)
    assert error.member is not None


def test_message_to_all_reports_members_that_left_and_replies_from_others(post: Post) -> None:
    group, other = post.group(), post.group()
    gate = Gate()
    for name in ("a", "b"):
        group.join(name).on("q")(lambda message: message.body * 2)
    leaver = other.join("c")
    leaver.on("q")(gate)
    asked = group.all.ask("q", 4, timeout=60)
    sent = group.all.send("q", 4, timeout=60)
    gate.wait_until_entered()
    eventually(lambda: inbox_length(group, "c") == 2, message="the second message was not stored")
    group.remove("c")
    replies = result(asked)
    error = failure(sent)
    gate.open.set()
    assert replies.values == {"a": 8, "b": 8}
    assert isinstance(replies.failed["c"], MemberLeft)
    assert isinstance(error, PartialFailure)
    assert set(error.values) == {"a", "b"}
    assert list(error.failed) == ["c"]


def test_message_to_all_waits_for_all_replies_even_if_one_fails(post: Post) -> None:
    group = post.group()
    gate = Gate(lambda message: "late, but there")

    def broken(message: Message) -> None:
        raise ValueError("no")

    group.join("a").on("q")(broken)
    group.join("b").on("q")(gate)
    asked = group.all.ask("q", timeout=60)
    gate.wait_until_entered()
    eventually(lambda: inbox_length(group, "a") == 0)
    assert not asked.done()
    gate.open.set()
    replies = result(asked)
    assert replies.values == {"b": "late, but there"}
    assert isinstance(replies.failed["a"], HandlerFailed)


def test_message_to_any_member_moves_when_its_member_dies_and_completes_once(post: Post) -> None:
    group, first, second = post.group(ttl=0.5), post.group(), post.group()
    gate, got = Gate(lambda message: "too late"), Record(lambda message: message.deliveries)
    first.join("a").on("q")(gate)
    future = group.any.ask("q", timeout=60)
    gate.wait_until_entered()
    second.join("b").on("q")(got)
    abandon(first)
    assert result(future) == 2
    gate.open.set()
    (late,) = gate.wait_for(1)
    eventually(lambda: late.settled, message="the first handler did not finish")
    assert [message.id for message in got.messages] == [late.id]
    assert result(future) == 2


def test_message_to_any_member_fails_only_when_no_member_is_left(post: Post) -> None:
    group = post.group()
    gates = {name: Gate() for name in ("a", "b")}
    for name, gate in gates.items():
        group.join(name).on("q")(gate)
    future = group.any.send("q", timeout=60)
    eventually(lambda: any(gate.entered.is_set() for gate in gates.values()))
    first = next(name for name, gate in gates.items() if gate.entered.is_set())
    (other,) = set(gates) - {first}
    group.remove(first)
    gates[other].wait_until_entered()
    assert not future.done()
    group.remove(other)
    assert isinstance(failure(future), MemberLeft)
    for gate in gates.values():
        gate.open.set()


def test_message_to_all_is_refused_if_one_inbox_is_full(post: Post) -> None:
    group = post.group(max_inbox=2)
    group.join("full")
    group.join("empty")
    for n in range(2):
        result(group.member("full").tell("q", n))
    for future in (group.member("full").tell("q"), group.all.send("q")):
        error = failure(future)
        assert isinstance(error, InboxFull)
        assert (error.member, error.retriable) == ("full", True)
    assert inbox_length(group, "empty") == 0


def test_expired_messages_make_room_in_a_full_inbox(post: Post) -> None:
    group = post.group(max_inbox=2)
    group.join("a")
    assert isinstance(failure(group.member("a").ask("q", timeout=0.01)), MessageExpired)
    result(group.member("a").tell("q", "stays"))
    eventually(lambda: group.member("a").tell("q", "fits").exception() is None)
    assert isinstance(failure(group.member("a").tell("q")), InboxFull)


def test_invalid_arguments_raise_before_anything_is_sent(post: Post) -> None:
    group = post.group()
    group.join("a")
    target = group.member("a")
    for wrong, kind in (
        ({"queue": "a b"}, ValueError),
        ({"queue": "q", "priority": 0}, ValueError),
        ({"queue": "q", "priority": 257}, ValueError),
        ({"queue": "q", "timeout": 0}, ValueError),
        ({"queue": "q", "timeout": 1e6}, ValueError),
        ({"queue": "q", "body": object()}, TypeError),
        ({"queue": "q", "body": "x" * 2_000_000}, ValueError),
    ):
        with pytest.raises(kind):
            target.tell(**wrong)
    with pytest.raises(TypeError):
        group.member(7)  # type: ignore[arg-type]
    assert inbox_length(group, "a") == 0


# Futures


def test_messages_in_flight_complete_their_own_futures(post: Post) -> None:
    group, other = post.group(), post.group()
    other.join("a").on("q", workers=8)(lambda message: message.body)
    futures = {n: group.member("a").ask("q", n) for n in range(300)}
    assert {n: result(future) for n, future in futures.items()} == {n: n for n in futures}


def test_reply_to_a_later_request_can_arrive_first(post: Post) -> None:
    group = post.group()
    me, gate = group.join("a"), Gate(lambda message: "slow")
    me.on("slow")(gate)
    me.on("quick")(lambda message: "quick")
    slow = group.member("a").ask("slow")
    gate.wait_until_entered()
    assert result(group.member("a").ask("quick")) == "quick"
    assert not slow.done()
    gate.open.set()
    assert result(slow) == "slow"


def test_future_cannot_be_cancelled(post: Post) -> None:
    group = post.group()
    group.join("a")
    future = group.member("a").ask("q", timeout=0.1)
    assert not future.cancel()
    assert isinstance(failure(future), MessageExpired)


def test_sending_blocks_while_too_many_replies_are_pending(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "PENDING_MAX", 2)
    group, gate = post.group(), Gate(lambda message: message.body)
    group.join("a").on("q")(gate)
    first = [group.member("a").ask("q", n, timeout=60) for n in range(2)]
    assert isinstance(failure(group.member("a").ask("q", timeout=0.05)), MessageExpired)
    assert inbox_length(group, "a") == 2, "the third message was stored"
    gate.open.set()
    assert [result(future) for future in first] == [0, 1]
    assert result(group.member("a").ask("q", 3)) == 3


def test_closing_the_handle_fails_pending_messages(post: Post) -> None:
    group, other = post.group(), post.group()
    other.join("a")
    future = group.member("a").ask("q", timeout=3600)
    group.close()
    assert isinstance(failure(future), MessageFailed)
    with pytest.raises(MeteorError, match="closed"):
        group.member("a").tell("q")


def test_reply_whose_notification_was_lost_is_found_at_the_deadline(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, other = post.group(), post.group()
    monkeypatch.setattr(group._handle.requests, "reply_arrived", lambda message: None)
    other.join("a").on("q")(lambda message: "here")
    assert result(group.member("a").ask("q", timeout=0.5)) == "here"


def test_send_in_a_future_callback_fails_at_once_if_too_many_replies_are_pending(
    open_group: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = open_group(ttl=LONG_S)
    me, slow, quick = group.join("a"), Gate(), Gate()
    me.on("slow")(slow)
    me.on("quick")(quick)
    asked: list[Future[Any]] = []

    def ask_again(_: object) -> None:
        asked.append(group.member("a").ask("slow", timeout=LONG_S))

    first = group.member("a").ask("slow", timeout=LONG_S)
    second = group.member("a").ask("quick", timeout=LONG_S)
    second.add_done_callback(ask_again)
    monkeypatch.setattr(requests, "PENDING_MAX", 1)
    quick.open.set()
    eventually(lambda: asked, SOON_S)
    assert isinstance(failure(asked[0]), MessageExpired)
    assert not first.done()
    slow.open.set()
    result(first)
