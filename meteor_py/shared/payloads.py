"""Payloads: the records of offsets here and there in a stream.

A frame is fetched once, and kept as long as records of it may be wanted: consumers of a shared
group get theirs out of the same frames, a few at a time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meteor_py import keys
from meteor_py.config import FRAME_RECORDS_MAX
from meteor_py.cursor import Cursor
from meteor_py.errors import ConnectionFailed, RecordsLost, SegmentCorrupt
from meteor_py.frame import decode, entry_span
from meteor_py.link import Link
from meteor_py.record import Chunk, Record

if TYPE_CHECKING:
    from meteor_py.stream import Stream

#: Frames that are kept, and that are asked for at a time.
_KEEP = 16
_ASK = 64


class Payloads:
    """For one thread at a time, except ``interrupt``."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._link: Link = stream.client.open_link()
        self._cursor: Cursor | None = None
        self._frames: dict[int, list[Record]] = {}  # by first offset
        self._firsts: list[int] = []  # the same, in order
        # Records of a frame, as far as is known: one is asked for before many, for a frame that is
        # asked for with two of its records travels twice.
        self._size = FRAME_RECORDS_MAX

    def fetch(self, offsets: Sequence[int]) -> tuple[dict[int, Record], list[int]]:
        """The records, and the offsets of those that are in neither ring nor store.

        Args:
            offsets: In rising order.

        Raises:
            ConnectionFailed, StoreUnavailable: Not now.
            CorruptFrameError, UnsupportedFrameError, SegmentCorrupt: As for every reader.
        """
        self._trim(offsets)
        missing = [offset for offset in offsets if self._find(offset) is None]
        dropped: set[int] = set()  # by the ring
        while missing:
            dropped |= self._ask(missing)
            missing = [o for o in missing if o not in dropped and self._find(o) is None]
        found: dict[int, Record] = {}
        lost: list[int] = []
        for offset in offsets:
            record = self._find(offset) or self._dig(offset)
            if record is None:
                lost.append(offset)
            else:
                found[offset] = record
        return found, lost

    def forget(self) -> None:
        """Fetch all anew: offsets may mean other records now."""
        self._frames, self._firsts = {}, []

    def cold(self, start: int, stop: int) -> list[Chunk]:
        """Records that only the store has, from ``start`` on, at least one.

        Raises:
            RecordsLost: It has not.
        """
        chunks = self._read(start, stop - start)
        return [chunk for chunk in chunks if chunk.first < stop]

    def wait(self, streams: Sequence[tuple[str, str]], block_s: float) -> None:
        """Wait until one of some keys has an entry behind an ID."""
        names, ids = zip(*streams, strict=True)
        block = ("BLOCK", max(int(min(block_s, self._link.block_max_s) * 1000), 1))
        command = ("XREAD", "COUNT", 1, *block, "STREAMS", *names, *ids)
        self._link.call(*command, timeout_s=self._link.block_max_s + self._link.timeout_s)

    def interrupt(self) -> None:
        self._link.interrupt()
        if self._cursor is not None:
            self._cursor.interrupt()

    def close(self) -> None:
        self._link.close()
        if self._cursor is not None:
            self._cursor.close()

    # -- the ring ------------------------------------------------------------------------------

    def _ask(self, missing: Sequence[int]) -> set[int]:
        """Fetch frames of some, as far as it is known how large frames are.

        Returns:
            The offsets of those that the ring does not have.
        """
        wanted: list[int] = []
        for offset in missing:
            if not wanted or offset >= wanted[-1] + self._size:
                wanted.append(offset)
                if len(wanted) == _ASK:
                    break
        log = keys.log(self._stream.name)
        answers = self._call([("XRANGE", log, f"{o}-0", "+", "COUNT", 1) for o in wanted])
        dropped: set[int] = set()
        sizes: list[int] = []
        for offset, entries in zip(wanted, answers, strict=True):
            first, last = (
                entry_span(self._stream.name, entries[0][0]) if entries else (offset + 1, 0)
            )
            if first > offset:
                dropped.update(o for o in missing if offset <= o < first)
                continue
            sizes.append(last - first + 1)
            if self._find(offset) is None:
                self._keep(decode(self._stream.name, entries)[0])
        self._size = max(sizes, default=self._size)
        return dropped

    def _call(
        self, commands: Sequence[tuple[object, ...]]
    ) -> list[list[tuple[bytes, list[bytes]]]]:
        was_connected = self._link.connected
        try:
            return self._link.pipeline(commands, self._link.timeout_s)
        except ConnectionFailed:
            if not was_connected:
                raise
            return self._link.pipeline(commands, self._link.timeout_s)  # an idle one may have died

    # -- the store -----------------------------------------------------------------------------

    def _dig(self, offset: int) -> Record | None:
        """A record that the ring has dropped, from the store; None if that has not got it."""
        try:
            chunks = self._read(offset, 1)
        except RecordsLost:
            return None
        for chunk in chunks:
            self._keep(chunk)
        return self._find(offset)

    def _read(self, offset: int, records: int) -> list[Chunk]:
        if self._cursor is None:
            self._cursor = self._stream.cursor()
        try:
            self._cursor.move(offset)
            return self._until_there(records)
        except (RecordsLost, SegmentCorrupt):
            raise
        except BaseException:
            self._cursor.close()
            self._cursor = None
            raise

    def _until_there(self, records: int) -> list[Chunk]:
        assert self._cursor is not None, "it was opened"
        while True:  # ends: it is there, or lost; the stream may have changed while it was read
            chunks = self._cursor.fetch(records=records)
            if chunks:
                return chunks

    # -- what is kept --------------------------------------------------------------------------

    def _find(self, offset: int) -> Record | None:
        at = bisect_right(self._firsts, offset) - 1
        if at < 0:
            return None
        first = self._firsts[at]
        records = self._frames[first]
        return records[offset - first] if offset < first + len(records) else None

    def _keep(self, chunk: Chunk) -> None:
        if chunk.first not in self._frames:
            insort(self._firsts, chunk.first)
        self._frames[chunk.first] = list(chunk.rows())

    def _trim(self, wanted: Sequence[int]) -> None:
        """Drop frames that are not wanted now: the oldest if there are many, all of one record."""
        needed = {
            first
            for first, records in self._frames.items()
            if (at := bisect_left(wanted, first)) < len(wanted)
            and wanted[at] < first + len(records)
        }
        spare = [first for first in self._firsts if first not in needed]
        many = len(self._firsts) - _KEEP
        for number, first in enumerate(spare):
            if number < many or len(self._frames[first]) == 1:
                del self._frames[first]
        self._firsts = sorted(self._frames)
