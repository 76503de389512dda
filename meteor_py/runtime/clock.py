"""The clock for leases, and for deadlines that keep running while the machine is suspended."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

#: Returns seconds on a monotonic clock that, on Linux, keeps running while the machine sleeps. A
#: partial, because a function would take twice as long, and group members call it per record.
now: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else time.monotonic
)
