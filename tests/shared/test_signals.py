"""Shared subscribers and signals: Ctrl-C at any moment, and signal handlers that close them."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType

import pytest

import meteor_py as meteor
from meteor_py.shared import worker_pool
from meteor_py.shared.lease_renewer import THREAD_PREFIX
from meteor_py.shared.protocol import StepReply, StepRequest
from meteor_py.shared.record import Standing
from tests.support.group_members import Process
from tests.support.interrupts import interrupt_everywhere
from tests.support.sharing import GROUP, STREAM, Queue, discard, drain, make_due, offsets
from tests.support.waiting import eventually

RECORDS = 4_000


class Alarm:
    """Calls a function from a signal handler in the main thread, after a given time."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._on = False
        self.rang = 0

    def __enter__(self) -> Alarm:
        self._before = signal.signal(signal.SIGALRM, self._ring)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self._on:
            self.rang += 1
            self._action()

    def after(self, seconds: float) -> None:
        self._on = True
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def off(self) -> None:
        """Cancel the signal if it has not arrived yet."""
        self._on = False


def ctrl_c() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable garbage collection during a test.

    Python drops exceptions raised in a finalizer, and redis-py's parsers have one. In one run, 18
    of 3,165 Ctrl-C signals arrived during a finalizer; no others were lost.
    """
    gc.collect()
    gc.disable()
    yield
    gc.collect()  # so that this test's garbage does not affect the next test
    gc.enable()


def queue_of(url: str) -> Queue:
    queue = Queue(url, settings={"capacity": 1_000_000}, max_deliveries=0, max_per_key=8)
    queue.publish([f"g{number % 50}" for number in range(RECORDS)], frame=40)
    return queue


def work(consumer: meteor.SharedSubscriber) -> None:
    """Poll and acknowledge records until interrupted or closed."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for record in consumer.poll(1.0, 1):
            record.ack()
    raise AssertionError("nothing interrupted the loop")


def renewer_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(THREAD_PREFIX)]


# A signal during connect may leave a socket to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("times", [1, 2])
def test_close_after_ctrl_c_at_any_moment_returns_all_records(
    url: str, rng: random.Random, times: int, no_collector: None
) -> None:
    with queue_of(url) as queue:
        for _ in range(15):
            consumer = queue.consumer(prefetch=64)
            with Alarm(ctrl_c) as alarm:
                try:
                    alarm.after(rng.uniform(0.005, 0.04))
                    work(consumer)
                except KeyboardInterrupt:
                    pass
                try:
                    if times == 2:
                        alarm.after(rng.uniform(0.0001, 0.003))
                        consumer.close()  # a second Ctrl-C may interrupt it
                    alarm.off()
                except KeyboardInterrupt:
                    pass
            discard(consumer)
            eventually(lambda: not renewer_threads(), message="the thread is still running")
            if times == 1:
                assert queue.shared.describe().consumers == ()
            queue.check()
        finish(queue)


# A signal during connect may leave a socket to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_poll_after_ctrl_c_at_any_moment_of_a_poll_delivers_its_records(url: str) -> None:
    with Queue(url, "AB", lease_ttl=60) as queue:
        consumer = queue.consumer()
        got: list[meteor.SharedRecord] = []

        def poll(timeout: float = 0) -> None:
            got.extend(consumer.poll(timeout))

        published = 2
        for _ in interrupt_everywhere(poll):
            poll(5 if len(got) < 2 else 0)
            poll(5 if len(got) < 2 else 0)
            assert offsets(got) == [published - 2, published - 1]
            for record in got:
                record.ack()
            got.clear()
            queue.publish("AB")
            published += 2
        assert published > 100


