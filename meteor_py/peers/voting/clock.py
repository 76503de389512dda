"""The clock of a group: that of its server, as well as one process can know it.

The server sent each reply that carries its time between the request and the arrival, so half of
that interval bounds the error. Since then both clocks may have parted a little. A reading that an
old one contradicts by more than their bounds shows that the server's clock was set, or that this is
another server: then the old ones are forgotten.
"""

from __future__ import annotations

from typing import NamedTuple

from meteor_py.runtime.clock import now

#: Readings that are kept.
_READINGS = 8
#: How far two clocks part in a second, at worst.
_DRIFT = 100e-6


class _Reading(NamedTuple):
    #: When, by our clock; what to add to it; and half of how long the reply took.
    at: float
    offset: float
    error: float

    def bound(self, at: float) -> float:
        """What it may be wrong by at another time."""
        return self.error + _DRIFT * abs(at - self.at)


class GroupClock:
    """Seconds since 1970 by the server's clock. Fed by each reply of the server."""

    def __init__(self) -> None:
        # Replaced as a whole: other threads read it while the heartbeat updates it.
        self._readings: tuple[_Reading, ...] = ()

    def read(self, sent: float, arrived: float, server: float) -> None:
        """Take in a reply: when it was requested and arrived, and the time that it carries."""
        middle = (sent + arrived) / 2
        new = _Reading(middle, server - middle, (arrived - sent) / 2)
        agreeing = (r for r in self._readings if abs(new.offset - r.offset) <= _slack(r, new))
        self._readings = (*agreeing, new)[-_READINGS:]

    @property
    def known(self) -> bool:
        return bool(self._readings)

    def now(self) -> float:
        """The time now."""
        at = now()
        return at + self._best(at).offset

    def until(self, time: float) -> float:
        """Seconds from now to a time."""
        return time - self.now()

    @property
    def error_bound(self) -> float:
        """Seconds that it may be wrong by, either way."""
        at = now()
        return self._best(at).bound(at)

    def _best(self, at: float) -> _Reading:
        return min(self._readings, key=lambda reading: reading.bound(at))


def _slack(old: _Reading, new: _Reading) -> float:
    """What two readings may differ by, if no clock was set."""
    return old.bound(new.at) + new.error
