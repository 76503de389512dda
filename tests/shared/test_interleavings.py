"""Rare interleavings of consumers, publishers and interrupts in shared groups."""

from __future__ import annotations

import threading

import pytest

import meteor_py as meteor
from meteor_py.shared.holdings import DeliveryBatch, Holdings
from meteor_py.shared.protocol import StepReport
from tests.support.sharing import GROUP, LONG_S, Queue, offsets
from tests.support.waiting import eventually


def test_frame_larger_than_a_shrunken_ring_is_delivered_whole(url: str) -> None:
    with Queue(url, settings={"capacity": 10_000}) as queue:
        with queue.stream.publisher() as publisher:
            publisher.publish(b"x", key=b"k").result(20)
            consumer = queue.consumer(prefetch=2_000)
            consumer.ack(consumer.poll(20))
            consumer.flush()
            queue.stream.configure(capacity=100)
            publisher.publish_many([b"x"] * 1_000, keys=[b"k"] * 1_000).result(20)
        assert queue.stream.bounds() == (1, 1_001)
        found: list[meteor.SharedRecord] = []
        while len(found) < 1_000:
            records = consumer.poll(20)
            consumer.ack(records)
            found += records
        assert offsets(found) == list(range(1, 1_001))


def test_consumers_that_leave_delete_their_lists_of_waiting_keys(url: str) -> None:
    with Queue(url, ["k"] * 200, max_per_key=32) as queue:
        for _ in range(3):
            with queue.stream.shared_subscriber(GROUP) as consumer:
                assert len(consumer.poll(20)) == 32
        names = queue.client._connector.call("KEYS", "*:more:*")
        assert names == []


def test_record_wakes_another_consumer_after_the_watching_one_has_left(url: str) -> None:
    with Queue(url, ["k"]) as queue:
        watcher, idle = queue.consumers(2)
        watcher.ack(watcher.poll(20))
        watcher.flush()
        received: list[meteor.SharedRecord] = []

        def wait() -> None:
            eventually(lambda: watcher._deliveries.idle is not None)
            received.extend(idle.poll(LONG_S / 4))

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert watcher.poll(1.0) == []
        watcher.close()
        with queue.stream.publisher() as publisher:
            publisher.publish(b"x", key=b"z").result(20)
        # Wait for less than 0.3 lease TTLs. After that, the idle consumer claims without a wake-up.
        waiting.join(LONG_S / 4)
        assert offsets(received) == [1]


def test_interrupted_step_does_not_send_a_settlement_twice() -> None:
    holdings = Holdings(reject_rewinds=False)
    batch = DeliveryBatch(1, [5, 6])
    holdings._batches[1] = batch
    holdings._acknowledge(batch, [5, 6])
    request, last = holdings.begin_step(10)
    assert (request.acks, last) == ((1,), True)
    holdings._acknowledge(batch, [5, 6])  # as if a Ctrl-C had kept the queue from being cleared
    again, last = holdings.begin_step(10)
    assert again is request
    holdings.end_step()
    assert not holdings.begin_step(10)[0].acks


@pytest.mark.parametrize("step", [0, 1, -1])
def test_consumer_can_be_fenced_after_a_partly_applied_reply(step: int) -> None:
    holdings = Holdings(reject_rewinds=False)
    batch = DeliveryBatch(1, [5])
    holdings._batches[1] = batch
    holdings._acknowledge(batch, [5])
    request, _ = holdings.begin_step(10)
    holdings._close_sent(request)  # as if a Ctrl-C had interrupted apply() after this call
    assert holdings.fence(step, StepReport.parse(b"")) == ([], [])
    assert holdings.request is None
