"""Positions as people write them: where to start, or from where to where.

    earliest | latest   the first record there is; behind the last
    N                   an offset
    +N | -N             N behind earliest, N before latest
    @TIME               the first record appended at that time or later
    A..B                from A to before B; without A from earliest, without B on
    @T1..T2             the same by time; T2 may be a span, as in @2026-11-16..1h

A TIME is in ms (13 digits) or seconds since 1970, a date, RFC 3339 (``2026-11-16T14:30:00Z``),
``now``, or so long ago: ``-1h30m`` (of ms, s, m, h, d, w). Without a zone it is local time. What
counts is when the server appended a record.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from meteor_cli.args.times import parse_time

if TYPE_CHECKING:
    import meteor_py

_WORDS = ("earliest", "latest")
_OTHER_WORDS = dict.fromkeys(("beginning", "start", "oldest", "first"), "earliest")
_OTHER_WORDS |= dict.fromkeys(("end", "newest", "last"), "latest")
_OFFSET = re.compile(r"([+-]?)([0-9]{1,18})")
_FORMS = "earliest, latest, N, +N, -N or @TIME"


@dataclass(frozen=True)
class Place:
    """One position. What it means is known when a stream is looked at."""

    #: "" is an offset; "+" is counted from earliest, "-" from latest; "@" is a time.
    kind: Literal["earliest", "latest", "", "+", "-", "@"]
    number: int = 0
    time: datetime | None = None

    def resolve(self, stream: meteor_py.Stream) -> int:
        """The offset that it means now; +N and -N do not lead out of the stream."""
        if self.time is not None:
            return stream.offset_at(self.time)
        first, end = stream.bounds()
        match self.kind:
            case "earliest" | "+":
                return min(first + self.number, end)
            case "latest" | "-":
                return max(end - self.number, first)
        return self.number


@dataclass(frozen=True)
class Span:
    """From a position on, or up to before another."""

    start: Place
    stop: Place | None = None
    is_range: bool = False


def parse_span(text: str, now: datetime | None = None) -> Span:
    """Understand a position or a range.

    Raises:
        ValueError: It is neither.

    >>> parse_span("5..-1").stop
    Place(kind='-', number=1, time=None)
    """
    now = now or datetime.now(UTC)
    left, dots, right = text.partition("..")
    start = _parse_place(left, now) if left or not dots else Place("earliest")
    if not dots or not right:
        return Span(start, None, bool(dots))
    if start.time is not None and not right.startswith("@") and right not in _WORDS:
        right = "@" + right
    stop = _parse_place(right, now, start.time)
    by_time = start.time and stop.time and start.time > stop.time
    if by_time or (start.kind == stop.kind == "" and start.number > stop.number):
        raise ValueError(f"{text!r} ends before it begins.")
    return Span(start, stop, True)


def _parse_place(text: str, now: datetime, since: datetime | None = None) -> Place:
    if text in _WORDS:
        return Place(text)  # type: ignore[arg-type]  # one of two words
    if text.startswith("@"):
        return Place("@", time=parse_time(text[1:], now, since))
    found = _OFFSET.fullmatch(text)
    if not found:
        meant = f" Is {_guess(text)} meant?" if _guess(text) else ""
        raise ValueError(
            f"{text!r} is not a position; write {_FORMS}, or two of them with .. between.{meant}"
        )
    return Place(found[1], int(found[2]))  # type: ignore[arg-type]  # the pattern sees to it


def _guess(text: str) -> str | None:
    """What others call it, or what is nearly right."""
    if text in _OTHER_WORDS:
        return _OTHER_WORDS[text]
    for candidate in (f"@{text}", text.replace(":", "..", 1)):
        try:
            if candidate != text and "::" not in text:
                parse_span(candidate)
                return candidate
        except ValueError:
            continue
    return None


def parse_place(text: str) -> Place:
    """Understand a position that must not be a range.

    Raises:
        ValueError: It is one, or no position.
    """
    span = parse_span(text)
    if span.is_range:
        raise ValueError(f"{text!r} is a range, and one position is meant; write {_FORMS}.")
    return span.start
