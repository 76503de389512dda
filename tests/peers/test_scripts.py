"""The peer group scripts, called directly with a clock that the test sets.

The tests run on every kind of server and never wait. The scripts are the failure detector: all
members see the scripts' decisions as events. test_election_scripts.py covers elections.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from meteor_py.redis import keys
from tests.support.peering import GROUP, HOUR_MS, TTL_MS, Build, Peers
from tests.support.peering import build as build
from tests.support.peering import peers as peers

# Membership


def test_heartbeat_reports_a_dropped_member_and_does_not_renew_it(peers: Peers) -> None:
    peers.join("a")
    peers.join("b")
    peers.live(TTL_MS + 100, "b")
    assert peers.heartbeat("a") == [0]
    assert peers.members() == {"b"}


def test_heartbeat_reports_a_removed_member_until_its_name_rejoins(peers: Peers) -> None:
    peers.join("a", named=True)
    assert peers.leave("a", "") == ["OK", 1]
    assert peers.heartbeat("a") == [2]
    assert peers.entries()[-2][1]["reason"] == "removed"
    peers.join("a", "another", named=True)
    assert peers.heartbeat("a") == [3]


def test_heartbeat_reports_removal_of_a_dead_member(peers: Peers) -> None:
    peers.join("a", named=True)
    peers.join("b")
    peers.live(TTL_MS + 100, "b")
    peers.leave("a", "")
    assert peers.heartbeat("a") == [2]


def test_removed_members_are_remembered_for_a_day_up_to_a_limit(
    peers: Peers,
) -> None:
    removed = peers.prefix + "removed"
    for number in range(1010):
        peers.client._connector.call("ZADD", removed, peers.clock - number, f"m{number}")
    peers.join("first")
    peers.leave("first", "")
    assert peers.client._connector.call("ZCARD", removed) == 1000
    assert peers.client._connector.call("PTTL", removed) > 0
    peers.pass_ms(25 * HOUR_MS)
    peers.join("last")
    peers.leave("last", "")
    assert peers.client._connector.call("ZCARD", removed) == 1


def test_heartbeat_reports_replacement_even_if_the_successor_is_dead(peers: Peers) -> None:
    peers.join("a", "first", named=True)
    peers.join("a", "second", named=True, how="takeover")
    assert peers.heartbeat("a", session="first") == [3]
    peers.live(2 * TTL_MS)
    assert peers.heartbeat("a", session="first") == [3]
    assert peers.heartbeat("a", session="second") == [0]  # this session may rejoin


def test_repeated_join_after_a_lost_reply_changes_nothing(peers: Peers) -> None:
    first = peers.join("a")
    before = peers.everything()
    assert peers.join("a") == first
    assert peers.everything() == before


def test_id_of_an_unnamed_member_is_taken_while_it_is_a_member(peers: Peers) -> None:
    peers.join("a")
    assert peers.join("a", "other") == ["TAKEN", "s-a"]
    assert peers.join("a", "other", named=True, how="takeover") == ["TAKEN", "s-a"]
    peers.leave("a")
    assert peers.join("a", "other")[0] == "OK"


def test_named_member_that_dies_stays_and_another_leads(peers: Peers) -> None:
    peers.join("a", named=True)
    peers.join("b", named=True)
    peers.live(TTL_MS + 100, "b")
    assert peers.events(3) == [("dead", "a"), ("resigned", "a"), ("elected", "b")]
    assert peers.members() == {"a", "b"}


def test_named_member_that_rejoins_can_lead_again(peers: Peers) -> None:
    """In Atomix, such a member could not lead again (atomix#258)."""
    peers.join("a", named=True)
    peers.join("b", named=True)
    peers.live(TTL_MS + 100, "b")
    peers.join("a", "new", named=True)
    assert peers.events()[-1] == ("alive", "a")
    peers.leave("b")
    assert peers.leader == "a"
    assert peers.state("session") == "new"


def test_name_of_a_live_member_is_refused_or_taken_over(peers: Peers) -> None:
    peers.join("a", "first", named=True)
    peers.join("b")
    before, term = peers.everything(), peers.term
    assert peers.join("a", "second", named=True) == ["TAKEN", "first"]
    assert peers.everything() == before
    peers.join("a", "second", named=True, how="takeover")
    assert peers.events(3) == [("alive", "a"), ("resigned", "a"), ("elected", "b")]
    assert peers.term > term
    peers.leave("b")
    assert peers.guard(term, "first", "old") == ["STALE", peers.term]
    assert peers.guard(peers.term, "first", "old") == ["STALE", peers.term]
    assert peers.guard(peers.term, "second", "new") == ["OK"]
    assert peers.client._connector.call("HGET", peers.prefix + "guarded", "x") == b"new"


def test_leave_by_another_session_changes_nothing(peers: Peers) -> None:
    peers.join("a")
    before = peers.everything()
    assert peers.leave("a", "other") == ["OK", 0]
    assert peers.leave("nobody") == ["OK", 0]
    assert peers.everything() == before


def test_named_member_that_closes_is_dead_at_once_and_no_longer_leads(peers: Peers) -> None:
    peers.join("a", named=True)
    peers.join("b")
    assert peers.leave("a", how="stay") == ["OK", 1]
    assert peers.events(3) == [("dead", "a"), ("resigned", "a"), ("elected", "b")]
    assert [fields["reason"] for _, fields in peers.entries()[3:5]] == ["left", "left"]


@pytest.mark.parametrize("expiration", [None, 0.0, 0.5])
def test_dead_member_is_removed_after_expiration_and_can_rejoin(
    build: Build, expiration: float | None
) -> None:
    peers = build(member_expiration=expiration)
    peers.join("a", named=True)
    peers.join("b")
    peers.live(TTL_MS + 100, "b")
    assert ("dead", "a") in peers.events()
    gone = ("left", "a")
    assert (gone in peers.events()) is (expiration == 0)
    peers.live(600, "b")
    assert (gone in peers.events()) is (expiration is not None)
    if expiration is not None:
        (reason,) = (f["reason"] for _, f in peers.entries() if f["kind"] == "left")
        assert reason == "expired"
        assert peers.heartbeat("a") == [0]  # expired, not removed
    peers.join("a", "new", named=True)
    assert peers.events()[-1] == ("joined" if expiration is not None else "alive", "a")


def test_member_that_rejoins_in_time_is_not_removed_later(build: Build) -> None:
    peers = build(member_expiration=0.5)
    peers.join("a", named=True)
    peers.join("b")
    peers.live(TTL_MS + 100, "b")
    peers.join("a", named=True)
    peers.live(2000, "a", "b")
    assert ("left", "a") not in peers.events()


def test_join_script_limits_the_number_of_members(peers: Peers) -> None:
    peers.join("a", named=True, most=2)
    peers.join("b", most=2)
    assert peers.join("c", most=2) == ["FULL", 2]
    assert peers.join("a", "again", named=True, how="takeover", most=2)[0] == "OK"


def test_only_the_owning_session_can_change_metadata(peers: Peers) -> None:
    peers.join("a", metadata='"one"')
    assert peers.run("update_member", "a", "other", "metadata", '"two"') == ["FENCED"]
    assert peers.run("update_member", "a", "s-a", "metadata", '"x:y:\n"') == ["OK", 1]
    assert peers.events()[-1] == ("updated", "a")
    (_, record) = peers.run("describe")[7]
    assert record.endswith(b':"x:y:\n"')


# Time


def test_no_member_is_dropped_at_once_after_a_long_silence(peers: Peers) -> None:
    peers.join("a")
    peers.join("b")
    peers.pass_ms(3 * TTL_MS)  # the server was down, or could not be reached
    assert peers.heartbeat("a") == [1]
    assert peers.members() == {"a", "b"}
    assert peers.state("graces") == "1"
    peers.live(TTL_MS + 100, "a")
    assert peers.members() == {"a"}  # a dead member is dropped one ttl later


def test_members_get_a_whole_ttl_after_an_outage(peers: Peers) -> None:
    peers.join("a")
    peers.join("b")
    peers.live(900, "a")  # b would expire 100 ms later
    peers.pass_ms(3 * TTL_MS)
    peers.live(900, "a")
    assert peers.heartbeat("b") == [1]


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS, 60_000, -60_000])
def test_clock_step_drops_no_member_and_deaths_are_still_detected(
    peers: Peers, step_ms: int
) -> None:
    peers.join("a")
    peers.join("b")
    peers.pass_ms(step_ms)
    assert peers.heartbeat("a", "b") == [1, 1]
    peers.live(TTL_MS + 100, "a")
    assert (peers.members(), peers.leader) == ({"a"}, "a")


