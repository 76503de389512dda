"""Groups while the server or the connection to it fails."""

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
from tests.support.group_members import GROUP, STREAM, Crew
from tests.support.proxied_stream import Bench, failure
from tests.support.readers import background, blocked, check_values, drain, fill
from tests.support.waiting import eventually


@pytest.fixture
def bench(private_server: ServerFactory) -> Iterator[Bench]:
    with Bench(private_server()) as bench:
        bench.client.load_scripts()
        fill(bench.stream, 10)
        yield bench


@pytest.fixture
def lasting(private_server: ServerFactory) -> Iterator[Bench]:
    """A stream on a server that keeps its data over a restart."""
    with Bench(private_server("--appendonly", "yes", "--appendfsync", "always")) as bench:
        fill(bench.stream, 10)
        yield bench


def group(bench: Bench) -> dict[str, str]:
    found: Any = bench.direct.hgetall(keys.group(STREAM, GROUP))
    return {key.decode(): value.decode() for key, value in found.items()}


def owner(bench: Bench) -> str | None:
    found: Any = bench.direct.get(keys.lease(STREAM, GROUP))
    return None if found is None else found.decode().partition(" ")[0]


def events(bench: Bench) -> list[str]:
    found: Any = bench.direct.xrange(keys.events(STREAM))
    return [fields[b"event"].decode() for _, fields in found]


def arm(bench: Bench, cut: str, script: Script) -> int:
    """Cut the connection at the next call of a script; return the number of cuts so far."""
    cutting = getattr(bench.proxy, f"cut_{cut}_request")
    cutting(match=script.sha.encode())
    return bench.proxy.counters.cuts


def pass_time(seconds: float) -> None:
    until = time.monotonic() + seconds
    eventually(lambda: time.monotonic() > until, seconds + 10)


# The connection

CUTS = pytest.mark.parametrize("cut", ["before", "after"])


@CUTS
def test_acquire_with_a_lost_reply_starts_one_term(bench: Bench, cut: str) -> None:
    sub = bench.subscriber(group=GROUP, lease_ttl=60)
    cuts = arm(bench, cut, ACQUIRE_LEASE)
    assert drain_once(sub) == list(range(10))
    assert bench.proxy.counters.cuts == cuts + 1
    assert events(bench) == ["assigned"]
    assert group(bench)["term"] == str(sub.term)


@CUTS
def test_renewal_with_a_lost_reply_is_repeated(bench: Bench, cut: str) -> None:
    sub = bench.subscriber(group=GROUP, lease_ttl=0.6)
    drain_once(sub)
    term = sub.term
    cuts = arm(bench, cut, RENEW_LEASE)
    eventually(lambda: bench.proxy.counters.cuts == cuts + 1)
    pass_time(0.8)
    eventually(lambda: sub.is_assigned)
    assert (sub.term, events(bench)) == (term, ["assigned"])


@CUTS
def test_confirm_with_a_lost_reply_is_repeated(bench: Bench, cut: str) -> None:
    sub = bench.subscriber(group=GROUP, lease_ttl=60)
    drain_once(sub)
    for offset in (3, 7):
        cuts = arm(bench, cut, CONFIRM_OFFSET)
        assert sub.confirm(offset).result(10) == offset + 1
        assert bench.proxy.counters.cuts == cuts + 1
        assert group(bench)["confirmed"] == str(offset + 1)


class Doubtful:
    """A member whose connection fails in a confirm, and which then loses the lease."""

    def __init__(self, bench: Bench, cut: str) -> None:
        self._bench = bench
        self.sub = bench.subscriber(group=GROUP, lease_ttl=1)
        drain_once(self.sub)
        cuts = arm(bench, cut, CONFIRM_OFFSET)
        self.sent = self.sub.confirm(3)
        bench.proxy.refuse()  # the repeat must find the lease taken
        self.sent.add_done_callback(lambda _: None)  # sends it at once
        eventually(lambda: bench.proxy.counters.cuts == cuts + 1)
        self.later = self.sub.confirm(7)

    def lose_the_lease(self, start: int) -> None:
        """Let another member take over at ``start``, then let this one learn of it."""
        with self._bench.stream.subscriber(group=GROUP, lease_ttl=60) as heir:
            batch = eventually(lambda: heir.poll(1), 20)
            assert batch.first_offset == start
            self._bench.proxy.accept()
            eventually(lambda: self.sent.done() and self.later.done(), 20)


def test_confirm_that_took_effect_before_the_lease_was_lost_succeeds(bench: Bench) -> None:
    member = Doubtful(bench, "after")
    member.lose_the_lease(start=4)
    assert member.sent.result(0) == 4
    assert isinstance(failure(member.later), meteor.LeaseLost)
    member.sub.poll(0)  # raises nothing: every Ack was checked


