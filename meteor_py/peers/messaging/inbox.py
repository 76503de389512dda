"""An inbox: the messages of one member as they come, and the handlers that take them.

What is not settled is in a stream of the server. One thread reads it, and keeps a bounded part of
each queue at a desk, where handlers take it. A queue without a handler is left alone. One that has
more than its desk may hold is *behind*: it is read on, from its own place, when there is room.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from meteor_py.errors import ConnectionFailed, MeteorError, PeerGroupNotFound
from meteor_py.peers.codec import UnknownType
from meteor_py.peers.connections import Links
from meteor_py.peers.messaging.dispatcher import Dispatcher
from meteor_py.peers.messaging.message import Message, read_message, read_place
from meteor_py.peers.messaging.queue_state import START, Ack, Key, QueueState
from meteor_py.peers.messaging.requests import check_size
from meteor_py.records.config import check_choice, check_function, check_int, check_seconds
from meteor_py.redis import keys
from meteor_py.redis.scripts import PEERS_SETTLE
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread

if TYPE_CHECKING:
    from meteor_py.peers.membership import Membership

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


class Inbox:
    """Owned by its membership. The reader and the settling have connections of their own."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._group = membership.group
        self._state = SignalSafeCondition()
        self._boxes: dict[str, QueueState] = {}
        self._desks: list[Dispatcher] = []
        self._turns: Dispatcher | None = None  # of the handlers that take turns
        self._done: dict[Key, None] = {}
        self._cursor: bytes | None = None
        self._identity = ("", "")
        self._fenced_until = 0.0
        self._anew = True
        self._woken = False
        self._started = False
        self._ended = False
        connector = self._group.books.connector
        self._connection = connector.open_connection()
        self._connections = Links(connector)
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
        box = QueueState(self, queue, function, ack=ack, priority=priority or 0, timeout=timeout)
        with self._state:
            self._add(box)
            name = f"{HANDLER_PREFIX}-{self._group.name}"
            if priority is None:
                box.desk = self._open_desk(f"{name}-{queue}", workers)
            else:
                self._turns = self._turns or self._open_desk(name, 1)
                box.desk = self._turns
            self._boxes[queue] = box
        self._wake()

    def pull(self, queue: str, timeout: float | None) -> Iterator[Message]:
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        with self._state:
            box = self._boxes.get(queue)
            if box is None or box.function is not None:
                box = QueueState(self, queue, None)
                self._add(box)
                box.desk = self._open_desk("", 0)
                self._boxes[queue] = box
                self._wake()
        return self._iterate(box, timeout)

    def _add(self, box: QueueState) -> None:
        """Check a queue, and begin to read with the first."""
        keys.check_name(box.queue, "queue")
        if self._ended:
            raise self._membership.lost_error()
        if box.queue in self._boxes:
            raise ValueError(
                f"The queue {box.queue!r} of member {self._membership.id!r} has a handler, or an "
                "iterator, already; give it more workers, or choose another name."
            )
        if not self._started:
            self._started = True
            self._thread.start()

    def _open_desk(self, name: str, workers: int) -> Dispatcher:
        desk = Dispatcher(name, self._handle, workers)
        self._desks.append(desk)
        desk.start()
        return desk

    def _iterate(self, box: QueueState, timeout: float | None) -> Iterator[Message]:
        while True:
            message = box.desk.take(timeout)
            if message is None:
                return
            if self._open(message):
                yield message

    # -- handling ------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        """In a thread of a desk."""
        box = message.box
        assert box is not None, "it was read from an inbox"
        assert box.function is not None, "only those with a function have threads"
        try:
            if not self._open(message):
                return
            turn = message.deliveries
            try:
                value = box.function(message)
            except BaseException as error:  # also SystemExit: others wait in this queue
                _log.warning("The handler of %r failed.", box.queue, exc_info=True)
                if message.deliveries == turn:
                    self.settle(message, "failed", "", _reason(error), patient=True)
            else:
                if box.ack == "auto" and message.deliveries == turn:  # else it is to come again
                    self._reply_to(message, value)
        except BaseException:  # also SystemExit: of a codec's function
            _log.exception("Message %s of queue %r was not settled.", message.id, box.queue)

    def _reply_to(self, message: Message, value: object) -> None:
        try:
            kind, data = self._encode(message, value)
        except BaseException as error:  # whatever it is: somebody waits
            _log.warning("What the handler of %r returned cannot be sent.", message.queue)
            reason = b"What it returned cannot be sent: " + _reason(error)
            self.settle(message, "failed", "", reason, patient=True)
        else:
            self.settle(message, "ok", kind, data, patient=True)

    def _open(self, message: Message) -> bool:
        """Decode it; False if it is over, or cannot be read here, and is settled so."""
        box = message.box
        assert box is not None, "it was read from an inbox"
        if box.timeout is not None:
            message.overdue_at = now() + box.timeout
        clock = self._group.clock
        if message.verb != "tell" and clock.now() - clock.error_bound > message.until:
            self.settle(message, "expired", "", b"", patient=True)
            return False
        try:
            message.body = self._group.mail.codec.decode(message.kind, message.data)
        except UnknownType as error:
            _log.error("Message %s goes to the dead letters: %s", message.id, error)
            reason = str(error).encode(errors="replace")
            self.settle(message, "unknown", "", reason, patient=True)
            return False
        return True

    def reply(self, message: Message, value: object) -> bool:
        return self.settle(message, "ok", *self._encode(message, value))

    def _encode(self, message: Message, value: object) -> tuple[str, bytes]:
        """An answer, if somebody asked for one."""
        if message.verb != "ask":
            return "", b""
        kind, data = self._group.mail.codec.encode(value)
        check_size(data)
        return kind, data

    def put_back(self, message: Message, delay: float) -> bool:
        with self._state:
            if message.settled or message.dropped or not message.taken:
                return False
            message.taken = False
            message.overdue_at = None
            message.deliveries += 1
        box = message.box
        assert box is not None, "it was read from an inbox"
        box.desk.put(message, box.priority, delay)
        return True

    def settle(
        self, message: Message, code: str, kind: str, data: bytes, *, patient: bool = False
    ) -> bool:
        """Say what became of a message; a patient caller tries for as long as it is a member."""
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
                "Member %r is not in these hands any more: message %s was not settled here.",
                message.member,
                message.id,
            )
        self._let_go(message, fenced=counted is None)
        return bool(counted)

    def _settle(
        self, message: Message, code: str, kind: str, data: bytes, patient: bool
    ) -> bool | None:
        """Tell the server; None if the message is not ours any more."""
        member = self._membership
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
                answer = self._connections.use(
                    partial(self._group.books.run, PEERS_SETTLE, args), _SETTLE_S
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
            if answer[0] != b"FENCED":
                return bool(answer[1])
            if session == member.session:
                return None

    def _let_go(self, message: Message, fenced: bool) -> None:
        box = message.box
        assert box is not None, "it was read from an inbox"
        with self._state:
            key = (message.place, message.id)
            if box.held.pop(key, None) is not None:
                box.bytes -= len(message.data)
            if fenced:
                # If it joins again by itself, its messages come again. Until then, or until its
                # heart has had time to notice, nothing is handled that may be another's.
                self._fenced_until = now() + self._group.config.ttl / 3
                self._drop_waiting()
                self._anew = True
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
        return any(desk.busy for desk in self._desks)

    def end(self, *, close: bool) -> None:
        """Take no more; closed, it settles nothing either."""
        with self._state:
            self._ended = True
            self._state.notify_all()
            desks = list(self._desks)
        for desk in desks:
            desk.end()
        self._connection.interrupt()
        if close:
            self._connections.close()

    def join(self, timeout_s: float) -> bool:
        """Wait for all threads but the present one; whether they have ended."""
        deadline = now() + timeout_s
        if self._started and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        ended = [desk.join(deadline) for desk in self._desks]
        return all(ended) and not self._thread.is_alive()

    def _wake(self) -> None:
        with self._state:
            self._woken = True
            self._state.notify_all()
        self._connection.interrupt()

    def _run(self) -> None:
        failures = 0
        while not self._ended:
            try:
                self._step()
                failures = 0
                continue
            except ConnectionFailed:
                failures += 1
            except Exception:
                if not self._ended:
                    _log.exception("The inbox of %r failed.", self._membership)
                failures += 1
            with self._state:
                woken, self._woken = self._woken, False
                if woken:
                    failures = 0
                    continue
                # Another server may have been promoted, on which some messages are not there, and
                # new ones may come before where we are.
                self._begin_anew()
                self._state.wait_for(
                    lambda: self._ended or self._woken, pause_s(failures, *_BACKOFF_S)
                )
        self._connection.close()

    def _step(self) -> None:
        """Read for those who are behind, then what comes new."""
        member = self._membership
        identity = (member.id, member.session)
        with self._state:
            self._woken = False
            left = self._fenced_until - now()
            if left > 0:
                self._state.wait_for(lambda: self._ended or self._woken, left)
                return
            if identity != self._identity:
                self._identity = identity
                self._drop_waiting()
                self._anew = True
            if self._anew:
                self._anew = False
                self._begin_anew()
            boxes = list(self._boxes.values())
        key = self._group.books.key(f"inbox:{identity[0]}")
        if self._cursor is None:
            last = self._connection.call("XREVRANGE", key, "+", "-", "COUNT", 1)
            self._cursor = last[0][0] if last else b"0-0"
        self._fail_overdue(boxes)
        for box in boxes:
            if not box.live and box.roomy:
                self._catch_up(box, key)
        block_s = self._block_s(boxes)
        block = ("BLOCK", max(int(block_s * 1000), 1)) if block_s > 0 else ()
        found = self._connection.call(
            *("XREAD", "COUNT", _COUNT, *block, "STREAMS", key, self._cursor),
            timeout_s=block_s + self._connection.timeout_s,
        )
        for entry, flat in found[0][1] if found else ():
            self._cursor = entry
            box_of = self._boxes.get(_queue_of(flat))
            if box_of is not None and box_of.live:
                self._take(box_of, entry, flat)

    def _block_s(self, boxes: list[QueueState]) -> float:
        """How long the server may let us wait for new messages."""
        if any(not box.live and box.roomy for box in boxes) or self._woken:
            return 0.0
        times = [self._connection.block_max_s]
        times += [_FULL_S for box in boxes if not box.live]
        times += [_patience_s(box) for box in boxes if box.timeout is not None]
        return min(times)

    def _catch_up(self, box: QueueState, key: str) -> None:
        """Read on for a queue that is behind; it goes live at the end of the stream."""
        ms, number = box.place
        page = self._connection.call("XRANGE", key, f"{ms}-{number}", "+", "COUNT", _COUNT)
        for entry, flat in page:
            place = read_place(entry)
            if _queue_of(flat) != box.queue:
                box.place = max(box.place, place)
            elif not self._take(box, entry, flat):
                return
        if len(page) < _COUNT:
            box.live = True

    def _take(self, box: QueueState, entry: bytes, flat: list[bytes]) -> bool:
        """Put a message on its desk; False if there is no room, and it must wait."""
        place = read_place(entry)
        if place <= box.place:
            return True  # it was looked at already
        clock = self._group.clock
        time = self._group.now()
        message = read_message(self._identity[0], entry, flat, time, clock.error_bound)
        message.box = box
        with self._state:
            key = (place, message.id)
            if key not in box.held and key not in self._done:
                if box.full:
                    box.live = False
                    return False
                box.held[key] = message
                box.bytes += len(message.data)
                box.desk.put(message, box.priority)
            box.place = place
        return True

    def _begin_anew(self) -> None:
        self._cursor = None
        for box in self._boxes.values():
            box.live, box.place = False, START

    def _drop_waiting(self) -> None:
        """What nobody has in hand yet may be somebody else's: it is read again if it is not."""
        for box in self._boxes.values():
            for key, message in list(box.held.items()):
                if not message.taken:
                    message.dropped = True
                    del box.held[key]
                    box.bytes -= len(message.data)

    def _fail_overdue(self, boxes: list[QueueState]) -> None:
        for box in boxes:
            if box.timeout is None:
                continue
            for message in list(box.held.values()):
                if message.overdue_at is not None and message.overdue_at <= now():
                    reason = f"The handler was not done within {box.timeout:g} seconds."
                    try:
                        self.settle(message, "failed", "", reason.encode())
                    except MeteorError as error:
                        _log.warning("An overdue message was not failed: %s", error)


def _patience_s(box: QueueState) -> float:
    """Seconds after which a message of a queue can be overdue."""
    assert box.timeout is not None, "it has a time"
    times = [math.inf]
    for message in list(box.held.values()):
        # One that waits may be taken now; then it is looked at again with what is left.
        at = message.overdue_at
        times.append(box.timeout if at is None else max(at - now(), _FULL_S))
    return min(times)


def _reason(error: BaseException) -> bytes:
    """Why a handler failed, for who asked."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # its own text cannot be made
        text = type(error).__name__
    return text.encode(errors="replace")


def _queue_of(flat: list[Any]) -> str:
    queue: bytes = flat[3]  # the second field, as it is written
    return queue.decode()
