"""The sender: one thread that gets batches into the log, each exactly once and in order.

Up to five batches are on their way at a time. Each carries (producer id, epoch, sequence), and
the server remembers the last eight sequences of a producer with the offsets they got. So a batch
whose answer was lost is sent again under the same number, and the answer says what happened:

* An answer of the script proves what became of the batch. An error reply, or none at all, proves
  nothing about an *earlier* sending of it: the batch is then ``in_doubt`` until the script says.
  "Full" and "out of memory" do not settle it: an earlier sending may arrive late and find room.
* A batch cannot be in the log unless the one before it is. So those behind a refused one that were
  never in doubt may be numbered anew under the next epoch.
* What is still in doubt at its deadline fails as ``OutcomeUnknown``, with all that was sent behind
  it; the next epoch fences off whatever arrives late.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meteor_py.errors import (
    ConnectionFailed,
    LogTruncated,
    MeteorError,
    NotReplicated,
    OutOfMemory,
    ServerRefused,
)
from meteor_py.log.epochs import begin_epoch
from meteor_py.publish.accumulator import Accumulator, closed_error
from meteor_py.publish.ack import SENDER_PREFIX, Batch
from meteor_py.records.config import Compression
from meteor_py.records.frame import encode, fingerprint
from meteor_py.records.ordering_index import OrderingRule
from meteor_py.records.position import Position, diverged_at
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import Connection, ScriptMissing
from meteor_py.redis.scripts import PUBLISH
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.threads import JoinableThread

_log = logging.getLogger(__name__)

#: Batches on their way at a time. The server remembers eight.
WINDOW = 5
#: How long a server remembers an idle producer.
PRODUCER_TTL_MS = 24 * 3600 * 1000
#: What XADD says when its ID is not above all others.
_ID_TAKEN = "equal or smaller than the target stream top item"
#: Seconds to wait for a connection, for room in its buffers, and for each answer.
SOCKET_TIMEOUT_S = 5.0
#: Seconds of silence after which the server's history is asked for again: a server can be demoted
#: and promoted under an idle connection.
_HISTORY_S = 1.0
#: Seconds between two tries, doubled each time up to the second figure.
_BACKOFF_S = (0.02, 0.5)


@dataclass(frozen=True)
class Route:
    """Where batches go, and how."""

    stream: str
    incarnation: str
    compression: Compression
    checksum: bool
    acks: int
    #: The rule for the index, if the stream has one.
    ordering: OrderingRule | None


class Sender:
    """The sending half of a publisher. Owned by it: started with it, joined by it."""

    def __init__(self, connection: Connection, outbox: Accumulator, route: Route) -> None:
        self._connection = connection
        self._outbox = outbox
        self._route = route
        self._id = secrets.token_hex(8)
        self._keys = [
            keys.log(route.stream),
            keys.meta(route.stream),
            keys.producer(route.stream, self._id),
        ]
        if route.ordering is not None:
            self._keys.append(keys.index(route.stream))
        self._epoch = 0
        self._sequence = 0
        #: The batches on their way, oldest first.
        self.window: deque[Batch] = deque()
        self._sent = 0  # of the window, on this connection
        self._answered = 0  # of those, to be settled together
        self._stream_epoch = 0  # in the last of these answers
        self._send_whole = False  # the server does not know the script
        self._acked: Position | None = None
        self._failures = 0  # in a row
        self._heard = 0.0  # when the last batch was taken, by the monotonic clock
        self._reason: MeteorError | None = None  # of the last one
        self._abandoned = threading.Event()
        self._thread = JoinableThread(self._run, f"{SENDER_PREFIX}-{route.stream}")

    def start(self) -> None:
        self._thread.start()

    def abandon(self) -> None:
        """Stop trying: what is left fails. Ends a wait for the server at once."""
        self._abandoned.set()
        self._connection.interrupt()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- the loop ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._abandoned.is_set():
                self._fill()
                if self.window:
                    self._exchange()
                elif self._outbox.drained():
                    break
        except BaseException as error:
            _log.exception("The sender of stream %r died.", self._route.stream)
            self._outbox.close(reply_errors.bug(self._route.stream, error))
        finally:
            self._give_up()
            self._connection.close()

    def _fill(self) -> None:
        """Take batches until the window is full; wait for one only if it is empty."""
        while len(self.window) < WINDOW:
            batch = self._outbox.take(busy=bool(self.window))
            if batch is None:
                return
            self.window.append(batch)  # at once: there a forked child looks for it
            try:
                assert batch.columns is not None
                batch.encoded = encode(batch.columns, self._route.compression)
                if self._route.ordering is not None:
                    batch.index = self._route.ordering.index(batch.columns)
            except Exception as error:
                self._outbox.settle(self.window.pop(), reply_errors.bug(self._route.stream, error))
                continue
            batch.sequence = self._sequence
            self._sequence += 1

    def _exchange(self) -> None:
        """Send what was not sent, read one answer, and see to what went wrong."""
        self._connection.timeout_s = self._patience()
        try:
            self._send()
            self._receive()
        except ConnectionFailed as error:
            self._doubt_sent()
            self._start_over(error)
            self._wait()
        except ServerRefused as error:  # while looking after something else
            self._doubt_sent()
            self._refuse(error)
        self._expire()

    def _send(self) -> None:
        if not self._sent and self._connection.connected and self._idle_s() > _HISTORY_S:
            self._connection.refresh_history()
        history = self._connection.history  # connects, if need be
        for batch in list(self.window)[self._sent :]:
            assert batch.encoded is not None
            name, payload = batch.encoded
            arguments = (
                self._route.incarnation,
                history,
                self._epoch,
                batch.sequence,
                batch.count,
                fingerprint(payload),
                PRODUCER_TTL_MS,
                name,
                payload,
                zlib.crc32(payload) if self._route.checksum else "",
                *batch.index,
            )
            command = self._connection.script_call(
                PUBLISH, self._keys, arguments, whole=self._send_whole
            )
            self._sent += 1  # before it is: a cut in the middle leaves a doubt
            self._connection.send([command])
            self._send_whole = False

    def _idle_s(self) -> float:
        return time.monotonic() - self._heard

    def _receive(self) -> None:
        batch = self.window[self._answered]
        try:
            answer = self._connection.read()
        except ConnectionFailed as error:
            if error.answered and not batch.in_doubt:
                self._sent = self._answered  # it is not in the log, so none behind it can be
            raise
        except ScriptMissing:
            self._drain()
            self._start_over(None)
            self._send_whole = True
        except OutOfMemory as error:
            self._drain()
            self._not_now(error)
        except ServerRefused as error:
            self._drain()
            self._refuse(
                reply_errors.foreign(self._route.stream) if _ID_TAKEN in str(error) else error
            )
        else:
            if answer[0] == b"OK":
                self._succeed(batch, answer[1], answer[2])
            else:
                self._drain()
                self._decline(answer)

    def _succeed(self, batch: Batch, first: int, epoch: int) -> None:
        batch.first = first
        batch.in_doubt = False
        self._failures = 0
        self._reason = None
        self._heard = time.monotonic()
        self._answered += 1
        self._stream_epoch = epoch
        if self._answered == self._sent or not (self._route.acks or self._in_new_epoch()):
            self._settle_answered()

    def _settle_answered(self) -> None:
        if self._in_new_epoch():  # somebody else began it
            lost_from = self._lost_from()
            if lost_from is not None:
                self._report_loss(lost_from)
        missing = self._missing_replicas() if self._route.acks else None
        for _ in range(self._answered):
            batch = self.window.popleft()
            offset = batch.first + batch.count
            self._acked = Position(self._route.incarnation, self._stream_epoch, offset)
            self._outbox.settle(batch, self._not_replicated(batch, missing) if missing else None)
        self._sent -= self._answered
        self._answered = 0

    def _missing_replicas(self) -> str | None:
        """Wait until enough replicas have all that was answered; say what is missing."""
        left_ms = max(int((self.window[0].deadline - time.monotonic()) * 1000), 1)
        timeout_s = left_ms / 1000 + self._connection.timeout_s
        wanted = self._route.acks
        try:
            seen = int(self._connection.call("WAIT", wanted, left_ms, timeout_s=timeout_s))
        except ServerRefused as error:
            return f"the server did not wait for replicas: {error}"
        if seen >= wanted:
            return None
        return f"{seen} of {wanted} replicas confirmed it in time; check the replicas."

    # -- what can go wrong ---------------------------------------------------------------------

    def _decline(self, answer: list[Any]) -> None:
        """The script did not take the oldest batch, and said why."""
        code = answer[0].decode()
        oldest = self.window[0]
        if code == "HISTORY":
            self._start_over(None)
            found = answer[1].decode()
            begin_epoch(self._connection, self._route.stream, self._route.incarnation, found)
            self._lose_or(self._doubt_answered)
        elif code == "FULL":
            self._not_now(reply_errors.full(self._route.stream, answer[1]))
        elif code == "OUTOFSEQ" and answer[1] < oldest.sequence and self._acked:
            # Certain, even where a hidden history leaves no other trace of it.
            lost_from = self._lost_from()
            self._lose(self._acked.offset - 1 if lost_from is None else lost_from)
        elif code == "NOPRODUCER":
            self._lose_or(self._renumber)  # lost with our records, or forgotten, or evicted
        elif code in ("NOSTREAM", "INCARNATION"):
            last = self._acked.offset - 1 if self._acked else -1
            self._fail_all(reply_errors.gone(self._route.stream, answer[0], last))
        elif code == "EXHAUSTED":
            self._refuse(ServerRefused(f"Stream {self._route.stream!r} has used up its offsets."))
        else:  # OUTOFSEQ above us, STALEPRODUCER: somebody else sends under our id
            _log.error("Producer %s of %r: %s", self._id, self._route.stream, answer)
            self._id = secrets.token_hex(8)
            self._keys[2] = keys.producer(self._route.stream, self._id)
            self._renumber()

    def _not_now(self, error: MeteorError) -> None:
        """The oldest batch was refused, but may be taken later.

        That lifts no doubt: bytes of an earlier sending may still be under way, and find room.
        """
        self._start_over(error)
        self._wait()

    def _refuse(self, error: MeteorError) -> None:
        """The oldest batch will never be taken."""
        self._fail(self.window.popleft(), error)
        self._renumber()

    def _in_new_epoch(self) -> bool:
        return self._acked is not None and self._stream_epoch != self._acked.epoch

    def _lost_from(self) -> int | None:
        """The first offset from which on what we know to be in the log is lost; None if not."""
        if self._acked is None:
            return None
        epochs = self._connection.call("HGET", self._keys[1], "epochs")
        end = self._connection.call("HGET", self._keys[1], "next")
        if epochs is None or end is None:
            return None  # the stream is gone, which the next sending will tell
        return diverged_at(self._acked, epochs.decode(), int(end))

    def _lose_or(self, go_on: Callable[[], None]) -> None:
        lost_from = self._lost_from()
        if lost_from is None:
            go_on()
        else:
            self._lose(lost_from)

    def _lose(self, first: int) -> None:
        """Acknowledged records are gone. Nothing sent after them can be there either."""
        self._fail_all(self._report_loss(first))

    def _report_loss(self, first: int) -> LogTruncated:
        assert self._acked is not None, "what is lost was known"
        last = self._acked.offset - 1
        error = reply_errors.lost(self._route.stream, min(first, last), last)
        self._acked = None
        self._outbox.report_loss(error)
        return error

    def _fail_all(self, error: MeteorError) -> None:
        self._clear_doubts()
        self.window.extend(self._outbox.take_all())  # there a forked child looks for them
        while self.window:
            self._outbox.settle(self.window[0], error)
            self.window.popleft()
        self._renumber()

    def _renumber(self) -> None:
        """Begin the next producer epoch with what is left; what is in doubt cannot be."""
        while self.window and self.window[0].in_doubt:
            self._fail(self.window.popleft(), None)
        self._epoch += 1
        for number, batch in enumerate(self.window):
            batch.sequence = number
        self._sequence = len(self.window)
        self._start_over(None)

    def _expire(self) -> None:
        """Fail the batches whose time is over."""
        while self.window and time.monotonic() > self.window[0].deadline:
            if self._sent:  # answers may be under way: let none of them be taken for another's
                self._connection.close()
                self._doubt_sent()
            self._refuse(self._reason or self._timeout_error())

    def _give_up(self) -> None:
        """The end: nothing is left without an outcome."""
        self._doubt_sent()
        self.window.extend(self._outbox.take_all())
        while self.window:
            self._fail(self.window[0], closed_error(self._route.stream))
            self.window.popleft()

    def _fail(self, batch: Batch, error: MeteorError | None) -> None:
        """Settle a batch with ``error``, unless it is, or may be, in the log."""
        if batch.first >= 0 and not self._route.acks:
            error = None
        elif batch.first >= 0:
            error = self._not_replicated(batch, "the wait for replicas was cut short.")
        elif batch.in_doubt or error is None:
            error = reply_errors.unknown(self._route.stream, self._reason)
        self._outbox.settle(batch, error)

    # -- small parts ---------------------------------------------------------------------------

    def _drain(self) -> None:
        """Read the answers of the batches behind a refused one, which will be sent again.

        Those before it are settled, so that the refused one is the oldest.
        """
        for batch in list(self.window)[self._answered + 1 : self._sent]:
            try:
                answer = self._connection.read()
            except ConnectionFailed:
                raise
            except MeteorError:
                continue  # each is sent again, and answered then
            if answer[0] == b"OK":  # the refused one has been in the log before
                batch.in_doubt = True
        if self._answered:
            self._settle_answered()

    def _start_over(self, reason: MeteorError | None) -> None:
        """Send the whole window again."""
        self._sent = self._answered = 0
        if reason is not None:
            self._failures += 1
            self._reason = reason

    def _doubt_sent(self) -> None:
        for batch in list(self.window)[: self._sent]:
            batch.in_doubt = True

    def _doubt_answered(self) -> None:
        """Another server has to confirm again what the last one answered."""
        for batch in self.window:
            if batch.first >= 0:
                batch.first = -1
                batch.in_doubt = True

    def _clear_doubts(self) -> None:
        for batch in self.window:
            batch.in_doubt = False

    def _wait(self) -> None:
        pause = pause_s(max(self._failures, 1), *_BACKOFF_S)
        left = self.window[0].deadline - time.monotonic() if self.window else 0
        self._abandoned.wait(max(min(pause, left), 0))

    def _patience(self) -> float:
        """Seconds to wait for the server: not much beyond the oldest batch's deadline."""
        left = self.window[0].deadline - time.monotonic()
        return min(max(left, 0.05), SOCKET_TIMEOUT_S)

    def _timeout_error(self) -> ConnectionFailed:
        return ConnectionFailed(
            f"The record could not be sent to stream {self._route.stream!r} in time; the server "
            f"at {self._connection.address} is too slow, or delivery_timeout too short."
        )

    def _not_replicated(self, batch: Batch, missing: str) -> NotReplicated:
        why = f"is in the log, but {missing}"
        return NotReplicated(why, stream=self._route.stream, offset=batch.first)
