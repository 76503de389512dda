"""When a member leaves, its messages move to other members or fail, once and in bounded steps.

The tests call the scripts directly, with a clock that the test sets.
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

#: More messages than two calls can hand over.
MANY = 1_200
#: Maximum number of messages that one call hands over (``budget`` in _group_state.lua).
PART = 500


@pytest.fixture(params=["server", "redis_server"], ids=["valkey", "redis"])
def build(request: pytest.FixtureRequest) -> Iterator[Build]:
    """Use real servers only: a thousand script calls take seconds on the fake server."""
    with meteor.connect(emptied(request.getfixturevalue(request.param).url)) as client:
        yield lambda **settings: Peers(client, **settings)


def fill(peers: Peers, count: int = MANY, **how: Any) -> list[str]:
    """Send messages, by default to the first live member, and return their ids."""
    names = [f"m{number:04}" for number in range(count)]
    for name in names:
        send(peers, name, random=0, **how)
    return names


def has_orphans(peers: Peers) -> bool:
    """Send a heartbeat, which hands over another part; return whether orphans remain."""
    return bool(peers.run("heartbeat", "")[-2])


def test_messages_to_any_member_move_in_order_and_in_bounded_steps(peers: Peers) -> None:
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


def test_requests_to_a_departed_member_fail_in_bounded_steps(peers: Peers) -> None:
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


def test_orphans_do_not_delay_expirations_or_elections(peers: Peers) -> None:
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


def test_new_member_with_a_removed_members_name_starts_with_an_empty_inbox(peers: Peers) -> None:
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


def test_returning_member_keeps_messages_not_yet_handed_over(peers: Peers) -> None:
    peers.join("a", named=True)
    names = fill(peers)
    peers.join("b")
    peers.leave("a", how="stay")
    peers.join("a", "again", named=True)
    assert not has_orphans(peers)
    taken = 2 * PART  # the join has handed over another part
    assert (inbox(peers, "b"), inbox(peers, "a")) == (names[:taken], names[taken:])


def test_dead_member_that_expires_during_a_handover_hands_over_the_rest(build: Build) -> None:
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


def test_dead_member_keeps_messages_when_the_last_other_member_leaves(
    peers: Peers,
) -> None:
    peers.join("a", named=True)
    names = fill(peers)
    peers.join("b", named=True)
    peers.leave("a", how="stay")
    peers.leave("b", how="stay")  # after receiving some of the messages
    assert not has_orphans(peers)
    peers.join("c")
    while has_orphans(peers):
        pass
    assert sorted(inbox(peers, "c")) == names
    assert entries(peers, "dead") == []


@pytest.mark.parametrize("how", ["deleted", "recreated"])
def test_orphans_are_deleted_with_their_group(peers: Peers, how: str) -> None:
    peers.join("a")
    fill(peers)
    peers.join("b")
    peers.leave("a")
    if how == "deleted":
        assert peers.run("delete", "force") == ["OK"]
    else:
        peers.client._connector.call("DEL", peers.prefix + "config")
        peers.open()
    assert set(leftovers(peers)) <= {"config", "sender:handle"}
