"""Member inboxes: order, backlogs, settling, handlers that misbehave, and their threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from meteor_py.errors import (
    HandlerFailed,
    MembershipLost,
    MessageExpired,
)
from meteor_py.peers.messaging import inbox as inbox_module
from meteor_py.peers.messaging.inbox import Inbox, QueueState
from meteor_py.peers.messaging.message import Message
from meteor_py.redis import keys
from meteor_py.runtime.clock import now
from tests.support.mailing import Gate, Post, Record, failure, inbox_length, result
from tests.support.mailing import post as post
from tests.support.peering import LONG_S, Open
from tests.support.peering import open_group as open_group
from tests.support.servers import plain_client
from tests.support.waiting import eventually


def threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("meteor-inbox", "meteor-handler"))]


# Order and priority


def test_messages_from_one_sender_arrive_in_order(post: Post) -> None:
    group, other = post.group(), post.group()
    got = Record()
    other.join("a").on("q")(got)
    for n in range(500):
        group.member("a").tell("q", n)
    got.wait_for(500)
    assert got.bodies == list(range(500))


def test_waiting_messages_are_ordered_by_priority_then_age(any_url: str) -> None:
    with Post(any_url) as post:
        group = post.group()
        me, gate = group.join("a"), Gate()
        me.on("q")(gate)
        group.member("a").tell("q", "in hand")
        gate.wait_until_entered()
        for body, priority in (("d", 256), ("b", 128), ("c", 128), ("a", 1)):
            result(group.member("a").tell("q", body, priority=priority))
        inbox = me._handle.inbox()
        eventually(lambda: len(inbox._queues["q"].held) == 5, message="not all messages were read")
        gate.open.set()
        gate.wait_for(5)
        assert gate.bodies == ["in hand", "a", "b", "c", "d"]


def test_handlers_with_a_priority_share_a_thread_that_runs_urgent_ones_first(post: Post) -> None:
    group = post.group()
    me, gate, order = group.join("a"), Gate(), Record(lambda message: threading.get_ident())
    me.on("gate", priority=256)(gate)
    me.on("urgent", priority=1)(order)
    me.on("idle", priority=200)(order)
    group.member("a").tell("gate")
    gate.wait_until_entered()
    asked = [group.member("a").ask(queue) for queue in ("idle", "urgent", "idle", "urgent")]
    inbox = me._handle.inbox()
    eventually(lambda: sum(len(state.held) for state in inbox._queues.values()) == 5)
    gate.open.set()
    assert len({result(future) for future in asked}) == 1, "the queues do not share a thread"
    assert [message.queue for message in order.messages] == ["urgent", "urgent", "idle", "idle"]


def test_several_workers_handle_messages_in_parallel(post: Post) -> None:
    group = post.group()
    meeting = threading.Barrier(4)
    group.join("a").on("q", workers=4)(lambda message: meeting.wait(20) >= 0)
    futures = [group.member("a").ask("q") for _ in range(4)]
    assert all(result(future) for future in futures)


# Backlogs


def test_queue_without_a_handler_keeps_its_messages_without_delaying_others(post: Post) -> None:
    group = post.group()
    me = group.join("a")
    me.on("busy")(lambda message: message.body)
    for n in range(250):
        result(group.member("a").tell("later", n))
    assert result(group.member("a").ask("busy", "here")) == "here"
    assert inbox_length(group, "a") == 250
    got = Record()
    me.on("later")(got)
    got.wait_for(250)
    assert got.bodies == list(range(250))


def test_message_without_a_handler_does_not_fail_before_its_timeout(post: Post) -> None:
    group = post.group()
    me = group.join("a")
    me.on("other")(lambda message: None)
    future = group.member("a").ask("q", timeout=60)
    result(group.member("a").send("other"))
    assert not future.done()
    me.on("q")(lambda message: "in the end")
    assert result(future) == "in the end"


def test_backlog_beyond_the_limit_on_held_messages_arrives_complete_and_in_order(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_module, "HELD_MAX", 10)
    monkeypatch.setattr(inbox_module, "_COUNT", 7)
    group = post.group()
    me, most = group.join("a"), 0

    def note(message: Message) -> None:
        nonlocal most
        most = max(most, *(len(state.held) for state in me._handle.inbox()._queues.values()))

    slow, quick = Record(note), Record(note)
    me.on("slow")(slow)
    me.on("quick")(quick)
    for n in range(100):
        group.member("a").tell("slow", n)
        group.member("a").tell("quick", n)
    slow.wait_for(100)
    quick.wait_for(100)
    assert slow.bodies == quick.bodies == list(range(100))
    assert most <= 10


def test_backlog_beyond_the_limit_on_held_bytes_arrives_complete_and_in_order(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_module, "HELD_BYTES_MAX", 10_000)
    group = post.group()
    me, gate = group.join("a"), Gate()
    me.on("q")(gate)
    for n in range(50):
        result(group.member("a").tell("q", f"{n:1000}"))
    gate.wait_until_entered()
    state = me._handle.inbox()._queues["q"]
    eventually(lambda: not state.live, message="the inbox keeps reading although it is full")
    assert 5 < len(state.held) <= 11
    assert state.bytes < 12_000
    gate.open.set()
    gate.wait_for(50)
    assert [int(body) for body in gate.bodies] == list(range(50))
    eventually(lambda: (len(state.held), state.bytes) == (0, 0))


def test_unsettled_messages_delay_only_their_own_queue(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_module, "HELD_MAX", 4)
    group = post.group()
    me, kept = group.join("a"), Record()
    me.on("kept", ack="manual")(kept)
    me.on("other")(lambda message: message.body)
    for n in range(10):
        result(group.member("a").tell("kept", n))
    kept.wait_for(4)
    assert result(group.member("a").ask("other", 1)) == 1
    assert kept.bodies == [0, 1, 2, 3]
    eventually(lambda: [message.ack() for message in kept.messages] and len(kept.messages) == 10)
    assert kept.bodies == list(range(10))


# Settling


def test_manual_handlers_settle_in_any_order_and_in_any_way(post: Post) -> None:
    group = post.group()
    me, got = group.join("a"), Record()
    me.on("q", ack="manual")(got)
    asked = [group.member("a").ask("q", n, timeout=60) for n in range(3)]
    sent = group.member("a").send("q", 3, timeout=60)
    first, second, third, fourth = got.wait_for(4)
    assert not any(future.done() for future in (*asked, sent))
    assert fourth.reply("not requested")
    assert third.fail("not today")
    assert second.ack()
    assert first.reply({"yes": 1})
    assert result(sent) is None
    assert [result(asked[0]), result(asked[1])] == [{"yes": 1}, None]
    error = failure(asked[2])
    assert isinstance(error, HandlerFailed)
    assert "not today" in str(error)


def test_message_can_be_settled_only_once(post: Post) -> None:
    group = post.group()
    got = Record()
    group.join("a").on("q", ack="manual")(got)
    future = group.member("a").ask("q")
    (message,) = got.wait_for(1)
    assert message.reply(1)
    assert not message.reply(2)
    assert not message.fail("no")
    assert not message.retry()
    assert result(future) == 1


def test_auto_handler_can_settle_explicitly(post: Post) -> None:
    group = post.group()
    group.join("a").on("q")(lambda message: message.reply("mine") and "not this")
    assert result(group.member("a").ask("q")) == "mine"


def test_retried_message_returns_after_its_delay_and_others_are_handled_first(post: Post) -> None:
    group = post.group()

    def again(message: Message) -> Any:
        if message.deliveries < 3:
            return message.retry(delay=0.05)
        return message.deliveries

    got = Record(again)
    group.join("a").on("q")(got)
    first = group.member("a").ask("q", "first")
    second = group.member("a").ask("q", "second")
    assert result(first) == result(second) == 3
    assert got.bodies[:2] == ["first", "second"]
    assert len(got.bodies) == 6


def test_retried_message_expires(post: Post) -> None:
    group = post.group()
    got = Record(lambda message: message.retry(delay=0.3))
    group.join("a").on("q")(got)
    assert isinstance(failure(group.member("a").ask("q", timeout=0.1)), MessageExpired)
    eventually(lambda: inbox_length(group, "a") == 0, message="the message was not settled")
    assert len(got.messages) == 1


def test_reply_can_be_repeated_after_an_encoding_error(post: Post) -> None:
    group = post.group()
    got = Record()
    group.join("a").on("q", ack="manual")(got)
    future = group.member("a").ask("q")
    (message,) = got.wait_for(1)
    with pytest.raises(TypeError):
        message.reply(object())
    assert message.reply("now")
    assert result(future) == "now"


# Handlers that misbehave


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3)])
def test_handler_that_raises_still_gets_the_next_message(post: Post, error: BaseException) -> None:
    group = post.group()

    def picky(message: Message) -> Any:
        if message.body is None:
            raise error
        return message.body

    group.join("a").on("q")(picky)
    bad, good = group.member("a").ask("q"), group.member("a").ask("q", 1)
    assert type(error).__name__ in str(failure(bad))
    assert result(good) == 1


def test_blocking_handler_stops_neither_heartbeats_nor_other_queues(post: Post) -> None:
    group, other = post.group(ttl=0.5), post.group()
    me, gate = other.join("a"), Gate()
    me.on("stuck")(gate)
    me.on("q")(lambda message: message.body)
    group.member("a").tell("stuck")
    gate.wait_until_entered()
    sessions = [member.session for member in group.members]
    start = group.now()
    for n in range(1_000_000):
        assert result(group.member("a").ask("q", n)) == n
        if group.now() - start > 1.0:  # twice the time after which a silent member expires
            break
    assert [member.session for member in group.members] == sessions
    assert not me.lost.is_set()
    gate.open.set()


@pytest.mark.parametrize("ack", ["auto", "manual"])
def test_handler_that_takes_too_long_fails_its_message(post: Post, ack: Any) -> None:
    group = post.group()
    gate = Gate(lambda message: message.reply("late") if ack == "manual" else "late")
    group.join("a").on("q", timeout=0.1, ack=ack)(gate)
    error = failure(group.member("a").ask("q", timeout=60))
    assert isinstance(error, HandlerFailed)
    assert "0.1 seconds" in str(error)
    gate.open.set()
    assert inbox_length(group, "a") == 0


def test_wrong_arguments_and_a_second_handler_are_refused(post: Post) -> None:
    me = post.group().join("a")
    me.on("q")(lambda message: None)
    with pytest.raises(ValueError, match="has a handler"):
        me.on("q")(lambda message: None)
    with pytest.raises(ValueError, match="has a handler"):
        me.inbox("q")
    for wrong in ({"workers": 0}, {"priority": 0}, {"ack": "no"}, {"timeout": 0}):
        with pytest.raises(ValueError, match="must be"):
            me.on("other", **wrong)(lambda message: None)
    with pytest.raises(ValueError, match="share one thread"):
        me.on("other", workers=2, priority=1)(lambda message: None)
    with pytest.raises(ValueError, match="cannot be the name"):
        me.on("a b")(lambda message: None)


# Pulling


def test_messages_can_be_pulled_and_settled(any_url: str) -> None:
    with Post(any_url) as post:
        group = post.group()
        me = group.join("a")
        asked = [group.member("a").ask("q", n) for n in range(5)]
        pulled = [message for message in me.inbox("q", timeout=0.5) if message.reply(message.body)]
        assert [message.body for message in pulled] == list(range(5))
        assert [result(future) for future in asked] == list(range(5))
        assert list(me.inbox("q", timeout=0)) == []


def test_pulling_ends_when_the_member_leaves(post: Post) -> None:
    group = post.group()
    me = group.join("a")
    messages = me.inbox("q")
    group.member("a").tell("q", 1)
    assert next(messages).ack()
    leaver = threading.Timer(0.05, me.leave)
    leaver.start()
    assert list(messages) == []
    leaver.join()


# Times


def test_message_has_send_and_receive_times(post: Post) -> None:
    group, other = post.group(), post.group()
    got = Record()
    other.join("a").on("q")(got)
    before = other.now()
    result(group.member("a").send("q"))
    after = other.now()
    (message,) = got.messages
    slack = message.clock_error + other._handle.clock.error_bound + 0.002  # sent_at is in whole ms
    assert before - slack <= message.sent_at <= message.received_at + slack
    assert message.received_at <= after + slack
    assert message.latency == message.received_at - message.sent_at
    assert 0 < message.clock_error < 1


# Per-member state


def test_no_thread_runs_before_the_first_handler_and_none_after_leaving(post: Post) -> None:
    group = post.group()
    me = group.join("a")
    result(group.member("a").tell("q"))
    assert threads() == []
    me.on("q", workers=2)(lambda message: None)
    assert len(threads()) == 3
    me.leave()
    assert threads() == []
    with pytest.raises(MembershipLost):
        me.on("other")


def test_handler_can_leave_the_group(post: Post) -> None:
    group, other = post.group(), post.group()
    me = other.join("a")
    me.on("q")(lambda message: me.leave())
    assert failure(group.member("a").ask("q")) is not None
    eventually(lambda: group.find("a") is None)
    eventually(lambda: threads() == [])


def test_members_on_one_handle_have_separate_queues(post: Post) -> None:
    group = post.group()
    for name in ("a", "b"):
        group.join(name).on("q")(lambda message, name=name: name)
    assert result(group.all.ask("q")).values == {"a": "a", "b": "b"}


def test_instances_of_a_group_do_not_share_messages(post: Post) -> None:
    client = post.client()
    with client.peer_group("t", instance="g1") as one, client.peer_group("t", instance="g2") as two:
        got = {group.name: Record() for group in (one, two)}
        for group in (one, two):
            group.join("me").on("q")(got[group.name])
        result(one.all.send("q", 1))
        result(two.all.send("q", 2))
        assert got[one.name].bodies == [1]
        assert got[two.name].bodies == [2]


def test_inbox_reader_waits_for_the_remaining_handler_timeout(open_group: Open) -> None:
    me = open_group(ttl=LONG_S).join()
    inbox = Inbox(me._handle)
    timeout = inbox._connection.block_max_s / 2
    state = QueueState(inbox, "q", print, timeout=timeout)
    state.live = True
    message = Message("m", "q", "tell", None, False, 1, 1, 0.0, 0.0, 0.0, state)
    state.held[(0, 1), "m"] = message
    assert inbox._block_s([state]) == timeout  # the message is not being handled yet
    message.overdue_at = now() + timeout / 2
    assert inbox._block_s([state]) <= timeout / 2
    message.overdue_at = now()
    assert 0 < inbox._block_s([state]) < timeout / 2


@pytest.mark.parametrize(
    "entry", [{b"\xff": b"\xff"}, {"id": "x", "queue": "jobs"}, {"id": "x", "queue": b"\xff"}]
)
def test_entry_that_is_not_a_message_is_skipped(post: Post, entry: dict[Any, Any]) -> None:
    group = post.group()
    group.join("me").on("jobs")(lambda message: message.body)
    assert result(group.any.ask("jobs", 1)) == 1
    with plain_client(post.url) as client:
        client.xadd(keys.peers(group.name, "inbox:me"), entry)
    assert result(group.any.ask("jobs", 2)) == 2
