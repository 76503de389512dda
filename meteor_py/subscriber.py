"""The subscriber: hands out records in order, from anywhere in the stream."""

from __future__ import annotations

import enum
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Literal, Self

from meteor_py.codec import Codec
from meteor_py.config import OFFSET_MAX, check_choice, check_int, check_seconds
from meteor_py.errors import (
    ConnectionFailed,
    InvalidInitialOffset,
    LogTruncated,
    MeteorError,
    RecordsLost,
)
from meteor_py.record import Chunk, Record, RecordBatch

if TYPE_CHECKING:
    from meteor_py.stream import Stream

OnGap = Literal["raise", "skip"]

#: The longest wait inside the server; a connection that died is noticed soon after.
_BLOCK_MAX_S = 2.0
#: Records that iterating takes at a time.
_ITERATE = 10_000
#: How long iterating goes on without a server before it gives up.
_RECONNECT_S = 30.0


class InitialOffset(enum.StrEnum):
    """Where a subscriber starts."""

    #: At the first record that can be read.
    EARLIEST = "earliest"
    #: After the last record that exists when ``subscriber()`` returns.
    LATEST = "latest"
    #: Nowhere: only for a group that has confirmed something.
    NONE = "none"
    #: LATEST.
    AUTO = "auto"


class Subscriber:
    """Reads one stream. Any number of them do not disturb each other, nor the publishers.

    >>> with stream.subscriber(initial_offset="earliest") as sub:    # doctest: +SKIP
    ...     for record in sub:
    ...         print(record.offset, record.value)

    For one thread at a time. Create it with ``stream.subscriber()``.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        initial_offset: InitialOffset,
        on_gap: OnGap,
        on_gap_skipped: Callable[[int, int], object] | None,
        codec: Codec | None,
    ) -> None:
        check_choice("on_gap", on_gap, ("raise", "skip"))
        if on_gap_skipped is not None and not callable(on_gap_skipped):
            raise TypeError("on_gap_skipped must be a function of the first and the last offset.")
        if initial_offset is InitialOffset.NONE:
            raise InvalidInitialOffset(
                "InitialOffset.NONE leaves an ungrouped subscriber nowhere to start; use EARLIEST "
                "or LATEST.",
                stream=stream.name,
            )
        self.stream = stream
        #: Records that were gone and skipped, with ``on_gap="skip"`` or by ``skip_gap()``.
        self.skipped = 0
        self._on_gap = on_gap
        self._on_gap_skipped = on_gap_skipped
        self._codec = codec
        self._closed = False
        self._chunks: deque[Chunk] = deque()  # fetched; the first may begin before the position
        self._gap: RecordsLost | LogTruncated | None = None
        self._cursor = stream.cursor()
        self._position = self._cursor.position.offset
        # Whether the position means "the first there is": until a record is found, that moves.
        self._floating = False
        # Whether what is missed by that is part of a gap.
        self._skipping = False
        self._jumps = 0
        if initial_offset is InitialOffset.EARLIEST:
            self.seek("earliest")

    # -- reading -------------------------------------------------------------------------------

    def poll(self, timeout: float = 1.0, max_records: int = 10_000) -> RecordBatch:
        """Return the next records, waiting for them if there are none.

        Args:
            timeout: Seconds to wait; 0 only looks.
            max_records: At most so many.

        Returns:
            A batch of consecutive offsets from ``position`` on, empty if none came in time.

        Raises:
            RecordsLost: The next record is gone; at each poll until ``skip_gap()`` or ``seek()``.
            LogTruncated: The server lost what was read; as ``RecordsLost``.
            CorruptFrameError, UnsupportedFrameError, StreamCorrupt: The next frame is unreadable.
            StreamNotFound: The stream was deleted.
            ConnectionFailed: The server could not be reached until the timeout.
        """
        check_seconds("timeout", timeout, zero=True)
        check_int("max_records", max_records, 1, OFFSET_MAX)
        self._fetch(timeout, max_records)
        batch = self._peek(max_records)
        self._position += len(batch)
        return batch

    def __iter__(self) -> Iterator[Record]:
        """Records one by one, without end; ``position`` follows each.

        A server that is away is waited for, up to 30 seconds. Ends when the subscriber is closed.
        """
        while not self._closed:
            self._fetch(_RECONNECT_S, _ITERATE, endless=True)
            jumps = self._jumps
            for record in self._peek(_ITERATE):
                self._position = record.offset + 1
                yield record
                moved = self._jumps != jumps or self._position != record.offset + 1
                if moved or self._closed:
                    break  # by the caller: seek() or poll() inside the loop

    # -- moving --------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The offset of the next record that will be handed out."""
        return self._position

    @property
    def lag(self) -> int:
        """Records between the position and the end of the stream when it was last seen."""
        return max(self._cursor.next - self._position, 0)

    def seek(self, to: int | str | datetime) -> None:
        """Go on from somewhere else.

        Args:
            to: An offset, "earliest", "latest", or an aware datetime: the first record that was
                appended at that time or later.

        Raises:
            ValueError: A negative offset, one beyond the end, or a datetime without a timezone.
        """
        self._check_open()
        floating = False
        if isinstance(to, datetime):
            offset = self.stream.offset_at(to)
        elif isinstance(to, str):
            check_choice("to", to, ("earliest", "latest"))
            description = self.stream.describe()
            floating = to == "earliest"
            offset = description.first if floating else description.next
        else:
            offset = check_int("to", to, 0, OFFSET_MAX)
        self._cursor.move(offset)
        self._jump(offset)
        self._floating = floating

    def skip_gap(self) -> None:
        """Go on behind the gap that the last poll named, with the first record there is.

        After ``LogTruncated``: with what the server has now in place of what it lost. Without a
        gap nothing happens.
        """
        self._check_open()
        gap = self._gap
        if isinstance(gap, LogTruncated):
            stream = self.stream.client.stream(self.stream.name, create=False)
            cursor = stream.cursor()
            try:
                cursor.move(min(gap.first, cursor.next))
            except BaseException:
                cursor.close()
                raise
            self._cursor.close()
            self.stream, self._cursor = stream, cursor
        elif gap is not None:
            self._cursor.move(min(gap.last + 1, self._cursor.next))
        if gap is not None:
            self._jump(self._cursor.position.offset)
            self._floating = self._skipping = True
            self._count_skipped(gap.first, gap.last)

    def close(self) -> None:
        """Close the connection. Closing twice is fine."""
        self._closed = True
        self._chunks.clear()
        self._cursor.close()

    @property
    def closed(self) -> bool:
        """Whether it hands out no more records."""
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"at {self._position}"
        return f"<Subscriber of {self.stream.name!r} ({state})>"

    # -- inside --------------------------------------------------------------------------------

    def _fetch(self, timeout_s: float, records: int, *, endless: bool = False) -> None:
        """Have something to hand out, if it comes in time.

        ``endless``: the time runs only while the server is away.
        """
        self._check_open()
        self._drop_read()
        deadline = time.monotonic() + timeout_s
        failure: ConnectionFailed | None = None
        tries = 0
        while not self._chunks and not self._closed:
            left = deadline - time.monotonic()
            if left <= 0 and tries:
                if failure is not None:
                    raise failure
                return
            try:
                self._extend(min(max(left, 0.0), _BLOCK_MAX_S), records)
                failure = None
                if endless:
                    deadline = time.monotonic() + timeout_s
            except ConnectionFailed as error:
                failure = error
                left = deadline - time.monotonic()
                pause = 0.02 * 2 ** min(tries, 5) * random.uniform(0.5, 1)
                if left > 0 and not self._closed:
                    time.sleep(min(left, pause))
            tries += 1
        if self._closed:  # by another thread, while we waited
            self._cursor.close()

    def _extend(self, block_s: float, records: int) -> None:
        """Fetch once; skip a gap if that is wanted."""
        # An interrupt may have come between a fetch and the keeping of what it brought.
        self._cursor.stand_at(self._position)
        try:
            chunks = self._cursor.fetch(block_s, records=records, anywhere=self._floating)
        except RecordsLost as gap:
            self._gap = gap
            if self._on_gap == "raise":
                raise
            self.skip_gap()
            chunks = self._cursor.fetch(records=records, anywhere=True)
        except LogTruncated as gap:
            self._gap = gap
            raise
        if chunks:
            missed, self._position = self._position, chunks[0].first
            more_skipped = self._skipping and missed < self._position
            self._floating = self._skipping = False
            self._gap = None
            self._chunks.extend(chunks)
            if more_skipped:  # the ring has moved on since the gap was found
                self._count_skipped(missed, self._position - 1)

    def _peek(self, max_records: int) -> RecordBatch:
        """The next records, up to a number, without moving."""
        chunks: list[Chunk] = []
        start, stop = self._position, self._position + max_records
        for chunk in self._chunks:
            if chunk.first >= stop:
                break
            low, high = max(start - chunk.first, 0), min(stop - chunk.first, len(chunk))
            whole = low == 0 and high == len(chunk)
            chunks.append(chunk if whole else chunk.slice(low, high))
        return RecordBatch(self.stream.name, start, chunks, self._codec)

    def _drop_read(self) -> None:
        while self._chunks and self._chunks[0].first + len(self._chunks[0]) <= self._position:
            self._chunks.popleft()

    def _jump(self, offset: int) -> None:
        self._chunks.clear()
        self._position = offset
        self._gap = None
        self._skipping = False
        self._jumps += 1

    def _count_skipped(self, first: int, last: int) -> None:
        if last < first:
            return
        self.skipped += last - first + 1
        if self._on_gap_skipped is not None:
            self._on_gap_skipped(first, last)

    def _check_open(self) -> None:
        if self._closed:
            raise MeteorError(
                f"This subscriber of stream {self.stream.name!r} is closed; open another with "
                "stream.subscriber()."
            )
