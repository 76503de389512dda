"""Conversion between aware datetimes, which users pass, and ms since 1970, which are stored."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

#: The last millisecond of the year 9999, in ms since 1970.
MAX_MS = 253_402_300_799_999
#: Integers from the first number up to, but not including, the second look like times in seconds
#: from 2001 to 2054. As ms, they would all be in January 1970, which is probably a mistake.
_SECONDS = (1_000_000_000, 2_678_400_000)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def to_ms(time: Any) -> int:
    """Convert an aware datetime, or ms since 1970, to ms since 1970.

    Rounds up, so that a search for records from this time on never finds an earlier record.

    >>> to_ms(1_700_000_000_000)
    1700000000000
    >>> to_ms(datetime(1970, 1, 1, microsecond=1, tzinfo=UTC))
    1

    Raises:
        ValueError: The datetime has no time zone, the time is not from 1970 to 9999, or the integer
            looks like seconds.
        TypeError: ``time`` is neither a datetime nor an int.
    """
    if isinstance(time, datetime):
        if time.tzinfo is None or time.utcoffset() is None:
            raise ValueError(
                f"{time!r} has no time zone. Use datetime.now(timezone.utc), or add a time zone."
            )
        return check_ms(-((EPOCH - time) // _MILLISECOND))
    if isinstance(time, bool) or not isinstance(time, int):
        raise TypeError(
            f"A time must be an aware datetime or ms since 1970, not {type(time).__name__}."
        )
    if _SECONDS[0] <= time < _SECONDS[1]:
        raise _in_seconds(time)
    return check_ms(time)


def _in_seconds(time: int) -> ValueError:
    return ValueError(
        f"{time} looks like a time in seconds, but a timestamp is in ms since 1970. Multiply it by "
        "1000, or pass an aware datetime."
    )


def check_ms(ms: int) -> int:
    if not 0 <= ms <= MAX_MS:
        raise ValueError(f"{ms} ms since 1970 is not a time from 1970 to 9999.")
    return ms


def to_ms_column(times: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Convert an Arrow column of timestamps, or of ms since 1970, to ms since 1970 (int64).

    Raises:
        ValueError: The timestamps have no time zone, a time is not from 1970 to 9999, or an integer
            looks like seconds.
        TypeError: The column holds neither timestamps nor integers.
    """
    kind = times.type
    if pa.types.is_timestamp(kind):
        if kind.tz is None:
            raise ValueError(
                f'Column type {kind} has no time zone. Use pa.timestamp("ms", tz="UTC").'
            )
        times = times.cast(pa.timestamp("ms", tz=kind.tz), safe=False)
    elif not pa.types.is_integer(kind):
        raise TypeError(f"Times must be Arrow timestamps or ms since 1970, not {kind}.")
    column = times.cast(pa.int64())
    check_ms_column(column)
    if not pa.types.is_timestamp(kind):
        _check_no_seconds(column)
    return column


def _check_no_seconds(column: pa.Array | pa.ChunkedArray) -> None:
    from pyarrow import compute

    low, high = _SECONDS
    above, below = compute.greater_equal(column, low), compute.less(column, high)
    found = column.filter(compute.and_(above, below))
    if len(found):
        raise _in_seconds(found[0].as_py())


def check_ms_column(column: pa.Array | pa.ChunkedArray) -> None:
    """Raise ``ValueError`` unless every value is a time from 1970 to 9999, or null."""
    from pyarrow import compute  # importing takes 40 ms, and most programs never need it

    bounds = compute.min_max(column).as_py()
    for bound in (bounds["min"], bounds["max"]):
        if bound is not None:
            check_ms(bound)


def seconds_in_words(seconds: float) -> str:
    """Format a duration with its unit.

    >>> seconds_in_words(1.0), seconds_in_words(2.5)
    ('1 second', '2.5 seconds')
    """
    return f"{seconds:g} second{'' if seconds == 1 else 's'}"
