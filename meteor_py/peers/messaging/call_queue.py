"""A call queue: items that arrive while a call is in progress share the next call.

One thread at a time has the *turn*: it takes the waiting items and makes one call. If the queue is
idle, the thread that adds an item can send the item itself, which saves waking another thread. The
queue's thread sends all other items.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread

_log = logging.getLogger(__name__)

#: Seconds to wait after a turn that raised an exception.
_FAILED_S = 0.5


class CallQueue:
    """Decides which thread makes the next call. The owner keeps the items, guarded by ``state``.

    ``is_waiting`` returns whether an item or an unfinished call is waiting; its caller holds
    ``state``. ``take_turn`` makes one call, and returns the seconds to wait before the next turn.
    The owner keeps an unfinished call, and the next turn repeats it. ``track`` is called with the
    queue's thread before the thread starts.
    """

    def __init__(
        self,
        name: str,
        state: SignalSafeCondition,
        is_waiting: Callable[[], bool],
        take_turn: Callable[[], float],
        track: Callable[[threading.Thread], None] = lambda thread: None,
    ) -> None:
        self._name = name
        self._state = state
        self._is_waiting = is_waiting
        self._take_turn = take_turn
        self._track = track
        self._thread: JoinableThread | None = None
        self._has_turn = False  # whether a thread has the turn
        self._not_before = 0.0
        self._stopped = False

    @property
    def is_free(self) -> bool:
        """Whether no thread has the turn."""
        return not self._has_turn

    def send(self, *, here: bool) -> None:
        """Send the waiting items.

        This thread sends them if ``here`` is true, no other thread has the turn, and no pause is in
        effect. Otherwise, the queue's thread does. The main thread never takes the turn: a signal
        handler may interrupt it at any point, and the handler must not wait for a call that it has
        interrupted.
        """
        if not here or threading.current_thread() is threading.main_thread():
            with self._state:
                self.wake()
            return
        with self._state:
            if self._has_turn or self._stopped or now() < self._not_before:
                self.wake()
                return
            self._has_turn = True
        self._send()

    def wake(self) -> None:
        """Start or wake the queue's thread to send the waiting items. The caller holds
        ``state``."""
        if self._thread is None and not self._stopped:
            thread = JoinableThread(self._run, self._name)
            self._track(thread)
            thread.start()
            self._thread = thread
        elif not self._has_turn:
            self._state.notify_all()

    def _send(self) -> None:
        """Make one call, then give up the turn."""
        pause_s = _FAILED_S
        try:
            pause_s = self._take_turn()
        finally:
            with self._state:
                self._not_before = now() + pause_s if pause_s else 0.0
                self._has_turn = False
                if self._is_waiting():
                    self.wake()

    def _run(self) -> None:
        while True:
            with self._state:
                while not self._stopped and (self._has_turn or not self._is_ready()):
                    self._state.wait(self._pause_s())
                if self._stopped:
                    return
                self._has_turn = True
            try:
                self._send()
            except BaseException:  # catch everything, because other items are waiting
                if not self._stopped:
                    _log.exception("Thread %s failed.", self._name)

    def _is_ready(self) -> bool:
        return self._is_waiting() and now() >= self._not_before

    def _pause_s(self) -> float | None:
        """Return the longest time that the thread may wait, in seconds; None for no limit. The
        caller holds ``state``."""
        if not self._has_turn and self._is_waiting():
            return max(self._not_before - now(), 0.001)
        return None

    def drain(self, deadline: float) -> bool:
        """Wait until the queue is empty, or until ``deadline`` (``now()`` clock); return whether it
        is empty."""
        with self._state:
            while self._has_turn or self._is_waiting():
                if now() >= deadline or self._stopped:
                    return False
                self.wake()
                # The thread does not notify waiters when it is done, so check now and then.
                self._state.wait(min(deadline - now(), 0.005))
        return True

    def stop(self) -> None:
        with self._state:
            self._stopped = True
            self._state.notify_all()

    def join(self, deadline: float, push: Callable[[], None]) -> bool:
        """Stop the thread, and wait for it until ``deadline`` (``now()`` clock); return whether it
        has ended. ``push`` interrupts a call that the thread is making."""

        def stop() -> None:
            self.stop()
            push()

        thread = self._thread
        return thread is None or thread.ends_within(max(deadline - now(), 0.0), stop)
