"""Requests: the messages that a group handle sends, and the replies to them.

A call queue stores the messages in the order in which they were sent. Messages that arrive while a
call is in progress share the next call. Each call has a number, so that the server recognizes a
repeat after a lost reply. The event reader completes most futures. Another thread reads the other
replies, ends messages that time out, and runs the callbacks on futures.
"""

from __future__ import annotations

import heapq
import logging
import math
import random
import secrets
import threading
from collections import deque
from collections.abc import Callable
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
from meteor_py.peers.messaging.call_queue import CallQueue
from meteor_py.peers.messaging.replies import (
    Replies,
    add_silent,
    no_handler,
    read_replies,
    reply_type,
)
from meteor_py.peers.protocol import read_fields
from meteor_py.records.times import seconds_in_words
from meteor_py.redis.scripts import PEERS_SEND
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

#: Maximum number of unfinished messages per handle; further calls block.
PENDING_MAX = 10_000
#: Maximum size of a body or reply in bytes.
BODY_BYTES_MAX = 1_048_576
#: Shortest and longest pause between attempts, in seconds. The pause doubles each time.
_BACKOFF_S = (0.01, 0.3)
#: Maximum seconds that the reply thread waits for the server when it reads replies.
_LAST_READ_S = 1.0
#: Maximum number of messages that one call stores, or whose replies one call reads.
_BATCH = 100
#: Message bytes after which a call takes no more messages.
_BATCH_BYTES = 262_144
#: Maximum total bytes of messages waiting to be stored; further calls block.
_UNSENT_BYTES_MAX = 64 * 1_048_576
#: After this many seconds without a pending message, the reply thread sleeps until the next one.
_IDLE_S = 1.0
#: Maximum number of finished messages waiting to be reported to the server. Messages that are never
#: reported expire on the server.
_FINISHED_MAX = 10_000


class MessageFuture(Future[Any]):
    """A message's future.

    A callback may block, so only one thread may run callbacks. ``try_end`` lets any other thread
    complete a future that has no callbacks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gate = threading.RLock()  # a signal handler may add a callback at any time
        self._has_callbacks = False

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        with self._gate:
            self._has_callbacks = True
        super().add_done_callback(fn)

    def try_end(self, error: BaseException | None, result: Any) -> bool:
        """Complete the future; return False if it has callbacks."""
        with self._gate:
            if self._has_callbacks:
                return False
            _end(self, error, result)
            return True


@dataclass(eq=False)
class Request:
    """A message to send."""

    #: The member that sends it; None if it is sent through a ``PeerGroup``.
    sender: MemberHandle | None
    verb: Verb
    to: To
    #: The receiver's id, if ``to`` is "member".
    member: str
    queue: str
    timeout: float
    priority: int
    #: The options of the message, as ``peers/send.lua`` expects them.
    options: str
    id: str = ""
    future: MessageFuture = field(default_factory=MessageFuture)
    receivers: list[str] = field(default_factory=list)
    #: The body's type and bytes, until the message is stored.
    kind: str = ""
    data: bytes = b""
    #: When the sender stops waiting, on the ``now()`` clock.
    deadline: float = 0.0

    def identity(self) -> tuple[str, str]:
        """Return the sender's id and session; both are empty if the sender is not a member."""
        return ("", "") if self.sender is None else (self.sender.id, self.sender.session)


@dataclass(eq=False)
class _Batch:
    """A call that stores messages. A repeat has the same number and the same arguments."""

    session: str
    number: int
    messages: list[Request]
    args: list[Any]
    failures: int = 0


