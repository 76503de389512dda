"""Time limits for records: ack_timeout, record.extend(), and the limit for handlers in run()."""

from __future__ import annotations

import threading

import pytest

import meteor_py as meteor
from meteor_py.shared.record import Standing
from tests.support.sharing import Queue, Runner, drain, offsets
from tests.support.waiting import eventually


def polls(*consumers: meteor.SharedSubscriber) -> list[meteor.SharedRecord]:
    """Poll with each consumer in turn until the last one gets records; return them."""
    found: list[meteor.SharedRecord] = []

    def poll() -> bool:
        for consumer in consumers:
            found[:] = consumer.poll(0.01)
        return bool(found)

    eventually(poll)
    return found


def test_record_that_is_never_settled_expires_and_is_redelivered(
    any_url: str,
) -> None:
    with Queue(any_url, "AAB") as queue:
        forgetful, other = queue.consumer(ack_timeout=0.3, prefetch=2), queue.consumer()
        first, second = forgetful.poll(5)
        assert offsets(polls(other)) == [2]
        # Closing `forgetful` tells the server at once that it has returned its expired records.
        eventually(lambda: first.standing is Standing.EXPIRED)
        forgetful.close()
        again = polls(other)
        assert [(record.offset, record.failures) for record in again] == [(0, 1), (1, 0)]
        assert second.standing is Standing.REWOUND


def test_settling_an_expired_record_raises_and_names_the_timeout(url: str) -> None:
    with Queue(url, "A") as queue:
        c1 = queue.consumer(ack_timeout=0.05)
        (record,) = c1.poll(5)
        eventually(lambda: record.standing is Standing.EXPIRED)
        for settle in (record.ack, record.release, record.reject, lambda: record.extend(1)):
            with pytest.raises(
                meteor.AckTimeout, match=r"within 0\.05 seconds \(ack_timeout\)"
            ) as caught:
                settle()
            assert (caught.value.offsets, caught.value.setting) == ((0,), "ack_timeout")
            assert caught.value.seconds == 0.05
        assert queue.shared.describe().consumers[0].name == c1.member  # c1 keeps its lease


def test_time_limit_does_not_apply_to_buffered_records(url: str) -> None:
    with Queue(url, "ABC") as queue:
        c1 = queue.consumer(ack_timeout=0.1)
        (first,) = c1.poll(5, max_records=1)
        eventually(lambda: first.standing is Standing.EXPIRED)
        rest = c1.poll(5)
        assert [record.failures for record in rest if record.offset > 0] == [0, 0]


def test_expired_record_becomes_a_dead_letter_that_names_the_timeout(url: str) -> None:
    with Queue(url, "A", max_deliveries=2, dead_letter="dead") as queue:
        c1 = queue.consumer(ack_timeout=0.05)

        def is_dead() -> bool:
            c1.poll(0.1)  # the application never settles the record
            return queue.shared.describe().dead == 1

        eventually(is_dead)
        (letter,) = next(queue.client.stream("dead").read())
        assert letter.headers is not None
        wanted = b"It was not settled within 0.05 seconds (ack_timeout)."
        assert letter.headers["meteor-reason"] == wanted


def test_extended_record_outlives_ack_timeout(url: str) -> None:
    with Queue(url, "AB") as queue:
        c1 = queue.consumer(ack_timeout=0.2)
        first, second = c1.poll(5)
        first.extend(3600)
        first.extend(0.001)  # extend() never shortens the limit
        eventually(lambda: second.standing is Standing.EXPIRED)
        assert first.standing is Standing.HELD
        first.ack()
        c1.flush()
        assert queue.shared.describe().acked == 1


def test_extended_record_eventually_expires(url: str) -> None:
    with Queue(url, "A") as queue:
        c1 = queue.consumer(ack_timeout=0.05)
        (record,) = c1.poll(5)
        record.extend(0.1)
        eventually(lambda: record.standing is Standing.EXPIRED)
        with pytest.raises(meteor.AckTimeout, match=r"0\.1 seconds \(extend\)"):
            record.ack()


