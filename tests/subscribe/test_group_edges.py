"""Edge cases for groups: callbacks that hang or raise, dropped subscribers, refusals.

``test_group_signals.py`` covers signal handlers, Ctrl-C and forks.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.subscribe import offset_confirms
from tests.conftest import ServerFactory
from tests.support.group_members import GROUP, STREAM, GroupHarness
from tests.support.proxied_stream import ProxiedStream, ReplicatedStream, failure
from tests.support.readers import background, check_values, drain, fill
from tests.support.waiting import eventually


@pytest.fixture
def proxied(private_server: ServerFactory) -> Iterator[ProxiedStream]:
    with ProxiedStream(private_server()) as proxied:
        proxied.client.load_scripts()
        fill(proxied.stream, 5)
        yield proxied


def owner(proxied: ProxiedStream) -> str | None:
    found: Any = proxied.direct.get(keys.lease(STREAM, GROUP))
    return None if found is None else found.decode().partition(" ")[0]


def pass_time(seconds: float) -> None:
    until = time.monotonic() + seconds
    eventually(lambda: time.monotonic() > until, seconds + 10)


def stays(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether the condition holds for ``seconds``."""
    until = time.monotonic() + seconds
    looks: list[bool] = []

    def look() -> bool:
        looks.append(condition())
        return not looks[-1] or time.monotonic() > until

    eventually(look, seconds + 10)
    return all(looks)


# Silent members


def test_lapsed_lease_is_renewed_after_it_is_reclaimed(harness: GroupHarness) -> None:
    harness.fill(5)
    sub = harness.subscriber(lease_ttl=0.4, max_poll_interval=0.8)
    sub.poll(5)
    term = sub.term
    eventually(lambda: harness.owner is None, message="the silent member kept its lease")
    assert not sub.is_assigned
    sub.poll(0)
    assert (sub.is_assigned, sub.term, harness.owner) == (True, term, sub.member)
    assert stays(lambda: sub.is_assigned and harness.owner == sub.member, 0.6)


def test_member_whose_on_assigned_hangs_loses_the_lease(harness: GroupHarness) -> None:
    harness.fill(5)
    release = threading.Event()
    hung = harness.subscriber(
        lease_ttl=30, max_poll_interval=0.3, on_assigned=lambda _: void(release.wait(20))
    )
    other = harness.subscriber(lease_ttl=30)
    got: list[int] = []
    with background(lambda stop: got.extend(hung.poll(0.1).offsets)):
        eventually(lambda: harness.owner == hung.member)
        assert check_values(other.poll(10)) == [0, 1, 2, 3, 4]
        release.set()
    assert got == []
    assert harness.owner == other.member


def test_member_whose_on_gap_skipped_hangs_loses_the_lease(url: str) -> None:
    with GroupHarness(url, capacity=10) as harness:
        harness.fill(10)
        with harness.stream.subscriber(group=GROUP) as first:
            first.poll(5, max_records=3)
            first.confirm().result(5)
        harness.fill(10, 10)
        release = threading.Event()
        hung = harness.subscriber(
            lease_ttl=30,
            max_poll_interval=0.3,
            on_gap="skip",
            on_gap_skipped=lambda first, last: release.wait(20),
        )
        told: list[tuple[int, int]] = []
        other = harness.subscriber(
            lease_ttl=30, on_gap="skip", on_gap_skipped=lambda *gap: told.append(gap)
        )
        got: list[int] = []
        with background(lambda stop: got.extend(hung.poll(0.1).offsets)):
            eventually(lambda: harness.owner == hung.member)
            assert check_values(other.poll(10)) == list(range(20, 30))
            release.set()
        assert got == []
        assert told == [(3, 19)]


def void(_: object) -> None:
    """Discard a value. If ``on_assigned`` returned it, the group would take it as a position."""


# Dropped subscribers


