"""Memory for the objects of the next batch.

Python divides its memory for objects of up to 512 bytes into *arenas* of 1 MiB. It returns an arena
to the kernel when the last object in it is freed, so a program that drops each batch before it
reads the next would get new pages for every batch. Creating records would then take 1.5 times as
long. Therefore, one value in each arena is kept until values of later batches replace it.
"""

from __future__ import annotations

from collections import deque

__all__ = ["keep_arenas"]

#: Keep one of this many values. An arena holds about 1,900 values of the largest size.
_STEP = 2000
#: Keep no larger values, in bytes: they are not in arenas.
_MAX_BYTES = 450
#: The values kept; each keeps at most one arena.
_kept: deque[bytes] = deque(maxlen=16)


def keep_arenas(values: list[bytes]) -> None:
    """Keep the arenas that hold these new values, to reuse them for the values of later batches."""
    if len(values) >= _STEP:
        _kept.extend(value for value in values[::_STEP] if len(value) <= _MAX_BYTES)
