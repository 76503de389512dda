"""The clock that leases, deadlines and waits are measured by."""

from __future__ import annotations

import time

if hasattr(time, "CLOCK_BOOTTIME"):

    def now() -> float:
        """Return seconds by a clock that cannot be set and that runs while the machine sleeps."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:  # pragma: no cover - not on Linux
    now = time.monotonic
