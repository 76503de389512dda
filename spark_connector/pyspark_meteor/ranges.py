"""Offset ranges, and functions that limit a micro-batch and split it into Spark partitions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyspark.sql.datasource import InputPartition

from meteor_py import Position
from pyspark_meteor.offsets import Offsets


@dataclass(frozen=True)
class Range(InputPartition):
    """Consecutive records in one stream, which one task reads. Holds no secrets.

    ``end`` has the incarnation and epoch in which the range was planned, so that the task detects
    whether the server has lost records in the range since then.
    """

    stream: str
    first: int
    end: Position

    def __len__(self) -> int:
        return self.end.offset - self.first

    def __repr__(self) -> str:
        return f"Range({self.stream!r}, {self.first}, {self.end.offset})"


def ranges_between(start: Offsets, end: Offsets) -> list[Range]:
    """Return the records between two of a query's offsets.

    A new or recreated stream has no records in this batch. The query first stores the stream's
    beginning as its offset. The records belong to the next batch.
    """
    return [
        Range(name, known.offset, stop)
        for name, stop in sorted(end.items())
        if (known := start.get(name)) is not None
        and known.incarnation == stop.incarnation
        and known.offset < stop.offset
    ]


def cut(ranges: list[Range], min_parts: int, max_records: int) -> list[Range]:
    """Cut ranges into at least ``min_parts`` parts of at most ``max_records`` records.

    Larger ranges are cut into more parts. Small ranges stay whole. No part is empty, so there are
    fewer parts if there are fewer records than ``min_parts``.

    >>> from meteor_py import Position
    >>> [len(part) for part in cut([Range("s", 0, Position("i", 1, 10))], 3, 100)]
    [4, 3, 3]
    """
    total = sum(map(len, ranges))
    parts: list[Range] = []
    for whole in ranges:
        count = max(-(-len(whole) // max_records), -(-len(whole) * min_parts // total))
        count = min(count, len(whole))
        size, larger = divmod(len(whole), count)
        first = whole.first
        for number in range(count):
            stop = first + size + (number < larger)
            parts.append(replace(whole, first=first, end=whole.end._replace(offset=stop)))
            first = stop
    return parts


def bounded(ranges: list[Range], end: Offsets, max_records: int) -> Offsets:
    """Return ``end``, or lower offsets so that the batch has at most ``max_records`` records.

    Each stream gets one record and its share of the rest. If there are more streams than
    ``max_records``, they take turns. Whose turn it is depends only on where the ranges begin, so
    the same batch is planned again after a crash.
    """
    total, count = sum(map(len, ranges)), len(ranges)
    if total <= max_records:
        return end
    limited = dict(end)
    turn = sum(found.first for found in ranges)
    for number, found in enumerate(ranges):
        if max_records < count:
            share = int((number - turn) % count < max_records)
        else:
            share = 1 + (max_records - count) * (len(found) - 1) // (total - count)
        limited[found.stream] = found.end._replace(offset=found.first + share)
    return limited
