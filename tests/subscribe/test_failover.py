"""Another member takes over when a member process dies, stops, hangs or leaves.

The tests compare only times from the server: event times and lease expiry times.
"""

from __future__ import annotations

import pytest

from tests.support.group_members import GroupHarness, Member, Refused
from tests.support.readers import blocked
from tests.support.waiting import eventually

#: Lease TTLs in seconds: one that expires during a test, and one that does not.
SHORT_S = 0.8
LONG_S = 60.0
#: Tolerance in seconds for a slow machine.
SLACK_S = 3.0


def wait_for_lease(harness: GroupHarness, *members: Member) -> None:
    """Make the members poll, and return once all are blocked on the server."""
    for number, member in enumerate(members, start=1):
        member.tell("poll", 40.0, 10_000)
        blocked(harness.redis, number)


# Dead


def test_killed_member_is_replaced_when_its_lease_expires(harness: GroupHarness) -> None:
    harness.fill(10)
    first, second = harness.members(2, lease_ttl=SHORT_S)
    assert first.poll(max_records=6) == [0, 1, 2, 3, 4, 5]
    assert first.confirm(2) == 3
    wait_for_lease(harness, second)
    first.kill()
    killed_ms = harness.server_ms()
    ends_ms = killed_ms + harness.lease_left_ms
    assert second.answer() == [3, 4, 5, 6, 7, 8, 9]
    old, new = harness.events()
    assert (old.what, old.member) == ("assigned", first.name)
    assert (new.what, new.member) == ("assigned", second.name)
    assert new.term > old.term
    assert new.ms >= ends_ms - 2
    assert new.ms <= killed_ms + (SHORT_S + 1 + SLACK_S) * 1000
    assert second.confirm() == 10


def test_only_one_waiting_member_takes_over_from_a_dead_member(harness: GroupHarness) -> None:
    harness.fill(5)
    first, *others = harness.members(4, lease_ttl=SHORT_S)
    assert first.poll() == [0, 1, 2, 3, 4]
    wait_for_lease(harness, *others)
    first.kill()
    for number in (2, 3, 4):  # one after another, although all were woken
        eventually(lambda number=number: len(harness.events("assigned")) == number)  # type: ignore[misc]
        (owner,) = [member for member in others if member.name == harness.owner]
        assert owner.answer() == [0, 1, 2, 3, 4]
        others.remove(owner)
        blocked(harness.redis, len(others))
        assert len(harness.events("assigned")) == number
        owner.ask("close")


def test_lease_that_expired_while_no_member_was_waiting_goes_to_a_later_member(
    harness: GroupHarness,
) -> None:
    harness.fill(5)
    first = harness.member(lease_ttl=SHORT_S)
    first.poll()
    first.confirm(0)
    first.kill()
    eventually(lambda: harness.owner is None)
    assert harness.field("owner") == first.name  # the lease was not released
    assert harness.member(lease_ttl=SHORT_S).poll() == [1, 2, 3, 4]


def test_no_record_is_lost_or_skipped_when_members_are_killed(harness: GroupHarness) -> None:
    harness.fill(30)
    members = harness.members(3, lease_ttl=SHORT_S)
    seen: list[int] = []
    for member in members:
        before = harness.confirmed or 0
        taken = member.ask("take", 10, 0.01)
        assert taken == list(range(before, before + 10))  # from the confirmed offset, in order
        seen += taken
        member.kill()
        assert before <= (harness.confirmed or 0) <= taken[-1] + 1
    assert sorted(set(seen)) == list(range(max(seen) + 1))


def test_group_that_starts_at_latest_skips_nothing_if_its_first_member_dies_before_a_confirm(
    harness: GroupHarness,
) -> None:
    harness.fill(5)
    first, second = harness.members(2, lease_ttl=SHORT_S, initial_offset="latest")
    harness.fill(3)
    assert first.poll() == [5, 6, 7]  # from the end of the log when the group was opened
    first.kill()
    harness.fill(2)
    assert second.poll(20) == [5, 6, 7, 8, 9]
    second.kill()
    third = harness.member(lease_ttl=SHORT_S, initial_offset="latest")
    assert third.poll(20) == [5, 6, 7, 8, 9]


# Leaving


@pytest.mark.parametrize("how", ["close", "deactivate", "close_client", "drop", "leave"])
def test_leaving_member_hands_over_the_lease_at_once(harness: GroupHarness, how: str) -> None:
    harness.fill(5)
    first, second = harness.members(2, lease_ttl=LONG_S)
    assert first.poll() == [0, 1, 2, 3, 4]
    assert first.confirm(1) == 2
    wait_for_lease(harness, second)
    first.tell(how)
    if how == "leave":
        assert first.wait() == 0
    else:
        first.answer()
    assert second.answer() == [2, 3, 4]  # woken by the event, before the lease would have expired
    assert [(event.what, event.member) for event in harness.events()] == [
        ("assigned", first.name),
        ("released", first.name),
        ("assigned", second.name),
    ]


