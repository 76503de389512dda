"""Peer group elections: the leader, its successor, and leader functions.

The tests use several handles in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from meteor_py.errors import MembershipLost, MeteorError, PeerError
from meteor_py.peers.group import PeerGroup
from meteor_py.peers.leadership import Term
from meteor_py.peers.membership import Membership
from tests.support.peering import LONG_S, Heard, Open
from tests.support.peering import open_group as open_group
from tests.support.waiting import eventually


def leader_of(group: PeerGroup) -> str | None:
    return group.leader.id if group.leader is not None else None


# Elections


def test_single_member_leads(open_group: Open) -> None:  # V7
    group = open_group(ttl=LONG_S)
    assert (group.leader, group.term) == (None, 0)
    me = group.join()
    assert me.term is not None
    assert me.term.number == group.term > 0
    assert leader_of(group) == me.id


def test_three_members_agree_on_one_leader(open_group: Open) -> None:  # V7
    groups = [open_group(ttl=LONG_S), open_group(), open_group()]
    members = [group.join() for group in groups]
    eventually(lambda: {leader_of(group) for group in groups} == {members[0].id})
    assert len({group.term for group in groups}) == 1
    assert [me.term is not None for me in members] == [True, False, False]


@pytest.mark.parametrize("how", ["leave", "close", "close handle", "removed"])
def test_next_member_is_elected_when_the_leader_leaves(
    open_group: Open, how: str
) -> None:  # T5, T7, T8
    one, two = open_group(ttl=LONG_S), open_group()
    first, second = one.join("a"), two.join("b")
    term = first.term
    assert term is not None
    match how:
        case "leave":
            first.leave()
        case "close":
            first.close()
        case "close handle":
            one.close()
        case _:
            two.remove("a")
    eventually(lambda: second.term is not None)
    assert term.lost.wait(10)
    assert not term.valid
    assert second.term is not None
    assert second.term.number > term.number


def test_new_handle_knows_leader_and_term_at_once(open_group: Open) -> None:  # T9
    one = open_group(ttl=LONG_S)
    me = one.join()
    two = open_group()
    assert (leader_of(two), two.term) == (me.id, one.term)


def test_rejoined_member_can_be_elected(open_group: Open) -> None:
    """Requested in atomix#258."""
    one, two = open_group(ttl=LONG_S), open_group()
    one.join("a").close()
    other = two.join("b")
    again = one.join("a")
    assert again.term is None
    other.leave()
    eventually(lambda: again.term is not None)


def test_on_elected_is_called_at_once_and_then_once_per_election(
    open_group: Open,
) -> None:
    one = open_group(ttl=LONG_S)
    first, second = one.join("a"), one.join("b")
    two = open_group()
    heard: list[tuple[str, int]] = []
    resigned: list[tuple[Any, ...]] = []
    two.on_elected(lambda leader, term: heard.append((leader.id, term)))
    two.on_resigned(lambda *call: resigned.append(call))
    terms = [two.term]
    eventually(lambda: heard == [("a", terms[0])])
    for me in (first, second, first):
        assert me.resign()
        eventually(lambda: two.view == one._handle.protocol.look().view)
        terms.append(two.term)
    eventually(lambda: len(heard) == 4)
    assert heard == list(zip(["a", "b", "a", "b"], terms, strict=True))
    assert resigned == [
        (who, term, "resigned") for who, term in zip(["a", "b", "a"], terms, strict=False)
    ]


def test_on_elected_waits_for_the_first_leader(
    open_group: Open,
) -> None:
    group = open_group(ttl=LONG_S, min_size=2)
    heard = Heard(group)
    first = group.join()
    assert (group.leader, first.term) == (None, None)
    group.join()
    eventually(lambda: heard.count("elected", first.id) == 1)
    assert first.term is not None