def test_signal_handler_can_close_at_any_moment_and_all_records_are_returned(
    url: str, rng: random.Random
) -> None:
    with queue_of(url) as queue:
        for _ in range(25):
            consumer = queue.consumer(prefetch=64)
            with Alarm(lambda c=consumer: discard(c)) as alarm:  # type: ignore[misc]
                alarm.after(rng.uniform(0.005, 0.03))
                try:
                    work(consumer)
                except meteor.MeteorError:
                    pass  # the consumer is closed
                eventually(lambda a=alarm: a.rang)  # type: ignore[misc]
            eventually(lambda: not renewer_threads(), message="the thread is still running")
            assert queue.shared.describe().consumers == (), "a closed consumer has rejoined"
            queue.check()
        finish(queue)


@pytest.mark.parametrize("before", [True, False])
def test_signal_handler_that_closes_while_a_reply_is_applied_leaves_no_records_held(
    url: str, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    with queue_of(url) as queue:
        consumer = queue.consumer(prefetch=64)
        holdings = consumer._deliveries.holdings
        close_sent = holdings._close_sent
        apply = holdings.apply

        def close_first(reply: StepReply, request: StepRequest | None) -> None:
            monkeypatch.setattr(holdings, "apply", apply)
            discard(consumer)
            apply(reply, request)

        def close_inside(request: StepRequest) -> None:
            monkeypatch.setattr(holdings, "_close_sent", close_sent)
            discard(consumer)
            close_sent(request)

        if before:
            monkeypatch.setattr(holdings, "apply", close_first)
        else:
            monkeypatch.setattr(holdings, "_close_sent", close_inside)
        with suppress(meteor.MeteorError):  # the consumer is closed
            assert consumer.poll(5) == []
        assert len(holdings) == 0
        finish(queue)


def finish(queue: Queue) -> None:
    """Let leftover leases expire, and check that another consumer gets all remaining records."""
    for consumer in queue.shared.describe().consumers:
        make_due(queue.client._connector, queue.shared._protocol, "leases", consumer.id)
    with queue.stream.shared_subscriber(GROUP) as last:
        eventually(lambda: drain(last) == [] and queue.shared.confirmed == RECORDS, 20)
    state = queue.shared.describe()
    assert state.acked == RECORDS


PROGRAM = f"""
import signal, sys, threading, meteor_py as meteor
client = meteor.connect(sys.argv[1])
sub = client.stream({STREAM!r}, create=False).shared_subscriber({GROUP!r}, prefetch=10)
forever = threading.Event()
def handle(record):
    if sys.argv[2] == "hang":
        sys.stdout.write("at work\\n")
        sys.stdout.flush()
        forever.wait()
def on_term(*_):
    sys.exit(0)
signal.signal(signal.SIGTERM, on_term)
with sub:
    if sys.argv[2] == "poll":
        while True:
            print("at work", flush=True)
            for record in sub.poll(60):
                record.ack()
    print("at work", flush=True)
    sub.run(handle, concurrency=3)
"""


@pytest.mark.parametrize("how", ["poll", "run"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_program_leaves_the_group_at_once(
    url: str, how: str, sent: signal.Signals
) -> None:
    with Queue(url, "ABCABC") as queue:
        consumer = queue.consumer()
        consumer.close()
        program = Process("-c", PROGRAM, url, how)
        try:
            assert program.read() == "at work"
            eventually(lambda: queue.shared.describe().acked == 6, 20)
            program._process.send_signal(sent)
            program.wait()
            assert queue.shared.describe().consumers == ()
        finally:
            program.close()


def test_repeated_ctrl_c_ends_a_program_whose_handlers_hang(url: str) -> None:
    with Queue(url, "ABC") as queue:
        queue.consumer().close()
        program = Process("-c", PROGRAM, url, "hang")
        try:
            for _ in range(4):
                assert program.read() == "at work"
            ended = program._process.poll

            def again() -> bool:
                if ended() is None:
                    program._process.send_signal(signal.SIGINT)
                return ended() is not None

            eventually(again, 30, "the program did not end")
        finally:
            program.close()
        assert queue.shared.describe().acked == 0


def test_records_that_ctrl_c_kept_from_the_workers_go_to_the_next_poll(
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


def test_ctrl_c_during_delivery_leaves_the_records_to_the_next_poll(url: str) -> None:
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
