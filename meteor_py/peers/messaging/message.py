"""A message as its receiver sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meteor_py.peers.protocol import read_fields
from meteor_py.records.config import check_seconds

if TYPE_CHECKING:
    from meteor_py.peers.messaging.inbox import QueueState

#: An entry's position in its stream.
Place = tuple[int, int]


@dataclass(eq=False)
class Message:
    """A message that a member received. Settle it once with ``ack``, ``reply`` or ``fail``.

    An unsettled message stays in the inbox. If its member dies and rejoins, or another process
    takes over the member's name, the message is delivered again with the same ``id``.
    """

    #: The message id, which stays the same in every delivery.
    id: str
    queue: str
    #: "tell", "send" or "ask".
    verb: str
    #: The id of the member that sent it; None if it was sent through a ``PeerGroup``.
    sender: str | None
    #: Whether the sender was the leader when the message was stored.
    from_leader: bool
    #: 1 to 256; lower numbers are delivered first.
    priority: int
    #: The server's count of deliveries, plus one for each call to ``retry`` in this session. The
    #: count is 1 when the message is stored. It grows by one each time the message reaches a
    #: handler in a later session, or after it has moved to another member. So a message that was
    #: stored while its member was dead begins with 2.
    deliveries: int
    #: When it was stored, in seconds since 1970 on the group's clock.
    sent_at: float
    #: When this process read it, in seconds since 1970, by its estimate of the group's clock.
    received_at: float
    #: Maximum error of ``received_at`` and ``latency`` in seconds, either way.
    clock_error: float
    #: The state of its queue in this process.
    queue_state: QueueState = field(repr=False)
    #: The decoded body.
    body: Any = None
    #: The receiver, the message's position in the receiver's inbox, and when the sender stops
    #: waiting (on the group's clock).
    member: str = field(default="", repr=False)
    place: Place = field(default=(0, 0), repr=False)
    until: float = field(default=0.0, repr=False)
    #: The type and bytes of the undecoded body.
    kind: str = field(default="", repr=False)
    data: bytes = field(default=b"", repr=False)
    #: Whether a handler has taken it, whether it is settled, whether it was dropped and must not be
    #: handled, and when the handler's time limit expires.
    taken: bool = field(default=False, repr=False)
    settled: bool = field(default=False, repr=False)
    dropped: bool = field(default=False, repr=False)
    overdue_at: float | None = field(default=None, repr=False)
    #: Whether an earlier session may have begun to handle it, and whether this delivery is counted.
    redelivered: bool = field(default=False, repr=False)
    begun: bool = field(default=False, repr=False)

    @property
    def latency(self) -> float:
        """Seconds from when the server stored the message until this process read it."""
        return self.received_at - self.sent_at

    def ack(self) -> bool:
        """Settle the message as done. A sender that asked for a reply gets None.

        Returns:
            Whether this call settled the message. False if it was already settled, if it now
            belongs to another session, or if the server dropped it after its sender had stopped
            waiting.

        Raises:
            ConnectionFailed: The server was unreachable for 10 seconds. Call ``ack`` again.
        """
        return self.queue_state.inbox.settle(self, "ok", "", b"")

    def reply(self, value: Any = None) -> bool:
        """Settle the message as done, with a reply if the sender asked for one. See ``ack`` for the
        return value.

        Raises:
            TypeError, ValueError: The codec cannot encode the reply, or the reply exceeds 1 MiB.
            ConnectionFailed: The server was unreachable for 10 seconds. Call ``reply`` again.
        """
        return self.queue_state.inbox.reply(self, value)

    def fail(self, reason: str = "") -> bool:
        """Settle the message as failed: the sender gets ``HandlerFailed`` with the reason. See
        ``ack`` for the return value and errors."""
        data = str(reason).encode(errors="replace")
        return self.queue_state.inbox.settle(self, "failed", "", data)

    def retry(self, delay: float = 0.0) -> bool:
        """Handle the message again after ``delay`` seconds, unless it expires first.

        In the meantime, other messages in the queue are handled.

        Returns:
            Whether the message will be handled again. False if it is already settled, is already
            waiting to be handled, or may belong to another session.
        """
        return self.queue_state.inbox.put_back(self, check_seconds("delay", delay, zero=True))


#: A position after the last entry.
LAST: Place = (2**64, 0)


def read_place(entry: bytes) -> Place:
    """Parse a stream entry ID."""
    ms, _, number = entry.partition(b"-")
    return int(ms), int(number)


def read_message(
    state: QueueState, member: str, entry: bytes, flat: list[bytes], now: float, error: float
) -> Message:
    """Parse an inbox entry, without decoding the body."""
    fields = read_fields(flat)
    return Message(
        id=fields["id"].decode(),
        queue=fields["queue"].decode(),
        verb=fields["verb"].decode(),
        sender=fields["from"].decode() or None,
        from_leader=fields["leader"] == b"1",
        priority=int(fields["priority"]),
        deliveries=int(fields.get("deliveries", 1)),
        redelivered="deliveries" in fields or fields["tries"] != b"0",
        sent_at=int(fields["sent"]) / 1000,
        received_at=now,
        clock_error=error,
        queue_state=state,
        member=member,
        place=read_place(entry),
        until=int(fields["until"]) / 1000,
        kind=fields["type"].decode(),
        data=fields["body"],
    )
