"""A group reports lost records, and continues after skip_gap() or with on_gap="skip"."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from tests.support.group_members import GROUP, STREAM, GroupHarness, discard
from tests.support.proxied_stream import ProxiedStream, ReplicatedStream
from tests.support.readers import background, check_values, drain, fill
from tests.support.waiting import eventually


@pytest.fixture
def harness(url: str) -> Iterator[GroupHarness]:
    with GroupHarness(url, capacity=10) as harness:
        yield harness


def lost(sub: meteor.Subscriber) -> tuple[int, int]:
    with pytest.raises(meteor.RecordsLost) as caught:
        sub.poll(5)
    return caught.value.first, caught.value.last


def truncated(sub: meteor.Subscriber) -> tuple[int, int]:
    with pytest.raises(meteor.LogTruncated) as caught:
        eventually(lambda: sub.poll(0.1))
    return caught.value.first, caught.value.last


# Records that the ring has dropped


def test_group_gap_is_reported_by_every_poll_until_it_is_skipped(
    harness: GroupHarness,
) -> None:
    harness.fill(5)
    sub = harness.subscriber(lease_ttl=60)
    assert drain(sub) == [0, 1, 2, 3, 4]
    sub.confirm().result(5)
    harness.fill(10, 10)
    for _ in range(3):
        assert lost(sub) == (5, 14)
    assert (harness.confirmed, sub.skipped) == (5, 0)
    sub.skip_gap()
    eventually(lambda: sub.confirmed == 15)
    assert (harness.confirmed, sub.skipped) == (15, 10)
    assert drain(sub) == list(range(15, 25))
    assert sub.confirm().result(5) == 25


def test_next_member_starts_after_a_skipped_gap(harness: GroupHarness) -> None:
    harness.fill(5)
    first, second = harness.subscriber(lease_ttl=60), harness.subscriber(lease_ttl=60)
    first.poll(5)
    first.confirm().result(5)
    harness.fill(10, 10)
    assert lost(first) == (5, 14)
    first.deactivate()
    assert lost(second) == (5, 14)  # the gap was not skipped, so the next member gets it too
    second.skip_gap()
    second.deactivate()
    first.reactivate()
    assert check_values(first.poll(5)) == list(range(15, 25))


def test_skipping_a_gap_does_not_confirm_records_before_it(harness: GroupHarness) -> None:
    harness.fill(5)
    sub = harness.subscriber(lease_ttl=60)
    assert drain(sub) == [0, 1, 2, 3, 4]
    sub.confirm(2).result(5)  # 3 and 4 are being processed
    harness.fill(10, 10)
    assert lost(sub) == (5, 14)
    sub.skip_gap()
    assert sub.confirmed == 3
    assert drain(sub) == list(range(15, 25))
    sub.confirm(4).result(5)
    assert harness.confirmed == 5
    assert sub.confirm().result(5) == 25


@pytest.mark.parametrize("known", [True, False])
def test_gap_is_not_confirmed_under_a_lost_lease(harness: GroupHarness, known: bool) -> None:
    harness.fill(5)
    sub = harness.subscriber(lease_ttl=0.5 if known else 60)
    sub.poll(5)
    sub.confirm().result(5)
    harness.fill(10, 10)
    assert lost(sub) == (5, 14)
    harness.take_away()
    if known:
        eventually(lambda: sub.term is None)
    sub.skip_gap()
    eventually(lambda: sub.term is None)
    assert harness.confirmed == 5
    assert len(sub.poll(0)) == 0


def test_skip_gap_without_a_gap_does_nothing(harness: GroupHarness) -> None:
    harness.fill(5)
    sub = harness.subscriber()
    sub.skip_gap()
    sub.poll(5, max_records=2)
    sub.skip_gap()
    assert (sub.position, sub.skipped, harness.confirmed) == (2, 0, None)


def test_on_gap_skip_counts_lost_records_and_confirms_past_a_gap(harness: GroupHarness) -> None:
    harness.fill(5)
    skipped: list[tuple[int, int]] = []
    sub = harness.subscriber(
        lease_ttl=60, on_gap="skip", on_gap_skipped=lambda *gap: skipped.append(gap)
    )
    assert drain(sub) == [0, 1, 2, 3, 4]
    sub.confirm().result(5)
    harness.fill(10, 10)
    assert check_values(sub.poll(5)) == list(range(15, 25))
    assert (sub.skipped, skipped) == (10, [(5, 14)])
    eventually(lambda: harness.confirmed == 15)
    harness.fill(10, 10)
    assert check_values(sub.poll(5)) == list(range(35, 45))
    assert (sub.skipped, skipped[1:]) == (20, [(25, 34)])
    sub.close()
    assert harness.confirmed == 15  # 15 to 24 were returned but not confirmed


def test_on_gap_skip_confirms_nothing_under_a_lost_lease(harness: GroupHarness) -> None:
    harness.fill(5)
    sub = harness.subscriber(lease_ttl=60, on_gap="skip")
    sub.poll(5)
    sub.confirm().result(5)
    harness.fill(10, 10)
    harness.take_away()
    sub.poll(0.2)
    eventually(lambda: sub.term is None)
    assert harness.confirmed == 5
    assert len(sub.poll(0)) == 0


def test_new_group_starts_at_earliest_while_the_ring_drops_records(harness: GroupHarness) -> None:
    harness.fill(10, 10)

    def publish(stop: threading.Event) -> None:
        with harness.stream.publisher() as pub:
            while not stop.is_set():
                pub.publish_many([b"x"] * 10).result(10)

    with background(publish):
        for number in range(30):
            with harness.subscriber(group=f"g{number}", initial_offset="earliest") as sub:
                assert sub.poll(10).first_offset > 0


def test_first_record_in_a_wrapped_ring_is_returned(harness: GroupHarness) -> None:
    harness.fill(10, 10)
    assert check_values(harness.subscriber(initial_offset="earliest").poll(5)) == list(
        range(10, 20)
    )


def test_next_member_learns_of_lost_unconfirmed_records(
    harness: GroupHarness,
) -> None:
    harness.fill(5)
    first, second = harness.subscriber(lease_ttl=60), harness.subscriber(lease_ttl=60)
    assert drain(first) == [0, 1, 2, 3, 4]
    harness.fill(10, 10)
    first.deactivate()
    assert lost(second) == (0, 14)


# The server has lost records


def test_group_ahead_of_a_lagging_replica_gets_log_truncated_and_continues(
    replicated: ReplicatedStream,
) -> None:
    proxied = replicated.proxied
    fill(proxied.stream, 10)
    sub = proxied.subscriber(group=GROUP, lease_ttl=60)
    assert drain(sub) == list(range(10))
    assert sub.confirm(5).result(5) == 6
    replicated.lag()
    fill(proxied.stream, 10)
    assert check_values(sub.poll(5)) == list(range(10, 20))
    assert sub.confirm(12).result(5) == 13
    replicated.fail_over()
    with proxied.client.stream(STREAM).publisher() as pub:
        assert pub.publish_many([b"b%d" % offset for offset in range(10, 30)]).result(10) == 10
    for _ in range(2):
        assert truncated(sub) == (10, 19)
    with pytest.raises(meteor.LogTruncated):
        sub.confirm().result(10)
    assert _confirmed(proxied) == 6  # a reader of the old branch confirms nothing on the new one
    sub.skip_gap()
    batch = sub.poll(20)
    assert list(batch.offsets) == list(range(6, 30))  # from the offset confirmed on the new server
    assert batch.values()[4:] == [b"b%d" % offset for offset in range(10, 30)]
    assert sub.confirm().result(10) == 30
    assert _confirmed(proxied) == 30


def test_group_that_is_not_ahead_of_a_lagging_replica_continues(
    replicated: ReplicatedStream,
) -> None:
    proxied = replicated.proxied
    fill(proxied.stream, 10)
    sub = proxied.subscriber(group=GROUP, lease_ttl=60)
    assert drain(sub) == list(range(10))
    replicated.lag()
    fill(proxied.stream, 10)
    replicated.fail_over()
    fill(proxied.stream, 5)
    got: list[int] = []

    def more() -> bool:
        got.extend(check_values(sub.poll(1)))
        return len(got) >= 5

    eventually(more, 20)
    assert got == [10, 11, 12, 13, 14]
    assert sub.confirm().result(10) == 15


# The stream was deleted or recreated


def test_members_get_stream_not_found_if_the_stream_is_deleted(harness: GroupHarness) -> None:
    harness.fill(5)
    owner, waiter = harness.subscriber(lease_ttl=0.5), harness.subscriber(lease_ttl=0.5)
    owner.poll(5)
    waiter.poll(0)
    harness.stream.delete()
    for sub in (owner, waiter, owner):
        with pytest.raises(meteor.StreamNotFound):
            eventually(lambda sub=sub: sub.poll(0.1))  # type: ignore[misc]
    for sub in (owner, waiter):
        discard(sub)


@pytest.mark.parametrize("noticed_by", ["reader", "session"])
def test_members_get_log_truncated_and_join_the_new_group_if_the_stream_is_recreated(
    harness: GroupHarness, noticed_by: str
) -> None:
    harness.fill(5)
    owner, waiter = harness.subscriber(lease_ttl=0.5), harness.subscriber(lease_ttl=0.5)
    owner.poll(5)
    owner.confirm().result(5)
    waiter.poll(0)
    harness.stream.delete()
    harness.stream = harness.client.stream(STREAM, capacity=10)
    if noticed_by == "session":
        eventually(lambda: owner.term is None)
    for sub in (owner, waiter, owner, waiter):
        truncated(sub)
    assert harness.stream.groups() == []
    fill(harness.stream, 3)
    owner.skip_gap()
    waiter.skip_gap()
    assert check_values(owner.poll(5)) == [0, 1, 2]
    assert len(waiter.poll(0)) == 0
    assert owner.confirm().result(5) == 3
    owner.close()
    fill(harness.stream, 1)
    assert check_values(waiter.poll(5)) == [3]


def test_group_from_an_earlier_incarnation_is_not_taken_over(harness: GroupHarness) -> None:
    harness.fill(5)
    old = harness.subscriber(lease_ttl=60)
    old.poll(5)
    old.confirm().result(5)
    left = harness.redis.hgetall(keys.group(STREAM, GROUP))
    lease = harness.redis.get(keys.lease(STREAM, GROUP))
    harness.stream.delete()
    harness.stream = harness.client.stream(STREAM, capacity=10)
    # As after a delete during another client's call: the old group's keys remain.
    harness.redis.hset(keys.group(STREAM, GROUP), mapping=left)  # type: ignore[arg-type]
    harness.redis.set(keys.lease(STREAM, GROUP), lease)  # type: ignore[arg-type]
    harness.redis.sadd(keys.groups(STREAM), GROUP)
    assert harness.stream.groups() == []
    with pytest.raises(meteor.NoConfirmedOffset):
        harness.subscriber(initial_offset="none")
    fill(harness.stream, 3)
    assert check_values(harness.subscriber(lease_ttl=60).poll(5)) == [0, 1, 2]
    assert [group.confirmed for group in harness.stream.groups()] == [0]
    discard(old)


def test_member_that_cannot_join_the_new_group_raises_until_it_can(
    harness: GroupHarness,
) -> None:
    harness.fill(5)
    with harness.subscriber(lease_ttl=60) as first:
        first.poll(5)
        first.confirm(1)
    sub = harness.subscriber(lease_ttl=60, initial_offset="none")
    assert check_values(sub.poll(5)) == [2, 3, 4]
    harness.stream.delete()
    harness.stream = harness.client.stream(STREAM, capacity=10)
    fill(harness.stream, 3)
    for _ in range(2):
        truncated(sub)
        with pytest.raises(meteor.NoConfirmedOffset):
            sub.skip_gap()
    harness.stream.seek_group(GROUP, 1)
    sub.skip_gap()
    assert check_values(sub.poll(5)) == [1, 2]


def _confirmed(proxied: ProxiedStream) -> int:
    found = proxied.direct.hget(keys.group(STREAM, GROUP), "confirmed")
    assert isinstance(found, bytes)
    return int(found)