def test_confirm_that_never_arrived_is_refused_after_the_lease_was_lost(bench: Bench) -> None:
    member = Doubtful(bench, "before")
    member.lose_the_lease(start=0)
    for ack in (member.sent, member.later):
        assert isinstance(failure(ack), meteor.LeaseLost)


def test_confirm_that_took_effect_before_the_group_was_moved_succeeds(bench: Bench) -> None:
    member = Doubtful(bench, "after")
    bench.stream.seek_group(GROUP, 1, force=True)
    bench.proxy.accept()
    assert member.sent.result(20) == 4
    assert isinstance(failure(member.later), meteor.LeaseLost)
    assert bench.stream.group(GROUP).confirmed == 1


@CUTS
def test_confirm_of_a_forgotten_term_has_an_unknown_outcome(bench: Bench, cut: str) -> None:
    member = Doubtful(bench, cut)
    with bench.stream.subscriber(group=GROUP, lease_ttl=60) as heir:
        eventually(lambda: heir.poll(1), 20)
        bench.direct.hdel(keys.group(STREAM, GROUP), "ended")  # as after many other terms
        bench.proxy.accept()
        error = failure(member.sent, 20)
        assert isinstance(error, meteor.OutcomeUnknown)
        assert GROUP in str(error)
        assert isinstance(failure(member.later), meteor.LeaseLost), "it was never sent"


def test_poll_reports_an_unknown_confirm_whose_ack_was_never_checked(bench: Bench) -> None:
    sub = bench.subscriber(group=GROUP, lease_ttl=1)
    drain_once(sub)
    cuts = arm(bench, "after", CONFIRM_OFFSET)
    sub.confirm(3)
    bench.proxy.refuse()
    eventually(lambda: bench.proxy.counters.cuts == cuts + 1)
    with bench.stream.subscriber(group=GROUP, lease_ttl=60) as heir:
        eventually(lambda: heir.poll(1), 20)
        bench.direct.hdel(keys.group(STREAM, GROUP), "ended")
        bench.proxy.accept()
        with pytest.raises(meteor.OutcomeUnknown):
            eventually(lambda: unless_disconnected(sub), 20)
        assert not sub.poll(0)


def unless_disconnected(sub: meteor.Subscriber) -> meteor.RecordBatch | None:
    with suppress(meteor.ConnectionFailed):
        return sub.poll(0.1)
    return None


@CUTS
@pytest.mark.parametrize("how", ["close", "deactivate"])
def test_lease_is_released_over_a_new_connection(bench: Bench, cut: str, how: str) -> None:
    sub = bench.subscriber(group=GROUP, lease_ttl=60)
    drain_once(sub)
    sub.confirm(4)
    cuts = arm(bench, cut, RELEASE_LEASE)
    getattr(sub, how)()
    assert bench.proxy.counters.cuts == cuts + 1
    assert (owner(bench), group(bench)["confirmed"]) == (None, "5")
    assert events(bench) == ["assigned", "released"]


def test_lease_that_may_have_been_acquired_is_released(bench: Bench) -> None:
    sub = bench.subscriber(group=GROUP, lease_ttl=60)
    with bench.stream.subscriber(group=GROUP, lease_ttl=60) as other:
        other.poll(5)
        assert len(sub.poll(0.1)) == 0  # connected, and waiting for the lease
    arm(bench, "after", ACQUIRE_LEASE)
    bench.proxy.refuse()
    with pytest.raises(meteor.ConnectionFailed):
        sub.poll(0.5)
    assert (owner(bench), sub.term) == (sub.member, None)
    bench.proxy.heal()
    sub.close()
    assert owner(bench) is None


def test_flushed_scripts_are_loaded_again(bench: Bench) -> None:
    sub = bench.subscriber(group=GROUP, lease_ttl=0.6)
    for offset in range(0, 10, 2):
        bench.direct.script_flush()
        assert check_values(sub.poll(5, max_records=2)) == [offset, offset + 1]
        bench.direct.script_flush()
        assert sub.confirm().result(5) == offset + 2
    term = sub.term
    bench.direct.script_flush()
    pass_time(0.7)
    eventually(lambda: sub.is_assigned)
    assert sub.term == term
    bench.direct.script_flush()
    sub.close()
    assert owner(bench) is None
    bench.direct.script_flush()
    assert bench.stream.seek_group(GROUP, 9) == 9
    bench.direct.script_flush()
    bench.stream.delete_group(GROUP)


