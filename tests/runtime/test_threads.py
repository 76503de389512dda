"""A JoinableThread is alive until it has ended, even if a join was interrupted.

If a process cannot start all threads that an object needs, those that it has started end.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

import meteor_py as meteor
from meteor_py.runtime.threads import JoinableThread
from tests.support.forking import exit_code, fork
from tests.support.interrupts import interrupt_everywhere
from tests.support.readers import fill
from tests.support.receivers import Gate, Handler, confirmed
from tests.support.waiting import eventually, running_threads


class _Signal(Exception):
    """Raised by the signal handler, as a SIGTERM handler raises SystemExit."""


@pytest.fixture
def interrupted() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Return a function that runs a blocking call and interrupts it with a signal."""

    def raises(*_: object) -> None:
        raise _Signal

    def call(blocks: Callable[[], object]) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(_Signal):
            blocks()

    before = signal.signal(signal.SIGALRM, raises)
    yield call
    signal.signal(signal.SIGALRM, before)


Interrupted = Callable[[Callable[[], object]], None]


def test_a_thread_is_alive_after_a_join_was_interrupted(interrupted: Interrupted) -> None:
    gate = threading.Event()
    worker = JoinableThread(gate.wait, "w", 30)
    assert not worker.is_alive()
    worker.start()
    for _ in range(2):
        interrupted(worker.join)
        assert worker.is_alive()
    worker.join(0.01)
    assert worker.is_alive()
    gate.set()
    worker.join(20)
    assert not worker.is_alive()


def test_a_thread_whose_start_is_interrupted_at_any_moment_does_not_hang() -> None:
    before = running_threads()
    threads: list[JoinableThread] = []

    def start() -> None:
        thread = JoinableThread(lambda: None, "w")
        threads.append(thread)
        thread.start()

    for _ in interrupt_everywhere(start):
        pass
    assert len(threads) > 10
    eventually(lambda: running_threads() <= before, 5, "a thread waits forever")


def test_a_thread_that_raises_counts_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    worker = JoinableThread(lambda: 1 / 0, "w")
    worker.start()
    worker.join(20)
    assert not worker.is_alive()
    assert len(seen) == 1


def test_a_thread_cannot_join_itself_or_be_joined_before_it_starts() -> None:
    errors: list[str] = []

    def join_itself() -> None:
        try:
            worker.join(1)
        except RuntimeError as error:
            errors.append(str(error))

    worker = JoinableThread(join_itself, "w")
    with pytest.raises(RuntimeError, match="before it is started"):
        worker.join()
    worker.start()
    worker.join(20)
    assert errors == ["cannot join current thread"]


def test_several_threads_can_join_the_same_thread() -> None:
    gate = threading.Event()
    worker = JoinableThread(gate.wait, "w", 30)
    worker.start()
    waiting = [JoinableThread(worker.join, f"waits-{n}") for n in range(5)]
    for each in waiting:
        each.start()
    gate.set()
    for each in waiting:
        each.join(20)
        assert not each.is_alive()


def test_the_parents_threads_are_not_alive_in_a_forked_child() -> None:
    gate = threading.Event()
    worker = JoinableThread(gate.wait, "w", 30)
    worker.start()
    child = fork()
    if child == 0:
        worker.join(1)
        os._exit(7 if worker.is_alive() else 0)
    status = exit_code(child)
    gate.set()
    worker.join(20)
    assert status == 0


def test_ends_within_calls_its_function_until_the_thread_ends() -> None:
    pushed = threading.Semaphore(0)

    def three() -> None:
        for _ in range(3):
            pushed.acquire()

    worker = JoinableThread(three, "w")
    worker.start()
    assert worker.ends_within(20, pushed.release)
    gate = threading.Event()
    worker = JoinableThread(gate.wait, "w", 30)
    worker.start()
    assert not worker.ends_within(0.05, lambda: None)
    gate.set()
    assert worker.ends_within(20, lambda: None)


# Use in the library


def test_close_waits_for_the_handler_after_a_signal_interrupted_the_receivers_join(
    url: str, interrupted: Interrupted
) -> None:
    with meteor.connect(url) as client:
        stream = client.stream("s", create=True)
        fill(stream, 10)
        gate = Gate(2)
        sub = stream.subscriber(group="g", lease_ttl=30)

        def handle(record: meteor.Record) -> None:
            gate(record)
            sub.confirm(record)

        handler = Handler(handle)
        receiver = sub.attach_receiver(handler)
        with gate.hold():
            interrupted(receiver.join)
            assert receiver.alive
            with pytest.raises(TimeoutError, match="did not return"):
                receiver.close(0.05)
        sub.close()
        assert receiver.join(0)
        assert handler.done == [0, 1, 2]
        assert confirmed(stream) == 3


def run(client: meteor.Client) -> None:
    with client.stream("s", ordering_key="key").shared_subscriber("g") as consumer:
        consumer.run(print, concurrency=3)


def add_handler(client: meteor.Client) -> None:
    with client.peer_group("g") as group:
        member = group.join("a")
        try:
            member.on("q", workers=3)(print)
        finally:
            before = threads_named("meteor-handler")
            member.on("q")(print)  # raises if the queue already has a handler
            assert before == []


def open_group(client: meteor.Client) -> None:
    client.peer_group("g")


def threads_named(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]


@pytest.mark.parametrize(
    ("work", "last"),
    [
        (run, "meteor-worker-s-2"),
        (add_handler, "meteor-handler-g-q-2"),
        (open_group, "meteor-heartbeat-g"),
        (open_group, "meteor-events-g"),
    ],
)
def test_started_threads_end_if_another_cannot_be_started(
    url: str, monkeypatch: pytest.MonkeyPatch, work: Callable[[meteor.Client], None], last: str
) -> None:
    start = JoinableThread.start

    def start_unless_last(thread: JoinableThread) -> None:
        if thread.name == last:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(JoinableThread, "start", start_unless_last)
    with meteor.connect(url) as client:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            work(client)
        assert threads_named("meteor-") == []
