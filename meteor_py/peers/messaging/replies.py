"""Replies: what became of a message, from its receivers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from meteor_py.errors import (
    HandlerFailed,
    MemberLeft,
    MessageExpired,
    MessageFailed,
)
from meteor_py.peers.codec import PeerCodec, UnknownType
from meteor_py.records.times import seconds_in_words


@dataclass(frozen=True)
class Replies:
    """The replies of the members to a message to all."""

    #: By member.
    values: dict[str, Any] = field(default_factory=dict)
    #: By member, for those that did not reply, or could not.
    failed: dict[str, MessageFailed] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether all replied."""
        return not self.failed


def read_replies(fields: dict[str, bytes], group: str, codec: PeerCodec) -> Replies:
    """From the fields of a hash ``message:<id>``: the replies so far."""
    replies = Replies()
    for name, value in fields.items():
        if not name.startswith("r:"):
            continue
        member = name[2:]
        code, _, rest = value.partition(b":")
        kind, _, data = rest.partition(b":")
        if code == b"ok":
            try:
                replies.values[member] = codec.decode(kind.decode(), data)
            except BaseException as error:  # also SystemExit, of a type's own function
                replies.failed[member] = HandlerFailed(
                    f"The reply of member {member!r} cannot be read. {_text(error)}",
                    group=group,
                    member=member,
                )
        else:
            text = data.decode(errors="replace")
            replies.failed[member] = _failure(code.decode(), text, group, member)
    return replies


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, UnknownType) else f"({type(error).__name__}: {error})"


def _failure(code: str, text: str, group: str, member: str) -> MessageFailed:
    who = f"Member {member!r} of group {group!r}"
    if code == "left":
        return MemberLeft(f"{who} left before it had replied.", group=group, member=member)
    if code == "expired":
        return MessageExpired(
            f"{who} received the message when its time was over.", group=group, member=member
        )
    what = "cannot read" if code == "unknown" else "failed"
    return HandlerFailed(f"{who} {what} the message: {text}", group=group, member=member)


def add_silent(replies: Replies, receivers: Iterable[str], group: str, timeout: float) -> None:
    """Count receivers that have not replied by now as failed."""
    for member in receivers:
        if member not in replies.values and member not in replies.failed:
            replies.failed[member] = MessageExpired(
                f"Member {member!r} of group {group!r} did not reply within "
                f"{seconds_in_words(timeout)}.",
                group=group,
                member=member,
                timeout=timeout,
            )
