"""Requests: messages of a group handle, and the replies that they wait for.

The caller's thread stores a message, so messages keep the order of the calls. One thread of the
handle waits for the replies, and for the timeout of each message.
"""

from __future__ import annotations

import heapq
import logging
import secrets
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from meteor_py.errors import (
    ConnectionFailed,
    InboxFull,
    MemberUnknown,
    MessageExpired,
    MessageFailed,
    MeteorError,
    NoLeader,
    PartialFailure,
)
from meteor_py.peers.codec import PeerCodec
from meteor_py.peers.messaging.replies import Replies, add_silent, read_replies
from meteor_py.peers.protocol import read_fields
from meteor_py.records.times import seconds_in_words
from meteor_py.redis.scripts import PEERS_SEND
from meteor_py.redis.shared_connection import ThreadConnections
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread

if TYPE_CHECKING:
    from meteor_py.peers.group_handle import GroupHandle
    from meteor_py.peers.member_handle import MemberHandle
    from meteor_py.redis.connection import Connection

_log = logging.getLogger(__name__)

Verb = Literal["tell", "send", "ask"]
To = Literal["member", "any", "all", "leader"]

#: Maximum number of messages of a handle that wait for replies; further calls block.
PENDING_MAX = 10_000
#: Maximum size of a body or a reply in bytes.
BODY_BYTES_MAX = 1_048_576
#: Seconds between two attempts: the first figure doubles up to the second.
_BACKOFF_S = (0.01, 0.3)
#: Seconds to wait for the server's reply when a message has timed out.
_LAST_READ_S = 1.0
#: Maximum number of messages whose replies are read together.
_BATCH = 100
#: Maximum number of finished messages to report to the server. The rest expire there.
_FINISHED_MAX = 10_000


@dataclass(eq=False)
class Request:
    """A message to send, without its body."""

    #: None if it is sent through a ``PeerGroup``.
    sender: MemberHandle | None
    verb: Verb
    to: To
    #: The id of the receiver, if ``to`` is "member".
    member: str
    queue: str
    timeout: float
    priority: int
    include_dead: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    future: Future[Any] = field(default_factory=Future)
    receivers: list[str] = field(default_factory=list)
    #: Whether the first attempt stored it: then no earlier attempt can still reach the server.
    stored_once: bool = False


