"""Administration of subscriber groups: create, list, move and delete them."""

from __future__ import annotations

import secrets
from datetime import datetime
from typing import Any

from meteor_py.errors import NoConfirmedOffset
from meteor_py.log.handle import StreamHandle
from meteor_py.records.config import InitialOffset
from meteor_py.records.descriptions import GroupDescription
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.scripts import DELETE_GROUP, OPEN_GROUP, SEEK_GROUP, Script

#: Maximum number of groups to read in one pipeline.
_LIST = 500


def open_group(stream: StreamHandle, group: str, start: InitialOffset | int | datetime) -> int:
    """Create a group if it does not exist, and return the group's next offset to process.

    Raises:
        NoConfirmedOffset: ``start`` is NONE, and the group has no confirmed offset.
        GroupConfigMismatch: A shared group has that name.
        ValueError: ``start`` is an offset beyond the end.
    """
    _check_exclusive(stream, group)
    offset, floating = "", False
    if start == InitialOffset.EARLIEST or not isinstance(start, InitialOffset):
        number, floating = stream.resolve(start)
        offset = str(number)
    args = [
        "" if start == InitialOffset.NONE else "create",
        offset,
        "floating" if floating else "",
    ]
    reply = _run(stream, OPEN_GROUP, group, args, [])
    if reply[0] == b"BEYOND":
        raise _beyond_end(stream, offset, reply[1])
    if reply[0] == b"NOOFFSET":
        raise NoConfirmedOffset(
            f"Group {group!r} of stream {stream.name!r} has no confirmed offset, and "
            "InitialOffset.NONE requires one. Use EARLIEST or LATEST, or set the offset with "
            "stream.seek_group().",
            stream=stream.name,
            group=group,
        )
    return int(reply[1])


def list_groups(stream: StreamHandle, end: int) -> list[GroupDescription]:
    """Return a stream's groups, sorted by name. ``end`` is the end of the stream."""
    # meteor_py writes only UTF-8 names. Any other name is escaped here, matches no key, and is
    # skipped.
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
                continue  # deleted in the meantime, or from an earlier incarnation of the stream
            try:
                position, number = int(confirmed or began), int(term or 0)
            except (TypeError, ValueError):
                raise reply_errors.corrupt_group(stream.name, name) from None
            lag = max(end - position, 0)
            found.append(GroupDescription(name, position, lag, owner_of(lease), number))
    return found


def find_archiver(stream: StreamHandle) -> str | None:
    """Return the name of the member that archives the stream, or None."""
    return owner_of(stream.connector.call("GET", keys.lease(stream.name, keys.ARCHIVERS)))


def owner_of(lease: bytes | None) -> str | None:
    """Return the member named in a lease key's value."""
    return None if lease is None else lease.decode(errors="replace").partition(" ")[0]


def seek_group(
    stream: StreamHandle, group: str, offset: int, *, floating: bool, force: bool
) -> None:
    """Make a group continue at ``offset``, and fence its owner.

    Raises:
        GroupActive: A member holds the lease, and ``force`` is False.
        GroupConfigMismatch: A shared group has that name.
        ValueError: The offset is beyond the end.
    """
    _check_exclusive(stream, group)
    args = [
        *(offset, "floating" if floating else "", "force" if force else ""),
        secrets.token_hex(8),
    ]
    reply = _run(stream, SEEK_GROUP, group, args, [keys.events(stream.name)])
    if reply[0] == b"BEYOND":
        raise _beyond_end(stream, offset, reply[1])


def delete_group(stream: StreamHandle, group: str, *, force: bool) -> None:
    """Delete a group, and fence its owner.

    Raises:
        GroupActive: A member holds the lease, and ``force`` is False.
        GroupNotFound: There is no such group.
        StreamNotFound: The stream was deleted.
        LogTruncated: The stream was deleted and recreated.
    """
    existed = stream.connector.call("EXISTS", keys.group(stream.name, group))
    args = ["force" if force else ""]
    reply = _run(stream, DELETE_GROUP, group, args, [keys.events(stream.name)])
    # If the group existed a moment ago and is now gone, assume that an earlier attempt
    # has deleted it, and that only the reply was lost.
    if reply[0] == b"NOGROUP" and not existed:
        raise reply_errors.group_not_found(stream.name, group)


def _beyond_end(stream: StreamHandle, offset: int | str, end: int) -> ValueError:
    return ValueError(
        f"Offset {offset} is beyond the end of stream {stream.name!r}, which ends at {end}."
    )


def _check_exclusive(stream: StreamHandle, group: str) -> None:
    """Raise ``GroupConfigMismatch`` if a shared group has that name."""
    if stream.config.ordering_key is None:
        return
    found = stream.connector.call("HGET", keys.shared(stream.name, group, "meta"), "incarnation")
    # The value is "<stream's incarnation>.<group's id>"; see shared/open.lua.
    if found is not None and found.decode(errors="replace").partition(".")[0] == stream.incarnation:
        raise reply_errors.group_is_shared(stream.name, group)


def _run(
    stream: StreamHandle, script: Script, group: str, args: list[Any], more_keys: list[str]
) -> list[Any]:
    """Run a script that changes a group. Raise if the stream is gone or the group is active."""
    name = stream.name
    script_keys = [keys.meta(name), keys.group(name, group), keys.lease(name, group)]
    script_keys += [*more_keys, keys.groups(name)]
    reply: list[Any] = stream.run(script, [stream.incarnation, group, *args], script_keys)
    if reply[0] == b"ACTIVE":
        raise reply_errors.group_active(name, group, reply[1])
    return reply
