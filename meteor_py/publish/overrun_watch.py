"""Warnings about records that the ring drops before a group has confirmed them."""

from __future__ import annotations

import logging
import struct
import time
from typing import Any

from meteor_py.errors import ConnectionFailed, MeteorError
from meteor_py.log.handle import StreamHandle
from meteor_py.records.frame import entry_span
from meteor_py.redis import keys
from meteor_py.redis.connection import Connection
from meteor_py.redis.scripts import DESCRIBE_STREAM

_log = logging.getLogger(__name__)

#: Seconds between two checks by a publisher that publishes continuously.
_INTERVAL_S = 5.0
#: Seconds to wait for each reply from the server. New records wait during a check.
_TIMEOUT_S = 1.0
#: Maximum number of groups of each kind (shared or not) that one check examines.
_GROUPS_MAX = 500


class OverrunWatch:
    """A publisher's check for groups whose unconfirmed records the ring has dropped.

    It warns about each group once. The group's members also get ``RecordsLost``, but perhaps much
    later. The publisher is running when the ring drops the records, so it can warn within seconds.
    """

    def __init__(self, stream: StreamHandle) -> None:
        self._stream = stream
        config = stream.config
        limited = config.max_age is not None or config.max_bytes is not None
        self._drops_from = 0 if limited else config.capacity
        self._enabled = stream.store_id is None  # with a store, every record stays readable
        self._next_check = 0.0
        self._checked = 0  # the end of the stream at the last check

    def is_due(self, end: int, *, last: bool = False) -> bool:
        """Return whether it is time for a check.

        Args:
            end: The end offset of the stream.
            last: Whether the publisher is closing.
        """
        if not self._enabled or end <= self._drops_from or end == self._checked:
            return False
        return last or time.monotonic() >= self._next_check

    def check(self, connection: Connection, end: int) -> None:
        """Warn about groups that have lost records. The connection must have no batch in flight."""
        self._next_check = time.monotonic() + _INTERVAL_S
        self._checked = end
        connection.timeout_s = _TIMEOUT_S
        try:
            first = self._ring_start(connection)
            behind = {} if first is None else self._groups_behind(connection, first)
        except ConnectionFailed:
            return  # the next check may succeed
        except (MeteorError, ValueError) as error:  # no permission, or another program's key
            _log.debug("Cannot check the groups of stream %r: %s", self._stream.name, error)
            self._enabled = False
            return
        for group, position in behind.items():
            if group in self._stream.overrun_groups:
                continue
            self._stream.overrun_groups.add(group)
            _log.warning(
                "The ring of stream %r has dropped records %d to %d, which group %r has not "
                "confirmed. Its members will get RecordsLost. Raise the stream's limits (capacity "
                "%d) with stream.configure(), or create the stream with a store.",
                *(self._stream.name, position, (first or 0) - 1, group),
                self._stream.config.capacity,
            )

    def _ring_start(self, connection: Connection) -> int | None:
        """Return the ring's first offset; None if the ring is empty or the stream is gone."""
        flat, _, first_id = connection.run(DESCRIBE_STREAM, self._stream.keys)
        meta = dict(zip(flat[::2], flat[1::2], strict=True))
        if not first_id or meta.get(b"incarnation") != self._stream.incarnation.encode():
            return None
        return entry_span(self._stream.name, first_id)[0]

    def _groups_behind(self, connection: Connection, first: int) -> dict[str, int]:
        """Return the groups whose next offset is below ``first``, each with that next offset.

        The caller has read ``first`` before this call reads the positions, so a group below
        ``first`` had not confirmed the dropped records.
        """
        name = self._stream.name
        found: dict[str, int] = {}
        kinds = [(keys.groups(name), False)]
        if self._stream.config.ordering_key is not None:
            kinds.append((keys.shared_groups(name), True))
        for listing, is_shared in kinds:
            members = sorted(connection.call("SMEMBERS", listing))[:_GROUPS_MAX]
            groups = [member.decode(errors="backslashreplace") for member in members]
            commands: list[Any] = [
                ("HMGET", keys.shared(name, group, "meta"), "incarnation", "progress", "start")
                if is_shared
                else ("HMGET", keys.group(name, group), "incarnation", "confirmed", "start")
                for group in groups
            ]
            replies = connection.pipeline(commands, _TIMEOUT_S) if commands else []
            for group, (incarnation, position, start) in zip(groups, replies, strict=True):
                # A shared group stores "<stream's incarnation>.<its own id>".
                owner = (incarnation or b"").partition(b".")[0]
                at = position or start
                if is_shared and position:  # see redis/lua/shared/_group.lua
                    at = int(struct.unpack_from("<d", position)[0])
                ours = owner == self._stream.incarnation.encode()
                if ours and at is not None and int(at) < first:
                    found[group] = int(at)
        return found