def test_loop_keeps_an_otherwise_unreferenced_subscriber_alive(harness: GroupHarness) -> None:
    harness.fill(5)
    got: list[int] = []

    def loop(stop: threading.Event) -> None:
        for record in harness.stream.subscriber(group=GROUP, lease_ttl=30):
            got.append(record.offset)
            if len(got) == 10:
                return

    with background(loop):
        eventually(lambda: len(got) == 5)
        gc.collect()
        assert stays(lambda: harness.owner is not None, 0.2)
        harness.fill(5)
        eventually(lambda: len(got) == 10)
    gc.collect()
    eventually(lambda: harness.owner is None, message="an abandoned loop kept its lease")


def test_dropped_subscriber_releases_its_lease(harness: GroupHarness) -> None:
    harness.fill(5)
    subs = [harness.stream.subscriber(group=GROUP, lease_ttl=30)]
    subs[0].poll(5)
    subs[0].confirm(2)
    walk = subs[0]._fetcher.iterate(None)
    subs.clear()
    gc.collect()
    eventually(lambda: harness.owner is None, message="the dropped member kept its lease")
    assert harness.confirmed == 3
    loop = threading.Thread(target=lambda: list(walk), daemon=True)
    loop.start()
    loop.join(5)
    assert not loop.is_alive(), "the loop did not end"


def test_subscriber_is_freed_at_once_after_scripts_were_reloaded(
    harness: GroupHarness, no_gc: None
) -> None:
    harness.fill(5)
    harness.redis.script_flush()
    sub = harness.stream.subscriber(group=GROUP, lease_ttl=30)
    sub.poll(5)
    seen = weakref.ref(sub)
    del sub
    assert seen() is None
    eventually(lambda: harness.owner is None)


def test_subscriber_is_freed_at_once_after_records_were_lost(url: str, no_gc: None) -> None:
    with GroupHarness(url, capacity=10) as harness:
        harness.fill(5)
        sub = harness.stream.subscriber(group=GROUP, lease_ttl=30)
        sub.poll(5)
        harness.fill(10, 10)
        with pytest.raises(meteor.RecordsLost) as gap:
            sub.poll(5)
        seen = weakref.ref(sub)
        del gap, sub
        assert seen() is None
        eventually(lambda: harness.owner is None)


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# Starting at a checkpoint


def test_lost_checkpoint_is_reported_until_on_assigned_returns_another_position(
    replicated: ReplicatedStream,
) -> None:
    proxied = replicated.proxied
    fill(proxied.stream, 90)
    kept: list[meteor.Position] = []

    def on_assigned(sub: meteor.Subscriber) -> meteor.Position | None:
        return kept[-1] if kept else None

    settings: dict[str, Any] = {"group": GROUP, "lease_ttl": 0.5, "on_assigned": on_assigned}
    with proxied.stream.subscriber(**settings) as first:
        drain(first)
        early = first.checkpoint
        replicated.lag()
        fill(proxied.stream, 10)
        drain(first)
        kept.append(first.checkpoint)
        assert kept[0].offset == 100
    replicated.fail_over()
    with proxied.client.stream(STREAM).publisher() as pub:
        pub.publish_many([b"new"] * 60).result(10)
    sub = proxied.subscriber(**settings)
    for _ in range(2):
        with pytest.raises(meteor.LogTruncated) as loss:
            polled(sub)
        assert (loss.value.first, loss.value.last) == (90, 99)
    kept.append(early)
    assert polled(sub)[0].offset == 90
    assert sub.checkpoint.epoch > early.epoch
    assert sub.confirm().result(10) == 150


def polled(sub: meteor.Subscriber) -> meteor.RecordBatch:
    """Return the next records, which may take a while after a failover."""
    return eventually(lambda: sub.poll(1), 20)


