"""An inbox: one member's messages, and the handlers that process them.

The server keeps unsettled messages in a stream. One thread reads the stream and passes a bounded
number of messages from each queue to a dispatcher, whose threads call the handlers. Queues without
a handler or an iterator are skipped. A queue with more messages than this process can hold is
*behind*: when there is room, the thread continues reading from that queue's own position.

Each read also fetches the session that owns the member. If that is another session, the thread
drops the messages. Another process may handle them, or this process reads them again, in order,
once it has rejoined.

An earlier session may have died while it handled a message. Before a handler receives such a
message, the server counts the delivery, so that a message that kills its process is not delivered
forever.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from meteor_py.errors import ConnectionFailed
from meteor_py.peers.codec import UnknownType
from meteor_py.peers.messaging.dispatcher import Dispatcher
from meteor_py.peers.messaging.message import Message, Place, read_message, read_place
from meteor_py.peers.messaging.requests import check_size
from meteor_py.peers.messaging.settlements import Settlement, Settlements
from meteor_py.records.config import check_choice, check_function, check_int, check_seconds
from meteor_py.redis import keys
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread

if TYPE_CHECKING:
    from meteor_py.peers.member_handle import MemberHandle

_log = logging.getLogger(__name__)

#: Maximum number of threads per handler.
WORKERS_MAX = 256
#: Maximum number of entries per read, and the target size of a read in bytes.
_COUNT = 100
_PAGE_BYTES = 4 * 1_048_576
#: Maximum number of shared bodies per read.
_BODIES = 8
#: Number of settled messages to remember, so that reading the stream again does not deliver them.
_DONE_MAX = 10_000
#: Seconds between checks for room in a full queue that is behind.
_FULL_S = 0.02
#: Shortest and longest pause between attempts, in seconds. The pause doubles each time.
_BACKOFF_S = (0.02, 0.64)


Ack = Literal["auto", "manual"]
#: A message's position and id: after a failover, another message may have the same position.
Key = tuple[Place, str]

#: Limits on the unsettled messages per queue in this process: their number, and their total bytes.
HELD_MAX = 1_000
HELD_BYTES_MAX = 64 * 1_048_576
#: The position before the first entry.
START: Place = (0, 0)


@dataclass(eq=False)
class QueueState:
    """One queue in an inbox: its handler and the messages held for it. The inbox's lock guards
    it."""

    inbox: Inbox
    queue: str
    function: Callable[[Message], object] | None
    ack: Ack = "manual"
    priority: int = 0
    timeout: float | None = None
    #: The last entry that was read, and whether the queue has reached the end of the stream.
    place: Place = START
    live: bool = False
    held: dict[Key, Message] = field(default_factory=dict)
    bytes: int = 0
    dispatcher: Dispatcher = field(init=False)

    @property
    def full(self) -> bool:
        return len(self.held) >= HELD_MAX or self.bytes >= HELD_BYTES_MAX

    @property
    def roomy(self) -> bool:
        return len(self.held) <= HELD_MAX // 2 and self.bytes <= HELD_BYTES_MAX // 2


class Inbox:
    """One member handle's inbox. Reading and settling use separate connections."""

    def __init__(self, member: MemberHandle) -> None:
        self._member = member
        self._group = member.group
        self._state = SignalSafeCondition()
        self._queues: dict[str, QueueState] = {}
        self._dispatchers: list[Dispatcher] = []
        self._turns: Dispatcher | None = None  # for handlers with a priority, which take turns
        self._done: dict[Key, None] = {}
        self._cursor: bytes | None = None
        self._identity = ("", "")
        self._count = _COUNT
        self._fenced_until = 0.0
        self._reload = True
        self._woken = False
        self._stopped = False
        self._connection = self._group.protocol.open_connection()
        self._settlements = Settlements(member, self._settled)
        self._thread = JoinableThread(self._run, f"meteor-inbox-{self._group.name}")

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
                raise ValueError("Handlers with a priority share one thread. Use workers=1.")
        state = QueueState(self, queue, function, ack, priority or 0, timeout)
        with self._state:
            self._add(state)
            name = f"meteor-handler-{self._group.name}"
            if priority is None:
                state.dispatcher = self._open_dispatcher(f"{name}-{queue}", workers)
            else:
                self._turns = self._turns or self._open_dispatcher(name, 1)
                state.dispatcher = self._turns
            self._queues[queue] = state
        self._member.declaration.add(queue)
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
        self._member.declaration.add(queue)
        return self._iterate(state, timeout)

    def _add(self, state: QueueState) -> None:
        """Check a new queue, and start reading if it is the first."""
        keys.check_name(state.queue, "queue")
        if self._stopped:
            raise self._member.lost_error()
        if state.queue in self._queues:
            raise ValueError(
                f"Queue {state.queue!r} of member {self._member.id!r} already has a handler or an "
                "iterator. Give the handler more workers, or choose another queue name."
            )
        if self._thread.ident is None:
            self._thread.start()

    def _open_dispatcher(self, name: str, workers: int) -> Dispatcher:
        dispatcher = Dispatcher(name, self._handle, workers)
        self._dispatchers.append(dispatcher)
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
        """Call the handler for a message. Runs in a dispatcher thread."""
        state = message.queue_state
        assert state.function is not None, "a queue without a function has a thread"
        try:
            if not self._open(message):
                return
            turn = message.deliveries
            try:
                value = state.function(message)
            except BaseException as error:  # even SystemExit: other messages need this thread
                _log.warning("The handler for queue %r failed.", state.queue, exc_info=True)
                if message.deliveries == turn:
                    self.settle_later(message, "failed", "", _reason(error))
            else:
                # If the handler has called retry(), ``deliveries`` has changed.
                if state.ack == "auto" and message.deliveries == turn:
                    self._reply_to(message, value)
        except BaseException:  # even SystemExit, from a registered codec function
            _log.exception("Message %s in queue %r was not settled.", message.id, state.queue)

    def _reply_to(self, message: Message, value: object) -> None:
        try:
            kind, data = self._encode(message, value)
        except BaseException as error:  # catch everything, because the sender is waiting
            _log.warning("Cannot send the return value of the handler for queue %r.", message.queue)
            reason = b"The handler's return value cannot be sent: " + _reason(error)
            self.settle_later(message, "failed", "", reason)
        else:
            self.settle_later(message, "ok", kind, data)

    def _open(self, message: Message) -> bool:
        """Decode a message; return False if it has expired, cannot be decoded, was delivered too
        many times, or now belongs to another session."""
        state = message.queue_state
        if state.timeout is not None:
            message.overdue_at = now() + state.timeout
        clock = self._group.clock
        if message.verb != "tell" and clock.now() - clock.error_bound > message.until:
            self.settle_later(message, "expired", "", b"")
            return False
        if message.redelivered and not message.begun and not self._begin(message):
            return False
        try:
            message.body = self._group.requests.codec.decode(message.kind, message.data)
        except UnknownType as error:
            _log.error("Message %s became a dead letter: %s", message.id, error)
            reason = str(error).encode(errors="replace")
            self.settle_later(message, "unknown", "", reason)
            return False
        return True

    def _begin(self, message: Message) -> bool:
        """Count the delivery of a message that an earlier session may have begun to handle; return
        whether to handle the message."""
        count = self._settlements.begin(message)
        if count is None or count <= 0:
            if count == -1:
                _log.error(
                    "Message %s in queue %r was delivered %d times and never settled. It became a "
                    "dead letter.",
                    message.id,
                    message.queue,
                    self._group.config.max_deliveries,
                )
            return False
        message.begun = True
        message.deliveries = count
        return True

    def reply(self, message: Message, value: object) -> bool:
        return self.settle(message, "ok", *self._encode(message, value))

    def _encode(self, message: Message, value: object) -> tuple[str, bytes]:
        """Encode the reply if the sender asked for one."""
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
        message.queue_state.dispatcher.put(message, delay)
        return True

    def settle(self, message: Message, code: str, kind: str, data: bytes) -> bool:
        """Settle a message; return whether this call settled it."""
        item = self._settlement(message, code, kind, data)
        if item is None:
            return False
        try:
            return bool(self._settlements.wait(item, patient=False))
        except BaseException:
            message.settled = False  # the caller may try again
            raise

    def settle_later(self, message: Message, code: str, kind: str, data: bytes) -> None:
        """Settle a message, retrying for as long as the member is in the group. If other messages
        are waiting for a handler, the calling thread does not wait for the server."""
        item = self._settlement(message, code, kind, data)
        if item is not None:
            self._settlements.put(item, here=not message.queue_state.dispatcher.has_waiting)

    def _settlement(self, message: Message, code: str, kind: str, data: bytes) -> Settlement | None:
        with self._state:
            if message.settled or not message.taken:
                return None
            message.settled = True
        what: Literal["settle-begun", "settle"] = "settle-begun" if message.begun else "settle"
        return Settlement(message, what, code, kind, data)

    def _settled(self, item: Settlement) -> None:
        """Process the server's answer. Any thread may call this method, so it must not block."""
        message = item.message
        if item.result is None:
            _log.warning(
                "Member %r no longer belongs to this process. Message %s was not settled here.",
                message.member,
                message.id,
            )
        if item.what == "begin" and item.result is not None and item.result > 0:
            return  # the handler gets the message
        self._release(message, fenced=item.result is None)

    def _release(self, message: Message, fenced: bool) -> None:
        state = message.queue_state
        with self._state:
            key = (message.place, message.id)
            if state.held.pop(key, None) is not None:
                state.bytes -= len(message.data)
            if fenced:
                if message.member == self._member.id:  # else the member has rejoined with a new id
                    self._disown()
                return
            self._done[key] = None
            while len(self._done) > _DONE_MAX:
                del self._done[next(iter(self._done))]

    def _disown(self) -> None:
        """Drop messages that may belong to another session. If the member rejoins, it reads them
        again. Read no messages until then, or until the heartbeat has had time to make it
        rejoin."""
        self._fenced_until = now() + self._group.config.ttl / 3
        self._drop_waiting()
        self._reload = True

    # -- reading -------------------------------------------------------------------------------

    def rejoined(self) -> None:
        """Read the stream again, because the member has a new session."""
        self._fenced_until = 0.0
        self._wake()

    @property
    def busy(self) -> bool:
        """Whether a handler is running in another thread."""
        return any(dispatcher.busy for dispatcher in self._dispatchers)

    def stop(self, *, close: bool) -> None:
        """Accept no more messages; if ``close``, also settle no more messages."""
        with self._state:
            self._stopped = True
            self._state.notify_all()
            dispatchers = list(self._dispatchers)
        for dispatcher in dispatchers:
            dispatcher.stop()
        self._connection.interrupt()
        if close:
            self._settlements.close()

    def join(self, timeout_s: float) -> bool:
        """Wait until all handlers have returned and their messages are settled; return whether this
        happened in time. If so, all handler threads have ended, except for the current one."""
        deadline = now() + timeout_s
        ended = self._thread.ends_within(timeout_s, self._connection.interrupt)
        ends = [ended, *(dispatcher.join(deadline) for dispatcher in self._dispatchers)]
        return self._settlements.drain(deadline) and all(ends)

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
                    _log.exception("The inbox for %r failed.", self._member)
                failures += 1
            with self._state:
                woken, self._woken = self._woken, False
                if woken:
                    failures = 0
                    continue
                # Another server may have been promoted. It may lack some messages, and may number
                # new messages below the current position.
                self._read_again()
                self._state.wait_for(
                    lambda: self._stopped or self._woken, pause_s(failures, *_BACKOFF_S)
                )
        self._connection.close()

    def _step(self) -> None:
        """Read messages for queues that are behind, then new messages."""
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
        found = self._fetch(
            ("XREAD", "COUNT", self._count, *block, "STREAMS", key, self._cursor), block_s
        )
        for entry, flat in self._load(found[0][1] if found else ()):
            receiving = self._queues.get(_queue_of(flat) or "")
            if receiving is not None and receiving.live:
                self._take(receiving, entry, flat)
            self._cursor = entry

    def _fetch(self, command: tuple[Any, ...], block_s: float = 0.0) -> Any:
        """Read from the inbox; return None if this session does not own the member."""
        member, session = self._identity
        record: bytes | None
        found, record = self._connection.pipeline(
            [command, ("HGET", self._group.protocol.key("members"), member)],
            timeout_s=block_s + self._connection.timeout_s,
        )
        if record is not None and record.split(b":", 2)[1] == session.encode():
            return found
        with self._state:
            if self._identity == (self._member.id, self._member.session):
                self._disown()
        self._group.heartbeat.hurry()
        return None

    def _load(self, page: Sequence[Any]) -> list[tuple[bytes, list[bytes]]]:
        """Return the entries of a page, with the bodies that they share with other inboxes. Also
        adapt the size of the next page."""
        entries: list[tuple[bytes, list[bytes]]] = [(entry, flat) for entry, flat in page]
        shared = [flat for _, flat in entries if len(flat) > 2 and flat[-2] == b"shared"]
        key = self._group.protocol.key
        for start in range(0, len(shared), _BODIES):
            part = shared[start : start + _BODIES]
            keys = [key(f"body:{flat[1].decode(errors='replace')}") for flat in part]
            bodies = self._connection.pipeline(
                [("HGET", body, "body") for body in keys], self._connection.timeout_s
            )
            for flat, body in zip(part, bodies, strict=True):
                if body is not None:
                    flat[-3] = body
        if entries:
            size = sum(len(value) for _, flat in entries for value in flat) / len(entries)
            self._count = max(min(int(_PAGE_BYTES / size), _COUNT), 1) if size > 4096 else _COUNT
        return entries

    def _block_s(self, queues: list[QueueState]) -> float:
        """Return the maximum number of seconds that a read may block."""
        if any(not state.live and state.roomy for state in queues) or self._woken:
            return 0.0
        times = [self._connection.block_max_s]
        times += [_FULL_S for state in queues if not state.live]
        times += [_patience_s(state) for state in queues if state.timeout is not None]
        return min(times)

    def _catch_up(self, state: QueueState, key: str) -> None:
        """Read more messages for a queue that is behind, until it reaches the end of the stream."""
        ms, number = state.place
        count = self._count
        page = self._fetch(("XRANGE", key, f"{ms}-{number}", "+", "COUNT", count))
        if page is None:
            return
        for entry, flat in self._load(page):
            place = read_place(entry)
            if _queue_of(flat) != state.queue:
                state.place = max(state.place, place)
            elif not self._take(state, entry, flat):
                return
        if len(page) < count:
            state.live = True

    def _take(self, state: QueueState, entry: bytes, flat: list[bytes]) -> bool:
        """Pass a message to its dispatcher; return False if the message must be read again
        later."""
        place = read_place(entry)
        if place <= state.place:
            return True  # this message was read before
        clock = self._group.clock
        time = self._group.now()
        try:
            message = read_message(state, self._identity[0], entry, flat, time, clock.error_bound)
        except (KeyError, ValueError):
            _log.warning("Skipping inbox entry %s, which is not a message.", entry.decode())
            state.place = place
            return True
        with self._state:
            if self._reload:
                return False  # the thread will read the messages again, in order
            key = (place, message.id)
            message.redelivered |= place <= self._member.replayed_until
            if key not in state.held and key not in self._done:
                if state.full:
                    state.live = False
                    return False
                state.held[key] = message
                state.bytes += len(message.data)
                state.dispatcher.put(message)
            state.place = place
        return True

    def _read_again(self) -> None:
        self._cursor = None
        for state in self._queues.values():
            state.live, state.place = False, START

    def _drop_waiting(self) -> None:
        """Drop messages that no handler has taken: they may now belong to another member. If they
        do not, the thread reads them again."""
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
                    reason = f"The handler did not finish within {state.timeout:g} seconds."
                    self.settle_later(message, "failed", "", reason.encode())


def _patience_s(state: QueueState) -> float:
    """Return the seconds until a message in a queue can become overdue."""
    assert state.timeout is not None, "the queue has no timeout"
    times = [math.inf]
    for message in list(state.held.values()):
        # A handler may take a waiting message at any moment, and then has the full timeout.
        at = message.overdue_at
        times.append(state.timeout if at is None else max(at - now(), _FULL_S))
    return min(times)


def _reason(error: BaseException) -> bytes:
    """Describe a handler's exception for the sender."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # the exception's __str__ raised another one
        text = type(error).__name__
    return text.encode(errors="replace")


def _queue_of(flat: list[Any]) -> str | None:
    """Return an inbox entry's queue; None if send.lua did not write the entry."""
    if len(flat) < 4 or flat[2] != b"queue":
        return None
    return str(flat[3], errors="replace")
