"""A cold reader: reads on in a store, the next records being fetched while these are used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pyarrow as pa

from meteor_py import refusals
from meteor_py.errors import RecordsLost, StoreUnavailable
from meteor_py.store.base import RingbufferStore

#: Batches in a row after which the next one is fetched in advance.
_STRAIGHT = 2
#: Seconds after which a store that does not answer is given up; filesystems have their own limits.
_PATIENCE_S = 120.0


class ColdReader:
    """For one thread at a time; owns a thread of its own once it reads straight on."""

    def __init__(
        self,
        open_store: Callable[[], RingbufferStore],
        check_store: Callable[[], object],
        stream: str,
        life: str,
    ) -> None:
        self._open_store = open_store
        self._check_store = check_store  # raises unless it is still there
        self._stream = stream
        self._life = life
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._at = self._stop = 0  # where the iterator stands, and where it ends
        self._straight = 0
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: Future[pa.RecordBatch | None] | None = None
        self._pid = os.getpid()

    def read(self, start: int, stop: int) -> pa.RecordBatch:
        """Some records from ``start`` on, at least one, none from ``stop`` on.

        Raises:
            RecordsLost, SegmentCorrupt, StoreUnavailable: As ``RingbufferStore.read``.
            StoreMismatch: It is not the store of the stream.
        """
        if start != self._at or self._pid != os.getpid():
            self.forget()
        if self._batches is None or start >= self._stop:
            self._drop()
            self._batches = self._open_store().read(self._life, start, stop)
            self._at, self._stop = start, stop
        try:
            batch = self._next()
        except RecordsLost:
            batch = self._look_again(start, stop)
        except BaseException:
            self.forget()
            raise
        assert batch is not None, "a store gives what it is asked for, or raises"
        self._at += len(batch)
        self._straight += 1
        if self._straight >= _STRAIGHT and self._at < self._stop:
            self._fetch_ahead()
        return batch

    def _look_again(self, start: int, stop: int) -> pa.RecordBatch | None:
        """Nothing is there: make sure that this is not because the disk is not mounted now."""
        self.forget()
        self._check_store()
        self._batches = self._open_store().read(self._life, start, stop)
        self._at, self._stop = start, stop
        try:
            return self._next()
        except BaseException:
            self.forget()
            self._check_store()
            raise

    def forget(self) -> None:
        """Read anew what comes next: it may have changed."""
        self._drop()
        self._straight = 0

    def close(self) -> None:
        """Also from another thread, which may be in the middle of ``read``."""
        self.forget()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True, cancel_futures=True)

    def _next(self) -> pa.RecordBatch | None:
        batches, ahead, self._ahead = self._batches, self._ahead, None
        if batches is None:
            raise self._unavailable("the reader was closed")
        if ahead is None:
            return next(batches, None)
        try:
            return ahead.result(_PATIENCE_S)
        except CancelledError:
            raise self._unavailable("the reader was closed") from None
        except TimeoutError as error:
            silence = f"it has not answered for {_PATIENCE_S:g} seconds"
            raise self._unavailable(silence) from error

    def _fetch_ahead(self) -> None:
        batches, thread = self._batches, self._thread
        if batches is None:
            return  # closed by another thread
        if thread is None:
            thread = self._thread = ThreadPoolExecutor(1, f"meteor-cold-{self._stream}")
        try:
            self._ahead = thread.submit(next, batches, None)
        except RuntimeError:
            pass  # the same

    def _drop(self) -> None:
        ahead, self._ahead, self._batches = self._ahead, None, None
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._thread = None  # the parent's, and so is what it was doing
        elif ahead is not None:
            ahead.cancel()

    def _unavailable(self, problem: str) -> StoreUnavailable:
        shown = self._open_store().uri or "no address"
        return refusals.store_unavailable(self._stream, shown, "read", OSError(problem))
