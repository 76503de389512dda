"""Ctrl-C, SIGTERM and a new size of the terminal, for commands that have something to clean up."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

#: Seconds after Ctrl-C in which another one is taken for impatience: cleaning up goes on.
_CLEANING_S = 3.0
#: Seconds after which a signal that came at a bad moment comes again.
_AGAIN_S = 0.01


@contextlib.contextmanager
def cleaning_up() -> Iterator[None]:
    """Let Ctrl-C end the block, and what it does at its end be done, even if Ctrl-C comes again."""
    interrupted_at = float("-inf")

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted_at
        if _is_fragile(frame):
            _repeat(number)
        elif time.monotonic() - interrupted_at > _CLEANING_S:
            interrupted_at = time.monotonic()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        before = signal.SIG_IGN  # nothing is left to do but to end
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def _is_fragile(frame: FrameType | None) -> bool:
    """Whether an exception would do harm here.

    In a finalizer, Python would print it, and go on as if nothing had been. In the ``__enter__`` of
    a ``@contextmanager``, what it has begun would not be cleaned up before it is collected.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__":
            return True
        if code.co_name == "__enter__" and code.co_filename == contextlib.__file__:
            return True
        frame = frame.f_back
    return False


def repeat_lost_signal(lost: sys.UnraisableHookArgs) -> None:
    """For ``sys.unraisablehook``: what Python cannot raise where it happened.

    A signal may come while a finalizer or the callback of a weak reference runs, from which no
    exception gets out. Python would print the traceback, and the command would go on for ever.
    """
    if issubclass(lost.exc_type, KeyboardInterrupt):
        _repeat(signal.SIGINT)
    elif issubclass(lost.exc_type, SystemExit):
        _repeat(signal.SIGTERM)
    else:
        sys.__unraisablehook__(lost)


def _repeat(number: int) -> None:
    # Not at once: that would be here, where it would be lost, too.
    again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


@contextlib.contextmanager
def ended_once() -> Iterator[Callable[[bool], None]]:
    """Let a signal end what is done while the function was called with True last; and only one.

    Else one that came while the terminal is prepared or put back, such as the second of an
    impatient user, would leave it as it is then.
    """
    noted: list[int] = []
    is_heard = False

    def end() -> None:
        handler = before[signal.Signals(noted[0])]
        if callable(handler):
            handler(noted[0], None)

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        if is_heard and len(noted) == 1:
            end()

    def hear(wanted: bool) -> None:
        nonlocal is_heard
        is_heard = wanted
        if wanted and noted:
            end()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield hear
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def resizing(react: Callable[[], None]) -> Iterator[None]:
    """Call a function whenever the terminal gets another size."""
    before = signal.signal(signal.SIGWINCH, lambda number, frame: react())
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