def test_extended_record_keeps_a_silent_consumers_lease(url: str) -> None:
    with Queue(url, "AB", lease_ttl=0.3) as queue:
        busy, other = queue.consumer(max_poll_interval=0.05, ack_timeout=None), queue.consumer()
        (record, _) = busy.poll(5)
        record.extend(3600)
        renewed = busy._deliveries.spoke_at
        eventually(lambda: busy._deliveries.spoke_at > renewed + 1)  # more than three TTLs
        assert other.poll(0) == []
        busy.commit()
        assert queue.shared.confirmed == 2


def test_record_never_expires_if_ack_timeout_is_none(url: str) -> None:
    with Queue(url, "AB") as queue:
        c1 = queue.consumer(ack_timeout=None)
        kept = c1.poll(5)
        with c1._deliveries.condition:
            assert c1._deliveries.expire_records() == float("inf")
        c1.ack(kept)
        c1.flush()
        assert queue.shared.confirmed == 2


def test_default_time_limit_is_half_an_hour() -> None:
    assert meteor.ConsumerConfig().ack_timeout == 1800


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), ("1", TypeError)])
def test_ack_timeout_and_extension_are_validated(
    url: str, value: float, error: type[Exception]
) -> None:
    with Queue(url, "A") as queue:
        with pytest.raises(error, match="ack_timeout"):
            queue.consumer(ack_timeout=value)
        (record,) = queue.consumer().poll(5)
        with pytest.raises(error, match="seconds"):
            record.extend(value)


# run()


def test_time_limit_in_run_starts_with_the_handler(url: str) -> None:
    with Queue(url, "AAAA") as queue:
        seen: list[tuple[int, int]] = []

        def handle(record: meteor.SharedRecord) -> None:
            seen.append((record.offset, record.failures))
            threading.Event().wait(0.15)  # four of these take longer than ack_timeout

        with Runner(queue.consumer(ack_timeout=0.45), handle):
            eventually(lambda: queue.shared.confirmed == 4)
        assert seen == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_handler_that_exceeds_ack_timeout_loses_its_record_to_another_consumer(url: str) -> None:
    with Queue(url, "A") as queue:
        one, two = queue.consumers(2, ack_timeout=0.1)
        begun, go_on = threading.Event(), threading.Event()

        def handle(record: meteor.SharedRecord) -> None:
            begun.set()
            assert go_on.wait(30)

        with Runner(one, handle):
            assert begun.wait(20)
            (record,) = polls(two)
            record.ack()
            two.flush()
            go_on.set()
        assert queue.shared.describe().acked == 1


def test_handler_can_extend_its_record_beyond_max_poll_interval(url: str) -> None:
    with Queue(url, "AB") as queue:
        both = threading.Barrier(2, timeout=30)
        seen: list[tuple[int, int]] = []

        def handle(record: meteor.SharedRecord) -> None:
            seen.append((record.offset, record.failures))
            if record.ordering_key == b"A":
                record.extend(3600)
                both.wait()
            elif record.failures:  # B was redelivered because it exceeded the limit; A was not
                both.wait()
            else:
                eventually(lambda: record.standing is Standing.EXPIRED)

        with Runner(queue.consumer(max_poll_interval=0.2), handle, concurrency=2):
            eventually(lambda: queue.shared.confirmed == 2, 30)
        assert sorted(seen) == [(0, 0), (1, 0), (1, 1)]


def test_unstarted_records_have_no_time_limit_after_run_is_stopped(url: str) -> None:
    with Queue(url, "AA") as queue:
        c1 = queue.consumer(ack_timeout=0.2)
        begun = threading.Event()

        def handle(record: meteor.SharedRecord) -> None:
            begun.set()
            c1.stop()

        with Runner(c1, handle) as runner:
            assert begun.wait(20)
            runner.join()
        c1.flush()
        with c1._deliveries.condition:
            assert [record.deadline for record in c1._deliveries.holdings.held()] == [float("inf")]
        assert offsets(drain(c1)) == [1]
