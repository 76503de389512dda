"""The clock of a group: that of its server, as well as one process can know it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from meteor_py.lease import now

#: Readings that are kept.
_READINGS = 8
#: How far two clocks part in a second, at worst.
_DRIFT = 100e-6


class _Reading(NamedTuple):
    #: When, by our clock; what to add to it; and half of how long the answer took.
    at: float
    offset: float
    error: float


class GroupClock:
    """Seconds since 1970 by the server's clock. Fed by each answer of the server."""

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque(maxlen=_READINGS)

    def read(self, sent: float, answered: float, server: float) -> None:
        """Take in an answer: when it was asked for and came, and what time it says it is."""
        middle = (sent + answered) / 2
        self._readings.append(_Reading(answered, server - middle, (answered - sent) / 2))

    @property
    def known(self) -> bool:
        return bool(self._readings)

    def now(self) -> float:
        """The time now."""
        return now() + self._best().offset

    def until(self, time: float) -> float:
        """Seconds from now to a time."""
        return time - self.now()

    @property
    def error_bound(self) -> float:
        """Seconds that it may be wrong by, either way."""
        best = self._best()
        return best.error + _DRIFT * (now() - best.at)

    def _best(self) -> _Reading:
        at = now()
        return min(self._readings, key=lambda r: r.error + _DRIFT * (at - r.at))