class Requests:
    """One group handle's requests. The first message starts the threads."""

    def __init__(self, group: GroupHandle, codec: PeerCodec) -> None:
        self.group = group
        self.codec = codec
        lock = threading.RLock()
        #: Wakes the reply thread.
        self._state = SignalSafeCondition(lock)
        #: Wakes callers that wait for room.
        self._room = SignalSafeCondition(lock)
        #: All unfinished messages, by id.
        self._pending: dict[str, Request] = {}
        #: The messages that no call has taken yet, and their total size.
        self._unsent: deque[Request] = deque()
        self._unsent_bytes = 0
        self._batch: _Batch | None = None
        #: Counters that number the messages and the calls.
        self._messages = self._batches = 0
        self._random = random.Random()  # chooses a member; seeded by the operating system
        #: Failed calls from the main thread, which the call queue repeats.
        self._failed: deque[_Batch] = deque()
        #: Number of consecutive calls in which the server reported an expelled sender.
        self._stale = 0
        self._deadlines: list[tuple[float, str]] = []
        #: When the reply thread next looks for messages that have timed out (``now()`` clock).
        self._looks_at = 0.0
        self._arrived: deque[str] = deque()
        self._ended: deque[tuple[MessageFuture, BaseException | None, Any]] = deque()
        self._stopped = False
        self._thread: JoinableThread | None = None
        #: Finished messages, which the server may delete.
        self._finished: deque[str] = deque(maxlen=_FINISHED_MAX)
        self._out = group.protocol.open_connection()
        self._direct = group.protocol.open_connection()
        self._direct_session = secrets.token_hex(8)
        self._calls = CallQueue(
            f"meteor-sender-{group.name}",
            SignalSafeCondition(lock),
            self._is_sending,
            self._send_batch,
        )
        self._in: Connection | None = None

    # -- sending -------------------------------------------------------------------------------

    def post(self, message: Request, body: Any) -> Future[Any]:
        """Store a message, and wait for its reply in the background."""
        self.group.check_owned()
        # Requests close later than the group: handlers that close() waits for may still send.
        if self._stopped:
            self.group.check_open()
        message.kind, message.data = self.codec.encode(body)
        check_size(message.data)
        message.future.set_running_or_notify_cancel()  # a sent message cannot be cancelled
        message.deadline = now() + message.timeout
        try:
            if message.sender is not None and message.sender.lost.is_set():
                raise message.sender.lost_error()
            alone = self._queue(message)
        except MeteorError as error:
            _end(message.future, error)
            return message.future
        if alone and threading.current_thread() is threading.main_thread():
            self._send_directly(message)
        else:
            self._calls.send(here=alone)
        return message.future

    def _queue(self, message: Request) -> bool:
        """Queue a message; return whether the caller should send it, because no other message is
        unfinished. A ``tell`` is left to the queue's thread, so that the next message can share the
        call."""
        with self._state:
            # A future's callback must not wait for room: it runs in the thread that makes room.
            is_callback = threading.current_thread() is self._thread
            free = self._room.wait_for(
                lambda: self._has_room() or self._stopped,
                0.0 if is_callback else message.timeout,
            )
            if self._stopped:
                raise self._closed_error()
            if not free:
                raise MessageExpired(
                    f"This handle for group {self.group.name!r} has no room for another message: "
                    f"{len(self._pending):,} messages are unfinished, and {self._unsent_bytes:,} "
                    "bytes wait to be stored. Nothing was sent. Wait until some messages finish.",
                    group=self.group.name,
                )
            self._messages += 1
            message.id = f"{self.group.reply_session}{self._messages:08x}"
            alone = not self._pending and message.verb != "tell"
            self._pending[message.id] = message
            heapq.heappush(self._deadlines, (message.deadline, message.id))
            if self._thread is None:
                self._thread = JoinableThread(self._run, f"meteor-replies-{self.group.name}")
                self._thread.start()
            if message.deadline < self._looks_at:
                self._state.notify_all()
            if alone and threading.current_thread() is threading.main_thread():
                return True
            self._unsent.append(message)
            self._unsent_bytes += len(message.data)
            return alone

    def _has_room(self) -> bool:
        return len(self._pending) < PENDING_MAX and self._unsent_bytes < _UNSENT_BYTES_MAX

    def _is_sending(self) -> bool:
        return self._batch is not None or bool(self._unsent or self._failed)

    def _send_directly(self, message: Request) -> None:
        """Send this handle's only unfinished message in the main thread.

        A signal handler may interrupt this method at any point, or raise an exception. So the main
        thread shares neither its connection nor its session with the call queue.
        """
        self._batches += 1
        batch = _Batch(self._direct_session, self._batches, [message], self._arguments(message))
        try:
            self._settle_batch(batch, self._call(batch, self._direct))
        except ConnectionFailed:
            with self._state:
                self._failed.append(batch)
                self._calls.wake()
        except MeteorError as error:
            self._fail(message.id, error)

    def _send_batch(self) -> float:
        """Take the call queue's turn: make one call, and return the seconds until the next turn."""
        with self._state:
            if self._batch is None:
                self._batch = self._failed.popleft() if self._failed else self._next_batch()
            batch = self._batch
        if batch is None:
            return 0.0
        try:
            self._settle_batch(batch, self._call(batch, self._out))
        except ConnectionFailed:
            if any(message.id in self._pending for message in batch.messages):
                batch.failures += 1
                return pause_s(batch.failures, *_BACKOFF_S)
        except MeteorError as error:
            for message in batch.messages:
                self._fail(message.id, error)
        self._batch = None
        return pause_s(self._stale, *_BACKOFF_S) if self._stale else 0.0

    def _next_batch(self) -> _Batch | None:
        messages: list[Request] = []
        args: list[Any] = []
        size = 0
        while self._unsent and len(messages) < _BATCH and size < _BATCH_BYTES:
            message = self._unsent.popleft()
            self._unsent_bytes -= len(message.data)
            if message.id not in self._pending:
                continue  # it has timed out
            messages.append(message)
            args += self._arguments(message)
            size += len(message.data)
        if not messages:
            return None
        self._batches += 1
        return _Batch(self.group.reply_session, self._batches, messages, args)

    def _arguments(self, message: Request) -> list[Any]:
        return [
            *(message.id, *message.identity(), message.queue, message.verb, message.to),
            *(message.member, self._random.getrandbits(31), message.options, message.priority),
            *(max(int(message.timeout * 1000), 1), message.kind, message.data),
        ]

    def _call(self, batch: _Batch, connection: Connection) -> list[str]:
        left_s = max(message.deadline for message in batch.messages) - now()
        connection.timeout_s = min(self.group.protocol.connector.timeout_s, max(left_s, 0.01))
        for is_swept in ("", "1"):
            args = [
                self.group.reply_session,
                batch.session,
                batch.number,
                is_swept,
                self._take_finished(),
                *batch.args,
            ]
            reply = self.group.protocol.run(PEERS_SEND, args, connection)
            if reply[0] != b"IDLE":
                break
            self.group.protocol.heartbeat(connection, "", [])
        if reply[0] == b"OLD":
            raise MessageFailed(
                f"The server has already stored later messages from this handle for group "
                f"{self.group.name!r}. This message may or may not have been stored.",
                group=self.group.name,
            )
        return [result.decode() for result in reply[1:]]

    def _settle_batch(self, batch: _Batch, results: list[str]) -> None:
        """Process the results of a call. Messages without a result, and messages whose sender was
        expelled but may rejoin, are sent again, before all later messages."""
        again: list[Request] = []
        stale = False
        for number, message in enumerate(batch.messages):
            result = results[number].split("\n") if number < len(results) else None
            if result is not None and result[0] == "STALE" and message.sender is not None:
                if message.sender.lost.is_set():
                    self._fail(message.id, message.sender.lost_error())
                    continue
                stale = True
                again.append(message)
                self.group.heartbeat.hurry()
            elif result is None:
                again.append(message)
            elif result[0] == "OK":
                self._stored(message, result[1:])
            else:
                self._fail(message.id, self._refusal(result, message))
        with self._state:
            self._stale = self._stale + 1 if stale else 0
            for message in reversed(again):
                self._unsent.appendleft(message)
                self._unsent_bytes += len(message.data)
            if again:
                self._calls.wake()
            self._room.notify_all()

    def _stored(self, message: Request, receivers: list[str]) -> None:
        message.receivers = receivers
        message.data = b""
        if message.verb != "tell":
            return
        if self._finish(message.id) is not None:
            self._end(message.future, result=message.id)

    def _take_finished(self) -> str:
        """Return the ids of some finished messages, so that the server can delete them."""
        ids: list[str] = []
        with suppress(IndexError):  # empty; checking first would be a race
            while len(ids) < _BATCH:
                ids.append(self._finished.popleft())
        return " ".join(ids)

    def _refusal(self, result: list[str], message: Request) -> MeteorError:
        name, code, member = self.group.name, result[0], message.member
        if code == "NOLEADER":
            text = f"Group {name!r} currently has no leader. Try again later."
            return NoLeader(text, group=name)
        if code == "FULL":
            full = result[1]
            return InboxFull(
                f"Member {full!r} of group {name!r} already has {self.group.config.max_inbox:,} "
                "unsettled messages (max_inbox). Nothing was sent. Send the message again later, "
                "or recreate the group with a larger max_inbox.",
                group=name,
                member=full,
            )
        if code == "NOHANDLER":
            return no_handler(message.queue, name, member or None, is_leader=message.to == "leader")
        if member:
            text = f"Group {name!r} has no member {member!r}."
            return MemberUnknown(text, group=name, member=member)
        if self.group.view.members:
            return MemberUnknown(f"No member of group {name!r} is alive.", group=name)
        return MemberUnknown(f"Group {name!r} has no members.", group=name)

    def flush(self, sender: MemberHandle, deadline: float) -> None:
        """Wait until a member's messages are stored, or until ``deadline`` (``now()`` clock)."""
        with self._state:
            batch = self._batch.messages if self._batch is not None else []
            unsent = any(message.sender is sender for message in (*batch, *self._unsent))
        if unsent:
            self._calls.drain(deadline)

    # -- replies -------------------------------------------------------------------------------

    def reply_arrived(self, fields: dict[str, bytes]) -> None:
        """Process a notification that all receivers settled a message. The event reader calls this
        method, so it must not block."""
        message = fields["id"].decode()
        with self._state:
            pending = self._pending.get(message)
            if pending is None:
                return
            reply = fields.get("reply")
            # A registered type is decoded by an application function, which may block.
            if reply is None or not self.codec.is_plain(reply_type(reply)):
                self._arrived.append(message)
                self._state.notify_all()
                return
        self._complete(message, {f"r:{fields['member'].decode()}": reply})

    def close(self, deadline: float) -> None:
        """Store the waiting messages, fail all messages that have no reply yet, and join the
        threads, all until ``deadline`` (``now()`` clock)."""
        self._calls.drain(deadline)
        with self._state:
            self._stopped = True
            self._state.notify_all()
            self._room.notify_all()
            waiting = list(self._pending.values())
            self._pending.clear()
        self._calls.stop()
        self._wake()
        for message in waiting:
            _end(message.future, self._closed_error())
        self._run_callbacks()
        thread = self._thread
        ended = thread is None or thread.ends_within(max(deadline - now(), 0.0), self._wake)
        if not (self._calls.join(deadline, self._out.interrupt) and ended):
            _log.warning("A message thread for group %r did not end in time.", self.group.name)
        if self._calls.is_free:
            self._out.close()
        self._direct.interrupt()
        if threading.current_thread() is threading.main_thread():
            self._direct.close()

    def _wake(self) -> None:
        if self._in is not None:
            self._in.interrupt()

    def _run(self) -> None:
        self._in = connection = self.group.protocol.open_connection()
        connection.timeout_s = min(connection.timeout_s, _LAST_READ_S)
        failures = 0
        while not self._stopped:
            arrived, due = self._next()
            self._run_callbacks()
            try:
                self._read(connection, arrived, due)
                failures = 0
            except ConnectionFailed:
                failures += 1
                with self._state:
                    self._arrived.extendleft(reversed(arrived))
                    pause = pause_s(failures, *_BACKOFF_S)
                    self._state.wait_for(lambda: self._stopped, pause)
            except BaseException:  # catch everything: other messages are waiting for replies
                if not self._stopped:
                    _log.exception("Reading replies from group %r failed.", self.group.name)
            for message in due:
                self._expire(message, {})
        connection.close()

    def _next(self) -> tuple[list[str], list[str]]:
        """Wait until replies arrive or messages time out; return a batch of each."""
        idle = False
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
                if due or self._arrived or self._ended:
                    count = min(len(self._arrived), _BATCH)
                    return [self._arrived.popleft() for _ in range(count)], due
                # Check again soon even if no message is pending. A message that is sent before this
                # check need not wake the thread, and most messages finish without it.
                self._looks_at = heap[0][0] if heap else math.inf if idle else now() + _IDLE_S
                idle = not self._state.wait(
                    None if math.isinf(self._looks_at) else self._looks_at - now()
                )
        return [], []

    def _run_callbacks(self) -> None:
        """Complete futures that have callbacks."""
        with suppress(IndexError):  # another thread may take the last one
            while self._ended:
                _end(*self._ended.popleft())

    def _read(self, connection: Connection, arrived: list[str], due: list[str]) -> None:
        """Read replies. A message that has timed out (``due``) may have a reply whose notification
        was lost."""
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
        self._finished.append(message)
        self._conclude(pending, read_replies(fields, self.group.name, self.codec))

    def _expire(self, message: str, fields: dict[str, bytes]) -> None:
        """Conclude a message that timed out, with the replies that have arrived."""
        pending = self._finish(message)
        if pending is None:
            return
        if not pending.receivers and not fields:
            self._end(pending.future, self._not_stored(pending))
            return
        replies = read_replies(fields, self.group.name, self.codec)
        receivers = pending.receivers
        # This process does not know the receivers if the reply to the call that stored the message
        # was lost.
        if "to" in fields:
            receivers = fields["to"].decode().split("\n")
        if pending.to == "all" and receivers:
            add_silent(replies, receivers, self.group.name, pending.timeout)
            self._conclude(pending, replies)
        else:
            error = MessageExpired(
                f"A message to group {self.group.name!r} got no reply within "
                f"{seconds_in_words(pending.timeout)}. It may already have been handled, or may be "
                "handled later.",
                group=self.group.name,
                member=receivers[0] if pending.to == "member" and receivers else None,
                timeout=pending.timeout,
            )
            self._end(pending.future, error)

    def _not_stored(self, message: Request) -> MessageExpired:
        return MessageExpired(
            f"A message to group {self.group.name!r} could not be stored within "
            f"{seconds_in_words(message.timeout)}. If the server's reply was lost, the message may "
            "still have been stored.",
            group=self.group.name,
            timeout=message.timeout,
        )

    def _conclude(self, pending: Request, replies: Replies) -> None:
        future = pending.future
        if pending.to == "all":
            if pending.verb == "ask":
                self._end(future, result=replies)
            elif replies.ok:
                self._end(future)
            else:
                self._end(future, self._partial(replies))
            return
        for error in replies.failed.values():
            self._end(future, error)
            return
        value = next(iter(replies.values.values()), None)
        self._end(future, result=value if pending.verb == "ask" else None)

    def _partial(self, replies: Replies) -> PartialFailure:
        first = next(iter(replies.failed.values()))
        return PartialFailure(
            f"{len(replies.failed)} of {len(replies.failed) + len(replies.values)} members of "
            f"group {self.group.name!r} did not acknowledge the message. First error: {first}",
            group=self.group.name,
            values=replies.values,
            failed=replies.failed,
        )

    def _fail(self, message: str, error: MeteorError) -> None:
        pending = self._finish(message)
        if pending is not None:
            self._end(pending.future, error)

    def _finish(self, message: str) -> Request | None:
        with self._state:
            pending = self._pending.pop(message, None)
            self._room.notify_all()
            return pending

    def _end(
        self, future: MessageFuture, error: BaseException | None = None, result: Any = None
    ) -> None:
        """Complete a future in this thread, or in the thread that runs callbacks."""
        if threading.current_thread() is self._thread or self._stopped:
            _end(future, error, result)
        elif not future.try_end(error, result):
            with self._state:
                self._ended.append((future, error, result))
                self._state.notify_all()

    def _closed_error(self) -> MessageFailed:
        return MessageFailed(
            f"This handle for group {self.group.name!r} was closed before a reply arrived.",
            group=self.group.name,
        )


def check_size(data: bytes) -> None:
    """Raise ``ValueError`` for a body that is too large."""
    if len(data) > BODY_BYTES_MAX:
        raise ValueError(
            f"A message body is limited to {BODY_BYTES_MAX:,} bytes, but this one has "
            f"{len(data):,}. Send a reference to the data instead."
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
    except BaseException:  # from a callback; concurrent.futures itself logs any Exception
        if threading.current_thread() is threading.main_thread():
            raise
        _log.exception("A callback on a message's future raised an exception.")
