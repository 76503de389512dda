"""What is confirmed, when the server knows it, and who is told that it does not."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.subscribe import offset_confirms
from tests.support.group_members import GROUP, Crew
from tests.support.readers import background, check_values, drain
from tests.support.waiting import eventually


def test_after_poll_all_of_the_batch_is_confirmed(crew: Crew) -> None:
    crew.fill(10)
    sub = crew.subscriber()
    sub.poll(5, max_records=4)
    assert sub.confirm().result(5) == 4
    assert (sub.confirmed, crew.confirmed, sub.lag) == (4, 4, 6)


def test_in_a_loop_only_the_current_record_is_confirmed(crew: Crew) -> None:
    crew.fill(10)
    first = crew.subscriber()
    for record in first:
        assert first.confirm().result(5) == record.offset + 1
        assert crew.confirmed == record.offset + 1
        if record.offset == 3:
            break
    first.close()
    assert check_values(crew.subscriber().poll(5)) == [4, 5, 6, 7, 8, 9]


def test_in_a_receiver_only_the_current_record_is_confirmed(crew: Crew) -> None:
    crew.fill(10)
    first = crew.subscriber()
    seen: list[int | None] = []

    def handle(record: meteor.Record) -> None:
        if record.offset == 3:
            raise RuntimeError("cannot")
        first.confirm().result(5)
        seen.append(crew.confirmed)

    receiver = first.attach_receiver(handle)
    assert receiver.join(10)
    assert seen == [1, 2, 3]
    with pytest.raises(RuntimeError, match="cannot"):
        first.close()
    assert check_values(crew.subscriber().poll(5)) == [3, 4, 5, 6, 7, 8, 9]


def test_a_record_or_its_offset_confirms_it_and_all_before(crew: Crew) -> None:
    crew.fill(10)
    sub = crew.subscriber()
    batch = sub.poll(5)
    assert sub.confirm(batch[3]).result(5) == 4
    assert sub.confirm(6).result(5) == 7
    assert crew.confirmed == 7


@pytest.mark.parametrize("wait", [True, False])
def test_a_confirm_never_goes_back(crew: Crew, wait: bool) -> None:
    crew.fill(10)
    sub = crew.subscriber()
    sub.poll(5)
    acks = []
    for offset in (5, 3, 0):
        acks.append(sub.confirm(offset))
        if wait:
            acks[-1].result(5)
    assert [ack.exception(5) for ack in acks] == [None] * 3
    assert (sub.confirmed, crew.confirmed) == (6, 6)
    sub.close()
    assert check_values(crew.subscriber().poll(5)) == [6, 7, 8, 9]


@pytest.mark.parametrize(
    ("offset", "error"),
    [(5, ValueError), (10, ValueError), (-1, ValueError), (True, TypeError), ("3", TypeError)],
)
def test_what_is_not_a_record_that_was_handed_out_is_refused(
    crew: Crew, offset: Any, error: type[Exception]
) -> None:
    crew.fill(10)
    sub = crew.subscriber()
    sub.poll(5, max_records=5)
    with pytest.raises(error):
        sub.confirm(offset)
    sub.close()
    assert crew.confirmed is None


def test_a_subscriber_without_a_group_has_nothing_to_confirm_or_to_hold(crew: Crew) -> None:
    crew.fill(1)
    sub = crew.subscriber(group=None)
    for what in ("confirm", "deactivate", "reactivate"):
        with pytest.raises(meteor.NotGrouped, match=what):
            getattr(sub, what)()
    for what in ("confirmed", "is_assigned", "term"):
        with pytest.raises(meteor.NotGrouped, match=what):
            getattr(sub, what)


def test_another_thread_confirms_while_the_first_waits_in_a_poll(crew: Crew) -> None:
    crew.fill(5)
    sub = crew.subscriber()
    batch = sub.poll(5)

    def confirm(stop: threading.Event) -> None:
        for record in batch:
            assert sub.confirm(record).result(5) == record.offset + 1
        crew.fill(1)

    with background(confirm):
        assert check_values(sub.poll(30)) == [5]
    assert crew.confirmed == 5


def test_many_confirms_are_few_commands(crew: Crew) -> None:
    crew.fill(1000)
    sub = crew.subscriber(lease_ttl=60)
    calls = _script_calls(crew)
    began = time.monotonic()
    for record in sub:
        ack = sub.confirm()
        crew.redis.ping()  # time enough to send each of them
        if record.offset == 999:
            break
    assert ack.result(10) == 1000
    elapsed_s = time.monotonic() - began
    assert _script_calls(crew) - calls <= elapsed_s / 0.05 + 8  # some of them take the lease
    assert crew.confirmed == 1000


def test_a_confirm_that_nobody_waits_for_reaches_the_server_soon(crew: Crew) -> None:
    crew.fill(3)
    sub = crew.subscriber(lease_ttl=60)
    for end in (1, 2, 3):
        sub.poll(5, max_records=1)
        ack = sub.confirm()
        eventually(lambda end=end: crew.confirmed == end)  # type: ignore[misc]
        eventually(ack.done)


def test_a_confirm_that_is_waited_for_is_not_kept_back(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offset_confirms, "MERGE_S", 600.0)
    crew.fill(10)
    sub = crew.subscriber(lease_ttl=60)
    for offset in range(10):
        sub.poll(5, max_records=1)
        assert sub.confirm().result(10) == offset + 1


def test_a_late_confirm_of_what_is_confirmed_leaves_those_of_the_present_term_alone(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow thread: it has looked at the term, and then another begins."""
    crew.fill(10)
    sub = crew.subscriber(lease_ttl=60)
    sub.poll(5, max_records=5)
    assert sub.confirm().result(10) == 5
    monkeypatch.setattr(offset_confirms, "MERGE_S", 600.0)
    former = sub._fetcher.buffer.term
    sub.deactivate()
    sub.reactivate()
    assert len(sub.poll(5)) == 5
    assert sub._fetcher.buffer.term is not former
    sub.confirm(5).result(10)
    ack = sub.confirm(6)  # waits for more to come
    session = sub._fetcher.session
    assert session is not None
    assert session.confirm(5, former).result(0) == 5
    assert not ack.done()
    assert ack.result(10) == 7


