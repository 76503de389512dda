"""Memory for the objects of the next batch.

Python divides its memory for objects of up to 512 bytes into *arenas* of 1 MiB. It returns an arena
to the kernel when the last object in it is freed, so a program that drops each batch before it
reads the next would get new pages for every batch. Creating records would then take 1.5 times as
long. Therefore, a few values of the last large batches are kept, which keeps their arenas.
"""

from __future__ import annotations

import sys
from collections import deque

__all__ = ["keep_arenas"]

#: Keep one of this many values. An arena has room for more than this many of the largest values.
_STEP = 1900
#: The largest value in an arena, in bytes.
_MAX_BYTES = 512 - sys.getsizeof(b"")
#: The values kept. Each keeps one arena, so together they keep at most 16 MiB.
_kept: deque[bytes] = deque(maxlen=16)


def keep_arenas(values: list[bytes]) -> None:
    """Keep the arenas that hold these new values, so that later batches can reuse them."""
    if len(values) >= _STEP:
        _kept.extend(value for value in values[::_STEP] if len(value) <= _MAX_BYTES)
