"""Members that die, stop, hang or leave, each in a process of its own, and who comes after them.

Times are the server's: events carry them, and leases end by them.
"""

from __future__ import annotations

import pytest

from tests.support.group_members import Crew, Member, Refused
from tests.support.readers import blocked
from tests.support.waiting import eventually

#: A lease that a test waits out, and one that it cannot have waited out.
SHORT_S = 0.8
LONG_S = 60.0
#: Seconds that the machine may lose time in, besides what is promised.
SLACK_S = 3.0


def wait_for_lease(crew: Crew, *members: Member) -> None:
    """Let them wait in a poll; returns when all do, inside the server."""
    for number, member in enumerate(members, start=1):
        member.tell("poll", 40.0, 10_000)
        blocked(crew.redis, number)


# Dead


def test_a_killed_member_is_replaced_when_its_lease_has_run_out(crew: Crew) -> None:
    crew.fill(10)
    first, second = crew.members(2, lease_ttl=SHORT_S)
    assert first.poll(max_records=6) == [0, 1, 2, 3, 4, 5]
    assert first.confirm(2) == 3
    wait_for_lease(crew, second)
    first.kill()
    killed_ms = crew.server_ms()
    ends_ms = killed_ms + crew.lease_left_ms
    assert second.answer() == [3, 4, 5, 6, 7, 8, 9]
    old, new = crew.events()
    assert (old.what, old.member) == ("assigned", first.name)
    assert (new.what, new.member) == ("assigned", second.name)
    assert new.term > old.term
    assert new.ms >= ends_ms - 2
    assert new.ms <= killed_ms + (SHORT_S + 1 + SLACK_S) * 1000
    assert second.confirm() == 10


def test_of_several_that_wait_for_a_dead_member_one_takes_over(crew: Crew) -> None:
    crew.fill(5)
    first, *others = crew.members(4, lease_ttl=SHORT_S)
    assert first.poll() == [0, 1, 2, 3, 4]
    wait_for_lease(crew, *others)
    first.kill()
    for number in (2, 3, 4):  # one after the other, though all were woken
        eventually(lambda number=number: len(crew.events("assigned")) == number)  # type: ignore[misc]
        (owner,) = [member for member in others if member.name == crew.owner]
        assert owner.answer() == [0, 1, 2, 3, 4]
        others.remove(owner)
        blocked(crew.redis, len(others))
        assert len(crew.events("assigned")) == number
        owner.ask("close")


def test_a_lease_that_ran_out_with_nobody_waiting_is_there_for_who_comes_later(crew: Crew) -> None:
    crew.fill(5)
    first = crew.member(lease_ttl=SHORT_S)
    first.poll()
    first.confirm(0)
    first.kill()
    eventually(lambda: crew.owner is None)
    assert crew.field("owner") == first.name  # it was not given up
    assert crew.member(lease_ttl=SHORT_S).poll() == [1, 2, 3, 4]


def test_nothing_is_lost_or_skipped_however_often_members_are_killed(crew: Crew) -> None:
    crew.fill(40)
    members = crew.members(4, lease_ttl=SHORT_S)
    seen: list[int] = []
    for member in members:
        before = crew.confirmed or 0
        taken = member.ask("take", 10, 0.01)
        assert taken == list(range(before, before + 10))  # where the group stands, and in order
        seen += taken
        member.kill()
        assert before <= (crew.confirmed or 0) <= taken[-1] + 1
    assert sorted(set(seen)) == list(range(max(seen) + 1))


def test_a_group_from_the_latest_skips_nothing_if_its_first_member_dies_unconfirmed(
    crew: Crew,
) -> None:
    crew.fill(5)
    first, second = crew.members(2, lease_ttl=SHORT_S, initial_offset="latest")
    crew.fill(3)
    assert first.poll() == [5, 6, 7]  # after the last record when it was opened
    first.kill()
    crew.fill(2)
    assert second.poll(20) == [5, 6, 7, 8, 9]
    second.kill()
    third = crew.member(lease_ttl=SHORT_S, initial_offset="latest")
    assert third.poll(20) == [5, 6, 7, 8, 9]


# Gone in good order


@pytest.mark.parametrize("how", ["close", "deactivate", "close_client", "drop", "leave"])
def test_who_leaves_lets_the_next_have_the_lease_at_once(crew: Crew, how: str) -> None:
    crew.fill(5)
    first, second = crew.members(2, lease_ttl=LONG_S)
    assert first.poll() == [0, 1, 2, 3, 4]
    assert first.confirm(1) == 2
    wait_for_lease(crew, second)
    first.tell(how)
    if how == "leave":
        assert first.wait() == 0
    else:
        first.answer()
    assert second.answer() == [2, 3, 4]  # by the event: the lease itself has a long life
    assert [(event.what, event.member) for event in crew.events()] == [
        ("assigned", first.name),
        ("released", first.name),
        ("assigned", second.name),
    ]


