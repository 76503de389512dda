"""A member's declaration of the queues that it handles. Requests to other queues fail at once."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from meteor_py.errors import MeteorError
from meteor_py.redis.scripts import PEERS_UPDATE_MEMBER
from meteor_py.runtime.clock import now

if TYPE_CHECKING:
    from meteor_py.peers.member_handle import MemberHandle
    from meteor_py.redis.connection import Connection

_log = logging.getLogger(__name__)

#: A member first declares its queues this many seconds after it last registered a handler. A
#: program registers its handlers one after another, and requests must not fail in between.
_FIRST_S = 1.0


class Declaration:
    """One member's declaration, sent by the heartbeat. Queues added later are declared at once."""

    def __init__(self, member: MemberHandle) -> None:
        self._member = member
        self._lock = threading.RLock()
        self._queues: dict[str, None] = {}
        self._changed_at = 0.0
        #: The session and queues that were last declared to the server.
        self._sent: tuple[str, str] | None = None

    def add(self, queue: str) -> None:
        with self._lock:
            self._queues[queue] = None
            self._changed_at = now()
            is_first = self._sent is None
        if not is_first:
            try:
                self._send(None)
            except MeteorError as error:
                _log.warning(
                    "%r could not declare queue %r yet, and will retry: %s",
                    self._member,
                    queue,
                    error,
                )

    def send_if_due(self, connection: Connection) -> None:
        """Send the declaration if the server does not have it. The heartbeat calls this method."""
        with self._lock:
            is_early = self._sent is None and now() < self._changed_at + _FIRST_S
        if self._queues and not is_early:
            self._send(connection)

    def _send(self, connection: Connection | None) -> None:
        member = self._member
        with self._lock:
            declared = (member.session, "".join(f"{queue} " for queue in self._queues))
        if declared != self._sent:
            args = [member.id, declared[0], "handlers", declared[1]]
            if member.group.protocol.run(PEERS_UPDATE_MEMBER, args, connection)[0] == b"OK":
                self._sent = declared
