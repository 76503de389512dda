"""Peer group messages: targets, verbs, receivers and senders."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from meteor_py.errors import (
    MembershipLost,
    MemberUnknown,
    MessageExpired,
    NoLeader,
)
from meteor_py.peers.messaging.message import Message
from meteor_py.redis.scripts import PEERS_SEND
from tests.support.mailing import (
    SOON_S,
    VERBS,
    Post,
    Record,
    abandon,
    failure,
    inbox_length,
    result,
    say,
    wait_until_expired,
)
from tests.support.mailing import post as post
from tests.support.peering import LONG_S, Open
from tests.support.peering import open_group as open_group
from tests.support.waiting import eventually

TARGETS = ("member", "any", "all", "leader_proxy")


# Targets and verbs


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_reaches_each_target_and_returns_its_result(
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
        eventually(lambda: inbox_length(group, "a") == 0, message="the message was not removed")


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("verb", VERBS)
def test_every_message_to_an_empty_group_fails_at_once(post: Post, to: str, verb: str) -> None:
    future = say(post.group(), to, verb, "q", timeout=3600)
    kind = NoLeader if to == "leader_proxy" else MemberUnknown
    assert isinstance(failure(future), kind)


@pytest.mark.parametrize("verb", VERBS)
def test_message_to_an_unknown_member_fails_with_its_name(post: Post, verb: str) -> None:
    group = post.group()
    group.join("b")
    error = failure(say(group, "member", verb, "q"))
    assert isinstance(error, MemberUnknown)
    assert error.member == "a"
    assert error.group == group.name


def test_message_to_a_dead_named_member_waits_for_it(post: Post) -> None:
    group, other = post.group(), post.group()
    other.join("a").close()
    told = group.member("a").tell("q", "told")
    sent = group.member("a").send("q", "sent", timeout=60)
    asked = group.member("a").ask("q", "asked", timeout=60)
    result(told)
    got = Record(lambda message: message.body.upper())
    other.join("a").on("q")(got)
    assert (result(sent), result(asked)) == (None, "ASKED")
    assert got.bodies == ["told", "sent", "asked"]


@pytest.mark.parametrize("verb", ["send", "ask"])
def test_message_to_a_dead_named_member_expires_and_is_not_handled_later(
    post: Post, verb: str
) -> None:
    group, other = post.group(), post.group()
    other.join("a").close()
    error = failure(say(group, "member", verb, "q", "late", timeout=0.05))
    assert isinstance(error, MessageExpired)
    assert error.timeout == 0.05
    assert error.retriable
    wait_until_expired(other, "a")
    got = Record()
    other.join("a").on("q")(got)
    assert result(group.member("a").ask("q", "in time")) is None
    assert got.bodies == ["in time"]
    assert inbox_length(group, "a") == 0


def test_tell_does_not_expire(post: Post) -> None:
    group, other = post.group(), post.group()
    other.join("a").close()
    result(group.member("a").tell("q", 1, timeout=0.05))
    wait_until_expired(other, "a")
    got = Record()
    other.join("a").on("q")(got)
    got.wait_for(1)
    assert got.bodies == [1]


def test_message_to_any_member_never_goes_to_a_dead_member(post: Post) -> None:
    group = post.group()
    group.join("dead").close()
    assert isinstance(failure(group.any.send("q")), MemberUnknown)
    group.join("alive").on("q")(lambda message: "alive")
    assert {result(group.any.ask("q")) for _ in range(20)} == {"alive"}


def test_message_to_all_reaches_only_live_members_unless_dead_ones_are_included(post: Post) -> None:
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


def test_member_that_joins_later_does_not_get_a_message_to_all(post: Post) -> None:
    group = post.group()
    group.join("early").on("q")(lambda message: None)
    result(group.all.send("q"))
    late = Record()
    group.join("late").on("q")(late)
    result(group.member("late").send("q", "own"))
    assert late.bodies == ["own"]


def test_only_the_leader_gets_messages_for_the_leader(post: Post) -> None:
    group = post.group()
    first, second = group.join("first"), group.join("second")
    for me in (first, second):
        me.on("q")(lambda message, me=me: me.id)
    assert result(group.leader_proxy.ask("q")) == "first"
    first.leave()
    assert result(group.leader_proxy.ask("q")) == "second"


def test_group_without_elections_has_no_leader_to_send_to(post: Post) -> None:
    group = post.group(election=None)
    group.join("a")
    assert isinstance(failure(group.leader_proxy.tell("q")), NoLeader)


# Senders


def test_receiver_knows_the_sender_and_whether_it_leads(post: Post) -> None:
    group = post.group()
    first, second = group.join("first"), group.join("second")
    got = Record()
    second.on("q")(got)
    for sending in (first, second, group):
        result(sending.member("second").send("q"))
    assert [message.sender for message in got.messages] == ["first", "second", None]
    assert [message.from_leader for message in got.messages] == [True, False, False]


def test_member_can_message_the_sender_by_its_id(post: Post) -> None:
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


def test_former_member_cannot_send_as_a_member(post: Post) -> None:
    group, other = post.group(), post.group()
    group.join("a").on("q")(lambda message: None)
    me = other.join("me")
    me.leave()
    assert isinstance(failure(me.member("a").tell("q")), MembershipLost)


def test_replaced_member_cannot_send_even_before_it_notices(post: Post) -> None:
    group, other = post.group(), post.group()
    old = group.join("me")
    abandon(group)
    other.join("me")
    error = failure(old.member("me").tell("q", timeout=0.3))
    assert isinstance(error, (MembershipLost, MessageExpired))
    assert inbox_length(other, "me") == 0


# Distribution among members


@pytest.mark.parametrize("members", [2, 4, 8])
def test_messages_to_any_member_are_spread_evenly(
    post: Post, members: int, rng: random.Random
) -> None:
    group = post.group()
    for n in range(members):
        group.join(f"m{n}")
    count = 100 * members
    for number in range(1, count + 1):
        # Send as the library does, but with random numbers from the test's seed.
        message = f"{rng.getrandbits(64):x}"
        args: list[Any] = ["test", "test", number, "", "", message, "", "", "q", "tell", "any", ""]
        args += [rng.randrange(2**31), "", "128", "1000", "json", "1"]
        assert group._handle.protocol.run(PEERS_SEND, args)[1].startswith(b"OK")
    lengths = [inbox_length(group, f"m{n}") for n in range(members)]
    assert sum(lengths) == count
    square = sum((length - 100) ** 2 / 100 for length in lengths)
    # The chi-squared value exceeds these limits, for 1, 3 and 7 degrees of freedom, once in a
    # million runs.
    assert square < {2: 24.0, 4: 30.7, 8: 40.5}[members], lengths


def test_messages_to_any_member_from_one_handle_reach_different_members(post: Post) -> None:
    group = post.group()
    for name in ("a", "b"):
        group.join(name).on("q")(lambda message, name=name: name)
    counts = Counter(result(group.any.ask("q")) for _ in range(60))
    assert set(counts) == {"a", "b"}  # fails with a probability of 2^-59


def test_error_says_whether_the_group_is_empty_or_has_no_live_member(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    assert str(failure(group.any.tell("q"))) == "Group 'workers' has no members."
    group.join("a").close()
    eventually(lambda: [member.alive for member in group.members] == [False], SOON_S)
    for target in (group.any, group.all):
        error = failure(target.tell("q"))
        assert isinstance(error, MemberUnknown)
        assert str(error) == "No member of group 'workers' is alive."


def test_sender_can_exclude_itself_from_a_message_to_all(post: Post) -> None:
    group = post.group(ttl=60)
    got = Record(lambda message: message.member)
    me, *others = (group.join(name) for name in "abc")
    for member in (me, *others):
        member.on("q")(got)
    assert set(result(me.all.ask("q", include_self=False)).values) == {"b", "c"}
    assert set(result(me.all.ask("q")).values) == {"a", "b", "c"}
    assert set(result(group.all.ask("q", include_self=False)).values) == {"a", "b", "c"}
    for other in others:
        other.leave()
    error = failure(me.all.send("q", include_self=False))
    assert isinstance(error, MemberUnknown)


def test_members_can_join_and_leave_in_background_threads(post: Post) -> None:
    group = post.group(ttl=60)
    # join() and leave() block; an executor turns the calls into futures.
    with ThreadPoolExecutor() as pool:
        me = pool.submit(group.join, "a").result(20)
        assert group.find("a") is not None
        pool.submit(me.leave).result(20)
    assert group.find("a") is None
