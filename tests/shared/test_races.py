"""Races in shared subscribers: settlements during a step, lost and refused steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.errors import ConnectionFailed
from meteor_py.redis import keys
from meteor_py.shared.protocol import ConsumerGone, StepReply, StepRequest, UnknownStep
from tests.support.servers import plain_client
from tests.support.sharing import GROUP, STREAM, Queue, Runner, die, expire, get, offsets
from tests.support.waiting import eventually


def during_step(
    monkeypatch: pytest.MonkeyPatch,
    consumer: meteor.SharedSubscriber,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Run functions once, before and after the server executes the next step with a claim."""
    protocol = consumer._deliveries.protocol
    real = protocol.step
    left = [1]

    def step(connection: Any, id: str, request: StepRequest) -> StepReply:
        if not request.want or not left or left.pop() != 1:
            return real(connection, id, request)
        before()
        reply = real(connection, id, request)
        after()
        return reply

    monkeypatch.setattr(protocol, "step", step)


def lose() -> None:
    raise ConnectionFailed("Cut.")


def test_record_claimed_during_a_release_waits_for_the_released_one(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Queue(url, "AAAA") as queue:
        consumer = queue.consumer(prefetch=2)
        first, second = consumer.poll(5)
        second.ack()
        during_step(monkeypatch, consumer, after=lambda: first.release(only_this=False))
        seen = [record.offset for _ in range(3) for record in settled(consumer.poll(1))]
        assert seen == [0, 2, 3]


def settled(records: list[meteor.SharedRecord]) -> list[meteor.SharedRecord]:
    for record in records:
        record.ack()
    return records


@pytest.mark.parametrize("lost", ["request", "reply"])
@pytest.mark.parametrize("how", ["release", "reject", "ack"])
@pytest.mark.parametrize("on_poison", ["skip", "park"])
def test_settlement_counts_once_whether_its_request_or_reply_is_lost(
    url: str, monkeypatch: pytest.MonkeyPatch, lost: str, how: str, on_poison: str
) -> None:
    with Queue(url, "AAAB", on_poison=on_poison) as queue:
        consumer = queue.consumer(prefetch=3)
        first = consumer.poll(5)[0]
        getattr(first, how)()
        moment = "before" if lost == "request" else "after"
        during_step(monkeypatch, consumer, **{moment: lose})
        found = [r.offset for _ in range(3) for r in consumer.poll(0.3)]
        consumer.flush()
        state = queue.shared.describe()
        if how == "reject" and on_poison == "park":
            assert found == [3]
            assert state.blocked == 1
        elif how == "release":
            assert found == [0, 1, 2]
        else:
            # The application already has the other two records, which it still holds.
            assert found == [3]
        assert state.acked == (how == "ack")
        queue.check()


def test_expired_consumer_with_a_lost_record_continues(url: str) -> None:
    with Queue(url, settings={"capacity": 10}) as queue:
        late, other = queue.consumers(2, prefetch=5, on_gap="skip")
        queue.publish("AAAAA")
        deliveries = late._deliveries
        deliveries.exchange(5)
        assert sorted(deliveries.holdings.granted) == [0, 1, 2, 3, 4]
        queue.publish("B" * 30)
        found, lost, _ = late._prefetcher._frame_cache.fetch(sorted(deliveries.holdings.granted))
        deliveries.receive(found, lost)
        assert lost
        expire(late)
        other.flush()
        assert late.poll(5)
        queue.check()


def test_purging_a_reserved_key_lets_its_consumer_continue(url: str) -> None:
    with Queue(url, "ABCD", max_deliveries=2) as queue:
        consumer, other = queue.consumers(2)
        queue.get(consumer)
        assert queue.get(other) == "B-1"
        die(consumer)  # the last try of A-0 must be delivered alone
        consumer = queue.consumer()
        assert queue.get(other) is None
        kept = [state.key for state in queue.shared.keys() if state.key == b"A" and state.owner]
        assert kept == [b"A"], "A is not reserved for the consumer that holds B"
        assert queue.shared.purge("A") == 1
        queue.ack(other, "B-1")
        held = get(consumer)
        assert held is not None
        assert held.ordering_key == b"C"
        consumer.close()  # returns C to the group
        assert [queue.get(other) for _ in range(2)] == ["C-2", "D-3"]


def test_record_released_alone_keeps_its_place_when_its_neighbours_are_returned(url: str) -> None:
    with Queue(url, "AAAA") as queue:
        consumer, other = queue.consumers(2, prefetch=4)
        consumer.poll(5)[1].release(only_this=True)
        consumer.flush()
        consumer.close()
        assert offsets(other.poll(5)) == [0, 1, 2, 3]


@pytest.mark.parametrize("ahead", [-1, 2])
def test_step_with_the_wrong_number_is_refused_and_changes_nothing(url: str, ahead: int) -> None:
    with Queue(url, "AB") as queue:
        deliveries = queue.consumer()._deliveries
        number = deliveries.holdings.number
        with pytest.raises(UnknownStep) as refused:
            take_step(queue, deliveries._consumer, number + ahead)
        assert refused.value.number == number
        assert queue.shared.describe().scanned == 0


def test_repeated_step_gets_the_same_reply_and_changes_nothing(url: str) -> None:
    with Queue(url, "AB") as queue:
        deliveries = queue.consumer()._deliveries
        first = take_step(queue, deliveries._consumer, deliveries.holdings.number + 1)
        again = take_step(queue, deliveries._consumer, deliveries.holdings.number + 1)
        assert first.batches == again.batches == {1: [0]}
        assert queue.shared.describe().scanned == 1


def test_step_from_an_unknown_consumer_is_refused_and_changes_nothing(url: str) -> None:
    with Queue(url, "AB") as queue:
        queue.consumer()
        with pytest.raises(ConsumerGone) as refused:
            take_step(queue, "nobody", 1)
        assert refused.value.step == -1
        assert queue.shared.describe().scanned == 0
        assert len(queue.shared.describe().consumers) == 1


def take_step(queue: Queue, consumer: str, number: int) -> StepReply:
    protocol = next(iter(queue._held))._shared._protocol
    request = StepRequest(number, want=1)
    return queue.client._connector.use(lambda link: protocol.step(link, consumer, request), STREAM)


def test_consumer_that_finds_only_blocked_records_continues_to_scan_at_once(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Queue(url, max_per_key=1, settings={"capacity": 100_000}) as queue:
        queue.publish("A" * 20_000 + "B", frame=4_000)
        owner, other = queue.consumers(2)
        assert queue.get(owner) == "A-0"
        waits: list[object] = []
        monkeypatch.setattr(
            other._prefetcher._frame_cache, "wait", lambda *args: waits.append(args)
        )
        assert offsets(other.poll(10)) == [20_000]
        assert not waits


def test_last_try_is_granted_as_soon_as_everything_else_is_settled(url: str) -> None:
    with Queue(url, "A" + "B" * 5, max_deliveries=2, max_per_key=5) as queue:
        consumer = queue.consumer(prefetch=10)
        tried: list[int] = []
        slow, failed = threading.Event(), threading.Event()

        def handle(record: meteor.SharedRecord) -> None:
            tried.append(record.offset)
            if record.offset == 0 and tried.count(0) == 1:
                failed.set()
                raise ValueError("once")
            if record.offset == 1:
                failed.wait(20)
                slow.wait(20)

        with Runner(consumer, handle, concurrency=2):
            eventually(
                lambda: any(state.key == b"A" and state.owner for state in queue.shared.keys()),
                message="the key was not reserved for the last try",
            )
            slow.set()
            eventually(lambda: tried.count(0) == 2, 10, "the last try was not granted")
            eventually(lambda: queue.shared.describe().acked == 6)


def test_consumer_stopped_by_max_waiting_is_woken_when_records_are_settled(url: str) -> None:
    with Queue(url, max_per_key=2) as queue, plain_client(url) as plain:
        queue.publish("A" * 300 + "B" * 3)
        owner, other = queue.consumers(2, prefetch=1)
        plain.hset(keys.shared(STREAM, GROUP, "meta"), "max_waiting", 200)
        assert queue.get(owner) == "A-0"
        assert other.poll(0) == []
        found: list[meteor.SharedRecord] = []
        thread = threading.Thread(target=lambda: found.extend(other.poll(30)))
        thread.start()
        try:
            before = commands(plain)
            for offset in range(150):  # `owner` always holds a record of key A
                assert queue.get(owner) == f"A-{offset + 1}"
                queue.record(owner, f"A-{offset}").ack()
            eventually(lambda: not thread.is_alive(), 15, "the consumer was not woken")
        finally:
            thread.join(30)
        assert offsets(found) == [300]
        print("commands for 150 records:", commands(plain) - before)


def test_consumer_stopped_by_max_waiting_rarely_calls_the_server(url: str) -> None:
    with Queue(url, max_per_key=1) as queue, plain_client(url) as plain:
        queue.publish("A" * 300 + "B" * 3, frame=303)
        owner, other = queue.consumers(2, prefetch=1)
        plain.hset(keys.shared(STREAM, GROUP, "meta"), "max_waiting", 100)
        assert queue.get(owner) == "A-0"
        assert other.poll(0) == []
        before = commands(plain)
        assert other.poll(1.0) == []
        assert commands(plain) - before < 40


def commands(plain: Any) -> int:
    return sum(int(stat["calls"]) for stat in plain.info("commandstats").values())


# Records that are granted but not fetched yet when an earlier record is returned


def after_fetch(
    monkeypatch: pytest.MonkeyPatch,
    consumer: meteor.SharedSubscriber,
    action: Callable[[], object],
) -> None:
    """Run a function once, after frames are fetched and before they are received."""
    frames = consumer._prefetcher._frame_cache
    real = frames.fetch
    left = [action]

    def fetch(*asked: Any) -> Any:
        fetched = real(*asked)
        if left:
            left.pop()()
        return fetched

    monkeypatch.setattr(frames, "fetch", fetch)


@pytest.mark.parametrize("how", ["release", "reject"])
def test_record_returned_during_its_fetch_is_not_delivered(
    url: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with Queue(url, "A", on_poison="park") as queue:
        consumer = queue.consumer()
        (first,) = consumer.poll(5)
        queue.publish("AB")

        def fail() -> None:  # what a handler and the lease renewer might do in their threads
            getattr(first, how)()
            consumer._deliveries.exchange()

        after_fetch(monkeypatch, consumer, fail)
        found = consumer.poll(5)
        assert offsets(found) == [2]
        assert found[0].ordering_key == b"B"
        if how == "release":
            assert offsets(consumer.poll(5)) == [0, 1]


def test_record_rewound_during_its_fetch_is_claimed_again_at_once(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Queue(url, "A") as queue:
        consumer = queue.consumer()
        (first,) = consumer.poll(5)
        queue.publish("A")

        def fail() -> None:
            first.release()
            consumer._deliveries.exchange()

        after_fetch(monkeypatch, consumer, fail)
        waits: list[object] = []
        monkeypatch.setattr(
            consumer._prefetcher._frame_cache, "wait", lambda *args: waits.append(args)
        )
        assert offsets(consumer.poll(5)) == [0, 1]
        assert not waits


# Lost replies


def test_failure_counts_survive_a_lost_reply(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Queue(url, "AB") as queue:
        consumer = queue.consumer()
        for _ in range(3):
            consumer.poll(5)[0].release()
            consumer.flush()
        with monkeypatch.context() as patched:
            real = consumer._deliveries.protocol.step

            def lose(*args: Any, **options: Any) -> Any:
                patched.undo()
                real(*args, **options)
                raise ConnectionFailed("Cut.")

            patched.setattr(consumer._deliveries.protocol, "step", lose)
            found = consumer.poll(5)
        assert [(record.offset, record.failures) for record in found] == [(0, 3)]
