"""Completions: the outcomes of operations that background threads carry out."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from meteor_py.runtime.locks import SignalSafeEvent

#: Name prefixes for the threads that settle operations. A callback that runs in such a thread must
#: not wait for an operation.
SENDER_PREFIX = "meteor-sender"
SESSION_PREFIX = "meteor-session"

# Held while a completion's event or callback queue is created. All completions share this lock,
# because few of them need an event or callbacks. ``settle`` must never take the lock: a signal
# handler may wait for the sender while the code that it interrupted holds the lock. The lock is
# reentrant, because a finalizer may run while its thread holds it, and wait for another completion.
_lock = threading.RLock()


class Completion:
    """An operation that is pending until it is settled, with or without an error.

    Many acknowledgements share one completion, because a future per record would take longer than
    publishing the record.
    """

    __slots__ = ("_callbacks", "_event", "base_offset", "error", "observed", "settled")

    def __init__(self) -> None:
        #: The offset to which an acknowledgement adds its index; -1 until it is known.
        self.base_offset = -1
        self.error: Exception | None = None
        self.settled = False
        #: Whether the application has seen the outcome.
        self.observed = False
        self._event: SignalSafeEvent | None = None
        self._callbacks: deque[Callable[[], None]] | None = None

    @property
    def awaited(self) -> bool:
        """Whether a thread waits, or has waited, for the outcome."""
        return self._event is not None

    def settle(self, error: Exception | None = None) -> None:
        """Set the outcome, wake waiting threads and call callbacks.

        Unless there is an error, the caller must set ``base_offset`` first.
        """
        self.settle_quietly(error)
        self.run_callbacks()

    def settle_quietly(self, error: Exception | None = None) -> None:
        """Set the outcome and wake waiting threads. The caller must call ``run_callbacks``."""
        self.error = error
        self.settled = True  # before waking threads: a new waiter checks it after registering
        if self._event is not None:
            self._event.set()

    @property
    def has_callbacks(self) -> bool:
        """Whether some callbacks have not been called yet."""
        return bool(self._callbacks)

    def run_callbacks(self) -> None:
        """Call each callback of a settled completion once."""
        callbacks = self._callbacks
        while callbacks:
            self.observed = True
            try:
                callback = callbacks.popleft()
            except IndexError:
                break  # the thread that added the callback has taken it back and calls it
            callback()

    def abandon(self, error: Exception) -> None:
        """Settle in a forked child, where no thread waits. The parent runs the callbacks."""
        self.error = error
        self.settled = True

    def poll(self) -> bool:
        """Return whether the outcome is known, without waiting."""
        return self.settled

    def wait(self, timeout: float | None) -> bool:
        """Wait up to ``timeout`` seconds for the outcome; return whether it is known."""
        if self.settled:
            return True
        forbid_waiting()
        with _lock:
            if self._event is None:
                self._event = SignalSafeEvent()
            event = self._event
        # Check again: if ``settle`` ran before the event existed, it did not set the event.
        return self.settled or event.wait(timeout)

    def on_settled(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the outcome is known, or at once if it already is."""
        with _lock:
            if self._callbacks is None:
                self._callbacks = deque()
        self._callbacks.append(callback)
        # Check after appending, so that either ``settle`` or this thread is sure to call it.
        if self.settled:
            try:
                self._callbacks.remove(callback)
            except ValueError:
                return
            self.observed = True
            callback()


def in_callback() -> bool:
    """Return whether this thread settles operations and runs their callbacks."""
    return threading.current_thread().name.startswith((SENDER_PREFIX, SESSION_PREFIX))


def forbid_waiting() -> None:
    """Raise ``RuntimeError`` if called from a callback, which would wait for its own thread."""
    if in_callback():
        raise RuntimeError(
            "A callback must not wait for an Ack, flush or close: it runs in the thread that "
            "completes them. Wait in another thread."
        )


def _replace_lock() -> None:
    global _lock
    _lock = threading.RLock()


# A thread of the parent process may have held the lock at the time of the fork.
os.register_at_fork(after_in_child=_replace_lock)
