"""Locks, conditions and events stay usable if a signal handler raises, at any moment."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from random import Random

import pytest

from meteor_py.runtime.locks import SignalSafeCondition, SignalSafeEvent, run_locked
from tests.support.interrupts import Interrupts, interrupt_everywhere
from tests.support.waiting import ends, eventually

SECONDS = 1.0


class RepeatingThread:
    """A thread that calls a function repeatedly, and counts the calls."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._stopped = False
        self.rounds = 0
        # A daemon, so that pytest can exit even if the thread is stuck.
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stopped:
            self._work()
            self.rounds += 1

    def __enter__(self) -> RepeatingThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Make the thread end after its current call."""
        self._stopped = True

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def must_advance(self) -> None:
        before = self.rounds
        eventually(lambda: self.rounds > before + 1, 5, "another thread waits forever")


@contextmanager
def fuzzing(rng: Random) -> Iterator[tuple[Interrupts, Callable[[], bool]]]:
    """Yield an ``Interrupts``, and a function that returns whether there is time for more."""
    deadline = time.monotonic() + SECONDS
    with Interrupts(rng) as interrupts:
        yield interrupts, lambda: time.monotonic() < deadline
    assert interrupts.count > 50


def test_condition_wait_can_be_interrupted_at_any_moment() -> None:
    condition = SignalSafeCondition()

    def wait() -> None:
        with condition:
            condition.wait(0.0)

    def notify() -> None:
        with condition:
            condition.notify_all()

    for _ in interrupt_everywhere(wait):
        assert not condition.is_mine(), "the interrupt left the condition locked"
        assert ends(notify), "the interrupt left the condition locked"


def test_event_wait_can_be_interrupted_at_any_moment() -> None:
    events = [SignalSafeEvent()]
    for _ in interrupt_everywhere(lambda: events[-1].wait(0.0)):
        assert ends(events[-1].set), "the thread that sets the event waits forever"
        events.append(SignalSafeEvent())


def test_run_locked_can_be_interrupted_at_any_moment() -> None:
    lock = threading.RLock()

    def rivals_turn() -> None:
        with lock:
            pass

    for _ in interrupt_everywhere(lambda: run_locked(lock, 1.0, lambda: None)):
        assert ends(rivals_turn), "the interrupt left the lock held"


def test_condition_is_neither_left_locked_nor_released_twice_by_an_interrupt(rng: Random) -> None:
    condition = SignalSafeCondition()

    def wait() -> None:
        with condition:
            condition.wait_for(lambda: False, rng.choice((0.0, 1e-4, 1e-3)))

    def notify() -> None:
        with condition:
            condition.notify_all()

    with RepeatingThread(notify) as rival, fuzzing(rng) as (interrupts, time_left):
        while time_left():
            interrupts.during(rng.choice((wait, wait, notify)))
            assert not condition.is_mine(), "the interrupt left the lock held"
        rival.must_advance()
    assert not condition._waiters


def test_interrupted_notify_that_is_repeated_wakes_every_waiting_thread(rng: Random) -> None:
    condition = SignalSafeCondition()
    woken = [0, 0, 0]

    def waiter(index: int) -> Callable[[], None]:
        def wait() -> None:
            with condition:
                if condition.wait(20):
                    woken[index] += 1

        return wait

    def notify() -> None:
        with condition:
            condition.notify_all()

    with ExitStack() as stack:
        rivals = [stack.enter_context(RepeatingThread(waiter(index))) for index in range(3)]
        with fuzzing(rng) as (interrupts, time_left):
            while time_left():
                eventually(
                    lambda: len(condition._waiters) == 3, 5, "an interrupt left threads waiting"
                )
                interrupts.during(notify, 3e-5)
                notify()
        for rival in rivals:
            rival.stop()

        def have_ended() -> bool:
            notify()
            return not any(rival.is_alive() for rival in rivals)

        eventually(have_ended)
    assert min(woken) > 10


def test_event_can_be_set_after_a_wait_for_it_was_interrupted(rng: Random) -> None:
    unset: deque[SignalSafeEvent] = deque()

    def set_oldest() -> None:
        if unset:
            unset[0].set()
            unset.popleft()

    def wait(event: SignalSafeEvent) -> None:
        unset.append(event)
        event.wait(5)

    with RepeatingThread(set_oldest), fuzzing(rng) as (interrupts, time_left):
        while time_left():
            event = SignalSafeEvent()
            interrupted = interrupts.during(partial(wait, event), 1e-4)
            assert interrupted or event.is_set(), "the thread that sets events waits forever"
        eventually(lambda: not unset, 5, "the thread that sets events waits forever")


def test_run_locked_releases_the_lock_when_interrupted(rng: Random) -> None:
    lock = threading.RLock()

    def other_thread_advances() -> None:
        with lock:
            pass

    with RepeatingThread(other_thread_advances) as rival, fuzzing(rng) as (interrupts, time_left):
        while time_left():
            interrupts.during(lambda: run_locked(lock, 1.0, lambda: None), 2e-5)
            assert not lock._is_owned(), "the interrupt left the lock held"  # type: ignore[attr-defined]
        rival.must_advance()


def test_run_locked_gives_up_after_its_timeout_and_can_be_nested() -> None:
    lock = threading.RLock()
    assert run_locked(lock, 1.0, lambda: run_locked(lock, 1.0, lambda: 7)) == 7
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            release.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(5)
    with pytest.raises(TimeoutError, match=r"for 0\.05 seconds"):
        run_locked(lock, 0.05, pytest.fail)
    release.set()
    thread.join()
    assert run_locked(lock, 1.0, lambda: 8) == 8
