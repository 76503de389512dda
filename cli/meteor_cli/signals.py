"""Signal handling for commands that must clean up: Ctrl-C, SIGTERM, terminal resizes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

#: Seconds after a signal during which the same signal is ignored, so that cleanup can finish.
_CLEANING_S = 3.0
#: Seconds between two checks whether a signal can be repeated.
_AGAIN_S = 0.01
#: Number of checks after which the signal is repeated anyway.
_CHECKS = 500

#: The ``time.monotonic()`` at which each signal last raised an exception that was not lost.
_raised_at: dict[int, float] = {}


def end_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that ``with`` blocks exit and leases are released.

    Another SIGTERM within ``_CLEANING_S`` is ignored, so that it does not interrupt the cleanup.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        if _may_raise(number, frame):
            raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, terminate)


@contextlib.contextmanager
def cleaning_up() -> Iterator[None]:
    """Let Ctrl-C end the block, and keep a second Ctrl-C from interrupting the cleanup."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _may_raise(number, frame):
            raise KeyboardInterrupt

    _raised_at.pop(signal.SIGINT, None)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        before = signal.SIG_IGN  # the process is about to exit, so ignore further Ctrl-Cs
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def _may_raise(number: int, frame: FrameType | None) -> bool:
    """Return whether a handler may raise now; if not, repeat the signal or ignore it."""
    if _is_fragile(frame):
        _repeat(number)
        return False
    now = time.monotonic()
    if now - _raised_at.get(number, float("-inf")) <= _CLEANING_S:
        return False
    _raised_at[number] = now
    return True


def _is_fragile(frame: FrameType | None) -> bool:
    """Return whether an exception raised in this frame would be lost or leak resources.

    Python prints and ignores an exception in a finalizer or in ``sys.unraisablehook``. In the
    ``__enter__`` of a ``@contextmanager``, an exception delays the cleanup of resources until
    garbage collection.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code is repeat_lost_signal.__code__:
            return True
        if code.co_name == "__enter__" and code.co_filename == contextlib.__file__:
            return True
        frame = frame.f_back
    return False


def repeat_lost_signal(lost: sys.UnraisableHookArgs) -> None:
    """Send a signal again if its KeyboardInterrupt or SystemExit was lost.

    To be installed as ``sys.unraisablehook``. A signal may arrive while a finalizer or a weak
    reference callback is running. No caller gets an exception from such code: Python would only
    print a traceback, and the command would never end.
    """
    if issubclass(lost.exc_type, KeyboardInterrupt):
        _raised_at.pop(signal.SIGINT, None)
        _repeat(signal.SIGINT)
    elif issubclass(lost.exc_type, SystemExit):
        _raised_at.pop(signal.SIGTERM, None)
        _repeat(signal.SIGTERM)
    else:
        sys.__unraisablehook__(lost)


def _repeat(number: int) -> None:
    """Send the signal again, once the main thread has left the code that it interrupted."""
    threading.Thread(target=_send_later, args=(number,), daemon=True).start()


def _send_later(number: int) -> None:
    main = threading.main_thread().ident
    for _ in range(_CHECKS):
        time.sleep(_AGAIN_S)
        if not _is_fragile(sys._current_frames().get(main or 0)):
            break
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def ended_once() -> Iterator[Callable[[bool], None]]:
    """Let the first SIGINT or SIGTERM end the block, but only while signals are enabled.

    Yields a function that enables and disables signals. A signal that arrives while the
    terminal is being set up or restored, such as an impatient user's second Ctrl-C, must not leave
    it half configured.
    """
    received: list[int] = []
    is_enabled = False

    def handle() -> None:
        handler = before[signal.Signals(received[0])]
        if callable(handler):
            handler(received[0], None)

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if is_enabled and len(received) == 1:
            handle()

    def enable(wanted: bool) -> None:
        nonlocal is_enabled
        is_enabled = wanted
        if wanted and received:
            handle()

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield enable
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def resizing(react: Callable[[], None]) -> Iterator[None]:
    """Call ``react`` whenever the terminal is resized."""
    before = signal.signal(signal.SIGWINCH, lambda number, frame: react())
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
