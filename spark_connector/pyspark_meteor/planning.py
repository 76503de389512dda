"""Planning on the driver: which streams exist, where they begin and end, and what tasks read."""

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
from meteor_py.records.position import path_of
from meteor_py.records.times import EPOCH
from meteor_py.redis import keys
from pyspark_meteor.offsets import Offsets
from pyspark_meteor.ranges import Range, cut

if TYPE_CHECKING:
    from pyspark_meteor.options import OffsetSpec, SourceOptions

#: Approximate default partition size in records: about a second of work.
RECORDS_PER_PARTITION = 500_000
#: Minimum seconds between searches for new streams. The engine may ask every few ms.
LIST_S = 1.0
#: Maximum number of streams whose ends are requested in one pipeline.
_STREAMS_PER_REQUEST = 1000


class Planner:
    """Plans the reads for one query. Not thread-safe."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._streams: dict[str, Stream] = {}
        self._listed: list[str] = []
        self._listed_at: float | None = None
        self._checked: dict[str, tuple[Position, str, int]] = {}
        self._dangers_logged = False

    def names(self) -> list[str]:
        """Return the names of the streams to read.

        Streams that match a pattern are listed again at most every ``LIST_S`` seconds.
        """
        if self._options.pattern is None:
            return list(self._options.streams)
        now = time.monotonic()
        if self._listed_at is None or now - self._listed_at >= LIST_S:
            pattern = re.compile(self._options.pattern)
            self._listed = [name for name in self._client.streams() if pattern.fullmatch(name)]
            self._listed_at = now
        return self._listed

    def open(self, name: str) -> Stream:
        """Return a stream.

        Raises:
            StreamNotFound: The stream does not exist.
        """
        if name not in self._streams:
            self._streams[name] = self._client.stream(name, create=False)
        return self._streams[name]

    def ends(self) -> Offsets:
        """Return the ends of the query's streams, without those that do not exist."""
        ends: Offsets = {}
        names = self.names()
        for start in range(0, len(names), _STREAMS_PER_REQUEST):
            part = names[start : start + _STREAMS_PER_REQUEST]
            fields = ("incarnation", "epoch", "next", "epochs")
            commands = [("HMGET", keys.meta(name), *fields) for name in part]
            for name, reply in zip(part, self._client._connector.pipeline(commands), strict=True):
                incarnation = reply[0].decode() if reply[0] else None
                if name in self._streams and self._streams[name].incarnation != incarnation:
                    del self._streams[name]  # deleted or recreated since it was opened
                if incarnation:
                    path = path_of(reply[3].decode())
                    ends[name] = Position(incarnation, int(reply[1]), int(reply[2]), path)
        return ends

    def first(self, name: str) -> int:
        """Return the offset of a stream's first record; 0 if there is no such stream."""
        try:
            return self.open(name).bounds()[0]
        except (StreamNotFound, LogTruncated):
            return 0

    def resolve(self, name: str, spec: OffsetSpec) -> Position:
        """Resolve a spec to its current position in the stream.

        Raises:
            StreamNotFound: The stream does not exist.
            ValueError: The offset is beyond the stream's end.
        """
        stream = self.open(name)
        end = stream.end()
        first = stream.bounds()[0]
        match spec.kind:
            case "latest":
                offset = end.offset
            case "earliest":
                offset = first
            case "before":
                offset = max(end.offset - spec.number, first)
            case "time":
                offset = stream.offset_at(EPOCH + timedelta(milliseconds=spec.number))
            case _:
                offset = spec.number
        if offset > end.offset:
            raise ValueError(
                f"Offset {offset} is beyond the end of stream {name!r}, which ends at {end.offset}."
            )
        return end._replace(offset=offset)

    def check(self, name: str, known: Position, end: Position) -> None:
        """Check that the server still has all records before a position.

        Raises:
            LogTruncated: The server has lost some of them, or the stream was recreated.
        """
        same = (known.incarnation, known.epoch) == (end.incarnation, end.epoch)
        if same and known.offset <= end.offset:
            return
        checked = (known, end.incarnation, end.epoch)
        if self._checked.get(name) != checked or known.offset > end.offset:
            with self.open(name).subscriber() as sub:
                sub.seek(known)
            self._checked[name] = checked  # check once, although the engine asks every few ms

    def divide(self, ranges: list[Range]) -> list[Range]:
        """Cut ranges into parts for tasks, at frame or row group boundaries if possible.

        If frames are too large for the number or size of the parts, the cuts may be inside frames.
        """
        options = self._options
        max_records = options.max_records_per_partition
        parts = cut(ranges, options.min_partitions, max_records or RECORDS_PER_PARTITION)
        aligned = [part for whole in ranges for part in self._align(whole, parts)]
        is_few = len(aligned) < min(options.min_partitions, len(parts))
        is_large = max_records is not None and any(len(part) > max_records for part in aligned)
        return parts if is_few or is_large else aligned

    def _align(self, whole: Range, parts: list[Range]) -> list[Range]:
        own = [part for part in parts if part.stream == whole.stream]
        try:
            handle = self.open(whole.stream)._handle
            found = split_points(handle, [part.first for part in own[1:]])
        except (StreamNotFound, LogTruncated):
            return own  # the task that reads the stream raises the error, or skips the stream
        inner = sorted({end for end in found if whole.first < end < whole.end.offset})
        return [
            replace(whole, first=first, end=whole.end._replace(offset=stop))
            for first, stop in pairwise([whole.first, *inner, whole.end.offset])
        ]

    def record_bytes(self, streams: Iterable[str]) -> int:
        """Return the average size, in bytes, of the records currently in the rings."""
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
        server = self._options.server
        if not self._dangers_logged:
            server.log_dangers()
            self._dangers_logged = True
        return server.connect()
