"""A cold reader: reads on in a store, the next records being fetched while these are used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pyarrow as pa

from meteor_py.errors import RecordsLost
from meteor_py.redis import reply_errors
from meteor_py.runtime.threads import JoinableThread
from meteor_py.store.base import TERMS, RingbufferStore

#: Batches in a row after which the next one is fetched in advance.
_STRAIGHT = 2
#: Seconds after which a store that does not answer is given up; filesystems have their own limits.
_PATIENCE_S = 120.0
#: Seconds that closing waits for what is being fetched.
_CLOSE_S = 1.0


class _Ahead:
    """The next batch, on its way. By a daemon: a store that hangs keeps no program from ending."""

    def __init__(self, batches: Iterator[pa.RecordBatch], stream: str) -> None:
        self._batch: pa.RecordBatch | None = None
        self._error: BaseException | None = None
        name = f"meteor-cold-{stream}"
        self._thread = JoinableThread(self._run, name, batches)
        self._thread.start()

    def _run(self, batches: Iterator[pa.RecordBatch]) -> None:
        try:
            self._batch = next(batches, None)
        except BaseException as error:
            self._error = error

    def result(self) -> pa.RecordBatch | None:
        """Wait for it; raise what was raised.

        Raises:
            TimeoutError: It does not come.
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
    """For one thread at a time, except ``close``."""

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
        self._ahead: _Ahead | None = None
        self._pid = os.getpid()

    def read(self, start: int, stop: int, epoch: int) -> pa.RecordBatch:
        """Some records from ``start`` on, at least one, none from ``stop`` on.

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
        self._straight += 1
        batches = self._batches
        if self._straight >= _STRAIGHT and self._at < self._stop and batches is not None:
            self._ahead = _Ahead(batches, self._stream)
        return batch

    def forget(self) -> None:
        """Read anew what comes next: it may have changed."""
        self._ahead = self._batches = None
        self._straight = 0
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
            if store.bounds(self._life).term // TERMS > epoch:
                raise reply_errors.other_branch(self._stream)
            batches, ahead = store.read(self._life, start, stop), None
            self._batches, self._at, self._stop = batches, start, stop
        try:
            batch = next(batches, None) if ahead is None else ahead.result()
        except TimeoutError as error:
            shown = self._open_store().uri or "no address"
            raise reply_errors.store_unavailable(self._stream, shown, "read", error) from error
        assert batch is not None, "a store gives what it is asked for, or raises"
        return batch
