"""Members in processes of their own, while their group is moved or deleted, or the server fails.

`test_group_admin` and `test_group_faults` show the same inside one process, and more of it.
"""

from __future__ import annotations

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from tests.conftest import ServerFactory
from tests.support.group_members import GROUP, STREAM, Crew, Member, Refused
from tests.support.readers import blocked
from tests.support.waiting import eventually

#: A lease that a test waits out, and one that it cannot have waited out.
SHORT_S = 1.2
LONG_S = 60.0


def singles(crew: Crew, number: int) -> None:
    """Records in frames of their own: a poll for some of them fetches these and no more."""
    crew.fill(*[1] * number)


def wait_in_poll(crew: Crew, member: Member, waiting: int = 1) -> None:
    """Let it wait in a poll; returns when so many do so inside the server."""
    member.tell("poll", 40.0, 10_000)
    blocked(crew.redis, waiting)


# Moved


def test_a_group_that_another_process_reads_for_is_neither_moved_nor_deleted(crew: Crew) -> None:
    singles(crew, 10)
    first = crew.member(lease_ttl=LONG_S)
    assert first.poll(max_records=2) == [0, 1]
    assert first.confirm() == 2
    before = crew.redis.hgetall(keys.group(STREAM, GROUP))
    term = first.state.term
    for change in (
        lambda: crew.stream.seek_group(GROUP, 7),
        lambda: crew.stream.delete_group(GROUP),
    ):
        with pytest.raises(meteor.GroupActive) as caught:
            change()
        assert caught.value.owner == first.name
        assert first.name in str(caught.value)
    assert crew.redis.hgetall(keys.group(STREAM, GROUP)) == before
    assert first.poll(max_records=2) == [2, 3]
    assert first.confirm() == 4
    assert first.state == (True, term, 4, 4)
    assert len(crew.events()) == 1


@pytest.mark.parametrize("then", ["polls", "confirms"])
def test_an_owner_whose_group_was_moved_goes_on_at_the_new_place(crew: Crew, then: str) -> None:
    singles(crew, 10)
    first = crew.member(lease_ttl=LONG_S)
    for expected in ([0, 1], [2, 3]):
        assert first.poll(max_records=2) == expected
    old = first.state.term
    assert crew.stream.seek_group(GROUP, 1, force=True) == 1
    if then == "confirms":
        with pytest.raises(Refused, match="LeaseLost"):
            first.confirm()
    assert first.poll(max_records=2) == [1, 2]  # not [4, 5], though its lease had a long life
    with pytest.raises(Refused, match="LeaseLost"):
        first.confirm(3)  # it had that before
    assert crew.confirmed == 1
    new = first.state.term
    assert old is not None
    assert new is not None
    assert new > old
    assert first.poll() == [3, 4, 5, 6, 7, 8, 9]
    assert first.confirm() == crew.confirmed == 10
    assert [event.what for event in crew.events()] == ["assigned", "sought", "assigned"]


def test_a_poll_that_waits_while_the_group_is_moved_is_not_given_what_ends_its_wait(
    crew: Crew,
) -> None:
    crew.fill(10)
    first = crew.member(lease_ttl=LONG_S)
    assert first.poll() == list(range(10))
    wait_in_poll(crew, first)
    crew.stream.seek_group(GROUP, 6, force=True)
    crew.fill(1)
    assert first.answer() == [6, 7, 8, 9, 10]
    assert first.confirm() == 11


def test_a_group_that_is_moved_goes_to_who_waits_and_its_owner_is_given_nothing(
    crew: Crew,
) -> None:
    singles(crew, 10)
    first, second = crew.members(2, lease_ttl=LONG_S)
    assert first.poll(max_records=2) == [0, 1]
    wait_in_poll(crew, second)
    crew.stream.seek_group(GROUP, 7, force=True)
    assert second.answer()[0] == 7  # at once, by the event
    assert first.poll(0) == []
    assert first.state.assigned is False
    with pytest.raises(Refused, match="LeaseLost"):
        first.confirm(1)
    assert crew.confirmed == 7
    assert second.confirm(8) == 9
    second.ask("close")
    assert first.poll() == [9]
    assert first.confirm() == 10


