"""Confirms have the documented scope, are sent in time, and report refusals."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.runtime.completion import SESSION_PREFIX
from meteor_py.subscribe import offset_confirms
from meteor_py.subscribe.group_session import GroupSession
from meteor_py.subscribe.lease import Lease
from tests.support.group_members import GROUP, GroupHarness
from tests.support.proxied_stream import ProxiedStream
from tests.support.proxied_stream import proxied as proxied
from tests.support.readers import background, check_values, drain
from tests.support.waiting import eventually


def test_confirm_after_poll_confirms_the_batch(harness: GroupHarness) -> None:
    harness.fill(10)
    sub = harness.subscriber()
    sub.poll(5, max_records=4)
    assert sub.confirm().result(5) == 4
    assert (sub.confirmed, harness.confirmed, sub.lag) == (4, 4, 6)


def test_confirm_in_a_loop_confirms_the_current_record(harness: GroupHarness) -> None:
    harness.fill(10)
    first = harness.subscriber()
    for record in first:
        assert first.confirm().result(5) == record.offset + 1
        assert harness.confirmed == record.offset + 1
        if record.offset == 3:
            break
    first.close()
    assert check_values(harness.subscriber().poll(5)) == [4, 5, 6, 7, 8, 9]


def test_confirming_a_record_or_offset_confirms_all_before_it(harness: GroupHarness) -> None:
    harness.fill(10)
    sub = harness.subscriber()
    batch = sub.poll(5)
    assert sub.confirm(batch[3]).result(5) == 4
    assert sub.confirm(6).result(5) == 7
    assert harness.confirmed == 7


@pytest.mark.parametrize("wait", [True, False])
def test_confirmed_offset_never_moves_backwards(harness: GroupHarness, wait: bool) -> None:
    harness.fill(10)
    sub = harness.subscriber()
    sub.poll(5)
    acks = []
    for offset in (5, 3, 0):
        acks.append(sub.confirm(offset))
        if wait:
            acks[-1].result(5)
    assert [ack.exception(5) for ack in acks] == [None] * 3
    assert (sub.confirmed, harness.confirmed) == (6, 6)
    sub.close()
    assert check_values(harness.subscriber().poll(5)) == [6, 7, 8, 9]


@pytest.mark.parametrize(
    ("offset", "error"),
    [(5, ValueError), (10, ValueError), (-1, ValueError), (True, TypeError), ("3", TypeError)],
)
def test_confirming_a_record_that_was_not_returned_is_refused(
    harness: GroupHarness, offset: Any, error: type[Exception]
) -> None:
    harness.fill(10)
    sub = harness.subscriber()
    sub.poll(5, max_records=5)
    with pytest.raises(error):
        sub.confirm(offset)
    sub.close()
    assert harness.confirmed is None


def test_group_methods_raise_not_grouped_if_the_subscriber_has_no_group(
    harness: GroupHarness,
) -> None:
    harness.fill(1)
    sub = harness.subscriber(group=None)
    for what in ("confirm", "deactivate", "reactivate"):
        with pytest.raises(meteor.NotGrouped, match=what):
            getattr(sub, what)()
    for what in ("confirmed", "is_assigned", "term"):
        with pytest.raises(meteor.NotGrouped, match=what):
            getattr(sub, what)


def test_another_thread_can_confirm_during_a_poll(harness: GroupHarness) -> None:
    harness.fill(5)
    sub = harness.subscriber()
    batch = sub.poll(5)

    def confirm(stop: threading.Event) -> None:
        for record in batch:
            assert sub.confirm(record).result(5) == record.offset + 1
        harness.fill(1)

    with background(confirm):
        assert check_values(sub.poll(30)) == [5]
    assert harness.confirmed == 5


def test_many_confirms_are_merged_into_few_commands(harness: GroupHarness) -> None:
    harness.fill(1000)
    sub = harness.subscriber(lease_ttl=60)
    calls = _script_calls(harness)
    began = time.monotonic()
    for record in sub:
        ack = sub.confirm()
        harness.redis.ping()  # leaves time to send each confirm separately
        if record.offset == 999:
            break
    assert ack.result(10) == 1000
    elapsed_s = time.monotonic() - began
    assert _script_calls(harness) - calls <= elapsed_s / 0.05 + 8  # some calls renew the lease
    assert harness.confirmed == 1000


def test_confirm_without_a_waiter_is_sent_soon(harness: GroupHarness) -> None:
    harness.fill(3)
    sub = harness.subscriber(lease_ttl=60)
    for end in (1, 2, 3):
        sub.poll(5, max_records=1)
        ack = sub.confirm()
        eventually(lambda end=end: harness.confirmed == end)  # type: ignore[misc]
        eventually(ack.done)


def test_confirm_with_a_waiter_is_sent_at_once(
    harness: GroupHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offset_confirms, "MERGE_S", 600.0)
    harness.fill(10)
    sub = harness.subscriber(lease_ttl=60)
    for offset in range(10):
        sub.poll(5, max_records=1)
        assert sub.confirm().result(10) == offset + 1


def test_confirm_that_its_caller_sends_does_not_wake_the_renewal_thread(
    harness: GroupHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.fill(500)
    sub = harness.subscriber(lease_ttl=60)
    sub.poll(5)
    sub.confirm(0).result(30)  # from now on, the thread checks for confirms every MERGE_S seconds
    wakes: list[float] = []
    next_job = GroupSession.next_job

    def counted(self: GroupSession, retry_at: float) -> Any:
        wakes.append(time.monotonic())
        return next_job(self, retry_at)

    monkeypatch.setattr(GroupSession, "next_job", counted)
    began = time.monotonic()
    for offset in range(1, 500):
        assert sub.confirm(offset).result(30) == offset + 1
    elapsed_s = time.monotonic() - began
    assert len(wakes) <= 2 * elapsed_s / offset_confirms.MERGE_S + 10


def test_deactivate_returns_as_soon_as_the_last_confirm_is_sent(harness: GroupHarness) -> None:
    harness.fill(10)
    sub = harness.subscriber(lease_ttl=60)
    for end in range(1, 11):
        sub.poll(5, max_records=1)
        sub.confirm()
        sub.deactivate(timeout=600)  # a missed wake-up would outlast the test's own timeout
        assert (harness.confirmed, harness.owner) == (end, None)
        sub.reactivate()


def test_thread_that_waits_for_a_confirm_sends_it_if_its_timeout_is_long_enough(
    harness: GroupHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.fill(20)
    sub = harness.subscriber()
    sub.poll(5)
    sub.confirm(0).result(5)  # opens the connection
    senders: list[str] = []
    send = Lease.confirm

    def confirm(self: Lease, *args: Any, **options: Any) -> int:
        senders.append(threading.current_thread().name)
        return send(self, *args, **options)

    monkeypatch.setattr(Lease, "confirm", confirm)
    assert sub.confirm(3).result() == 4
    assert sub.confirm(5).result(0.5) == 6  # a reply may take longer, so another thread sends it
    ack = sub.confirm(7)
    ack.add_done_callback(lambda _: None)
    assert ack.result() == 8
    mine, *others = senders
    assert mine == threading.current_thread().name
    assert len(others) == 2
    assert all(name.startswith(SESSION_PREFIX) for name in others)


def test_confirm_that_fails_in_a_waiting_thread_is_retried_by_the_renewal_thread(
    proxied: ProxiedStream,
) -> None:
    with proxied.publisher() as pub:
        pub.publish_many([b"%d" % number for number in range(10)]).result(10)
    sub = proxied.subscriber(group=GROUP, initial_offset="earliest")
    assert len(sub.poll(5)) == 10
    sub.confirm(0).result(5)
    for offset in range(1, 10):
        proxied.proxy.cut_after_request(match=b"EVALSHA")
        assert sub.confirm(offset).result() == offset + 1
        assert sub.confirmed == offset + 1


def test_late_confirm_from_an_old_term_does_not_affect_the_current_term(
    harness: GroupHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard: another term begins just after a slow thread has read the term."""
    harness.fill(10)
    sub = harness.subscriber(lease_ttl=60)
    sub.poll(5, max_records=5)
    assert sub.confirm().result(10) == 5
    monkeypatch.setattr(offset_confirms, "MERGE_S", 600.0)
    former = sub._fetcher.buffer.term
    sub.deactivate()
    sub.reactivate()
    assert len(sub.poll(5)) == 5
    assert sub._fetcher.buffer.term is not former
    sub.confirm(5).result(10)
    ack = sub.confirm(6)  # delayed, to be merged with others
    session = sub._fetcher.session
    assert session is not None
    assert session.confirm(5, former).result(0) == 5
    assert not ack.done()
    assert ack.result(10) == 7


