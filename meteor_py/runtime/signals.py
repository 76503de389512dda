"""A signal handler that closes all open objects before the process ends.

The handler interrupts the main thread and closes the objects there. It cannot leave this to another
thread, which might wait forever for a lock that the main thread holds; in the main thread, these
locks are reentrant. A second thread ends the process if closing takes too long.
"""

from __future__ import annotations

import _thread
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from meteor_py.runtime.lifecycle import close_all

_log = logging.getLogger(__name__)

#: Seconds during which a second signal counts as a duplicate: a service manager signals every
#: process in a service, and a parent process may forward the signal as well.
_SAME_S = 0.1
#: Seconds that the main thread has to end the process after the timeout.
_REACT_S = 1.0

#: The previously installed handlers, by signal.
_before: dict[int, Any] = {}
_timeout_s = 0.0
#: When the first signal arrived, on the monotonic clock.
_received_at: float | None = None


def install(signals: Sequence[int], timeout_s: float) -> None:
    """Install the handler for ``signals``; see ``meteor_py.close_on_signal``.

    Raises:
        RuntimeError: The caller is not the main thread.
        ValueError: The system does not allow a handler for one of the signals.
    """
    global _timeout_s
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "close_on_signal() must be called in the main thread, because Python handles signals "
            "there. Call it at the start of the program."
        )
    for number in signals:
        found = signal.getsignal(number)
        try:
            signal.signal(number, _handle)
        except OSError as error:
            raise ValueError(f"Signal {number} cannot be handled: {error.strerror}.") from None
        if found is not _handle:
            _before[number] = found
    _timeout_s = timeout_s


def _handle(number: int, frame: FrameType | None) -> None:
    global _received_at
    if _received_at is not None:
        if time.monotonic() - _received_at > _SAME_S:
            _die(number)
        return
    _received_at = time.monotonic()
    done = _thread.allocate_lock()
    done.acquire()
    # Do not use threading.Thread: starting one takes a lock that the main thread may hold.
    _thread.start_new_thread(_watch, (done, number))
    try:
        close_all(_timeout_s)
    except BaseException as error:  # even Ctrl-C: the process ends anyway
        _log.error("Closing on signal %d failed: %s: %s", number, type(error).__name__, error)
    done.release()
    handler = _before.get(number)
    if callable(handler):
        handler(number, frame)  # may raise SystemExit or KeyboardInterrupt
    _flush()
    _die(number)


def _watch(done: _thread.LockType, number: int) -> None:
    """End the process if closing takes too long."""
    if done.acquire(timeout=_timeout_s):
        return
    # Only the main thread can restore the signal's default action, which ends the process. So send
    # the signal again: the handler restores the default action when a second signal arrives.
    signal.pthread_kill(threading.main_thread().ident or 0, number)
    time.sleep(_REACT_S)
    os._exit(128 + number)


def _flush() -> None:
    """Try to flush printed output. This fails if the signal interrupted a print."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, RuntimeError, ValueError):
            pass


def _die(number: int) -> None:
    """Let the signal kill the process, so that its parent sees the cause."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # process 1 in a container ignores signals that have no handler


def _after_fork_in_child() -> None:
    global _received_at
    _received_at = None


os.register_at_fork(after_in_child=_after_fork_in_child)
