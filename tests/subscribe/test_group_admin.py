"""Group administration: listing, moving and deleting, with and without an active member."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.redis.scripts import DELETE_GROUP, SEEK_GROUP
from tests.conftest import ServerFactory
from tests.support.group_members import GROUP, STREAM, GroupHarness
from tests.support.proxied_stream import ProxiedStream
from tests.support.readers import background, blocked, check_values, drain, fill
from tests.support.waiting import eventually


@pytest.fixture
def harness(any_url: str) -> Iterator[GroupHarness]:
    with GroupHarness(any_url) as harness:
        yield harness


@pytest.fixture
def proxied(private_server: ServerFactory) -> Iterator[ProxiedStream]:
    with ProxiedStream(private_server()) as proxied:
        yield proxied


# Listing


def test_groups_are_listed_with_position_lag_and_owner(harness: GroupHarness) -> None:
    harness.fill(10)
    assert harness.stream.groups() == []
    active = harness.subscriber(group="b-active")
    active.poll(5)
    active.confirm(3).result(5)
    harness.subscriber(group="c-new", initial_offset="latest")
    with harness.subscriber(group="a-left") as left:
        left.poll(5)
        left.confirm()
    found = harness.stream.groups()
    assert [(group.name, group.confirmed, group.lag, group.owner) for group in found] == [
        ("a-left", 10, 0, None),
        ("b-active", 4, 6, active.member),
        ("c-new", 10, 0, None),
    ]
    assert [group.term > 0 for group in found] == [True, True, False]
    assert found[1].term == active.term
    assert {group.kind for group in found} == {"exclusive"}
    assert harness.stream.describe().groups == tuple(found)


def test_more_groups_than_fit_into_one_request_are_listed(harness: GroupHarness) -> None:
    names = [f"g{number:04d}" for number in range(1001)]
    for name in names:
        harness.stream.seek_group(name, 0)
    assert [group.name for group in harness.stream.groups()] == names


# Moving


def test_moved_idle_group_continues_at_the_new_offset(harness: GroupHarness) -> None:
    harness.fill(10)
    with harness.subscriber() as sub:
        sub.poll(5)
        sub.confirm()
    for to, offset in ((3, 3), ("earliest", 0), ("latest", 10), (0, 0), (10, 10)):
        assert harness.stream.seek_group(GROUP, to) == offset
        assert harness.confirmed == offset
        with harness.subscriber() as sub:
            assert sub.confirmed == offset
            assert drain(sub) == list(range(offset, 10))


def test_group_can_be_moved_to_a_time(harness: GroupHarness) -> None:
    harness.fill(3)
    last = harness.stream.describe().appended
    eventually(lambda: harness.server_ms() > last)
    harness.fill(4)
    moment = datetime.fromtimestamp((last + 1) / 1000, UTC)
    assert harness.stream.seek_group(GROUP, moment) == 3
    assert drain(harness.subscriber()) == [3, 4, 5, 6]
    assert harness.stream.seek_group("other", moment - timedelta(days=1)) == 0
    assert harness.stream.seek_group("other", moment + timedelta(days=1)) == 7
    with pytest.raises(ValueError, match="time zone"):
        harness.stream.seek_group("other", datetime(2026, 1, 1))


@pytest.mark.parametrize("to", [-1, 11, "first", True])
def test_group_cannot_be_moved_to_an_invalid_position(harness: GroupHarness, to: int | str) -> None:
    harness.fill(10)
    with pytest.raises((ValueError, TypeError)):
        harness.stream.seek_group(GROUP, to)
    assert harness.stream.groups() == []
    with pytest.raises(ValueError, match="name of a group"):
        harness.stream.seek_group("no/name", 0)


def test_moving_an_unknown_group_creates_it(harness: GroupHarness) -> None:
    harness.fill(10)
    assert harness.stream.seek_group(GROUP, 7) == 7
    assert check_values(harness.subscriber(initial_offset="none").poll(5)) == [7, 8, 9]


def test_group_moved_to_earliest_follows_the_ring(any_url: str) -> None:
    with GroupHarness(any_url, capacity=10) as harness:
        harness.fill(10, 10)
        assert harness.stream.seek_group(GROUP, "earliest") == 10
        harness.stream.seek_group("exactly", 10)
        harness.fill(10)
        assert check_values(harness.subscriber().poll(5)) == list(range(20, 30))
        with pytest.raises(meteor.RecordsLost):
            harness.subscriber(group="exactly").poll(5)


def test_active_group_is_not_moved_without_force(harness: GroupHarness) -> None:
    harness.fill(10)
    sub = harness.subscriber(lease_ttl=60)
    sub.poll(5)
    sub.confirm(4).result(5)
    with pytest.raises(meteor.GroupActive) as caught:
        harness.stream.seek_group(GROUP, 0)
    assert caught.value.owner == sub.member
    assert sub.member in str(caught.value)
    assert (harness.confirmed, sub.confirm(5).result(5)) == (5, 6)


def test_forced_move_fences_the_owner(harness: GroupHarness) -> None:
    harness.fill(10)
    sub = harness.subscriber(lease_ttl=0.5)
    sub.poll(5)
    old = sub.term
    assert harness.stream.seek_group(GROUP, 2, force=True) == 2
    with pytest.raises(meteor.LeaseLost):
        sub.confirm().result(5)
    assert harness.confirmed == 2
    assert check_values(sub.poll(10)) == list(range(2, 10))
    assert sub.term is not None
    assert old is not None
    assert sub.term > old
    assert sub.confirm().result(5) == 10
    assert [event.what for event in harness.events()] == ["assigned", "sought", "assigned"]


def test_repeated_move_does_not_undo_later_confirms(proxied: ProxiedStream) -> None:
    fill(proxied.stream, 10)
    proxied.client.load_scripts()
    through = proxied.through.stream(STREAM, create=True)
    sub = proxied.stream.subscriber(group=GROUP)

    def confirm(stop: threading.Event) -> None:
        """Confirm after the first request and before its repetition."""
        eventually(lambda: _events(proxied) == ["sought"])
        assert check_values(sub.poll(5)) == list(range(4, 10))
        assert sub.confirm().result(5) == 10
        proxied.proxy.accept()

    with sub, background(confirm):
        proxied.proxy.cut_after_request(match=SEEK_GROUP.sha.encode())
        proxied.proxy.refuse()
        # The proxy refuses connections until the confirm is done, so the call fails. The test
        # repeats the request below.
        with pytest.raises(meteor.ConnectionFailed):
            through.seek_group(GROUP, 4)
    sought = proxied.direct.hget(keys.group(STREAM, GROUP), "sought")
    assert isinstance(sought, bytes)
    script_keys = [
        keys.meta(STREAM),
        keys.group(STREAM, GROUP),
        keys.lease(STREAM, GROUP),
        keys.events(STREAM),
        keys.groups(STREAM),
    ]
    args = [proxied.stream.incarnation, GROUP, 4, "", "", sought]
    assert proxied.client._connector.run(SEEK_GROUP, script_keys, args) == [b"OK"]
    assert proxied.stream.groups()[0].confirmed == 10


def test_move_is_repeated_after_a_lost_reply_and_applied_once(proxied: ProxiedStream) -> None:
    fill(proxied.stream, 10)
    proxied.client.load_scripts()
    through = proxied.through.stream(STREAM, create=True)
    proxied.proxy.cut_after_request(match=SEEK_GROUP.sha.encode())
    assert through.seek_group(GROUP, 2) == 2
    assert proxied.proxy.counters.cuts == 1
    assert _events(proxied) == ["sought"]


# Deleting


def test_deleting_a_group_deletes_its_confirmed_offset(harness: GroupHarness) -> None:
    harness.fill(10)
    with harness.subscriber() as sub:
        sub.poll(5)
        sub.confirm()
    harness.stream.delete_group(GROUP)
    assert harness.stream.groups() == []
    assert not harness.redis.exists(keys.group(STREAM, GROUP), keys.lease(STREAM, GROUP))
    with pytest.raises(meteor.NoConfirmedOffset):
        harness.subscriber(initial_offset="none")
    assert drain(harness.subscriber()) == list(range(10))


def test_unknown_group_cannot_be_deleted(harness: GroupHarness) -> None:
    with pytest.raises(meteor.GroupNotFound) as caught:
        harness.stream.delete_group("unknown")
    assert (caught.value.stream, caught.value.group) == (STREAM, "unknown")


def test_active_group_is_not_deleted_without_force(harness: GroupHarness) -> None:
    harness.fill(10)
    sub = harness.subscriber(lease_ttl=60)
    sub.poll(5)
    with pytest.raises(meteor.GroupActive) as caught:
        harness.stream.delete_group(GROUP)
    assert caught.value.owner == sub.member
    assert sub.confirm().result(5) == 10


def test_members_get_group_not_found_if_the_group_is_deleted(harness: GroupHarness) -> None:
    harness.fill(10)
    owner, waiter = harness.subscriber(lease_ttl=0.5), harness.subscriber(lease_ttl=0.5)
    owner.poll(5)
    waiter.poll(0)
    harness.stream.delete_group(GROUP, force=True)
    with pytest.raises(meteor.GroupNotFound):
        owner.confirm().result(5)
    for sub in (owner, waiter, owner, waiter):
        with pytest.raises(meteor.GroupNotFound):
            eventually(lambda sub=sub: sub.poll(0.1))  # type: ignore[misc]
    assert harness.stream.groups() == []  # no member has recreated it by accident
    assert drain(harness.subscriber()) == list(range(10))


def test_waiting_member_is_woken_at_once_if_the_group_is_deleted(url: str) -> None:
    with GroupHarness(url) as harness:
        owner, waiter = harness.subscriber(lease_ttl=60), harness.subscriber(lease_ttl=60)
        owner.poll(0)

        def delete(stop: threading.Event) -> None:
            blocked(harness.redis)
            harness.stream.delete_group(GROUP, force=True)

        with background(delete), pytest.raises(meteor.GroupNotFound):
            waiter.poll(50)


def test_deletion_succeeds_after_a_lost_reply(proxied: ProxiedStream) -> None:
    through = proxied.through.stream(STREAM, create=True)
    proxied.client.load_scripts()
    proxied.stream.seek_group(GROUP, 0)
    proxied.proxy.cut_after_request(match=DELETE_GROUP.sha.encode())
    through.delete_group(GROUP)
    assert proxied.stream.groups() == []
    with pytest.raises(meteor.GroupNotFound):
        through.delete_group(GROUP)


def _events(proxied: ProxiedStream) -> list[str]:
    found: Any = proxied.direct.xrange(keys.events(STREAM))
    return [fields[b"event"].decode() for _, fields in found]
