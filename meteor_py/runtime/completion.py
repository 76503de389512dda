"""The outcome of an operation that a background thread carries out, and waiting for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

#: Names of the threads that settle operations. Code that runs in one of them must not wait for it.
SENDER_PREFIX = "meteor-sender"
SESSION_PREFIX = "meteor-session"

# Guards waiting and callbacks, which are rare, of all completions. Re-entrant, because a finalizer
# may run in the middle of it and wait for, or settle, another one.
_lock = threading.RLock()


class Completion:
    """An operation under way, until it is settled: done, or failed.

    Many acknowledgements share one, because a future for each record would cost more than
    publishing it.
    """

    __slots__ = ("_callbacks", "_event", "base_offset", "error", "observed", "settled")

    def __init__(self) -> None:
        #: An acknowledgement adds its index to this; -1 until it is known.
        self.base_offset = -1
        self.error: Exception | None = None
        self.settled = False
        #: The application has seen the error, if there is one.
        self.observed = False
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[], None]] | None = None

    def settle(self, error: Exception | None = None) -> None:
        """Publish the outcome: ``base_offset`` was set before, or there is an error."""
        self.error = error
        self.settled = True
        with _lock:
            event, callbacks = self._event, self._callbacks
            self._callbacks = None
        if event is not None:
            event.set()
        if callbacks is not None:
            self.observed = True
            for callback in callbacks:
                callback()

    def abandon(self, error: Exception) -> None:
        """Settle it in a forked child: no thread waits here, and the parent calls callbacks."""
        self.error = error
        self.settled = True

    def wait(self, timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds until it is settled; return whether it is."""
        if self.settled:
            return True
        forbid_waiting()
        with _lock:
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        # If it was settled in between, the event was not seen and will not be set.
        return self.settled or event.wait(timeout)

    def on_settled(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once it is settled; at once if it is."""
        with _lock:
            if not self.settled:
                self._callbacks = self._callbacks or []
                self._callbacks.append(callback)
                return
        self.observed = True
        callback()


def in_callback() -> bool:
    """Return whether this thread is one that settles operations."""
    return threading.current_thread().name.startswith((SENDER_PREFIX, SESSION_PREFIX))


def forbid_waiting() -> None:
    """Raise ``RuntimeError`` in a callback, which would wait for its own thread."""
    if in_callback():
        raise RuntimeError(
            "A callback must not wait for an Ack, flush or close: it runs in the thread that sends."
        )


def _replace_lock() -> None:
    global _lock
    _lock = threading.RLock()


# A thread that does not exist in the forked child may have held the lock.
os.register_at_fork(after_in_child=_replace_lock)
