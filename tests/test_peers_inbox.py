"""Inboxes of members: handlers, settling, order, and what happens to messages when things break."""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from meteor_py.errors import HandlerFailed, MembershipLost, MessageExpired
from meteor_py.peers import box as box_module
from meteor_py.peers import inbox as inbox_module
from meteor_py.peers.group import PeerGroup
from meteor_py.peers.message import Message
from tests.bench import Pair
from tests.conftest import ServerFactory
from tests.mailing import NAME, Gate, Post, Record, abandon, failure, inbox_length, result
from tests.proxy import Proxy
from tests.servers import HOST
from tests.waiting import eventually


@pytest.fixture
def post(url: str) -> Iterator[Post]:
    with Post(url) as post:
        yield post


def threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("meteor-inbox", "meteor-handler"))]


def expel(group: PeerGroup, member: str) -> None:
    """As if it had not been heard of for long, though it is there."""
    group.books.client.call("ZADD", group.books.key("deadlines"), 0, member)


# Order and priority


def test_messages_of_one_sender_come_in_the_order_of_sending(post: Post) -> None:
    group, other = post.group(), post.group()
    got = Record()
    other.join("a").on("q")(got)
    for n in range(500):
        group.member("a").tell("q", n)
    got.wait_for(500)
    assert got.bodies == list(range(500))


def test_of_those_that_wait_lower_priorities_come_first_and_then_older_ones(any_url: str) -> None:
    with Post(any_url) as post:
        group = post.group()
        me, gate = group.join("a"), Gate()
        me.on("q")(gate)
        group.member("a").tell("q", "in hand")
        gate.wait_until_entered()
        for body, priority in (("d", 256), ("b", 128), ("c", 128), ("a", 1)):
            result(group.member("a").tell("q", body, priority=priority))
        inbox = me._open_inbox()
        eventually(lambda: len(inbox._boxes["q"].held) == 5, message="not all were read")
        gate.open.set()
        gate.wait_for(5)
        assert gate.bodies == ["in hand", "a", "b", "c", "d"]


def test_handlers_with_a_priority_take_turns_in_one_thread_lower_ones_first(post: Post) -> None:
    group = post.group()
    me, gate, order = group.join("a"), Gate(), Record(lambda message: threading.get_ident())
    me.on("gate", priority=256)(gate)
    me.on("urgent", priority=1)(order)
    me.on("idle", priority=200)(order)
    group.member("a").tell("gate")
    gate.wait_until_entered()
    asked = [group.member("a").ask(queue) for queue in ("idle", "urgent", "idle", "urgent")]
    inbox = me._open_inbox()
    eventually(lambda: sum(len(box.held) for box in inbox._boxes.values()) == 5)
    gate.open.set()
    assert len({result(future) for future in asked}) == 1, "they have threads of their own"
    assert [message.queue for message in order.messages] == ["urgent", "urgent", "idle", "idle"]


def test_several_workers_handle_messages_side_by_side(post: Post) -> None:
    group = post.group()
    meeting = threading.Barrier(4)
    group.join("a").on("q", workers=4)(lambda message: meeting.wait(20) >= 0)
    futures = [group.member("a").ask("q") for _ in range(4)]
    assert all(result(future) for future in futures)


# Backlogs


def test_a_queue_without_a_handler_keeps_its_messages_and_holds_up_nobody(post: Post) -> None:
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


def test_a_message_without_a_handler_is_not_failed_before_its_time(post: Post) -> None:
    group = post.group()
    me = group.join("a")
    me.on("other")(lambda message: None)
    future = group.member("a").ask("q", timeout=60)
    result(group.member("a").send("other"))
    assert not future.done()
    me.on("q")(lambda message: "in the end")
    assert result(future) == "in the end"


def test_a_backlog_beyond_what_is_held_here_comes_whole_and_in_order(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_module, "HELD_MAX", 10)
    monkeypatch.setattr(inbox_module, "_COUNT", 7)
    group = post.group()
    me, most = group.join("a"), 0

    def note(message: Message) -> None:
        nonlocal most
        most = max(most, *(len(box.held) for box in me._open_inbox()._boxes.values()))

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


