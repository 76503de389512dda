"""Times: ms since 1970 inside, aware datetimes outside."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

#: 9999-12-31, in ms.
MAX_MS = 253_402_300_799_999

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def to_ms(time: Any) -> int:
    """Return an aware datetime, or ms since 1970, as ms.

    A datetime between two of them is the later one: so "from this time on" stays true.

    >>> to_ms(1_700_000_000_000)
    1700000000000
    >>> to_ms(datetime(1970, 1, 1, microsecond=1, tzinfo=UTC))
    1

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
        return check_ms(-((EPOCH - time) // _MILLISECOND))
    if isinstance(time, bool) or not isinstance(time, int):
        raise TypeError(
            f"A time must be an aware datetime or ms since 1970, not {type(time).__name__}."
        )
    return check_ms(time)


def check_ms(ms: int) -> int:
    if not 0 <= ms <= MAX_MS:
        raise ValueError(f"{ms} ms since 1970 is not a time from 1970 to 9999.")
    return ms


def to_ms_column(times: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return an Arrow column of times, or of ms since 1970, as ms (int64).

    Raises:
        ValueError: Times without a timezone, or out of range.
        TypeError: Something else.
    """
    kind = times.type
    if pa.types.is_timestamp(kind):
        if kind.tz is None:
            raise ValueError(
                f"A column of {kind} has no timezone, so it holds no points in time; "
                'use pa.timestamp("ms", tz="UTC").'
            )
        times = times.cast(pa.timestamp("ms", tz=kind.tz), safe=False)
    elif not pa.types.is_integer(kind):
        raise TypeError(f"Times must be Arrow timestamps or ms since 1970, not {kind}.")
    column = times.cast(pa.int64())
    check_ms_column(column)
    return column


def check_ms_column(column: pa.Array | pa.ChunkedArray) -> None:
    """Raise ``ValueError`` unless all of it are times from 1970 to 9999, or null."""
    from pyarrow import compute  # 40 ms, which most programs never need

    bounds = compute.min_max(column).as_py()
    for bound in (bounds["min"], bounds["max"]):
        if bound is not None:
            check_ms(bound)


def seconds_in_words(seconds: float) -> str:
    """Return a duration as people write it.

    >>> seconds_in_words(1.0), seconds_in_words(2.5)
    ('1 second', '2.5 seconds')
    """
    return f"{seconds:g} second{'' if seconds == 1 else 's'}"