def test_records_fetched_before_a_move_may_still_be_given_but_not_confirmed(crew: Crew) -> None:
    crew.fill(10)
    crew.fill(5)
    first = crew.member(lease_ttl=LONG_S)
    assert first.poll(max_records=4) == [0, 1, 2, 3]
    crew.stream.seek_group(GROUP, 2, force=True)
    crew.fill(5)
    given = first.poll()
    if given[0] == 4:
        assert given[-1] < 15  # what was there when it fetched
        with pytest.raises(Refused, match="LeaseLost"):
            first.confirm()
        given = first.poll()
    assert given == list(range(2, 20))
    assert (crew.confirmed, first.confirm()) == (2, 20)


@pytest.mark.parametrize("confirms", [True, False])
def test_a_loop_whose_group_is_moved_goes_on_there(crew: Crew, confirms: bool) -> None:
    singles(crew, 40)
    first = crew.member(lease_ttl=LONG_S)
    assert first.step(4) == [0, 1, 2, 3]  # it fetches some more, not all
    crew.stream.seek_group(GROUP, 1, force=True)
    if confirms:
        with pytest.raises(Refused, match="LeaseLost"):
            first.confirm()
        assert first.step() == [1]
    else:
        handed: list[int] = []
        while 1 not in handed:
            handed += first.step()
        assert handed[:-1] == list(range(4, 3 + len(handed)))
        assert max(handed) < 16, "more than the 16 frames that it had fetched"
    assert first.confirm() == crew.confirmed == 2
    assert first.step(38) == list(range(2, 40))
    assert first.confirm() == 40


# Deleted


def test_members_of_a_deleted_group_are_told_so_in_their_next_polls(crew: Crew) -> None:
    singles(crew, 10)
    first, second = crew.members(2, lease_ttl=LONG_S)
    assert first.poll(max_records=2) == [0, 1]
    wait_in_poll(crew, second)
    crew.stream.delete_group(GROUP, force=True)
    with pytest.raises(Refused, match="GroupNotFound"):
        second.answer()  # at once, by the event
    for member in (first, second, first, second):
        with pytest.raises(Refused, match="GroupNotFound"):
            member.poll()
        with pytest.raises(Refused, match="GroupNotFound"):
            member.step()
    with pytest.raises(Refused, match=r"GroupNotFound|LeaseLost"):
        first.confirm()
    assert crew.stream.groups() == []  # nobody has begun it anew


def test_a_loop_whose_group_is_deleted_ends_with_what_it_had_fetched(crew: Crew) -> None:
    singles(crew, 40)
    first = crew.member(lease_ttl=LONG_S)
    handed = first.step(4)
    crew.stream.delete_group(GROUP, force=True)
    with pytest.raises(Refused, match="GroupNotFound"):  # noqa: PT012
        while len(handed) < 40:
            handed += first.step()
    assert handed == list(range(len(handed)))
    assert len(handed) <= 16
    assert crew.stream.groups() == []


# The server is full


def test_a_full_server_confirms_renews_and_lets_a_dead_member_be_replaced(
    private_server: ServerFactory,
) -> None:
    server = private_server("--maxmemory-policy", "noeviction")
    with Crew(server.url) as crew:
        crew.fill(10)
        first, second = crew.members(2, lease_ttl=SHORT_S)
        assert first.poll(max_records=5) == [0, 1, 2, 3, 4]
        term = first.state.term
        crew.redis.config_set("maxmemory", 1)
        with pytest.raises(meteor.OutOfMemory), crew.stream.publisher(delivery_timeout=0.5) as pub:
            pub.publish(b"x" * 1000).result(10)
        assert first.confirm(2) == 3
        assert second.poll(2 * SHORT_S) == []  # the lease is renewed
        assert first.confirm() == crew.confirmed == 5
        assert first.state == (True, term, 5, 5)
        wait_in_poll(crew, second)
        first.kill()
        assert second.answer() == [5, 6, 7, 8, 9]
        assert second.confirm(6) == 7
        third = crew.member(lease_ttl=SHORT_S)
        assert third.poll(0) == []
        second.kill()
        assert third.poll(20) == [7, 8, 9]
        assert third.confirm() == crew.confirmed == 10
        assert [event.member for event in crew.events("assigned")] == [
            *(first.name, second.name, third.name)
        ]


# The server is killed