@pytest.mark.parametrize("how", ["confirm_and_close", "leave_with_confirm"])
def test_a_confirm_at_the_very_end_is_not_lost(crew: Crew, how: str) -> None:
    crew.fill(5)
    first, second = crew.members(2, lease_ttl=LONG_S)
    assert first.poll() == [0, 1, 2, 3, 4]
    crew.fill(1)
    first.tell(how)
    assert second.poll() == [5]


def test_a_forked_child_refuses_everything_and_its_end_changes_nothing(crew: Crew) -> None:
    crew.fill(5)
    first, second = crew.members(2, lease_ttl=LONG_S)
    assert first.poll(max_records=2) == [0, 1]
    term = first.state.term
    *told, code = first.ask("fork")
    assert told == ["MeteorError"] * 5
    assert code == "0"
    assert crew.owner == first.name
    assert first.poll() == [2, 3, 4]
    assert first.confirm() == 5
    assert first.state == (True, term, 5, 5)
    assert second.poll(0) == []
    assert len(crew.events()) == 1


# Stopped, and going on later


def test_a_member_stopped_between_poll_and_confirm_confirms_nothing(crew: Crew) -> None:
    crew.fill(10)
    first, second = crew.members(2, lease_ttl=SHORT_S)
    assert first.poll() == list(range(10))
    first.pause()
    assert second.poll(20, max_records=5) == [0, 1, 2, 3, 4]
    assert second.confirm() == 5
    first.resume()
    with pytest.raises(Refused, match="LeaseLost"):
        first.confirm()
    assert crew.confirmed == 5
    assert first.poll(0) == []
    assert first.state.assigned is False
    assert second.confirm() == 5
    assert second.poll() == [5, 6, 7, 8, 9]
    assert second.confirm(7) == 8
    second.ask("close")
    assert first.poll() == [8, 9]  # it starts where the group stands
    assert first.confirm() == 10


def test_a_member_stopped_in_a_poll_is_not_given_what_came_meanwhile(crew: Crew) -> None:
    first, second = crew.members(2, lease_ttl=SHORT_S)
    first.poll(0)
    first.tell("poll", 20.0, 10_000)
    blocked(crew.redis)
    first.pause()
    crew.fill(5)  # the server answers the poll of the one that is stopped
    assert second.poll(20) == [0, 1, 2, 3, 4]
    first.resume()
    eventually(lambda: crew.redis.info("clients")["blocked_clients"] == 1)  # it stands by
    assert second.confirm() == 5
    second.ask("close")
    crew.fill(1)
    assert first.answer() == [5]


def test_a_loop_that_was_stopped_ends_its_work_at_the_next_confirm(crew: Crew) -> None:
    crew.fill(50)
    first, second = crew.members(2, lease_ttl=SHORT_S)
    first.tell("take", 50, 0.05)
    eventually(lambda: (crew.confirmed or 0) >= 3)
    first.pause()
    begun = second.poll(20)
    assert begun[0] == crew.confirmed
    assert second.confirm() == 50
    first.resume()
    with pytest.raises(Refused, match="LeaseLost"):
        first.answer()
    assert crew.confirmed == 50
    assert first.state.assigned is False


def test_a_member_stopped_for_a_while_keeps_the_lease_if_nobody_wanted_it(crew: Crew) -> None:
    crew.fill(10)
    first = crew.member(lease_ttl=SHORT_S)
    assert first.poll(max_records=4) == [0, 1, 2, 3]
    term = first.state.term
    first.pause()
    eventually(lambda: crew.owner is None)
    first.resume()
    assert first.confirm() == 4
    assert first.poll() == [4, 5, 6, 7, 8, 9]
    assert first.state == (True, term, 10, 4)
    assert len(crew.events()) == 1


# Slow, and hung


def test_a_slow_member_keeps_the_lease_longer_than_its_life(crew: Crew) -> None:
    crew.fill(3)
    first, second = crew.members(2, lease_ttl=SHORT_S)
    assert first.poll() == [0, 1, 2]
    first.tell("hang", 3 * SHORT_S)
    assert second.poll(2.5 * SHORT_S) == []
    first.answer()
    assert first.confirm() == 3
    assert len(crew.events()) == 1


def test_a_hung_member_is_replaced_and_does_not_come_back_by_itself(crew: Crew) -> None:
    crew.fill(5)
    first = crew.member(lease_ttl=LONG_S, max_poll_interval=0.5)
    second = crew.member(lease_ttl=LONG_S)
    assert first.name != second.name  # both are ready
    assert first.poll(max_records=3) == [0, 1, 2]
    first.tell("hang", 3.0)
    assert second.poll(40) == [0, 1, 2, 3, 4]
    assert second.confirm(0) == 1
    second.ask("close")
    first.answer()
    assert (crew.owner, len(crew.events())) == (None, 4)  # free, and not taken by who hangs
    with pytest.raises(Refused, match="LeaseLost"):
        first.confirm(2)
    assert first.poll() == [1, 2, 3, 4]
