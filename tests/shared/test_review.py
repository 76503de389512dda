"""Shared subscribers: what a reviewer found, each with the moment at which it went wrong."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.errors import ConnectionFailed
from meteor_py.shared import deliveries, prefetcher, worker_pool
from meteor_py.shared.frame_cache import FrameCache
from meteor_py.shared.record import Standing
from tests.shared.test_unreadable import archive
from tests.support.reading import background
from tests.support.sharing import Queue, Runner, offsets
from tests.support.waiting import eventually


def after_fetch(
    monkeypatch: pytest.MonkeyPatch,
    consumer: meteor.SharedSubscriber,
    action: Callable[[], object],
) -> None:
    """Have something happen once, when frames are fetched and not yet received."""
    frames = consumer._prefetcher._frame_cache
    real = frames.fetch
    left = [action]

    def fetch(asked: Any) -> Any:
        fetched = real(asked)
        if left:
            left.pop()()
        return fetched

    monkeypatch.setattr(frames, "fetch", fetch)


# What was granted and is not fetched, when one before it is returned


@pytest.mark.parametrize("how", ["release", "reject"])
def test_what_is_being_fetched_is_not_handed_out_once_the_server_has_it_back(
    url: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with Queue(url, "A", on_poison="park") as queue:
        consumer = queue.consumer()
        (first,) = consumer.poll(5)
        queue.publish("AB")

        def fail() -> None:  # as a handler does in a thread, and then the lease renewer
            getattr(first, how)()
            consumer._deliveries.exchange()

        after_fetch(monkeypatch, consumer, fail)
        found = consumer.poll(5)
        assert offsets(found) == [2]
        assert found[0].ordering_key == b"B"
        if how == "release":
            assert offsets(consumer.poll(5)) == [0, 1]


def test_what_was_rewound_while_it_was_fetched_is_claimed_again_without_waiting(
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


def test_groups_stay_in_order_while_handlers_fail_and_more_is_published(
    url: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "_DELAY_S", (0.001, 0.01))
    records, groups = 3_000, 6
    with Queue(url, settings={"capacity": 100_000}, max_deliveries=0, max_per_key=16) as queue:
        names = [f"k{number % groups}" for number in range(records)]
        lock = threading.Lock()
        due = {f"k{number}".encode(): number for number in range(groups)}
        busy: set[bytes] = set()
        wrong: list[tuple[int, int]] = []

        def handle(record: meteor.SharedRecord) -> None:
            with lock:
                if record.offset > due[record.ordering_key] or record.ordering_key in busy:
                    wrong.append((due[record.ordering_key], record.offset))
                busy.add(record.ordering_key)
                fails = rng.random() < 0.1
            with lock:
                busy.discard(record.ordering_key)
                if fails:
                    raise ValueError
                if record.offset == due[record.ordering_key]:
                    due[record.ordering_key] += groups

        def publish(stop: threading.Event) -> None:
            for start in range(0, records, 10):
                queue.publish(names[start : start + 10], frame=3)

        one, two = queue.consumers(2, prefetch=64)
        with background(publish), Runner(one, handle, 4), Runner(two, handle, 4):
            eventually(lambda: queue.shared.confirmed == records, 60)
        assert wrong == []


# Steps that are not too large


class Steps:
    """Notes what the steps of a consumer say and ask for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, consumer: meteor.SharedSubscriber) -> None:
        protocol = consumer._deliveries.protocol
        real = protocol.step
        self.acks: list[int] = []
        self.others: list[int] = []
        self.wants: list[int] = []

        def step(*args: Any, **options: Any) -> Any:
            self.acks.append(sum(map(len, options["acks"].values())))
            self.others.append(len(options["others"]))
            self.wants.append(options["want"])
            return real(*args, **options)

        monkeypatch.setattr(protocol, "step", step)