def test_checkpoint_from_an_earlier_incarnation_is_refused(harness: GroupHarness) -> None:
    harness.fill(5)
    with harness.stream.subscriber(group=GROUP) as first:
        first.poll(5)
        kept = first.checkpoint
    harness.stream.delete()
    harness.stream = harness.client.stream(STREAM, create=True)
    harness.fill(8)
    sub = harness.subscriber(on_assigned=lambda _: kept)
    for _ in range(2):
        with pytest.raises(meteor.LogTruncated) as loss:
            sub.poll(5)
        assert (loss.value.first, loss.value.last) == (0, 4)
    kept = kept._replace(incarnation=harness.stream.incarnation, epoch=sub.checkpoint.epoch)
    assert check_values(sub.poll(5)) == [5, 6, 7]


def test_checkpoint_survives_a_restart_that_loses_nothing(
    private_server: ServerFactory,
) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    with GroupHarness(server.url) as harness:
        harness.fill(10)
        with harness.stream.subscriber(group=GROUP) as first:
            first.poll(5, max_records=4)
            kept = first.checkpoint
        server.kill()
        server.restart()
        assert eventually(lambda: fill(harness.stream, 2)) == 12
        sub = harness.subscriber(on_assigned=lambda _: kept)
        assert check_values(sub.poll(10)) == list(range(4, 12))
        assert (kept.offset, sub.checkpoint.offset) == (4, 12)
        assert sub.checkpoint.epoch > kept.epoch, "the server was not restarted"
        assert sub.confirm().result(10) == 12


def test_receiver_backs_off_if_on_assigned_keeps_raising_lease_lost(harness: GroupHarness) -> None:
    harness.fill(5)
    calls: list[float] = []

    def on_assigned(sub: meteor.Subscriber) -> None:
        calls.append(time.monotonic())
        raise meteor.LeaseLost("No.", stream=STREAM, group=GROUP)

    receiver = harness.subscriber(on_assigned=on_assigned).attach_receiver(lambda record: None)
    pass_time(0.6)
    assert 2 <= len(calls) < 15
    assert (receiver.alive, receiver.error) == (True, None)


# Gaps


def test_gap_is_reported_before_it_is_confirmed(url: str) -> None:
    with GroupHarness(url, capacity=10) as harness:
        harness.fill(5)
        with harness.stream.subscriber(group=GROUP) as first:
            first.poll(5)
            first.confirm().result(5)
        harness.fill(10, 10)

        def fail(first: int, last: int) -> None:
            raise RuntimeError("not noted")

        sub = harness.subscriber(on_gap="skip", on_gap_skipped=fail)
        with pytest.raises(RuntimeError, match="not noted"):
            sub.poll(5)
        # A subscriber reports each gap only once, even if the callback raises.
        assert check_values(sub.poll(5)) == list(range(15, 25))
        assert sub.skipped == 10
        sub.close()
        assert harness.confirmed == 5
        told: list[tuple[int, int]] = []
        other = harness.subscriber(on_gap="skip", on_gap_skipped=lambda *gap: told.append(gap))
        assert check_values(other.poll(5)) == list(range(15, 25))
        assert (told, other.skipped) == ([(5, 14)], 10)
        eventually(lambda: harness.confirmed == 15)


def test_skipping_a_gap_does_not_hide_a_refused_confirm(url: str) -> None:
    with GroupHarness(url, capacity=10) as harness:
        harness.fill(5)
        sub = harness.subscriber(lease_ttl=60)
        sub.poll(5)
        harness.fill(10, 10)
        with pytest.raises(meteor.RecordsLost):
            sub.poll(1)
        sub.confirm(0).result(5)
        harness.take_away()
        sub.confirm()
        sub.skip_gap()
        eventually(lambda: sub.term is None)
        with pytest.raises(meteor.LeaseLost):
            sub.poll(0)


# Confirms