def test_what_is_not_settled_holds_up_its_own_queue_only(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_module, "HELD_MAX", 4)
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


def test_manual_handlers_settle_when_and_how_they_want(post: Post) -> None:
    group = post.group()
    me, got = group.join("a"), Record()
    me.on("q", ack="manual")(got)
    asked = [group.member("a").ask("q", n, timeout=60) for n in range(3)]
    sent = group.member("a").send("q", 3, timeout=60)
    first, second, third, fourth = got.wait_for(4)
    assert not any(future.done() for future in (*asked, sent))
    assert fourth.reply("is not asked for")
    assert third.fail("not today")
    assert second.ack()
    assert first.reply({"yes": 1})
    assert result(sent) is None
    assert [result(asked[0]), result(asked[1])] == [{"yes": 1}, None]
    error = failure(asked[2])
    assert isinstance(error, HandlerFailed)
    assert "not today" in str(error)


def test_a_message_is_settled_once(post: Post) -> None:
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


def test_a_handler_may_settle_by_itself_though_it_need_not(post: Post) -> None:
    group = post.group()
    group.join("a").on("q")(lambda message: message.reply("mine") and "not this")
    assert result(group.member("a").ask("q")) == "mine"


def test_a_message_comes_again_after_a_while_and_others_go_first(post: Post) -> None:
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


def test_a_message_that_is_to_come_again_expires(post: Post) -> None:
    group = post.group()
    got = Record(lambda message: message.retry(delay=0.3))
    group.join("a").on("q")(got)
    assert isinstance(failure(group.member("a").ask("q", timeout=0.1)), MessageExpired)
    eventually(lambda: inbox_length(group, "a") == 0, message="it was not settled")
    assert len(got.messages) == 1


def test_the_refused_answer_can_be_given_again(post: Post) -> None:
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
def test_a_handler_that_raises_goes_on_with_the_next_message(
    post: Post, error: BaseException
) -> None:
    group = post.group()

    def picky(message: Message) -> Any:
        if message.body is None:
            raise error
        return message.body

    group.join("a").on("q")(picky)
    bad, good = group.member("a").ask("q"), group.member("a").ask("q", 1)
    assert type(error).__name__ in str(failure(bad))
    assert result(good) == 1


def test_a_handler_that_blocks_stops_neither_heartbeats_nor_other_queues(post: Post) -> None:
    group, other = post.group(ttl=0.5), post.group()
    me, gate = other.join("a"), Gate()
    me.on("stuck")(gate)
    me.on("q")(lambda message: message.body)
    group.member("a").tell("stuck")
    gate.wait_until_entered()
    beats = [member.session for member in group.members]
    start = group.now()
    for n in range(1_000_000):
        assert result(group.member("a").ask("q", n)) == n
        if group.now() - start > 1.0:  # twice the time that a silent member has
            break
    assert [member.session for member in group.members] == beats
    assert not me.lost.is_set()
    gate.open.set()


@pytest.mark.parametrize("ack", ["auto", "manual"])
def test_a_handler_that_takes_too_long_fails_its_message(post: Post, ack: Any) -> None:
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
    with pytest.raises(ValueError, match="take turns"):
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


def test_a_message_knows_when_it_was_sent_and_received(post: Post) -> None:
    group, other = post.group(), post.group()
    got = Record()
    other.join("a").on("q")(got)
    before = other.now()
    result(group.member("a").send("q"))
    after = other.now()
    (message,) = got.messages
    slack = message.clock_error + other.clock.error_bound + 0.002  # sent_at is in whole ms
    assert before - slack <= message.sent_at <= message.received_at + slack
    assert message.received_at <= after + slack
    assert message.latency == message.received_at - message.sent_at
    assert 0 < message.clock_error < 1


# Members that come and go


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


