"""Dead letters of a peer group: messages that no member could take."""

from __future__ import annotations

from dataclasses import dataclass

from meteor_py.peers.messaging.message import read_place
from meteor_py.peers.protocol import read_fields


@dataclass(frozen=True)
class PeerLetter:
    """A message that was given up, as it was sent. Get them with ``group.dead_letters()``."""

    #: When it was given up, in seconds since 1970 by the clock of the group; and why.
    buried_at: float
    reason: str
    #: The member that had it last.
    member: str
    #: Of the message.
    id: str
    queue: str
    #: "tell", "send" or "ask".
    verb: str
    #: The id of the member that sent it; None if it was sent by no member.
    sender: str | None
    sent_at: float
    #: What kind of bytes the body is: "json", "msgpack", "bytes", or the number of a type.
    type: str
    body: bytes


def read_letter(entry: bytes, flat: list[bytes]) -> PeerLetter:
    """A dead letter from its entry in the stream ``dead``."""
    fields = read_fields(flat)
    return PeerLetter(
        buried_at=read_place(entry)[0] / 1000,
        reason=fields["reason"].decode(errors="replace"),
        member=fields["member"].decode(),
        id=fields["id"].decode(),
        queue=fields["queue"].decode(),
        verb=fields["verb"].decode(),
        sender=fields["from"].decode() or None,
        sent_at=int(fields["sent"]) / 1000,
        type=fields["type"].decode(),
        body=fields["body"],
    )
