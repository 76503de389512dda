"""Sequential reading from a store, with the next batches fetched while the caller uses this one."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue

import pyarrow as pa

from meteor_py.errors import RecordsLost
from meteor_py.records.position import epoch_numbers
from meteor_py.redis import reply_errors
from meteor_py.runtime.locks import SignalSafeEvent
from meteor_py.runtime.threads import JoinableThread
from meteor_py.store.base import DeferredBatch, RingbufferStore, deferred_batches
from meteor_py.store.errors import store_unavailable

#: Number of sequential batches after which reading ahead starts.
_SEQUENTIAL = 2
#: Maximum number of batches to fetch ahead, and of threads. With two, decoding uses two cores. More
#: would take memory, and rarely save time.
_AHEAD = 2
#: Seconds without a request after which a thread ends.
_IDLE_S = 1.0
#: Seconds to wait for a store that does not respond. Filesystems also have their own timeouts.
_TIMEOUT_S = 120.0
#: Seconds to wait in ``close`` for the fetches to end.
_CLOSE_S = 1.0


class _Prefetch:
    """A batch that a thread fetches."""

    def __init__(self) -> None:
        self._batch: pa.RecordBatch | None = None
        self._error: BaseException | None = None
        self._done = SignalSafeEvent()

    def succeed(self, batch: pa.RecordBatch | None) -> None:
        self._batch = batch
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def result(self) -> pa.RecordBatch | None:
        """Wait for the batch and return it, or None at the end; or raise the store's error.

        Raises:
            TimeoutError: The store did not respond in time.
        """
        if not self._done.wait(_TIMEOUT_S):
            raise TimeoutError(f"it has not responded for {_TIMEOUT_S:g} seconds")
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._batch
        finally:
            del error  # its traceback would keep this frame, and the store's files, alive


class _Batches:
    """The batches from ``start`` to ``stop``, some of them fetched ahead.

    Daemon threads fetch them, so that a hung store does not block exit. A thread ends when no batch
    has been requested for a while, so a reader that pauses has no idle threads. A thread per batch
    would be simpler, but half as fast: a new thread cannot reuse the memory of an earlier one.
    """

    def __init__(self, batches: Iterator[DeferredBatch], start: int, stop: int, name: str) -> None:
        #: The offset of the next batch that ``take`` returns.
        self.at = start
        self.stop = stop
        self._batches = batches
        self._name = name
        self._turn = threading.Lock()  # held by the thread that uses the iterator
        self._requests: SimpleQueue[_Prefetch | None] = SimpleQueue()  # None ends a thread
        self._ahead: deque[_Prefetch] = deque()
        self._threads: list[JoinableThread] = []
        self._serving: set[threading.Thread] = set()  # the threads that will take a new request
        self._exhausted = False
        self._discarded = False
        self._ended = SignalSafeEvent()

    @property
    def ahead(self) -> int:
        """The number of batches that are fetched ahead or being fetched."""
        return len(self._ahead)

    def take(self) -> pa.RecordBatch:
        """Return the next batch, once it is there, or raise the store's error.

        Raises:
            TimeoutError: The store did not respond in time.
        """
        if self._ahead:
            batch = self._ahead.popleft().result()
        else:  # nothing is being fetched, so no thread uses the iterator
            read_batch = next(self._batches, None)
            batch = None if read_batch is None else read_batch()
        assert batch is not None, "a store yields every record that it is asked for, or raises"
        self.at += len(batch)
        return batch

    def fetch_ahead(self) -> None:
        """Start to fetch, so that up to ``_AHEAD`` batches are fetched ahead."""
        while len(self._ahead) < _AHEAD and not (self._exhausted or self._ended.is_set()):
            prefetch = _Prefetch()
            self._ahead.append(prefetch)
            self._requests.put(prefetch)
            if len(self._serving) < _AHEAD:  # checked after the request; see _next_request
                self._start_thread()

    def end(self) -> None:
        """Make the threads end once they have fetched the requested batches. Start no others."""
        self._ended.set()
        for _ in self._threads:
            self._requests.put(None)

    def discard(self) -> None:
        """Drop the batches that were fetched ahead. Only for the thread that calls ``take``.

        An error among them refers to this object, so its files would stay open until the garbage
        collector runs.
        """
        self._discarded = True
        self._ahead.clear()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads to end, all within ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:  # else another thread is just starting it
                thread.join(max(deadline - time.monotonic(), 0.0))

    def _start_thread(self) -> None:
        thread = JoinableThread(self._serve, f"meteor-read-ahead-{self._name}")
        self._threads = [old for old in self._threads if old.is_alive()] + [thread]
        self._serving.add(thread)
        try:
            thread.start()
        except RuntimeError:  # the process cannot start another thread
            self._serving.discard(thread)
            if not self._serving:
                self._fetch_next()
            return
        if self._ended.is_set():  # meanwhile, so nothing else ends this thread
            self._requests.put(None)
            thread.join(_CLOSE_S)

    def _serve(self) -> None:
        while self._fetch_next():
            pass

    def _fetch_next(self) -> bool:
        """Fetch the batch that is requested next; return False if the thread must end."""
        with self._turn:  # the thread that takes the first request also takes the first batch
            prefetch = self._next_request()
            if prefetch is None or self._discarded:
                return False
            try:
                read_batch = next(self._batches, None)
            except BaseException as error:
                prefetch.fail(error)
                del prefetch  # the error's traceback keeps this frame alive
                return True
        if read_batch is None:
            self._exhausted = True
            prefetch.succeed(None)
            return False
        try:
            prefetch.succeed(read_batch())
        except BaseException as error:
            prefetch.fail(error)
            del prefetch
        return True

    def _next_request(self) -> _Prefetch | None:
        try:
            return self._requests.get(timeout=_IDLE_S)
        except Empty:
            self._serving.discard(threading.current_thread())
        try:
            # ``fetch_ahead`` starts no thread if it still finds this one in ``_serving``. In that
            # case, its request is already in the queue.
            return self._requests.get_nowait()
        except Empty:
            return None


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
        self._batches: _Batches | None = None
        self._sequential = 0
        self._pid = os.getpid()

    @property
    def ahead(self) -> int:
        """The number of batches that are fetched ahead or being fetched."""
        batches = self._batches
        return 0 if batches is None else batches.ahead

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
        batches = self._batches  # close() may clear it at any time
        if batches is None or start != batches.at or self._pid != os.getpid():
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
        return batch

    def forget(self) -> None:
        """Discard the records fetched ahead, for example because the store may have changed."""
        batches = self._detach()
        if batches is not None:
            batches.end()
            batches.discard()

    def close(self) -> None:
        """Stop reading ahead. Safe while another thread is in the middle of ``read``."""
        batches = self._detach()
        if batches is not None:
            batches.end()
            batches.join(_CLOSE_S)

    def _detach(self) -> _Batches | None:
        """Forget the batches and return them; return None in a forked child."""
        batches, self._batches = self._batches, None
        inherited = self._pid != os.getpid()
        self._sequential = 0
        self._pid = os.getpid()
        return None if inherited else batches

    def _next(self, start: int, stop: int, epoch: int, epochs: str) -> pa.RecordBatch:
        batches = self._batches
        if batches is not None and start >= batches.stop:
            batches.end()
            batches = None
        if batches is None:
            batches = self._batches = self._open(start, stop, epoch, epochs)
        try:
            batch = batches.take()
        except TimeoutError as error:
            location = self._open_store().uri or "no address"
            raise store_unavailable(self._stream, location, "read", error) from error
        self._sequential += 1
        if self._sequential >= _SEQUENTIAL and batches.at < batches.stop:
            batches.fetch_ahead()
        return batch

    def _open(self, start: int, stop: int, epoch: int, epochs: str) -> _Batches:
        """Start to read; see ``read`` for the arguments and errors."""
        store = self._open_store()
        archived = store.epochs(self._incarnation)
        known = epoch_numbers(epochs) if epochs else None
        if any(
            number > epoch or (known is not None and number not in known and first < stop)
            for number, first in archived.items()
        ):
            raise reply_errors.store_continued_elsewhere(self._stream)
        batches = deferred_batches(store, self._incarnation, start, stop, self.columns)
        return _Batches(batches, start, stop, self._stream)
