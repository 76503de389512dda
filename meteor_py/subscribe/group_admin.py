"""Subscriber groups as seen from outside: begin, list, move and delete them."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from meteor_py.errors import NoConfirmedOffset
from meteor_py.records.config import InitialOffset
from meteor_py.records.descriptions import GroupDescription
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.scripts import DELETE_GROUP, OPEN_GROUP, SEEK_GROUP

if TYPE_CHECKING:
    from meteor_py.log.handle import StreamHandle

#: Groups that are asked about in one go.
_LIST = 500


def open_group(stream: StreamHandle, group: str, start: InitialOffset) -> int:
    """Begin a group if it does not exist, and return the offset at which it stands.

    Raises:
        NoConfirmedOffset: ``start`` is NONE, and nothing is confirmed.
        GroupConfigMismatch: It is a shared one.
    """
    _check_exclusive(stream, group)
    first = str(stream.bounds()[0]) if start == InitialOffset.EARLIEST else ""
    args = [
        stream.incarnation,
        group,
        "" if start == InitialOffset.NONE else "create",
        first,
        "floating" if start == InitialOffset.EARLIEST else "",
    ]
    script_keys = [
        keys.meta(stream.name),
        keys.group(stream.name, group),
        keys.lease(stream.name, group),
        keys.groups(stream.name),
    ]
    reply = stream.connector.run(OPEN_GROUP, script_keys, args)
    if reply[0] == b"NOOFFSET":
        raise NoConfirmedOffset(
            f"Group {group!r} of stream {stream.name!r} has not confirmed anything, so "
            "InitialOffset.NONE leaves it nowhere to start; use EARLIEST or LATEST, or "
            "stream.seek_group().",
            stream=stream.name,
            group=group,
        )
    if reply[0] != b"OK":
        raise reply_errors.stream_gone(stream.name, reply[0])
    return int(reply[1])


def list_groups(stream: StreamHandle, end: int) -> list[GroupDescription]:
    """All groups of a stream that ends at ``end``, by name."""
    # A name that cannot be decoded is not of ours: as it is written here, it has no key.
    members = stream.connector.call("SMEMBERS", keys.groups(stream.name))
    names = sorted(name.decode(errors="backslashreplace") for name in members)
    found: list[GroupDescription] = []
    for start in range(0, len(names), _LIST):
        part = names[start : start + _LIST]
        fields = ("incarnation", "confirmed", "start", "term")
        commands = [("HMGET", keys.group(stream.name, name), *fields) for name in part]
        leases = [("GET", keys.lease(stream.name, name)) for name in part]
        replies = stream.connector.pipeline([*commands, *leases])
        for name, group, lease in zip(part, replies, replies[len(part) :], strict=False):
            incarnation, confirmed, began, term = group
            if incarnation is None or incarnation.decode() != stream.incarnation:
                continue  # deleted since, or left behind by an earlier stream
            try:
                position, number = int(confirmed or began), int(term or 0)
            except (TypeError, ValueError):
                raise reply_errors.corrupt_group(stream.name, name) from None
            lag = max(end - position, 0)
            found.append(GroupDescription(name, position, lag, owner_of(lease), number))
    return found


def _check_exclusive(stream: StreamHandle, group: str) -> None:
    """Raise ``GroupConfigMismatch`` for the name of a shared group: two would have one name."""
    if stream.config.ordering_key is None:
        return
    found = stream.connector.call("HGET", keys.shared(stream.name, group, "state"), "incarnation")
    # Of the stream, and of the group: see shared/open.lua.
    if found is not None and found.decode(errors="replace").partition(".")[0] == stream.incarnation:
        raise reply_errors.group_is_shared(stream.name, group)


def find_archiver(stream: StreamHandle) -> str | None:
    """The member that archives the stream now; None if there is none."""
    return owner_of(stream.connector.call("GET", keys.lease(stream.name, keys.ARCHIVERS)))


def owner_of(lease: bytes | None) -> str | None:
    """The member that a lease names."""
    return None if lease is None else lease.decode(errors="replace").partition(" ")[0]


def seek_group(
    stream: StreamHandle, group: str, offset: int, *, floating: bool, force: bool
) -> None:
    """Let a group continue at ``offset``, and fence its owner.

    Raises:
        GroupActive: A member has the lease, and ``force`` is False.
        GroupConfigMismatch: It is a shared one.
        ValueError: The offset is beyond the end.
    """
    _check_exclusive(stream, group)
    script_keys = [
        keys.meta(stream.name),
        keys.group(stream.name, group),
        keys.lease(stream.name, group),
        keys.events(stream.name),
        keys.groups(stream.name),
    ]
    args = [
        stream.incarnation,
        group,
        offset,
        "floating" if floating else "",
        "force" if force else "",
        secrets.token_hex(8),
    ]
    reply = stream.connector.run(SEEK_GROUP, script_keys, args)
    if reply[0] == b"ACTIVE":
        raise reply_errors.group_active(stream.name, group, reply[1])
    if reply[0] == b"BEYOND":
        raise ValueError(
            f"Offset {offset} is beyond the end of stream {stream.name!r}, which is {reply[1]}."
        )
    if reply[0] != b"OK":
        raise reply_errors.stream_gone(stream.name, reply[0])


def delete_group(stream: StreamHandle, group: str, *, force: bool) -> None:
    """Delete a group, and fence its owner.

    Raises:
        GroupActive: A member has the lease, and ``force`` is False.
        GroupNotFound: There is none.
        StreamNotFound, LogTruncated: The stream was deleted, or recreated.
    """
    key = keys.group(stream.name, group)
    was_there = stream.connector.call("EXISTS", key)
    script_keys = [
        keys.meta(stream.name),
        key,
        keys.lease(stream.name, group),
        keys.events(stream.name),
        keys.groups(stream.name),
    ]
    args = [stream.incarnation, group, "force" if force else ""]
    reply = stream.connector.run(DELETE_GROUP, script_keys, args)
    if reply[0] == b"ACTIVE":
        raise reply_errors.group_active(stream.name, group, reply[1])
    # Not found, though it was there: deleted by a first try whose reply was lost.
    if reply[0] == b"NOGROUP" and not was_there:
        raise reply_errors.group_not_found(stream.name, group)
    if reply[0] in (b"NOSTREAM", b"INCARNATION"):
        raise reply_errors.stream_gone(stream.name, reply[0])