@pytest.mark.parametrize("how", ["confirm_and_close", "leave_with_confirm"])
def test_last_confirm_before_leaving_is_not_lost(harness: GroupHarness, how: str) -> None:
    harness.fill(5)
    first, second = harness.members(2, lease_ttl=LONG_S)
    assert first.poll() == [0, 1, 2, 3, 4]
    harness.fill(1)
    first.tell(how)
    assert second.poll() == [5]


def test_subscriber_in_a_forked_child_refuses_every_call_and_the_childs_exit_changes_nothing(
    harness: GroupHarness,
) -> None:
    harness.fill(5)
    first, second = harness.members(2, lease_ttl=LONG_S)
    assert first.poll(max_records=2) == [0, 1]
    term = first.state.term
    *told, code = first.ask("fork")
    assert told == ["MeteorError"] * 5
    assert code == "0"
    assert harness.owner == first.name
    assert first.poll() == [2, 3, 4]
    assert first.confirm() == 5
    assert first.state == (True, term, 5, 5)
    assert second.poll(0) == []
    assert len(harness.events()) == 1


# Stopped and resumed


def test_member_stopped_between_poll_and_confirm_confirms_nothing(harness: GroupHarness) -> None:
    harness.fill(10)
    first, second = harness.members(2, lease_ttl=SHORT_S)
    assert first.poll() == list(range(10))
    first.pause()
    assert second.poll(20, max_records=5) == [0, 1, 2, 3, 4]
    assert second.confirm() == 5
    first.resume()
    with pytest.raises(Refused, match="LeaseLost"):
        first.confirm()
    assert harness.confirmed == 5
    assert first.poll(0) == []
    assert first.state.assigned is False
    assert second.confirm() == 5
    assert second.poll() == [5, 6, 7, 8, 9]
    assert second.confirm(7) == 8
    second.ask("close")
    assert first.poll() == [8, 9]  # from the confirmed offset
    assert first.confirm() == 10


def test_member_stopped_in_a_poll_does_not_get_the_new_owners_records(
    harness: GroupHarness,
) -> None:
    first, second = harness.members(2, lease_ttl=SHORT_S)
    first.poll(0)
    first.tell("poll", 20.0, 10_000)
    blocked(harness.redis)
    first.pause()
    harness.fill(5)  # the server replies to the stopped member's poll
    assert second.poll(20) == [0, 1, 2, 3, 4]
    first.resume()
    # The first member waits for the lease.
    eventually(lambda: harness.redis.info("clients")["blocked_clients"] == 1)
    assert second.confirm() == 5
    second.ask("close")
    harness.fill(1)
    assert first.answer() == [5]


def test_loop_in_a_stopped_member_ends_at_its_next_confirm(harness: GroupHarness) -> None:
    harness.fill(50)
    first, second = harness.members(2, lease_ttl=SHORT_S)
    first.tell("take", 50, 0.05)
    eventually(lambda: (harness.confirmed or 0) >= 3)
    first.pause()
    begun = second.poll(20)
    assert begun[0] == harness.confirmed
    assert second.confirm() == 50
    first.resume()
    with pytest.raises(Refused, match="LeaseLost"):
        first.answer()
    assert harness.confirmed == 50
    assert first.state.assigned is False


def test_stopped_member_keeps_the_lease_if_no_other_member_wanted_it(harness: GroupHarness) -> None:
    harness.fill(10)
    first = harness.member(lease_ttl=SHORT_S)
    assert first.poll(max_records=4) == [0, 1, 2, 3]
    term = first.state.term
    first.pause()
    eventually(lambda: harness.owner is None)
    first.resume()
    assert first.confirm() == 4
    assert first.poll() == [4, 5, 6, 7, 8, 9]
    assert first.state == (True, term, 10, 4)
    assert len(harness.events()) == 1


# Hung


def test_hung_member_is_replaced_and_does_not_compete_until_it_polls(harness: GroupHarness) -> None:
    harness.fill(5)
    first = harness.member(lease_ttl=LONG_S, max_poll_interval=0.5)
    second = harness.member(lease_ttl=LONG_S)
    assert first.name != second.name  # waits until both members are ready
    assert first.poll(max_records=3) == [0, 1, 2]
    first.tell("hang", 1.5)
    assert second.poll(40) == [0, 1, 2, 3, 4]
    assert second.confirm(0) == 1
    second.ask("close")
    first.answer()
    # The lease is free: a hung member does not compete for it.
    assert (harness.owner, len(harness.events())) == (None, 4)
    with pytest.raises(Refused, match="LeaseLost"):
        first.confirm(2)
    assert first.poll() == [1, 2, 3, 4]
