"""The clock for leases, deadlines and waits."""

from __future__ import annotations

import time

if hasattr(time, "CLOCK_BOOTTIME"):

    def now() -> float:
        """Return seconds on a monotonic clock that keeps running while the machine sleeps."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:  # pragma: no cover - not on Linux
    now = time.monotonic
