"""The shared subscriber: one of several consumers that process a stream in parallel, in order."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

from meteor_py.errors import (
    ConnectionFailed,
    GroupNotFound,
    LogTruncated,
    MeteorError,
    StreamNotFound,
)
from meteor_py.records.codec import Codec
from meteor_py.records.config import check_int, check_seconds
from meteor_py.redis import reply_errors
from meteor_py.runtime.clock import now
from meteor_py.runtime.lifecycle import Closeable, ClosingOrder, Registry, close_each
from meteor_py.runtime.threads import join_named
from meteor_py.shared.admin import KeyState, SharedGroup
from meteor_py.shared.config import PREFETCH_MAX, ConsumerConfig, SharedConfig
from meteor_py.shared.lease_renewer import THREAD_PREFIX, LeaseRenewer
from meteor_py.shared.prefetcher import Prefetcher
from meteor_py.shared.record import SharedRecord
from meteor_py.shared.worker_pool import Handler, WorkerPool
from meteor_py.subscribe.lease import member_name

_log = logging.getLogger(__name__)

#: Seconds that iterating waits for a server before it gives up.
_RECONNECT_S = 30.0
#: Seconds for which the end of a program waits until what was settled is sent.
_EXIT_S = 5.0


class SharedSubscriber(Closeable):
    """One consumer of a shared group. Make as many as you like, here and elsewhere.

    >>> with stream.shared_subscriber("billing") as sub:    # doctest: +SKIP
    ...     for record in sub:
    ...         handle(record)
    ...         record.ack()

    Records of one ordering key are delivered in order, to one consumer at a time: the one that
    holds unsettled records of it. ``poll`` and iterating are for one thread at a time; records may
    be settled in any. Create it with ``stream.shared_subscriber()``.
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
        #: Its name among the consumers.
        self.name = member_name()
        self._shared = shared
        self._handle = shared._handle
        self._prefetcher = Prefetcher(shared._protocol, settings, config, codec, self.name)
        self._deliveries = self._prefetcher.deliveries
        self._lease_renewer = LeaseRenewer(self._deliveries, config.max_poll_interval)
        self._worker_pool: WorkerPool | None = None
        self._pool_lock = threading.RLock()  # a signal handler may stop() or close()
        self._stop_next = False  # stop() was called when there was nothing to stop
        self._closed = False
        self._pid = os.getpid()
        self._close_lock = threading.RLock()
        self._deliveries.exchange()  # to raise at once if something is wrong
        self._lease_renewer.start()
        weakref.finalize(self, _drop, self._lease_renewer, self._prefetcher).atexit = False
        _open_subscribers.add(self)

    # -- reading -------------------------------------------------------------------------------

    def poll(self, timeout: float = 1.0, max_records: int = PREFETCH_MAX) -> list[SharedRecord]:
        """Return records that are this consumer's to process, waiting if there are none.

        What was settled before is sent with it.

        Args:
            timeout: Seconds to wait; 0 only looks.
            max_records: At most so many.

        Returns:
            Records, in the order of their offsets within each ordering key; empty if there were
            none in time.

        Raises:
            Fenced: Something that was settled here had been given to others; raised once.
            RecordsLost: Records are gone from the ring before they were delivered, and are not in a
                store; raised once per gap, and the next poll continues after it.
            CorruptFrame, UnsupportedFrame, CorruptSegment: Records are there and cannot
                be read; the same.
            StreamNotFound, LogTruncated, GroupNotFound: It was deleted.
            ConnectionFailed: The server could not be reached until the timeout.
            MeteorError: ``run()`` is at work, in another thread.
        """
        check_seconds("timeout", timeout, zero=True)
        check_int("max_records", max_records, 1, PREFETCH_MAX)
        self._check_open()
        pool = self._worker_pool
        if pool is not None and not pool.is_caller():
            raise MeteorError(
                f"run() takes the records of this shared subscriber of stream {self.stream.name!r};"
                " poll another, which stream.shared_subscriber() opens."
            )
        self._lease_renewer.polling = True
        try:
            self._prefetcher.fill(timeout)
        finally:
            self._deliveries.alive_at = now()
            self._lease_renewer.polling = False
        return self._prefetcher.hand_out(max_records)  # last: a Ctrl-C behind it would lose them

    def __iter__(self) -> Iterator[SharedRecord]:
        """Records one by one, without end; ends when the subscriber is closed.

        A server that is away is waited for, up to 30 seconds.
        """
        self._check_open()
        away_since: float | None = None
        while not self._prefetcher.halted:
            try:
                records = self.poll(1.0, 1)
                away_since = None
            except ConnectionFailed:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > _RECONNECT_S:
                    raise
                continue
            yield from records

    def run(self, handler: Handler, *, concurrency: int = 1) -> None:
        """Give records to a function, in threads of its own, until ``stop()`` or ``close()``.

        Ordering keys run in parallel, each in order. A record is acknowledged when the handler
        returns, and released, with a growing delay, when it raises; unless it has settled it.

        Args:
            handler: Called with each record.
            concurrency: How many at a time.

        Raises:
            MeteorError: As ``poll``, but for what the server being away explains; or there is one
                ``run()`` at work already.
        """
        self._check_open()
        check_int("concurrency", concurrency, 1, 1_000)
        pool = WorkerPool(self, self._prefetcher, handler, concurrency)
        with self._pool_lock:
            self._check_open(closing=True)
            if self._worker_pool is not None:
                raise MeteorError(
                    f"This shared subscriber of stream {self.stream.name!r} is in run() already; "
                    "raise its concurrency, or open another with stream.shared_subscriber()."
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
        """Let ``run()`` return, once the handlers that are at work have; from any thread.

        Before a ``run()``, the next one returns at once.
        """
        with self._pool_lock:
            if self._worker_pool is not None:
                self._worker_pool.stop()
            else:
                self._stop_next = True

    # -- settling ------------------------------------------------------------------------------

    def commit(self) -> None:
        """Acknowledge all that was handed out and not settled, and wait until that is known.

        Raises:
            Fenced: Some of it had been given to others.
            ConnectionFailed: The server did not reply; it may be known, and is said again.
        """
        self._check_open()
        self._deliveries.settle_all(handed=self._prefetcher.handed, ack=True)
        self.flush()

    def rollback(self) -> None:
        """Return all that was handed out and not settled, as failures, and wait until it is known.

        Raises as ``commit``.
        """
        self._check_open()
        self._deliveries.settle_all(handed=self._prefetcher.handed, ack=False)
        self.flush()

    def flush(self) -> None:
        """Send what was settled, and wait for the reply.

        Raises as ``commit``.
        """
        self._check_open()
        self._prefetcher.exchange(0)
        self._prefetcher.raise_refusals()

    # -- the group -----------------------------------------------------------------------------

    @property
    def confirmed(self) -> int:
        """All records below this offset are settled, by any consumer."""
        return self._shared.describe().confirmed

    def keys(self, *, look_ahead: bool = False) -> list[KeyState]:
        """As ``SharedGroup.keys``."""
        return self._shared.keys(look_ahead=look_ahead)

    def purge(self, key: bytes | str, limit: int | None = None) -> int:
        """As ``SharedGroup.purge``."""
        return self._shared.purge(key, limit)

    def resume(self, key: bytes | str) -> bool:
        """As ``SharedGroup.resume``."""
        return self._shared.resume(key)

    def fsck(self) -> list[str]:
        """As ``SharedGroup.fsck``."""
        return self._shared.fsck()

    # -- the end -------------------------------------------------------------------------------

    def close(self, timeout: float = 5.0) -> None:
        """Say what was settled, return the rest, and leave. Closing twice is fine.

        What is returned counts as no failure. What cannot be said is found out by others when the
        lease ends.

        Args:
            timeout: Seconds to wait for handlers of ``run()``.

        Raises:
            Fenced: Something that was settled here had been given to others.
            ConnectionFailed: The server did not reply.
        """
        check_seconds("timeout", timeout, zero=True)
        if self._pid == os.getpid():
            with self._pool_lock:  # so no run() begins behind it
                self._prefetcher.halt()
                pool = self._worker_pool
            if pool is not None:
                pool.close(timeout)
            self._close(timeout)
        self._closed = True

    def _close(self, timeout_s: float) -> None:
        with self._close_lock:
            if self._closed:
                return
            self._lease_renewer.stop()  # first: it must not continue if a Ctrl-C comes now
            self._closed = True
            try:
                if self._lease_renewer.polling:
                    self._prefetcher.interrupt()
                self._leave()
            finally:
                self._lease_renewer.join(timeout_s)
                self._prefetcher.close()
                _open_subscribers.discard(self)
        self._prefetcher.raise_refusals()

    @property
    def closed(self) -> bool:
        """Whether it hands out no more records."""
        return self._closed

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"holding {len(self._deliveries.holdings)}"
        return f"<SharedSubscriber of {self.stream.name!r} in {self.group!r} ({state})>"

    # -- inside --------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Send what was settled, publish the dead letters that this brings, and leave."""
        if self._deliveries.holdings.unsaid:
            self._prefetcher.exchange(0)
        try:
            self._prefetcher.publish_dead_letters()
        finally:
            try:
                self._deliveries.exchange(leave=True)
            except (GroupNotFound, StreamNotFound, LogTruncated):
                if self._deliveries.holdings.unsaid:
                    raise  # else there is nothing to leave

    def _check_open(self, *, closing: bool = False) -> None:
        """Raise if it is the parent's, or closed, or (``closing``) about to be."""
        if self._pid != os.getpid():
            raise reply_errors.opened_before_fork(self.stream.name)
        if self._closed or (closing and self._prefetcher.halted):
            raise MeteorError(
                f"This shared subscriber of stream {self.stream.name!r} is closed; open another "
                "with stream.shared_subscriber()."
            )


def _drop(lease_renewer: LeaseRenewer, prefetcher: Prefetcher) -> None:
    """Leave for a subscriber that was dropped without a close(); does nothing after one."""
    lease_renewer.abandon(prefetcher.close)


def _at_exit(subscribers: Sequence[SharedSubscriber]) -> None:
    """Let other consumers have the records at once."""
    for subscriber in subscribers:
        try:
            subscriber.close(_EXIT_S)
        except MeteorError as error:
            _log.error("At the end of %r: %s", subscriber, error)
    join_named(THREAD_PREFIX, _EXIT_S)


def _after_fork(subscribers: Sequence[SharedSubscriber]) -> None:
    for subscriber in subscribers:
        subscriber._deliveries.abandon()


_open_subscribers: Registry[SharedSubscriber] = Registry(
    ClosingOrder.SHARED_SUBSCRIBERS,
    owner=lambda subscriber: subscriber._handle.connector,
    close=lambda subscribers: close_each(subscribers, SharedSubscriber.close, MeteorError),
    at_exit=_at_exit,
    after_fork=_after_fork,
)
