"""The crew: threads that process the records of one consumer, groups in parallel, each in order."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from meteor_py.errors import ConnectionFailed, Fenced, MeteorError
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread
from meteor_py.shared.record import SharedRecord, Standing

if TYPE_CHECKING:
    from meteor_py.shared.prefetcher import Prefetcher
    from meteor_py.shared.subscriber import SharedSubscriber

_log = logging.getLogger(__name__)

Handler = Callable[[SharedRecord], object]

#: Seconds for which a group is left alone after a failure, doubled each time up to the second.
_DELAY_S = (0.1, 10.0)
#: Seconds that a poll waits, and for which the server may be away.
_POLL_S = 0.5
_AWAY_S = 30.0
#: Seconds for which a group whose handler hangs is left to others, time after time.
_HUNG_S = 0.5


class WorkerPool:
    """Works in ``run``, in the thread that calls it, and its own."""

    def __init__(
        self, subscriber: SharedSubscriber, supply: Prefetcher, handler: Handler, size: int
    ) -> None:
        if not callable(handler):
            raise TypeError("The handler must be a function of one record.")
        self._subscriber = subscriber
        self._supply = supply
        self._handler = handler
        self._limit_s = subscriber.config.max_poll_interval
        self._state = SignalSafeCondition()
        self._groups: dict[bytes, deque[SharedRecord]] = {}  # with work, or at work
        self._ready: deque[bytes] = deque()  # of those, the ones that nobody works on
        self._begun: dict[SharedRecord, float] = {}  # at work, and since when
        self._hung: set[bytes] = set()  # groups whose handler has been at work for too long
        self._stopped = False
        self._caller: int | None = None  # the thread that has called run()
        self._failure: BaseException | None = None  # what no handler should raise
        name = f"meteor-crew-{subscriber.stream.name}"
        self._threads = [JoinableThread(self._work, f"{name}-{number}") for number in range(size)]

    def run(self) -> None:
        """Fetch records and share them out, until stopped, or closed."""
        self._caller = threading.get_ident()
        # What the application has taken by itself before is its own.
        taken = {record for record in self._supply.handed if record.standing is Standing.HELD}
        for thread in self._threads:
            thread.start()
        away_since: float | None = None
        try:
            while not (self._stopped or self._supply.halted):
                try:
                    if not self._all_hang():
                        self._share_out(self._subscriber.poll(_POLL_S))
                    away_since = None
                except ConnectionFailed:
                    away_since = away_since or time.monotonic()
                    if time.monotonic() - away_since > _AWAY_S:
                        raise
                except Fenced as error:
                    _log.warning("%s", error)
                except MeteorError:
                    if not self._subscriber.closed:
                        raise
                self._let_go()
        finally:
            self.stop()
            for thread in self._threads:
                thread.join()
            # Also what a Ctrl-C has kept from being shared out.
            self._supply.keep(
                record
                for record in self._supply.handed
                if record.standing is Standing.HELD and record not in taken
            )
        if self._failure is not None:
            raise self._failure
        try:
            self._subscriber.flush()
        except MeteorError:
            if not self._subscriber.closed:
                raise

    def stop(self) -> None:
        with self._state:
            self._stopped = True
            self._state.notify_all()

    def is_caller(self) -> bool:
        """Whether this is the thread that runs it."""
        return self._caller == threading.get_ident()

    def end(self, timeout_s: float) -> None:
        """Stop, and wait for the handlers that are at work; not for oneself."""
        self.stop()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))

    def _share_out(self, records: list[SharedRecord]) -> None:
        with self._state:
            for record in records:
                if record.group in self._hung:
                    self._give_back(record)
                    continue
                queue = self._groups.get(record.group)
                if queue is None:
                    queue = self._groups[record.group] = deque()
                    self._ready.append(record.group)
                queue.append(record)
            self._state.notify_all()

    def _let_go(self) -> None:
        """Return the records of handlers that have been at work for too long: others may try."""
        late = time.monotonic() - self._limit_s
        with self._state:
            hung = [record for record, begun in self._begun.items() if begun < late]
        for record in hung:
            if record.standing is Standing.HELD:
                _log.error(
                    "The handler has been at work on record %d for over %g seconds: it is given "
                    "to another.",
                    *(record.offset, self._limit_s),
                )
                with self._state:
                    if record in self._begun:
                        self._hung.add(record.group)
                self._release(record)

    def _all_hang(self) -> bool:
        """Whether nobody is left to work: then others get all, and this one waits."""
        with self._state:
            if len(self._hung) < len(self._threads):
                return False
            for queue in self._groups.values():
                for record in queue:
                    self._give_back(record)
            self._state.wait_for(lambda: self._stopped or not self._hung, _POLL_S)
            return True

    def _give_back(self, record: SharedRecord) -> None:
        """Nobody has begun it: that is no failure."""
        if record.standing is Standing.HELD:
            self._supply.desk.release(record, _HUNG_S, failed=False)

    def _work(self) -> None:
        while (group := self._next_group()) is not None:
            queue = self._groups[group]
            record = queue.popleft()
            if record.standing is Standing.HELD:
                with self._state:
                    self._begun[record] = time.monotonic()
                try:
                    self._process(record)
                except BaseException as error:  # as of sys.exit(): for who has called run()
                    self._failure = error
                    self._release(record)  # else those behind it would overtake it
                    self.stop()
                finally:
                    with self._state:
                        del self._begun[record]
                        self._hung.discard(group)
                        self._state.notify_all()
            with self._state:
                if queue:
                    self._ready.append(group)
                    self._state.notify()
                else:
                    del self._groups[group]

    def _next_group(self) -> bytes | None:
        with self._state:
            while not self._stopped:
                if self._ready:
                    return self._ready.popleft()
                self._state.wait(1.0)
            return None

    def _process(self, record: SharedRecord) -> None:
        try:
            self._handler(record)
        except Exception:
            _log.warning(
                "The handler failed for record %d of stream %r.",
                *(record.offset, self._subscriber.stream.name),
                exc_info=True,
            )
            self._release(record)
            return
        try:
            if record.standing is Standing.HELD:
                record.ack()
        except (Fenced, ValueError) as error:
            _log.warning("%s", error)

    def _release(self, record: SharedRecord) -> None:
        try:
            if record.standing is Standing.HELD:
                record.release(pause_s(record.failures + 1, *_DELAY_S))
        except (Fenced, ValueError) as error:
            _log.warning("%s", error)