def test_small_clock_step_back_only_delays_detection(peers: Peers) -> None:
    peers.join("a")
    peers.join("b")
    peers.pass_ms(-300)
    peers.live(TTL_MS, "a")
    assert peers.members() == {"a", "b"}
    peers.live(400, "a")
    assert peers.members() == {"a"}


def test_heartbeat_reports_when_the_next_member_is_overdue(peers: Peers) -> None:
    assert peers.run("heartbeat", "")[9] == -1
    peers.join("a")
    peers.live(300)
    peers.join("b")
    assert peers.run("heartbeat", "")[9] == TTL_MS - 300
    assert peers.run("heartbeat", "s-a", "a")[9] == TTL_MS


def test_observer_drops_dead_members(peers: Peers) -> None:
    peers.join("a")
    peers.live(TTL_MS + 100)
    assert peers.events(2) == [("left", "a"), ("resigned", "a")]


def test_many_simultaneous_deaths_are_processed_in_bounded_steps(peers: Peers) -> None:
    for number in range(150):
        peers.join(f"m{number}")
    peers.join("a")
    for _ in range(11):
        peers.pass_ms(100)
        peers.client._connector.call("ZADD", peers.prefix + "deadlines", peers.clock + TTL_MS, "a")
        peers.client._connector.call("HSET", peers.prefix + "state", "last", peers.clock)
    counts = []
    for _ in range(4):
        peers.heartbeat("a")
        counts.append(len(peers.members()))
    assert counts == [87, 23, 1, 1]
    assert peers.leader == "a"


