"""Sequential reading from a store, with the next batch fetched while the caller uses this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from meteor_py.errors import RecordsLost
from meteor_py.records.position import epoch_numbers
from meteor_py.redis import reply_errors
from meteor_py.runtime.threads import JoinableThread
from meteor_py.store.base import RingbufferStore, read_columns
from meteor_py.store.errors import store_unavailable

#: Number of sequential batches after which reading ahead starts.
_SEQUENTIAL = 2
#: Seconds to wait for a store that does not respond. Filesystems also have their own timeouts.
_TIMEOUT_S = 120.0
#: Seconds to wait in ``close`` for a fetch to end.
_CLOSE_S = 1.0


class _Prefetch:
    """The next batch, fetched by a daemon thread so that a hung store does not block exit."""

    def __init__(self, batches: Iterator[pa.RecordBatch], stream: str) -> None:
        self._batch: pa.RecordBatch | None = None
        self._error: BaseException | None = None
        self._thread = JoinableThread(self._run, f"meteor-read-ahead-{stream}", batches)
        self._thread.start()

    def _run(self, batches: Iterator[pa.RecordBatch]) -> None:
        try:
            self._batch = next(batches, None)
        except BaseException as error:
            self._error = error

    def result(self) -> pa.RecordBatch | None:
        """Wait for the batch and return it, or raise the store's error.

        Raises:
            TimeoutError: The store did not respond in time.
        """
        self._thread.join(_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"it has not responded for {_TIMEOUT_S:g} seconds")
        if self._error is not None:
            raise self._error
        return self._batch

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)


class StoreReadAhead:
    """A sequential reader for one incarnation. Only ``close`` is thread-safe."""

    def __init__(
        self,
        open_store: Callable[[], RingbufferStore],
        check_store: Callable[[], object],
        stream: str,
        incarnation: str,
    ) -> None:
        self._open_store = open_store
        self._check_store = check_store  # raises unless the store is still there
        self._stream = stream
        self._incarnation = incarnation
        #: The columns to read; None for all. Set before the first read.
        self.columns: Sequence[str] | None = None
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._at = self._stop = 0  # the iterator's position, and its end
        self._sequential = 0
        self._ahead: _Prefetch | None = None
        self._pid = os.getpid()

    def read(self, start: int, stop: int, epoch: int, epochs: str) -> pa.RecordBatch:
        """Return one or more records, starting at ``start`` and ending before ``stop``.

        Args:
            epoch: The stream's newest epoch. If the store has a later one, another server has
                continued the stream.
            epochs: All of the stream's epochs, in the format of its meta hash. If the store has
                live records from other epochs, another server wrote them after a split.

        Raises:
            RecordsLost, CorruptSegment, StoreUnavailable: See ``RingbufferStore.read``.
            StoreMismatch: The store now belongs to another stream or another server.
        """
        if start != self._at or self._pid != os.getpid():
            self.forget()
        try:
            try:
                batch = self._next(start, stop, epoch, epochs)
            except RecordsLost:
                # Perhaps the disk is only unmounted: check that the store is there, and read again.
                self.forget()
                self._check_store()
                batch = self._next(start, stop, epoch, epochs)
        except BaseException as error:
            self.forget()
            if isinstance(error, RecordsLost):
                self._check_store()
            raise
        self._at += len(batch)
        self._sequential += 1
        batches = self._batches  # close() may clear it at any time
        if self._sequential >= _SEQUENTIAL and self._at < self._stop and batches is not None:
            self._ahead = _Prefetch(batches, self._stream)
        return batch

    def forget(self) -> None:
        """Discard the records fetched ahead, because the store may have changed."""
        self._ahead = self._batches = None
        self._sequential = 0
        self._pid = os.getpid()

    def close(self) -> None:
        """Stop reading ahead. Safe while another thread is in the middle of ``read``."""
        ahead = self._ahead if self._pid == os.getpid() else None
        self.forget()
        if ahead is not None:
            ahead.join(_CLOSE_S)

    def _read(self, store: RingbufferStore, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        if self.columns is None:
            return store.read(self._incarnation, start, stop)
        return read_columns(store, self._incarnation, start, stop, self.columns)

    def _next(self, start: int, stop: int, epoch: int, epochs: str) -> pa.RecordBatch:
        batches, ahead, self._ahead = self._batches, self._ahead, None
        if batches is None or start >= self._stop:
            store = self._open_store()
            archived = store.epochs(self._incarnation)
            known = epoch_numbers(epochs) if epochs else None
            if any(
                number > epoch or (known is not None and number not in known and first < stop)
                for number, first in archived.items()
            ):
                raise reply_errors.store_continued_elsewhere(self._stream)
            batches, ahead = self._read(store, start, stop), None
            self._batches, self._at, self._stop = batches, start, stop
        try:
            batch = next(batches, None) if ahead is None else ahead.result()
        except TimeoutError as error:
            location = self._open_store().uri or "no address"
            raise store_unavailable(self._stream, location, "read", error) from error
        assert batch is not None, "read() yields every record that it is asked for, or raises"
        return batch
