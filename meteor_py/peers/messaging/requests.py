"""Requests: messages to members of a group that wait for replies.

A message is stored in the thread of the caller, so messages stay in the order of the calls. One
thread of the handle waits for the replies, and for the timeout of each message.
"""

from __future__ import annotations

import heapq
import logging
import secrets
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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

REPLIES_PREFIX = "meteor-replies"
#: Messages of a handle that may wait for a reply; beyond, sending waits.
PENDING_MAX = 10_000
#: Bytes of a body, or of a reply, at most.
BODY_BYTES_MAX = 1_048_576
#: Seconds between two tries, doubled each time up to the second figure.
_BACKOFF_S = (0.01, 0.3)
#: Seconds to wait for the server when the time of a message is over.
_LAST_LOOK_S = 1.0
#: Messages that are looked at together.
_BATCH = 100
#: Finished messages that the server was not told of yet. Others expire by themselves.
_OVER_MAX = 10_000


class Request(NamedTuple):
    """A message to be sent, without its body."""

    #: None if no member sends it.
    sender: MemberHandle | None
    verb: Verb
    to: To
    #: The id of the receiver, if it is for one member.
    member: str
    queue: str
    timeout: float
    priority: int
    include_dead: bool


@dataclass
class _Pending:
    """A message that waits for a reply."""

    request: Request
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    future: Future[Any] = field(default_factory=Future)
    receivers: list[str] = field(default_factory=list)
    #: Whether it is known to be stored by the only try: of it nothing can arrive any more.
    stored_once: bool = False


