"""Replies: how receivers settled a message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from meteor_py.errors import (
    HandlerFailed,
    MemberLeft,
    MessageExpired,
    MessageFailed,
    NoHandler,
)
from meteor_py.peers.codec import PeerCodec, UnknownType
from meteor_py.records.times import seconds_in_words


@dataclass(frozen=True)
class Replies:
    """The replies to a message that was sent to all members."""

    #: The replies, by member id.
    values: dict[str, Any] = field(default_factory=dict)
    #: The errors for members that failed or did not reply, by member id.
    failed: dict[str, MessageFailed] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether all members replied without an error."""
        return not self.failed


def read_replies(fields: dict[str, bytes], group: str, codec: PeerCodec) -> Replies:
    """Parse the replies received so far from the fields of a ``message:<id>`` hash."""
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
            except BaseException as error:  # even SystemExit, from a registered decode function
                replies.failed[member] = HandlerFailed(
                    f"Cannot decode the reply from member {member!r}: {_text(error)}",
                    group=group,
                    member=member,
                )
        else:
            text = data.decode(errors="replace")
            replies.failed[member] = _failure(code.decode(), text, group, member)
    return replies


def reply_type(reply: bytes) -> str:
    """Return a reply's type; "" if it is an error."""
    code, _, rest = reply.partition(b":")
    return rest.partition(b":")[0].decode() if code == b"ok" else ""


def no_handler(
    queue: str, group: str, member: str | None = None, *, is_leader: bool = False
) -> NoHandler:
    """Return the error for a request to a queue that its receivers do not handle.

    Args:
        member: The receiver; None if any member, or the leader, could have received the request.
        is_leader: Whether the request was for the leader, whoever that is.
    """
    subject, verb = "No live member of", "handles"
    if member or is_leader:
        subject = f"Member {member!r} of" if member else "The leader of"
        verb = "does not handle"
    return NoHandler(
        f"{subject} group {group!r} {verb} queue {queue!r}. Check the name, or pass "
        "wait_for_handler=True to wait for a handler.",
        group=group,
        member=member,
        queue=queue,
    )


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, UnknownType) else f"{type(error).__name__}: {error}."


def _failure(code: str, text: str, group: str, member: str) -> MessageFailed:
    name = f"Member {member!r} of group {group!r}"
    if code == "left":
        return MemberLeft(f"{name} left before it replied.", group=group, member=member)
    if code == "expired":
        return MessageExpired(
            f"{name} received the message after it had expired.", group=group, member=member
        )
    if code == "nohandler":
        return no_handler(text, group, member)
    if code == "poison":
        text = f"it was delivered {text} times and never settled, and became a dead letter."
    verb = "cannot read" if code == "unknown" else "failed to handle"
    return HandlerFailed(f"{name} {verb} the message: {text}", group=group, member=member)


def add_silent(replies: Replies, receivers: Iterable[str], group: str, timeout: float) -> None:
    """Add an error for each receiver that has not replied."""
    for member in receivers:
        if member not in replies.values and member not in replies.failed:
            replies.failed[member] = MessageExpired(
                f"Member {member!r} of group {group!r} did not reply within "
                f"{seconds_in_words(timeout)}.",
                group=group,
                member=member,
                timeout=timeout,
            )
