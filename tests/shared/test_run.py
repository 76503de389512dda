"""Processing with shared subscribers: poll, iteration, run(), and ways to end them."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.shared import lease_renewer, subscriber, worker_pool
from meteor_py.shared.record import Standing
from tests.support.readers import background, blocked
from tests.support.sharing import GROUP, STREAM, Queue, Runner, drain, offsets
from tests.support.waiting import eventually


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redeliver a record at once after its handler failed."""
    monkeypatch.setattr(worker_pool, "_DELAY_S", (0.001, 0.002))


# Poll


def test_poll_waits_for_new_records(any_url: str) -> None:
    with Queue(any_url) as queue:
        c1 = queue.consumer()
        assert c1.poll(0) == c1.poll(0.05) == []

        def publish(stop: threading.Event) -> None:
            eventually(lambda: c1._lease_renewer.polling)
            queue.publish("A")

        with background(publish):
            assert offsets(c1.poll(60)) == [0]


def test_poll_waits_for_a_key_that_another_consumer_owns(any_url: str) -> None:
    with Queue(any_url, "AA", max_per_key=1) as queue:
        c1, c2 = queue.consumers(2)
        (first,) = c1.poll(5)

        def settle(stop: threading.Event) -> None:
            eventually(lambda: c2._lease_renewer.polling)
            first.ack()

        with background(settle):
            assert offsets(c2.poll(60)) == [1]


def test_key_owner_is_woken_for_more_records_of_the_key(any_url: str) -> None:
    with Queue(any_url, "A") as queue:
        c1, c2 = queue.consumers(2)
        (first,) = c1.poll(5)

        def more(stop: threading.Event) -> None:
            eventually(lambda: c1._lease_renewer.polling)
            queue.publish("A")
            assert c2.poll(0) == []  # c2 scans the record first, but does not own the key

        with background(more):
            assert offsets(c1.poll(60)) == [1]
        assert first.standing is Standing.HELD


def test_full_consumer_waits_until_a_record_is_settled(any_url: str) -> None:
    with Queue(any_url, "AB") as queue:
        c1 = queue.consumer(prefetch=1)
        (first,) = c1.poll(5)
        assert c1.poll(0.05) == []

        def settle(stop: threading.Event) -> None:
            eventually(lambda: c1._lease_renewer.polling)
            first.ack()

        with background(settle):
            assert offsets(c1.poll(60)) == [1]


@pytest.mark.parametrize(
    ("timeout", "max_records", "error"),
    [(-1, 1, ValueError), ("1", 1, TypeError), (0, 0, ValueError), (0, 10_001, ValueError)],
)
def test_poll_checks_its_arguments(
    url: str, timeout: float, max_records: int, error: type[Exception]
) -> None:
    with Queue(url) as queue, pytest.raises(error):
        queue.consumer().poll(timeout, max_records)


def test_shared_record_has_the_fields_of_a_record(url: str) -> None:
    with Queue(url) as queue:
        with queue.stream.publisher() as pub:
            pub.publish(b"value", key=b"A", headers={"h": b"1"})
        (shared,) = queue.consumer().poll(5)
        (plain,) = next(iter(queue.stream.read()))
        assert shared.record == plain
        names = ("offset", "value", "key", "headers", "timestamp", "appended", "time")
        for name in names:
            assert getattr(shared, name) == getattr(plain, name)
        assert repr(shared) == "<SharedRecord 0 of key b'A', held>"


def test_iteration_ends_when_the_consumer_is_closed(url: str) -> None:
    with Queue(url, "ABABA") as queue:
        c1 = queue.consumer()
        found: list[int] = []
        for record in c1:
            record.ack()
            found.append(record.offset)
            if len(found) == 5:
                queue.publish("C")
            if len(found) == 6:
                c1.close()
        assert found == [0, 1, 2, 3, 4, 5]
        assert queue.shared.confirmed == 6
        assert repr(c1) == f"<SharedSubscriber of '{STREAM}' in '{GROUP}' (closed)>"


