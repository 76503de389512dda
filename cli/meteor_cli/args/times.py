"""Parsers for times such as 2026-11-16 and -1h, and for durations such as 30d."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_UNITS = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
    "w": timedelta(weeks=1),
}
_STEP = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[smhdw])")
_SPAN = re.compile(rf"(?:{_STEP.pattern})+")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")

_FORMS = "ms (13 digits), seconds, 2026-11-16, 2026-11-16T14:30:00Z, now, or -1h30m"


def parse_time(text: str, now: datetime | None = None, since: datetime | None = None) -> datetime:
    """Parse a date, an RFC 3339 time, ``now``, ``-1h`` (an hour ago), or a number.

    A number with 13 digits is in ms since 1970, any other number in seconds since 1970.

    Args:
        text: The time; local time if it has no zone.
        now: The current time, with a time zone.
        since: The start of a range, to which a duration without a minus sign (``1h``) is added.

    >>> parse_time("-1h", datetime(2026, 11, 16, 12, tzinfo=UTC)).hour
    11
    """
    now = now or datetime.now(UTC)
    try:
        if text == "now":
            return now
        if _NUMBER.fullmatch(text):
            is_ms = len(text) == 13 and text.isdigit()
            return datetime.fromtimestamp(int(text) / 1000 if is_ms else float(text), UTC)
        if text.startswith("-") and _SPAN.fullmatch(text[1:]):
            return now - _span(text[1:])
        if since is not None and _SPAN.fullmatch(text.removeprefix("+")):
            return since + _span(text)
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{text!r} is not a time; write {_FORMS}.") from None


def parse_duration(text: str) -> float:
    """Parse a number of seconds, or a duration such as 90s, 12h or 1d12h, into seconds.

    >>> parse_duration("90"), parse_duration("1d12h")
    (90.0, 129600.0)
    """
    if _NUMBER.fullmatch(text):
        return float(text)
    if not _SPAN.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration; write a number of seconds, 12h or 30d.")
    return _span(text).total_seconds()


def _span(text: str) -> timedelta:
    steps = _STEP.findall(text)
    return sum((float(number) * _UNITS[unit] for number, unit in steps), timedelta())
