"""Messages of distributed groups: targets and verbs, and what the sender gets to know."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from meteor_py.errors import (
    HandlerFailed,
    InboxFull,
    MemberLeft,
    MembershipLost,
    MemberUnknown,
    MessageExpired,
    MessageFailed,
    MeteorError,
    NoLeader,
    OutOfMemory,
    PartialFailure,
)
from meteor_py.peers import mail as mail_module
from meteor_py.peers.group import PeerGroup
from meteor_py.peers.message import Message
from meteor_py.scripts import PEERS_SEND
from tests.bench import Pair
from tests.conftest import ServerFactory
from tests.mailing import (
    Gate,
    Post,
    Record,
    abandon,
    failure,
    inbox_length,
    result,
    wait_until_expired,
)
from tests.proxy import Proxy
from tests.servers import HOST
from tests.waiting import eventually

VERBS = ("tell", "send", "ask")
TARGETS = ("member", "any", "all", "leader_proxy")


@pytest.fixture
def post(url: str) -> Iterator[Post]:
    with Post(url) as post:
        yield post


def say(group: PeerGroup, to: str, verb: str, *args: Any, **options: Any) -> Future[Any]:
    target = group.member("a") if to == "member" else getattr(group, to)
    future: Future[Any] = getattr(target, verb)(*args, **options)
    return future


# Targets and verbs


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_to_each_target_is_handled_and_has_its_result(
    any_url: str, to: str, verb: str
) -> None:
    with Post(any_url) as post:
        group, other = post.group(), post.group()
        got = Record(lambda message: message.body + 1)
        other.join("a").on("q")(got)
        future = say(group, to, verb, "q", 41)
        (message,) = got.wait_for(1)
        expected = {"tell": message.id, "send": None, "ask": 42}[verb]
        outcome = result(future)
        if (to, verb) == ("all", "ask"):
            assert outcome.ok
            outcome = outcome.values["a"]
        assert outcome == expected
        eventually(lambda: inbox_length(group, "a") == 0, message="it was not taken out")


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("verb", VERBS)
def test_in_an_empty_group_every_message_fails_at_once(post: Post, to: str, verb: str) -> None:
    future = say(post.group(), to, verb, "q", timeout=3600)
    assert future.done()
    kind = NoLeader if to == "leader_proxy" else MemberUnknown
    assert isinstance(failure(future), kind)


@pytest.mark.parametrize("verb", VERBS)
def test_a_message_to_an_unknown_member_fails_with_its_name(post: Post, verb: str) -> None:
    group = post.group()
    group.join("b")
    error = failure(say(group, "member", verb, "q"))
    assert isinstance(error, MemberUnknown)
    assert error.member == "a"
    assert error.group == group.name


def test_a_message_to_a_dead_named_member_waits_for_it(post: Post) -> None:
    group, other = post.group(), post.group()
    other.join("a").close()
    told = group.member("a").tell("q", "told")
    sent = group.member("a").send("q", "sent", timeout=60)
    asked = group.member("a").ask("q", "asked", timeout=60)
    assert told.done()
    got = Record(lambda message: message.body.upper())
    other.join("a").on("q")(got)
    assert (result(sent), result(asked)) == (None, "ASKED")
    assert got.bodies == ["told", "sent", "asked"]


@pytest.mark.parametrize("verb", ["send", "ask"])
def test_a_message_to_a_dead_named_member_expires_and_is_not_handled_later(
    post: Post, verb: str
) -> None:
    group, other = post.group(), post.group()
    other.join("a").close()
    error = failure(say(group, "member", verb, "q", "late", timeout=0.05))
    assert isinstance(error, MessageExpired)
    assert error.retriable
    wait_until_expired(other, "a")
    got = Record()
    other.join("a").on("q")(got)
    assert result(group.member("a").ask("q", "in time")) is None
    assert got.bodies == ["in time"]
    assert inbox_length(group, "a") == 0


def test_a_told_message_does_not_expire(post: Post) -> None:
    group, other = post.group(), post.group()
    other.join("a").close()
    result(group.member("a").tell("q", 1, timeout=0.05))
    wait_until_expired(other, "a")
    got = Record()
    other.join("a").on("q")(got)
    got.wait_for(1)
    assert got.bodies == [1]


def test_any_goes_to_nobody_who_is_dead(post: Post) -> None:
    group = post.group()
    group.join("dead").close()
    assert isinstance(failure(group.any.send("q")), MemberUnknown)
    group.join("alive").on("q")(lambda message: "alive")
    assert {result(group.any.ask("q")) for _ in range(20)} == {"alive"}


def test_all_are_those_alive_unless_the_dead_are_included(post: Post) -> None:
    group = post.group()
    group.join("dead").close()
    group.join("alive").on("q")(lambda message: message.body)
    assert result(group.all.ask("q", 1)).values == {"alive": 1}
    result(group.all.tell("q", 2, include_dead=True))
    replies = result(group.all.ask("q", 3, include_dead=True, timeout=1))
    assert replies.values == {"alive": 3}
    assert not replies.ok
    assert isinstance(replies.failed["dead"], MessageExpired)
    got = Record()
    group.join("dead").on("q")(got)
    got.wait_for(1)
    assert got.bodies[0] == 2


def test_who_joins_later_does_not_get_a_message_to_all(post: Post) -> None:
    group = post.group()
    group.join("early").on("q")(lambda message: None)
    result(group.all.send("q"))
    late = Record()
    group.join("late").on("q")(late)
    result(group.member("late").send("q", "own"))
    assert late.bodies == ["own"]


def test_the_leader_gets_what_is_for_the_leader_and_others_do_not(post: Post) -> None:
    group = post.group()
    first, second = group.join("first"), group.join("second")
    for me in (first, second):
        me.on("q")(lambda message, me=me: me.id)
    assert result(group.leader_proxy.ask("q")) == "first"
    first.leave()
    assert result(group.leader_proxy.ask("q")) == "second"


def test_a_group_without_elections_has_no_leader_to_send_to(post: Post) -> None:
    group = post.group(election=None)
    group.join("a")
    assert isinstance(failure(group.leader_proxy.tell("q")), NoLeader)


# Failures


def test_what_a_handler_raises_fails_the_message_with_its_text(post: Post) -> None:
    group = post.group()

    def broken(message: Message) -> None:
        raise LookupError("no such shelf")

    group.join("a").on("q")(broken)
    for verb in ("send", "ask"):
        error = failure(say(group, "member", verb, "q"))
        assert isinstance(error, HandlerFailed)
        assert error.member == "a"
        assert "LookupError: no such shelf" in str(error)


def test_what_cannot_be_sent_back_fails_the_message(post: Post) -> None:
    group = post.group()
    group.join("a").on("q")(lambda message: object())
    assert "cannot be sent" in str(failure(group.member("a").ask("q")))
    assert result(group.member("a").send("q")) is None


@pytest.mark.parametrize("how", ["leave", "remove", "expire"])
def test_a_message_fails_when_its_member_goes_while_it_has_it(post: Post, how: str) -> None:
    group, other = post.group(ttl=0.5), post.group()
    me, gate = other.join(), Gate()
    me.on("q")(gate)
    future = group.member(me.id).send("q", timeout=60)
    gate.wait_until_entered()
    leaver = threading.Thread(target=me.leave)  # it waits for the handler
    if how == "leave":
        leaver.start()
    elif how == "remove":
        group.remove(me.id)
    else:
        abandon(other)
    error = failure(future)
    gate.open.set()
    if how == "leave":
        leaver.join()
    assert isinstance(error, MemberLeft)
    assert error.member is not None


def test_a_message_to_all_tells_who_left_and_what_the_others_said(post: Post) -> None:
    group, other = post.group(), post.group()
    gate = Gate()
    for name in ("a", "b"):
        group.join(name).on("q")(lambda message: message.body * 2)
    leaver = other.join("c")
    leaver.on("q")(gate)
    asked = group.all.ask("q", 4, timeout=60)
    sent = group.all.send("q", 4, timeout=60)
    gate.wait_until_entered()
    group.remove("c")
    replies = result(asked)
    error = failure(sent)
    gate.open.set()
    assert replies.values == {"a": 8, "b": 8}
    assert isinstance(replies.failed["c"], MemberLeft)
    assert isinstance(error, PartialFailure)
    assert set(error.values) == {"a", "b"}
    assert list(error.failed) == ["c"]


def test_a_message_to_all_waits_for_all_answers_though_one_fails(post: Post) -> None:
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


def test_for_anybody_goes_to_another_when_its_member_dies_and_completes_once(post: Post) -> None:
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
    eventually(lambda: late.settled, message="the first one did not go on")
    assert [message.id for message in got.messages] == [late.id]
    assert result(future) == 2


def test_for_anybody_fails_only_when_nobody_is_left(post: Post) -> None:
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


def test_the_full_inbox_of_one_refuses_a_message_to_all_of_them(post: Post) -> None:
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


def test_what_has_expired_makes_room_in_a_full_inbox(post: Post) -> None:
    group = post.group(max_inbox=2)
    group.join("a")
    assert isinstance(failure(group.member("a").ask("q", timeout=0.01)), MessageExpired)
    result(group.member("a").tell("q", "stays"))
    eventually(lambda: group.member("a").tell("q", "fits").exception() is None)
    assert isinstance(failure(group.member("a").tell("q")), InboxFull)


def test_arguments_that_cannot_be_are_refused_where_they_are_given(post: Post) -> None:
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


def test_answers_may_come_in_another_order(post: Post) -> None:
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


def test_a_future_cannot_be_cancelled(post: Post) -> None:
    group = post.group()
    group.join("a")
    future = group.member("a").ask("q", timeout=0.1)
    assert not future.cancel()
    assert isinstance(failure(future), MessageExpired)


def test_sending_waits_while_too_many_answers_are_pending(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail_module, "PENDING_MAX", 2)
    group, gate = post.group(), Gate(lambda message: message.body)
    group.join("a").on("q")(gate)
    first = [group.member("a").ask("q", n, timeout=60) for n in range(2)]
    assert isinstance(failure(group.member("a").ask("q", timeout=0.05)), MessageExpired)
    assert inbox_length(group, "a") == 2, "the third was stored"
    gate.open.set()
    assert [result(future) for future in first] == [0, 1]
    assert result(group.member("a").ask("q", 3)) == 3


def test_closing_the_handle_fails_what_waits(post: Post) -> None:
    group, other = post.group(), post.group()
    other.join("a")
    future = group.member("a").ask("q", timeout=3600)
    group.close()
    assert isinstance(failure(future), MessageFailed)
    with pytest.raises(MeteorError, match="closed"):
        group.member("a").tell("q")


def test_an_answer_is_found_at_the_deadline_though_the_word_of_it_was_lost(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, other = post.group(), post.group()
    monkeypatch.setattr(group.mail, "answered", lambda message: None)
    other.join("a").on("q")(lambda message: "here")
    assert result(group.member("a").ask("q", timeout=0.5)) == "here"


# Senders


def test_the_receiver_knows_the_sender_and_whether_it_leads(post: Post) -> None:
    group = post.group()
    first, second = group.join("first"), group.join("second")
    got = Record()
    second.on("q")(got)
    for sending in (first, second, group):
        result(sending.member("second").send("q"))
    assert [message.sender for message in got.messages] == ["first", "second", None]
    assert [message.from_leader for message in got.messages] == [True, False, False]


def test_a_member_answers_the_sender_by_its_id(post: Post) -> None:
    group, other = post.group(), post.group()
    leader, member = group.join("leader"), other.join()
    got = Record()
    member.on("word")(got)

    @leader.on("report")
    def report(message: Message) -> None:
        assert message.sender is not None
        leader.member(message.sender).tell("word", f"thanks, {message.body}")

    result(member.leader_proxy.send("report", "all well"))
    (message,) = got.wait_for(1)
    assert (message.body, message.sender, message.from_leader) == (
        "thanks, all well",
        "leader",
        True,
    )


def test_who_is_no_member_any_more_cannot_send_as_one(post: Post) -> None:
    group, other = post.group(), post.group()
    group.join("a").on("q")(lambda message: None)
    me = other.join("me")
    me.leave()
    assert isinstance(failure(me.member("a").tell("q")), MembershipLost)


def test_a_superseded_member_cannot_send_before_it_knows(post: Post) -> None:
    group, other = post.group(), post.group()
    old = group.join("me")
    abandon(group)
    other.join("me")
    error = failure(old.member("me").tell("q", timeout=0.3))
    assert isinstance(error, (MembershipLost, MessageExpired))
    assert inbox_length(other, "me") == 0


# Spread


@pytest.mark.parametrize("members", [2, 4, 8])
def test_for_anybody_is_spread_evenly(post: Post, members: int, rng: random.Random) -> None:
    group = post.group()
    for n in range(members):
        group.join(f"m{n}")
    count = 100 * members
    for _ in range(count):
        # As Mail does, with a number that the seed of the test gives.
        message = f"{rng.getrandbits(64):x}"
        args: list[Any] = [message, group.session, "", "q", "tell", "any", ""]
        args += [rng.randrange(2**31), "0", "128", "10000", "1000", "json", "1", ""]
        assert group.books.run(PEERS_SEND, args)[0] == b"OK"
    lengths = [inbox_length(group, f"m{n}") for n in range(members)]
    assert sum(lengths) == count
    square = sum((length - 100) ** 2 / 100 for length in lengths)
    # Beyond this one in a million is, for 1, 3 and 7 degrees of freedom.
    assert square < {2: 24.0, 4: 30.7, 8: 40.5}[members], lengths


def test_two_messages_of_a_handle_for_anybody_may_go_to_different_members(post: Post) -> None:
    group = post.group()
    for name in ("a", "b"):
        group.join(name).on("q")(lambda message, name=name: name)
    counts = Counter(result(group.any.ask("q")) for _ in range(60))
    assert set(counts) == {"a", "b"}  # 1 : 2^59 that it fails


# Faults


@pytest.mark.parametrize("verb", VERBS)
def test_a_message_is_stored_once_though_the_answer_to_sending_is_lost(
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


def test_a_message_is_settled_once_though_the_answer_to_settling_is_lost(
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


def test_futures_end_though_the_server_says_nothing(private_server: ServerFactory) -> None:
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
def test_all_messages_come_in_order_and_are_answered_while_connections_are_cut(
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


def test_a_lost_reply_entry_and_message_after_a_fail_over_end_the_future(pair: Pair) -> None:
    url = pair.bench.proxy.url
    with Post(url) as post:
        got = Record(lambda message: message.body)
        group, other = post.group(ttl=2), post.group()
        other.join("a").on("q")(got)
        assert result(group.member("a").ask("q", "before")) == "before"
        pair.lag()
        # Done by the primary, and its replica never hears of it.
        assert result(group.member("a").ask("q", "lost with the primary")) is not None
        pair.fail_over()
        assert group.member("a").ask("q", "after", timeout=60).result(60) == "after"
        assert got.bodies[-1] == "after"


def test_a_full_server_refuses_messages_and_lets_those_it_has_be_answered(
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


def test_every_question_ends_while_members_come_and_go(post: Post, rng: random.Random) -> None:
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
    assert len(set(answers)) == len(asked) == 300, "two futures had the same answer"
    assert set(answers) == set(handled)
    assert inbox_length(group, "steady") == 0


def test_messages_go_on_after_the_server_has_lost_everything(
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

        eventually(asked, 30, "the group did not come back")


def test_a_blocking_question_to_who_has_just_joined_is_answered(post: Post) -> None:
    group, other = post.group(), post.group()
    answers: list[Any] = []

    @group.on_join
    def joined(member: Any) -> None:
        answers.append(group.member(member.id).ask("q", timeout=20).result())

    me = other.join("a")
    eventually(lambda: inbox_length(group, "a") == 1, message="it was not asked")
    me.on("q")(lambda message: "here")
    eventually(lambda: answers == ["here"], message="no answer came")
