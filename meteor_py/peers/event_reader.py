"""The event reader of a group handle: reads the events of the group, and replies to messages."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from meteor_py.errors import ConnectionFailed
from meteor_py.peers.event import read_event
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.threads import JoinableThread

if TYPE_CHECKING:
    from meteor_py.peers.group_handle import GroupHandle

_log = logging.getLogger(__name__)

EVENT_READER_PREFIX = "meteor-events"
_BACKOFF_S = (0.02, 0.64)
#: Events that are read at a time.
_COUNT = 500
#: Before all replies.
_FIRST = "0-0"


class EventReader:
    """Owned by its group handle. Has its own connection; calls nothing that could block it."""

    def __init__(self, group: GroupHandle) -> None:
        self._group = group
        self._connection = group.protocol.connector.open_connection()
        self._stopped = False
        #: The last reply to a message that it has read.
        self._reply_position = _FIRST
        self._again = False
        self._thread = JoinableThread(self._run, f"{EVENT_READER_PREFIX}-{group.name}")

    def start(self) -> None:
        self._thread.start()

    def read_again(self) -> None:
        """Read all replies again, soon: the server may have started their stream again, and its
        clock, which numbers them, may be behind. Replies that are known do no harm."""
        self._again = True

    def stop(self) -> None:
        self._stopped = True
        self._connection.interrupt()

    def join(self, timeout_s: float) -> bool:
        # Again and again: it may have connected only now.
        return self._thread.ends_within(timeout_s, self._connection.interrupt)

    def _run(self) -> None:
        failures = 0
        while not self._stopped:
            try:
                self._read()
                failures = 0
            except ConnectionFailed:
                self.read_again()  # it may be another server
                failures += 1
                time.sleep(0.0 if self._stopped else pause_s(failures, *_BACKOFF_S))
            except Exception:
                if not self._stopped:
                    _log.exception("The event reader of group %r failed.", self._group.name)
                failures += 1
                time.sleep(pause_s(failures, *_BACKOFF_S))
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
            return  # end() may have found no connection to interrupt
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
                    group.requests.reply_arrived(flat[1].decode())
                    self._reply_position = entry_id.decode()

    def _take_events(self, view: int, entries: list[Any]) -> None:
        group = self._group
        for entry_id, flat in entries:
            event = read_event(entry_id, flat)
            with group.lock:
                if group.view.number != view:
                    return  # it was loaded again meanwhile
                trimmed = event.view != view + 1
                replaced = not trimmed and not group.view.continues(event)
                if not trimmed and not replaced:
                    group.apply(event)
                    view = event.view
            if trimmed or replaced:
                group.resync(reset=replaced, connection=self._connection)
                return