def test_member_with_higher_priority_leads_next(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    first, low, high = group.join(), group.join(priority=-5), group.join(priority=7)
    first.leave()
    eventually(lambda: high.term is not None)
    assert low.term is None
    assert high.resign()
    eventually(lambda: low.term is not None)  # the member that resigned is not re-elected


def test_group_without_elections_has_members_and_no_leader(open_group: Open) -> None:
    group = open_group(ttl=LONG_S, election=None)
    me = group.join()
    group.join()
    assert (group.leader, group.term, me.term, me.resign()) == (None, 0, None, False)
    with pytest.raises(PeerError, match="elects no leader"), me.leadership():
        pass


def test_random_election_elects_leaders_in_rising_terms_until_all_have_left(
    open_group: Open,
) -> None:
    group = open_group(ttl=LONG_S, election="random")
    here = {name: group.join(name) for name in "abcd"}
    led, terms = [], []
    for _ in range(4):
        eventually(lambda: leader_of(group) in here)
        leader = str(leader_of(group))
        led.append(leader)
        terms.append(group.term)
        here.pop(leader).leave()
    assert sorted(led) == ["a", "b", "c", "d"]
    assert terms == sorted(set(terms))
    assert group.leader is None


# Leading


def test_leadership_block_waits_for_election_and_resigns(open_group: Open) -> None:
    one, two = open_group(ttl=LONG_S), open_group()
    first, second = one.join(), two.join()
    with pytest.raises(TimeoutError, match="not elected"), second.leadership(timeout=0.05):
        pass
    numbers = []
    for _ in range(3):
        for me in (first, second):
            with me.leadership(timeout=30) as term:
                assert term.valid
                assert term.leader is not None
                assert (term.leader.id, term.remaining > 0) == (me.id, True)
                numbers.append(term.number)
            assert term.lost.is_set()
            assert (term.valid, term.remaining) == (False, 0)
    assert numbers == sorted(set(numbers))


def test_leadership_block_resigns_after_an_error(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    first, second = group.join(), group.join()
    with pytest.raises(ZeroDivisionError), first.leadership(timeout=10):
        raise ZeroDivisionError
    eventually(lambda: second.term is not None)
    assert first.term is None


@pytest.mark.parametrize("how", ["leave", "close handle", "removed", "taken over"])
def test_waiting_for_leadership_raises_when_the_membership_is_lost(
    open_group: Open, how: str
) -> None:
    one, two = open_group(ttl=LONG_S), open_group()
    one.join()
    me = two.join("me")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            with me.leadership():
                pass
        except MeteorError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    match how:
        case "leave":
            me.leave()
        case "close handle":
            two.close()
        case "removed":
            one.remove("me")
        case _:
            one.join("me")
    thread.join(30)
    assert [type(error) for error in errors] == [MembershipLost]


def test_leader_task_is_called_in_each_term_without_overlap(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    first, second = group.join(), group.join()
    running: list[str] = []
    calls: list[tuple[str, int]] = []

    def leader(me: Membership) -> Callable[[Term], None]:
        def lead(term: Term) -> None:
            running.append(me.id)
            assert len(running) == 1
            calls.append((me.id, term.number))
            term.lost.wait(30)
            running.remove(me.id)

        return lead

    first.as_leader(leader(first))
    second.as_leader(leader(second))
    for number in range(6):
        eventually(lambda number=number: len(calls) == number + 1)  # type: ignore[misc]
        (first, second)[number % 2].resign()
    eventually(lambda: len(calls) == 7)
    assert [who for who, _ in calls] == [(first, second)[n % 2].id for n in range(7)]
    numbers = [number for _, number in calls]
    assert numbers == sorted(set(numbers))
    group.close()
    assert not running  # both members' tasks have ended


def test_leader_task_ends_before_another_member_is_elected(open_group: Open) -> None:
    one, two = open_group(ttl=LONG_S), open_group()
    me = one.join()
    other = two.join()
    order: list[str] = []
    two.on_elected(lambda leader, term: order.append("elected") if leader.id == other.id else None)
    begun = threading.Event()

    @me.as_leader
    def lead(term: Term) -> None:
        begun.set()
        term.lost.wait(30)
        threading.Event().wait(0.3)  # simulates work that the task has to finish

        order.append("ended")

    assert begun.wait(10)
    me.leave()
    eventually(lambda: len(order) == 2)
    assert order == ["ended", "elected"]


def test_failed_leader_task_lets_others_lead(open_group: Open) -> None:
    group = open_group(ttl=0.9)
    first, second = group.join(), group.join()

    @first.as_leader
    def fail(term: Term) -> None:
        raise ValueError("no")

    eventually(lambda: second.term is not None)
