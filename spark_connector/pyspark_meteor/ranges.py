"""Ranges of offsets: how a micro-batch is bounded, and cut into what tasks read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyspark.sql.datasource import InputPartition

from meteor_py import Position
from pyspark_meteor.offsets import Offsets


@dataclass(frozen=True)
class Range(InputPartition):
    """Some records of one stream: what a task reads. Holds nothing secret.

    ``end`` has the incarnation and epoch in which the range was planned: should the server have
    lost some of it since, that is noticed.
    """

    stream: str
    first: int
    end: Position

    def __len__(self) -> int:
        return self.end.offset - self.first

    # A dataclass would compare and print as the base class does: by a value that there is not.
    def __repr__(self) -> str:
        return f"Range({self.stream!r}, {self.first}, {self.end.offset})"


def ranges_between(start: Offsets, end: Offsets) -> list[Range]:
    """What lies between two offsets of a query.

    Nothing of a stream that was not there before, or was created anew: the first offset that a
    query has of it is where it begins, and what follows is in the next batch.
    """
    return [
        Range(name, known.offset, stop)
        for name, stop in sorted(end.items())
        if (known := start.get(name)) is not None
        and known.incarnation == stop.incarnation
        and known.offset < stop.offset
    ]


def cut(ranges: list[Range], least: int, records_max: int) -> list[Range]:
    """Cut ranges into at least ``least`` parts, none of which is larger than ``records_max``.

    Larger ranges get more of the parts; small ones stay whole.

    >>> from meteor_py import Position
    >>> [len(part) for part in cut([Range("s", 0, Position("i", 1, 10))], 3, 100)]
    [4, 3, 3]
    """
    total = sum(map(len, ranges))
    if not total:
        return []
    parts: list[Range] = []
    for whole in ranges:
        pieces = max(-(-len(whole) // records_max), -(-len(whole) * least // total))
        pieces = min(pieces, len(whole))
        size, larger = divmod(len(whole), pieces)
        at = whole.first
        for number in range(pieces):
            stop = at + size + (number < larger)
            parts.append(replace(whole, first=at, end=whole.end._replace(offset=stop)))
            at = stop
    return parts


def bounded(ranges: list[Range], end: Offsets, records_max: int) -> Offsets:
    """``end``, or as far as so many records reach: each stream gets one, and its share of the rest.

    If there are more streams than records, they take turns. Whose turn it is depends on where the
    ranges begin, and on nothing else: after a crash, the same batch is planned again.
    """
    total, count = sum(map(len, ranges)), len(ranges)
    if total <= records_max:
        return end
    limited = dict(end)
    turn = sum(found.first for found in ranges)
    for number, found in enumerate(ranges):
        if records_max < count:
            share = int((number - turn) % count < records_max)
        else:
            share = 1 + (records_max - count) * (len(found) - 1) // (total - count)
        limited[found.stream] = found.end._replace(offset=found.first + share)
    return limited
