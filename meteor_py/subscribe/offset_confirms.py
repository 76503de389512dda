"""Confirms: what a member of a group has done, on its way to the server.

Only the newest offset matters, so confirms are merged: all that come between two sendings share
one :class:`Confirmation`, and an :class:`~meteor_py.Ack` is an offset in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from meteor_py.errors import MeteorError
from meteor_py.publish.ack import Ack
from meteor_py.runtime.clock import now
from meteor_py.runtime.completion import Completion
from meteor_py.runtime.locks import SignalSafeCondition

#: Confirms that come within this many seconds of the last one sent go together.
MERGE_S = 0.05
#: Seconds after which the Ack of an unanswered confirm fails. The offset is still sent later.
TIMEOUT_S = 30.0


class Confirmation(Completion):
    """Confirms that are sent together. Whoever waits for one makes it go at once."""

    __slots__ = ("_pid", "deadline", "hurry", "offset", "sent")

    def __init__(self, hurry: Callable[[], None]) -> None:
        super().__init__()
        self.deadline = time.monotonic() + TIMEOUT_S
        self.hurry = hurry
        self.base_offset = 0  # an Ack adds its own offset to it
        self.offset = 0
        self.sent = False
        self._pid = os.getpid()

    def wait(self, timeout: float | None) -> bool:
        self._press()
        return super().wait(timeout)

    def on_settled(self, callback: Callable[[], None]) -> None:
        self._press()
        super().on_settled(callback)

    def _press(self) -> None:
        if self.settled:
            return
        if self._pid != os.getpid():  # a forked child, and its subscriber was dropped before
            self.abandon(MeteorError("This confirm belongs to the parent process."))
        else:
            self.hurry()


# What the Ack of a confirm stands on that changes nothing.
_DONE = Completion()
_DONE.base_offset = 0
_DONE.settled = True


class OffsetConfirms:
    """Guarded by the session's lock, ``state``, which is notified of every change."""

    def __init__(self, state: SignalSafeCondition, confirmed: int) -> None:
        #: The next offset to process, as far as the server has said.
        self.confirmed = confirmed
        #: The same, once all is sent.
        self.wanted = confirmed
        self._state = state
        self._waiting: list[Confirmation] = []
        self._overdue: list[Confirmation] = []  # the last one that has failed so
        self._urgent = False
        self._send_at = 0.0
        self._refused: tuple[MeteorError, list[Confirmation]] | None = None

    def start(self, confirmed: int) -> None:
        """A term begins there."""
        self.confirmed = self.wanted = confirmed

    def add(self, offset: int) -> Ack:
        """Note that all below ``offset`` is done. With the lock."""
        if offset <= self.confirmed:
            return Ack(_DONE, offset)
        self.want(offset)
        confirmation = self._waiting[-1] if self._waiting else None
        if confirmation is None or confirmation.sent:
            confirmation = Confirmation(self.hurry)
            confirmation.offset = offset
            self._waiting.append(confirmation)
        confirmation.offset = max(confirmation.offset, offset)
        return Ack(confirmation, offset)

    def want(self, offset: int) -> None:
        """The same without an Ack: if it is refused, nobody is told. With the lock."""
        if self.due is None:
            self._state.notify_all()
        self.wanted = max(self.wanted, offset)

    def hurry(self) -> None:
        """Somebody waits: do not wait for more."""
        with self._state:
            self._urgent = True
            self._state.notify_all()

    @property
    def due(self) -> float | None:
        """When to send, by ``now()``; None if there is nothing to send. With the lock."""
        if self.wanted <= self.confirmed:
            return None
        return 0.0 if self._urgent else self._send_at

    def take(self) -> int:
        """The offset to send now."""
        with self._state:
            for confirmation in self._waiting:
                confirmation.sent = True
            self._urgent = False
            self._send_at = now() + MERGE_S
            return self.wanted

    def succeed(self, confirmed: int) -> None:
        """The server has answered that all below is confirmed."""
        with self._state:
            self.confirmed = max(confirmed, self.confirmed)
            done = [c for c in self._waiting if c.offset <= self.confirmed]
            self._waiting = [c for c in self._waiting if c.offset > self.confirmed]
            self._overdue = []
            self._state.notify_all()
        for confirmation in done:
            confirmation.settle()

    def fail(self, error: MeteorError) -> None:
        """None of it will be confirmed."""
        with self._state:
            failed, self._waiting = self._waiting, []
            untold, self._overdue = [*self._overdue, *failed], []
            self.wanted = self.confirmed
            if untold:
                self._refused = (error, untold)
            self._state.notify_all()
        for confirmation in failed:
            confirmation.settle(error)

    def fail_overdue(self, error: MeteorError) -> None:
        """Tell those who have waited too long; what they confirmed is still to be sent."""
        at = time.monotonic()
        with self._state:
            failed = [c for c in self._waiting if c.deadline <= at]
            self._waiting = [c for c in self._waiting if c.deadline > at]
            self._overdue = failed[-1:] or self._overdue
        for confirmation in failed:
            confirmation.settle(error)

    def abandon(self, state: SignalSafeCondition, error: MeteorError) -> None:
        """In a forked child: the answers go to the parent."""
        self._state = state
        waiting, self._waiting = self._waiting, []
        for confirmation in waiting:
            confirmation.abandon(error)

    def report(self, error: MeteorError) -> None:
        """Let the next ``raise_refusal`` raise ``error``, whoever was told."""
        with self._state:
            self._refused = (error, [])

    def raise_refusal(self) -> None:
        """Raise the error of a confirm that was refused, unless somebody was told already."""
        with self._state:
            refused, self._refused = self._refused, None
        if refused is not None:
            error, confirmations = refused
            if not confirmations or not all(c.observed for c in confirmations):
                raise error.with_traceback(None)
