"""Background threads that can be joined safely, even if a signal handler raises."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from meteor_py.runtime.locks import SignalSafeEvent

#: Seconds between two checks that the thread is still running, in case its lock stays locked.
_CHECK_S = 1.0
#: Seconds between calls to ``push``.
_PUSH_S = 0.02


class _StartEvent(SignalSafeEvent):
    """The event that ``threading.Thread`` sets once the thread is running."""

    def _at_fork_reinit(self) -> None:
        """Called by ``threading`` in a forked child. There is no lock to replace."""


class JoinableThread(threading.Thread):
    """A daemon thread that counts as alive until it has ended, even if a join is interrupted.

    Before Python 3.13, a thread counts as ended once a signal handler has raised in ``join()``,
    even if it is still running (CPython issue 90882). Code that closes an object on Ctrl-C or
    SIGTERM would then close resources that the thread is using.

    In a ``threading.Thread``, ``start()`` waits on a ``threading.Event``. If a signal handler
    raises there, the event may stay locked, and the new thread hangs before it runs. So this class
    uses a ``SignalSafeEvent``.
    """

    def __init__(self, target: Callable[..., Any], name: str, *args: Any) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._started = _StartEvent()
        self._pid = os.getpid()
        self._done = False
        self._running = threading.Lock()  # held until the thread has ended
        self._running.acquire()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._done = True
            self._running.release()

    def is_alive(self) -> bool:
        return self.ident is not None and not self._done and self._pid == os.getpid()

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive() and self is not threading.current_thread():
            until = time.monotonic() + (threading.TIMEOUT_MAX if timeout is None else timeout)
            # Wait in steps: a signal handler that raises after ``acquire`` leaves the lock locked.
            while not self._done and (left_s := until - time.monotonic()) > 0:
                if self._running.acquire(timeout=min(left_s, _CHECK_S)):
                    self._running.release()
            if not self._done:
                return
        super().join(timeout)

    def ends_within(self, timeout_s: float, push: Callable[[], None]) -> bool:
        """Wait for the thread to end, calling ``push`` repeatedly to interrupt its waits.

        Returns:
            Whether the thread ended within ``timeout_s`` seconds; True if called in that thread.
        """
        until = time.monotonic() + timeout_s
        while self.is_alive() and self is not threading.current_thread():
            if time.monotonic() > until:
                return False
            push()
            self.join(_PUSH_S)
        return True


def join_named(prefix: str, timeout_s: float) -> None:
    """Join the threads whose names begin with ``prefix``, all within ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    for thread in threading.enumerate():
        # A thread whose start was interrupted stays in the list without an ident.
        if thread.name.startswith(prefix) and thread.ident is not None:
            thread.join(max(deadline - time.monotonic(), 0.0))
