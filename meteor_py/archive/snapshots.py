"""Snapshots of a stream's state, read from its server so that the store can keep them."""

from __future__ import annotations

from meteor_py.log.handle import StreamHandle
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import Connection
from meteor_py.redis.scripts import READ_STATE
from meteor_py.store.state import GroupState, StreamState

#: Maximum number of groups that one pipeline reads.
_GROUPS = 500
_FIELDS = ("incarnation", "start", "confirmed", "floating", "term")


def take_snapshot(connection: Connection, stream: StreamHandle) -> tuple[int, StreamState]:
    """Return the stream's epoch and its state.

    Raises:
        StreamNotFound: The stream was deleted.
        LogTruncated: The stream was recreated.
        AccessDenied: The server denies this user one of the keys.
    """
    name = stream.name
    script_keys = [keys.meta(name), keys.fences(name)]
    reply = connection.run(READ_STATE, script_keys, [stream.incarnation])
    if reply[0] != b"OK":
        raise reply_errors.stream_gone(name, reply[0])
    end, epoch, epochs, flat = reply[1:]
    texts = [text.decode(errors="surrogateescape") for text in flat]
    fences = dict(zip(texts[::2], texts[1::2], strict=True))
    # The groups need not be read atomically with the fences. A newer position is correct as well,
    # because a resume limits all positions to the end of the store.
    groups = _groups(connection, stream)
    return int(epoch), StreamState(int(end), epochs.decode(), fences, groups)


def _groups(connection: Connection, stream: StreamHandle) -> dict[str, GroupState]:
    members = connection.call("SMEMBERS", keys.groups(stream.name))
    names = sorted(name.decode(errors="backslashreplace") for name in members)
    found: dict[str, GroupState] = {}
    for at in range(0, len(names), _GROUPS):
        part = names[at : at + _GROUPS]
        commands = [("HMGET", keys.group(stream.name, name), *_FIELDS) for name in part]
        replies = connection.pipeline(commands, connection.timeout_s)
        for name, reply in zip(part, replies, strict=True):
            if reply[0] is None or reply[0].decode(errors="replace") != stream.incarnation:
                continue  # deleted in the meantime, or from an earlier incarnation of the stream
            try:
                found[name] = _group(*reply[1:])
            except (TypeError, ValueError):
                continue  # damaged: the group's members get an error, but archiving continues
    return found


def _group(
    start: bytes, confirmed: bytes | None, floating: bytes | None, term: bytes | None
) -> GroupState:
    return GroupState(
        int(start),
        None if confirmed is None else int(confirmed),
        (floating or b"").decode(),
        int(term or 0),
    )
