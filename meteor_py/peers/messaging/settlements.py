"""Settlements: an inbox's reports to the server about the outcome of its messages.

Settlements that arrive while a call is in progress share the next call. If a handler's thread has
no other message to handle, it makes the call itself.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from meteor_py.errors import ConnectionFailed, MeteorError, PeerGroupNotFound
from meteor_py.peers.messaging.call_queue import CallQueue
from meteor_py.peers.messaging.message import Message
from meteor_py.redis.scripts import PEERS_SETTLE
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition, SignalSafeEvent

if TYPE_CHECKING:
    from meteor_py.peers.member_handle import MemberHandle

_log = logging.getLogger(__name__)

#: Maximum number of messages per call, and reply bytes after which a call takes no more messages.
_BATCH = 64
_BATCH_BYTES = 262_144
#: Maximum number of settlements waiting for the server. Beyond that, handlers wait.
_WAITING_MAX = 256
#: Keep retrying for this many seconds while the application waits.
_SETTLE_S = 10.0
#: Shortest and longest pause between attempts, in seconds. The pause doubles each time.
_BACKOFF_S = (0.02, 0.64)

#: The operations that ``peers/settle.lua`` offers.
What = Literal["settle", "settle-begun", "begin"]


@dataclass(eq=False)
class Settlement:
    """One message to settle, or one delivery to count."""

    message: Message
    what: What
    #: The result: ok, failed, expired or unknown. For "begin", a token by which the server
    #: recognizes a repeat.
    code: str
    kind: str = ""
    data: bytes = b""
    #: When to stop trying, on the ``now()`` clock; None to try for as long as the member is in the
    #: group.
    deadline: float | None = None
    #: The server's answer (see ``peers/settle.lua``); None if the message no longer belongs to this
    #: member.
    result: int | None = None
    error: MeteorError | None = None
    done: SignalSafeEvent = field(default_factory=SignalSafeEvent)


class Settlements:
    """One inbox's settlements. ``finished`` is called with each settlement that the server answered
    or that was dropped."""

    def __init__(self, member: MemberHandle, finished: Callable[[Settlement], None]) -> None:
        self._member = member
        self._finished = finished
        lock = threading.RLock()
        self._state = SignalSafeCondition(lock)
        self._room = SignalSafeCondition(lock)
        self._waiting: deque[Settlement] = deque()
        self._batch: list[Settlement] = []
        self._failures = 0
        self._stopped = False
        self._connection = member.group.protocol.open_connection()
        name = f"meteor-settle-{member.group.name}"
        self._calls = CallQueue(
            name, self._state, self._is_waiting, self._take_turn, member.group.track
        )

    def put(self, item: Settlement, *, here: bool) -> None:
        """Queue a settlement. With ``here``, this thread makes the call if none is in progress."""
        with self._state:
            if not here:
                self._room.wait_for(lambda: len(self._waiting) < _WAITING_MAX or self._stopped)
            if self._stopped:
                self._finish(item, None)
                return
            self._waiting.append(item)
        self._calls.send(here=here)

    def wait(self, item: Settlement, *, patient: bool) -> int | None:
        """Queue a settlement, and return the server's answer.

        Args:
            patient: Whether to retry for as long as the member is in the group.

        Raises:
            MeteorError: The server refused the settlement, or was unreachable for 10 seconds. Not
                raised if ``patient``.
        """
        item.deadline = None if patient else now() + _SETTLE_S
        self.put(item, here=True)
        item.done.wait()
        if item.error is not None:
            raise item.error
        return item.result

    def begin(self, message: Message) -> int | None:
        """Count a delivery and return the delivery count; ``peers/settle.lua`` documents the
        special values."""
        return self.wait(Settlement(message, "begin", secrets.token_hex(8)), patient=True)

    def drain(self, deadline: float) -> bool:
        return self._calls.drain(deadline)

    def close(self) -> None:
        """Make no more calls, and drop the waiting settlements."""
        with self._state:
            self._stopped = True
            self._room.notify_all()
            is_free = self._calls.is_free
        self._calls.stop()
        if is_free:
            self._abandon()
        else:  # the thread that has the turn will call _abandon()
            self._connection.interrupt()

    def _abandon(self) -> None:
        with self._state:
            items = [*self._batch, *self._waiting]
            self._batch.clear()
            self._waiting.clear()
        self._connection.close()
        for item in items:
            self._finish(item, None)

    # -- in the thread that has the turn -------------------------------------------------------

    def _is_waiting(self) -> bool:
        return not self._stopped and bool(self._batch or self._waiting)

    def _take_turn(self) -> float:
        try:
            return self._settle_batch()
        finally:
            if self._stopped:
                self._abandon()

    def _settle_batch(self) -> float:
        """Make one call; return the seconds to wait before the next one."""
        with self._state:
            size = sum(len(item.data) for item in self._batch)
            while self._waiting and len(self._batch) < _BATCH and size < _BATCH_BYTES:
                item = self._waiting.popleft()
                size += len(item.data)
                self._batch.append(item)
            self._room.notify_all()
        member, session = self._member, self._member.session
        # A member that rejoined under another id has lost the messages to its old id.
        for item in list(self._batch):
            if item.message.member != member.id or member.lost.is_set():
                self._conclude(item, None)
        if not self._batch:
            return 0.0
        try:
            reply = self._call(session)
        except PeerGroupNotFound:
            reply = [b"FENCED"]  # the server has lost the whole group
            session = member.session
        except MeteorError as error:
            return self._failed(error)
        self._failures = 0
        if reply[0] == b"FENCED":
            if session == member.session:
                self._conclude_all([None] * len(self._batch))
        else:
            self._conclude_all(reply[1:])
        return 0.0

    def _call(self, session: str) -> list[Any]:
        args: list[Any] = [self._batch[0].message.member, session]
        for item in self._batch:
            ms, number = item.message.place
            args += (item.what, f"{ms}-{number}", item.message.id)
            args += (item.code, item.kind, item.data)
        protocol = self._member.group.protocol
        self._connection.timeout_s = protocol.connector.timeout_s
        return protocol.run(PEERS_SETTLE, args, self._connection)

    def _failed(self, error: MeteorError) -> float:
        """Give up on settlements that must not wait longer; return the seconds before a retry."""
        self._failures += 1
        retriable = isinstance(error, ConnectionFailed)
        if self._failures == 1 and not self._stopped:
            count = len(self._batch)
            _log.warning("Could not settle %d messages. Retrying: %s", count, error)
        for item in list(self._batch):
            if item.deadline is not None and (not retriable or now() >= item.deadline):
                item.error = error
                self._batch.remove(item)
                item.done.set()
        return pause_s(self._failures, *_BACKOFF_S)

    def _conclude_all(self, results: list[int | None]) -> None:
        for item, result in zip(list(self._batch), results, strict=True):
            self._conclude(item, result)

    def _conclude(self, item: Settlement, result: int | None) -> None:
        self._batch.remove(item)
        self._finish(item, result)

    def _finish(self, item: Settlement, result: int | None) -> None:
        item.result = result
        try:
            self._finished(item)
        finally:
            item.done.set()