class Requests:
    """Owned by a group handle. The first message that waits for a reply starts its thread."""

    def __init__(self, group: GroupHandle, codec: PeerCodec) -> None:
        self.group = group
        self.codec = codec
        self._state = SignalSafeCondition()
        self._pending: dict[str, Request] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._arrived: deque[str] = deque()
        self._stopped = False
        self._thread: JoinableThread | None = None
        #: Finished messages, which the server may delete.
        self._finished: deque[str] = deque(maxlen=_FINISHED_MAX)
        self._connections = ThreadConnections(group.protocol.connector.open_connection)
        self._in: Connection | None = None

    # -- sending -------------------------------------------------------------------------------

    def post(self, message: Request, body: Any) -> Future[Any]:
        """Store a message, and wait for its reply in the background."""
        self.group.check_owned()
        # Closed later than the group: handlers that closing waits for may still send.
        if self._stopped:
            self.group.check_open()
        kind, data = self.codec.encode(body)
        check_size(data)
        message.future.set_running_or_notify_cancel()  # a sent message cannot be cancelled
        deadline = now() + message.timeout
        try:
            if message.verb != "tell":
                self._await(message, deadline)
            message.receivers = self._store(message, [kind, data], deadline)
        except MeteorError as error:
            self._finish(message.id)
            _end(message.future, error)
        else:
            if (
                message.stored_once and message.id not in self._pending
            ):  # a tell, or already replied to
                self._finished.append(message.id)
            if message.verb == "tell":
                message.future.set_result(message.id)
        return message.future

    def _await(self, message: Request, deadline: float) -> None:
        """Register a message before storing it: its reply may arrive before the server's."""
        with self._state:
            # A callback of a future would wait for its own thread.
            is_callback = threading.current_thread() is self._thread
            free = self._state.wait_for(
                lambda: len(self._pending) < PENDING_MAX or self._stopped,
                0.0 if is_callback else deadline - now(),
            )
            if self._stopped:
                raise self._closed_error()
            if not free:
                raise MessageExpired(
                    f"{PENDING_MAX:,} messages of this handle of group {self.group.name!r} await "
                    "replies. Nothing was sent.",
                    group=self.group.name,
                )
            self._pending[message.id] = message
            heapq.heappush(self._deadlines, (deadline, message.id))
            if self._thread is None:
                self._thread = JoinableThread(self._run, f"meteor-replies-{self.group.name}")
                self._thread.start()
            if self._deadlines[0][1] == message.id:
                self._state.notify_all()

    def _store(self, message: Request, body: list[Any], deadline: float) -> list[str]:
        """Store a message in the inboxes of its receivers; return their ids. Safe to repeat: the
        server recognises the message id."""
        group, sender = self.group, message.sender
        args: list[Any] = [message.queue, message.verb, message.to, message.member]
        args += [secrets.randbelow(2**31), "1" if message.include_dead else "0", message.priority]
        args += [group.config.max_inbox, max(int(message.timeout * 1000), 1), *body]
        failures = 0
        while True:
            if sender is not None and sender.lost.is_set():
                raise sender.lost_error()
            identity = ("", "") if sender is None else (sender.id, sender.session)
            whole = [message.id, group.reply_session, identity[0], *args, identity[1]]
            try:
                reply = self._try(whole, deadline)
            except ConnectionFailed as error:
                cause: MeteorError | None = error
            else:
                code = reply[0]
                if code == b"OK":
                    message.stored_once = failures == 0
                    return [member.decode() for member in reply[1:]]
                if code != b"STALE":
                    raise self._refusal(code, reply, message.member)
                cause = None  # the sender was expelled: its heartbeat rejoins, or it is lost
            failures += 1
            pause = pause_s(failures, *_BACKOFF_S)
            if now() + pause >= deadline:
                raise MessageExpired(
                    f"A message to group {group.name!r} could not be stored within "
                    f"{seconds_in_words(message.timeout)}. If a reply was lost, it may be stored.",
                    group=group.name,
                    timeout=message.timeout,
                ) from cause
            time.sleep(pause)

    def _try(self, args: list[Any], deadline: float) -> list[Any]:
        def send(connection: Connection) -> list[Any]:
            if self._stopped:
                raise self._closed_error()
            connection.timeout_s = min(
                self.group.protocol.connector.timeout_s, max(deadline - now(), 0.01)
            )
            return self.group.protocol.run(PEERS_SEND, [*args, self._take_finished()], connection)

        return self._connections.use(send, deadline - now())

    def _take_finished(self) -> str:
        """The ids of finished messages, which the server deletes."""
        ids: list[str] = []
        with suppress(IndexError):  # another thread may take the last one
            while len(ids) < _BATCH:
                ids.append(self._finished.popleft())
        return " ".join(ids)

    def _refusal(self, code: bytes, reply: list[Any], member: str) -> MeteorError:
        name = self.group.name
        if code == b"NOLEADER":
            return NoLeader(f"Group {name!r} has no leader now. Try again later.", group=name)
        if code == b"FULL":
            full = reply[1].decode()
            return InboxFull(
                f"Member {full!r} of group {name!r} has as many unsettled messages as it may have "
                f"({self.group.config.max_inbox:,}). Nothing was sent. Send again when it has "
                "settled some, or give the group a larger max_inbox.",
                group=name,
                member=full,
            )
        if member:
            text = f"There is no member {member!r} in group {name!r}."
            return MemberUnknown(text, group=name, member=member)
        if self.group.view.members:
            return MemberUnknown(f"No member of group {name!r} is alive.", group=name)
        return MemberUnknown(f"Group {name!r} has no members.", group=name)

    # -- replies -------------------------------------------------------------------------------

    def reply_arrived(self, message: str) -> None:
        """Note that all receivers settled a message. The event reader calls this: do not block."""
        with self._state:
            if message in self._pending:
                self._arrived.append(message)
                self._state.notify_all()

    def close(self, deadline: float) -> None:
        """Fail the messages that wait, and join the thread until ``deadline`` by ``now()``."""
        with self._state:
            self._stopped = True
            self._state.notify_all()
            waiting = list(self._pending.values())
            self._pending.clear()
        self._connections.close()
        self._wake()
        for message in waiting:
            _end(message.future, self._closed_error())
        thread = self._thread
        if thread is not None and not thread.ends_within(max(deadline - now(), 0.0), self._wake):
            _log.warning("The reply thread of group %r did not end in time.", self.group.name)

    def _wake(self) -> None:
        if self._in is not None:
            self._in.interrupt()

    def _run(self) -> None:
        self._in = connection = self.group.protocol.connector.open_connection()
        connection.timeout_s = min(connection.timeout_s, _LAST_READ_S)
        failures = 0
        while not self._stopped:
            arrived, due = self._next()
            try:
                self._read(connection, arrived, due)
                failures = 0
            except ConnectionFailed:
                failures += 1
                with self._state:
                    self._arrived.extendleft(reversed(arrived))
                    pause = pause_s(failures, *_BACKOFF_S)
                    self._state.wait_for(lambda: self._stopped, pause)
            except BaseException:  # any exception: other messages are waiting for replies
                if not self._stopped:
                    _log.exception("Reading replies of group %r failed.", self.group.name)
            for message in due:
                self._expire(message, {})
        connection.close()

    def _next(self) -> tuple[list[str], list[str]]:
        """Wait until replies arrive or messages time out; return a batch of each."""
        with self._state:
            while not self._stopped:
                heap = self._deadlines
                while heap and heap[0][1] not in self._pending:
                    heapq.heappop(heap)
                if len(heap) > 2 * len(self._pending) + 1_000:  # drop finished messages
                    heap[:] = [item for item in heap if item[1] in self._pending]
                    heapq.heapify(heap)
                due: list[str] = []
                while heap and heap[0][0] <= now() and len(due) < _BATCH:
                    due.append(heapq.heappop(heap)[1])
                if due or self._arrived:
                    count = min(len(self._arrived), _BATCH)
                    return [self._arrived.popleft() for _ in range(count)], due
                self._state.wait(heap[0][0] - now() if heap else None)
        return [], []

    def _read(self, connection: Connection, arrived: list[str], due: list[str]) -> None:
        """Read replies. A message that is due may have one too: its notification can be lost."""
        ids = list(dict.fromkeys([*arrived, *due]))
        if not ids:
            return
        key = self.group.protocol.key
        found = connection.pipeline(
            [("HGETALL", key(f"message:{one}")) for one in ids], timeout_s=connection.timeout_s
        )
        late = set(due)
        for one, flat in zip(ids, found, strict=True):
            fields = read_fields(flat)
            if fields and int(fields.get("got", 0)) >= int(fields["need"]):
                self._complete(one, fields)
            elif one in late:
                self._expire(one, fields)

    def _complete(self, message: str, fields: dict[str, bytes]) -> None:
        pending = self._finish(message)
        if pending is None:
            return
        if pending.stored_once:
            self._finished.append(message)
        self._conclude(pending, read_replies(fields, self.group.name, self.codec))

    def _expire(self, message: str, fields: dict[str, bytes]) -> None:
        """Conclude a message that timed out, with the replies that have arrived."""
        pending = self._finish(message)
        if pending is None:
            return
        replies = read_replies(fields, self.group.name, self.codec)
        receivers = pending.receivers
        if "to" in fields:  # a message for any member may have moved to another one
            receivers = fields["to"].decode().split("\n")
        if pending.to == "all" and receivers:
            add_silent(replies, receivers, self.group.name, pending.timeout)
            self._conclude(pending, replies)
        else:
            error = MessageExpired(
                f"A message to group {self.group.name!r} got no reply within "
                f"{seconds_in_words(pending.timeout)}. It may have been handled, or may "
                "still be.",
                group=self.group.name,
                member=receivers[0] if pending.to == "member" and receivers else None,
                timeout=pending.timeout,
            )
            _end(pending.future, error)

    def _conclude(self, pending: Request, replies: Replies) -> None:
        future = pending.future
        if pending.to == "all":
            if pending.verb == "ask":
                _end(future, result=replies)
            elif replies.ok:
                _end(future)
            else:
                _end(future, self._partial(replies))
            return
        for error in replies.failed.values():
            _end(future, error)
            return
        value = next(iter(replies.values.values()), None)
        _end(future, result=value if pending.verb == "ask" else None)

    def _partial(self, replies: Replies) -> PartialFailure:
        first = next(iter(replies.failed.values()))
        return PartialFailure(
            f"{len(replies.failed)} of {len(replies.failed) + len(replies.values)} members of "
            f"group {self.group.name!r} did not acknowledge the message. The first: {first}",
            group=self.group.name,
            values=replies.values,
            failed=replies.failed,
        )

    def _finish(self, message: str) -> Request | None:
        with self._state:
            pending = self._pending.pop(message, None)
            self._state.notify_all()
            return pending

    def _closed_error(self) -> MessageFailed:
        return MessageFailed(
            f"This handle of group {self.group.name!r} was closed before a reply arrived.",
            group=self.group.name,
        )


def check_size(data: bytes) -> None:
    """Raise ``ValueError`` for a body that is too large."""
    if len(data) > BODY_BYTES_MAX:
        raise ValueError(
            f"The body of a message may have {BODY_BYTES_MAX:,} bytes, not {len(data):,}. Send a "
            "reference to the data instead."
        )


def _end(future: Future[Any], error: BaseException | None = None, result: Any = None) -> None:
    """Complete a future, unless it is already complete."""
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
    except InvalidStateError:
        pass  # the message has timed out
    except BaseException:  # from a callback; concurrent.futures logs an Exception itself
        if threading.current_thread() is threading.main_thread():
            raise
        _log.exception("A callback of a message's future failed.")
