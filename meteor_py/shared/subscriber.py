"""The shared subscriber: one of several consumers that process a stream in parallel."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from meteor_py.errors import (
    ConnectionFailed,
    GroupNotFound,
    LogTruncated,
    MeteorError,
    StoreUnavailable,
    StreamNotFound,
)
from meteor_py.records.codec import Codec
from meteor_py.records.config import check_int, check_seconds
from meteor_py.redis import reply_errors
from meteor_py.runtime.clock import now
from meteor_py.runtime.lifecycle import Closeable, ClosingOrder, Registry, close_each
from meteor_py.runtime.threads import join_named
from meteor_py.shared.ack_timeouts import TimeLimit
from meteor_py.shared.admin import KeyState, SharedGroup
from meteor_py.shared.config import PREFETCH_MAX, ConsumerConfig, SharedConfig
from meteor_py.shared.lease_renewer import THREAD_PREFIX, LeaseRenewer
from meteor_py.shared.prefetcher import Prefetcher
from meteor_py.shared.record import SharedRecord, Standing
from meteor_py.shared.worker_pool import Handler, WorkerPool
from meteor_py.subscribe.lease import member_name

_log = logging.getLogger(__name__)

#: Seconds that iteration, or a poll without a timeout, waits for an unreachable server or store
#: before it raises an error.
_RECONNECT_S = 30.0
#: Seconds that closing waits for handlers, and then for each lease renewer.
_CLOSE_S = 5.0


class SharedSubscriber(Closeable):
    """One consumer in a shared group, opened with ``stream.shared_subscriber()``.

    >>> with stream.shared_subscriber("billing") as sub:    # doctest: +SKIP
    ...     for record in sub:
    ...         handle(record)
    ...         record.ack()

    A group can have any number of consumers, in one or many processes. Records of one ordering key
    are delivered in order and to one consumer at a time. While a consumer holds unsettled records
    of a key, no other consumer gets records of that key. Only one thread at a time may poll or
    iterate, but any thread may settle records.
    """

    def __init__(
        self,
        shared: SharedGroup,
        settings: SharedConfig,
        config: ConsumerConfig,
        codec: Codec | None,
    ) -> None:
        stream = shared.stream
        self.stream = stream
        self.group = shared.name
        self.config = config
        #: The settings of the group.
        self.settings = settings
        #: The name of this consumer in its group: host, process and a random part.
        self.member = member_name()
        self._shared = shared
        self._handle = shared._handle
        self._prefetcher = Prefetcher(shared._protocol, settings, config, codec, self.member)
        self._deliveries = self._prefetcher.deliveries
        self._lease_renewer = LeaseRenewer(self._deliveries, config.max_poll_interval)
        self._worker_pool: WorkerPool | None = None
        self._pool_lock = threading.RLock()  # a signal handler may stop() or close()
        self._stop_next = False  # stop() was called before run()
        self._closed = False
        self._pid = os.getpid()
        self._close_lock = threading.RLock()
        self._deliveries.exchange()  # raises here, not in the first poll(), if joining fails
        self._lease_renewer.start()
        # A subscriber that is garbage-collected without a close() leaves the group.
        abandon = weakref.finalize(self, self._lease_renewer.abandon, self._prefetcher.close)
        abandon.atexit = False
        _open_subscribers.add(self)

    # -- reading -------------------------------------------------------------------------------

    def poll(
        self, timeout: float | None = 1.0, max_records: int = PREFETCH_MAX
    ) -> list[SharedRecord]:
        """Return records for this consumer to process, waiting up to ``timeout`` seconds for some.

        Also sends earlier settlements.

        Args:
            timeout: Seconds to wait; 0 returns at once. None waits until there are records, or
                until another thread or a signal handler closes the subscriber; the list is then
                empty.
            max_records: The maximum number of records to return.

        Returns:
            Records, sorted by offset within each ordering key. The list is empty if no record
            became available in time.

        Raises:
            Fenced: This consumer settled records that it no longer held. Raised once.
            OutcomeUnknown: The lease expired, and the server no longer knows whether earlier
                settlements took effect. Raised once.
            RecordsLost: The ring dropped records before they were delivered, and no store has them.
                Raised once per gap; the next poll continues after the gap.
            CorruptFrame, UnsupportedFrame, CorruptSegment: Records exist but cannot be read. Also
                raised once per gap.
            LogTruncated: The server lost records after this consumer had received some of them.
                Raised once per loss. Also raised if the stream was recreated.
            StreamNotFound, GroupNotFound: The stream or the group was deleted.
            ConnectionFailed: The server was unreachable until the timeout expired, or for 30
                seconds if the timeout is None.
            StoreUnavailable: The same, for the store.
            MeteorError: Another thread is in ``run()``, or the subscriber is closed.
        """
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        check_int("max_records", max_records, 1, PREFETCH_MAX)
        self._check_open()
        if self._worker_pool is not None:
            raise MeteorError(
                f"This shared subscriber for stream {self.stream.name!r} is in run(), which "
                "receives all its records. To poll, open another one with "
                "stream.shared_subscriber()."
            )
        if timeout is None:
            return self._poll_until_available(max_records)
        return self._poll(timeout, max_records, self.config.poll_limit)

    def _poll_until_available(self, max_records: int) -> list[SharedRecord]:
        """Poll until there are records or the subscriber is being closed."""
        away_since: float | None = None
        while True:
            records: list[SharedRecord] = []
            try:
                records = self._poll(1.0, max_records, self.config.poll_limit)
                away_since = None
            except (ConnectionFailed, StoreUnavailable):
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > _RECONNECT_S:
                    raise
            if records or self._prefetcher.halted:
                return records

    def _poll(
        self, timeout: float, max_records: int, limit: TimeLimit | None
    ) -> list[SharedRecord]:
        self._lease_renewer.polling = True
        try:
            self._prefetcher.fill(timeout)
        finally:
            self._deliveries.alive_at = now()
            self._lease_renewer.polling = False
        # Take the records last: a Ctrl-C after this call would lose them.
        return self._prefetcher.hand_out(max_records, limit)

    def __iter__(self) -> Iterator[SharedRecord]:
        """Iterate over records one by one until the subscriber is closed.

        Waits up to 30 seconds for an unreachable server or store before raising
        ``ConnectionFailed`` or ``StoreUnavailable``.
        """
        self._check_open()
        while not self._prefetcher.halted:
            yield from self.poll(None, 1)

    def run(self, handler: Handler, *, concurrency: int = 1) -> None:
        """Call a handler with each record, in worker threads, until ``stop()`` or ``close()``.

        Ordering keys are processed in parallel, and the records of each key in order. When the
        handler returns, the record is acknowledged. If the handler raises an exception, the record
        is released with a delay that grows with each failure. A handler may also settle the record
        itself.

        The consumer holds about as many records as its handlers process in 0.1 seconds: at least
        two per thread, but never more than ``prefetch``. Consumers that join later therefore get
        their share.

        >>> sub.run(handle, concurrency=8)    # doctest: +SKIP

        Args:
            handler: Called with each record.
            concurrency: Number of threads, 1 to 1,000.

        Raises:
            MeteorError: Another ``run()`` is active, or fetching records failed as described for
                ``poll()``. ``Fenced`` and ``OutcomeUnknown`` are only logged. ``ConnectionFailed``
                and ``StoreUnavailable`` are raised after an outage of 30 seconds.
        """
        self._check_open()
        check_int("concurrency", concurrency, 1, 1_000)

        def fetch(timeout: float) -> list[SharedRecord]:
            self._check_open()
            # A record's time limit starts with its handler.
            return self._poll(timeout, PREFETCH_MAX, None)

        pool = WorkerPool(self, self._prefetcher, handler, concurrency, fetch)
        with self._pool_lock:
            self._check_open(closing=True)
            if self._worker_pool is not None:
                raise MeteorError(
                    f"This shared subscriber for stream {self.stream.name!r} is already in run(). "
                    "Raise its concurrency, or open another one with stream.shared_subscriber()."
                )
            if self._stop_next:
                self._stop_next = False
                return
            self._worker_pool = pool
        try:
            pool.run()
        finally:
            with self._pool_lock:
                self._worker_pool = None

    def stop(self) -> None:
        """Make ``run()`` return once the running handlers have returned. Any thread may call it.

        If no ``run()`` is active, the next one returns at once.
        """
        with self._pool_lock:
            if self._worker_pool is not None:
                self._worker_pool.stop()
            else:
                self._stop_next = True

    # -- settling ------------------------------------------------------------------------------

    def ack(self, records: Iterable[SharedRecord]) -> None:
        """Acknowledge several records in one call, without waiting for the server.

        Raises:
            Rewound, AckTimeout, Fenced: This consumer no longer holds some of the records, which
                the error lists in ``offsets``. The others are acknowledged.
            ValueError: A record was already settled, or belongs to another consumer. Nothing is
                acknowledged.
        """
        missed = self._deliveries.ack_batch(list(records))
        if missed:
            raise self._deliveries.not_held(missed)

    def release(
        self,
        records: Iterable[SharedRecord],
        delay: float = 0.0,
        *,
        failed: bool = True,
        reason: str = "",
    ) -> None:
        """Return several records in one call, in order, without waiting for the server.

        For each ordering key, at most one failure is counted, for the first record. The call
        ignores records that were already returned with an earlier record of their key.

        Args:
            delay: As for ``SharedRecord.release``.
            failed: As for ``SharedRecord.release``.
            reason: As for ``SharedRecord.release``.

        Raises:
            AckTimeout, Fenced: This consumer no longer holds some of the records, which the error
                lists in ``offsets``. The others are returned.
            ValueError: As for ``ack``.
        """
        release = partial(self._deliveries.release, delay=delay, failed=failed, reason=reason)
        missed = self._deliveries.settle_batch(list(records), release)
        missed = [record for record in missed if record.standing is not Standing.REWOUND]
        if missed:
            raise self._deliveries.not_held(missed)

    def commit(self) -> None:
        """Acknowledge all delivered records not yet settled, and wait for the server's reply.

        Raises:
            Fenced: This consumer no longer held some of the records.
            MeteorError: As for ``poll()``, for example ``LogTruncated`` or ``OutcomeUnknown``.
            ConnectionFailed: The server did not reply. It may or may not have received the
                acknowledgements. The next request checks this, and sends them again if necessary.
        """
        self._check_open()
        self._deliveries.settle_all(self._prefetcher.handed, self._deliveries.ack)
        self.flush()

    def rollback(self) -> None:
        """Release all delivered records that are not settled, and wait for the server's reply.

        For each ordering key, a failure is counted for the first record. Raises the same errors as
        ``commit()``.
        """
        self._check_open()
        release = partial(self._deliveries.release, delay=0.0)
        self._deliveries.settle_all(self._prefetcher.handed, release)
        self.flush()

    def flush(self) -> None:
        """Send pending settlements, and wait for the server's reply.

        Raises the same errors as ``commit()``.
        """
        self._check_open()
        self._prefetcher.exchange(0)
        self._prefetcher.raise_refusals()

    # -- the group -----------------------------------------------------------------------------

    @property
    def confirmed(self) -> int:
        """The offset below which all records are settled, whichever consumer settled them."""
        return self._shared.confirmed

    def keys(self, *, look_ahead: bool = False) -> list[KeyState]:
        """See ``SharedGroup.keys``."""
        return self._shared.keys(look_ahead=look_ahead)

    def purge(self, key: bytes | str, limit: int | None = None) -> int:
        """See ``SharedGroup.purge``."""
        return self._shared.purge(key, limit)

    def resume(self, key: bytes | str) -> bool:
        """See ``SharedGroup.resume``."""
        return self._shared.resume(key)

    def fsck(self) -> list[str]:
        """See ``SharedGroup.fsck``."""
        return self._shared.fsck()

    # -- closing -------------------------------------------------------------------------------

    def close(self, timeout: float = _CLOSE_S) -> None:
        """Send pending settlements, return all other records, and leave the group.

        Returned records do not count as failures. If the server cannot be reached, other consumers
        get the records when the lease expires. A second call does nothing.

        Args:
            timeout: Seconds to wait for handlers that ``run()`` has started.

        Raises:
            Fenced: This consumer settled records that it no longer held.
            MeteorError: As for ``poll()``, for example ``LogTruncated`` or ``OutcomeUnknown``.
            ConnectionFailed: The server did not reply.
        """
        check_seconds("timeout", timeout, zero=True)
        if self._pid == os.getpid():
            pool = self._start_closing()
            if pool is not None:
                pool.close(timeout)
            self._close()
        self._closed = True

    def _start_closing(self) -> WorkerPool | None:
        """Start no more handlers, without waiting for those that are running.

        Return their worker pool; None if no ``run()`` is active.
        """
        with self._pool_lock:  # no run() may start after this
            self._prefetcher.halt()
            if self._worker_pool is not None:
                self._worker_pool.stop()
            return self._worker_pool

    def _close(self) -> None:
        with self._close_lock:
            if self._closed:
                return
            self._lease_renewer.stop()  # first, so that it ends even if a Ctrl-C interrupts this
            self._closed = True
            try:
                if self._lease_renewer.polling:
                    self._prefetcher.interrupt()
                self._leave()
            finally:
                self._lease_renewer.join(_CLOSE_S)
                self._prefetcher.close()
                _open_subscribers.discard(self)
        self._prefetcher.raise_refusals()

    @property
    def closed(self) -> bool:
        """Whether the subscriber is closed."""
        return self._closed

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"holding {len(self._deliveries.holdings)}"
        return f"<SharedSubscriber of {self.stream.name!r} in {self.group!r} ({state})>"

    def _leave(self) -> None:
        """Send pending settlements, publish the dead letters that result, and leave the group."""
        if self._deliveries.holdings.unsent:
            self._prefetcher.exchange(0)
        try:
            # Publishing reads the frame cache, which another thread uses while it polls. In that
            # case, leave the dead letters to other consumers.
            if not self._lease_renewer.polling:
                self._prefetcher.publish_dead_letters()
        finally:
            try:
                self._deliveries.exchange(leave=True)
            except (GroupNotFound, StreamNotFound, LogTruncated):
                if self._deliveries.holdings.unsent:
                    raise  # settlements were lost; otherwise, a deleted group is not an error here

    def _check_open(self, *, closing: bool = False) -> None:
        """Raise an error if a parent process opened the subscriber, or if it is closed.

        With ``closing``, also raise an error if it is being closed.
        """
        if self._pid != os.getpid():
            raise reply_errors.opened_before_fork(self.stream.name)
        if self._closed or (closing and self._prefetcher.halted):
            raise MeteorError(
                f"This shared subscriber for stream {self.stream.name!r} is closed. Open another "
                "one with stream.shared_subscriber()."
            )


def _start_closing(
    subscribers: Sequence[SharedSubscriber],
) -> Callable[[SharedSubscriber], None]:
    """Start closing all subscribers, and return the function that closes each of them.

    The function waits for their handlers under one deadline, so that these waits do not add up.
    """
    for subscriber in subscribers:
        subscriber._start_closing()
    deadline = time.monotonic() + _CLOSE_S
    return lambda subscriber: subscriber.close(max(deadline - time.monotonic(), 0.0))


def _close_together(subscribers: Sequence[SharedSubscriber]) -> None:
    close_each(subscribers, _start_closing(subscribers), MeteorError)


def _at_exit(subscribers: Sequence[SharedSubscriber]) -> None:
    """Close subscribers, so that other consumers get their records at once."""
    close = _start_closing(subscribers)
    for subscriber in subscribers:
        try:
            close(subscriber)
        except MeteorError as error:
            _log.error("Closing %r at exit failed: %s", subscriber, error)
    join_named(THREAD_PREFIX, _CLOSE_S)


def _after_fork(subscribers: Sequence[SharedSubscriber]) -> None:
    for subscriber in subscribers:
        subscriber._deliveries.abandon()


_open_subscribers: Registry[SharedSubscriber] = Registry(
    ClosingOrder.SHARED_SUBSCRIBERS,
    owner=lambda subscriber: subscriber._handle.connector,
    close=_close_together,
    at_exit=_at_exit,
    after_fork=_after_fork,
)
