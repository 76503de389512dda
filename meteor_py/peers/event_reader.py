"""The event reader: a thread that reads a group's events and the replies to a handle's messages."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from meteor_py.errors import ConnectionFailed
from meteor_py.peers.event import read_event
from meteor_py.peers.protocol import read_fields
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.threads import JoinableThread

if TYPE_CHECKING:
    from meteor_py.peers.group_handle import GroupHandle

_log = logging.getLogger(__name__)

_BACKOFF_S = (0.02, 0.64)
#: Maximum number of events, and of replies, per read.
_COUNT = 500
#: The position before the first reply.
_FIRST = "0-0"


class EventReader(JoinableThread):
    """The thread that reads events and replies, over its own connection.

    It calls no application code, which could block it.
    """

    def __init__(self, group: GroupHandle) -> None:
        super().__init__(self._read_all, f"meteor-events-{group.name}")
        self._group = group
        self._connection = group.protocol.open_connection()
        self._stopped = False
        #: The ID of the last reply that was read.
        self._reply_position = _FIRST
        self._again = False

    def read_again(self) -> None:
        """Make the thread read all replies again.

        The server may have recreated the reply stream, and the new stream may start at a lower ID,
        because reply IDs come from the server's clock. Reading a reply twice is harmless.
        """
        self._again = True

    def stop(self) -> None:
        """Stop the thread. Repeat the call until the thread has ended.

        If the thread is reconnecting at that moment, a call finds no connection to interrupt.
        """
        self._stopped = True
        self._connection.interrupt()

    def _read_all(self) -> None:
        failures = 0
        while not self._stopped:
            try:
                self._read()
                failures = 0
                continue
            except ConnectionFailed:
                self.read_again()  # the next connection may reach another server
            except Exception:
                if not self._stopped:
                    _log.exception("The event reader for group %r failed.", self._group.name)
            failures += 1
            time.sleep(0.0 if self._stopped else pause_s(failures, *_BACKOFF_S))
        self._connection.close()

    def _read(self) -> None:
        group = self._group
        key = group.protocol.key
        events, replies = key("events"), key(f"replies:{group.reply_session}")
        block_s = min(self._connection.block_max_s, group.config.ttl / 2)
        view = group.view.number
        if self._again:
            self._again = False
            self._reply_position = _FIRST
        self._connection.connect()
        if self._stopped:
            return  # stop() may have found no connection to interrupt
        found = self._connection.call(
            *("XREAD", "COUNT", _COUNT, "BLOCK", max(int(block_s * 1000), 1)),
            *("STREAMS", events, replies, f"{view}-0", self._reply_position),
            timeout_s=block_s + self._connection.timeout_s,
        )
        for key, entries in found or ():
            if key.decode() == events:
                self._take_events(view, entries)
            else:
                for entry_id, flat in entries:
                    group.requests.reply_arrived(read_fields(flat))
                    self._reply_position = entry_id.decode()

    def _take_events(self, view: int, entries: list[Any]) -> None:
        group = self._group
        for entry_id, flat in entries:
            event = read_event(entry_id, flat)
            with group.lock:
                if group.view.number != view:
                    return  # another thread has reloaded the group
                trimmed = event.view != view + 1
                replaced = not trimmed and not group.view.continues(event)
                if not trimmed and not replaced:
                    group.apply(event)
                    view = event.view
            if trimmed or replaced:
                group.resync(reset=replaced, connection=self._connection)
                return
