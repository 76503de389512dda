"""A position says where to start; a range says where to start and stop.

    earliest | latest   the oldest record; after the newest record
    N                   an offset
    +N | -N             N after earliest, N before latest
    @TIME               the first record appended at that time or later
    A..B                from A up to but not including B; both are optional
    @T1..T2             the same by time; T2 may be a duration: @2026-11-16..1h

A TIME is a number of ms (13 digits) or seconds since 1970, a date, an RFC 3339 time
(``2026-11-16T14:30:00Z``), ``now``, or a duration before now: ``-1h30m`` (units ms, s, m, h, d, w).
A time without a zone is local time. Times refer to when the server appended a record.
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
class Position:
    """A parsed position, not yet resolved to an offset."""

    #: "" is an offset; "+" counts from earliest, "-" from latest; "@" is a time.
    kind: Literal["earliest", "latest", "", "+", "-", "@"]
    number: int = 0
    time: datetime | None = None

    def resolve(self, stream: meteor_py.Stream) -> int:
        """Resolve the position to an offset. +N and -N stay within the stream's bounds."""
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
    """A position, or a range if ``is_range``; ``stop`` is exclusive."""

    start: Position
    stop: Position | None = None
    is_range: bool = False


def parse_span(text: str, now: datetime | None = None) -> Span:
    """Parse a position or a range; raise ``ValueError`` for anything else.

    >>> parse_span("5..-1").stop
    Position(kind='-', number=1, time=None)
    """
    now = now or datetime.now(UTC)
    left, dots, right = text.partition("..")
    start = _parse(left, now) if left or not dots else Position("earliest")
    if not dots or not right:
        return Span(start, None, bool(dots))
    if start.time is not None and not right.startswith("@") and right not in _WORDS:
        right = "@" + right
    stop = _parse(right, now, start.time)
    by_time = start.time and stop.time and start.time > stop.time
    if by_time or (start.kind == stop.kind == "" and start.number > stop.number):
        raise ValueError(f"{text!r} ends before it begins.")
    return Span(start, stop, True)


def _parse(text: str, now: datetime, since: datetime | None = None) -> Position:
    if text in _WORDS:
        return Position(text)  # type: ignore[arg-type]  # "earliest" or "latest"
    if text.startswith("@"):
        return Position("@", time=parse_time(text[1:], now, since))
    found = _OFFSET.fullmatch(text)
    if not found:
        meant = f" Did you mean {_guess(text)}?" if _guess(text) else ""
        raise ValueError(
            f"{text!r} is not a position; write {_FORMS}, or a range such as 5..9.{meant}"
        )
    return Position(found[1], int(found[2]))  # type: ignore[arg-type]  # "", "+" or "-"


def _guess(text: str) -> str | None:
    """Return the position that the user probably meant, given a typo or another tool's word."""
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


def parse_position(text: str) -> Position:
    """Parse a position; raise ``ValueError`` for a range or anything else."""
    span = parse_span(text)
    if span.is_range:
        raise ValueError(f"{text!r} is a range; write a single position: {_FORMS}.")
    return span.start
