"""The outbox: records published and not yet acknowledged, gathered into batches, bounded.

Any thread puts; one sender takes. While the sender waits for answers, records gather: that is
all the batching there is, unless ``linger`` asks for more.

A bare value takes the short way: the open batch is granted a number of bytes, and as long as they
last, publishing is a lock, a subtraction and an append. Everything else first folds what was used
of the grant into the books.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from meteor_py.errors import MeteorError, PublisherClosed, PublisherFull
from meteor_py.publish.ack import Ack, Batch, in_callback
from meteor_py.records.frame import Columns

#: What a record costs besides its bytes, so that empty ones are bounded too.
RECORD_OVERHEAD = 64

#: Failed batches that are kept in mind until somebody was told of them.
_FAILURES_MAX = 100

#: Places of records: batch, index of the first in it, number of records.
Parts = list[tuple[Batch, int, int]]


class Accumulator:
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
        self._last_index = records_max - 1  # of a batch
        self._bytes_max = bytes_max
        self._pending_max = pending_max
        self._linger_s = linger_s
        self._delivery_timeout_s = delivery_timeout_s
        self._make_locks()
        self._open: Batch | None = None  # gathers; never empty
        self._values: list[bytes] = []  # of the open batch
        self._granted = 0  # bytes for the short way, and how many of them are left
        self._left = 0
        self._full: deque[Batch] = deque()
        self._pending_bytes = 0
        self._begun = 0  # batches, ever
        self._ended = 0
        self._sender_waits = False
        self._waiters = 0
        self._hurry = 0
        self._closed: MeteorError | None = None
        self._loss: MeteorError | None = None
        self._failures: list[Batch] = []  # that nobody may have been told of

    def _make_locks(self) -> None:
        self._lock = threading.RLock()
        # A finalizer or signal handler can run in the middle of publishing, in the same thread, and
        # publish. Half-made books would be taken for whole ones, and a plain lock wait for ever.
        # (Private, but what threading.Condition asks its lock as well.)
        self._is_owned: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        self._work = threading.Condition(self._lock)  # the sender waits for records
        self._settled = threading.Condition(self._lock)  # publishers wait for room, or for all

    # -- for publishers ------------------------------------------------------------------------

    def put_value(self, value: bytes, size: int) -> Ack:
        """Take one record that is nothing but a value of ``size`` bytes; otherwise as ``put``."""
        if self._is_owned():
            raise reentry_error()
        with self._lock:
            values = self._values
            index = len(values)
            left = self._left - size - RECORD_OVERHEAD
            if left >= 0 and index < self._last_index:
                self._left = left
                values.append(value)
                if self._sender_waits:
                    self._work.notify()
                return Ack(self._open, index)  # type: ignore[arg-type]  # open, if granted
        return self.put(value, None, None, None, size)

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
        if self._is_owned():
            raise reentry_error()
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
            self._enter(batch, 1, size)
            self._go_on(batch)
            self._wake()
        return Ack(batch, index)

    def put_rows(self, rows: Columns, sizes: Sequence[int]) -> Parts:
        """Take many records, given as lists; return their places.

        Raises as ``put`` does if not even the first found room. Where a later one did not, it
        and those after it are in a batch that has failed; that is the first part then, because
        the last one is the one to wait for.
        """
        if self._is_owned():
            raise reentry_error()
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
                self._enter(batch, stop - start, size)
                self._go_on(batch)
                self._wake()
            parts.append((batch, index, stop - start))
            start = stop
        return parts

    def put_frames(self, frames: Sequence[tuple[Columns, int]]) -> Parts:
        """Take frames of Arrow arrays, each with its size in bytes; otherwise as ``put_rows``."""
        if self._is_owned():
            raise reentry_error()
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
                self._enter(batch, len(columns), size)
                self._full.append(batch)
                self._wake()
            parts.append((batch, 0, len(columns)))
        return parts

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until all that was put by now is settled; tell whether it is."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            wanted = self._begun
            self._hurry += 1
            self._work.notify()
            try:
                while self._ended < wanted and (left := deadline - time.monotonic()) > 0:
                    self._wait_settled(left)
                return self._ended >= wanted
            finally:
                self._hurry -= 1

    def close(self, reason: MeteorError) -> None:
        """Take no more; what is here may still be sent."""
        with self._lock:
            self._fold()
            self._closed = self._closed or reason
            self._work.notify_all()
            self._settled.notify_all()

    def forget(self, reason: MeteorError) -> list[Batch]:
        """In a forked child: take no more, and give up what is here."""
        self._make_locks()  # a thread that is not here may have held them
        self._closed = reason
        batches = self.take_all()
        self._ended = self._begun
        return batches

    def take_failure(self) -> Exception | None:
        """A failure that nobody was told of, once."""
        with self._lock:
            failures, self._failures = self._failures, []
            error = next((batch.error for batch in failures if not batch.observed), None)
            if error is None or error is self._loss:
                error, self._loss = self._loss, None
        return error

    # -- for the sender ------------------------------------------------------------------------

    def take(self, *, busy: bool) -> Batch | None:
        """The next batch to send, or None if there is none now.

        While ``busy`` (answers are awaited) only full batches are taken and nothing is waited
        for; otherwise waits for a record, at most a second.
        """
        with self._lock:
            if not busy and not self._full:
                if self._open is None and not self._closed:
                    self._sender_waits = True
                    self._work.wait(1.0)
                    self._sender_waits = False
                self._linger()
                self._seal()
            return self._full.popleft() if self._full else None

    def drained(self) -> bool:
        """Closed, and nothing left to send."""
        with self._lock:
            return self._closed is not None and not self._full and self._open is None

    def settle(self, batch: Batch, error: MeteorError | None = None) -> None:
        """A batch's fate is known: make room."""
        batch.settle(error)
        with self._lock:
            self._pending_bytes -= batch.nbytes
            self._ended += 1
            if error is not None:
                self._note_failure(batch)
            if self._waiters:
                self._settled.notify_all()

    def report_loss(self, error: MeteorError) -> None:
        """Raise ``error`` in the next call of the publisher, once."""
        with self._lock:
            self._fold()
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
        self._fold()
        deadline: float | None = None
        while True:
            if self._loss is not None:
                loss, self._loss = self._loss, None
                raise loss
            if self._closed is not None:
                raise self._closed.with_traceback(None)
            if self._pending_bytes + size <= self._pending_max or self._begun == self._ended:
                return
            now = time.monotonic()
            deadline = deadline or now + self._delivery_timeout_s
            if now >= deadline or in_callback():  # which would wait for itself
                raise PublisherFull(
                    f"{self._pending_bytes} bytes for stream {self._stream!r} wait to be "
                    "acknowledged already; publish more slowly, or raise max_pending_bytes.",
                    stream=self._stream,
                )
            self._wait_settled(deadline - now)
            self._fold()

    def _wait_settled(self, timeout_s: float) -> None:
        self._waiters += 1
        try:
            self._settled.wait(timeout_s)
        finally:
            self._waiters -= 1

    def _linger(self) -> None:
        """Let the open batch wait for company; the publisher that fills it ends the wait."""
        batch = self._open
        while (
            batch is not None
            and batch is self._open
            and not self._hurry
            and not self._closed
            and (left := batch.gathered_at + self._linger_s - time.monotonic()) > 0
        ):
            self._work.wait(left)

    def _batch_for(self, size: int) -> Batch:
        """The open batch, if so much still fits into it; else a new one."""
        batch = self._open
        if (
            batch is None
            or batch.count == self._records_max
            or batch.nbytes + size > self._bytes_max
        ):
            self._seal()
            batch = self._open = self._new_batch()
            assert batch.columns is not None, "it is new"
            self._values = batch.columns.values
        return batch

    def _new_batch(self) -> Batch:
        now = time.monotonic()
        return Batch(now, now + self._delivery_timeout_s)

    def _seal(self) -> None:
        """Close the open batch: it is ready to be sent."""
        if self._open is not None:
            self._fold()
            batch, self._open = self._open, None
            if batch is not None:  # mended away
                self._full.append(batch)  # nothing can come between this line and the last but one
            if self._linger_s:
                self._work.notify()

    def _enter(self, batch: Batch, records: int, size: int) -> None:
        """Write records into the books."""
        if not batch.count:
            self._begun += 1
        batch.count += records
        batch.nbytes += size
        self._pending_bytes += size

    def _go_on(self, batch: Batch) -> None:
        """Seal the open batch if it is full; else open the short way, if it has only values."""
        columns = batch.columns
        if batch.count == self._records_max:
            self._seal()
        elif columns is not None and columns.letters() == "v":
            room = min(self._bytes_max - batch.nbytes, self._pending_max - self._pending_bytes)
            self._granted = self._left = max(room, 0)

    def _fold(self) -> None:
        """Close the short way, and write what came by it into the books."""
        used = self._granted - self._left
        if used and self._open is not None:
            self._enter(self._open, len(self._values) - self._open.count, used)
        self._granted = self._left = 0
        if self._open is not None:
            self._mend(self._open)

    def _mend(self, batch: Batch) -> None:
        """Drop what an interrupted call has left in the columns: what is in the books counts."""
        columns = batch.columns
        assert columns is not None, "an open batch has its columns"
        for column in (columns.values, columns.keys, columns.headers, columns.timestamps):
            if column is not None and len(column) > batch.count:
                del column[batch.count :]
        if not batch.count:
            self._open = None

    def _wake(self) -> None:
        if self._sender_waits:
            self._work.notify()

    def _failed(self, error: MeteorError) -> Batch:
        """A batch for records that were not taken."""
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
        """How far into ``sizes`` the records still fit into this batch; at least one does."""
        stop = min(len(sizes), start + self._records_max - batch.count)
        room = min(self._bytes_max - batch.nbytes, self._pending_max - self._pending_bytes)
        while stop > start + 1:
            if sum(sizes[start:stop]) + (stop - start) * RECORD_OVERHEAD <= room:
                break
            stop = start + (stop - start) // 2
        return stop


def _append(columns: Columns, name: str, index: int, rows: list[Any]) -> None:
    """Add to an optional column, which begins where the first record has it."""
    column = getattr(columns, name)
    if column is None:
        column = [None] * index
        setattr(columns, name, column)
    column += rows


def reentry_error() -> RuntimeError:
    return RuntimeError(
        "A finalizer or signal handler tried to publish while its thread was publishing; let it "
        "set a flag, and publish from the main program."
    )


def closed_error(stream: str) -> PublisherClosed:
    return PublisherClosed(
        f"The publisher of stream {stream!r} is closed; open another with stream.publisher().",
        stream=stream,
    )
