"""A message, as the member that received it sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meteor_py.peers.protocol import read_fields
from meteor_py.records.config import check_seconds

if TYPE_CHECKING:
    from meteor_py.peers.messaging.inbox import QueueState

#: An entry's place in its stream.
Place = tuple[int, int]


@dataclass(eq=False)
class Message:
    """A message that a member received; settled by ``ack``, ``reply`` or ``fail``, once.

    Until then it stays in the inbox: if its member dies and comes back, or another of that name
    takes its place, it is delivered again, with the same ``id``.
    """

    #: The same each time it is delivered.
    id: str
    queue: str
    #: "tell", "send" or "ask".
    verb: str
    #: The id of the member that sent it; None if it was sent from a handle, by no member.
    sender: str | None
    #: Whether the sender was the leader when it was stored.
    from_leader: bool
    #: 1 to 256.
    priority: int
    #: The first time it is 1; more if its first receiver left, or ``retry`` was called here. Not
    #: counted is what a process has had in hand when it died, and its successor gets again.
    deliveries: int
    #: When it was stored, by the clock of the group, in seconds since 1970.
    sent_at: float
    #: When it was read here, by the same clock, as well as it is known here.
    received_at: float
    #: Seconds that ``received_at`` and ``latency`` may be wrong by, either way.
    clock_error: float
    #: What was sent.
    body: Any = None
    #: For which member, where in its inbox, and until when the sender waits, by the group's clock.
    member: str = field(default="", repr=False)
    place: Place = field(default=(0, 0), repr=False)
    until: float = field(default=0.0, repr=False)
    #: The type and the bytes of the body.
    kind: str = field(default="", repr=False)
    data: bytes = field(default=b"", repr=False)
    #: Its queue here; whether a handler has it, and settled it; when the handler must be done.
    queue_state: QueueState | None = field(default=None, repr=False)
    taken: bool = field(default=False, repr=False)
    settled: bool = field(default=False, repr=False)
    dropped: bool = field(default=False, repr=False)
    overdue_at: float | None = field(default=None, repr=False)

    @property
    def latency(self) -> float:
        """Seconds from being stored to being read."""
        return self.received_at - self.sent_at

    def ack(self) -> bool:
        """It is done. A sender that asked gets None.

        Returns:
            Whether this settled it; False if it was settled before, or is not this member's any
            more: the sender may have given it up, or it was given to another.

        Raises:
            ConnectionFailed: The server cannot be reached; call it again.
        """
        return self._state.inbox.settle(self, "ok", "", b"")

    def reply(self, value: Any = None) -> bool:
        """It is done, and this is the reply, if the sender asked for one.

        Raises:
            TypeError, ValueError: The codec of the group cannot write it, or it is too large.
        """
        return self._state.inbox.reply(self, value)

    def fail(self, reason: str = "") -> bool:
        """It cannot be done; who sent or asked gets ``HandlerFailed`` with the reason."""
        return self._state.inbox.settle(self, "failed", "", str(reason).encode(errors="replace"))

    def retry(self, delay: float = 0.0) -> bool:
        """Have it handled again, not before ``delay`` seconds are over, unless it expires.

        Others of its queue go first meanwhile.
        """
        return self._state.inbox.put_back(self, check_seconds("delay", delay, zero=True))

    @property
    def _state(self) -> QueueState:
        assert self.queue_state is not None, "it was read from an inbox"
        return self.queue_state


def read_place(entry: bytes) -> Place:
    """The place of an entry from its ID."""
    ms, _, number = entry.partition(b"-")
    return int(ms), int(number)


def read_message(member: str, entry: bytes, flat: list[bytes], now: float, error: float) -> Message:
    """A message from its entry in an inbox; its body is not decoded yet."""
    fields = read_fields(flat)
    return Message(
        id=fields["id"].decode(),
        queue=fields["queue"].decode(),
        verb=fields["verb"].decode(),
        sender=fields["from"].decode() or None,
        from_leader=fields["leader"] == b"1",
        priority=int(fields["priority"]),
        deliveries=int(fields["tries"]) + 1,
        sent_at=int(fields["sent"]) / 1000,
        received_at=now,
        clock_error=error,
        member=member,
        place=read_place(entry),
        until=int(fields["until"]) / 1000,
        kind=fields["type"].decode(),
        data=fields["body"],
    )
