"""Housekeeping by the peer group scripts, and its cost to the server.

The tests call the scripts directly, with a clock that the test sets. They check which members
expire when all heartbeats are late, where dead members' messages go, and that no key or scan grows
without bound.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import meteor_py as meteor
from meteor_py.peers.member import METADATA_MAX, dump_metadata
from meteor_py.redis import keys
from tests.support.peer_scripts import (
    answer,
    commands,
    entries,
    inbox,
    leftovers,
    propose,
    result,
    send,
    settle,
    vote,
)
from tests.support.peering import GROUP, HOUR_MS, TTL_MS, Build, Peers
from tests.support.peering import build as build
from tests.support.peering import peers as peers


@pytest.fixture
def counted(url: str) -> Iterator[Peers]:
    """A group on a server that counts the commands it runs."""
    with meteor.connect(url) as client:
        yield Peers(client)


# The grace period


@pytest.mark.parametrize("pause_ms", [550, 600, 900])
def test_dead_leader_is_replaced_even_if_others_are_repeatedly_late(
    peers: Peers, pause_ms: int
) -> None:
    peers.join("dead")
    peers.join("slow")
    for _ in range(4):  # each time, "slow" is paused for more than half a ttl
        peers.pass_ms(pause_ms)
        assert peers.heartbeat("slow") == [1]
    assert (peers.members(), peers.leader) == ({"slow"}, "slow")


def test_occasional_observers_detect_a_dead_leader(peers: Peers) -> None:
    peers.join("dead", named=True)
    for _ in range(4):
        peers.pass_ms(600)
        peers.run("describe")
    assert peers.leader == ""
    assert peers.events()[-2:] == [("dead", "dead"), ("resigned", "dead")]


def test_member_that_sent_a_heartbeat_after_an_outage_survives_the_next(peers: Peers) -> None:
    for member in "ab":
        peers.join(member)
    for _ in range(4):
        peers.pass_ms(3 * TTL_MS)
        assert peers.heartbeat("a", "b") == [1, 1]
    peers.pass_ms(3 * TTL_MS)
    assert peers.join("a") == ["OK", 1, TTL_MS, "0-0"]  # a repeated join counts as a heartbeat
    peers.pass_ms(3 * TTL_MS)
    assert peers.heartbeat("a") == [1]


def test_clock_step_back_does_not_prolong_a_grace_period(
    peers: Peers,
) -> None:
    peers.join("dead")
    peers.join("a")
    peers.pass_ms(600)
    peers.heartbeat("a")  # "dead" gets its grace period
    peers.pass_ms(-HOUR_MS)
    peers.live(TTL_MS + 100, "a")
    assert peers.members() == {"a"}


def test_member_that_left_has_no_grace_entry(peers: Peers) -> None:
    peers.join("a")
    peers.join("b")
    peers.pass_ms(600)
    peers.heartbeat("a")
    assert peers.client._connector.call("ZRANGE", peers.prefix + "graced", 0, -1) == [b"b"]
    peers.leave("b")
    assert peers.client._connector.call("EXISTS", peers.prefix + "graced") == 0


@pytest.mark.parametrize("step_ms", [400, -400])
def test_small_clock_step_drops_no_member_that_sends_heartbeats_on_time(
    peers: Peers, step_ms: int
) -> None:
    peers.join("a")
    peers.join("b")
    for _ in range(3):  # three heartbeats per ttl
        peers.pass_ms(330)
        assert peers.heartbeat("a", "b") == [1, 1]
    peers.pass_ms(step_ms)
    assert peers.heartbeat("a", "b") == [1, 1]
    assert (peers.state("graces"), peers.leader) == ("", "a")


def test_small_clock_step_forward_expels_a_cut_off_member_sooner(peers: Peers) -> None:
    peers.join("a")
    peers.join("b")
    peers.live(600, "b")
    peers.pass_ms(450)  # makes `a` overdue after 0.6 s, although it trusts its term for 0.9 s
    peers.heartbeat("b")
    assert peers.leader == "b"
    assert peers.guard(peers.term, "s-a", "old")[0] == "STALE"  # a's writes are refused


# Many overdue members


@pytest.mark.parametrize("election", ["oldest", "random"])
def test_overdue_members_that_a_sweep_has_not_reached_get_no_work(
    build: Build, election: str
) -> None:
    peers = build(election=election, min_size=1)
    for number in range(100):
        peers.join(f"m{number:02}", priority=1)
    peers.join("a")
    peers.client._connector.call("HSET", peers.prefix + "state", "last", peers.clock + TTL_MS + 1)
    peers.client._connector.call("ZADD", peers.prefix + "deadlines", peers.clock + 2 * TTL_MS, "a")
    peers.pass_ms(TTL_MS + 1)
    assert send(peers, "m", random=1) == ["OK", "a"]
    peers.heartbeat("a")
    assert len(peers.members()) == 37
    assert peers.leader == "a"
    assert propose(peers, "p")[2] == 1


def test_overdue_members_do_not_count_towards_min_size(build: Build) -> None:
    peers = build(min_size=3)
    for number in range(100):
        peers.join(f"m{number:02}")
    peers.client._connector.call("HSET", peers.prefix + "state", "last", peers.clock + TTL_MS + 1)
    peers.pass_ms(TTL_MS + 1)
    peers.join("a")
    assert peers.leader == ""


# Messages to dead members


def test_messages_to_any_member_wait_for_the_only_member_if_it_is_named(peers: Peers) -> None:
    peers.join("w", named=True)
    for message in ("one", "two"):
        send(peers, message)
    send(peers, "direct", to="member", member="w")
    peers.leave("w", how="stay")
    peers.join("w", "again", named=True)
    assert inbox(peers, "w") == ["one", "two", "direct"]
    assert entries(peers, "dead") == []


def test_messages_to_any_member_go_to_the_next_member_to_join(peers: Peers) -> None:
    peers.join("w", named=True)
    for message in ("one", "two"):
        send(peers, message, verb="ask")
    send(peers, "direct", to="member", member="w")
    peers.leave("w", how="stay")
    peers.join("other")
    assert (inbox(peers, "w"), inbox(peers, "other")) == (["direct"], ["one", "two"])
    assert peers.state("stranded") == ""


def test_message_becomes_a_dead_letter_when_no_member_is_left(peers: Peers) -> None:
    peers.join("a")
    send(peers, "told")
    send(peers, "asked", verb="ask")
    peers.leave("a")
    letters = entries(peers, "dead")
    assert [letter[b"id"] for letter in letters] == [b"told", b"asked"]
    assert {letter[b"reason"] for letter in letters} == {b"no member is left"}
    assert answer(peers, "asked", "a") == b"left:"
    notice = {b"id": b"asked", b"member": b"a", b"reply": b"left:"}
    assert entries(peers, "replies:handle") == [notice]


def test_message_that_moved_too_often_becomes_a_dead_letter(peers: Peers) -> None:
    call = peers.client._connector.call
    peers.join("m0")
    send(peers, "precious")
    ((place, flat),) = call("XRANGE", peers.prefix + "inbox:m0", "-", "+")
    flat[flat.index(b"tries") + 1] = b"998"
    call("XDEL", peers.prefix + "inbox:m0", place)
    call(
        "ZADD", peers.prefix + "movable:m0", 1, call("XADD", peers.prefix + "inbox:m0", "*", *flat)
    )
    for number in range(3):
        assert entries(peers, "dead") == []
        peers.join(f"m{number + 1}")
        peers.leave(f"m{number}")
    (letter,) = entries(peers, "dead")
    assert (letter[b"id"], letter[b"member"]) == (b"precious", b"m2")
    assert letter[b"reason"] == b"it moved too often"


def test_redelivery_avoids_full_inboxes_if_another_has_room(build: Build) -> None:
    peers = build(max_inbox=3)
    for member in "abc":
        peers.join(member)
    for number in range(3):
        send(peers, f"a{number}", random=3)  # selects a for the send, and b for the move
        send(peers, f"b{number}", to="member", member="b")
    peers.leave("a")
    assert inbox(peers, "b") == ["b0", "b1", "b2"]
    assert inbox(peers, "c") == ["a0", "a1", "a2"]
    peers.leave("c")  # b, the only other member, is full, but must keep them
    assert len(inbox(peers, "b")) == 6
    assert entries(peers, "dead") == []


def test_settled_message_does_not_move(peers: Peers) -> None:
    peers.join("a")
    peers.join("b")
    for message in ("one", "two"):
        send(peers, message, verb="ask", random=0)
    settle(peers, "a")
    peers.leave("a")
    assert inbox(peers, "b") == ["two"]
    settle(peers, "b")
    assert not {"movable:b", "awaited:b", "movable:a", "awaited:a"} & set(leftovers(peers))


def test_index_entry_without_its_message_is_harmless(peers: Peers) -> None:
    peers.join("a")
    peers.join("b")
    send(peers, "lost", random=0)
    peers.client._connector.call("DEL", peers.prefix + "inbox:a")  # part of the group was deleted
    peers.leave("a")
    assert inbox(peers, "b") == []
    assert "movable:a" not in leftovers(peers)


def test_server_does_not_read_direct_messages_when_their_member_dies(counted: Peers) -> None:
    peers = counted
    peers.join("a", named=True)
    peers.join("b")
    for number in range(30):
        send(peers, f"m{number}", to="member", member="a", body="x" * 100_000)
    before = commands(peers, "xrange")
    peers.leave("a", how="stay")
    assert commands(peers, "xrange") == before
    assert len(inbox(peers, "a")) == 30


def test_server_fails_awaited_messages_without_reading_them_when_a_member_leaves(
    counted: Peers,
) -> None:
    peers = counted
    peers.join("a")
    peers.join("b")
    for number in range(250):
        send(peers, f"m{number}", to="member", member="a", verb="ask")
    before = commands(peers, "xrange")
    peers.leave("a")
    assert commands(peers, "xrange") == before
    assert [answer(peers, f"m{n}", "a") for n in range(250)] == [b"left:"] * 250


def test_expired_messages_make_room_at_any_position(build: Build) -> None:
    peers = build(max_inbox=100)
    peers.join("a")
    for number in range(70):
        send(peers, f"told-{number}", to="member", member="a")
    for number in range(30):
        send(peers, f"asked-{number}", to="member", member="a", verb="ask", wait_ms=50)
    assert send(peers, "no", to="member", member="a") == ["FULL", "a"]
    peers.pass_ms(100)
    assert send(peers, "yes", to="member", member="a") == ["OK", "a"]
    assert len(inbox(peers, "a")) == 71
    assert answer(peers, "asked-7", "a") == b"expired::"


# Votes and actions


def test_past_actions_do_not_hide_pending_ones_and_are_pruned(peers: Peers) -> None:
    peers.join("a")
    for number in range(260):
        propose(peers, f"p{number}", action=f"act-{number}", at=peers.clock + 500)
        vote(peers, f"p{number}", "a", "y")
    peers.live(600, "a")
    propose(peers, "live", action="live", at=peers.clock + 60_000)
    vote(peers, "live", "a", "y")

    def agreed() -> list[bytes]:
        found = peers.run("read_polls", "member", "a")
        return [dict(zip(f[::2], f[1::2], strict=True))[b"poll"] for f in found[2::2]]

    assert agreed()[0] == b"live"
    assert len(agreed()) == 200
    peers.pass_ms(HOUR_MS)
    peers.heartbeat("a")
    for _ in range(5):  # each call prunes at most 64 actions
        peers.run("read_polls", "member", "a")
    assert peers.client._connector.call("HKEYS", peers.prefix + "pending") == [b"live"]
    assert peers.client._connector.call("ZRANGE", peers.prefix + "agenda", 0, -1) == [b"live"]
    peers.pass_ms(2 * HOUR_MS)
    peers.heartbeat("a")
    propose(peers, "last", action="last", at=peers.clock + 60_000)
    assert peers.client._connector.call("HKEYS", peers.prefix + "pending") == [b"last"]


def test_rejected_action_is_not_on_the_agenda(peers: Peers) -> None:
    peers.join("a")
    propose(peers, "p", action="act", at=peers.clock + 5000)
    vote(peers, "p", "a", "n")
    assert not {"pending", "agenda"} & set(leftovers(peers))


def test_votes_are_counted_as_they_arrive(counted: Peers) -> None:
    peers = counted
    for number in range(20):
        peers.join(f"m{number:02}")
    for poll in ("yes", "open"):
        propose(peers, poll)
    before = [commands(peers, name) for name in ("hvals", "hgetall")]
    for number in range(10):
        vote(peers, "yes", f"m{number:02}", "y")
        vote(peers, "open", f"m{number:02}", "an"[number % 2])
        assert result(peers, "yes") is None
        if number == 8:
            assert result(peers, "open") is None
    assert commands(peers, "hvals") == before[0]
    assert commands(peers, "hgetall") - before[1] == 1  # one read, to announce the decided poll
    assert result(peers, "open") == b"no"
    peers.leave("m15")
    vote(peers, "yes", "m10", "y")
    assert result(peers, "yes") == b"yes"


def test_member_that_leaves_counts_as_not_voting(peers: Peers) -> None:
    for member in "abc":
        peers.join(member)
    propose(peers, "p")
    peers.leave("a")
    assert result(peers, "p") is None
    peers.leave("b")
    assert result(peers, "p") == b"no"
    (decided,) = (fields for _, fields in peers.entries() if fields["kind"] == "decided")
    assert (decided["reason"], decided["missing"]) == ("left", "a,b,c")


def test_vote_on_a_deleted_poll_leaves_no_keys(peers: Peers) -> None:
    peers.join("a")
    propose(peers, "p")
    peers.client._connector.call("DEL", peers.prefix + "poll:p")
    vote(peers, "p", "a", "y")
    assert not {"poll:p", "polls"} & set(leftovers(peers))


def test_group_has_at_most_a_hundred_open_votes(peers: Peers) -> None:
    peers.join("a")
    for number in range(100):
        assert propose(peers, f"p{number}")[0] == "OK"
    assert propose(peers, "one more") == ["FULL", 100]


# Remaining keys


@pytest.mark.parametrize("lost", ["config", "state"])
def test_recreated_group_keeps_only_keys_that_expire(peers: Peers, lost: str) -> None:
    peers.join("a")
    peers.join("b")
    send(peers, "m", verb="ask", random=0)
    send(peers, "n", to="member", member="b")
    propose(peers, "p", action="act", at=peers.clock + 5000)
    peers.pass_ms(600)
    peers.heartbeat("a")  # b gets its grace period
    peers.client._connector.call("DEL", peers.prefix + lost)
    peers.open()
    assert leftovers(peers) == ["config", "message:m", "sender:handle"]


def test_forced_delete_removes_messages_votes_and_actions(peers: Peers) -> None:
    peers.join("a")
    peers.join("b", named=True)
    send(peers, "m", verb="ask", random=0)
    propose(peers, "p", action="act", at=peers.clock + 5000)
    peers.pass_ms(600)
    peers.heartbeat("a")
    assert peers.run("delete", "force") == ["OK"]
    assert leftovers(peers) == ["message:m", "sender:handle"]


def test_deleting_a_group_removes_the_inboxes_of_lost_members(url: str) -> None:
    with meteor.connect(url) as client, client.peer_group(GROUP) as group:
        peers = Peers(client)
        peers.client._connector.call("DEL", peers.prefix + "clock")
        client._connector.call("XADD", keys.peers(GROUP, "inbox:gone"), "*", "id", "x")
        group.delete(force=True)
        assert client._connector.call("KEYS", keys.peers(GROUP, "*")) == []


def test_metadata_is_limited_to_4_kib() -> None:
    assert len(dump_metadata("x" * (METADATA_MAX - 2))) == 4096
    with pytest.raises(ValueError, match="limited to 4,096 bytes"):
        dump_metadata("x" * (METADATA_MAX - 1))
