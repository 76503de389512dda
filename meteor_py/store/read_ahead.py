"""Sequential reading of a store that fetches the next records while the caller uses these."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pyarrow as pa

from meteor_py.errors import RecordsLost
from meteor_py.redis import reply_errors
from meteor_py.runtime.threads import JoinableThread
from meteor_py.store.base import TERMS, RingbufferStore

#: Sequential batches after which the next one is fetched in advance.
_SEQUENTIAL = 2
#: Seconds after which a store that does not answer is given up; filesystems have their own limits.
_PATIENCE_S = 120.0
#: Seconds that closing waits for what is being fetched.
_CLOSE_S = 1.0


class _Prefetch:
    """The next batch, fetched in a daemon thread: a store that hangs keeps no program running."""

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
        """Wait for the batch and return it, or raise what the store raised.

        Raises:
            TimeoutError: The store did not answer in time.
        """
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"it has not answered for {_PATIENCE_S:g} seconds")
        if self._error is not None:
            raise self._error
        return self._batch

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)


class StoreReadAhead:
    """Reads one incarnation from its store. For one thread at a time, except ``close``."""

    def __init__(
        self,
        open_store: Callable[[], RingbufferStore],
        check_store: Callable[[], object],
        stream: str,
        incarnation: str,
    ) -> None:
        self._open_store = open_store
        self._check_store = check_store  # raises unless it is still there
        self._stream = stream
        self._incarnation = incarnation
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._at = self._stop = 0  # where the iterator stands, and where it ends
        self._sequential = 0
        self._ahead: _Prefetch | None = None
        self._pid = os.getpid()

    def read(self, start: int, stop: int, epoch: int) -> pa.RecordBatch:
        """Return the next records from ``start`` to before ``stop``, at least one.

        Args:
            epoch: The latest that the stream knows: if the store knows a later one, the server is
                not the one that its history was continued on.

        Raises:
            RecordsLost, CorruptSegment, StoreUnavailable: As ``RingbufferStore.read``.
            StoreMismatch: It is not the store of the stream, or not of this server.
        """
        if start != self._at or self._pid != os.getpid():
            self.forget()
        try:
            try:
                batch = self._next(start, stop, epoch)
            except RecordsLost:
                # Perhaps only because the disk is not mounted now: make sure, and look again.
                self.forget()
                self._check_store()
                batch = self._next(start, stop, epoch)
        except BaseException as error:
            self.forget()
            if isinstance(error, RecordsLost):
                self._check_store()
            raise
        self._at += len(batch)
        self._sequential += 1
        batches = self._batches
        if self._sequential >= _SEQUENTIAL and self._at < self._stop and batches is not None:
            self._ahead = _Prefetch(batches, self._stream)
        return batch

    def forget(self) -> None:
        """Read from the store again: it may have changed."""
        self._ahead = self._batches = None
        self._sequential = 0
        self._pid = os.getpid()

    def close(self) -> None:
        """Also from another thread, which may be in the middle of ``read``."""
        ahead = self._ahead if self._pid == os.getpid() else None
        self.forget()
        if ahead is not None:
            ahead.join(_CLOSE_S)

    def _next(self, start: int, stop: int, epoch: int) -> pa.RecordBatch:
        batches, ahead, self._ahead = self._batches, self._ahead, None
        if batches is None or start >= self._stop:
            store = self._open_store()
            if store.bounds(self._incarnation).term // TERMS > epoch:
                raise reply_errors.store_continued_elsewhere(self._stream)
            batches, ahead = store.read(self._incarnation, start, stop), None
            self._batches, self._at, self._stop = batches, start, stop
        try:
            batch = next(batches, None) if ahead is None else ahead.result()
        except TimeoutError as error:
            shown = self._open_store().uri or "no address"
            raise reply_errors.store_unavailable(self._stream, shown, "read", error) from error
        assert batch is not None, "a store gives what it is asked for, or raises"
        return batch
