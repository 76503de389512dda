"""Ctrl-C for commands that have something to clean up."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

#: Seconds after Ctrl-C in which another one is taken for impatience: cleaning up goes on.
_CLEANING_S = 3.0
_AGAIN_S = 0.01


@contextlib.contextmanager
def cleaning_up() -> Iterator[None]:
    """Let Ctrl-C end the block, and what it does at its end be done, even if Ctrl-C comes again."""
    interrupted_at = float("-inf")

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted_at
        if _is_fragile(frame):
            threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number)).start()
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
