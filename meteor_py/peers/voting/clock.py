"""The group clock: a process's estimate of the server's clock.

The server reads its time at some point after the request is sent and before the reply arrives, so
the error is at most half of that interval. After that, the two clocks may drift apart. If a new
reading differs from an old one by more than their error bounds, the server's clock was set, or
another server has replied. The old reading is then dropped.
"""

from __future__ import annotations

from typing import NamedTuple

from meteor_py.runtime.clock import now

#: Maximum number of readings to keep.
_READINGS = 8
#: Maximum drift between two clocks, in seconds per second.
_DRIFT = 100e-6


class _Reading(NamedTuple):
    #: The time on the ``now()`` clock, the difference from the server's clock, and half the
    #: round-trip time.
    at: float
    offset: float
    error: float

    def bound(self, at: float) -> float:
        """Return the reading's maximum error at another time."""
        return self.error + _DRIFT * abs(at - self.at)


class GroupClock:
    """An estimate of the server's clock, in seconds since 1970. Each heartbeat reply adds a
    reading."""

    def __init__(self) -> None:
        # Other threads read the tuple while the heartbeat replaces it.
        self._readings: tuple[_Reading, ...] = ()

    def read(self, sent: float, arrived: float, server: float) -> None:
        """Add a reading: when the request was sent, when the reply arrived, and the time in the
        reply."""
        middle = (sent + arrived) / 2
        new = _Reading(middle, server - middle, (arrived - sent) / 2)
        agreeing = (
            old
            for old in self._readings
            if abs(new.offset - old.offset) <= old.bound(new.at) + new.error
        )
        self._readings = (*agreeing, new)[-_READINGS:]

    @property
    def known(self) -> bool:
        return bool(self._readings)

    def now(self) -> float:
        """Return the current time on the server's clock."""
        at = now()
        return at + self._best(at).offset

    def until(self, time: float) -> float:
        """Return the seconds from now until ``time``."""
        return time - self.now()

    @property
    def error_bound(self) -> float:
        """Maximum error of ``now()`` in seconds, in either direction."""
        at = now()
        return self._best(at).bound(at)

    def _best(self, at: float) -> _Reading:
        return min(self._readings, key=lambda reading: reading.bound(at))
