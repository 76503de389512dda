"""Worker threads that process ordering keys in parallel, and the records of each key in order."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from meteor_py.errors import (
    ConnectionFailed,
    Fenced,
    MeteorError,
    OutcomeUnknown,
    StoreUnavailable,
)
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread
from meteor_py.shared.record import SharedRecord, Standing
from meteor_py.shared.work_ahead import WorkAhead
from meteor_py.subscribe.dead_letters import reason_of

if TYPE_CHECKING:
    from meteor_py.shared.prefetcher import Prefetcher
    from meteor_py.shared.subscriber import SharedSubscriber

_log = logging.getLogger(__name__)

Handler = Callable[[SharedRecord], object]

#: First and longest delay of an ordering key after a failure, in seconds. The delay doubles with
#: each failure.
_DELAY_S = (0.1, 10.0)
#: Timeout for each poll, in seconds.
_POLL_S = 0.5
#: If the server or the store is unreachable for this many seconds, ``run()`` raises an error.
_AWAY_S = 30.0
#: Seconds to delay an ordering key when one of its records returns to the group unprocessed,
#: because the handler of this key hangs, or all handlers do.
_HUNG_S = 0.5


class WorkerPool:
    """The worker threads of one ``run()`` call. The thread that called it fetches the records."""

    def __init__(
        self,
        subscriber: SharedSubscriber,
        prefetcher: Prefetcher,
        handler: Handler,
        size: int,
        fetch: Callable[[float], list[SharedRecord]],
    ) -> None:
        """Create the threads; ``run`` starts them.

        Args:
            fetch: Takes a timeout in seconds, waits up to that long for records, and returns them.
        """
        if not callable(handler):
            raise TypeError("The handler must be a function that takes one record.")
        self._subscriber = subscriber
        self._prefetcher = prefetcher
        self._handler = handler
        self._fetch = fetch
        self._limit = subscriber.config.handler_limit
        self._work_ahead = WorkAhead(size, subscriber.config.prefetch)
        self._condition = SignalSafeCondition()
        # By ordering key. A queue, even if empty, is kept while a handler processes its key.
        self._queues: dict[bytes, deque[SharedRecord]] = {}
        self._ready: deque[bytes] = deque()  # keys of _queues that no thread is working on
        self._unfinished = 0  # records in _queues and in _begun
        self._begun: set[SharedRecord] = set()  # records whose handlers are running
        self._idle = 0  # threads that wait for a record
        self._stopped = False
        self._failure: BaseException | None = None  # such as SystemExit, raised by a handler
        name = f"meteor-worker-{subscriber.stream.name}"
        self._threads = [JoinableThread(self._work, f"{name}-{number}") for number in range(size)]

    def run(self) -> None:
        """Fetch records and distribute them, until stopped or closed."""
        # The application polled these records before run(), and must settle them itself.
        taken = {record for record in self._prefetcher.handed if record.standing is Standing.HELD}
        away_since: float | None = None
        try:
            for thread in self._threads:
                thread.start()
            while not (self._stopped or self._prefetcher.halted):
                try:
                    if not self._all_hang():
                        self._distribute(self._fetch_more())
                    away_since = None
                except (ConnectionFailed, StoreUnavailable):
                    away_since = away_since or time.monotonic()
                    if time.monotonic() - away_since > _AWAY_S:
                        raise
                except (Fenced, OutcomeUnknown) as error:
                    _log.warning("%s", error)
                except MeteorError:
                    if not self._subscriber.closed:
                        raise
        finally:
            self.stop()
            self._prefetcher.target = None
            for thread in self._threads:
                if thread.ident is not None:  # otherwise the thread was never started
                    thread.join()
            # Put the unprocessed records back into the buffer, including those that were not
            # distributed because of a Ctrl-C.
            self._prefetcher.keep(
                record
                for record in self._prefetcher.handed
                if record.standing is Standing.HELD and record not in taken
            )
        if self._failure is not None:
            raise self._failure
        try:
            self._subscriber.flush()
        except (Fenced, OutcomeUnknown) as error:
            _log.warning("%s", error)
        except MeteorError:
            if not self._subscriber.closed:
                raise

    def stop(self) -> None:
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    def close(self, timeout_s: float) -> None:
        """Stop, and wait for running handlers, except for a handler that calls this method."""
        self.stop()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))

    def _fetch_more(self) -> list[SharedRecord]:
        """Wait briefly until at most half of the allowed records are unprocessed; then fetch more.

        Only records that were distributed to the threads count as unprocessed.
        """
        with self._condition:
            self._condition.wait_for(
                lambda: self._stopped or self._unfinished <= self._work_ahead.limit // 2,
                min(_POLL_S, self._subscriber.config.max_poll_interval / 3),
            )
            idle = self._idle > len(self._ready)  # each ready key is about to wake one idle thread
        self._prefetcher.target = self._work_ahead.limit
        records = self._fetch(_POLL_S)
        full = len(self._prefetcher.deliveries.holdings) >= self._prefetcher.limit
        with self._condition:
            self._work_ahead.adjust(idle=idle, full=full)
        return records

    def _distribute(self, records: list[SharedRecord]) -> None:
        with self._condition:
            hung = self._hung()
            for record in records:
                key = record.ordering_key
                if key in hung:
                    self._return_unstarted(record)
                    continue
                queue = self._queues.get(key)
                if queue is None:
                    queue = self._queues[key] = deque()
                    self._ready.append(key)
                queue.append(record)
                self._unfinished += 1
            self._condition.notify_all()

    def _hung(self) -> set[bytes]:
        """Return the ordering keys whose handlers have exceeded their time limit."""
        return {r.ordering_key for r in self._begun if r.standing is Standing.EXPIRED}

    def _all_hang(self) -> bool:
        """If all handlers hang, give back all other records, wait a little, and return True."""
        with self._condition:
            if len(self._hung()) < len(self._threads):
                return False
            for queue in self._queues.values():
                for record in queue:
                    self._return_unstarted(record)
            self._condition.wait_for(lambda: self._stopped or not self._hung(), _POLL_S)
            return True

    def _return_unstarted(self, record: SharedRecord) -> None:
        """Return a record that no handler has started, without counting a failure."""
        if record.standing is Standing.HELD:
            self._prefetcher.deliveries.release(record, _HUNG_S, failed=False)

    def _work(self) -> None:
        while (key := self._next_key()) is not None:
            queue = self._queues[key]
            record = queue.popleft()
            if record.standing is Standing.HELD:
                with self._condition:
                    self._begun.add(record)
                try:
                    if self._prefetcher.deliveries.deliver([record], self._limit):
                        self._process(record)
                except BaseException as error:  # such as SystemExit, which run() raises again
                    self._failure = error
                    # Without this, later records with the same key would overtake this one.
                    self._release(record, reason_of(error))
                    self.stop()
                finally:
                    with self._condition:
                        self._begun.remove(record)
                        self._work_ahead.note_done()
            with self._condition:
                self._unfinished -= 1
                if queue:
                    self._ready.append(key)
                else:
                    del self._queues[key]
                self._condition.notify_all()

    def _next_key(self) -> bytes | None:
        with self._condition:
            while not self._stopped:
                if self._ready:
                    return self._ready.popleft()
                self._idle += 1
                try:
                    self._condition.wait(1.0)
                finally:
                    self._idle -= 1
            return None

    def _process(self, record: SharedRecord) -> None:
        try:
            self._handler(record)
        except Exception as error:
            _log.warning(
                "The handler failed for record %d of stream %r.",
                *(record.offset, self._subscriber.stream.name),
                exc_info=True,
            )
            self._release(record, reason_of(error))
            return
        try:
            if record.standing is Standing.HELD:
                record.ack()
        except (Fenced, ValueError) as error:
            _log.warning("%s", error)

    def _release(self, record: SharedRecord, reason: str) -> None:
        try:
            if record.standing is Standing.HELD:
                record.release(pause_s(record.failures + 1, *_DELAY_S), reason=reason)
        except (Fenced, ValueError) as error:
            _log.warning("%s", error)
