"""Times: ms since 1970 inside, aware datetimes outside."""

from __future__ import annotations

from datetime import datetime
from typing import Any

#: 9999-12-31, in ms.
_MAX_MS = 253_402_300_799_999


def to_ms(time: Any) -> int:
    """Return an aware datetime, or ms since 1970, as ms.

    >>> to_ms(1_700_000_000_000)
    1700000000000

    Raises:
        ValueError: A datetime without a timezone, or out of range.
        TypeError: Something else.
    """
    if isinstance(time, datetime):
        if time.tzinfo is None or time.utcoffset() is None:
            raise ValueError(
                f"{time!r} has no timezone, so it is not a point in time; "
                "use datetime.now(timezone.utc) or add one."
            )
        return check_ms(round(time.timestamp() * 1000))
    if isinstance(time, bool) or not isinstance(time, int):
        raise TypeError(
            f"A time must be an aware datetime or ms since 1970, not {type(time).__name__}."
        )
    return check_ms(time)


def check_ms(ms: int) -> int:
    if not 0 <= ms <= _MAX_MS:
        raise ValueError(f"{ms} ms since 1970 is not a time from 1970 to 9999.")
    return ms