def test_confirm_ack_can_be_awaited(harness: GroupHarness) -> None:
    harness.fill(5)
    sub = harness.subscriber(lease_ttl=60)
    sub.poll(5)

    async def confirm(offset: int) -> int:
        return await asyncio.wait_for(_awaited(sub.confirm(offset)), 10)

    async def confirm_all() -> list[int]:
        return await asyncio.gather(*(confirm(offset) for offset in (2, 0, 4)))

    assert asyncio.run(confirm_all()) == [3, 1, 5]
    harness.fill(1)
    sub.poll(5)
    harness.take_away()
    with pytest.raises(meteor.LeaseLost):
        asyncio.run(confirm(5))
    assert harness.confirmed == 5


def test_closing_in_a_confirm_callback_raises_instead_of_waiting(harness: GroupHarness) -> None:
    harness.fill(1)
    sub = harness.subscriber(lease_ttl=60)
    sub.poll(5)
    seen: list[object] = []

    def done(ack: meteor.Ack) -> None:
        seen.append(ack.offset)
        try:
            sub.close()
        except RuntimeError as error:
            seen.append(type(error))

    sub.confirm().add_done_callback(done)
    eventually(lambda: len(seen) == 2)
    assert seen == [1, RuntimeError]


@pytest.mark.parametrize("how", ["close", "deactivate", "with", "client"])
def test_confirm_is_sent_before_the_lease_is_released(harness: GroupHarness, how: str) -> None:
    for end in range(1, 11):
        harness.fill(1)
        with meteor.connect(harness.url) as client:
            stream = client.stream(harness.stream.name, create=True)
            sub = stream.subscriber(group=GROUP, lease_ttl=60)
            if how == "with":
                with sub:
                    assert check_values(sub.poll(5)) == [end - 1]
                    sub.confirm()
            else:
                assert check_values(sub.poll(5)) == [end - 1]
                sub.confirm()
                {"close": sub.close, "deactivate": sub.deactivate, "client": client.close}[how]()
            assert (harness.confirmed, harness.owner) == (end, None)


