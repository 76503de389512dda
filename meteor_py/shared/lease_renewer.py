"""A background thread that renews a consumer's lease and sends its settlements."""

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

THREAD_PREFIX = "meteor-shared"
#: Seconds that a settlement waits for others to be sent with it: _GATHER_S while the application
#: processes records, and _HURRY_S while it polls. During a poll, sending a settlement may make
#: records available.
_GATHER_S = 0.05
_HURRY_S = 0.002
#: Seconds that an idle consumer stays registered for wake-ups after a poll, because the application
#: usually polls again at once.
_LINGER_S = 0.05
#: First and longest pause between retries, in seconds. The pause doubles each time.
_BACKOFF_S = (0.02, 0.64)


class LeaseRenewer:
    """One consumer's renewal thread. The subscriber starts and joins it."""

    def __init__(self, deliveries: Deliveries, max_poll_interval_s: float) -> None:
        self._deliveries = deliveries
        self._interval_s = max_poll_interval_s
        self._stopped = False
        self._close: Callable[[], None] | None = None
        name = f"{THREAD_PREFIX}-{deliveries.protocol.stream.name}"
        self._thread = JoinableThread(self._run, name)

    @property
    def polling(self) -> bool:
        """Whether the application is polling now."""
        return self._deliveries.polling

    @polling.setter
    def polling(self, polling: bool) -> None:
        self._deliveries.polling = polling
        deliveries = self._deliveries
        if not polling and (deliveries.idle is not None or deliveries.holdings.request is not None):
            with deliveries.condition:
                # The thread may have to unregister this consumer from wake-ups or repeat a step.
                deliveries.condition.notify_all()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Tell the thread to end. The caller sends the remaining settlements."""
        with self._deliveries.condition:
            self._stopped = True
            self._deliveries.condition.notify_all()

    def abandon(self, close: Callable[[], None]) -> None:
        """Tell the thread to leave the group and call ``close``.

        Called when the subscriber is garbage-collected without a ``close()``.
        """
        self._close = close
        self.stop()
        if not self._thread.is_alive():  # the subscriber's close() was interrupted
            close()

    def join(self, timeout_s: float) -> None:
        condition = self._deliveries.condition
        if self._deliveries.talks_here():
            return  # this signal handler interrupted an exchange, which must end first
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            deadline = now() + timeout_s
            while condition.is_mine() and self._thread.is_alive() and now() < deadline:
                with condition:  # the wait releases the lock, which the thread may need
                    condition.wait(0.01)
            self._thread.join(max(deadline - now(), 0.0))

    @property
    def hung(self) -> bool:
        """Whether the application has neither polled nor settled anything for too long.

        An ``extend()`` that is still in effect prevents this. The caller holds the lock of the
        ``Deliveries``.
        """
        silent = not self.polling and now() - self._deliveries.alive_at > self._interval_s
        return silent and not self._deliveries.extended()

    def _run(self) -> None:
        failures = 0
        while self._wait(failures):
            try:
                # If the application no longer polls, the server must wake other consumers instead.
                left = self._linger_left()
                self._deliveries.exchange(mode="busy" if left is not None and left <= 0 else "")
                failures = 0
            except ConnectionFailed:
                failures += 1
            except MeteorError as error:  # such as a deleted group: report it to the application
                self._deliveries.failure = error
                failures += 1
            except BaseException:
                group = self._deliveries.protocol.group
                _log.exception("The lease renewer for shared group %r failed.", group)
                failures += 1
        if self._close is not None:
            try:
                self._deliveries.exchange(leave=True)
            except MeteorError:
                pass  # other consumers get the records when the lease expires
            finally:
                self._close()

    def _linger_left(self) -> float | None:
        """Return the seconds until this idle consumer unregisters from wake-ups.

        Returns None if the consumer is polling, or is not registered.
        """
        if self._deliveries.idle is None or self._deliveries.polling:
            return None
        return self._deliveries.alive_at + _LINGER_S - now()

    def _has_unsent(self) -> bool:
        """Whether there are settlements to send, or a poll has ended without the reply to a step.

        In that step, the server may have registered this consumer for wake-ups.
        """
        holdings = self._deliveries.holdings
        return holdings.unsent or (not self._deliveries.polling and holdings.request is not None)

    def _wait(self, failures: int) -> bool:
        """Wait until the thread must send a step; return False if it must end instead."""
        deliveries = self._deliveries
        pause = pause_s(failures, *_BACKOFF_S) if failures else 0.0
        with deliveries.condition:
            if pause:
                deliveries.condition.wait_for(lambda: self._stopped, pause)
            renewal = deliveries.config.lease_ttl / 3
            while not self._stopped:
                due = deliveries.expire_records()
                left = renewal - (now() - deliveries.spoke_at)
                linger = self._linger_left()
                if linger is not None:
                    left = min(left, linger)
                if self.hung:
                    left = renewal  # do not renew the lease: other consumers must get the records
                elif self._has_unsent() and deliveries.spoke_at:
                    if self._gather():
                        return True
                    continue
                elif left <= 0 and deliveries.spoke_at:
                    return True
                deliveries.renewer_waits = True
                deliveries.condition.wait(max(min(left, renewal, due), 0.01))
                deliveries.renewer_waits = False
            return False

    def _gather(self) -> bool:
        """Wait for more settlements; return whether this thread should send them.

        It should not if another thread, usually a poll, has sent them or is sending them.
        """
        deliveries = self._deliveries
        gather = _HURRY_S if deliveries.polling and deliveries.holdings.queued else _GATHER_S
        since = deliveries.unsent_since
        left = gather if since is None or deliveries.exchanging else since + gather - now()
        # If a poll sends these settlements, the next ones get their own wait.
        if deliveries.condition.wait_for(
            lambda: self._stopped or deliveries.unsent_since not in (since, None), left
        ):
            return False
        since = deliveries.unsent_since
        waited = since is None or now() - since >= gather
        return waited and self._has_unsent() and not deliveries.exchanging
