"""Messages of members who are gone are handed over a part at a time, and each once.

Whatever comes in between. The scripts are called by hand, under a clock that the test sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import meteor_py as meteor
from tests.conftest import emptied
from tests.support.peer_scripts import answer, entries, inbox, leftovers, propose, result, send
from tests.support.peering import HOUR_MS, TTL_MS, Build, Peers
from tests.support.peering import peers as peers

#: More than one call hands over, and than two do.
MANY = 1_200
PART = 500


@pytest.fixture(params=["server", "redis_server"], ids=["valkey", "redis"])
def build(request: pytest.FixtureRequest) -> Iterator[Build]:
    """On servers only: a thousand scripts take seconds on the fake, which has all elsewhere."""
    with meteor.connect(emptied(request.getfixturevalue(request.param).url)) as client:
        yield lambda **settings: Peers(client, **settings)


def fill(peers: Peers, count: int = MANY, **how: Any) -> list[str]:
    """Messages for a member: its number among those who are alive is 0."""
    names = [f"m{number:04}" for number in range(count)]
    for name in names:
        send(peers, name, random=0, **how)
    return names


def has_orphans(peers: Peers) -> bool:
    return bool(peers.run("heartbeat", "")[-2])


def test_what_was_for_anybody_is_handed_over_a_part_at_a_time_in_order(peers: Peers) -> None:
    peers.join("a")
    names = fill(peers)
    peers.join("b")
    peers.leave("a")
    assert inbox(peers, "b") == names[:PART]
    assert has_orphans(peers)
    assert inbox(peers, "b") == names[: 2 * PART]
    assert not has_orphans(peers)
    assert inbox(peers, "b") == names
    assert not [part for part in leftovers(peers) if part.endswith("a") or part == "orphans"]


def test_who_waits_for_one_who_left_is_told_a_part_at_a_time(peers: Peers) -> None:
    peers.join("a")
    peers.join("b")
    names = fill(peers, to="member", member="a", verb="ask")
    peers.leave("a")
    assert [answer(peers, name, "a") is None for name in names].count(False) == PART
    while has_orphans(peers):
        pass
    assert {answer(peers, name, "a") for name in names} == {b"left:"}
    assert len(entries(peers, "replies:handle")) == MANY
    assert not [part for part in leftovers(peers) if part.endswith("a") or part == "orphans"]


def test_the_others_who_are_overdue_and_the_leader_do_not_wait_for_that(peers: Peers) -> None:
    for member in ("a", "b", "c"):
        peers.join(member)
    fill(peers, to="member", member="a", verb="ask")
    propose(peers, "p", "consensus")
    peers.client._connector.call("HSET", peers.prefix + "state", "last", peers.clock + TTL_MS + 1)
    peers.client._connector.call("ZADD", peers.prefix + "deadlines", peers.clock + 2 * TTL_MS, "c")
    peers.pass_ms(TTL_MS + 1)
    peers.heartbeat("c")
    assert (peers.members(), peers.leader) == ({"c"}, "c")
    assert result(peers, "p") == b"no"


def test_who_joins_under_the_name_of_one_who_was_removed_begins_with_nothing(peers: Peers) -> None:
    peers.join("a", named=True)
    names = fill(peers)
    send(peers, "direct", to="member", member="a")
    peers.join("b")
    peers.run("leave", "a", "", "")
    peers.join("a", "another", named=True)
    send(peers, "new", to="member", member="a")
    while has_orphans(peers):
        pass
    assert sorted([*inbox(peers, "a"), *inbox(peers, "b")]) == sorted(["new", *names])
    assert "direct" not in inbox(peers, "a")


def test_who_comes_back_keeps_what_was_not_handed_over_yet(peers: Peers) -> None:
    peers.join("a", named=True)
    names = fill(peers)
    peers.join("b")
    peers.leave("a", how="stay")
    peers.join("a", "again", named=True)
    assert not has_orphans(peers)
    taken = 2 * PART  # joining has handed over another part
    assert (inbox(peers, "b"), inbox(peers, "a")) == (names[:taken], names[taken:])


def test_a_dead_member_that_expires_in_the_middle_hands_over_the_rest(build: Build) -> None:
    peers = build(member_expiration=HOUR_MS / 1000)
    peers.join("a", named=True)
    names = fill(peers)
    send(peers, "direct", to="member", member="a")
    peers.join("b")
    peers.leave("a", how="stay")
    peers.client._connector.call("ZADD", peers.prefix + "expirations", peers.clock - 1, "a")
    while has_orphans(peers):
        pass
    assert peers.members() == {"b"}
    assert inbox(peers, "b") == names
    assert not [part for part in leftovers(peers) if part.endswith("a") or part == "orphans"]


def test_when_the_last_of_the_others_goes_in_the_middle_the_dead_keep_the_rest(
    peers: Peers,
) -> None:
    peers.join("a", named=True)
    names = fill(peers)
    peers.join("b", named=True)
    peers.leave("a", how="stay")
    peers.leave("b", how="stay")  # with a part of it
    assert not has_orphans(peers)
    peers.join("c")
    while has_orphans(peers):
        pass
    assert sorted(inbox(peers, "c")) == names
    assert entries(peers, "dead") == []


@pytest.mark.parametrize("how", ["deleted", "begun anew"])
def test_orphans_go_with_their_group(peers: Peers, how: str) -> None:
    peers.join("a")
    fill(peers)
    peers.join("b")
    peers.leave("a")
    if how == "deleted":
        assert peers.run("delete", "force") == ["OK"]
    else:
        peers.client._connector.call("DEL", peers.prefix + "config")
        peers.open()
    assert {part for part in leftovers(peers) if not part.startswith("message:")} <= {"config"}
