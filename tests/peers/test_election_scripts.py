"""Elections by the peer group scripts, with a clock that the test sets.

The tests run on every kind of server and never wait.
"""

from __future__ import annotations

import random

from tests.support.peering import HOUR_MS, TTL_MS, Build, Peers
from tests.support.peering import build as build
from tests.support.peering import peers as peers


def test_first_member_to_join_leads_in_a_term_above_zero(peers: Peers) -> None:
    assert peers.join("a") == ["OK", 1, TTL_MS, "0-0"]
    peers.join("b")
    assert (peers.leader, peers.term > 0) == ("a", True)
    assert peers.events() == [("joined", "a"), ("elected", "a"), ("joined", "b")]


def test_silent_leader_is_replaced_by_the_oldest_member_in_a_higher_term(
    peers: Peers,
) -> None:
    for member in "abc":
        peers.join(member)
    before = peers.term
    peers.live(TTL_MS + 100, "c", "b")
    assert peers.events(4) == [("left", "a"), ("resigned", "a"), ("elected", "b")]
    assert peers.term > before
    assert [fields["reason"] for _, fields in peers.entries()[4:6]] == ["expired", "expired"]


def test_overdue_member_is_not_elected(peers: Peers) -> None:
    for member in "abcd":
        peers.join(member)
    peers.live(TTL_MS + 100, "d")  # a, b and c are silent, and expire in one step
    assert [event for event in peers.events() if event[0] == "elected"] == [
        ("elected", "a"),
        ("elected", "d"),
    ]


def test_member_with_higher_priority_leads_next_but_does_not_replace_the_leader(
    peers: Peers,
) -> None:
    peers.join("a")
    peers.join("b", priority=-1)
    peers.join("c", priority=5)
    peers.join("d", priority=5)
    assert peers.leader == "a"
    peers.leave("a")
    assert peers.leader == "c"
    peers.leave("c")
    assert peers.leader == "d"
    peers.leave("d")
    assert peers.leader == "b"


def test_resigned_leader_moves_to_the_end_of_the_election_order(peers: Peers) -> None:
    for member in "abc":
        peers.join(member)
    leaders = []
    for _ in range(6):
        leaders.append(peers.leader)
        assert peers.resign(peers.leader) == ["OK", 1]
    assert leaders == ["a", "b", "c", "a", "b", "c"]


def test_resigned_leader_is_not_reelected_despite_highest_priority(peers: Peers) -> None:
    peers.join("a", priority=9)
    peers.join("b")
    peers.resign("a")
    assert peers.leader == "b"
    peers.leave("b")
    assert peers.leader == "a"


def test_only_member_is_reelected_in_another_term_after_resigning(peers: Peers) -> None:
    peers.join("a")
    before = peers.term
    peers.resign("a")
    assert (peers.leader, peers.term > before) == ("a", True)


def test_resigning_from_a_past_term_changes_nothing(peers: Peers) -> None:
    peers.join("a")
    peers.join("b")
    assert peers.resign("a", peers.term - 1) == ["OK", 0]
    assert peers.resign("b") == ["OK", 0]
    assert peers.leader == "a"


def test_term_after_a_resignation_is_above_every_term_known_to_the_member(peers: Peers) -> None:
    peers.join("a")
    peers.join("b")
    above = peers.term + 10**9
    peers.resign("a", above=above)
    assert peers.term == above + 1


def test_random_election_reaches_every_candidate_with_the_highest_priority(
    build: Build, rng: random.Random
) -> None:
    peers = build(election="random")
    for member in "abc":
        peers.join(member, priority=1)
    peers.join("d")
    led: set[str] = set()
    for _ in range(60):
        before = peers.leader
        led.add(before)
        peers.pass_ms(rng.randrange(1, 50))
        peers.heartbeat(*"abcd")
        peers.resign(before)
        assert peers.leader != before
    assert led == {"a", "b", "c"}


def test_group_without_elections_has_no_leader_and_no_election_events(build: Build) -> None:
    peers = build(election="none")
    peers.join("a")
    peers.join("b")
    peers.live(TTL_MS + 100, "b")
    assert (peers.leader, peers.term) == ("", 0)
    assert peers.events() == [("joined", "a"), ("joined", "b"), ("left", "a")]


def test_no_member_is_elected_below_min_size(build: Build) -> None:
    peers = build(min_size=3)
    peers.join("a")
    peers.join("b")
    assert peers.leader == ""
    peers.join("c")
    assert peers.leader == "a"
    peers.leave("a")
    assert peers.leader == ""
    peers.join("d")
    assert peers.leader == "b"


def test_term_increases_even_if_the_last_one_was_lost(peers: Peers) -> None:
    peers.join("a")
    peers.join("b")
    before = peers.term
    peers.pass_ms(10)
    peers.client._connector.call("HDEL", peers.prefix + "state", "term")
    peers.leave("a")
    assert (peers.leader, peers.term > before) == ("b", True)


def test_term_increases_even_if_the_clock_moved_back(peers: Peers) -> None:
    peers.join("a")
    peers.join("b")
    before = peers.term
    peers.pass_ms(-HOUR_MS)
    peers.leave("a")
    assert (peers.leader, peers.term > before) == ("b", True)
