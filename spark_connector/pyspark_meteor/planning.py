"""What a driver asks the server: which streams there are, where they begin and end."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from meteor_py import Client, LogTruncated, Position, Stream, StreamNotFound
from meteor_py.log.split_points import split_points
from meteor_py.records.times import EPOCH
from meteor_py.redis import keys
from pyspark_meteor.offsets import Offsets
from pyspark_meteor.ranges import Range, cut

if TYPE_CHECKING:
    from pyspark_meteor.options import Place, SourceOptions

#: Records of a partition, roughly, if nothing is said: a second of work or so.
RECORDS_PER_PARTITION = 500_000
#: Seconds between two looks for new streams; where the known ones end is asked every few ms.
LIST_S = 1.0
#: Streams that the server is asked for at once.
_ASKED = 1000


class Planner:
    """For one thread: the driver's."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._streams: dict[str, Stream] = {}
        self._listed: list[str] = []
        self._listed_at: float | None = None
        self._checked: dict[str, tuple[Position, str, int]] = {}

    def names(self) -> list[str]:
        """The streams to read: those named, or all that match now, or did a moment ago."""
        if self._options.pattern is None:
            return list(self._options.streams)
        now = time.monotonic()
        if self._listed_at is None or now - self._listed_at >= LIST_S:
            pattern = re.compile(self._options.pattern)
            self._listed = [name for name in self._client.streams() if pattern.fullmatch(name)]
            self._listed_at = now
        return self._listed

    def open(self, name: str) -> Stream:
        """A stream.

        Raises:
            StreamNotFound: There is none of that name.
        """
        if name not in self._streams:
            self._streams[name] = self._client.stream(name, create=False)
        return self._streams[name]

    def ends(self) -> Offsets:
        """Where each stream ends now; one that does not exist yet is left out."""
        found: Offsets = {}
        names = self.names()
        for start in range(0, len(names), _ASKED):
            part = names[start : start + _ASKED]
            fields = ("incarnation", "epoch", "next")
            asked = [("HMGET", keys.meta(name), *fields) for name in part]
            for name, answer in zip(part, self._client._connector.pipeline(asked), strict=True):
                life = answer[0].decode() if answer[0] else None
                if name in self._streams and self._streams[name].incarnation != life:
                    del self._streams[name]  # deleted, or created anew since it was opened
                if life:
                    found[name] = Position(life, int(answer[1]), int(answer[2]))
        return found

    def first(self, name: str) -> int:
        """The first record that there is of a stream; 0 if there is no such stream."""
        try:
            return self.open(name).bounds()[0]
        except (StreamNotFound, LogTruncated):
            return 0

    def resolve(self, name: str, place: Place) -> Position:
        """What a place means now.

        Raises:
            ValueError: An offset beyond the end.
        """
        stream = self.open(name)
        end = stream.end()
        first = stream.bounds()[0]
        match place.kind:
            case "latest":
                offset = end.offset
            case "earliest":
                offset = first
            case "before":
                offset = max(end.offset - place.number, first)
            case "time":
                offset = stream.offset_at(EPOCH + timedelta(milliseconds=place.number))
            case _:
                offset = place.number
        if offset > end.offset:
            raise ValueError(
                f"Offset {offset} is beyond the end of stream {name!r}, which is {end.offset}."
            )
        return end._replace(offset=offset)

    def check(self, name: str, known: Position, end: Position) -> None:
        """Raise if the server has lost records that a query knows of.

        Raises:
            LogTruncated: It has, or the stream was created anew.
        """
        same = (known.incarnation, known.epoch) == (end.incarnation, end.epoch)
        if same and known.offset <= end.offset:
            return
        found = (known, end.incarnation, end.epoch)
        if self._checked.get(name) != found or known.offset > end.offset:
            with self.open(name).subscriber() as sub:
                sub.seek(known)
            self._checked[name] = found  # until the next batch, this is asked every few ms

    def divide(self, ranges: list[Range]) -> list[Range]:
        """Cut ranges into what tasks read; where that is possible, between frames or row groups.

        It is not if the frames are too large for as many parts as are wanted, or as small ones.
        """
        options = self._options
        most = options.max_records_per_partition
        parts = cut(ranges, options.min_partitions, most or RECORDS_PER_PARTITION)
        aligned = [part for whole in ranges for part in self._aligned(whole, parts)]
        is_few = len(aligned) < min(options.min_partitions, len(parts))
        is_large = most is not None and any(len(part) > most for part in aligned)
        return parts if is_few or is_large else aligned

    def _aligned(self, whole: Range, parts: list[Range]) -> list[Range]:
        own = [part for part in parts if part.stream == whole.stream]
        try:
            handle = self.open(whole.stream)._handle
            found = split_points(handle, [part.first for part in own[1:]])
        except (StreamNotFound, LogTruncated):
            return own  # whoever reads it will be told, or go on without
        inner = sorted({end for end in found if whole.first < end < whole.end.offset})
        return [
            replace(whole, first=first, end=whole.end._replace(offset=stop))
            for first, stop in pairwise([whole.first, *inner, whole.end.offset])
        ]

    def record_bytes(self, streams: Iterable[str]) -> int:
        """What a record takes, on the average of those in the rings now."""
        size = count = 0
        for name in streams:
            try:
                found = self.open(name).describe()
            except (StreamNotFound, LogTruncated):
                continue
            size += found.bytes or 0
            count += found.length
        return max(size // max(count, 1), 1)

    @property
    def _client(self) -> Client:
        return self._options.server.connect()
