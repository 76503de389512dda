"""Exponential backoff with jitter."""

from __future__ import annotations

import random


def pause_s(failures: int, first_s: float, longest_s: float) -> float:
    """Return the seconds to wait after this many consecutive failures.

    The wait doubles with each failure, from ``first_s`` up to ``longest_s``. Jitter shortens it by
    up to half.

    >>> 0.04 <= pause_s(4, 0.01, 0.5) <= 0.08
    True
    """
    return min(first_s * 2.0 ** min(failures - 1, 30), longest_s) * random.uniform(0.5, 1)
