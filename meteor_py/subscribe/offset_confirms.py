"""A group member's confirms, from ``confirm()`` until the server's reply.

Only the newest offset matters, so confirms are merged: all confirms between two requests share one
:class:`Confirmation`, and each :class:`~meteor_py.Ack` refers to it with its own offset.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from meteor_py.errors import MeteorError
from meteor_py.publish.ack import Ack
from meteor_py.runtime.clock import now
from meteor_py.runtime.completion import Completion, forbid_waiting
from meteor_py.runtime.locks import SignalSafeCondition

#: Seconds after a request during which further confirms are merged into the next one.
MERGE_S = 0.05
#: For this many seconds after a request, the background thread checks for confirms every
#: ``MERGE_S`` seconds, because waking it for each confirm would cost as much as sending it.
_WATCH_S = 1.0
#: Seconds without a reply after which a confirm's Ack fails. The thread still retries.
TIMEOUT_S = 30.0


class Confirmation(Completion):
    """Confirms that are sent in one request, at once if a caller waits for any of them.

    Args:
        send: Called with a waiting caller's timeout. Sends the confirms in the caller's thread if
            that is possible within the timeout.
        hurry: Makes the background thread send the confirms at once.
    """

    __slots__ = ("_pid", "_send", "deadline", "hurry", "in_doubt", "offset", "sent")

    def __init__(self, send: Callable[[float | None], None], hurry: Callable[[], None]) -> None:
        super().__init__()
        self.deadline = time.monotonic() + TIMEOUT_S
        self._send = send
        self.hurry = hurry
        self.base_offset = 0  # an Ack adds its offset to this
        self.offset = 0
        self.sent = False
        #: Whether the reply to a request that included this confirmation was lost.
        self.in_doubt = False
        self._pid = os.getpid()

    def wait(self, timeout: float | None) -> bool:
        if not self.settled:
            forbid_waiting()
            if not self.has_callbacks and self._pid == os.getpid():
                self._send(timeout)
            self._send_soon()
        return super().wait(timeout)

    def on_settled(self, callback: Callable[[], None]) -> None:
        self._send_soon()
        super().on_settled(callback)

    def _send_soon(self) -> None:
        if self.settled:
            return
        if self._pid != os.getpid():  # in a forked child whose subscriber was garbage-collected
            self.abandon(MeteorError("This confirm belongs to the parent process."))
        else:
            self.hurry()


# The completion shared by all confirms that change nothing.
_DONE = Completion()
_DONE.base_offset = 0
_DONE.settled = True


class OffsetConfirms:
    """One session's confirms. The session's condition ``state`` guards all of them."""

    def __init__(
        self, state: SignalSafeCondition, confirmed: int, send: Callable[[float | None], None]
    ) -> None:
        #: The next offset to process, according to the server's last reply.
        self.confirmed = confirmed
        #: The same offset, including confirms that are not sent yet.
        self.wanted = confirmed
        self._state = state
        self._send = send
        self._waiting: list[Confirmation] = []
        self._overdue: list[Confirmation] = []  # at most one: the last that timed out
        self._urgent = False
        self._send_at = 0.0
        self._watched_until = 0.0  # until then, the background thread need not be woken
        self._draining = False  # whether a thread waits until no confirm is pending
        self._refused: tuple[MeteorError, list[Confirmation]] | None = None

    def start(self, confirmed: int) -> None:
        """Start a term at ``confirmed``."""
        self.confirmed = self.wanted = confirmed
        self._draining = False

    def add(self, offset: int) -> Ack:
        """Confirm all records below ``offset``. The caller holds the lock."""
        if offset <= self.confirmed:
            return Ack(_DONE, offset)
        self.want(offset)
        confirmation = self._waiting[-1] if self._waiting else None
        if confirmation is None or confirmation.sent:
            confirmation = Confirmation(self._send, self.hurry)
            confirmation.offset = offset
            self._waiting.append(confirmation)
        confirmation.offset = max(confirmation.offset, offset)
        return Ack(confirmation, offset)

    def want(self, offset: int) -> None:
        """Confirm all records below ``offset`` without an Ack. The caller holds the lock."""
        if self.due is None and now() >= self._watched_until:
            self._state.notify_all()
        self.wanted = max(self.wanted, offset)

    def watch_s(self, at: float) -> float:
        """Return the seconds after which the background thread must check for confirms again.

        The caller holds the lock, and must not wait longer than that, counted from ``at``.
        """
        if at > self._send_at + _WATCH_S:
            return math.inf
        self._watched_until = at + MERGE_S
        return MERGE_S

    def hurry(self) -> None:
        """Make the next request due at once: a caller is waiting for its reply."""
        with self._state:
            self._urgent = True
            self._state.notify_all()

    def drain(self) -> None:
        """Like ``hurry``, but replies also wake the threads that wait until none is pending."""
        self._draining = True
        self.hurry()

    @property
    def due(self) -> float | None:
        """When to send, on the ``now()`` clock; None if nothing is pending.

        The caller holds the lock.
        """
        if self.wanted <= self.confirmed:
            return None
        return 0.0 if self._urgent else self._send_at

    def take(self) -> int:
        """Mark the pending confirms as sent, and return the offset to send."""
        with self._state:
            for confirmation in self._waiting:
                confirmation.sent = True
            self._urgent = False
            self._send_at = now() + MERGE_S
            return self.wanted

    @property
    def in_doubt(self) -> bool:
        """Whether some confirms may have taken effect without a reply."""
        return any(c.in_doubt for c in [*self._waiting, *self._overdue])

    def doubt_sent(self) -> None:
        """Note that no reply arrived, so the sent confirms may or may not have taken effect."""
        with self._state:
            for confirmation in self._waiting:
                confirmation.in_doubt |= confirmation.sent

    def resolve_doubts(self, confirmed: int) -> None:
        """Settle the confirms up to ``confirmed``, and note that the others had no effect."""
        self.succeed(confirmed)
        with self._state:
            for confirmation in [*self._waiting, *self._overdue]:
                confirmation.in_doubt = False

    def succeed(self, confirmed: int) -> None:
        """Settle all confirms up to ``confirmed``, the offset in the server's reply."""
        with self._state:
            self.confirmed = max(confirmed, self.confirmed)
            done = [c for c in self._waiting if c.offset <= self.confirmed]
            self._waiting = [c for c in self._waiting if c.offset > self.confirmed]
            self._overdue = [c for c in self._overdue if c.offset > self.confirmed]
            if self._draining:  # otherwise wake no thread: that would delay the caller
                self._state.notify_all()
        for confirmation in done:
            confirmation.settle()

    def fail(self, error: MeteorError, in_doubt: MeteorError | None = None) -> None:
        """Fail all confirms. Those that may have taken effect fail with ``in_doubt``, if given."""
        with self._state:
            failed, self._waiting = self._waiting, []
            refused, self._overdue = [*self._overdue, *failed], []
            self.wanted = self.confirmed
            if refused:
                doubts = in_doubt is not None and any(c.in_doubt for c in refused)
                self._refused = (in_doubt if doubts and in_doubt else error, refused)
            self._state.notify_all()
        for confirmation in failed:
            confirmation.settle(in_doubt if confirmation.in_doubt and in_doubt else error)

    def fail_overdue(self, error: MeteorError) -> None:
        """Fail the Acks that have timed out. Their offsets will still be sent."""
        at = time.monotonic()
        with self._state:
            failed = [c for c in self._waiting if c.deadline <= at]
            self._waiting = [c for c in self._waiting if c.deadline > at]
            self._overdue = failed[-1:] or self._overdue
        for confirmation in failed:
            confirmation.settle(error)

    def abandon(self, state: SignalSafeCondition, error: MeteorError) -> None:
        """Fail all confirms in a forked child: the parent gets the replies."""
        self._state = state
        waiting, self._waiting = self._waiting, []
        for confirmation in waiting:
            confirmation.abandon(error)

    def report(self, error: MeteorError) -> None:
        """Make the next ``raise_refusal`` raise ``error``, even if every Ack was checked."""
        with self._state:
            self._refused = (error, [])

    def raise_refusal(self) -> None:
        """Raise the error from a refused confirm whose Ack was never checked."""
        with self._state:
            refused, self._refused = self._refused, None
        if refused is not None:
            error, confirmations = refused
            if not confirmations or not all(c.observed for c in confirmations):
                raise error.with_traceback(None)
