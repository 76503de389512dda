"""The crew: threads that process the records of one consumer, groups in parallel, each in order."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from meteor_py.backoff import pause_s
from meteor_py.errors import ConnectionFailed, Fenced
from meteor_py.shared.record import SharedRecord, Standing
from meteor_py.state import State

if TYPE_CHECKING:
    from meteor_py.shared.subscriber import SharedSubscriber

_log = logging.getLogger(__name__)

Handler = Callable[[SharedRecord], object]

#: Seconds for which a group is left alone after a failure, doubled each time up to the second.
_DELAY_S = (0.1, 10.0)
#: Seconds that a poll waits, and for which the server may be away.
_POLL_S = 0.5
_AWAY_S = 30.0


class Crew:
    """Works in ``run``, in the thread that calls it, and its own."""

    def __init__(
        self, subscriber: SharedSubscriber, handler: Handler, size: int, limit_s: float
    ) -> None:
        if not callable(handler):
            raise TypeError("The handler must be a function of one record.")
        self._subscriber = subscriber
        self._handler = handler
        self._limit_s = limit_s
        self._state = State()
        self._groups: dict[bytes, deque[SharedRecord]] = {}  # with work, or at work
        self._ready: deque[bytes] = deque()  # of those, the ones that nobody works on
        self._begun: dict[SharedRecord, float] = {}  # at work, and since when
        self._stopped = False
        name = f"meteor-crew-{subscriber.stream.name}"
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(size)
        ]

    def run(self) -> None:
        """Fetch records and share them out, until stopped."""
        for thread in self._threads:
            thread.start()
        away_since: float | None = None
        try:
            while not self._stopped:
                try:
                    self._share_out(self._subscriber.poll(_POLL_S))
                    away_since = None
                except ConnectionFailed:
                    away_since = away_since or time.monotonic()
                    if time.monotonic() - away_since > _AWAY_S:
                        raise
                except Fenced as error:
                    _log.warning("%s", error)
                self._let_go()
        finally:
            self.stop()
            for thread in self._threads:
                thread.join()
        self._subscriber.flush()

    def stop(self) -> None:
        with self._state:
            self._stopped = True
            self._state.notify_all()

    def end(self, timeout_s: float) -> None:
        """Stop, and wait for the handlers that are at work; not for oneself."""
        self.stop()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))

    def _share_out(self, records: list[SharedRecord]) -> None:
        with self._state:
            for record in records:
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
                self._release(record)

    def _work(self) -> None:
        while (group := self._next_group()) is not None:
            queue = self._groups[group]
            record = queue.popleft()
            if record.standing is Standing.HELD:
                with self._state:
                    self._begun[record] = time.monotonic()
                try:
                    self._process(record)
                finally:
                    with self._state:
                        del self._begun[record]
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