def test_a_killed_server_that_comes_back_in_time_leaves_the_group_to_its_owner(
    private_server: ServerFactory,
) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    with Crew(server.url) as crew:
        crew.fill(10)
        first, second = crew.members(2, lease_ttl=20)
        assert first.poll(max_records=4) == [0, 1, 2, 3]
        term = first.state.term
        second.tell("poll", 100.0, 10_000)
        blocked(crew.redis)
        assert first.confirm(1) == 2
        for end in (4, 6):  # killed before a confirm
            server.kill()
            first.tell("confirm", None)
            server.start()
            assert (crew.confirmed or 0) in (end - 2, end)
            assert first.answer() == crew.confirmed == end
            assert first.poll(20, max_records=2) == [end, end + 1]
        assert first.confirm() == 8
        server.kill()  # right behind one
        server.start()
        assert crew.confirmed == 8
        assert first.poll(20) == [8, 9]
        wait_in_poll(crew, first, 2)
        server.kill()  # under one that waits in a poll
        server.start()
        crew.fill(1)
        assert first.answer() == [10]
        assert first.confirm() == crew.confirmed == 11
        assert first.state == (True, term, 11, 11)
        assert [(event.what, event.member) for event in crew.events()] == [("assigned", first.name)]
        first.ask("close")
        crew.fill(1)
        assert second.answer() == [11]


# Where a group begins


def test_a_process_that_wants_a_confirmed_offset_needs_one_of_another_process(crew: Crew) -> None:
    crew.fill(10)
    first = crew.member(lease_ttl=LONG_S)
    early = crew.member(initial_offset="none", group="unknown")
    with pytest.raises(AssertionError, match="NoConfirmedOffset"):
        assert early.name
    assert first.poll(max_records=6) == [0, 1, 2, 3, 4, 5]
    unconfirmed = crew.member(initial_offset="none")
    with pytest.raises(AssertionError, match="NoConfirmedOffset"):
        assert unconfirmed.name
    assert [group.name for group in crew.stream.groups()] == [GROUP]
    assert first.confirm(3) == 4
    first.ask("close")
    assert crew.member(initial_offset="none").poll() == [4, 5, 6, 7, 8, 9]


_PUBLISHES = """
import sys
import meteor_py as meteor
from tests.support.readers import fill

with meteor.connect(sys.argv[1]) as m:
    stream = m.stream("orders", create=False)
    while True:
        fill(stream, *[5] * 20)
"""


def test_the_earliest_of_a_ring_that_another_process_writes_is_found_and_then_kept(
    url: str,
) -> None:
    with Crew(url, capacity=50) as crew:
        crew.program(_PUBLISHES)

        def moves_on(records: int) -> int:
            """Wait until so many more were published; returns how many these are in all."""
            wanted = crew.stream.describe().next + records
            eventually(lambda: crew.stream.describe().next >= wanted, 30)
            return wanted

        written = moves_on(200)
        first, second = crew.members(2, lease_ttl=SHORT_S, initial_offset="earliest")
        written = moves_on(200)  # what was the earliest then is gone
        given = first.poll(20)
        assert given == list(range(given[0], given[-1] + 1))
        assert given[0] > written - 200
        first.kill()
        moves_on(200)
        with pytest.raises(Refused, match=r"RecordsLost: Records \d+ to"):  # unconfirmed, and gone
            second.poll(20)


# A handler that raises


def test_a_record_that_a_handler_raised_for_is_the_next_process_s_at_once(crew: Crew) -> None:
    crew.fill(6)
    first, second = crew.members(2, lease_ttl=LONG_S, auto_confirm=True)
    first.tell("receive", 3)
    assert first.answer() == "ValueError('no 3')"  # it lives on, and closes nothing
    assert second.poll() == [3, 4, 5]
    assert crew.confirmed == 3
    assert [(event.what, event.member) for event in crew.events()] == [
        ("assigned", first.name),
        ("released", first.name),
        ("assigned", second.name),
    ]


# Longer than the lease


@pytest.mark.parametrize("slow", ["poll", "batch", "loop"])
def test_what_takes_longer_than_the_lease_keeps_it_though_another_waits(
    crew: Crew, slow: str
) -> None:
    first, second = crew.members(2, lease_ttl=SHORT_S)
    assert first.poll(0) == []
    term = first.state.term
    wait_in_poll(crew, second)
    if slow == "poll":
        assert first.poll(2 * SHORT_S) == []
        crew.fill(3)
        assert first.poll() == [0, 1, 2]
    else:
        crew.fill(3)
    if slow == "batch":
        assert first.poll() == [0, 1, 2]
        first.ask("hang", 2 * SHORT_S)
    if slow == "loop":
        assert first.ask("take", 3, 1.1 * SHORT_S) == [0, 1, 2]
    assert first.confirm() == 3
    assert first.state == (True, term, 3, 3)
    assert [(event.what, event.member) for event in crew.events()] == [("assigned", first.name)]
    first.ask("close")
    crew.fill(1)
    assert second.answer() == [3]