def test_closed_consumer_raises(url: str) -> None:
    with Queue(url, "A") as queue:
        c1 = queue.consumer()
        (record,) = c1.poll(5)
        c1.close()
        c1.close()
        assert c1.closed
        for call in (c1.poll, c1.commit, c1.rollback, c1.flush, lambda: list(c1)):
            with pytest.raises(meteor.MeteorError, match="closed"):
                call()
        with pytest.raises(meteor.MeteorError, match="closed"):
            c1.run(lambda record: None)
        with pytest.raises(meteor.Fenced):
            record.ack()
        assert c1.confirmed == 0


# Handlers


class Log:
    """Lists the processed records, and notes keys that two threads process at once."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.by_key: defaultdict[bytes, list[int]] = defaultdict(list)
        self.most = 0
        self._busy: set[bytes] = set()
        self._lock = threading.Lock()
        self.overlaps: list[bytes] = []

    def begin(self, record: meteor.SharedRecord) -> None:
        with self._lock:
            if record.ordering_key in self._busy:
                self.overlaps.append(record.ordering_key)
            self._busy.add(record.ordering_key)
            self.most = max(self.most, len(self._busy))

    def end(self, record: meteor.SharedRecord) -> None:
        with self._lock:
            self._busy.discard(record.ordering_key)
            self.done.append(record.offset)
            self.by_key[record.ordering_key].append(record.offset)

    def __call__(self, record: meteor.SharedRecord) -> None:
        self.begin(record)
        self.end(record)


def test_run_processes_keys_in_parallel_and_each_in_order(url: str) -> None:
    with Queue(url, "ABC" * 20) as queue:
        log = Log()
        together = threading.Barrier(3, timeout=30)  # only three at a time can pass

        def handle(record: meteor.SharedRecord) -> None:
            log.begin(record)
            together.wait()
            log.end(record)

        with Runner(queue.consumer(), handle, concurrency=3):
            eventually(lambda: len(log.done) == 60, 30)
        assert (log.overlaps, log.most) == ([], 3)
        for number, group in enumerate((b"A", b"B", b"C")):
            assert log.by_key[group] == [*range(number, 60, 3)]
        assert queue.shared.confirmed == 60


def test_two_runs_share_the_keys(url: str) -> None:
    with Queue(url) as queue:
        queue.publish("ABCDEFGH" * 25, frame=20)
        log = Log()
        one, two = queue.consumers(2, prefetch=8)
        with Runner(one, log, 2), Runner(two, log, 2):
            eventually(lambda: len(log.done) == 200, 30)
        assert log.overlaps == []
        assert all(done == sorted(done) for done in log.by_key.values())
        assert sorted(log.done) == [*range(200)]


@pytest.mark.usefixtures("quick")
def test_record_that_keeps_failing_is_redelivered_and_becomes_a_dead_letter(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Queue(url, "AABA", max_deliveries=3, dead_letter="dead") as queue:
        given: list[tuple[int, int]] = []
        log = Log()

        def handle(record: meteor.SharedRecord) -> None:
            given.append((record.offset, record.failures))
            if record.offset == 1:
                raise ValueError("poison")
            log(record)

        with Runner(queue.consumer(), handle, concurrency=2):
            eventually(lambda: len(log.done) == 3, 30)
            eventually(lambda: queue.shared.confirmed == 4)
        assert log.by_key[b"A"] == [0, 3]
        assert [failures for offset, failures in given if offset == 1] == [0, 1, 2]
        letters = [
            record for batch in queue.client.stream("dead", create=True).read() for record in batch
        ]
        (letter,) = letters
        assert letter.headers is not None
        assert letter.headers["meteor-reason"] == b"ValueError: poison"
        assert "The handler failed for record 1" in caplog.text


def test_run_processes_keyless_records_in_parallel(url: str) -> None:
    with Queue(url) as queue:
        with queue.stream.publisher() as pub:
            pub.publish_many([b"job"] * 12)
        together = threading.Barrier(4, timeout=30)

        with Runner(queue.consumer(), lambda record: together.wait(), concurrency=4):
            eventually(lambda: queue.shared.confirmed == 12, 30)


def test_run_holds_few_records_for_slow_handlers(url: str) -> None:
    with Queue(url, "ABCDEFGHIJ") as queue:
        one, two = queue.consumers(2)
        begun, go_on = threading.Event(), threading.Event()

        def handle(record: meteor.SharedRecord) -> None:
            begun.set()
            assert go_on.wait(30)

        with Runner(one, handle, concurrency=2):
            assert begun.wait(20)
            one.flush()
            # At first, `one` may hold two records per thread. This limit can double once here,
            # which leaves two of the ten records for `two`.
            assert len(two.poll(20)) >= 2
            two.commit()
            go_on.set()
            eventually(lambda: queue.shared.confirmed == 10)


def test_runs_that_join_later_get_a_fair_share(url: str) -> None:
    with Queue(url, max_per_key=32) as queue:
        queue.publish("ABCDEFGHIJKLMNOP" * 120, frame=480)
        done = [0, 0, 0, 0]

        def handler(number: int) -> Callable[[meteor.SharedRecord], None]:
            def handle(record: meteor.SharedRecord) -> None:
                time.sleep(0.002)  # simulates work
                done[number] += 1

            return handle

        with ExitStack() as runners:
            for number, consumer in enumerate(queue.consumers(4)):
                runners.enter_context(Runner(consumer, handler(number)))
                eventually(lambda: done[number] > 0)  # noqa: B023
            before = done.copy()
            eventually(lambda: sum(done) - sum(before) >= 800, 60)
            after = done.copy()
        share = max(b - a for a, b in zip(before, after, strict=True)) / (sum(after) - sum(before))
        assert share <= 0.35


def test_run_keeps_all_threads_busy_even_if_one_key_fills_the_limit(url: str) -> None:
    with Queue(url, "A" * 60 + "BCD") as queue:
        together = threading.Barrier(4, timeout=30)

        def handle(record: meteor.SharedRecord) -> None:
            if record.offset in (0, 60, 61, 62):
                together.wait()

        with Runner(queue.consumer(), handle, concurrency=4):
            eventually(lambda: queue.shared.confirmed == 63, 30)


def test_polls_after_run_can_use_the_whole_prefetch_limit(url: str) -> None:
    with Queue(url) as queue:
        c1 = queue.consumer()
        with Runner(c1, lambda record: None):
            pass
        queue.publish("ABCDEFGHIJ" * 10, frame=100)
        assert len(c1.poll(5)) == 100


def test_failed_handler_delays_its_key(url: str) -> None:
    with Queue(url, "AB") as queue:
        done = threading.Event()

        def handle(record: meteor.SharedRecord) -> None:
            if record.ordering_key == b"A":
                raise ValueError
            eventually(lambda: queue.keys()["A"].state == "delayed")
            done.set()

        with Runner(queue.consumer(), handle, concurrency=2):
            assert done.wait(30)


def test_handler_can_settle_its_record(url: str) -> None:
    with Queue(url, "ABCD", dead_letter="dead") as queue:
        seen: list[tuple[int, int]] = []

        def handle(record: meteor.SharedRecord) -> None:
            seen.append((record.offset, record.failures))
            if record.offset == 0:
                record.reject("no")
            elif record.offset == 1 and not record.failures:
                record.release()
            elif record.offset == 2:
                record.ack()
                raise ValueError("after it was settled")

        with Runner(queue.consumer(), handle):
            eventually(lambda: queue.shared.confirmed == 4)
        assert sorted(seen) == [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0)]
        found = queue.shared.describe()
        assert (found.acked, found.dead) == (3, 1)


def test_handler_can_stop_and_close_its_own_run(url: str) -> None:
    for how in ("stop", "close"):
        with Queue(url, "A") as queue:
            consumer = queue.consumer()
            with Runner(consumer, lambda record: getattr(consumer, how)()) as runner:  # noqa: B023
                runner.join()
            assert consumer.closed == (how == "close")
            queue.stream.delete()


def test_stop_waits_for_handlers_and_leaves_unstarted_records_to_the_next_run(
    url: str,
) -> None:
    with Queue(url, "AAAABB") as queue:
        consumer = queue.consumer()
        log = Log()
        begun = threading.Event()

        def handle(record: meteor.SharedRecord) -> None:
            begun.set()
            eventually(lambda: consumer._worker_pool is None or consumer._worker_pool._stopped)
            log(record)

        with Runner(consumer, handle) as runner:
            assert begun.wait(20)
            consumer.stop()
            runner.join()
        assert log.done == [0]
        assert consumer.confirmed == 1
        with Runner(consumer, log):
            eventually(lambda: len(log.done) == 6)
        assert log.by_key == {b"A": [0, 1, 2, 3], b"B": [4, 5]}
        assert consumer.confirmed == 6


def test_close_from_another_thread_ends_run_and_returns_unstarted_records(url: str) -> None:
    with Queue(url, "ABC") as queue:
        one, two = queue.consumers(2)
        begun, go_on = threading.Event(), threading.Event()

        def handle(record: meteor.SharedRecord) -> None:
            begun.set()
            assert go_on.wait(20)

        with Runner(one, handle) as runner:
            assert begun.wait(20)
            closing = threading.Thread(target=one.close, name="test-closing")
            closing.start()
            eventually(lambda: one._prefetcher.halted)
            go_on.set()
            closing.join(20)
            runner.join()
        assert runner.error is None
        assert one.closed
        assert offsets(drain(two)) == [1, 2]
        assert two.confirmed == 3


def test_close_from_another_thread_ends_poll_at_once(url: str) -> None:
    with Queue(url) as queue:
        c1 = queue.consumer()

        def close(stop: threading.Event) -> None:
            blocked(queue.client.redis)
            c1.close()

        with background(close):
            assert c1.poll(100) == []
        assert c1.closed


def test_close_from_another_thread_ends_iteration(url: str) -> None:
    with Queue(url, "A") as queue:
        c1 = queue.consumer()

        def close(stop: threading.Event) -> None:
            blocked(queue.client.redis)
            c1.close()

        with background(close):
            for record in c1:
                record.ack()
        assert queue.shared.confirmed == 1


@pytest.mark.parametrize("concurrency", [0, 1_001, "1"])
def test_run_checks_its_arguments(url: str, concurrency: int) -> None:
    with Queue(url) as queue:
        c1 = queue.consumer()
        with pytest.raises((ValueError, TypeError), match="concurrency"):
            c1.run(lambda record: None, concurrency=concurrency)
        with pytest.raises(TypeError, match="handler"):
            c1.run(None)  # type: ignore[arg-type]


class Interrupted(BaseException):
    """Stands for Ctrl-C or ``sys.exit()`` in a handler."""


def test_run_raises_a_base_exception_from_its_handler(url: str) -> None:
    with Queue(url, "AB") as queue:
        consumer = queue.consumer()

        def handle(record: meteor.SharedRecord) -> None:
            raise Interrupted

        with pytest.raises(Interrupted):
            consumer.run(handle, concurrency=2)
        consumer.close()
        assert queue.shared.describe().consumers == ()


def test_run_sends_acks_at_once_even_while_it_polls(
    url: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``max_per_key=1``, a key's next record becomes available only after the ack."""
    monkeypatch.setattr(lease_renewer, "_GATHER_S", 600.0)
    with Queue(url, [f"g{n % 8}" for n in range(600)], max_per_key=1) as queue:
        consumer = queue.consumer()
        pauses_s = [rng.expovariate(250) for _ in range(600)]
        done: list[int] = []

        def handle(record: meteor.SharedRecord) -> None:
            threading.Event().wait(pauses_s[record.offset])
            done.append(record.offset)
            if len(done) == 600:
                consumer.stop()

        consumer.run(handle, concurrency=8)  # hangs until pytest's timeout if an ack waits
        assert sorted(done) == list(range(600))


