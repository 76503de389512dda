"""Terms begin and end correctly while members are healthy, slow or hung."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.subscribe.group_session import GroupSession
from tests.support.group_members import GroupHarness
from tests.support.readers import background, blocked, check_values, drain
from tests.support.waiting import eventually

# on_assigned


def test_on_assigned_is_called_once_per_term(harness: GroupHarness) -> None:
    harness.fill(4)
    terms: list[int | None] = []
    sub = harness.subscriber(lease_ttl=60, on_assigned=lambda sub: terms.append(sub.term))
    for _ in range(3):
        sub.poll(5, max_records=1)
    assert terms == [sub.term]
    sub.deactivate()
    sub.poll(0)
    assert len(terms) == 1
    sub.reactivate()
    sub.poll(5)
    assert terms == [terms[0], sub.term]
    assert sub.term == harness.events("assigned")[-1].term
    assert [event.term for event in harness.events("assigned")] == terms
    assert terms[0] != terms[1]


def test_term_starts_at_the_offset_that_on_assigned_returns(harness: GroupHarness) -> None:
    harness.fill(10)
    starts = iter([7, 2, None])
    sub = harness.subscriber(lease_ttl=60, on_assigned=lambda sub: next(starts))
    assert drain(sub) == [7, 8, 9]
    sub.confirm(7).result(5)
    for expected in ([2, 3, 4, 5, 6, 7, 8, 9], [8, 9]):
        sub.deactivate()
        sub.reactivate()
        assert drain(sub) == expected
    assert harness.confirmed == 8


def test_on_assigned_that_raises_is_called_again_at_the_next_poll(harness: GroupHarness) -> None:
    harness.fill(3)
    calls: list[int | None] = []

    def on_assigned(sub: meteor.Subscriber) -> int:
        calls.append(sub.term)
        if len(calls) < 3:
            raise KeyError("the database is down")
        return 1

    sub = harness.subscriber(lease_ttl=60, on_assigned=on_assigned)
    for _ in range(2):
        with pytest.raises(KeyError):
            sub.poll(5)
    assert drain(sub) == [1, 2]
    assert calls == [sub.term] * 3  # in the same term


@pytest.mark.parametrize(("start", "error"), [(4, ValueError), (-1, ValueError), ("1", TypeError)])
def test_on_assigned_must_return_an_offset_that_exists(
    harness: GroupHarness, start: object, error: type[Exception]
) -> None:
    harness.fill(3)
    answers = [start, start, 2]
    sub = harness.subscriber(lease_ttl=60, on_assigned=lambda sub: answers.pop(0))
    for _ in range(2):
        with pytest.raises(error):
            sub.poll(5)
    assert drain(sub) == [2]
    assert harness.confirmed is None


def test_consumer_that_stores_its_own_offsets_sees_each_record_once(harness: GroupHarness) -> None:
    harness.fill(30)
    output: list[int] = []
    subs = [harness.subscriber(lease_ttl=60, on_assigned=lambda sub: len(output)) for _ in range(2)]
    while len(output) < 30:
        for sub in subs:
            output += check_values(sub.poll(5, max_records=4))  # never confirmed
            sub.deactivate()
            sub.reactivate()
    assert output == list(range(30))


# Regaining the lease


def test_member_that_regains_the_lease_starts_at_the_confirmed_offset(
    harness: GroupHarness,
) -> None:
    harness.fill(10)
    first, second = harness.subscriber(lease_ttl=60), harness.subscriber(lease_ttl=60)
    assert check_values(first.poll(5, max_records=5)) == [0, 1, 2, 3, 4]
    first.deactivate()
    assert check_values(second.poll(5, max_records=8)) == list(range(8))
    second.confirm(6).result(5)
    second.deactivate()
    first.reactivate()  # the member has not polled, so it has not seen the other term
    assert check_values(first.poll(5)) == [7, 8, 9]
    assert first.confirm().result(5) == 10


def test_deactivated_member_reads_unconfirmed_records_again(harness: GroupHarness) -> None:
    harness.fill(10)
    sub = harness.subscriber(lease_ttl=60)
    sub.poll(5, max_records=5)
    sub.confirm(1)
    sub.deactivate()
    sub.reactivate()
    assert check_values(sub.poll(5)) == list(range(2, 10))


def test_terms_increase_even_if_the_server_clock_moved_back(harness: GroupHarness) -> None:
    sub = harness.subscriber(lease_ttl=60)
    sub.poll(0)
    assert sub.term is not None
    future = sub.term + 1_000_000_000
    sub.deactivate()
    harness.set_fields(term=future)
    sub.reactivate()
    sub.poll(0)
    assert sub.term == future + 1


# Slow and hung members


def test_poll_longer_than_lease_and_max_poll_interval_keeps_the_lease(
    harness: GroupHarness,
) -> None:
    sub = harness.subscriber(lease_ttl=0.6, max_poll_interval=0.3)
    other = harness.subscriber(lease_ttl=0.6)
    sub.poll(0)
    term = sub.term
    with background(lambda stop: _poll_until(other, stop)):
        assert len(sub.poll(1.2)) == 0
        assert sub.term == term
        assert harness.owner == sub.member
    assert len(harness.events()) == 1


def test_hung_member_loses_the_lease_and_does_not_compete_before_it_polls(
    harness: GroupHarness,
) -> None:
    harness.fill(3)
    hung = harness.subscriber(lease_ttl=60, max_poll_interval=0.3)
    other = harness.subscriber(lease_ttl=60, max_poll_interval=60)
    assert check_values(hung.poll(5)) == [0, 1, 2]
    assert check_values(other.poll(20)) == [0, 1, 2]
    with pytest.raises(meteor.LeaseLost):
        hung.confirm().result(5)
    assert harness.confirmed is None
    other.deactivate()  # free again, but the hung member does not compete
    eventually(lambda: len(harness.events()) == 4)
    assert [(event.what, event.member) for event in harness.events()] == [
        ("assigned", hung.member),
        ("released", hung.member),
        ("assigned", other.member),
        ("released", other.member),
    ]
    assert harness.owner is None
    assert check_values(hung.poll(5)) == [0, 1, 2]
    assert harness.owner == hung.member


def test_hung_member_continues_its_term_if_no_other_member_wanted_the_lease(
    harness: GroupHarness,
) -> None:
    harness.fill(4)
    calls: list[int | None] = []
    sub = harness.subscriber(
        lease_ttl=60, max_poll_interval=0.2, on_assigned=lambda sub: calls.append(sub.term)
    )
    assert check_values(sub.poll(5, max_records=2)) == [0, 1]
    term = sub.term
    eventually(lambda: harness.owner is None)
    assert not sub.is_assigned
    assert sub.confirm(0).result(5) == 1  # accepted, because no other term has begun
    assert check_values(sub.poll(5)) == [2, 3]
    assert (sub.term, calls, harness.owner) == (term, [term], sub.member)
    assert sub.confirm().result(5) == 4


def test_slow_loop_continues_where_it_left_off(harness: GroupHarness) -> None:
    harness.fill(4)
    sub = harness.subscriber(lease_ttl=60, max_poll_interval=0.1)
    seen: list[int] = []
    for record in sub:
        seen.append(record.offset)
        eventually(lambda: harness.owner is None)
        if record.offset == 3:
            break
    assert seen == [0, 1, 2, 3]
    assert {event.term for event in harness.events()} == {sub.term}


def test_loop_without_the_lease_yields_nothing(harness: GroupHarness) -> None:
    harness.fill(10)
    first = harness.subscriber(lease_ttl=60, max_poll_interval=0.2)
    second = harness.subscriber(lease_ttl=60)
    records = iter(first)
    assert [next(records).offset for _ in range(3)] == [0, 1, 2]
    assert drain_after(second) == list(range(10))
    second.confirm(6).result(5)
    second.close()
    assert next(records).offset == 7


# Other threads


def test_reactivate_wakes_a_poll(harness: GroupHarness) -> None:
    harness.fill(1)
    sub = harness.subscriber(lease_ttl=60)
    sub.deactivate()

    def reactivate(stop: threading.Event) -> None:
        eventually(lambda: sub._fetcher.session and sub._fetcher.session.polling)
        sub.reactivate()

    with background(reactivate):
        assert check_values(sub.poll(60)) == [0]


@pytest.mark.parametrize("holding", [True, False])
def test_deactivate_takes_the_lease_from_a_poll_in_another_thread(
    harness: GroupHarness, holding: bool
) -> None:
    sub, other = harness.subscriber(lease_ttl=60), harness.subscriber(lease_ttl=60)
    if not holding:
        other.poll(0)
    got: list[int] = []
    with background(lambda stop: got.extend(sub.poll(1.2).offsets)):
        blocked(harness.redis)
        sub.deactivate()
        assert not sub.is_assigned
        if holding:
            other.poll(0)
        assert harness.owner == other.member
        harness.fill(2)
        assert check_values(other.poll(5)) == [0, 1]
    assert got == []


@pytest.mark.parametrize("holding", [True, False])
@pytest.mark.parametrize("how", ["poll", "loop"])
def test_close_ends_a_wait_in_another_thread_at_once(
    harness: GroupHarness, holding: bool, how: str
) -> None:
    other = harness.subscriber(lease_ttl=60)
    began = time.monotonic()
    for _ in range(5):
        sub = harness.subscriber(lease_ttl=60)
        if not holding:
            other.poll(0)
        got: list[object] = []
        with background(partial(_read_all, sub, how == "loop", got)) as thread:
            blocked(harness.redis)
            sub.close()
            thread.join(10)
            assert not thread.is_alive()
        assert got == []
        assert harness.owner == (None if holding else other.member)
        with pytest.raises(meteor.MeteorError, match="closed"):
            sub.poll(0)
    assert time.monotonic() - began < 8  # five blocking reads would last ten seconds


def test_members_can_join_and_leave_quickly(harness: GroupHarness) -> None:
    for number in range(50):
        harness.fill(1)
        with harness.stream.subscriber(group=harness.group, lease_ttl=60) as sub:
            assert check_values(sub.poll(5)) == [number]
            sub.confirm()


def test_session_stopped_while_it_chooses_its_next_job_ends_at_once(
    harness: GroupHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = GroupSession.next_job

    def stop_and_look(session: GroupSession, retry_at: float) -> Any:
        session.stop()
        return look(session, retry_at)

    monkeypatch.setattr(GroupSession, "next_job", stop_and_look)
    harness.subscriber(lease_ttl=60).poll(0)
    eventually(lambda: harness.events("released"))
    assert harness.owner is None


# Closed


def test_closed_member_leaves_no_connection_behind(harness: GroupHarness) -> None:
    holder = harness.subscriber(lease_ttl=60)
    holder.poll(0)
    before = _connections(harness)
    for _ in range(3):
        waiter = harness.subscriber(lease_ttl=60)
        waiter.poll(0.05)
        waiter.close()
    eventually(lambda: _connections(harness) <= before)
    holder.close()
    eventually(lambda: _connections(harness) < before)


def _read_all(sub: meteor.Subscriber, loop: bool, got: list[object], stop: threading.Event) -> None:
    got.extend(sub if loop else sub.poll(60))


def _connections(harness: GroupHarness) -> int:
    found: int = harness.redis.info("clients")["connected_clients"]
    return found


def _poll_until(sub: meteor.Subscriber, stop: threading.Event) -> None:
    while not stop.is_set():
        assert len(sub.poll(0.1)) == 0


def drain_after(sub: meteor.Subscriber) -> list[int]:
    """Wait for the lease, then return the offsets of all records."""
    deadline = time.monotonic() + 20
    while not sub.is_assigned and time.monotonic() < deadline:
        batch = sub.poll(1)
        if batch:
            return check_values(batch) + drain(sub)
    return drain(sub)
