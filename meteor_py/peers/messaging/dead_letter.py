"""Peer group dead letters: messages that could not be delivered."""

from __future__ import annotations

from dataclasses import dataclass

from meteor_py.peers.messaging.message import read_place
from meteor_py.peers.protocol import read_fields


@dataclass(frozen=True)
class PeerLetter:
    """A message that could not be delivered. See ``group.dead_letters()``."""

    #: When it became a dead letter, in seconds since 1970 on the group's clock; and why.
    failed_at: float
    reason: str
    #: The last member that held the message.
    member: str
    #: The message id.
    id: str
    queue: str
    #: "tell", "send" or "ask".
    verb: str
    #: The id of the member that sent it; None if it was sent through a ``PeerGroup``.
    sender: str | None
    sent_at: float
    #: The body's type: "json", "msgpack", "bytes", "" for None, or a registered type's number or
    #: name.
    type: str
    body: bytes


def read_letter(entry: bytes, flat: list[bytes]) -> PeerLetter:
    """Parse an entry from the ``dead`` stream."""
    fields = read_fields(flat)
    return PeerLetter(
        failed_at=read_place(entry)[0] / 1000,
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
