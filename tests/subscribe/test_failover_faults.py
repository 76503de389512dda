"""Member processes cope with a group that is moved or deleted, and a server that is full or killed.

``test_group_admin`` and ``test_group_faults`` cover the same cases within one process.
"""

from __future__ import annotations

import pytest

import meteor_py as meteor
from tests.conftest import ServerFactory
from tests.support.group_members import GROUP, GroupHarness, Member, Refused
from tests.support.readers import blocked
from tests.support.waiting import eventually

#: Lease TTLs in seconds: one that expires during a test, and one that does not.
SHORT_S = 0.8
LONG_S = 60.0


def singles(harness: GroupHarness, number: int) -> None:
    """Publish each record in its own frame, so that a poll can fetch some without the others."""
    harness.fill(*[1] * number)


def wait_in_poll(harness: GroupHarness, member: Member, waiting: int = 1) -> None:
    """Make the member poll, and return once ``waiting`` clients are blocked on the server."""
    member.tell("poll", 40.0, 10_000)
    blocked(harness.redis, waiting)


# Moved


@pytest.mark.parametrize("then", ["polls", "confirms"])
def test_owner_continues_at_the_new_offset_if_the_group_is_moved(
    harness: GroupHarness, then: str
) -> None:
    singles(harness, 10)
    first = harness.member(lease_ttl=LONG_S)
    for expected in ([0, 1], [2, 3]):
        assert first.poll(max_records=2) == expected
    old = first.state.term
    assert harness.stream.seek_group(GROUP, 1, force=True) == 1
    if then == "confirms":
        with pytest.raises(Refused, match="LeaseLost"):
            first.confirm()
    assert first.poll(max_records=2) == [1, 2]  # not [4, 5], although its lease was valid
    with pytest.raises(Refused, match="LeaseLost"):
        first.confirm(3)  # returned in the earlier term
    assert harness.confirmed == 1
    new = first.state.term
    assert old is not None
    assert new is not None
    assert new > old
    assert first.poll() == [3, 4, 5, 6, 7, 8, 9]
    assert first.confirm() == harness.confirmed == 10
    assert [event.what for event in harness.events()] == ["assigned", "sought", "assigned"]


def test_waiting_poll_starts_at_the_new_offset_if_the_group_is_moved(
    harness: GroupHarness,
) -> None:
    harness.fill(10)
    first = harness.member(lease_ttl=LONG_S)
    assert first.poll() == list(range(10))
    wait_in_poll(harness, first)
    harness.stream.seek_group(GROUP, 6, force=True)
    harness.fill(1)
    assert first.answer() == [6, 7, 8, 9, 10]
    assert first.confirm() == 11


def test_moved_group_goes_to_the_waiting_member(
    harness: GroupHarness,
) -> None:
    singles(harness, 10)
    first, second = harness.members(2, lease_ttl=LONG_S)
    assert first.poll(max_records=2) == [0, 1]
    wait_in_poll(harness, second)
    harness.stream.seek_group(GROUP, 7, force=True)
    assert second.answer()[0] == 7  # at once, woken by the event
    assert first.poll(0) == []
    assert first.state.assigned is False
    with pytest.raises(Refused, match="LeaseLost"):
        first.confirm(1)
    assert harness.confirmed == 7
    assert second.confirm(8) == 9
    second.ask("close")
    assert first.poll() == [9]
    assert first.confirm() == 10


def test_records_fetched_before_a_move_cannot_be_confirmed(harness: GroupHarness) -> None:
    harness.fill(10)
    harness.fill(5)
    first = harness.member(lease_ttl=LONG_S)
    assert first.poll(max_records=4) == [0, 1, 2, 3]
    harness.stream.seek_group(GROUP, 2, force=True)
    harness.fill(5)
    given = first.poll()
    if given[0] == 4:
        assert given[-1] < 15  # only records that the member had fetched before the move
        with pytest.raises(Refused, match="LeaseLost"):
            first.confirm()
        given = first.poll()
    assert given == list(range(2, 20))
    assert (harness.confirmed, first.confirm()) == (2, 20)


@pytest.mark.parametrize("confirms", [True, False])
def test_poll_loop_continues_at_the_new_offset_if_the_group_is_moved(
    harness: GroupHarness, confirms: bool
) -> None:
    singles(harness, 40)
    first = harness.member(lease_ttl=LONG_S)
    assert first.step(4) == [0, 1, 2, 3]  # the loop has fetched more than these, but not all
    harness.stream.seek_group(GROUP, 1, force=True)
    if confirms:
        with pytest.raises(Refused, match="LeaseLost"):
            first.confirm()
        assert first.step() == [1]
    else:
        handed: list[int] = []
        while 1 not in handed:
            handed += first.step()
        assert handed[:-1] == list(range(4, 3 + len(handed)))
        assert max(handed) < 16, "the loop returned more than the 16 fetched frames"
    assert first.confirm() == harness.confirmed == 2
    assert first.step(38) == list(range(2, 40))
    assert first.confirm() == 40


# Deleted