def test_an_ack_of_a_confirm_can_be_awaited(crew: Crew) -> None:
    crew.fill(5)
    sub = crew.subscriber(lease_ttl=60)
    sub.poll(5)

    async def confirm(offset: int) -> int:
        return await asyncio.wait_for(_awaited(sub.confirm(offset)), 10)

    async def confirm_all() -> list[int]:
        return await asyncio.gather(*(confirm(offset) for offset in (2, 0, 4)))

    assert asyncio.run(confirm_all()) == [3, 1, 5]
    crew.fill(1)
    sub.poll(5)
    crew.take_away()
    with pytest.raises(meteor.LeaseLost):
        asyncio.run(confirm(5))
    assert crew.confirmed == 5


def test_a_callback_of_a_confirm_is_called_and_may_not_wait(crew: Crew) -> None:
    crew.fill(1)
    sub = crew.subscriber(lease_ttl=60)
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
def test_a_confirm_is_sent_before_the_lease_is_given_up(crew: Crew, how: str) -> None:
    for end in range(1, 11):
        crew.fill(1)
        with meteor.connect(crew.url) as client:
            stream = client.stream(crew.stream.name)
            sub = stream.subscriber(group=GROUP, lease_ttl=60)
            if how == "with":
                with sub:
                    assert check_values(sub.poll(5)) == [end - 1]
                    sub.confirm()
            else:
                assert check_values(sub.poll(5)) == [end - 1]
                sub.confirm()
                {"close": sub.close, "deactivate": sub.deactivate, "client": client.close}[how]()
            assert (crew.confirmed, crew.owner) == (end, None)


@pytest.mark.parametrize("how", ["poll", "close", "deactivate", "with"])
def test_a_refused_confirm_that_nobody_looked_at_is_raised_by_what_is_called_next(
    crew: Crew, how: str
) -> None:
    crew.fill(1)
    sub = crew.subscriber(lease_ttl=60)
    sub.poll(5)
    crew.take_away()
    sub.confirm()
    if how == "poll":
        eventually(lambda: sub.term is None)
    call = partial(sub.__exit__, None, None, None) if how == "with" else getattr(sub, how)
    with pytest.raises(meteor.LeaseLost):
        call()
    sub.close()
    assert crew.confirmed is None


def test_what_was_handed_out_in_an_earlier_term_is_not_confirmed_in_the_next(crew: Crew) -> None:
    crew.fill(10)
    sub = crew.subscriber(lease_ttl=60)
    old = sub.poll(5)
    sub.confirm(1).result(5)
    sub.deactivate()
    with pytest.raises(meteor.LeaseLost):
        sub.confirm(old[5])
    sub.reactivate()
    assert check_values(sub.poll(5, max_records=3)) == [2, 3, 4]
    with pytest.raises(meteor.LeaseLost, match="earlier term"):
        sub.confirm(old[5])
    assert sub.confirm(old[4]).result(5) == 5  # it was handed out again
    with pytest.raises(ValueError, match="not handed out"):
        sub.confirm(10)
    assert crew.confirmed == 5


@pytest.mark.parametrize("loop", [False, True])
def test_auto_confirm_confirms_what_was_handled_and_no_more(crew: Crew, loop: bool) -> None:
    crew.fill(6)
    sub = crew.subscriber(auto_confirm=True, lease_ttl=60)
    if loop:
        for record in sub:
            if record.offset == 4:
                break
    else:
        sub.poll(5, max_records=4)
        sub.poll(5, max_records=2)
    eventually(lambda: crew.confirmed == 4)
    sub.close()
    assert crew.confirmed == 4
    assert drain(crew.subscriber()) == [4, 5]


def _script_calls(crew: Crew) -> int:
    stats = crew.redis.info("commandstats")
    return sum(
        stats.get(name, {"calls": 0})["calls"] for name in ("cmdstat_eval", "cmdstat_evalsha")
    )


async def _awaited(ack: meteor.Ack) -> int:
    return await ack
