"""Interrupts calls of the main thread with real signals, at random moments."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Self


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