def test_poll_loop_ends_after_fetched_records_if_group_is_deleted(harness: GroupHarness) -> None:
    singles(harness, 40)
    first = harness.member(lease_ttl=LONG_S)
    handed = first.step(4)
    harness.stream.delete_group(GROUP, force=True)
    with pytest.raises(Refused, match="GroupNotFound"):  # noqa: PT012
        while len(handed) < 40:
            handed += first.step()
    assert handed == list(range(len(handed)))
    assert len(handed) <= 16
    assert harness.stream.groups() == []


# The server is full


def test_full_server_still_confirms_renews_and_replaces_a_dead_member(
    private_server: ServerFactory,
) -> None:
    server = private_server("--maxmemory-policy", "noeviction")
    with GroupHarness(server.url) as harness:
        harness.fill(10)
        first, second = harness.members(2, lease_ttl=SHORT_S)
        assert first.poll(max_records=5) == [0, 1, 2, 3, 4]
        term = first.state.term
        harness.redis.config_set("maxmemory", 1)
        with (
            pytest.raises(meteor.OutOfMemory),
            harness.stream.publisher(delivery_timeout=0.5) as pub,
        ):
            pub.publish(b"x" * 1000).result(10)
        assert first.confirm(2) == 3
        assert second.poll(1.8 * SHORT_S) == []  # the lease is renewed
        assert first.confirm() == harness.confirmed == 5
        assert first.state == (True, term, 5, 5)
        wait_in_poll(harness, second)
        first.kill()
        assert second.answer() == [5, 6, 7, 8, 9]
        assert second.confirm() == harness.confirmed == 10
        assert [event.member for event in harness.events("assigned")] == [first.name, second.name]


# The server is killed


def test_group_keeps_its_owner_if_a_killed_server_restarts_before_the_lease_expires(
    private_server: ServerFactory,
) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    with GroupHarness(server.url) as harness:
        harness.fill(10)
        first, second = harness.members(2, lease_ttl=20)
        assert first.poll(max_records=4) == [0, 1, 2, 3]
        term = first.state.term
        second.tell("poll", 100.0, 10_000)
        blocked(harness.redis)
        assert first.confirm(1) == 2
        for end in (4, 6):  # the server is killed just before a confirm
            server.kill()
            first.tell("confirm", None)
            server.start()
            assert (harness.confirmed or 0) in (end - 2, end)
            assert first.answer() == harness.confirmed == end
            assert first.poll(20, max_records=2) == [end, end + 1]
        assert first.confirm() == 8
        server.kill()  # right after a confirm
        server.start()
        assert harness.confirmed == 8
        assert first.poll(20) == [8, 9]
        wait_in_poll(harness, first, 2)
        server.kill()  # while the owner waits in a poll
        server.start()
        harness.fill(1)
        assert first.answer() == [10]
        assert first.confirm() == harness.confirmed == 11
        assert first.state == (True, term, 11, 11)
        assert [(event.what, event.member) for event in harness.events()] == [
            ("assigned", first.name)
        ]
        first.ask("close")
        harness.fill(1)
        assert second.answer() == [11]


# Where a group starts


_PUBLISHES = """
import sys
import meteor_py as meteor
from tests.support.readers import fill

with meteor.connect(sys.argv[1]) as m:
    stream = m.stream("orders", create=False)
    while True:
        fill(stream, *[5] * 20)
"""


def test_earliest_is_resolved_at_the_first_read_and_then_kept(
    url: str,
) -> None:
    with GroupHarness(url, capacity=50) as harness:
        harness.program(_PUBLISHES)

        def wait_for_more(records: int) -> int:
            """Wait until ``records`` more are published, and return the total."""
            wanted = harness.stream.describe().next + records
            eventually(lambda: harness.stream.describe().next >= wanted, 30)
            return wanted

        written = wait_for_more(200)
        first, second = harness.members(2, lease_ttl=SHORT_S, initial_offset="earliest")
        written = wait_for_more(200)  # the former earliest record is gone
        given = first.poll(20)
        assert given == list(range(given[0], given[-1] + 1))
        assert given[0] > written - 200
        first.kill()
        wait_for_more(200)  # the ring drops records that the first member has not confirmed
        with pytest.raises(Refused, match=r"RecordsLost: Records \d+ to"):
            second.poll(20)


# Work that takes longer than the lease


@pytest.mark.parametrize("slow", ["poll", "batch", "loop"])
def test_slow_work_keeps_the_lease_while_another_member_waits(
    harness: GroupHarness, slow: str
) -> None:
    first, second = harness.members(2, lease_ttl=SHORT_S)
    assert first.poll(0) == []
    term = first.state.term
    wait_in_poll(harness, second)
    if slow == "poll":
        assert first.poll(1.8 * SHORT_S) == []
        harness.fill(3)
        assert first.poll() == [0, 1, 2]
    else:
        harness.fill(3)
    if slow == "batch":
        assert first.poll() == [0, 1, 2]
        first.ask("hang", 1.8 * SHORT_S)
    if slow == "loop":
        assert first.ask("take", 3, 0.7 * SHORT_S) == [0, 1, 2]
    assert first.confirm() == 3
    assert first.state == (True, term, 3, 3)
    assert [(event.what, event.member) for event in harness.events()] == [("assigned", first.name)]
    first.ask("close")
    harness.fill(1)
    assert second.answer() == [3]