# Events and lost keys


def test_events_are_numbered_without_gaps_and_name_their_predecessor(
    peers: Peers, rng: random.Random
) -> None:
    names = "abcdef"
    for _ in range(200):
        member = rng.choice(names)
        peers.pass_ms(rng.randrange(0, 200))
        match rng.randrange(5):
            case 0 | 1:
                peers.join(member, named=member in "abc", how="takeover")
            case 2:
                peers.leave(member, how=rng.choice(["", "stay"]))
            case 3:
                peers.leave(member, "")
            case _ if peers.leader:
                peers.resign(peers.leader)
    entries = peers.entries()
    assert [int(entry.split(b"-")[0]) for entry, _ in entries] == list(range(1, len(entries) + 1))
    marks = [fields["mark"] for _, fields in entries]
    assert [fields["after"] for _, fields in entries] == ["", *marks[:-1]]
    assert len(set(marks)) == len(marks)
    terms = [int(fields["term"]) for _, fields in entries if fields["kind"] == "elected"]
    assert terms == sorted(set(terms)), "the terms do not increase"
    assert peers.run("describe")[2:4] == [len(entries), marks[-1]]


CALLS: dict[str, list[Any]] = {
    "delete": [""],
    "describe": [],
    "guarded_write": [1, "s", "set", "x", "y"],
    "heartbeat": ["s", "a"],
    "join": ["a", "s", "0", 0, "", "fail", 1000],
    "leave": ["a", "s", ""],
    "update_member": ["a", "s", "metadata", ""],
}


@pytest.mark.parametrize("lost", ["config", "state"])
@pytest.mark.parametrize("call", CALLS)
def test_scripts_write_nothing_to_a_group_that_has_lost_its_config_or_state(
    peers: Peers, call: str, lost: str
) -> None:
    peers.join("a", "s")
    peers.client._connector.call("DEL", peers.prefix + lost)
    before = peers.everything()
    assert peers.run(call, *CALLS[call]) == ["NOGROUP"]
    assert peers.everything() == before


@pytest.mark.parametrize("lost", ["config", "state"])
def test_partial_group_is_recreated_as_another_incarnation(peers: Peers, lost: str) -> None:
    peers.join("a")
    incarnation = peers.run("describe")[1]
    peers.client._connector.call("DEL", peers.prefix + lost)
    peers.open()
    assert peers.run("describe")[1] not in (incarnation, "")
    assert (peers.members(), peers.events()) == (set(), [])
    assert peers.join("a")[0] == "OK"


@pytest.mark.parametrize("lost", ["members", "deadlines", "candidates", "events", "expirations"])
def test_group_continues_after_one_of_its_keys_was_deleted(peers: Peers, lost: str) -> None:
    peers.join("a", named=True)
    peers.join("b")
    peers.client._connector.call("DEL", peers.prefix + lost)
    peers.live(2 * TTL_MS, "a", "b")
    peers.join("c")
    assert peers.heartbeat("c") == [1]
    peers.leave("a")
    peers.leave("b")
    peers.live(2 * TTL_MS, "c")
    if lost != "candidates":
        assert peers.leader == "c"


def test_creator_of_a_group_chooses_its_settings(peers: Peers) -> None:
    assert peers.open(ttl=7.0)[b"ttl"] == b"1000"


def test_deleting_a_group_removes_all_keys_that_do_not_expire(peers: Peers) -> None:
    peers.join("a", named=True)
    peers.join("b")
    peers.guard(peers.term, "s-a", "y")
    peers.leave("b", "")
    before = peers.everything()
    assert peers.run("delete", "") == ["ALIVE", 1]
    assert peers.everything() == before
    assert peers.run("delete", "force") == ["OK"]
    assert peers.everything() == {}
    assert peers.client._connector.call("EXISTS", keys.peers(GROUP, "state")) == 0
