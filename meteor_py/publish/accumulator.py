"""The accumulator: gathers published records into batches, and bounds what is unacknowledged.

Any thread puts records; the one sender takes batches. Records gather while the sender waits for
replies. There is no other batching, unless ``linger`` asks for more.

A bare value takes the fast path (fast_path.py). Every other method first counts what came by it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from meteor_py.errors import MeteorError, PublisherClosed, PublisherFull
from meteor_py.publish.ack import Ack
from meteor_py.publish.batch import Batch
from meteor_py.publish.fast_path import RECORD_OVERHEAD, FastPath
from meteor_py.records.frame import Columns
from meteor_py.runtime.completion import in_callback

#: Failed batches that are remembered until the application has seen their errors.
_FAILURES_MAX = 100

#: Places of records: batch, index of the first in it, number of records.
Parts = list[tuple[Batch, int, int]]


class Accumulator:
    """Records that wait to be sent, and the count of what is on its way."""

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
        self._fast = FastPath(records_max, lambda value, size: self.put(value, size=size))
        #: Takes a record that is nothing but a value, and its size in bytes; otherwise as ``put``.
        self.put_value = self._fast.put
        self._make_locks()
        self._open: Batch | None = None  # gathers records; never empty
        self._full: deque[Batch] = deque()
        self._pending_bytes = 0
        self._begun = 0  # batches, ever
        self._settled = 0  # of these
        self._waiters = 0  # threads that wait for something to be settled
        self._flushing = 0  # threads that wait for all of it, so lingering would delay them
        self._closed: MeteorError | None = None
        self._loss: MeteorError | None = None
        self._failures: list[Batch] = []  # whose errors the application may not have seen

    def _make_locks(self) -> None:
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # the sender waits for records
        self._room = threading.Condition(self._lock)  # publishers wait for room, or for all
        self._fast.use_lock(self._lock, self._work)

    # -- for publishers ------------------------------------------------------------------------

    def put(
        self,
        value: bytes,
        key: bytes | None = None,
        headers: dict[str, bytes] | None = None,
        timestamp: int | None = None,
        *,
        size: int,
    ) -> Ack:
        """Take one record of ``size`` bytes in all.

        Raises:
            PublisherFull: No room within the delivery timeout.
            PublisherClosed: Closed.
            LogTruncated: The server has lost acknowledged records; raised once.
        """
        self._fast.check_reentry()
        size += RECORD_OVERHEAD
        with self._lock:
            self._admit(size)
            batch = self._batch_for(size)
            index = batch.count
            columns = batch.columns
            assert columns is not None, "an open batch has its columns"
            columns.values.append(value)
            for name, cell in (("keys", key), ("headers", headers), ("timestamps", timestamp)):
                if cell is not None or getattr(columns, name) is not None:
                    _append(columns, name, index, [cell])
            self._count(batch, 1, size)
            self._seal_or_grant(batch)
            self._wake_sender()
        return Ack(batch, index)

    def put_rows(self, rows: Columns, sizes: Sequence[int]) -> Parts:
        """Take many records, given as lists; return where they are.

        Raises as ``put`` does if there is no room for the first. If there is none for a later one,
        it and those after it are in a batch that has failed. That batch is the first part then,
        because the acknowledgement waits for the last.
        """
        self._fast.check_reentry()
        parts: Parts = []
        start = 0
        while start < len(rows):
            with self._lock:
                try:
                    self._admit(sizes[start] + RECORD_OVERHEAD)
                except MeteorError as error:
                    if not parts:
                        raise
                    return [(self._failed(error), 0, len(rows) - start), *parts]
                batch = self._batch_for(sizes[start] + RECORD_OVERHEAD)
                stop = self._fitting(batch, sizes, start)
                columns, index = batch.columns, batch.count
                assert columns is not None, "an open batch has its columns"
                columns.values += rows.values[start:stop]
                for name in ("keys", "headers", "timestamps"):
                    column = getattr(rows, name)
                    if column is not None or getattr(columns, name) is not None:
                        part = [None] * (stop - start) if column is None else column[start:stop]
                        _append(columns, name, index, part)
                size = sum(sizes[start:stop]) + (stop - start) * RECORD_OVERHEAD
                self._count(batch, stop - start, size)
                self._seal_or_grant(batch)
                self._wake_sender()
            parts.append((batch, index, stop - start))
            start = stop
        return parts

    def put_frames(self, frames: Sequence[tuple[Columns, int]]) -> Parts:
        """Take frames of Arrow arrays, each with its size in bytes; otherwise as ``put_rows``."""
        self._fast.check_reentry()
        parts: Parts = []
        for number, (columns, size) in enumerate(frames):
            with self._lock:
                try:
                    self._admit(size)
                except MeteorError as error:
                    if not parts:
                        raise
                    left = sum(len(rest) for rest, _ in frames[number:])
                    return [(self._failed(error), 0, left), *parts]
                self._seal()
                batch = self._new_batch()
                batch.columns = columns
                self._count(batch, len(columns), size)
                self._full.append(batch)
                self._wake_sender()
            parts.append((batch, 0, len(columns)))
        return parts

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait ``timeout_s`` seconds for all that was put by now; return whether it is settled."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            wanted = self._begun
            self._flushing += 1
            self._work.notify()
            try:
                while self._settled < wanted and (left := deadline - time.monotonic()) > 0:
                    self._wait_settled(left)
                return self._settled >= wanted
            finally:
                self._flushing -= 1

    def close(self, reason: MeteorError) -> None:
        """Refuse more records; the sender still takes those that are here."""
        with self._lock:
            self._count_fast()
            self._closed = self._closed or reason
            self._work.notify_all()
            self._room.notify_all()

    def abandon(self, reason: MeteorError) -> list[Batch]:
        """In a forked child: refuse more records, and give up those that are here."""
        self._make_locks()  # a thread that does not exist here may have held them
        self._closed = reason
        batches = self.take_all()
        self._settled = self._begun
        return batches

    def take_failure(self) -> Exception | None:
        """Return an error that the application has not seen, once."""
        with self._lock:
            failures, self._failures = self._failures, []
            error = next((batch.error for batch in failures if not batch.observed), None)
            if error is None or error is self._loss:
                error, self._loss = self._loss, None
        return error

    # -- for the sender ------------------------------------------------------------------------

    def take(self, *, busy: bool) -> Batch | None:
        """The next batch to send, or None if there is none now.

        While ``busy`` (replies are awaited), returns only full batches and does not wait.
        Otherwise waits for a record, at most one second.
        """
        with self._lock:
            if not busy and not self._full:
                if self._open is None and not self._closed:
                    self._fast.sender_waits = True
                    self._work.wait(1.0)
                    self._fast.sender_waits = False
                self._linger()
                self._seal()
            return self._full.popleft() if self._full else None

    def drained(self) -> bool:
        """Whether it is closed, with nothing left to send."""
        with self._lock:
            return self._closed is not None and not self._full and self._open is None

    def settle(self, batch: Batch, error: MeteorError | None = None) -> None:
        """Publish a batch's outcome, and make room."""
        batch.settle(error)
        with self._lock:
            self._pending_bytes -= batch.nbytes
            self._settled += 1
            if error is not None:
                self._note_failure(batch)
            if self._waiters:
                self._room.notify_all()

    def report_loss(self, error: MeteorError) -> None:
        """Raise ``error`` in the next call of the publisher, once."""
        with self._lock:
            self._count_fast()
            self._loss = error

    def take_all(self) -> list[Batch]:
        """Return everything that waits, to be failed."""
        with self._lock:
            self._seal()
            batches = list(self._full)
            self._full.clear()
            return batches

    # -- inside, with the lock held ------------------------------------------------------------

    def _admit(self, size: int) -> None:
        """Wait for room; raise if there is none in time, or if the publisher is closed."""
        self._count_fast()
        deadline: float | None = None
        while True:
            if self._loss is not None:
                loss, self._loss = self._loss, None
                raise loss
            if self._closed is not None:
                raise self._closed.with_traceback(None)
            if self._pending_bytes + size <= self._pending_max or self._begun == self._settled:
                return
            now = time.monotonic()
            deadline = deadline or now + self._delivery_timeout_s
            if now >= deadline or in_callback():  # the sender would wait for itself
                raise PublisherFull(
                    f"{self._pending_bytes} bytes for stream {self._stream!r} wait to be "
                    "acknowledged already; publish more slowly, or raise max_pending_bytes.",
                    stream=self._stream,
                )
            self._wait_settled(deadline - now)
            self._count_fast()

    def _wait_settled(self, timeout_s: float) -> None:
        self._waiters += 1
        try:
            self._room.wait(timeout_s)
        finally:
            self._waiters -= 1

    def _linger(self) -> None:
        """Let the open batch wait for more records; the publisher that fills it ends the wait."""
        batch = self._open
        while (
            batch is not None
            and batch is self._open
            and not self._flushing
            and not self._closed
            and (left := batch.created_at + self._linger_s - time.monotonic()) > 0
        ):
            self._work.wait(left)

    def _batch_for(self, size: int) -> Batch:
        """Return the open batch if ``size`` bytes still fit into it, else a new one."""
        batch = self._open
        if (
            batch is None
            or batch.count == self._records_max
            or batch.nbytes + size > self._bytes_max
        ):
            self._seal()
            batch = self._open = self._new_batch()
        return batch

    def _new_batch(self) -> Batch:
        now = time.monotonic()
        return Batch(now, now + self._delivery_timeout_s)

    def _seal(self) -> None:
        """Close the open batch: it is ready to be sent."""
        if self._open is not None:
            self._count_fast()
            batch, self._open = self._open, None
            if batch is not None:  # None: it had nothing but uncounted records
                self._full.append(batch)  # nothing can come between this line and the last but one
            if self._linger_s:
                self._work.notify()

    def _count(self, batch: Batch, records: int, size: int) -> None:
        """Count records that are in the columns of a batch."""
        if not batch.count:
            self._begun += 1
        batch.count += records
        batch.nbytes += size
        self._pending_bytes += size

    def _seal_or_grant(self, batch: Batch) -> None:
        """Seal the open batch if it is full; else open the fast path, if it has only values."""
        columns = batch.columns
        if batch.count == self._records_max:
            self._seal()
        elif columns is not None and columns.letters() == "v":
            room = min(self._bytes_max - batch.nbytes, self._pending_max - self._pending_bytes)
            self._fast.grant(batch, columns.values, max(room, 0))

    def _count_fast(self) -> None:
        """Close the fast path, and count what came by it."""
        fast = self._fast
        records, used = fast.used()
        if used and self._open is not None:
            self._count(self._open, records - self._open.count, used)
        # Plain stores, not a call: no signal handler can run between counting and revoking.
        fast.granted = fast.left = 0
        if self._open is not None:
            self._drop_uncounted(self._open)

    def _drop_uncounted(self, batch: Batch) -> None:
        """Drop what an interrupted call has left in the columns without counting it."""
        columns = batch.columns
        assert columns is not None, "an open batch has its columns"
        for column in (columns.values, columns.keys, columns.headers, columns.timestamps):
            if column is not None and len(column) > batch.count:
                del column[batch.count :]
        if not batch.count:
            self._open = None

    def _wake_sender(self) -> None:
        if self._fast.sender_waits:
            self._work.notify()

    def _failed(self, error: MeteorError) -> Batch:
        """Return a failed batch, for records that were not taken."""
        batch = Batch(0.0, 0.0)
        batch.settle(error)
        self._note_failure(batch)
        return batch

    def _note_failure(self, batch: Batch) -> None:
        if len(self._failures) >= _FAILURES_MAX:
            self._failures = [known for known in self._failures if not known.observed]
        if len(self._failures) < _FAILURES_MAX:
            self._failures.append(batch)

    def _fitting(self, batch: Batch, sizes: Sequence[int], start: int) -> int:
        """Return how far into ``sizes`` the records fit into this batch; at least one does."""
        stop = min(len(sizes), start + self._records_max - batch.count)
        room = min(self._bytes_max - batch.nbytes, self._pending_max - self._pending_bytes)
        while stop > start + 1:
            if sum(sizes[start:stop]) + (stop - start) * RECORD_OVERHEAD <= room:
                break
            stop = start + (stop - start) // 2
        return stop


def _append(columns: Columns, name: str, index: int, rows: list[Any]) -> None:
    """Add to an optional column, which starts at the first record that has it."""
    column = getattr(columns, name)
    if column is None:
        column = [None] * index
        setattr(columns, name, column)
    column += rows


def closed_error(stream: str) -> PublisherClosed:
    return PublisherClosed(
        f"The publisher of stream {stream!r} is closed; open another with stream.publisher().",
        stream=stream,
    )
