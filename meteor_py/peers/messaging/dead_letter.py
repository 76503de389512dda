"""Dead letters of a peer group: messages that no member could take."""

from __future__ import annotations

from dataclasses import dataclass

from meteor_py.peers.messaging.message import read_place


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
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    return PeerLetter(
        buried_at=read_place(entry)[0] / 1000,
        reason=fields[b"reason"].decode(errors="replace"),
        member=fields[b"member"].decode(),
        id=fields[b"id"].decode(),
        queue=fields[b"queue"].decode(),
        verb=fields[b"verb"].decode(),
        sender=fields[b"from"].decode() or None,
        sent_at=int(fields[b"sent"]) / 1000,
        type=fields[b"type"].decode(),
        body=fields[b"body"],
    )
