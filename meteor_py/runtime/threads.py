"""The worker: a thread of ours, which somebody waits for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

#: Seconds between two looks at whether it has ended, should the lock not tell.
_LOOK_S = 1.0
_PUSH_S = 0.02


class JoinableThread(threading.Thread):
    """A daemon thread that is alive until it has ended, also if a wait for it was interrupted.

    Before Python 3.13 a thread counts as ended once a signal handler has raised in ``join()``, at
    work as it may be (CPython's issue 90882). Whoever closes something at Ctrl-C or SIGTERM would
    then take away what the thread is working with.
    """

    def __init__(self, target: Callable[..., Any], name: str, *args: Any) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._pid = os.getpid()
        self._done = False
        self._at_work = threading.Lock()  # taken until it has ended
        self._at_work.acquire()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._done = True
            self._at_work.release()

    def is_alive(self) -> bool:
        return self.ident is not None and not self._done and self._pid == os.getpid()

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive() and self is not threading.current_thread():
            until = time.monotonic() + (threading.TIMEOUT_MAX if timeout is None else timeout)
            # In steps: what a signal handler raises may keep the lock of a thread that has ended.
            while not self._done and (left_s := until - time.monotonic()) > 0:
                if self._at_work.acquire(timeout=min(left_s, _LOOK_S)):
                    self._at_work.release()
            if not self._done:
                return
        super().join(timeout)

    def ends_within(self, timeout_s: float, push: Callable[[], None]) -> bool:
        """Whether it does; for its own thread it does not matter. ``push`` is called all the while
        to end what it waits for."""
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
        if thread.name.startswith(prefix):
            thread.join(max(deadline - time.monotonic(), 0.0))