def test_what_was_settled_is_said_in_parts_and_acknowledgements_first(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "_ACKS_MAX", 4)
    monkeypatch.setattr(deliveries, "_OTHERS_MAX", 3)
    with Queue(url, "ABCDEABCDE" + "FFFF", lease_ttl=60.0) as queue:
        consumer = queue.consumer()
        records = consumer.poll(5)
        steps = Steps(monkeypatch, consumer)
        with consumer._deliveries.condition:  # so that the lease renewer does not say some of it
            records[13].ack()
            records[12].release()  # which takes none with it
            for record in records[:5]:
                record.reject("no")
            for record in records[5:10]:
                record.ack()
            consumer.flush()
        assert steps.acks == [4, 2, 0]
        assert steps.others == [0, 3, 3]
        state = queue.shared.describe()
        assert (state.acked, state.dead) == (6, 5)
        assert offsets(consumer.poll(5)) == [12]


def test_only_the_last_part_claims(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "_ACKS_MAX", 2)
    with Queue(url, "ABCDEFGH") as queue:
        consumer = queue.consumer(prefetch=5)
        records = consumer.poll(5)
        steps = Steps(monkeypatch, consumer)
        with consumer._deliveries.condition:
            for record in records:
                record.ack()
            assert offsets(consumer.poll(5)) == [5, 6, 7]
        assert steps.wants[:3] == [0, 0, 5]


def test_much_is_claimed_in_parts(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetcher, "_CLAIM_MAX", 4)
    with Queue(url, "AB" * 10) as queue:
        consumer = queue.consumer(prefetch=10)
        steps = Steps(monkeypatch, consumer)
        assert offsets(consumer.poll(5)) == [*range(10)]
        assert steps.wants == [4, 4, 2]