class Requests:
    """Owned by its group handle. Its thread is started with the first message that waits."""

    def __init__(self, group: GroupHandle, codec: PeerCodec) -> None:
        self.group = group
        self.codec = codec
        self._state = SignalSafeCondition()
        self._pending: dict[str, _Pending] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._arrived: deque[str] = deque()
        self._stopped = False
        self._thread: JoinableThread | None = None
        #: Finished messages: the server may forget them.
        self._over: deque[str] = deque(maxlen=_OVER_MAX)
        self._connections = ThreadConnections(group.protocol.connector.open_connection)
        self._in: Connection | None = None

    # -- sending -------------------------------------------------------------------------------

    def post(self, request: Request, body: Any) -> Future[Any]:
        """Store a message, and wait for its reply in the background."""
        self.group.check_owned()
        # It is closed later than the group: handlers that closing waits for may send.
        if self._stopped:
            self.group.check_open()
        kind, data = self.codec.encode(body)
        check_size(data)
        message = _Pending(request)
        message.future.set_running_or_notify_cancel()  # it cannot be called back
        deadline = now() + request.timeout
        try:
            if request.verb != "tell":
                self._await(message, deadline)
            message.receivers = self._store(message, [kind, data], deadline)
        except MeteorError as error:
            self._finish(message.id)
            _end(message.future, error)
        else:
            if (
                message.stored_once and message.id not in self._pending
            ):  # told, or replied to by now
                self._over.append(message.id)
            if request.verb == "tell":
                message.future.set_result(message.id)
        return message.future

    def _await(self, message: _Pending, deadline: float) -> None:
        """Before it is stored: the reply may arrive before we know that it is."""
        with self._state:
            # A callback of a reply would wait for the thread that it is called in.
            is_callback = threading.current_thread() is self._thread
            free = self._state.wait_for(
                lambda: len(self._pending) < PENDING_MAX or self._stopped,
                0.0 if is_callback else deadline - now(),
            )
            if self._stopped:
                raise self._closed_error()
            if not free:
                raise MessageExpired(
                    f"{PENDING_MAX} messages of this handle of group {self.group.name!r} wait for "
                    "replies; nothing was sent.",
                    group=self.group.name,
                )
            self._pending[message.id] = message
            heapq.heappush(self._deadlines, (deadline, message.id))
            if self._thread is None:
                name = f"{REPLIES_PREFIX}-{self.group.name}"
                self._thread = JoinableThread(self._run, name)
                self._thread.start()
            if self._deadlines[0][1] == message.id:
                self._state.notify_all()

    def _store(self, message: _Pending, body: list[Any], deadline: float) -> list[str]:
        """Put it into the inboxes; return whose. May be repeated: the server knows its id."""
        group, request, sender = self.group, message.request, message.request.sender
        args: list[Any] = [request.queue, request.verb, request.to, request.member]
        args += [secrets.randbelow(2**31), "1" if request.include_dead else "0", request.priority]
        args += [group.config.max_inbox, max(int(request.timeout * 1000), 1), *body]
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
                    raise self._refusal(code, reply, request.member)
                cause = None  # expelled: its heartbeat joins again, or gives it up
            failures += 1
            pause = pause_s(failures, *_BACKOFF_S)
            if now() + pause >= deadline:
                raise MessageExpired(
                    f"A message to group {group.name!r} could not be stored within "
                    f"{seconds_in_words(request.timeout)}, or it is not known whether it was.",
                    group=group.name,
                    timeout=request.timeout,
                ) from cause
            time.sleep(pause)

    def _try(self, args: list[Any], deadline: float) -> list[Any]:
        def send(connection: Connection) -> list[Any]:
            if self._stopped:
                raise self._closed_error()
            connection.timeout_s = min(
                self.group.protocol.connector.timeout_s, max(deadline - now(), 0.01)
            )
            return self.group.protocol.run(PEERS_SEND, [*args, self._take_over()], connection)

        return self._connections.use(send, deadline - now())

    def _take_over(self) -> str:
        """The ids of finished messages, for the server to forget."""
        over: list[str] = []
        while self._over and len(over) < _BATCH:
            try:
                over.append(self._over.popleft())
            except IndexError:
                break  # another thread was faster
        return " ".join(over)

    def _refusal(self, code: bytes, reply: list[Any], member: str) -> MeteorError:
        name = self.group.name
        if code == b"NOLEADER":
            return NoLeader(f"Group {name!r} has no leader now.", group=name)
        if code == b"FULL":
            whose = reply[1].decode()
            return InboxFull(
                f"Member {whose!r} of group {name!r} has as many messages as it may have "
                f"({self.group.config.max_inbox:,}); nothing was sent. Send again when it has "
                "handled some, or give the group a larger max_inbox.",
                group=name,
                member=whose,
            )
        if member:
            text = f"There is no member {member!r} in group {name!r}."
            return MemberUnknown(text, group=name, member=member)
        if self.group.view.members:
            return MemberUnknown(f"Nobody in group {name!r} is alive.", group=name)
        return MemberUnknown(f"Nobody is in group {name!r}.", group=name)

    # -- replies -------------------------------------------------------------------------------

    def reply_arrived(self, message: str) -> None:
        """All receivers have settled it. Called by the event reader: must not wait."""
        with self._state:
            if message in self._pending:
                self._arrived.append(message)
                self._state.notify_all()

    def close(self, deadline: float) -> None:
        """Fail what still waits, and end the thread, waiting for it until then by ``now()``."""
        with self._state:
            self._stopped = True
            self._state.notify_all()
            waiting = list(self._pending.values())
            self._pending.clear()
        self._connections.close()
        if self._in is not None:
            self._in.interrupt()
        for message in waiting:
            _end(message.future, self._closed_error())
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(deadline - now(), 0.0))
            if thread.is_alive():
                _log.warning("The requests of group %r does not end.", self.group.name)

    def _run(self) -> None:
        self._in = connection = self.group.protocol.connector.open_connection()
        connection.timeout_s = min(connection.timeout_s, _LAST_LOOK_S)
        failures = 0
        while not self._stopped:
            arrived, due = self._next()
            try:
                self._look(connection, arrived, due)
                failures = 0
            except ConnectionFailed:
                failures += 1
                with self._state:
                    self._arrived.extendleft(reversed(arrived))
                    pause = pause_s(failures, *_BACKOFF_S)
                    self._state.wait_for(lambda: self._stopped, pause)
            except BaseException:  # whatever it is: other messages wait for replies, too
                if not self._stopped:
                    _log.exception("The requests of group %r failed.", self.group.name)
            for message in due:
                self._expire(message, {})
        connection.close()

    def _next(self) -> tuple[list[str], list[str]]:
        """Wait for replies, or until messages time out; some of each."""
        with self._state:
            while not self._stopped:
                heap = self._deadlines
                while heap and heap[0][1] not in self._pending:
                    heapq.heappop(heap)
                if len(heap) > 2 * len(self._pending) + 1_000:  # else what is done stays for long
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

    def _look(self, connection: Connection, arrived: list[str], due: list[str]) -> None:
        """Read the replies. Messages that are due may have one too: the news of it can be lost."""
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
            self._over.append(message)
        self._conclude(pending, read_replies(fields, self.group.name, self.codec))

    def _expire(self, message: str, fields: dict[str, bytes]) -> None:
        """It timed out: conclude with the replies that have arrived."""
        pending = self._finish(message)
        if pending is None:
            return
        replies = read_replies(fields, self.group.name, self.codec)
        receivers = pending.receivers
        if "to" in fields:  # for any member: another one may have it by now
            receivers = fields["to"].decode().split("\n")
        if pending.request.to == "all" and receivers:
            add_silent(replies, receivers, self.group.name, pending.request.timeout)
            self._conclude(pending, replies)
        else:
            error = MessageExpired(
                f"A message to group {self.group.name!r} got no reply within "
                f"{seconds_in_words(pending.request.timeout)}; it may still be handled, or have "
                "been.",
                group=self.group.name,
                member=receivers[0] if pending.request.to == "member" and receivers else None,
                timeout=pending.request.timeout,
            )
            _end(pending.future, error)

    def _conclude(self, pending: _Pending, replies: Replies) -> None:
        future = pending.future
        if pending.request.to == "all":
            if pending.request.verb == "ask":
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
        _end(future, result=value if pending.request.verb == "ask" else None)

    def _partial(self, replies: Replies) -> PartialFailure:
        first = next(iter(replies.failed.values()))
        return PartialFailure(
            f"{len(replies.failed)} of {len(replies.failed) + len(replies.values)} members of "
            f"group {self.group.name!r} did not take the message; the first: {first}",
            group=self.group.name,
            values=replies.values,
            failed=replies.failed,
        )

    def _finish(self, message: str) -> _Pending | None:
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
            f"The body of a message may have {BODY_BYTES_MAX} bytes, not {len(data)}; send where "
            "it is, instead of what it is."
        )


def _end(future: Future[Any], error: BaseException | None = None, result: Any = None) -> None:
    """Complete a future; what is done stays as it is."""
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
    except InvalidStateError:
        pass  # it timed out first
    except BaseException:  # of a callback: what is an Exception was logged already
        if threading.current_thread() is threading.main_thread():
            raise
        _log.exception("A callback of a reply failed.")
