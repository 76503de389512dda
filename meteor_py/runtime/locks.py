"""Locks that stay usable when a signal handler raises.

Python runs signal handlers in the main thread, between two bytecodes: at the start of a Python
function, and after a C function has returned. A handler may raise: for Ctrl-C it raises
``KeyboardInterrupt``, and for SIGTERM many programs call ``sys.exit``. If a handler raises after
the thread has taken a lock, but before it enters the ``try`` that releases the lock, the lock stays
locked and every other thread waits forever. The methods of ``threading.Condition`` and
``threading.Event`` are Python functions with such gaps, and
``if lock.acquire(timeout=...): try: ...`` has the same gap.

In this module, each step that must not be interrupted is one call into C, or is inside the ``try``
whose ``finally`` undoes it.
"""

from __future__ import annotations

import threading
import time
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable
from itertools import islice
from operator import attrgetter
from typing import Any, TypeVar

_T = TypeVar("_T")


class SignalSafeCondition:
    """A condition variable whose lock stays consistent even if a signal handler raises.

    Use it like ``threading.Condition``. The lock is reentrant, because a handler may run in a
    thread that already holds it.

    >>> ready = SignalSafeCondition()
    >>> with ready:
    ...     ready.wait(timeout=0.01)
    False
    """

    # ``with`` calls the lock's own methods. Both these methods and the lookup that finds them run
    # in C.
    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    def __init__(self, lock: threading.RLock | None = None) -> None:
        self._lock: Any = lock or threading.RLock()
        self._waiters: deque[LockType] = deque()

    def is_mine(self) -> bool:
        """Return whether this thread holds the lock.

        If so, a signal handler in this thread must not wait for a thread that needs the lock.
        """
        return bool(self._lock._is_owned())

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock until ``notify_all`` or for ``timeout`` seconds, then take it again.

        Returns:
            False if the wait timed out.
        """
        waiter = allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        released: list[Any] = []
        try:
            # Release the lock and append its state to the list in one call into C. If a signal
            # handler could raise in between, ``finally`` would not restore the lock.
            released.extend(islice(iter(self._lock._release_save, None), 1))
            return waiter.acquire(True, -1 if timeout is None else max(timeout, 0.0))
        finally:
            if released:
                self._lock._acquire_restore(released[0])
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def wait_for(self, predicate: Callable[[], _T], timeout: float | None = None) -> _T:
        """Wait until ``predicate()`` is true, or for ``timeout`` seconds; return its last value."""
        deadline = None if timeout is None else time.monotonic() + timeout
        result = predicate()
        while not result:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            self.wait(left)
            result = predicate()
        return result

    def notify_all(self) -> None:
        """Wake every waiting thread. The caller holds the lock."""
        _wake_all(self._waiters)


def _wake_all(waiters: deque[LockType]) -> None:
    try:
        # Wake all of them in one call into C: an interrupt must not leave some asleep.
        deque(map(LockType.release, iter(waiters.popleft, None)), 0)
    except IndexError:
        pass  # the queue is empty


class SignalSafeEvent:
    """An event that stays usable even if a signal handler sets it or raises at any time.

    It must not use a lock. A handler may interrupt a thread in the middle of ``wait`` and wait for
    the thread that sets the event, which would then wait for the lock.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: deque[LockType] = deque()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True  # set it first: a waiting thread checks it after queueing
        _wake_all(self._waiters)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, or for ``timeout`` seconds; return whether it is set."""
        if self._is_set:
            return True
        waiter = allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            if not self._is_set:
                waiter.acquire(True, -1 if timeout is None else max(timeout, 0.0))
        finally:
            try:
                self._waiters.remove(waiter)
            except ValueError:
                pass  # the thread that set the event has removed the waiter
        return self._is_set


class LockBusy(TimeoutError):
    """Another thread did not release the lock in time."""


#: Methods of a reentrant lock, as C functions.
_is_owned: Callable[[Any], bool] = type(threading.RLock())._is_owned  # type: ignore[attr-defined]
_release: Callable[[Any], None] = type(threading.RLock()).release


def run_locked(lock: threading.RLock, timeout_s: float, work: Callable[[], _T]) -> _T:
    """Call ``work`` with a reentrant lock held.

    Raises:
        LockBusy: Another thread did not release the lock within ``timeout_s`` seconds.
    """
    if _is_owned(lock):
        return work()
    # Check the owner and release in one call into C. Between two calls, a handler could raise. With
    # a flag, it could raise after the lock was taken, but before the flag was set.
    release_if_owned = map(_release, filter(_is_owned, (lock,)))
    try:
        if not lock.acquire(timeout=timeout_s):
            raise LockBusy(f"Another thread has held the lock for {timeout_s:g} seconds.")
        return work()
    finally:
        deque(release_if_owned, 0)
