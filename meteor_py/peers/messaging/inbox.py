"""An inbox: the messages of one member, and the handlers that take them.

The server keeps unsettled messages in a stream. One thread reads it and passes a bounded part of
each queue to a dispatcher, whose threads call the handlers. Queues without a handler are skipped. A
queue with more messages than this process may hold is *behind*: the thread continues it, from its
own place, when there is room.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from meteor_py.errors import ConnectionFailed, MeteorError, PeerGroupNotFound
from meteor_py.peers.codec import UnknownType
from meteor_py.peers.messaging.dispatcher import Dispatcher
from meteor_py.peers.messaging.message import Message, Place, read_message, read_place
from meteor_py.peers.messaging.requests import check_size
from meteor_py.records.config import check_choice, check_function, check_int, check_seconds
from meteor_py.redis import keys
from meteor_py.redis.scripts import PEERS_SETTLE
from meteor_py.redis.shared_connection import ThreadConnections
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread

if TYPE_CHECKING:
    from meteor_py.peers.member_handle import MemberHandle

_log = logging.getLogger(__name__)

INBOX_PREFIX = "meteor-inbox"
HANDLER_PREFIX = "meteor-handler"
#: Threads of one handler at most.
WORKERS_MAX = 256
#: Entries that are read at a time.
_COUNT = 100
#: Settled messages that are remembered, not to be taken for new ones when all is read again.
_DONE_MAX = 10_000
#: Seconds after which a queue that is behind, and full, is looked at again.
_FULL_S = 0.02
#: Seconds between two tries, doubled each time up to the second figure.
_BACKOFF_S = (0.02, 0.64)
#: Seconds that settling is tried for, if the application waits for it.
_SETTLE_S = 10.0


Ack = Literal["auto", "manual"]
#: A message and its place: after a fail-over another may have that.
Key = tuple[Place, str]

#: Messages and bytes of one queue that are held here, unsettled.
HELD_MAX = 1_000
HELD_BYTES_MAX = 64 * 1_048_576
#: Before all places.
START: Place = (0, 0)


class QueueState:
    """One queue of an inbox, with its handler and the messages held for it.

    Changed under the lock of its inbox.
    """

    def __init__(
        self,
        inbox: Inbox,
        queue: str,
        function: Callable[[Message], object] | None,
        *,
        ack: Ack = "manual",
        priority: int = 0,
        timeout: float | None = None,
    ) -> None:
        self.inbox = inbox
        self.queue = queue
        self.function = function
        self.ack = ack
        self.priority = priority
        self.timeout = timeout
        self.dispatcher: Dispatcher
        #: Up to where it was read, and whether it gets new messages.
        self.place = START
        self.live = False
        self.held: dict[Key, Message] = {}
        self.bytes = 0

    @property
    def full(self) -> bool:
        return len(self.held) >= HELD_MAX or self.bytes >= HELD_BYTES_MAX

    @property
    def roomy(self) -> bool:
        return len(self.held) <= HELD_MAX // 2 and self.bytes <= HELD_BYTES_MAX // 2


class Inbox:
    """Owned by its membership. The reader and the settling have connections of their own."""

    def __init__(self, member: MemberHandle) -> None:
        self._member = member
        self._group = member.group
        self._state = SignalSafeCondition()
        self._queues: dict[str, QueueState] = {}
        self._dispatchers: list[Dispatcher] = []
        self._turns: Dispatcher | None = None  # for handlers that take turns
        self._done: dict[Key, None] = {}
        self._cursor: bytes | None = None
        self._identity = ("", "")
        self._fenced_until = 0.0
        self._reload = True
        self._woken = False
        self._started = False
        self._stopped = False
        connector = self._group.protocol.connector
        self._connection = connector.open_connection()
        self._connections = ThreadConnections(connector.open_connection)
        self._thread = JoinableThread(self._run, f"{INBOX_PREFIX}-{self._group.name}")

    # -- handlers ------------------------------------------------------------------------------

    def on(
        self,
        queue: str,
        function: Callable[[Message], object],
        *,
        workers: int,
        priority: int | None,
        ack: Ack,
        timeout: float | None,
    ) -> None:
        check_function("on", function)
        check_int("workers", workers, 1, WORKERS_MAX)
        check_choice("ack", ack, ("auto", "manual"))
        if timeout is not None:
            check_seconds("timeout", timeout)
        if priority is not None:
            check_int("priority", priority, 1, 256)
            if workers != 1:
                raise ValueError("Handlers with a priority take turns in one thread: workers=1.")
        state = QueueState(self, queue, function, ack=ack, priority=priority or 0, timeout=timeout)
        with self._state:
            self._add(state)
            name = f"{HANDLER_PREFIX}-{self._group.name}"
            if priority is None:
                state.dispatcher = self._open_dispatcher(f"{name}-{queue}", workers)
            else:
                self._turns = self._turns or self._open_dispatcher(name, 1)
                state.dispatcher = self._turns
            self._queues[queue] = state
        self._wake()

    def pull(self, queue: str, timeout: float | None) -> Iterator[Message]:
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        with self._state:
            state = self._queues.get(queue)
            if state is None or state.function is not None:
                state = QueueState(self, queue, None)
                self._add(state)
                state.dispatcher = self._open_dispatcher("", 0)
                self._queues[queue] = state
                self._wake()
        return self._iterate(state, timeout)

    def _add(self, state: QueueState) -> None:
        """Check a queue, and begin to read with the first."""
        keys.check_name(state.queue, "queue")
        if self._stopped:
            raise self._member.lost_error()
        if state.queue in self._queues:
            raise ValueError(
                f"The queue {state.queue!r} of member {self._member.id!r} has a handler, or an "
                "iterator, already; give it more workers, or choose another name."
            )
        if not self._started:
            self._started = True
            self._thread.start()

    def _open_dispatcher(self, name: str, workers: int) -> Dispatcher:
        dispatcher = Dispatcher(name, self._handle, workers)
        self._dispatchers.append(dispatcher)
        dispatcher.start()
        return dispatcher

    def _iterate(self, state: QueueState, timeout: float | None) -> Iterator[Message]:
        while True:
            message = state.dispatcher.take(timeout)
            if message is None:
                return
            if self._open(message):
                yield message

    # -- handling ------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        """Called in a thread of a dispatcher."""
        state = _state_of(message)
        assert state.function is not None, "only those with a function have threads"
        try:
            if not self._open(message):
                return
            turn = message.deliveries
            try:
                value = state.function(message)
            except BaseException as error:  # also SystemExit: others wait in this queue
                _log.warning("The handler of %r failed.", state.queue, exc_info=True)
                if message.deliveries == turn:
                    self.settle(message, "failed", "", _reason(error), patient=True)
            else:
                if state.ack == "auto" and message.deliveries == turn:  # else it is to come again
                    self._reply_to(message, value)
        except BaseException:  # also SystemExit: of a codec's function
            _log.exception("Message %s of queue %r was not settled.", message.id, state.queue)

    def _reply_to(self, message: Message, value: object) -> None:
        try:
            kind, data = self._encode(message, value)
        except BaseException as error:  # whatever it is: the sender waits
            _log.warning("What the handler of %r returned cannot be sent.", message.queue)
            reason = b"What it returned cannot be sent: " + _reason(error)
            self.settle(message, "failed", "", reason, patient=True)
        else:
            self.settle(message, "ok", kind, data, patient=True)

    def _open(self, message: Message) -> bool:
        """Decode it; False if it is over, or cannot be read here, and is settled so."""
        state = _state_of(message)
        if state.timeout is not None:
            message.overdue_at = now() + state.timeout
        clock = self._group.clock
        if message.verb != "tell" and clock.now() - clock.error_bound > message.until:
            self.settle(message, "expired", "", b"", patient=True)
            return False
        try:
            message.body = self._group.requests.codec.decode(message.kind, message.data)
        except UnknownType as error:
            _log.error("Message %s goes to the dead letters: %s", message.id, error)
            reason = str(error).encode(errors="replace")
            self.settle(message, "unknown", "", reason, patient=True)
            return False
        return True

    def reply(self, message: Message, value: object) -> bool:
        return self.settle(message, "ok", *self._encode(message, value))

    def _encode(self, message: Message, value: object) -> tuple[str, bytes]:
        """The reply, if the sender asked for one."""
        if message.verb != "ask":
            return "", b""
        kind, data = self._group.requests.codec.encode(value)
        check_size(data)
        return kind, data

    def put_back(self, message: Message, delay: float) -> bool:
        with self._state:
            if message.settled or message.dropped or not message.taken:
                return False
            message.taken = False
            message.overdue_at = None
            message.deliveries += 1
        state = _state_of(message)
        state.dispatcher.put(message, state.priority, delay)
        return True

    def settle(
        self, message: Message, code: str, kind: str, data: bytes, *, patient: bool = False
    ) -> bool:
        """Settle a message; a patient caller tries for as long as it is a member."""
        with self._state:
            if message.settled or not message.taken:
                return False
            message.settled = True
        try:
            counted = self._settle(message, code, kind, data, patient)
        except BaseException:
            message.settled = False  # it may be called again
            raise
        if counted is None:
            _log.warning(
                "Member %r is not in this process any more: message %s was not settled here.",
                message.member,
                message.id,
            )
        self._let_go(message, fenced=counted is None)
        return bool(counted)

    def _settle(
        self, message: Message, code: str, kind: str, data: bytes, patient: bool
    ) -> bool | None:
        """Tell the server; None if the message is not this member's any more."""
        member = self._member
        deadline = now() + _SETTLE_S
        place = f"{message.place[0]}-{message.place[1]}"
        failures = 0
        while True:
            session = member.session
            # With another id, what it had went with the old one.
            if member.id != message.member or member.lost.is_set():
                return None
            args = [message.member, session, place, message.id, code, kind, data]
            try:
                reply = self._connections.use(
                    partial(self._group.protocol.run, PEERS_SETTLE, args), _SETTLE_S
                )
            except PeerGroupNotFound:
                return None  # the server has lost the whole group
            except MeteorError as error:
                failures += 1
                retriable = isinstance(error, ConnectionFailed)
                if not (patient or (retriable and now() < deadline)):
                    raise
                if failures == 1:
                    _log.warning("Message %s is not settled yet: %s", message.id, error)
                member.lost.wait(pause_s(failures, *_BACKOFF_S))
                continue
            if reply[0] != b"FENCED":
                return bool(reply[1])
            if session == member.session:
                return None

    def _let_go(self, message: Message, fenced: bool) -> None:
        state = _state_of(message)
        with self._state:
            key = (message.place, message.id)
            if state.held.pop(key, None) is not None:
                state.bytes -= len(message.data)
            if fenced:
                # If it joins again by itself, its messages come again. Until then, or until its
                # heartbeat has had time to notice, no message is handled that may be another's.
                self._fenced_until = now() + self._group.config.ttl / 3
                self._drop_waiting()
                self._reload = True
                return
            self._done[key] = None
            while len(self._done) > _DONE_MAX:
                del self._done[next(iter(self._done))]

    # -- reading -------------------------------------------------------------------------------

    def rejoined(self) -> None:
        """The member has another session: read all again."""
        self._fenced_until = 0.0
        self._wake()

    @property
    def busy(self) -> bool:
        """Whether a handler is at work, in another thread."""
        return any(dispatcher.busy for dispatcher in self._dispatchers)

    def stop(self, *, close: bool) -> None:
        """Take no more; closed, it settles nothing either."""
        with self._state:
            self._stopped = True
            self._state.notify_all()
            dispatchers = list(self._dispatchers)
        for dispatcher in dispatchers:
            dispatcher.stop()
        self._connection.interrupt()
        if close:
            self._connections.close()

    def join(self, timeout_s: float) -> bool:
        """Wait for all threads but the present one; whether they have ended."""
        deadline = now() + timeout_s
        if self._started and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        ended = [dispatcher.join(deadline) for dispatcher in self._dispatchers]
        return all(ended) and not self._thread.is_alive()

    def _wake(self) -> None:
        with self._state:
            self._woken = True
            self._state.notify_all()
        self._connection.interrupt()

    def _run(self) -> None:
        failures = 0
        while not self._stopped:
            try:
                self._step()
                failures = 0
                continue
            except ConnectionFailed:
                failures += 1
            except Exception:
                if not self._stopped:
                    _log.exception("The inbox of %r failed.", self._member)
                failures += 1
            with self._state:
                woken, self._woken = self._woken, False
                if woken:
                    failures = 0
                    continue
                # Another server may have been promoted, on which some messages are not there, and
                # new ones may come before where we are.
                self._read_again()
                self._state.wait_for(
                    lambda: self._stopped or self._woken, pause_s(failures, *_BACKOFF_S)
                )
        self._connection.close()

    def _step(self) -> None:
        """Read for queues that are behind, then new messages."""
        member = self._member
        identity = (member.id, member.session)
        with self._state:
            self._woken = False
            left = self._fenced_until - now()
            if left > 0:
                self._state.wait_for(lambda: self._stopped or self._woken, left)
                return
            if identity != self._identity:
                self._identity = identity
                self._drop_waiting()
                self._reload = True
            if self._reload:
                self._reload = False
                self._read_again()
            queues = list(self._queues.values())
        key = self._group.protocol.key(f"inbox:{identity[0]}")
        if self._cursor is None:
            last = self._connection.call("XREVRANGE", key, "+", "-", "COUNT", 1)
            self._cursor = last[0][0] if last else b"0-0"
        self._fail_overdue(queues)
        for state in queues:
            if not state.live and state.roomy:
                self._catch_up(state, key)
        block_s = self._block_s(queues)
        block = ("BLOCK", max(int(block_s * 1000), 1)) if block_s > 0 else ()
        found = self._connection.call(
            *("XREAD", "COUNT", _COUNT, *block, "STREAMS", key, self._cursor),
            timeout_s=block_s + self._connection.timeout_s,
        )
        for entry, flat in found[0][1] if found else ():
            self._cursor = entry
            receiving = self._queues.get(_queue_of(flat))
            if receiving is not None and receiving.live:
                self._take(receiving, entry, flat)

    def _block_s(self, queues: list[QueueState]) -> float:
        """How long the server may let us wait for new messages."""
        if any(not state.live and state.roomy for state in queues) or self._woken:
            return 0.0
        times = [self._connection.block_max_s]
        times += [_FULL_S for state in queues if not state.live]
        times += [_patience_s(state) for state in queues if state.timeout is not None]
        return min(times)

    def _catch_up(self, state: QueueState, key: str) -> None:
        """Read on for a queue that is behind; it goes live at the end of the stream."""
        ms, number = state.place
        page = self._connection.call("XRANGE", key, f"{ms}-{number}", "+", "COUNT", _COUNT)
        for entry, flat in page:
            place = read_place(entry)
            if _queue_of(flat) != state.queue:
                state.place = max(state.place, place)
            elif not self._take(state, entry, flat):
                return
        if len(page) < _COUNT:
            state.live = True

    def _take(self, state: QueueState, entry: bytes, flat: list[bytes]) -> bool:
        """Pass a message to its dispatcher; False if there is no room, and it must wait."""
        place = read_place(entry)
        if place <= state.place:
            return True  # it was looked at already
        clock = self._group.clock
        time = self._group.now()
        message = read_message(self._identity[0], entry, flat, time, clock.error_bound)
        message.queue_state = state
        with self._state:
            key = (place, message.id)
            if key not in state.held and key not in self._done:
                if state.full:
                    state.live = False
                    return False
                state.held[key] = message
                state.bytes += len(message.data)
                state.dispatcher.put(message, state.priority)
            state.place = place
        return True

    def _read_again(self) -> None:
        self._cursor = None
        for state in self._queues.values():
            state.live, state.place = False, START

    def _drop_waiting(self) -> None:
        """Messages that no handler has may be another member's now: if not, they are read again."""
        for state in self._queues.values():
            for key, message in list(state.held.items()):
                if not message.taken:
                    message.dropped = True
                    del state.held[key]
                    state.bytes -= len(message.data)

    def _fail_overdue(self, queues: list[QueueState]) -> None:
        for state in queues:
            if state.timeout is None:
                continue
            for message in list(state.held.values()):
                if message.overdue_at is not None and message.overdue_at <= now():
                    reason = f"The handler was not done within {state.timeout:g} seconds."
                    try:
                        self.settle(message, "failed", "", reason.encode())
                    except MeteorError as error:
                        _log.warning("An overdue message was not failed: %s", error)


def _patience_s(state: QueueState) -> float:
    """Seconds after which a message of a queue can be overdue."""
    assert state.timeout is not None, "it has a time"
    times = [math.inf]
    for message in list(state.held.values()):
        # One that waits may be taken now; then it is looked at again with what is left.
        at = message.overdue_at
        times.append(state.timeout if at is None else max(at - now(), _FULL_S))
    return min(times)


def _state_of(message: Message) -> QueueState:
    assert message.queue_state is not None, "it was read from an inbox"
    return message.queue_state


def _reason(error: BaseException) -> bytes:
    """Why a handler failed, for the sender."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # its own text cannot be made
        text = type(error).__name__
    return text.encode(errors="replace")


def _queue_of(flat: list[Any]) -> str:
    queue: bytes = flat[3]  # the second field, as it is written
    return queue.decode()