def test_a_handler_may_leave_the_group(post: Post) -> None:
    group, other = post.group(), post.group()
    me = other.join("a")
    me.on("q")(lambda message: me.leave())
    assert failure(group.member("a").ask("q")) is not None
    eventually(lambda: group.find("a") is None)
    eventually(lambda: threads() == [])


@pytest.mark.parametrize("how", ["takeover", "close", "crash"])
def test_what_a_named_member_had_in_hand_comes_to_its_successor(post: Post, how: str) -> None:
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
    assert [result(future) for future in futures] == ["second 0", "second 1", "second 2"]
    gate.open.set()
    assert {message.id for message in gate.messages} <= {message.id for message in got.messages}


def test_the_answer_of_a_superseded_member_is_refused_and_logged(
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
    assert "not in these hands any more" in caplog.text
    assert not future.done()
    assert inbox_length(group, "a") == 1
    assert new.messages[0].reply("new")
    assert result(future) == "new"


def test_a_named_member_that_was_taken_for_dead_goes_on_with_its_messages(post: Post) -> None:
    group, other = post.group(ttl=1), post.group()
    me, got = other.join("a"), Record(lambda message: message.body)
    me.on("q")(got)
    assert result(group.member("a").ask("q", 1)) == 1
    session = me.session
    expel(group, "a")
    asked = group.member("a").ask("q", 2, timeout=60)
    assert result(asked) == 2
    eventually(lambda: me.session != session, message="it has not joined again")
    assert result(group.member("a").ask("q", 3, timeout=60)) == 3
    assert not me.lost.is_set()


def test_a_member_without_a_name_that_was_taken_for_dead_gets_messages_under_its_new_id(
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


def test_two_members_of_one_handle_have_their_own_queues(post: Post) -> None:
    group = post.group()
    for name in ("a", "b"):
        group.join(name).on("q")(lambda message, name=name: name)
    assert result(group.all.ask("q")).values == {"a": "a", "b": "b"}


def test_instances_of_a_group_do_not_hear_each_other(post: Post) -> None:
    client = post.group().books.client
    with client.group("t", instance="g1") as one, client.group("t", instance="g2") as two:
        got = {group.name: Record() for group in (one, two)}
        for group in (one, two):
            group.join("me").on("q")(got[group.name])
        result(one.all.send("q", 1))
        result(two.all.send("q", 2))
        assert got[one.name].bodies == [1]
        assert got[two.name].bodies == [2]


_HOLDER = """
import sys, time
import meteor_py as meteor
with meteor.connect(sys.argv[1]) as m, m.group(sys.argv[2]) as group:
    me = group.join("a")
    @me.on("q")
    def hold(message):
        print("got it", flush=True)
        time.sleep(3600)
    time.sleep(3600)
"""


@pytest.mark.parametrize("to", ["member", "any"])
def test_what_a_killed_process_had_in_hand_is_done_by_another(post: Post, to: str) -> None:
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


# Servers that come and go


def test_messages_go_on_after_a_server_was_away(private_server: ServerFactory) -> None:
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


def test_messages_on_a_promoted_replica_are_read_though_others_were_lost(pair: Pair) -> None:
    with Post(pair.bench.proxy.url) as post:
        group, other = post.group(ttl=2), post.group()
        got = Record(lambda message: message.body)
        other.join("a").on("q")(got)
        assert result(group.member("a").ask("q", "before")) == "before"
        pair.lag()
        assert result(group.member("a").ask("q", "not replicated")) == "not replicated"
        pair.fail_over()
        for n in range(3):
            assert group.member("a").ask("q", n, timeout=60).result(60) == n
        assert [body for body in got.bodies if isinstance(body, int)] == [0, 1, 2]


def test_nothing_is_lost_while_a_member_is_expelled_and_its_connections_are_cut(
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
        held = me._open_inbox()._boxes["q"].held
        eventually(lambda: not held, message="something is held for ever")
        assert inbox_length(direct, "a") == 0


def test_a_connection_that_is_cut_while_waiting_loses_and_doubles_nothing(
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