def test_close_raises_for_a_confirm_whose_failed_ack_was_not_checked(
    proxied: ProxiedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offset_confirms, "TIMEOUT_S", 0.3)
    sub = proxied.through.stream(STREAM, create=False).subscriber(group=GROUP, lease_ttl=0.6)
    sub.poll(5)
    proxied.proxy.refuse()
    proxied.proxy.cut()
    ack = sub.confirm()
    eventually(ack.done)
    with pytest.raises(meteor.MeteorError):
        sub.close(0.1)
    assert proxied.direct.hget(keys.group(STREAM, GROUP), "confirmed") is None


def test_close_does_not_raise_for_a_failed_ack_that_was_checked(
    proxied: ProxiedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offset_confirms, "TIMEOUT_S", 0.3)
    sub = proxied.through.stream(STREAM, create=False).subscriber(group=GROUP, lease_ttl=0.6)
    sub.poll(5)
    proxied.proxy.refuse()
    proxied.proxy.cut()
    assert isinstance(failure(sub.confirm()), meteor.ConnectionFailed)
    sub.close(0.1)


@pytest.mark.parametrize("what", ["deactivate", "close"])
def test_confirm_callback_cannot_make_the_member_leave_the_group(
    harness: GroupHarness, what: str
) -> None:
    harness.fill(5)
    sub = harness.subscriber(lease_ttl=0.6)
    sub.poll(5)
    told: list[BaseException] = []

    def leave(ack: meteor.Ack) -> None:
        try:
            getattr(sub, what)()
        except BaseException as error:
            told.append(error)

    sub.confirm().add_done_callback(leave)
    eventually(lambda: told)
    assert isinstance(told[0], RuntimeError)
    assert not sub.closed
    assert stays(lambda: sub.is_assigned and harness.owner == sub.member, 0.7)
    harness.fill(2)
    assert check_values(sub.poll(5)) == [5, 6]
    assert sub.confirm().result(5) == 7


def test_lease_survives_a_refused_command_and_can_be_released(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with GroupHarness(server.url) as harness:
        harness.fill(5)
        harness.redis.execute_command("ACL", "SETUSER", "u", "on", ">p", "~*", "&*", "+@all")
        with meteor.connect(server.url.replace("://", "://u:p@")) as m:
            sub = m.stream(STREAM, create=False).subscriber(group=GROUP, lease_ttl=60)
            sub.poll(5)
            for _ in range(2):
                harness.redis.execute_command("ACL", "SETUSER", "u", "-evalsha", "-eval")
                assert isinstance(failure(sub.confirm()), meteor.MeteorError)
                harness.redis.execute_command("ACL", "SETUSER", "u", "+@all")
                assert harness.owner == sub.member
                # This poll reclaims the lease, and starts at the confirmed offset again.
                assert check_values(sub.poll(5)) == [0, 1, 2, 3, 4]
            harness.redis.execute_command("ACL", "SETUSER", "u", "-evalsha", "-eval")
            assert isinstance(failure(sub.confirm()), meteor.MeteorError)
            harness.redis.execute_command("ACL", "SETUSER", "u", "+@all")
            sub.close()
            assert harness.owner is None


# Other threads


def test_closing_in_another_thread_ends_a_poll_cleanly(url: str, rng: random.Random) -> None:
    with GroupHarness(url, capacity=100_000) as harness:
        harness.fill(*[20] * 300)
        outcomes: Counter[str] = Counter()

        def poll(sub: meteor.Subscriber) -> None:
            try:
                while True:
                    sub.poll(0.2, max_records=50)
            except meteor.MeteorError:
                outcomes["told"] += 1
            except BaseException as error:
                outcomes[repr(error)] += 1

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                sub = harness.stream.subscriber(group=f"g{sum(outcomes.values()) % 7}", lease_ttl=5)
                with background(lambda stop, sub=sub: poll(sub)):  # type: ignore[misc]
                    pass_time(rng.uniform(0.005, 0.03))
                    sub.close()
        finally:
            sys.setswitchinterval(before)
        assert set(outcomes) == {"told"}
        assert outcomes["told"] > 10
