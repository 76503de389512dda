"""Segments: the files of one incarnation by their names, and which of them count for what."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from meteor_py.records.config import OFFSET_MAX

_NAME = re.compile(r"(\d{20})-(\d{20})-(\d{1,20})-([0-9a-f]{8})\.parquet")


class Segment(NamedTuple):
    """One file: the records ``first`` to ``last``, written in a term."""

    first: int
    last: int
    term: int
    #: The beginning of the sha256 of its bytes.
    sha: str

    @property
    def name(self) -> str:
        return f"{self.first:020d}-{self.last:020d}-{self.term}-{self.sha}.parquet"

    @classmethod
    def parse(cls, name: str) -> Segment | None:
        """From the name of a file; None if that is not a segment.

        >>> Segment.parse(Segment(0, 9, 1, "0badcafe").name)
        Segment(first=0, last=9, term=1, sha='0badcafe')
        """
        match = _NAME.fullmatch(name)
        if match is None or not int(match[1]) <= int(match[2]) <= OFFSET_MAX:
            return None
        segment = cls(int(match[1]), int(match[2]), int(match[3]), match[4])
        return segment if segment.name == name else None  # by which it will be opened

    def __len__(self) -> int:
        return self.last - self.first + 1


class Span(NamedTuple):
    """The part of a segment that counts."""

    first: int
    stop: int
    segment: Segment

    @property
    def exact(self) -> bool:
        """Whether that is all of it."""
        return self.first == self.segment.first and self.stop == self.segment.last + 1

    def meets(self, segment: Segment) -> bool:
        """Whether another segment has some of these records."""
        return self.first <= segment.last and segment.first < self.stop


@dataclass(frozen=True)
class SegmentDescription:
    """A file in the store of a stream, as it was when it was looked at."""

    #: The offsets that it counts for, both included. It may hold others: verify() would tell.
    first: int
    last: int
    #: Bytes of the file.
    size: int
    #: The epoch of the stream, and the term in it, in which it was written.
    epoch: int
    term: int
    #: A path, or a URI for an object store.
    file: str

    @property
    def records(self) -> int:
        """How many records it counts for."""
        return self.last - self.first + 1


def lay_out(segments: Iterable[Segment], end: int | None = None) -> list[Span]:
    """What counts of some segments, in the order of the offsets, without overlaps.

    Each term begins where that ends which counts by then. So a segment counts only below the first
    offset of every later term: what lies above was never committed, or was lost by the server
    since. Within a term the longer wins: it may have been compacted of the others. ``end``: nothing
    counts from there on.

    >>> old, new = Segment(0, 99, 1, "0" * 8), Segment(50, 79, 2, "0" * 8)
    >>> [(span.first, span.stop, span.segment.term) for span in lay_out([old, new])]
    [(0, 50, 1), (50, 80, 2)]
    """
    # By falling terms: all that follows must lie below what came before.
    candidates: list[Span] = []
    limit = floor = end if end is not None else 1 << 63
    term = None
    for segment in sorted(segments, key=lambda s: -s.term):
        if segment.term != term:
            limit, term = floor, segment.term
        stop = min(segment.last + 1, limit)
        if segment.first < stop:
            candidates.append(Span(segment.first, stop, segment))
        floor = min(floor, segment.first)
    return _cover(sorted(candidates))


def _cover(candidates: list[Span]) -> list[Span]:
    """Cover as much as can be with as few as can be, left to right."""
    spans: list[Span] = []
    at, index = 0, 0
    while index < len(candidates):
        at = max(at, candidates[index].first)
        best = Span(at, at, candidates[index].segment)
        while index < len(candidates) and candidates[index].first <= at:
            span = candidates[index]._replace(first=at)
            # Of those that reach as far, rather one that is needed whole.
            if (span.stop, span.exact) > (best.stop, best.exact):
                best = span
            index += 1
        if best.stop > at:
            spans.append(best)
            at = best.stop
    return spans