@pytest.mark.parametrize("how", ["poll", "close", "deactivate", "with"])
def test_unchecked_confirm_refusal_is_raised_by_the_next_call(
    harness: GroupHarness, how: str
) -> None:
    harness.fill(1)
    sub = harness.subscriber(lease_ttl=60)
    sub.poll(5)
    harness.take_away()
    sub.confirm()
    if how == "poll":
        eventually(lambda: sub.term is None)
    call = partial(sub.__exit__, None, None, None) if how == "with" else getattr(sub, how)
    with pytest.raises(meteor.LeaseLost):
        call()
    sub.close()
    assert harness.confirmed is None


def test_records_from_an_earlier_term_cannot_be_confirmed(harness: GroupHarness) -> None:
    harness.fill(10)
    sub = harness.subscriber(lease_ttl=60)
    old = sub.poll(5)
    sub.confirm(1).result(5)
    sub.deactivate()
    with pytest.raises(meteor.LeaseLost):
        sub.confirm(old[5])
    sub.reactivate()
    assert check_values(sub.poll(5, max_records=3)) == [2, 3, 4]
    with pytest.raises(meteor.LeaseLost, match="earlier term"):
        sub.confirm(old[5])
    assert sub.confirm(old[4]).result(5) == 5  # the record was returned again
    with pytest.raises(ValueError, match="not been delivered yet"):
        sub.confirm(10)
    assert harness.confirmed == 5


@pytest.mark.parametrize("loop", [False, True])
def test_auto_confirm_confirms_only_processed_records(harness: GroupHarness, loop: bool) -> None:
    harness.fill(6)
    sub = harness.subscriber(auto_confirm=True, lease_ttl=60)
    if loop:
        for record in sub:
            if record.offset == 4:
                break
    else:
        sub.poll(5, max_records=4)
        sub.poll(5, max_records=2)
    eventually(lambda: harness.confirmed == 4)
    sub.close()
    assert harness.confirmed == 4
    assert drain(harness.subscriber()) == [4, 5]


def _script_calls(harness: GroupHarness) -> int:
    stats = harness.redis.info("commandstats")
    return sum(
        stats.get(name, {"calls": 0})["calls"] for name in ("cmdstat_eval", "cmdstat_evalsha")
    )


async def _awaited(ack: meteor.Ack) -> int:
    return await ack
