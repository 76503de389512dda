"""Receiving: what a member does to get the messages that are sent to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from meteor_py.peers.messaging.inbox import Inbox
from meteor_py.peers.messaging.message import Message
from meteor_py.peers.messaging.queue_state import Ack

_log = logging.getLogger(__name__)
_F = TypeVar("_F", bound=Callable[..., object])


class Receiving:
    """What gets messages: a member."""

    _inbox: Inbox | None = None

    def on(
        self,
        queue: str,
        *,
        workers: int = 1,
        priority: int | None = None,
        ack: Ack = "auto",
        timeout: float | None = None,
    ) -> Callable[[_F], _F]:
        """Call a function with each ``Message`` of a queue: a decorator.

        What it returns is the answer, and what it raises fails the message. Messages of one sender
        come in the order in which they were sent, if they have the same priority and there is one
        worker. Each comes at least once: if its member dies, or loses its connection for long, it
        may come again, with the same ``id``. A queue without a function keeps its messages.

        Args:
            queue: 1 to 128 of A-Z a-z 0-9 . _ -
            workers: Threads that call it.
            priority: 1 to 256: functions with a priority take turns in one thread of the member,
                and of the messages that wait those for the lowest priority come first. Without
                one it has threads of its own, and waits for nobody.
            ack: "auto", or "manual": it, or somebody else later, calls ``message.ack()``,
                ``reply()``, ``fail()`` or ``retry()``. Up to 1,000 messages may be open then;
                beyond, no more come.
            timeout: Seconds after which a message is failed that it has not settled. The function
                is not stopped.

        Raises:
            ValueError: The queue has a function already.
            MembershipLost: It is not a member any more.
        """
        inbox = self._open_inbox()

        def register(function: _F) -> _F:
            inbox.on(queue, function, workers=workers, priority=priority, ack=ack, timeout=timeout)
            return function

        return register

    def inbox(self, queue: str, timeout: float | None = None) -> Iterator[Message]:
        """Iterate over the messages of a queue, in place of a function; settle each of them.

        Args:
            timeout: Ends when none comes for so many seconds; None waits for as long as this is a
                member.
        """
        return self._open_inbox().pull(queue, timeout)

    def _open_inbox(self) -> Inbox:
        raise NotImplementedError  # pragma: no cover

    # -- for the group's threads ---------------------------------------------------------------

    def receiver_rejoined(self) -> None:
        """It has joined again by itself: what it has in hand may be somebody else's."""
        if self._inbox is not None:
            self._inbox.rejoined()

    @property
    def handles(self) -> bool:
        """Whether a handler is at work, in another thread."""
        return self._inbox is not None and self._inbox.busy

    def end_inbox(self, *, close: bool = False) -> None:
        """Take no more messages; does not wait. Closed, it does not settle any either."""
        if self._inbox is not None:
            self._inbox.end(close=close)

    def join_inbox(self, timeout_s: float) -> None:
        """Wait for the threads of the inbox to end."""
        if self._inbox is not None and not self._inbox.join(timeout_s):
            _log.warning("A handler of %r does not end.", self)
