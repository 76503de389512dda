"""The clock of a group: a process's estimate of its server's clock.

The server reads its time at some point between the sending of the request and the arrival of the
reply, so half of that interval bounds the error. After that, the two clocks may drift apart. If a
new reading contradicts an old one by more than their bounds, the server's clock was set, or this is
another server. The clock then drops the old reading.
"""

from __future__ import annotations

from typing import NamedTuple

from meteor_py.runtime.clock import now

#: How many readings are kept.
_READINGS = 8
#: Maximum drift between two clocks, in seconds per second.
_DRIFT = 100e-6


class _Reading(NamedTuple):
    #: The time by ``now()``; the difference from the server's clock; and half of the round trip.
    at: float
    offset: float
    error: float

    def bound(self, at: float) -> float:
        """The maximum error of this reading at another time."""
        return self.error + _DRIFT * abs(at - self.at)


class GroupClock:
    """Seconds since 1970 by the server's clock. Each heartbeat reply adds a reading."""

    def __init__(self) -> None:
        # Other threads read the tuple while the heartbeat replaces it.
        self._readings: tuple[_Reading, ...] = ()

    def read(self, sent: float, arrived: float, server: float) -> None:
        """Add a reading: when the request was sent, when the reply arrived, and the time in it."""
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
        """The current time."""
        at = now()
        return at + self._best(at).offset

    def until(self, time: float) -> float:
        """Seconds from now to a time."""
        return time - self.now()

    @property
    def error_bound(self) -> float:
        """Maximum error of ``now()`` in seconds, in either direction."""
        at = now()
        return self._best(at).bound(at)

    def _best(self, at: float) -> _Reading:
        return min(self._readings, key=lambda reading: reading.bound(at))