@pytest.fixture
def interrupting() -> Iterator[None]:
    """Make SIGUSR1 act like Ctrl-C."""
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("interrupting")
def test_ctrl_c_ends_a_waiting_run_and_its_threads(url: str) -> None:
    with Queue(url, "ABC") as queue:
        log = Log()
        consumer = queue.consumer()

        def interrupt(stop: threading.Event) -> None:
            eventually(lambda: len(log.done) == 3)
            blocked(queue.client.redis)
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGUSR1)

        with background(interrupt), pytest.raises(KeyboardInterrupt):
            consumer.run(log)
        assert not [t for t in threading.enumerate() if t.name.startswith("meteor-worker-")]
        consumer.close()
        assert queue.shared.confirmed == 3


def test_poll_without_a_timeout_waits_for_records(url: str) -> None:
    with Queue(url) as queue:
        c1 = queue.consumer()

        def publish(stop: threading.Event) -> None:
            blocked(queue.client.redis)
            queue.publish("A")

        with background(publish):
            assert offsets(c1.poll(None)) == [0]


def test_close_from_another_thread_ends_a_poll_without_a_timeout(url: str) -> None:
    with Queue(url) as queue:
        c1 = queue.consumer()

        def close(stop: threading.Event) -> None:
            blocked(queue.client.redis)
            c1.close()

        with background(close):
            assert c1.poll(None) == []


