"""The read buffer: a subscriber's position, and records fetched but not delivered yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meteor_py.errors import CorruptSegment, LogTruncated, RecordsLost
from meteor_py.log.handle import StreamHandle
from meteor_py.records.codec import Codec
from meteor_py.records.position import Position
from meteor_py.records.record import Chunk, RecordBatch
from meteor_py.subscribe.lease import Term


class Gap(NamedTuple):
    """Unreadable records. Not an exception, because a traceback would keep memory alive."""

    first: int
    last: int
    #: True if the server has lost the records, or the whole stream. False if the ring dropped them,
    #: or if they are damaged in the store.
    truncated: bool


class ReadBuffer:
    """Fetched records, and a position that is initially the stream's end. Not thread-safe."""

    def __init__(
        self, stream: StreamHandle, on_gap_skipped: Callable[[int, int], object] | None = None
    ) -> None:
        self._stream = stream.name
        self._on_gap_skipped = on_gap_skipped
        self._log = stream.open_reader()
        self._chunks: deque[Chunk] = deque()  # the first may begin before the position
        # Whether the position means "the first record that exists". The first reply fixes the
        # position, even if it has no records, because the application then relies on it.
        self._floating = False
        # Whether the records before the first existing one count as a gap.
        self._skipping = False
        #: The offset of the next record to hand out. The caller advances it.
        self.position = self._log.end_offset
        #: The term in which the records are read; None without a group.
        self.term: Term | None = None
        #: The records that the last fetch found missing or damaged.
        self.gap: Gap | None = None
        #: Number of seeks and other jumps so far; sequential reading does not count.
        self.jumps = 0
        #: Number of lost records that were skipped.
        self.skipped = 0

    @property
    def end_offset(self) -> int:
        """The end of the stream, as of the last reply from the server."""
        return self._log.end_offset

    def read_columns(self, columns: Sequence[str]) -> None:
        """See ``LogReader.read_columns``."""
        self._log.read_columns(columns)

    def ready(self) -> bool:
        """Return whether there are records to hand out."""
        chunks = self._chunks  # a close() in another thread replaces the attribute
        while chunks and chunks[0].first + len(chunks[0]) <= self.position:
            chunks.popleft()
        return bool(chunks)

    def fetch(self, block_s: float, records: int) -> None:
        """Fetch the next records, waiting up to ``block_s`` seconds, in one blocking call.

        Raises:
            RecordsLost, LogTruncated: Records are missing. Also sets ``gap``.
            CorruptSegment: Records are damaged in the store. Also sets ``gap``.
            OwnerChanged: The group has a new owner; see ``LogReader.fetch``.
        """
        block_s = min(block_s, self._log.block_max_s)
        try:
            chunks = self._log.fetch(
                self.position, block_s, records=records, anywhere=self._floating
            )
        except (RecordsLost, LogTruncated) as error:
            self.note_gap(error)
            raise
        except CorruptSegment as error:  # the segment may begin before the position
            self.gap = Gap(self.position, error.last, truncated=False)
            raise
        was_skipping = self._skipping
        self._floating = self._skipping = False
        if chunks:
            missed, self.position = self.position, chunks[0].first
            more_skipped = was_skipping and missed < self.position
            self.gap = None
            self._chunks.extend(chunks)
            if more_skipped:  # the ring has dropped more records since the gap was found
                self.count_skipped(missed, self.position - 1)

    def peek(self, max_records: int, codec: Codec | None) -> RecordBatch:
        """Return up to ``max_records`` of the next records, without changing the position."""
        chunks: list[Chunk] = []
        start, stop = self.position, self.position + max_records
        for chunk in self._chunks:
            if chunk.first >= stop:
                break
            low, high = max(start - chunk.first, 0), min(stop - chunk.first, len(chunk))
            whole = low == 0 and high == len(chunk)
            chunks.append(chunk if whole else chunk.slice(low, high))
        return RecordBatch(self._stream, start, chunks, codec)

    def seek(self, offset: int, *, floating: bool = False) -> None:
        """Move to ``offset`` or, with ``floating``, to the first existing record at or after it.

        Raises:
            ValueError: The offset is beyond the end.
        """
        self._log.seek(offset)
        self._jump(offset, floating)

    def resume(self, position: Position) -> None:
        """Move to a position that the application has stored.

        Raises:
            LogTruncated: The server has lost records before that position. Also sets ``gap``.
        """
        try:
            self._log.resume(position)
        except LogTruncated as error:
            self.note_gap(error)
            raise
        self._jump(position.offset, floating=False)

    @property
    def checkpoint(self) -> Position:
        """The position, together with its incarnation and epoch."""
        return self._log.position(self.position)

    def epoch_of(self, offset: int) -> int:
        """Return the epoch in which a delivered record was appended."""
        return self._log.epoch_of(offset)

    def start_term(self, group: str, term: Term) -> None:
        """Move to the start of one of the group's terms.

        Raises:
            LogTruncated: The server has lost records that this member read in an earlier term. Also
                sets ``gap``.
        """
        if self.term is not None:
            try:
                self._log.check_kept(self.position, term.start.epoch, term.end_offset)
            except LogTruncated as error:
                self.note_gap(error)
                raise
        self._log.start_term(term.start, term.end_offset, group, term.nonce)
        self._jump(term.start.offset, term.floating)
        self.term = term  # set it last: until then, other threads confirm records from the old term

    def skip_to(self, offset: int) -> None:
        """Move to the first record at or after ``offset``; count missing records as a gap."""
        self.seek(offset, floating=True)
        self._skipping = True

    def note_gap(self, error: RecordsLost | LogTruncated) -> None:
        self.gap = Gap(error.first, error.last, isinstance(error, LogTruncated))

    def count_skipped(self, first: int, last: int) -> None:
        if last < first:
            return
        self.skipped += last - first + 1
        if self._on_gap_skipped is not None:
            self._on_gap_skipped(first, last)

    def interrupt(self) -> None:
        """Interrupt a wait in another thread."""
        self._log.interrupt()

    def close(self) -> None:
        self._chunks = deque()
        self._log.close()

    def _jump(self, offset: int, floating: bool) -> None:
        self._chunks = deque()
        self.position = offset
        self.gap = None
        self._floating = floating
        self._skipping = False
        self.jumps += 1