def test_of_many_frames_only_a_few_are_in_memory_at_a_time(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = [0]
    keep = FrameCache._keep

    def keeping(self: FrameCache, chunk: Any) -> None:
        keep(self, chunk)
        most[0] = max(most[0], sum(map(len, self._frames.values())))

    monkeypatch.setattr(FrameCache, "_keep", keeping)
    with Queue(url, max_per_key=1, settings={"capacity": 100_000}) as queue:
        for number in range(60):
            queue.publish(["A"] * 399 + [f"b{number}"], frame=400)
        owner, other = queue.consumers(2)
        assert queue.get(owner) == "A-0"
        queue.shared.keys(look_ahead=True)
        assert offsets(other.poll(10)) == [400 * number + 399 for number in range(60)]
        assert most[0] <= 33 * 400  # those that are kept, and those that were asked for


def test_a_piece_of_the_store_that_overlaps_a_frame_is_replaced_by_it(any_url: str) -> None:
    with Queue(any_url) as queue:
        queue.publish("ABCDEFGHIJ", frame=10)
        frames = queue.consumer()._prefetcher._frame_cache
        chunk = frames.read_stored(0, 10)
        frames._keep(chunk.slice(5, 8))
        frames._keep(chunk.slice(2, 3))
        assert [*frames.fetch([2, 6, 8, 9]).found] == [2, 6, 8, 9]
        assert frames._firsts == [0]


def test_a_poll_that_only_looks_does_not_go_through_all_of_the_store(
    url: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meteor_py.shared import frame_cache

    monkeypatch.setattr(frame_cache, "_STORED_MAX", 2)
    settings = {"capacity": 20, "store": str(tmp_path), "max_unarchived": 200_000}
    with Queue(url, max_per_key=1, settings=settings) as queue:
        queue.publish("A" * 100 + "B", frame=10)
        archive(queue)
        owner, other = queue.consumers(2, prefetch=1)
        (first,) = owner.poll(5)
        steps = Steps(monkeypatch, other)
        assert other.poll(0) == []
        assert 0 < len(steps.wants) <= prefetcher._ROUNDS_MIN
        eventually(lambda: offsets(other.poll(0)) == [100])  # it goes on where it was
        assert first.standing is Standing.HELD


# run(), and its end


class Interrupted(BaseException):
    """As ``sys.exit()`` in a handler."""


def test_what_a_handler_was_at_when_it_ended_the_run_comes_again_first(url: str) -> None:
    with Queue(url, "AAA") as queue:
        consumer = queue.consumer()

        def end(record: meteor.SharedRecord) -> None:
            raise Interrupted

        with pytest.raises(Interrupted):
            consumer.run(end)
        seen: list[tuple[int, int]] = []
        with Runner(consumer, lambda record: seen.append((record.offset, record.failures))):
            eventually(lambda: queue.shared.confirmed == 3, 20)
        assert seen == [(0, 1), (1, 0), (2, 0)]


def test_a_run_that_begins_while_it_is_closed_says_so(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meteor_py.shared import subscriber

    with Queue(url) as queue:
        consumer = queue.consumer()

        def closing(*args: Any) -> worker_pool.WorkerPool:
            consumer.close()
            return worker_pool.WorkerPool(*args)

        monkeypatch.setattr(subscriber, "WorkerPool", closing)
        with Runner(consumer, lambda record: None) as runner:
            runner.join()
        assert isinstance(runner.error, meteor.MeteorError)
        assert "closed" in str(runner.error)


def test_a_close_that_gets_no_further_than_its_first_line_ends_a_run(url: str) -> None:
    with Queue(url) as queue:
        consumer = queue.consumer()
        with Runner(consumer, lambda record: None) as runner:
            eventually(lambda: consumer._lease_renewer.polling)
            consumer._prefetcher.halt()
            runner.join()
        assert runner.error is None


def test_a_stop_before_a_run_is_for_that_run(url: str) -> None:
    with Queue(url, "A") as queue:
        consumer = queue.consumer()
        consumer.stop()
        seen: list[int] = []
        with Runner(consumer, lambda record: seen.append(record.offset)) as runner:
            runner.join()
        assert (runner.error, seen) == (None, [])
        with Runner(consumer, lambda record: seen.append(record.offset)):
            eventually(lambda: seen == [0])


def test_while_it_runs_nobody_else_may_run_or_poll(url: str) -> None:
    with Queue(url, "A") as queue:
        consumer = queue.consumer()
        refused: list[str] = []
        done = threading.Event()

        def handle(record: meteor.SharedRecord) -> None:
            for call in (lambda: consumer.run(print), consumer.poll, lambda: next(iter(consumer))):
                try:
                    call()
                except meteor.MeteorError as error:
                    refused.append(str(error))
            done.set()

        with Runner(consumer, handle):
            assert done.wait(20)
        assert ["run()" in sentence for sentence in refused] == [True] * 3
        queue.publish("B")
        assert offsets(consumer.poll(5)) == [1]


def test_what_a_ctrl_c_keeps_from_being_shared_out_is_there_for_the_next_run(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Queue(url, "AB") as queue:
        consumer = queue.consumer()
        (own,) = consumer.poll(5, 1)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(worker_pool.WorkerPool, "_distribute", interrupt)
            with pytest.raises(KeyboardInterrupt):
                consumer.run(lambda record: None)
        assert offsets(consumer.poll(5)) == [1]
        assert own.standing is Standing.HELD


def test_a_ctrl_c_while_records_are_handed_out_leaves_them_for_the_next_poll(url: str) -> None:
    interrupts = [KeyboardInterrupt]

    class Interrupting(deque[meteor.SharedRecord]):
        def popleft(self) -> meteor.SharedRecord:
            if len(self) == 2 and interrupts:
                raise interrupts.pop()
            return super().popleft()

    with Queue(url, "ABA") as queue:
        consumer = queue.consumer()
        consumer._prefetcher.fill(5)
        consumer._prefetcher._buffer = Interrupting(consumer._prefetcher._buffer)
        with pytest.raises(KeyboardInterrupt):
            consumer.poll(5)
        assert offsets(consumer.poll(5)) == [0, 1, 2]
        consumer.commit()
        assert queue.shared.confirmed == 3


# An reply that is lost


def test_how_often_a_record_has_failed_is_known_after_a_lost_answer(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
