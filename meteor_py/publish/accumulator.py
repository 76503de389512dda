"""The accumulator: collects published records in batches and limits unacknowledged bytes.

Any thread may add records; one sender takes the batches. A batch collects records while the sender
waits for replies. Only ``linger`` makes the batch wait longer.

A record that has only a value takes the fast path (fast_path.py). Methods that use the open batch
or its totals first count the records that the fast path has appended. If no record waits and the
sender is idle, a record takes the direct line instead (direct_line.py).

A signal handler may flush or close the publisher while the thread that it interrupts holds the
lock, in the middle of adding records. The handler's wait releases the lock, and other threads may
add and take records. So a method that adds records first reads ``_edition`` and prepares all data.
Then it compares the edition and adds the records in statements that contain no calls, because
Python runs no handler between such statements. If the edition has changed, the method starts over.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from meteor_py.errors import MeteorError, PublisherClosed, PublisherFull, fresh
from meteor_py.publish.ack import Ack
from meteor_py.publish.batch import Batch
from meteor_py.publish.fast_path import RECORD_OVERHEAD, FastPath
from meteor_py.records.frame import Columns
from meteor_py.runtime.completion import in_callback
from meteor_py.runtime.locks import SignalSafeCondition

if TYPE_CHECKING:
    from meteor_py.publish.direct_line import DirectLine, Row

_log = logging.getLogger(__name__)

#: Maximum number of failed batches to remember until the application sees their errors.
_FAILURES_MAX = 100

#: Locations of records: batch, index of the first record in it, number of records.
Parts = list[tuple[Batch, int, int]]


class Accumulator:
    """The batches that wait to be sent, and the limit on unacknowledged bytes."""

    def __init__(
        self,
        *,
        stream: str,
        records_max: int,
        bytes_max: int,
        pending_max: int,
        linger_s: float,
        delivery_timeout_s: float,
        on_error: Callable[[MeteorError], object] | None = None,
    ) -> None:
        self._stream = stream
        self._records_max = records_max
        self._bytes_max = bytes_max
        self._pending_max = pending_max
        self._linger_s = linger_s
        self._delivery_timeout_s = delivery_timeout_s
        self._on_error = on_error
        self._warned = False  # whether a failure has been logged since the last success
        self._fast = FastPath(
            records_max, lambda value, size: self._put((value, None, None, None), size)
        )
        #: Like ``put``, but for a record with only a value. Takes the value and its size in bytes.
        self.put_value = self._fast.put
        self._line: DirectLine | None = None
        # Whether the last settled batch had several records; false if the sender has waited since.
        self._bulk = False
        self._make_locks()
        # Increases on close, with each sealed batch, and with each addition to a batch, except for
        # additions on the fast path.
        self._edition = 0
        self._open: Batch | None = None  # the batch that collects records; never empty
        self._full: deque[Batch] = deque()
        #: Bytes of unsettled records, number of batches started, and number of batches settled.
        #: All three include records on the direct line.
        self.pending_bytes = 0
        self.begun = 0
        self.settled = 0
        self._waiters = 0  # threads waiting for a batch to be settled
        self._flushing = 0  # threads in ``wait_empty``; while there are any, batches do not linger
        # Checks for lost records are numbered. These are the numbers of the newest check that a
        # thread wants, and of the newest that the sender has finished.
        self._checks_wanted = 0
        self._checks_done: float = 0
        self._sender_ended = False
        self._closed: MeteorError | None = None
        self._loss: MeteorError | None = None
        self._failures: list[Batch] = []  # batches whose errors the application may not have seen

    def _make_locks(self) -> None:
        self._lock = threading.RLock()
        self._work = SignalSafeCondition(self._lock)  # the sender waits here for records
        self._room = SignalSafeCondition(self._lock)  # other threads wait for settled batches
        self._fast.use_lock(self._lock, self._work)
        if self._line is not None:
            self._line.use_lock(self._lock, self._work)

    def use_line(self, line: DirectLine) -> None:
        """Let publishers use the sender's direct line."""
        line.use_lock(self._lock, self._work)
        self._line = line

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
        """Accept one record of ``size`` bytes, including key and headers.

        Raises:
            PublisherFull: There was no room within the delivery timeout.
            PublisherClosed: The publisher is closed.
            LogTruncated: The server has lost acknowledged records; raised once.
        """
        self._fast.check_reentry()
        with self._lock:
            return self._put((value, key, headers, timestamp), size)

    def put_rows(self, rows: Columns, sizes: Sequence[int]) -> Parts:
        """Accept many records, given as a list per column, and return their locations.

        Raises the same errors as ``put`` if the first record cannot be accepted. If a later record
        cannot be accepted, that record and all after it go into a failed batch. The failed batch is
        the first part of the result, because the acknowledgement waits for the last part.
        """
        self._fast.check_reentry()
        parts: Parts = []
        start = 0
        while start < len(rows):
            with self._lock:
                try:
                    edition = self._admit(sizes[start] + RECORD_OVERHEAD)
                except MeteorError as error:
                    if not parts:
                        raise
                    failure = error
                    break
                batch = self._batch_for(sizes[start] + RECORD_OVERHEAD)
                stop = self._fitting(batch, sizes, start)
                given = (rows.values, rows.keys, rows.headers, rows.timestamps)
                cells = tuple(None if column is None else column[start:stop] for column in given)
                size = sum(sizes[start:stop]) + (stop - start) * RECORD_OVERHEAD
                index = self._add(edition, batch, cells, stop - start, size)
                if index is None:
                    continue
                self._after_adding(batch)
            parts.append((batch, index, stop - start))
            start = stop
        else:
            return parts
        return [self._failed(failure, len(rows) - start), *parts]

    def put_frames(self, frames: Sequence[tuple[Columns, int]]) -> Parts:
        """Like ``put_rows``, but for frames of Arrow arrays, each with its size in bytes."""
        self._fast.check_reentry()
        parts: Parts = []
        while len(parts) < len(frames):
            columns, size = frames[len(parts)]
            with self._lock:
                self._seal()
                try:
                    edition = self._admit(size)
                except MeteorError as error:
                    if not parts:
                        raise
                    failure, left = error, sum(len(rest) for rest, _ in frames[len(parts) :])
                    break
                batch = self._new_batch()
                batch.columns, batch.count, batch.nbytes = columns, len(columns), size
                if self._edition != edition or self._open is not None:
                    continue
                self.begun += 1
                self.pending_bytes += size
                self._edition += 1
                self._full.append(batch)
                self._wake_sender()
            parts.append((batch, 0, len(columns)))
        else:
            return parts
        return [self._failed(failure, left), *parts]

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until all records put so far are settled; return whether they are."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            wanted = self.begun
            self._flushing += 1
            try:
                self._work.notify_all()
                while self.settled < wanted and (left := deadline - time.monotonic()) > 0:
                    self._wait_settled(left)
                return self.settled >= wanted
            finally:
                self._flushing -= 1

    def wait_checked(self, timeout_s: float) -> None:
        """Wait for the sender to check that the server still has all acknowledged records.

        Returns after ``timeout_s`` seconds even if the check has not ended.
        """
        with self._lock:
            self._checks_wanted += 1
            wanted = self._checks_wanted
            self._work.notify_all()
            self._room.wait_for(lambda: self._checks_done >= wanted, timeout_s)

    def wait_sender_ended(self, timeout_s: float) -> bool:
        """Wait for the sender to end; return whether it has ended.

        Releases the lock while it waits, because the sender needs the lock to end. A signal handler
        may close the publisher while the code that it interrupted holds the lock.
        """
        with self._lock:
            return self._room.wait_for(lambda: self._sender_ended, timeout_s)

    def close(self, reason: MeteorError) -> None:
        """Refuse further records. The sender still takes those already accepted."""
        with self._lock:
            self._closed = self._closed or reason
            self._edition += 1  # makes a method in progress start over
            self._count_fast()
            self._work.notify_all()
            self._room.notify_all()

    def abandon(self, reason: MeteorError) -> list[Batch]:
        """Refuse further records in a forked child, and return the batches to abandon."""
        self._make_locks()  # a thread in the parent process may have held the old ones
        self._closed = reason
        self._checks_done, self._sender_ended = math.inf, True
        batches = self.take_all()
        if self._line is not None:
            batches += self._line.abandon()
        self.settled = self.begun
        return batches

    def take_failure(self) -> Exception | None:
        """Return the first failure that the application has not seen, and forget the others.

        If there is none, return the error about lost acknowledged records, or None. Each error is
        returned at most once.
        """
        with self._lock:
            failures, self._failures = self._failures, []
            error = next((batch.error for batch in failures if not batch.observed), None)
            if error is None or error is self._loss:
                error, self._loss = self._loss, None
        return error

    # -- for the sender ------------------------------------------------------------------------

    def take(self, *, busy: bool, lend: bool = False) -> Batch | None:
        """Return the next batch to send, or None if no batch is ready.

        While ``busy`` (replies are outstanding), return only full batches and do not wait.
        Otherwise wait up to about one second for a record. With ``lend``, publishers may use the
        direct line during the wait, and the caller must then take the line over.
        """
        with self._lock:
            if not busy and not self._full:
                if not self.has_work():
                    self._fast.sender_waits = True
                    if lend and self._line is not None and not self._linger_s:
                        self._line.lend(self._bulk, self.has_work)
                    else:
                        self._work.wait(1.0)
                    self._fast.sender_waits = self._bulk = False
                if self._line is not None and self._line.batch is not None:
                    return None  # the sender handles the record on the direct line first
                self._linger()
                self._seal()
            return self._full.popleft() if self._full else None

    def take_expired(self) -> list[Batch]:
        """Remove and return the waiting batches whose deadline has passed."""
        now = time.monotonic()
        with self._lock:
            if self._open is not None and self._open.deadline < now:
                self._seal()
            expired = []
            while self._full and self._full[0].deadline < now:
                expired.append(self._full.popleft())
            return expired

    def checks_to_do(self) -> int | None:
        """Return the number of the newest check that a thread is waiting for, or None."""
        with self._lock:
            return self._checks_wanted if self._check_is_wanted() else None

    def finish_check(self, number: int) -> None:
        """Wake the threads that wait for a check up to ``number``."""
        with self._lock:
            self._checks_done = number
            self._room.notify_all()

    def note_sender_ended(self) -> None:
        """Record that the sender has ended, and wake the threads that wait for it."""
        with self._lock:
            self._sender_ended = True
            self._checks_done = math.inf
            self._room.notify_all()

    def drained(self) -> bool:
        """Return whether the accumulator is closed and empty."""
        with self._lock:
            return self._closed is not None and not self._full and self._open is None

    def settle(self, batch: Batch, error: MeteorError | None = None) -> None:
        """Set a batch's outcome, and make room for other records."""
        batch.settle(error)
        if error is not None:  # before counting the batch: flush() must return after on_error
            self._report_failure(batch, batch.count)
        with self._lock:
            self.pending_bytes -= batch.nbytes
            self.settled += 1
            self._bulk = batch.count > 1
            if error is None:
                self._warned = False
            else:
                self._note_failure(batch)
            if self._waiters:
                self._room.notify_all()

    def report_loss(self, error: MeteorError) -> None:
        """Make the publisher's next call raise ``error``, and pass it to ``on_error`` or log it."""
        with self._lock:
            self._count_fast()
            self._loss = error
        if self._on_error is None:
            _log.warning("%s", error)
        else:
            self._call_on_error(error)

    def take_all(self) -> list[Batch]:
        """Remove and return all waiting batches, so that the caller can fail them."""
        with self._lock:
            self._seal()
            batches = list(self._full)
            self._full.clear()
            return batches

    # -- for the direct line, which holds the lock ---------------------------------------------

    def has_work(self) -> bool:
        """Return whether the sender has work, such as an awaited record on the direct line."""
        in_flight = self._line is not None and self._line.batch is not None
        return bool(
            self._open is not None
            or self._full
            or self._closed
            or (in_flight and (self._flushing or self._waiters))
            or self._check_is_wanted()
        )

    def note_sender_waits(self, waits: bool) -> None:
        """Set whether further records wake the sender."""
        self._fast.sender_waits = waits

    def note_settled(self) -> None:
        """Wake the threads that wait for a settled batch."""
        self._warned = False
        if self._waiters:
            self._room.notify_all()

    # -- called without the lock ---------------------------------------------------------------

    def _failed(self, error: MeteorError, records: int) -> tuple[Batch, int, int]:
        """Make a failed batch for records that were not accepted, and return their location."""
        batch = Batch(0.0, 0.0)
        batch.settle(error)
        with self._lock:
            self._note_failure(batch)
        self._report_failure(batch, records)
        return batch, 0, records

    def _report_failure(self, batch: Batch, records: int) -> None:
        """Pass a failure to ``on_error``, or log it if there is no callback.

        Logs nothing if a thread has seen or awaits the outcome, or if another failure was logged
        since the last success.
        """
        assert isinstance(batch.error, MeteorError), "the batch has failed"
        if self._on_error is not None:
            batch.observed = True
            self._call_on_error(batch.error)
        elif not (batch.observed or batch.awaited or self._warned):
            self._warned = True
            _log.warning(
                "Publishing %d records to stream %r failed: %s (The application has not checked "
                "their Acks.)",
                *(records, self._stream, batch.error),
            )

    def _call_on_error(self, error: MeteorError) -> None:
        assert self._on_error is not None
        try:
            self._on_error(fresh(error))
        except BaseException as raised:
            if not isinstance(raised, Exception) and not in_callback():
                raise
            _log.exception(
                "The on_error callback of a publisher for stream %r raised an exception.",
                self._stream,
            )

    # -- called with the lock held -------------------------------------------------------------

    def _put(self, row: Row, size: int) -> Ack:
        line = self._line
        if (
            line is not None
            and self._open is None
            and not self._full
            and self._closed is None
            and self._loss is None
            and line.is_free()
        ):  # no other record is pending, so the direct line keeps the order
            sent = line.send(row, size, size + RECORD_OVERHEAD)
            if sent is not None:
                return Ack(sent, 0)
        size += RECORD_OVERHEAD
        value, key, headers, timestamp = row
        cells = [value], _column(key), _column(headers), _column(timestamp)
        while True:
            edition = self._admit(size)
            batch = self._batch_for(size)
            index = self._add(edition, batch, cells, 1, size)
            if index is not None:
                break
        self._after_adding(batch)
        return Ack(batch, index)

    def _check_is_wanted(self) -> bool:
        return self._checks_done < self._checks_wanted

    def _admit(self, size: int) -> int:
        """Wait until ``size`` bytes fit, and return the value of ``_edition`` at that moment.

        Raises the same errors as ``put``.
        """
        deadline: float | None = None
        while True:
            self._count_fast()
            edition = self._edition
            if self._loss is not None:
                loss, self._loss = self._loss, None
                raise fresh(loss)
            if self._closed is not None:
                raise fresh(self._closed)
            if self.pending_bytes + size <= self._pending_max or self.begun == self.settled:
                return edition
            now = time.monotonic()
            deadline = deadline or now + self._delivery_timeout_s
            if now >= deadline or in_callback():  # during a callback, the sender cannot make room
                raise PublisherFull(
                    f"{self.pending_bytes} bytes for stream {self._stream!r} are unacknowledged. "
                    "Publish more slowly, or raise max_pending_bytes.",
                    stream=self._stream,
                )
            self._wait_settled(deadline - now)

    def _wait_settled(self, timeout_s: float) -> None:
        self._waiters += 1
        try:
            if self._line is not None and self._line.batch is not None:
                self._line.stop_own_read()
                self._work.notify_all()
            self._room.wait(timeout_s)
        finally:
            self._waiters -= 1

    def _linger(self) -> None:
        """Wait until the open batch is full, ``linger`` has passed, or a flush or close begins."""
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
        """Return the open batch if ``size`` more bytes fit into it, else a new one."""
        batch = self._open
        if batch is not None:
            if batch.count < self._records_max and batch.nbytes + size <= self._bytes_max:
                return batch
            self._seal()
        return self._new_batch()

    def _new_batch(self) -> Batch:
        now = time.monotonic()
        batch = Batch(now, now + self._delivery_timeout_s, Columns([]))
        batch.line = self._line
        return batch

    def _seal(self) -> None:
        """Queue the open batch for sending, after the full batches."""
        if self._open is not None:
            self._count_fast()
            batch, self._open = self._open, None
            self._edition += 1
            if batch is not None:  # None if a signal handler flushed during the count
                self._full.append(batch)
            if self._linger_s:
                self._work.notify_all()

    def _add(
        self, edition: int, batch: Batch, cells: Sequence[Any], records: int, size: int
    ) -> int | None:
        """Append records to a batch, count them, and open the fast path if there are only values.

        Args:
            edition: The value of ``_edition`` when ``_admit`` found room for the records.
            batch: The open batch, or a new one, which becomes the open one.
            cells: The cells to append to each column: values, keys, headers and timestamps.
            records: The number of records.
            size: The total size of the records in bytes.

        Returns:
            The index of the first record in the batch. None if something has changed since
            ``_admit``, so that the caller must start over.
        """
        index, columns, fast = batch.count, batch.columns, self._fast
        if columns is None:
            return None
        keys, more_keys = _extend(columns.keys, cells[1], index, records)
        headers, more_headers = _extend(columns.headers, cells[2], index, records)
        timestamps, more_timestamps = _extend(columns.timestamps, cells[3], index, records)
        if self._edition != edition:
            return None
        # From here on, call nothing and create no container, so that neither a signal handler nor
        # the garbage collector can interrupt.
        columns.values += cells[0]
        if keys is not None:
            keys += more_keys
            columns.keys = keys
        if headers is not None:
            headers += more_headers
            columns.headers = headers
        if timestamps is not None:
            timestamps += more_timestamps
            columns.timestamps = timestamps
        if not index:
            self.begun += 1
        batch.count += records
        batch.nbytes += size
        self.pending_bytes += size
        self._open = batch
        self._edition += 1
        if keys is None and headers is None and timestamps is None:
            room, left = self._bytes_max - batch.nbytes, self._pending_max - self.pending_bytes
            room = room if room < left else left
            fast.batch, fast.values, fast.count = batch, columns.values, batch.count
            fast.granted = fast.left = room if room > 0 else 0
        return index

    def _after_adding(self, batch: Batch) -> None:
        if batch.count == self._records_max:
            self._seal()
        self._wake_sender()

    def _count_fast(self) -> None:
        """Close the fast path, and count the records that it appended."""
        fast = self._fast
        if fast.granted:
            used = fast.granted - fast.left
            fast.batch.count = fast.count
            fast.batch.nbytes += used
            self.pending_bytes += used
            fast.granted = fast.left = 0

    def _wake_sender(self) -> None:
        if self._fast.sender_waits:
            self._work.notify_all()

    def _note_failure(self, batch: Batch) -> None:
        if len(self._failures) >= _FAILURES_MAX:
            self._failures = [known for known in self._failures if not known.observed]
        if len(self._failures) < _FAILURES_MAX:
            self._failures.append(batch)

    def _fitting(self, batch: Batch, sizes: Sequence[int], start: int) -> int:
        """Return the index after the last record to add to the batch now; at least one is added."""
        stop = min(len(sizes), start + self._records_max - batch.count)
        room = min(self._bytes_max - batch.nbytes, self._pending_max - self.pending_bytes)
        while stop > start + 1:
            if sum(sizes[start:stop]) + (stop - start) * RECORD_OVERHEAD <= room:
                break
            stop = start + (stop - start) // 2
        return stop


def _column(cell: Any) -> list[Any] | None:
    return None if cell is None else [cell]


def _extend(
    column: list[Any] | None, cells: list[Any] | None, index: int, records: int
) -> tuple[Any, Any]:
    """Return a batch's optional column, and the cells to append to it.

    A column that the batch lacks starts with ``index`` None cells. If the new records lack a column
    that the batch has, their cells are None. If both lack the column, it stays None.
    """
    if column is None and cells is None:
        return None, None
    return (
        [None] * index if column is None else column,
        [None] * records if cells is None else cells,
    )


def closed_error(stream: str) -> PublisherClosed:
    return PublisherClosed(
        f"The publisher for stream {stream!r} is closed. Open another with stream.publisher().",
        stream=stream,
    )
