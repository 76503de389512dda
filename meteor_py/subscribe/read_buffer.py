"""The records that a subscriber has fetched and not handed out yet, and its position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from meteor_py.errors import CorruptSegment, LogTruncated, RecordsLost
from meteor_py.records.codec import Codec
from meteor_py.records.position import Position
from meteor_py.records.record import Chunk, RecordBatch
from meteor_py.subscribe.lease import Term

if TYPE_CHECKING:
    from meteor_py.log.handle import StreamHandle


class Gap(NamedTuple):
    """Records that are gone. Not the error that says so: that would hold all its callers."""

    first: int
    last: int
    #: Whether the server has lost them, or the whole stream; else the ring has dropped them.
    truncated: bool


class ReadBuffer:
    """For one thread at a time. Stands at the end of the stream when it is made."""

    def __init__(
        self, stream: StreamHandle, on_gap_skipped: Callable[[int, int], object] | None = None
    ) -> None:
        self._stream = stream.name
        self._on_gap_skipped = on_gap_skipped
        self._log = stream.open_reader()
        self._chunks: deque[Chunk] = deque()  # the first may begin before the position
        # Whether the position means "the first there is": until a record is found, that moves.
        self._floating = False
        # Whether what is missed by that is part of a gap.
        self._skipping = False
        #: The offset of the next record to hand out; the caller moves it past those that it took.
        self.position = self._log.end_offset
        #: The term in which the records are read; None without a group.
        self.term: Term | None = None
        #: What the last fetch found missing.
        self.gap: Gap | None = None
        #: Rises with every move that is not reading on.
        self.jumps = 0
        #: Records that were gone and skipped.
        self.skipped = 0

    @property
    def end_offset(self) -> int:
        """The end of the stream when it was last seen."""
        return self._log.end_offset

    @property
    def epoch(self) -> int:
        """As ``LogReader.epoch``."""
        return self._log.epoch

    @property
    def block_max_s(self) -> float:
        """As ``Connection.block_max_s``."""
        return self._log.block_max_s

    def ready(self) -> bool:
        """Whether there is something to hand out."""
        chunks = self._chunks  # another thread may close the subscriber, and put an empty one there
        while chunks and chunks[0].first + len(chunks[0]) <= self.position:
            chunks.popleft()
        return bool(chunks)

    def fetch(self, block_s: float, records: int) -> None:
        """Get what comes next, waiting for it up to ``block_s`` seconds.

        Raises:
            RecordsLost, LogTruncated: Kept as ``gap``.
            OwnerChanged: As ``LogReader.fetch``.
        """
        try:
            chunks = self._log.fetch(
                self.position, block_s, records=records, anywhere=self._floating
            )
        except (RecordsLost, LogTruncated) as error:
            self.note_gap(error)
            raise
        except CorruptSegment as error:  # of which some may lie before the position
            self.gap = Gap(self.position, error.last, truncated=False)
            raise
        if chunks:
            missed, self.position = self.position, chunks[0].first
            more_skipped = self._skipping and missed < self.position
            self._floating = self._skipping = False
            self.gap = None
            self._chunks.extend(chunks)
            if more_skipped:  # the ring has moved on since the gap was found
                self.count_skipped(missed, self.position - 1)

    def peek(self, max_records: int, codec: Codec | None) -> RecordBatch:
        """The next records, up to a number, without moving."""
        chunks: list[Chunk] = []
        start, stop = self.position, self.position + max_records
        for chunk in self._chunks:
            if chunk.first >= stop:
                break
            low, high = max(start - chunk.first, 0), min(stop - chunk.first, len(chunk))
            whole = low == 0 and high == len(chunk)
            chunks.append(chunk if whole else chunk.slice(low, high))
        return RecordBatch(self._stream, start, chunks, codec)

    def forget(self) -> None:
        """Drop what was fetched."""
        self._chunks = deque()

    def seek(self, offset: int, *, floating: bool = False) -> None:
        """Stand before ``offset``; ``floating`` if the first record there is is meant by it.

        Raises:
            ValueError: It is beyond the end.
        """
        self._log.seek(offset)
        self._jump(offset, floating)

    def resume(self, position: Position) -> None:
        """Stand at a position that was kept elsewhere.

        Raises:
            LogTruncated: The server has lost records before it; kept as ``gap``.
        """
        try:
            self._log.resume(position)
        except LogTruncated as error:
            self.note_gap(error)
            raise
        self._jump(position.offset, floating=False)

    @property
    def checkpoint(self) -> Position:
        """The position, with the incarnation and epoch of the stream that it belongs to."""
        return self._log.position(self.position)

    def start_term(self, group: str, term: Term) -> None:
        """Stand where a term of the group starts."""
        self._log.start_term(term.start, term.end_offset, group, term.nonce)
        self._jump(term.start.offset, term.floating)
        self.term = term  # not before: a confirm in another thread is for what it was given then

    def skip_to(self, offset: int) -> None:
        """Stand before the first record from ``offset`` on; those missing before it are a gap."""
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
        """End a wait in another thread."""
        self._log.interrupt()

    def close(self) -> None:
        self.forget()
        self._log.close()

    def _jump(self, offset: int, floating: bool) -> None:
        self._chunks = deque()
        self.position = offset
        self.gap = None
        self._floating = floating
        self._skipping = False
        self.jumps += 1
