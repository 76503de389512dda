"""The sender: one thread that gets batches into the log, each exactly once and in order.

Several batches are in flight at a time (in_flight.py). Each carries (producer id, epoch, sequence),
and the server remembers the last eight sequences of a producer with the offsets they got. So a
batch whose reply was lost is sent again under the same number, and the reply says what happened:

* A reply of the script proves what became of the batch. An error reply, or none at all, proves
  nothing about an *earlier* sending of it: the batch is then ``in_doubt`` until the script says.
  "Full" and "out of memory" do not settle it: an earlier sending may arrive late and find room.
* A batch cannot be in the log unless the one before it is. So the batches behind a refused one that
  were never in doubt may be numbered again, under the next epoch.
* A batch that is still in doubt at its deadline fails as ``OutcomeUnknown``, with all that was sent
  behind it; the next epoch fences off whatever arrives late.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import zlib
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
from meteor_py.publish.batch import Batch
from meteor_py.publish.in_flight import InFlightWindow
from meteor_py.records.config import Compression
from meteor_py.records.frame import encode, fingerprint
from meteor_py.records.ordering_index import OrderingRule
from meteor_py.records.position import Position, diverged_at
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import Connection, EntryIdTaken, ScriptMissing
from meteor_py.redis.scripts import PUBLISH
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.completion import SENDER_PREFIX
from meteor_py.runtime.threads import JoinableThread

_log = logging.getLogger(__name__)

#: How long a server remembers an idle producer.
PRODUCER_TTL_MS = 24 * 3600 * 1000
#: Seconds to wait for a connection, for room in its buffers, and for each reply.
SOCKET_TIMEOUT_S = 5.0
#: Seconds without an acknowledgement after which the server's history is asked for again: a server
#: can be demoted and promoted under an idle connection.
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
    #: Where the ordering keys come from, if the stream has an index of them.
    ordering: OrderingRule | None


class Sender:
    """The sending half of a publisher. Owned by it: started with it, joined by it."""

    def __init__(self, connection: Connection, accumulator: Accumulator, route: Route) -> None:
        self._connection = connection
        self._accumulator = accumulator
        self._route = route
        self._id = secrets.token_hex(8)
        self._keys = [
            keys.log(route.stream),
            keys.meta(route.stream),
            keys.producer(route.stream, self._id),
        ]
        if route.ordering is not None:
            self._keys.append(keys.index(route.stream))
        #: The batches on their way. A forked child looks there for what it has to abandon.
        self.window = InFlightWindow()
        self._stream_epoch = 0  # in the last acknowledgement
        self._send_whole = False  # the server does not know the script
        self._acked: Position | None = None  # behind the last batch that was settled as in the log
        self._failures = 0  # in a row
        self._reason: MeteorError | None = None  # of the last failure
        self._acknowledged_at = 0.0  # when the last batch was, by the monotonic clock
        self._abandoned = threading.Event()
        self._thread = JoinableThread(self._run, f"{SENDER_PREFIX}-{route.stream}")

    def start(self) -> None:
        self._thread.start()

    def abandon(self) -> None:
        """Stop trying: what is left fails. A wait for the server ends at once."""
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
                elif self._accumulator.drained():
                    break
        except BaseException as error:
            _log.exception("The sender of stream %r died.", self._route.stream)
            self._accumulator.close(reply_errors.publisher_failed(self._route.stream, error))
        finally:
            self._give_up()
            self._connection.close()

    def _fill(self) -> None:
        """Take batches until the window is full; wait for one only if it is empty."""
        while self.window.has_room():
            batch = self._accumulator.take(busy=bool(self.window))
            if batch is None:
                return
            self.window.add([batch])  # at once: there a forked child looks for it
            try:
                assert batch.columns is not None
                batch.encoded = encode(batch.columns, self._route.compression)
                if self._route.ordering is not None:
                    batch.index = self._route.ordering.index(batch.columns)
            except Exception as error:
                failure = reply_errors.publisher_failed(self._route.stream, error)
                self._accumulator.settle(self.window.pop_newest(), failure)
                continue
            self.window.number_newest()

    def _exchange(self) -> None:
        """Send what was not sent, read one reply, and handle what went wrong."""
        self._connection.timeout_s = self._patience()
        try:
            self._send()
            self._receive()
        except ConnectionFailed as error:
            self.window.doubt_sent()
            self._send_again(error)
            self._pause()
        except ServerRefused as error:  # of another command than publish
            self.window.doubt_sent()
            self._refuse(error)
        self._expire()

    def _send(self) -> None:
        if not self.window.sent and self._connection.connected and self._idle_s() > _HISTORY_S:
            self._connection.refresh_history()
        history = self._connection.history  # connects, if need be
        for batch in self.window.unsent():
            assert batch.encoded is not None
            name, payload = batch.encoded
            arguments = (
                self._route.incarnation,
                history,
                self.window.epoch,
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
            self.window.mark_sent()  # before it is: a cut in the middle leaves a doubt
            self._connection.send([command])
            self._send_whole = False

    def _idle_s(self) -> float:
        return time.monotonic() - self._acknowledged_at

    def _receive(self) -> None:
        try:
            reply = self._connection.read()
        except ConnectionFailed as error:
            if error.answered and not self.window.next_to_reply.in_doubt:
                # It is not in the log, so none behind it can be.
                self.window.rewind_to_acknowledged()
            raise
        except ScriptMissing:
            self._drain()
            self.window.rewind()
            self._send_whole = True
        except OutOfMemory as error:
            self._drain()
            self._try_later(error)
        except EntryIdTaken:
            self._drain()
            self._refuse(reply_errors.corrupt_stream(self._route.stream))
        except ServerRefused as error:
            self._drain()
            self._refuse(error)
        else:
            if reply[0] == b"OK":
                self._acknowledge(reply[1], reply[2])
            else:
                self._drain()
                self._handle_refusal(reply)

    def _acknowledge(self, base_offset: int, epoch: int) -> None:
        self.window.mark_acknowledged(base_offset)
        self._failures = 0
        self._reason = None
        self._acknowledged_at = time.monotonic()
        self._stream_epoch = epoch
        all_of_them = self.window.acknowledged == self.window.sent
        if all_of_them or not (self._route.acks or self._in_new_epoch()):
            self._settle_acknowledged()

    def _settle_acknowledged(self) -> None:
        if self._in_new_epoch():  # another client began it
            lost_from = self._lost_from()
            if lost_from is not None:
                self._report_loss(lost_from)
        missing = self._missing_replicas() if self._route.acks else None
        for _ in range(self.window.acknowledged):
            batch = self.window.pop_oldest()
            offset = batch.base_offset + batch.count
            self._acked = Position(self._route.incarnation, self._stream_epoch, offset)
            error = self._not_replicated(batch, missing) if missing else None
            self._accumulator.settle(batch, error)

    def _missing_replicas(self) -> str | None:
        """Wait until enough replicas have what was acknowledged; return what is missing."""
        left_ms = max(int((self.window.oldest.deadline - time.monotonic()) * 1000), 1)
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

    def _handle_refusal(self, reply: list[Any]) -> None:
        """The script did not append the oldest batch, and said why."""
        code = reply[0].decode()
        if code == "HISTORY":
            self.window.rewind()
            found = reply[1].decode()
            begin_epoch(self._connection, self._route.stream, self._route.incarnation, found)
            self._lose_or(self.window.doubt_acknowledged)
        elif code == "FULL":
            self._try_later(reply_errors.stream_full(self._route.stream, reply[1]))
        elif code == "OUTOFSEQ" and reply[1] < self.window.oldest.sequence and self._acked:
            # Certain, even where a hidden history leaves no other trace of it.
            lost_from = self._lost_from()
            self._lose(self._acked.offset - 1 if lost_from is None else lost_from)
        elif code == "NOPRODUCER":
            self._lose_or(self._renumber)  # lost with our records, or forgotten, or evicted
        elif code in ("NOSTREAM", "INCARNATION"):
            last = self._acked.offset - 1 if self._acked else -1
            self._fail_all(reply_errors.stream_gone(self._route.stream, reply[0], last))
        elif code == "EXHAUSTED":
            self._refuse(ServerRefused(f"Stream {self._route.stream!r} has used up its offsets."))
        else:  # OUTOFSEQ above us, STALEPRODUCER: another process uses our id
            _log.error("Producer %s of %r: %s", self._id, self._route.stream, reply)
            self._id = secrets.token_hex(8)
            self._keys[2] = keys.producer(self._route.stream, self._id)
            self._renumber()

    def _try_later(self, error: MeteorError) -> None:
        """The oldest batch was refused, but may be appended later.

        That lifts no doubt: bytes of an earlier sending may still be under way, and find room.
        """
        self._send_again(error)
        self._pause()

    def _refuse(self, error: MeteorError) -> None:
        """The oldest batch will never be appended."""
        self._fail(self.window.pop_oldest(), error)
        self._renumber()

    def _in_new_epoch(self) -> bool:
        return self._acked is not None and self._stream_epoch != self._acked.epoch

    def _lost_from(self) -> int | None:
        """Return the first acknowledged offset that the server has lost, or None."""
        if self._acked is None:
            return None
        epochs = self._connection.call("HGET", self._keys[1], "epochs")
        end = self._connection.call("HGET", self._keys[1], "next")
        if epochs is None or end is None:
            return None  # the stream is gone, which the next sending will show
        return diverged_at(self._acked, epochs.decode(), int(end))

    def _lose_or(self, proceed: Callable[[], None]) -> None:
        lost_from = self._lost_from()
        if lost_from is None:
            proceed()
        else:
            self._lose(lost_from)

    def _lose(self, first: int) -> None:
        """Acknowledged records are gone. Nothing sent after them can be there either."""
        self._fail_all(self._report_loss(first))

    def _report_loss(self, first: int) -> LogTruncated:
        assert self._acked is not None, "what is lost was known"
        last = self._acked.offset - 1
        error = reply_errors.acknowledged_records_lost(self._route.stream, min(first, last), last)
        self._acked = None
        self._accumulator.report_loss(error)
        return error

    def _fail_all(self, error: MeteorError) -> None:
        self.window.clear_doubts()
        self.window.add(self._accumulator.take_all())  # there a forked child looks for them
        while self.window:
            self._accumulator.settle(self.window.oldest, error)
            self.window.pop_oldest()
        self._renumber()

    def _renumber(self) -> None:
        """Begin the next producer epoch with what is left; the batches in doubt cannot be sent."""
        while self.window and self.window.oldest.in_doubt:
            self._fail(self.window.pop_oldest(), None)
        self.window.renumber()

    def _expire(self) -> None:
        """Fail the batches whose deadline has passed."""
        while self.window and time.monotonic() > self.window.oldest.deadline:
            if self.window.sent:  # a late reply must not be taken for that of another batch
                self._connection.close()
                self.window.doubt_sent()
            self._refuse(self._reason or self._timeout_error())

    def _give_up(self) -> None:
        """Give every batch an outcome at the end."""
        self.window.doubt_sent()
        self.window.add(self._accumulator.take_all())
        while self.window:
            self._fail(self.window.oldest, closed_error(self._route.stream))
            self.window.pop_oldest()

    def _fail(self, batch: Batch, error: MeteorError | None) -> None:
        """Settle a batch with ``error``, unless it is, or may be, in the log."""
        if batch.acknowledged and not self._route.acks:
            error = None
        elif batch.acknowledged:
            error = self._not_replicated(batch, "the wait for replicas was cut short.")
        elif batch.in_doubt or error is None:
            error = reply_errors.outcome_unknown(self._route.stream, self._reason)
        self._accumulator.settle(batch, error)

    # -- small parts ---------------------------------------------------------------------------

    def _drain(self) -> None:
        """Read the replies of the batches behind a refused one, which will be sent again.

        The batches before it are settled, so that the refused one is the oldest.
        """
        for batch in self.window.behind_next_to_reply():
            try:
                reply = self._connection.read()
            except ConnectionFailed:
                raise
            except MeteorError:
                continue  # the batch is sent again, and has its reply then
            if reply[0] == b"OK":  # the refused one has been in the log before
                batch.in_doubt = True
        if self.window.acknowledged:
            self._settle_acknowledged()

    def _send_again(self, reason: MeteorError) -> None:
        """Send the whole window again, after a failure."""
        self.window.rewind()
        self._failures += 1
        self._reason = reason

    def _pause(self) -> None:
        pause = pause_s(max(self._failures, 1), *_BACKOFF_S)
        left = self.window.oldest.deadline - time.monotonic() if self.window else 0
        self._abandoned.wait(max(min(pause, left), 0))

    def _patience(self) -> float:
        """Seconds to wait for the server: not much beyond the oldest batch's deadline."""
        left = self.window.oldest.deadline - time.monotonic()
        return min(max(left, 0.05), SOCKET_TIMEOUT_S)

    def _timeout_error(self) -> ConnectionFailed:
        return ConnectionFailed(
            f"The record could not be sent to stream {self._route.stream!r} in time; the server "
            f"at {self._connection.address} is too slow, or delivery_timeout too short."
        )

    def _not_replicated(self, batch: Batch, missing: str) -> NotReplicated:
        why = f"is in the log, but {missing}"
        return NotReplicated(why, stream=self._route.stream, offset=batch.base_offset)
