"""A box: one queue of an inbox, with its handler and what that has in hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from meteor_py.peers.messaging.dispatcher import Dispatcher
from meteor_py.peers.messaging.message import Message, Place

if TYPE_CHECKING:
    from meteor_py.peers.messaging.inbox import Inbox

Ack = Literal["auto", "manual"]
#: A message, where it lies: after a fail-over another may have its place.
Key = tuple[Place, str]

#: Messages and bytes of one queue that are held here, unsettled.
HELD_MAX = 1_000
HELD_BYTES_MAX = 64 * 1_048_576
#: Before all places.
START: Place = (0, 0)


class QueueState:
    """Changed under the lock of its inbox."""

    def __init__(
        self,
        inbox: Inbox,
        queue: str,
        function: Callable[[Message], object] | None,
        *,
        ack: Ack = "manual",
        priority: int = 0,
        timeout: float | None = None,
    ) -> None:
        self.inbox = inbox
        self.queue = queue
        self.function = function
        self.ack = ack
        self.priority = priority
        self.timeout = timeout
        self.desk: Dispatcher
        #: Up to where it was read, and whether it gets what comes new.
        self.place = START
        self.live = False
        self.held: dict[Key, Message] = {}
        self.bytes = 0

    @property
    def full(self) -> bool:
        return len(self.held) >= HELD_MAX or self.bytes >= HELD_BYTES_MAX

    @property
    def roomy(self) -> bool:
        return len(self.held) <= HELD_MAX // 2 and self.bytes <= HELD_BYTES_MAX // 2
