"""Segments: their file names, and which of their records are live."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from meteor_py.records.config import OFFSET_MAX

_STATE = re.compile(r"\.state-(\d{1,20})\.json")
_NAME = re.compile(r"(\d{20})-(\d{20})-(\d{1,20})-([0-9a-f]{8})\.parquet")


class Segment(NamedTuple):
    """One file: the records ``first`` to ``last``, written in one term."""

    first: int
    last: int
    term: int
    #: The first eight hex digits of the file's SHA-256.
    sha: str

    @property
    def name(self) -> str:
        return f"{self.first:020d}-{self.last:020d}-{self.term}-{self.sha}.parquet"

    @classmethod
    def parse(cls, name: str) -> Segment | None:
        """Parse a file name; return None if it is not a segment name.

        >>> Segment.parse(Segment(0, 9, 1, "0badcafe").name)
        Segment(first=0, last=9, term=1, sha='0badcafe')
        """
        match = _NAME.fullmatch(name)
        if match is None or not int(match[1]) <= int(match[2]) <= OFFSET_MAX:
            return None
        segment = cls(int(match[1]), int(match[2]), int(match[3]), match[4])
        return segment if segment.name == name else None  # readers open files by ``segment.name``

    def __len__(self) -> int:
        return self.last - self.first + 1


def state_name(term: int) -> str:
    """Return the name of a term's state file."""
    return f".state-{term}.json"


def state_term(name: str) -> int | None:
    """Return the term in a state file's name; None if it is not a state file's name.

    >>> state_term(state_name(7))
    7
    """
    match = _STATE.fullmatch(name)
    return int(match[1]) if match is not None and state_name(int(match[1])) == name else None


class Span(NamedTuple):
    """The live part of a segment: the records that readers see."""

    first: int
    stop: int
    segment: Segment

    @property
    def exact(self) -> bool:
        """Whether the whole segment is live."""
        return self.first == self.segment.first and self.stop == self.segment.last + 1

    def overlaps(self, segment: Segment) -> bool:
        """Return whether another segment's name covers some of this span's offsets."""
        return self.first <= segment.last and segment.first < self.stop


@dataclass(frozen=True)
class SegmentDescription:
    """A file in a stream's store, at the time of the call."""

    #: The first and last offset that readers get from this file. ``verify()`` reports whether the
    #: file also holds other offsets.
    first: int
    last: int
    #: The file's size in bytes.
    size: int
    #: The stream's epoch, and the term within it, in which the file was written.
    epoch: int
    term: int
    #: A path, or a URI for an object store.
    file: str

    @property
    def records(self) -> int:
        """Number of records that readers get from this file."""
        return self.last - self.first + 1


class SegmentTable:
    """The segments in one listing, and which of their records are live.

    Each term begins where the live records end. So a segment is live only below the first offset
    of every later term: its other records were never committed, or the server has lost them. Within
    a term, the longer segment wins, because it may have been compacted from the others.

    Building a table sorts all segments, which is slow if there are many; ``spans`` is much faster.
    """

    def __init__(self, segments: Iterable[Segment]) -> None:
        self.segments = list(segments)
        candidates: list[Span] = []
        limit = floor = 1 << 63
        term = None
        for segment in sorted(self.segments, key=lambda s: -s.term):
            if segment.term != term:
                limit, term = floor, segment.term
            stop = min(segment.last + 1, limit)
            if segment.first < stop:
                candidates.append(Span(segment.first, stop, segment))
            floor = min(floor, segment.first)
        #: The highest term of any segment; 0 if there is none.
        self.term = max((segment.term for segment in self.segments), default=0)
        self._candidates = sorted(candidates)
        self._firsts = [span.first for span in self._candidates]
        self._reach = list(accumulate((span.stop for span in self._candidates), max))
        self._spans = _cover(self._candidates)
        self._stops = [span.stop for span in self._spans]

    def spans(self, end: int | None = None, start: int = 0) -> list[Span]:
        """Return the live parts of segments, in offset order and without overlaps.

        Records at or above ``end`` do not count as live. Spans that end at or before ``start`` are
        left out.
        """
        if end is None:
            return self._spans[bisect_right(self._stops, start) :]
        whole = bisect_right(self._stops, end)
        spans = self._spans[bisect_right(self._stops, start, 0, whole) : whole]
        # Only the last span depends on ``end``. Choose it again: a segment that stops exactly at
        # ``end`` may replace a longer one.
        at = self._stops[whole - 1] if whole else 0
        low, high = bisect_right(self._reach, at), bisect_left(self._firsts, end)
        tail = [x._replace(stop=min(x.stop, end)) for x in self._candidates[low:high]]
        return spans + [span for span in _cover(tail, at) if span.stop > start]


def live_spans(segments: Iterable[Segment], end: int | None = None, start: int = 0) -> list[Span]:
    """Return the live parts of segments; see ``SegmentTable``.

    >>> old, new = Segment(0, 99, 1, "0" * 8), Segment(50, 79, 2, "0" * 8)
    >>> [(span.first, span.stop, span.segment.term) for span in live_spans([old, new])]
    [(0, 50, 1), (50, 80, 2)]
    """
    return SegmentTable(segments).spans(end, start)


def _cover(candidates: list[Span], at: int = 0) -> list[Span]:
    """Cover the candidates' offsets, starting at ``at``, with as few spans as possible."""
    spans: list[Span] = []
    index = 0
    while index < len(candidates):
        at = max(at, candidates[index].first)
        best = Span(at, at, candidates[index].segment)
        while index < len(candidates) and candidates[index].first <= at:
            span = candidates[index]._replace(first=at)
            # If several spans reach equally far, prefer one whose segment is entirely live.
            if (span.stop, span.exact) > (best.stop, best.exact):
                best = span
            index += 1
        if best.stop > at:
            spans.append(best)
            at = best.stop
    return spans
