"""The tender: a thread that renews a consumer's lease, and says what it has settled."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from meteor_py.errors import ConnectionFailed, MeteorError
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.runtime.threads import JoinableThread
from meteor_py.shared.deliveries import Deliveries

_log = logging.getLogger(__name__)

TENDER_PREFIX = "meteor-shared"
#: Seconds that what is settled waits for more of it: while the application is at work, and while
#: it waits for records, which others may be holding back for that.
_GATHER_S = 0.05
_HURRY_S = 0.002
#: Seconds between two tries, doubled each time up to the second figure.
_BACKOFF_S = (0.02, 0.64)


class LeaseRenewer:
    """Started with its subscriber, and joined by it."""

    def __init__(self, desk: Deliveries, max_poll_interval_s: float) -> None:
        self._desk = desk
        self._interval_s = max_poll_interval_s
        #: The application is polling now.
        self.polling = False
        self._ended = False
        self._last: Callable[[], None] | None = None
        name = f"{TENDER_PREFIX}-{desk.books.stream.name}"
        self._thread = JoinableThread(self._run, name)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Let it end; whoever closes the desk says what is left."""
        with self._desk.state:
            self._ended = True
            self._desk.state.notify_all()

    def abandon(self, close: Callable[[], None]) -> None:
        """There is nobody who would leave: do so in this thread, and then ``close``."""
        self._last = close
        self.end()
        if not self._thread.is_alive():  # closing it was interrupted
            close()

    def join(self, timeout_s: float) -> bool:
        if self._desk.talks_here():
            return False  # what this signal handler came into has to end before the thread can
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            deadline = now() + timeout_s
            while self._desk.state.is_mine() and self._thread.is_alive() and now() < deadline:
                with self._desk.state:  # let go: this is a signal handler, and it may need that
                    self._desk.state.wait(0.01)
            self._thread.join(max(deadline - now(), 0.0))
        return not self._thread.is_alive()

    @property
    def hung(self) -> bool:
        """Whether the application gives no sign of life."""
        return not self.polling and now() - self._desk.alive_at > self._interval_s

    def _run(self) -> None:
        failures = 0
        while self._wait(failures):
            try:
                self._desk.exchange(wake=self.polling and self._desk.unsaid)
                failures = 0
            except ConnectionFailed:
                failures += 1
            except MeteorError as error:  # deleted, or something that trying again will not cure
                self._desk.failure = error
                failures += 1
            except BaseException:
                _log.exception("The tender of %r failed.", self._desk.books.group)
                failures += 1
        if self._last is not None:
            try:
                self._desk.exchange(leave=True)
            except MeteorError:
                pass  # others find out when the lease ends
            finally:
                self._last()

    def _wait(self, failures: int) -> bool:
        """Wait until there is something to say; False at the end."""
        desk = self._desk
        pause = pause_s(failures, *_BACKOFF_S) if failures else 0.0
        with desk.state:
            if pause:
                desk.state.wait_for(lambda: self._ended, pause)
            renewal = desk.config.lease_ttl / 3
            while not self._ended:
                left = renewal - (now() - desk.spoke_at)
                if self.hung:
                    left = renewal  # no longer: others shall have what it holds
                elif desk.unsaid and desk.spoke_at:
                    gather = _HURRY_S if self.polling else _GATHER_S
                    return not desk.state.wait_for(lambda: self._ended, gather)
                elif left <= 0 and desk.spoke_at:
                    return True
                desk.state.wait(max(min(left, renewal), 0.01))
            return False
