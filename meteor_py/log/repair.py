"""Repair of a log that another program has written to.

An entry beyond the end of the log blocks publishing permanently: IDs only increase, and deleting an
entry does not lower the highest ID. The repair therefore copies the frames to a new key and
replaces the log with this copy. It repairs the ordering-key index first. Otherwise a publisher
could append a frame to the repaired log and then fail to update the index.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

from meteor_py.errors import MeteorError
from meteor_py.log.handle import StreamHandle
from meteor_py.records.descriptions import RepairReport
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import Connection
from meteor_py.redis.scripts import REPAIR_LOG

#: Lifetime of an unfinished copy in milliseconds, in case the process that makes it dies.
_COPY_TTL_MS = 3_600_000
#: Maximum number of foreign entries that a report lists.
_LISTED = 100


def repair(stream: StreamHandle, *, dry_run: bool) -> RepairReport:
    """Find foreign entries and, unless ``dry_run``, remove them; see ``Stream.repair``."""
    found: list[str] = []
    frames = foreign = 0
    blocked = repaired = False
    # Use a separate connection, which never retries: the last step of a copy must not run twice.
    connection = stream.open_connection()
    try:
        for key in (*stream.index_keys, stream.keys[0]):
            ours, others = _walk(connection, stream, key, None)
            is_blocked = _is_blocked(connection, stream, key)
            if (others or is_blocked) and not dry_run:
                _walk(connection, stream, key, keys.repair(stream.name, secrets.token_hex(8)))
                repaired = True
            frames, foreign, blocked = ours, foreign + len(others), blocked or is_blocked
            found += others
    finally:
        connection.close()
    return RepairReport(stream.name, frames, foreign, tuple(found[:_LISTED]), blocked, repaired)


def _walk(
    connection: Connection, stream: StreamHandle, key: str, copy: str | None
) -> tuple[int, list[str]]:
    """Return the number of valid entries at ``key``, and the IDs of foreign ones.

    If ``copy`` is not None, also copy the valid entries to that key, and replace ``key`` with the
    copy.
    """
    kind = "log" if key == stream.keys[0] else "index"
    script_keys = [key, stream.keys[1], key if copy is None else copy]
    after, frames, found = "0-0", 0, list[str]()
    try:
        while after:  # terminates: each step passes at least one entry in a finite ring
            copied = "" if copy is None else frames
            args: list[Any] = [stream.incarnation, kind, after, copied, _COPY_TTL_MS]
            reply = connection.run(REPAIR_LOG, script_keys, args)
            if reply[0] in (b"NOSTREAM", b"INCARNATION"):
                raise reply_errors.stream_gone(stream.name, reply[0])
            if reply[0] == b"GONE":
                raise MeteorError(
                    f"Repairing stream {stream.name!r} took too long, so the copy of its {kind} "
                    f"expired. The {kind} was not changed. Try again."
                )
            after, frames = reply[1].decode(), frames + int(reply[2])
            found += [entry.decode() for entry in reply[3:]]
    except BaseException:
        if copy is not None:
            with contextlib.suppress(MeteorError):  # the copy expires anyway
                stream.connector.call("UNLINK", copy)
        raise
    return frames, found


def _is_blocked(connection: Connection, stream: StreamHandle, key: str) -> bool:
    """Return whether ``key`` has, or had, an entry beyond the stream's current end."""
    if not connection.call("EXISTS", key):
        return False
    facts = connection.call("XINFO", "STREAM", key)
    highest = dict(zip(facts[::2], facts[1::2], strict=True))[b"last-generated-id"]
    # Read the end after the entry ID: publishing advances both.
    end = connection.call("HGET", stream.keys[1], "next")
    return end is not None and int(highest.partition(b"-")[0]) >= int(end)
