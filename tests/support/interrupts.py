"""Helpers that interrupt calls in the main thread.

``Interrupts`` sends real signals, whose handler raises, at random moments. ``interrupt_at`` calls a
handler at one chosen moment, and ``interrupt_everywhere`` raises at every moment in turn.
"""

from __future__ import annotations

import gc
import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from random import Random
from types import FrameType
from typing import Any, Self


class Interrupted(BaseException):
    """Raised by the signal handler, like KeyboardInterrupt on Ctrl-C."""


class Interrupts:
    """Interrupts calls with signals.

    with Interrupts(rng) as interrupts:
        interrupts.during(lambda: ack.result(5))
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._on = False
        #: Number of interrupted calls.
        self.count = 0

    def __enter__(self) -> Self:
        gc.collect()
        gc.disable()  # Python drops exceptions that a handler raises in a finalizer
        self._before = signal.signal(signal.SIGALRM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        gc.enable()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._on:
            self._on = False
            self.count += 1
            raise Interrupted

    def rounds(self, least: int, seconds: float) -> Iterator[None]:
        """Yield repeatedly for at least ``seconds``, and until ``least`` calls were interrupted.

        Raises:
            AssertionError: Fewer calls were interrupted within 60 seconds.
        """
        start = time.monotonic()
        while time.monotonic() < start + seconds or self.count < least:
            assert time.monotonic() < start + 60, f"only {self.count} calls were interrupted"
            yield

    def during(self, work: Callable[[], object], within_s: float = 3e-4) -> bool:
        """Call ``work`` and interrupt it at most once; return whether it was interrupted."""
        try:
            try:
                self._on = True
                signal.setitimer(signal.ITIMER_REAL, self._rng.uniform(2e-6, within_s))
                work()
            finally:
                self._on = False
        except Interrupted:
            return True
        return False


def interrupt_at(moment: int, handler: Callable[[], object], work: Callable[[], object]) -> bool:
    """Call ``work``, and ``handler`` in the middle of it, as Python would call a signal handler.

    Python runs signal handlers where a Python function begins and where a C function has returned.
    It calls a profiler at the same moments.

    Args:
        moment: The number of the moment at which to call ``handler``, counted from 1.

    Returns:
        Whether ``work`` has this many moments; if not, ``handler`` was not called.
    """
    left = moment

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and not _is_finalizing(frame):
            left -= 1
            if left == 0:
                handler()

    before = sys.getprofile()
    gc.disable()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return left <= 0


def _is_finalizing(frame: FrameType | None) -> bool:
    """Return whether a finalizer is running. Python drops exceptions that handlers raise there."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def interrupt_everywhere(work: Callable[[], object]) -> Iterator[None]:
    """Call ``work`` repeatedly, and raise ``Interrupted`` at a later moment each time.

    Yield after each interrupted call.
    """

    def handle() -> None:
        raise Interrupted

    for moment in itertools.count(1):
        try:
            if not interrupt_at(moment, handle, work):
                return
        except Interrupted:
            pass
        yield
