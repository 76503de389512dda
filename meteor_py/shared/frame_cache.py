"""A cache of frames for readers of scattered offsets.

A consumer in a shared group gets a few records at a time from the same frames. The cache keeps a
frame while its other records may still be needed, so that the consumer rarely fetches it again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from meteor_py.errors import (
    CorruptFrame,
    CorruptSegment,
    CorruptStream,
    RecordsLost,
    UnsupportedFrame,
)
from meteor_py.log.log_reader import LogReader
from meteor_py.log.ring_reader import LARGE_FRAME
from meteor_py.records.config import FRAME_RECORDS_MAX, OFFSET_MAX, RECORD_BYTES_LIMIT
from meteor_py.records.frame import decode, entry_span
from meteor_py.records.ordering_index import STORED_ENTRY_RECORDS, OrderingRule
from meteor_py.records.record import Chunk, Record
from meteor_py.redis import keys
from meteor_py.redis.connection import Connection
from meteor_py.shared.gaps import Unreadable
from meteor_py.shared.protocol import Entry, StepReply

if TYPE_CHECKING:
    from meteor_py.log.handle import StreamHandle

#: Number of frames to keep, unless more of them have wanted records, and number of frames to
#: request at a time. If frames are small, one request asks for more of them, up to _FETCH_MAX
#: frames or about _KEEP_RECORDS records.
_KEEP = 16
_FETCH_MAX = 64
_KEEP_RECORDS = 4_096
#: The maximum size in bytes of the frames to keep, unless more have wanted records, and of those to
#: request at a time. A single frame may be larger.
_KEEP_BYTES = 32 * 1024 * 1024
_FETCH_BYTES = 32 * 1024 * 1024


class Fetched(NamedTuple):
    """The result of a fetch, by offset."""

    found: dict[int, Record]
    #: Records that neither the ring nor the store has.
    lost: list[int]
    #: Records that exist but cannot be read, with the reason.
    unreadable: dict[int, Unreadable]


class FrameCache:
    """The frames that one reader caches.

    Except for ``interrupt``, only one thread may use the cache at a time.
    """

    def __init__(self, stream: StreamHandle) -> None:
        self._stream = stream
        self._connection: Connection = stream.open_connection()
        self._log_reader: LogReader | None = None
        self._frames: dict[int, Chunk] = {}  # by first offset
        self._firsts: list[int] = []  # the keys of _frames, sorted
        self._bytes: dict[int, int] = {}  # the size of each frame in bytes, by its first offset
        #: The end of the last large frame, and the size of the largest frame (see _append.lua).
        self._large = (OFFSET_MAX, RECORD_BYTES_LIMIT)
        # Estimated number of records per frame. The estimate starts high, because two requests for
        # records of the same frame would transfer the frame twice.
        self._size = FRAME_RECORDS_MAX

    def note_large(self, large: tuple[int, int]) -> None:
        """Store the stream's ``large`` field, read after the records to fetch were appended."""
        self._large = large

    def fetch(self, offsets: Sequence[int], max_bytes: int = OFFSET_MAX) -> Fetched:
        """Return records, reading a few frames at a time.

        Args:
            offsets: In ascending order.
            max_bytes: Stop once the fetched values have this many bytes in total. The first record
                is fetched whatever its size.

        Raises:
            ConnectionFailed, StoreUnavailable: The server or the store cannot be reached.
        """
        try:
            return self._fetch(offsets, max_bytes)
        except BaseException:  # a Ctrl-C may have interrupted a change of the cache
            self.forget()
            raise

    def _fetch(self, offsets: Sequence[int], max_bytes: int) -> Fetched:
        fetched = Fetched({}, [], {})
        dropped: set[int] = set()  # offsets that the ring has dropped
        left, room = offsets, max_bytes
        while left and room > 0:
            # Terminates, because each round handles at least the first remaining offset.
            if self._find(left[0]) is None:
                self._trim(left)
                if left[0] not in dropped:
                    dropped |= self._fetch_frames(
                        [o for o in left if o not in dropped], fetched.unreadable
                    )
            handled, room = self._gather(left, dropped, fetched, room)
            left = left[handled:]
        return fetched

    def _gather(
        self, offsets: Sequence[int], dropped: set[int], fetched: Fetched, room: int
    ) -> tuple[int, int]:
        """Add records from the cache and the store to ``fetched``.

        Stops when their values fill ``room`` bytes, at an offset that must be requested from the
        ring first, or after ``_KEEP`` reads of the store.

        Returns:
            The number of leading offsets handled, and the remaining room in bytes.
        """
        found, lost, unreadable = fetched
        at = stored = 0
        while at < len(offsets) and room > 0:
            offset = offsets[at]
            frame = self._find(offset)
            if frame is None and offset in dropped and offset not in unreadable:
                if stored == _KEEP:
                    break
                stored += 1
                frame = self._fetch_stored(offset, offsets, unreadable)
                if frame is None and offset not in unreadable:
                    lost.append(offset)
                    at += 1
                    continue
            if frame is not None:
                wanted = _between(offsets, offset, frame.first + len(frame))
                records, room = _fitting(self._pick(frame, wanted), room)
                found.update(zip(wanted, records, strict=False))
                at += len(records)
            elif offset in unreadable:
                at += 1
            else:
                break  # this offset has not been requested yet
        return at, room

    def forget(self) -> None:
        """Drop all frames, for example because offsets may now refer to other records."""
        self._frames, self._firsts, self._bytes = {}, [], {}

    def wait(self, streams: Sequence[tuple[str, str]], block_s: float) -> dict[str, str]:
        """Wait up to ``block_s`` seconds until a Redis stream has an entry after its given ID.

        Returns:
            The ID of the first such entry of each stream, by stream name. Empty after a timeout.
        """
        names, ids = zip(*streams, strict=True)
        block = ("BLOCK", max(int(min(block_s, self._connection.block_max_s) * 1000), 1))
        command = ("XREAD", "COUNT", 1, *block, "STREAMS", *names, *ids)
        found = self._connection.call(
            *command, timeout_s=self._connection.block_max_s + self._connection.timeout_s
        )
        return {name.decode(): entries[-1][0].decode() for name, entries in found or ()}

    def interrupt(self) -> None:
        self._connection.interrupt()
        if self._log_reader is not None:
            self._log_reader.interrupt()

    def close(self) -> None:
        self._connection.close()
        if self._log_reader is not None:
            self._log_reader.close()

    # -- the ring ------------------------------------------------------------------------------

    def _fetch_frames(self, offsets: Sequence[int], unreadable: dict[int, Unreadable]) -> set[int]:
        """Fetch the frames of the first missing offsets.

        Returns:
            The offsets that the ring does not have.
        """
        wanted: list[int] = []
        limit = max(_KEEP, min(_FETCH_MAX, _KEEP_RECORDS // self._size))
        large_end, largest = self._large
        room = _FETCH_BYTES
        for offset in offsets:
            if wanted and offset < wanted[-1] + self._size:
                continue  # the record is probably in the same frame
            if offset not in unreadable and self._find(offset) is None:
                room -= LARGE_FRAME if offset >= large_end else largest
                if wanted and room < 0:
                    break
                wanted.append(offset)
                if len(wanted) == limit:
                    break
        log = keys.log(self._stream.name)
        commands = [("XRANGE", log, f"{offset}-0", "+", "COUNT", 1) for offset in wanted]
        connection = self._connection
        replies = connection.retry_idle(connection.pipeline, commands, connection.timeout_s)
        dropped: set[int] = set()
        sizes: list[int] = []
        for offset, entries in zip(wanted, replies, strict=True):
            span = entry_span(self._stream.name, entries[0][0]) if entries else None
            if span is None or span[0] > offset:
                dropped.update(_between(offsets, offset, None if span is None else span[0]))
                continue
            sizes.append(span[1] - span[0] + 1)
            if self._find(offset) is None:
                try:
                    self._keep(self._decode(entries, *span), sum(map(len, entries[0][1])))
                except (CorruptFrame, UnsupportedFrame) as error:
                    unreadable |= dict.fromkeys(_between(offsets, span[0], span[1] + 1), error)
        self._size = max(sizes, default=self._size)
        first = wanted[0]
        if first not in unreadable and self._find(first) is None:
            dropped.add(first)  # the entry there does not hold this record
        return dropped

    def _decode(self, entries: list[tuple[bytes, list[bytes]]], first: int, last: int) -> Chunk:
        try:
            return decode(self._stream.name, entries)[0]
        except CorruptStream as error:
            raise CorruptFrame(
                str(error), stream=self._stream.name, first=first, last=last
            ) from error

    # -- the store -----------------------------------------------------------------------------

    def _fetch_stored(
        self, offset: int, offsets: Sequence[int], unreadable: dict[int, Unreadable]
    ) -> Chunk | None:
        """Return the chunk with a record that the ring has dropped.

        Adds damaged records to ``unreadable``. Returns None if the record is damaged, or if the
        store lacks it.
        """
        try:
            chunks = self.read_stored(offset, 1)
        except RecordsLost:
            return None
        except CorruptSegment as error:
            unreadable[offset] = error
            unreadable |= dict.fromkeys(_between(offsets, offset, error.last + 1), error)
            return None
        for chunk in chunks:
            self._keep(chunk, chunk.to_arrow().nbytes)
        return self._find(offset)

    def read_stored(self, offset: int, records: int) -> list[Chunk]:
        """Return the record at ``offset`` and perhaps later ones, from the ring or the store.

        Raises:
            RecordsLost: Neither the ring nor the store has the record.
            CorruptSegment: The record is damaged in the store.
        """
        if self._log_reader is None:
            self._log_reader = self._stream.open_reader()
        try:
            self._log_reader.seek(offset)
            while True:  # terminates, because a read is empty only if the stream has just changed
                chunks = self._log_reader.fetch(offset, records=records)
                if chunks:
                    return chunks
        except (RecordsLost, CorruptSegment):
            raise
        except BaseException:
            self._log_reader.close()
            self._log_reader = None
            raise

    # -- the cache -----------------------------------------------------------------------------

    def _find(self, offset: int) -> Chunk | None:
        """Return the chunk that has the record at an offset."""
        at = bisect_right(self._firsts, offset)
        if not at:
            return None
        chunk = self._frames[self._firsts[at - 1]]
        return chunk if offset < chunk.first + len(chunk) else None

    def _pick(self, chunk: Chunk, offsets: Sequence[int]) -> list[Record]:
        """Return some records of a cached chunk, without creating the others."""
        start, stop = offsets[0] - chunk.first, offsets[-1] - chunk.first + 1
        if stop - start == len(offsets):
            return list(chunk.slice(start, stop).rows())
        # Lists give access to scattered records several times faster than Arrow does.
        self._frames[chunk.first] = lists = chunk.to_lists()
        return lists.pick(offsets)

    def _keep(self, chunk: Chunk, size: int) -> None:
        """Add a chunk and drop those that it overlaps.

        Chunks can overlap, because the ring and the store divide the same records differently.
        """
        start, stop = chunk.first, chunk.first + len(chunk)
        at = bisect_left(self._firsts, start)
        if at and self._firsts[at - 1] + len(self._frames[self._firsts[at - 1]]) > start:
            at -= 1
        end = bisect_left(self._firsts, stop)
        for first in self._firsts[at:end]:
            del self._frames[first], self._bytes[first]
        self._firsts[at:end] = [start]
        self._frames[start], self._bytes[start] = chunk, size

    def _trim(self, wanted: Sequence[int]) -> None:
        """Drop frames that have no wanted records.

        Drops those with the lowest offsets until the limits are met. Also drops all frames of one
        record, because a consumer rarely needs a record again.
        """
        needed = {
            first
            for first, chunk in self._frames.items()
            if (at := bisect_left(wanted, first)) < len(wanted) and wanted[at] < first + len(chunk)
        }
        spare = [first for first in self._firsts if first not in needed]
        many, size = len(self._firsts) - _KEEP, sum(self._bytes.values())
        for number, first in enumerate(spare):
            if number < many or size > _KEEP_BYTES or len(self._frames[first]) == 1:
                size -= self._bytes.pop(first)
                del self._frames[first]
        self._firsts = sorted(self._frames)


def _fitting(records: list[Record], room: int) -> tuple[list[Record], int]:
    """Return the first records, up to the one that fills ``room`` bytes, and the room left."""
    for number, record in enumerate(records):
        room -= len(record.value)
        if room <= 0:
            return records[: number + 1], 0
    return records, room


def _between(offsets: Sequence[int], start: int, stop: int | None) -> Sequence[int]:
    """Return the offsets from ``start`` up to, but not including, ``stop``."""
    end = len(offsets) if stop is None else bisect_left(offsets, stop)
    return offsets[bisect_left(offsets, start) : end]


def entry_from_store(
    frames: FrameCache, ordering_rule: OrderingRule, reply: StepReply, before: Entry | None
) -> Entry:
    """Return a replacement for the entry that the index lacks, to send with the next step.

    Args:
        reply: The reply to the step that reached these records.
        before: The entry that was sent with that step, if any. Part of it may be unused.

    Returns:
        The entry. It has no strings if neither the ring nor the store has the records.

    Raises:
        ConnectionFailed, StoreUnavailable: The server or the store cannot be reached.
        CorruptSegment: The records are damaged.
    """
    if before is not None and before.covers(reply.next):
        # If another consumer has scanned the first part, the server accepts only the rest.
        numbers, *others = before.strings or (b"",)
        strings = (numbers[reply.next - before.first :], *others) if before.strings else ()
        return before._replace(first=reply.next, strings=strings)
    try:
        chunk = frames.read_stored(reply.next, reply.stored_stop - reply.next)[0]
    except RecordsLost as gap:
        return Entry(reply.next, (), min(gap.last + 1, reply.stored_stop))
    size = min(len(chunk), reply.stored_stop - reply.next, STORED_ENTRY_RECORDS)
    rows = chunk.slice(0, size).to_arrow()
    return Entry(reply.next, tuple(ordering_rule.index_rows(rows)), reply.next + size)
