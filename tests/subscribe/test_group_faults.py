"""Groups keep their guarantees while the server or the connection to it fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.redis.scripts import (
    ACQUIRE_LEASE,
    CONFIRM_OFFSET,
    RELEASE_LEASE,
    RENEW_LEASE,
    Script,
)
from tests.conftest import ServerFactory
from tests.support.group_members import GROUP, STREAM, GroupHarness
from tests.support.proxied_stream import ProxiedStream, failure
from tests.support.readers import background, blocked, check_values, drain, fill
from tests.support.waiting import eventually


@pytest.fixture
def proxied(private_server: ServerFactory) -> Iterator[ProxiedStream]:
    with ProxiedStream(private_server()) as proxied:
        proxied.client.load_scripts()
        fill(proxied.stream, 10)
        yield proxied


@pytest.fixture
def lasting(private_server: ServerFactory) -> Iterator[ProxiedStream]:
    """A stream on a server that keeps its data across a restart."""
    with ProxiedStream(private_server("--appendonly", "yes", "--appendfsync", "always")) as proxied:
        fill(proxied.stream, 10)
        yield proxied


def group(proxied: ProxiedStream) -> dict[str, str]:
    found: Any = proxied.direct.hgetall(keys.group(STREAM, GROUP))
    return {key.decode(): value.decode() for key, value in found.items()}


def owner(proxied: ProxiedStream) -> str | None:
    found: Any = proxied.direct.get(keys.lease(STREAM, GROUP))
    return None if found is None else found.decode().partition(" ")[0]


def events(proxied: ProxiedStream) -> list[str]:
    found: Any = proxied.direct.xrange(keys.events(STREAM))
    return [fields[b"event"].decode() for _, fields in found]


def arm(proxied: ProxiedStream, cut: str, script: Script) -> int:
    """Make the proxy cut at the next call to a script; return the number of cuts so far."""
    cutting = getattr(proxied.proxy, f"cut_{cut}_request")
    cutting(match=script.sha.encode())
    return proxied.proxy.counters.cuts


def pass_time(seconds: float) -> None:
    until = time.monotonic() + seconds
    eventually(lambda: time.monotonic() > until, seconds + 10)


# The connection

CUTS = pytest.mark.parametrize("cut", ["before", "after"])


@CUTS
def test_acquire_with_a_lost_request_or_reply_starts_one_term(
    proxied: ProxiedStream, cut: str
) -> None:
    sub = proxied.subscriber(group=GROUP, lease_ttl=60)
    cuts = arm(proxied, cut, ACQUIRE_LEASE)
    assert drain_once(sub) == list(range(10))
    assert proxied.proxy.counters.cuts == cuts + 1
    assert events(proxied) == ["assigned"]
    assert group(proxied)["term"] == str(sub.term)


@CUTS
def test_renewal_with_a_lost_request_or_reply_is_repeated(proxied: ProxiedStream, cut: str) -> None:
    sub = proxied.subscriber(group=GROUP, lease_ttl=0.6)
    drain_once(sub)
    term = sub.term
    cuts = arm(proxied, cut, RENEW_LEASE)
    eventually(lambda: proxied.proxy.counters.cuts == cuts + 1)
    pass_time(0.8)
    eventually(lambda: sub.is_assigned)
    assert (sub.term, events(proxied)) == (term, ["assigned"])


@CUTS
def test_confirm_with_a_lost_request_or_reply_is_repeated(proxied: ProxiedStream, cut: str) -> None:
    sub = proxied.subscriber(group=GROUP, lease_ttl=60)
    drain_once(sub)
    for offset in (3, 7):
        cuts = arm(proxied, cut, CONFIRM_OFFSET)
        assert sub.confirm(offset).result(10) == offset + 1
        assert proxied.proxy.counters.cuts == cuts + 1
        assert group(proxied)["confirmed"] == str(offset + 1)


class InterruptedConfirm:
    """A member whose connection fails during a confirm, and which then loses its lease."""

    def __init__(self, proxied: ProxiedStream, cut: str) -> None:
        self._proxied = proxied
        self.sub = proxied.subscriber(group=GROUP, lease_ttl=1)
        drain_once(self.sub)
        cuts = arm(proxied, cut, CONFIRM_OFFSET)
        self.sent = self.sub.confirm(3)
        proxied.proxy.refuse()  # so that the retry finds the lease taken
        self.sent.add_done_callback(lambda _: None)  # a waiter makes the session send it at once
        eventually(lambda: proxied.proxy.counters.cuts == cuts + 1)
        self.later = self.sub.confirm(7)

    def lose_the_lease(self, start: int) -> None:
        """Let another member take over at ``start``, then let this member learn of it."""
        with self._proxied.stream.subscriber(group=GROUP, lease_ttl=60) as heir:
            batch = eventually(lambda: heir.poll(1), 20)
            assert batch.first_offset == start
            self._proxied.proxy.accept()
            eventually(lambda: self.sent.done() and self.later.done(), 20)


def test_confirm_that_took_effect_before_the_lease_was_lost_succeeds(
    proxied: ProxiedStream,
) -> None:
    member = InterruptedConfirm(proxied, "after")
    member.lose_the_lease(start=4)
    assert member.sent.result(0) == 4
    assert isinstance(failure(member.later), meteor.LeaseLost)
    member.sub.poll(0)  # raises nothing: every Ack was checked


def test_confirm_that_never_arrived_is_refused_after_the_lease_was_lost(
    proxied: ProxiedStream,
) -> None:
    member = InterruptedConfirm(proxied, "before")
    member.lose_the_lease(start=0)
    for ack in (member.sent, member.later):
        assert isinstance(failure(ack), meteor.LeaseLost)


def test_confirm_that_took_effect_before_the_group_was_moved_succeeds(
    proxied: ProxiedStream,
) -> None:
    member = InterruptedConfirm(proxied, "after")
    proxied.stream.seek_group(GROUP, 1, force=True)
    proxied.proxy.accept()
    assert member.sent.result(20) == 4
    assert isinstance(failure(member.later), meteor.LeaseLost)
    assert proxied.stream.group(GROUP).confirmed == 1


@CUTS
def test_confirm_raises_outcome_unknown_if_the_server_has_forgotten_its_term(
    proxied: ProxiedStream, cut: str
) -> None:
    member = InterruptedConfirm(proxied, cut)
    with proxied.stream.subscriber(group=GROUP, lease_ttl=60) as heir:
        eventually(lambda: heir.poll(1), 20)
        proxied.direct.hdel(keys.group(STREAM, GROUP), "ended")  # as after many other terms
        proxied.proxy.accept()
        error = failure(member.sent, 20)
        assert isinstance(error, meteor.OutcomeUnknown)
        assert GROUP in str(error)
        assert isinstance(failure(member.later), meteor.LeaseLost), (
            "the confirm that was never sent has another outcome"
        )


def test_poll_reports_an_unknown_confirm_outcome_if_the_ack_was_never_checked(
    proxied: ProxiedStream,
) -> None:
    sub = proxied.subscriber(group=GROUP, lease_ttl=1)
    drain_once(sub)
    cuts = arm(proxied, "after", CONFIRM_OFFSET)
    sub.confirm(3)
    proxied.proxy.refuse()
    eventually(lambda: proxied.proxy.counters.cuts == cuts + 1)
    with proxied.stream.subscriber(group=GROUP, lease_ttl=60) as heir:
        eventually(lambda: heir.poll(1), 20)
        proxied.direct.hdel(keys.group(STREAM, GROUP), "ended")
        proxied.proxy.accept()
        with pytest.raises(meteor.OutcomeUnknown):
            eventually(lambda: unless_disconnected(sub), 20)
        assert not sub.poll(0)


def unless_disconnected(sub: meteor.Subscriber) -> meteor.RecordBatch | None:
    with suppress(meteor.ConnectionFailed):
        return sub.poll(0.1)
    return None


@CUTS
@pytest.mark.parametrize("how", ["close", "deactivate"])
def test_lease_is_released_over_a_new_connection_if_the_old_one_is_cut(
    proxied: ProxiedStream, cut: str, how: str
) -> None:
    sub = proxied.subscriber(group=GROUP, lease_ttl=60)
    drain_once(sub)
    sub.confirm(4)
    cuts = arm(proxied, cut, RELEASE_LEASE)
    getattr(sub, how)()
    assert proxied.proxy.counters.cuts == cuts + 1
    assert (owner(proxied), group(proxied)["confirmed"]) == (None, "5")
    assert events(proxied) == ["assigned", "released"]


def test_lease_that_may_have_been_acquired_is_released(proxied: ProxiedStream) -> None:
    sub = proxied.subscriber(group=GROUP, lease_ttl=60)
    with proxied.stream.subscriber(group=GROUP, lease_ttl=60) as other:
        other.poll(5)
        assert len(sub.poll(0.1)) == 0  # connected, and waiting for the lease
    arm(proxied, "after", ACQUIRE_LEASE)
    proxied.proxy.refuse()
    with pytest.raises(meteor.ConnectionFailed):
        sub.poll(0.5)
    assert (owner(proxied), sub.term) == (sub.member, None)
    proxied.proxy.heal()
    sub.close()
    assert owner(proxied) is None


def test_flushed_scripts_are_loaded_again(proxied: ProxiedStream) -> None:
    sub = proxied.subscriber(group=GROUP, lease_ttl=0.6)
    for offset in range(0, 10, 2):
        proxied.direct.script_flush()
        assert check_values(sub.poll(5, max_records=2)) == [offset, offset + 1]
        proxied.direct.script_flush()
        assert sub.confirm().result(5) == offset + 2
    term = sub.term
    proxied.direct.script_flush()
    pass_time(0.7)
    eventually(lambda: sub.is_assigned)
    assert sub.term == term
    proxied.direct.script_flush()
    sub.close()
    assert owner(proxied) is None
    proxied.direct.script_flush()
    assert proxied.stream.seek_group(GROUP, 9) == 9
    proxied.direct.script_flush()
    proxied.stream.delete_group(GROUP)


def test_poll_raises_if_the_server_is_unreachable_and_loses_nothing(proxied: ProxiedStream) -> None:
    sub = proxied.subscriber(group=GROUP, lease_ttl=60)
    assert check_values(sub.poll(5, max_records=4)) == [0, 1, 2, 3]
    proxied.proxy.refuse()
    proxied.proxy.cut()
    sub.poll(0)  # returns the records that were fetched before the outage
    with pytest.raises(meteor.ConnectionFailed):
        sub.poll(0.3)
    ack = sub.confirm()
    assert not ack.done()
    proxied.proxy.heal()
    assert ack.result(10) == 10
    assert group(proxied)["confirmed"] == "10"
    assert events(proxied) == ["assigned"]


def test_owner_without_a_server_stops_trusting_its_lease_and_returns_nothing(
    proxied: ProxiedStream,
) -> None:
    sub = proxied.subscriber(group=GROUP, lease_ttl=0.6)
    assert check_values(sub.poll(5, max_records=4)) == [0, 1, 2, 3]  # all ten are fetched
    term = sub.term
    proxied.proxy.stall()
    eventually(lambda: not sub.is_assigned)
    with pytest.raises(meteor.ConnectionFailed):
        sub.poll(0.2)
    assert sub.position == 4
    proxied.proxy.heal()
    proxied.proxy.cut()
    assert check_values(sub.poll(10)) == [4, 5, 6, 7, 8, 9]  # no other member took the lease
    assert (sub.term, events(proxied)) == (term, ["assigned"])


@pytest.mark.parametrize("how", ["close", "deactivate"])
def test_member_leaves_in_time_if_the_server_does_not_reply(
    proxied: ProxiedStream, how: str
) -> None:
    sub = proxied.subscriber(group=GROUP, lease_ttl=1.2)
    sub.poll(5)
    proxied.proxy.stall()
    ack = sub.confirm()
    began = time.monotonic()
    with pytest.raises(meteor.ConnectionFailed, match="read again"):
        getattr(sub, how)(timeout=0.5)
    assert time.monotonic() - began < 10
    assert isinstance(failure(ack), meteor.ConnectionFailed)
    proxied.proxy.heal()
    proxied.proxy.cut()
    eventually(lambda: owner(proxied) is None)
    assert "confirmed" not in group(proxied)


# The server


@pytest.mark.parametrize("waiting", ["in poll", "at work"])
def test_owner_keeps_the_lease_if_the_server_was_paused(
    private_server: ServerFactory, waiting: str
) -> None:
    server = private_server()
    with GroupHarness(server.url) as harness:
        harness.fill(3)
        first, second = harness.members(2, lease_ttl=1.5)
        assert first.poll() == [0, 1, 2]
        term = first.state.term
        second.tell("poll", 40.0, 10_000)
        blocked(harness.redis, 1)
        if waiting == "in poll":
            first.tell("poll", 40.0, 10_000)
            blocked(harness.redis, 2)
        server.pause()
        pass_time(2.2)
        server.resume()
        harness.fill(2)
        if waiting == "at work":
            first.tell("poll", 40.0, 10_000)
        assert first.answer() == [3, 4]
        assert first.confirm() == 5
        assert first.state.term == term
        assert [(event.what, event.member) for event in harness.events()] == [
            ("assigned", first.name)
        ]
        first.ask("close")
        harness.fill(1)
        assert second.answer() == [5]


def test_full_server_still_confirms_renews_and_hands_over(private_server: ServerFactory) -> None:
    server = private_server("--maxmemory-policy", "noeviction")
    with GroupHarness(server.url) as harness:
        harness.fill(10)
        first, second = harness.subscriber(lease_ttl=0.5), harness.subscriber(lease_ttl=0.5)
        first.poll(5, max_records=5)
        harness.redis.config_set("maxmemory", 1)
        with (
            pytest.raises(meteor.OutOfMemory),
            harness.stream.publisher(delivery_timeout=0.5) as pub,
        ):
            pub.publish(b"x" * 1000).result(10)
        assert first.confirm().result(5) == 5
        pass_time(0.7)
        eventually(lambda: first.is_assigned)
        first.close()
        assert check_values(second.poll(5)) == [5, 6, 7, 8, 9]
        assert second.confirm(6).result(5) == 7
        assert [event.what for event in harness.events()] == ["assigned", "released", "assigned"]
        second.close()
        assert drain(harness.subscriber(group="new")) == list(range(10))
        harness.stream.seek_group(GROUP, 2)
        assert check_values(harness.subscriber().poll(5, max_records=1)) == [2]
        harness.stream.delete_group("new", force=True)


@pytest.mark.parametrize("lease_ttl", [0.5, 60.0])
def test_restarted_server_keeps_its_groups(lasting: ProxiedStream, lease_ttl: float) -> None:
    sub = lasting.subscriber(group=GROUP, lease_ttl=lease_ttl)
    assert check_values(sub.poll(5, max_records=4)) == [0, 1, 2, 3]
    assert sub.confirm(1).result(5) == 2
    term = sub.term
    for end in (5, 6):
        lasting.server.restart()
        assert sub.confirm(end - 2).result(20) == end - 1
        assert check_values(sub.poll(20, max_records=1)) == [end - 1]
        assert sub.term == term
    assert group(lasting)["confirmed"] == "5"
    sub.close()
    lasting.server.restart()
    with lasting.client.stream(STREAM, create=True).subscriber(group=GROUP) as other:
        assert check_values(other.poll(20)) == [5, 6, 7, 8, 9]
        assert other.confirm().result(5) == 10


@pytest.mark.parametrize("holding", [True, False])
def test_poll_outlasts_a_short_outage(lasting: ProxiedStream, holding: bool) -> None:
    sub = lasting.subscriber(group=GROUP, lease_ttl=60)
    other = lasting.client.stream(STREAM, create=True).subscriber(group=GROUP, lease_ttl=60)
    if holding:
        assert len(drain_once(sub)) == 10
    else:
        drain_once(other)

    def go_away(stop: threading.Event) -> None:
        blocked(lasting.direct)
        lasting.server.stop()
        pass_time(0.5)
        lasting.server.start()
        if holding:
            fill(lasting.client.stream(STREAM, create=True), 2)
        else:
            other.close()

    with other, background(go_away):
        expected = [10, 11] if holding else list(range(10))
        assert check_values(sub.poll(40)) == expected
    assert sub.confirm().result(5) == expected[-1] + 1


def test_loop_outlasts_a_short_outage(lasting: ProxiedStream) -> None:
    sub = lasting.subscriber(group=GROUP, lease_ttl=0.5)
    seen: list[int] = []

    def go_away(stop: threading.Event) -> None:
        eventually(lambda: len(seen) == 10)
        lasting.server.stop()
        pass_time(0.6)
        lasting.server.start()
        fill(lasting.client.stream(STREAM, create=True), 2)

    with background(go_away):
        for record in sub:
            sub.confirm()
            seen.append(record.offset)
            if record.offset == 11:
                break
    assert seen == list(range(12))
    sub.close()
    assert group(lasting)["confirmed"] == "12"


def drain_once(sub: meteor.Subscriber) -> list[int]:
    return check_values(sub.poll(10))


# Closing many members


@pytest.mark.parametrize("kind", ["member", "receiver", "in doubt"])
def test_members_of_a_closed_client_leave_concurrently_if_the_server_hangs(
    private_server: ServerFactory, kind: str
) -> None:
    server = private_server()
    client = meteor.connect(server.url)
    stream = client.stream(STREAM, create=True)
    fill(stream, 10)
    subs = [stream.subscriber(group=f"g{n}", lease_ttl=1.5) for n in range(8)]
    if kind == "in doubt":
        server.pause()
        for sub in subs:
            with pytest.raises(meteor.ConnectionFailed):
                sub.poll(0)
    else:
        for sub in subs:
            sub.confirm(sub.poll(10)[4]).result(10)
            sub.confirm(5)
            if kind == "receiver":
                sub.attach_receiver(lambda _: None)
        server.pause()
    started = time.monotonic()
    try:
        client.close()
    except meteor.ConnectionFailed:
        assert kind != "in doubt"
    # One after another, the members would take 5 seconds each to confirm, or 0.5 each to release.
    assert time.monotonic() - started < (3.0 if kind == "in doubt" else 12.0)
    server.resume()


def test_members_of_a_closed_client_release_their_leases_at_once(url: str) -> None:
    with meteor.connect(url) as other:
        client = meteor.connect(url)
        stream = client.stream(STREAM, create=True)
        fill(stream, 10)
        subs = [stream.subscriber(group=f"g{n}", lease_ttl=60) for n in range(5)]
        for sub in subs:
            sub.confirm(sub.poll(10)[6])
        client.close()
        found = other.stream(STREAM, create=True).groups()
        assert [group.owner for group in found] == [None] * 5
        assert [group.confirmed for group in found] == [7] * 5
