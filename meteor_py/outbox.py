"""The outbox: records published and not yet acknowledged, gathered into batches, bounded.

Any thread puts; one sender takes. While the sender waits for answers, records gather: that is
all the batching there is, unless ``linger`` asks for more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from meteor_py.ack import Ack, Batch
from meteor_py.errors import MeteorError, PublisherClosed, PublisherFull
from meteor_py.frame import Columns

#: What a record costs besides its bytes, so that empty ones are bounded too.
RECORD_OVERHEAD = 64


class Outbox:
    """What waits to be sent, and what is on its way."""

    def __init__(
        self,
        *,
        stream: str,
        records_max: int,
        bytes_max: int,
        pending_max: int,
        linger_s: float,
        delivery_timeout_s: float,
    ) -> None:
        self._stream = stream
        self._records_max = records_max
        self._bytes_max = bytes_max
        self._pending_max = pending_max
        self._linger_s = linger_s
        self._delivery_timeout_s = delivery_timeout_s
        self._make_locks()
        self._open: Batch | None = None
        self._full: deque[Batch] = deque()
        self._pending_bytes = 0
        self._pending_batches = 0
        self._sender_waits = False
        self._waiters = 0
        self._hurry = 0
        self._closed: MeteorError | None = None
        self._loss: MeteorError | None = None
        self._failure: Batch | None = None

    def _make_locks(self) -> None:
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # the sender waits for records
        self._settled = threading.Condition(self._lock)  # publishers wait for room, or for all

    # -- for publishers ------------------------------------------------------------------------

    def put(
        self,
        value: bytes,
        key: bytes | None,
        headers: dict[str, bytes] | None,
        timestamp: int | None,
        size: int,
    ) -> Ack:
        """Take one record of ``size`` bytes in all.

        Raises:
            PublisherFull: No room within the delivery timeout.
            PublisherClosed: Closed.
            LogTruncated: The server has lost acknowledged records; raised once.
        """
        size += RECORD_OVERHEAD
        with self._lock:
            if self._pending_bytes + size > self._pending_max or self._closed or self._loss:
                self._admit(size)
            batch = self._open
            if (
                batch is None
                or batch.count == self._records_max
                or batch.nbytes + size > self._bytes_max
            ):
                batch = self._roll()
            index = batch.count
            if not index:
                self._pending_batches += 1
            columns = batch.columns
            columns.values.append(value)  # type: ignore[union-attr]  # open: has columns
            if key is not None or columns.keys is not None:  # type: ignore[union-attr]
                _append(columns, "keys", index, [key])
            if headers is not None or columns.headers is not None:  # type: ignore[union-attr]
                _append(columns, "headers", index, [headers])
            if timestamp is not None or columns.timestamps is not None:  # type: ignore[union-attr]
                _append(columns, "timestamps", index, [timestamp])
            batch.count = index + 1
            batch.nbytes += size
            self._pending_bytes += size
            if self._sender_waits:
                self._work.notify()
        return Ack(batch, index)

    def put_rows(self, rows: Columns, sizes: Sequence[int]) -> list[tuple[Batch, int, int]]:
        """Take many records, given as lists; return their places.

        Raises as ``put`` does if not even the first found room. Where a later one did not, it
        and those after it are in a batch that has failed.
        """
        parts: list[tuple[Batch, int, int]] = []
        start = 0
        while start < len(rows):
            with self._lock:
                batch = self._open or self._roll()
                stop = self._fitting(batch, sizes, start)
                if stop == start:
                    batch = self._roll()
                    stop = max(self._fitting(batch, sizes, start), start + 1)
                size = sum(sizes[start:stop]) + (stop - start) * RECORD_OVERHEAD
                if self._pending_bytes + size > self._pending_max or self._closed or self._loss:
                    try:
                        self._admit(size)
                    except MeteorError as error:
                        if not parts:
                            raise
                        return [*parts, (_failed(error), 0, len(rows) - start)]
                    if batch is not self._open:
                        continue  # the sender took it while we waited for room
                columns, index = batch.columns, batch.count
                columns.values += rows.values[start:stop]  # type: ignore[union-attr]
                for name in ("keys", "headers", "timestamps"):
                    column = getattr(rows, name)
                    if column is not None or getattr(columns, name) is not None:
                        part = [None] * (stop - start) if column is None else column[start:stop]
                        _append(columns, name, index, part)
                self._count(batch, stop - start, size)
            parts.append((batch, index, stop - start))
            start = stop
        return parts

    def put_frames(self, frames: Sequence[tuple[Columns, int]]) -> list[tuple[Batch, int, int]]:
        """Take frames of Arrow arrays, each with its size in bytes; otherwise as ``put_rows``."""
        parts: list[tuple[Batch, int, int]] = []
        for number, (columns, size) in enumerate(frames):
            with self._lock:
                if self._pending_bytes + size > self._pending_max or self._closed or self._loss:
                    try:
                        self._admit(size)
                    except MeteorError as error:
                        if not parts:
                            raise
                        left = sum(len(rest) for rest, _ in frames[number:])
                        return [*parts, (_failed(error), 0, left)]
                batch = self._roll()
                batch.columns = columns
                self._count(batch, len(columns), size)
                self._seal()
            parts.append((batch, 0, len(columns)))
        return parts

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until all that was put is settled; tell whether it is."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._hurry += 1
            self._work.notify()
            try:
                while self._pending_batches and (left := deadline - time.monotonic()) > 0:
                    self._wait_settled(left)
                return not self._pending_batches
            finally:
                self._hurry -= 1

    def close(self, reason: MeteorError) -> None:
        """Take no more; what is here may still be sent."""
        with self._lock:
            self._closed = self._closed or reason
            self._work.notify_all()
            self._settled.notify_all()

    def forget(self, reason: MeteorError) -> list[Batch]:
        """In a forked child: take no more, and give up what is here."""
        self._make_locks()  # a thread that is not here may have held them
        self._closed = reason
        self._pending_batches = 0
        return self.take_all()

    def take_failure(self) -> Exception | None:
        """A failure that nobody was told of, once."""
        with self._lock:
            loss, self._loss = self._loss, None
            batch, self._failure = self._failure, None
        if batch is not None and not batch.observed:
            batch.observed = True
            return batch.error
        return loss

    # -- for the sender ------------------------------------------------------------------------

    def take(self, *, busy: bool) -> Batch | None:
        """The next batch to send, or None if there is none now.

        While ``busy`` (answers are awaited) only full batches are taken and nothing is waited
        for; otherwise waits for a record, at most a second.
        """
        with self._lock:
            if not busy and self._idle() and not self._closed:
                self._sender_waits = True
                self._work.wait(1.0)
                self._sender_waits = False
            if not busy and not self._full:
                self._linger()
                self._seal()
            return self._full.popleft() if self._full else None

    def drained(self) -> bool:
        """Closed, and nothing left to send."""
        with self._lock:
            return self._closed is not None and self._idle()

    def settle(self, batch: Batch, error: MeteorError | None = None) -> None:
        """A batch's fate is known: make room."""
        batch.settle(error)
        with self._lock:
            self._pending_bytes -= batch.nbytes
            self._pending_batches -= 1
            if error is not None and self._failure is None:
                self._failure = batch
            if self._waiters:
                self._settled.notify_all()

    def report_loss(self, error: MeteorError) -> None:
        """Raise ``error`` in the next call of the publisher, once."""
        with self._lock:
            self._loss = error

    def take_all(self) -> list[Batch]:
        """Everything that waits, to be failed."""
        with self._lock:
            self._seal()
            batches = list(self._full)
            self._full.clear()
            return batches

    # -- inside, with the lock held ------------------------------------------------------------

    def _admit(self, size: int) -> None:
        """Wait for room; raise if there is none in time, or if publishing has ended."""
        deadline = time.monotonic() + self._delivery_timeout_s
        while True:
            if self._loss is not None:
                loss, self._loss = self._loss, None
                raise loss
            if self._closed is not None:
                raise self._closed
            if self._pending_bytes + size <= self._pending_max or not self._pending_batches:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise PublisherFull(
                    f"{self._pending_bytes} bytes for stream {self._stream!r} wait to be "
                    "acknowledged already; publish more slowly, or raise max_pending_bytes.",
                    stream=self._stream,
                )
            self._wait_settled(left)

    def _wait_settled(self, timeout_s: float) -> None:
        self._waiters += 1
        try:
            self._settled.wait(timeout_s)
        finally:
            self._waiters -= 1

    def _idle(self) -> bool:
        return not self._full and (self._open is None or not self._open.count)

    def _linger(self) -> None:
        """Let the open batch wait for company; the publisher that fills it ends the wait."""
        batch = self._open
        while (
            batch is not None
            and batch is self._open
            and batch.count
            and not self._hurry
            and not self._closed
            and (left := batch.gathered_at + self._linger_s - time.monotonic()) > 0
        ):
            self._work.wait(left)

    def _roll(self) -> Batch:
        """Close the open batch and open another; an empty one is taken as it is."""
        self._seal()
        now = time.monotonic()
        self._open = Batch(now, now + self._delivery_timeout_s)
        return self._open

    def _seal(self) -> None:
        if self._open is not None and self._open.count:
            self._full.append(self._open)
            self._open = None
            if self._linger_s:
                self._work.notify()

    def _fitting(self, batch: Batch, sizes: Sequence[int], start: int) -> int:
        """How far into ``sizes`` the records still fit into this batch."""
        stop = min(len(sizes), start + self._records_max - batch.count)
        room = self._bytes_max - batch.nbytes
        while stop > start:
            over = sum(sizes[start:stop]) + (stop - start) * RECORD_OVERHEAD - room
            if over <= 0:
                break
            stop = start + (stop - start) // 2
        return stop

    def _count(self, batch: Batch, records: int, size: int) -> None:
        if not batch.count:
            self._pending_batches += 1
        batch.count += records
        batch.nbytes += size
        self._pending_bytes += size
        if self._sender_waits:
            self._work.notify()


def _append(columns: Any, name: str, index: int, rows: list[Any]) -> None:
    """Add to an optional column, which begins where the first record has it."""
    column = getattr(columns, name)
    if column is None:
        column = [None] * index
        setattr(columns, name, column)
    column += rows


def _failed(error: MeteorError) -> Batch:
    batch = Batch(0.0, 0.0)
    batch.settle(error)
    return batch


def closed_error(stream: str) -> PublisherClosed:
    return PublisherClosed(
        f"The publisher of stream {stream!r} is closed; open another with stream.publisher().",
        stream=stream,
    )