@pytest.mark.usefixtures("interrupting")
@pytest.mark.parametrize("timeout", [100, None])
def test_consumer_continues_after_ctrl_c_in_poll(url: str, timeout: float | None) -> None:
    with Queue(url) as queue:
        c1 = queue.consumer()

        def interrupt(stop: threading.Event) -> None:
            blocked(queue.client.redis)
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGUSR1)

        with background(interrupt), pytest.raises(KeyboardInterrupt):
            c1.poll(timeout)
        queue.publish("A")
        assert offsets(c1.poll(5)) == [0]


def test_hanging_handler_loses_its_record(url: str) -> None:
    with Queue(url, "AAB") as queue:
        one = queue.consumer(max_poll_interval=0.2)
        log = Log()
        go_on = threading.Event()

        def hang(record: meteor.SharedRecord) -> None:
            if record.ordering_key == b"A":
                assert go_on.wait(30)

        with Runner(one, hang, concurrency=2):
            eventually(lambda: queue.shared.confirmed == 0 and queue.shared.describe().acked == 1)
            two = queue.consumer()
            with Runner(two, log):
                eventually(lambda: log.done == [0, 1], 30)
            go_on.set()
        assert queue.shared.confirmed == 3


def test_hanging_application_loses_its_records(url: str) -> None:
    with Queue(url, "AB", lease_ttl=0.5) as queue:
        c1 = queue.consumer(max_poll_interval=0.1)
        c1.poll(5)
        c2 = queue.consumer()
        assert offsets(c2.poll(30)) == [0, 1]
        c2.commit()