def test_poll_raises_if_the_server_is_unreachable_and_loses_nothing(bench: Bench) -> None:
    sub = bench.subscriber(group=GROUP, lease_ttl=60)
    assert check_values(sub.poll(5, max_records=4)) == [0, 1, 2, 3]
    bench.proxy.refuse()
    bench.proxy.cut()
    sub.poll(0)  # returns records that were fetched before
    with pytest.raises(meteor.ConnectionFailed):
        sub.poll(0.3)
    ack = sub.confirm()
    assert not ack.done()
    bench.proxy.heal()
    assert ack.result(10) == 10
    assert group(bench)["confirmed"] == "10"
    assert events(bench) == ["assigned"]


def test_owner_without_a_server_stops_trusting_its_lease_and_hands_out_nothing(
    bench: Bench,
) -> None:
    sub = bench.subscriber(group=GROUP, lease_ttl=0.6)
    assert check_values(sub.poll(5, max_records=4)) == [0, 1, 2, 3]  # all ten are fetched
    term = sub.term
    bench.proxy.stall()
    eventually(lambda: not sub.is_assigned)
    with pytest.raises(meteor.ConnectionFailed):
        sub.poll(0.2)
    assert sub.position == 4
    bench.proxy.heal()
    bench.proxy.cut()
    assert check_values(sub.poll(10)) == [4, 5, 6, 7, 8, 9]  # no other member took the lease
    assert (sub.term, events(bench)) == (term, ["assigned"])


@pytest.mark.parametrize("how", ["close", "deactivate"])
def test_leaving_ends_in_time_if_the_server_does_not_reply(bench: Bench, how: str) -> None:
    sub = bench.subscriber(group=GROUP, lease_ttl=1.2)
    sub.poll(5)
    bench.proxy.stall()
    ack = sub.confirm()
    began = time.monotonic()
    with pytest.raises(meteor.ConnectionFailed, match="read again"):
        getattr(sub, how)(timeout=0.5)
    assert time.monotonic() - began < 10
    assert isinstance(failure(ack), meteor.ConnectionFailed)
    bench.proxy.heal()
    bench.proxy.cut()
    eventually(lambda: owner(bench) is None)
    assert "confirmed" not in group(bench)


# The server


@pytest.mark.parametrize("waiting", ["in poll", "at work"])
def test_owner_keeps_the_lease_if_the_server_was_paused(
    private_server: ServerFactory, waiting: str
) -> None:
    server = private_server()
    with Crew(server.url) as crew:
        crew.fill(3)
        first, second = crew.members(2, lease_ttl=1.5)
        assert first.poll() == [0, 1, 2]
        term = first.state.term
        second.tell("poll", 40.0, 10_000)
        blocked(crew.redis, 1)
        if waiting == "in poll":
            first.tell("poll", 40.0, 10_000)
            blocked(crew.redis, 2)
        server.pause()
        pass_time(2.2)
        server.resume()
        crew.fill(2)
        if waiting == "at work":
            first.tell("poll", 40.0, 10_000)
        assert first.answer() == [3, 4]
        assert first.confirm() == 5
        assert first.state.term == term
        assert [(event.what, event.member) for event in crew.events()] == [("assigned", first.name)]
        first.ask("close")
        crew.fill(1)
        assert second.answer() == [5]


def test_full_server_still_confirms_renews_and_hands_over(private_server: ServerFactory) -> None:
    server = private_server("--maxmemory-policy", "noeviction")
    with Crew(server.url) as crew:
        crew.fill(10)
        first, second = crew.subscriber(lease_ttl=0.5), crew.subscriber(lease_ttl=0.5)
        first.poll(5, max_records=5)
        crew.redis.config_set("maxmemory", 1)
        with pytest.raises(meteor.OutOfMemory), crew.stream.publisher(delivery_timeout=0.5) as pub:
            pub.publish(b"x" * 1000).result(10)
        assert first.confirm().result(5) == 5
        pass_time(0.7)
        eventually(lambda: first.is_assigned)
        first.close()
        assert check_values(second.poll(5)) == [5, 6, 7, 8, 9]
        assert second.confirm(6).result(5) == 7
        assert [event.what for event in crew.events()] == ["assigned", "released", "assigned"]
        second.close()
        assert drain(crew.subscriber(group="new")) == list(range(10))
        crew.stream.seek_group(GROUP, 2)
        assert check_values(crew.subscriber().poll(5, max_records=1)) == [2]
        crew.stream.delete_group("new", force=True)


@pytest.mark.parametrize("lease_ttl", [0.5, 60.0])
def test_restarted_server_keeps_its_groups(lasting: Bench, lease_ttl: float) -> None:
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
def test_poll_outlasts_a_short_outage(lasting: Bench, holding: bool) -> None:
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


def test_loop_outlasts_a_short_outage(lasting: Bench) -> None:
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
def test_members_of_a_closed_client_leave_a_hung_server_together(
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
    # One after another, each takes 5 seconds for its confirm or half a second for its release.
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