def test_leases_are_renewed_while_the_application_works(url: str) -> None:
    with Queue(url, "A", lease_ttl=0.5) as queue:
        c1, c2 = queue.consumers(2)
        (record,) = c1.poll(5)

        def polled_for_three_ttls() -> bool:
            assert c2.poll(0) == []
            return time.monotonic() > deadline

        deadline = time.monotonic() + 1.5  # three lease TTLs
        eventually(polled_for_three_ttls)
        record.ack()
        c1.flush()
        assert c2.confirmed == 1


@pytest.mark.usefixtures("quick")
def test_undecodable_value_counts_as_a_handler_failure(url: str) -> None:
    # The values of the first two records, A and B, are not JSON.
    with Queue(url, "AB", max_deliveries=2, dead_letter="dead") as queue:
        with queue.stream.publisher(codec="json") as pub:
            pub.publish([1], key=b"A")
        seen: list[object] = []
        with Runner(queue.consumer(codec="json"), lambda record: seen.append(record.value)):
            eventually(lambda: queue.shared.confirmed == 3, 30)
        assert seen == [[1]]
        assert queue.shared.describe().dead == 2


def test_keys_stay_in_order_while_handlers_fail_and_more_records_are_published(
    url: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "_DELAY_S", (0.001, 0.01))
    records, groups = 1_200, 6
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


def test_record_whose_handler_ended_run_is_redelivered_first(url: str) -> None:
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


def test_run_raises_if_the_consumer_is_closing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_interrupted_close_still_ends_run(url: str) -> None:
    with Queue(url) as queue:
        consumer = queue.consumer()
        with Runner(consumer, lambda record: None) as runner:
            eventually(lambda: consumer._lease_renewer.polling)
            consumer._prefetcher.halt()
            runner.join()
        assert runner.error is None


def test_stop_called_before_run_ends_that_run(url: str) -> None:
    with Queue(url, "A") as queue:
        consumer = queue.consumer()
        consumer.stop()
        seen: list[int] = []
        with Runner(consumer, lambda record: seen.append(record.offset)) as runner:
            runner.join()
        assert (runner.error, seen) == (None, [])
        with Runner(consumer, lambda record: seen.append(record.offset)):
            eventually(lambda: seen == [0])


def test_run_excludes_a_second_run_and_other_polls(url: str) -> None:
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
