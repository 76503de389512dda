"""The sender: a thread that appends batches to the log, each exactly once and in order.

Several batches are in flight at a time (in_flight.py). Each carries (producer id, epoch, sequence),
and the server remembers each producer's last eight sequence numbers and their offsets. If a reply
is lost, the sender sends the batch again under the same number, and the reply shows what happened:

* A reply from the script proves whether the batch is in the log. An error reply, or no reply,
  proves nothing about an *earlier* attempt: the batch stays ``in_doubt`` until the script replies.
  There is one exception: after the reply "full", as after the error "out of memory", the batch
  stays in doubt, because an earlier attempt may arrive late and find room.
* A batch cannot be in the log unless the one before it is. So if a batch is refused and was never
  in doubt, the batches after it may be renumbered, in the next producer epoch. But a batch that is
  refused only temporarily may be appended later. The batches sent after it may then be appended
  too, so they are in doubt.
* A batch that is still in doubt at its deadline fails as ``OutcomeUnknown``, with all batches sent
  after it. The next producer epoch fences off attempts that arrive late.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import Any

from zlib_ng.zlib_ng import crc32

from meteor_py.errors import (
    ConnectionFailed,
    LogTruncated,
    MeteorError,
    NotReplicated,
    OutOfMemory,
    ServerRefused,
)
from meteor_py.log.epochs import begin_epoch
from meteor_py.log.handle import StreamHandle
from meteor_py.publish.accumulator import Accumulator, closed_error
from meteor_py.publish.batch import Batch
from meteor_py.publish.direct_line import DirectLine
from meteor_py.publish.in_flight import InFlightWindow
from meteor_py.publish.overrun_watch import OverrunWatch
from meteor_py.records.config import PublisherConfig
from meteor_py.records.frame import encode, fingerprint
from meteor_py.records.ordering_index import OrderingRule
from meteor_py.records.position import Position, diverged_at, newest_epoch, path_of
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import EntryIdTaken, ScriptMissing
from meteor_py.redis.scripts import PUBLISH
from meteor_py.redis.topology import pause_after_s
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.completion import SENDER_PREFIX
from meteor_py.runtime.locks import SignalSafeEvent
from meteor_py.runtime.threads import JoinableThread

_log = logging.getLogger(__name__)

#: Milliseconds for which the server remembers an idle producer.
PRODUCER_TTL_MS = 24 * 3600 * 1000
#: Seconds after which the sender renews a producer's lifetime. The direct line does not renew it.
_RENEW_PRODUCER_S = 3600.0
#: Minimum seconds to wait for the server, even if a batch is about to expire.
_WAIT_MIN_S = 0.05
#: Seconds without an acknowledgement after which the sender reads the server's replication id
#: again: a server can be demoted and promoted while the connection is idle.
_REPLICATION_ID_S = 1.0
#: Maximum seconds for a check for lost records, and for each reply within it.
_CHECK_MAX_S, _CHECK_S = 3.0, 1.0
#: First and longest pause between attempts, in seconds. The pause doubles after each failure.
_BACKOFF_S = (0.02, 0.5)


class Sender:
    """A publisher's sending half. The publisher starts and joins the sender's thread."""

    def __init__(
        self, handle: StreamHandle, config: PublisherConfig, accumulator: Accumulator
    ) -> None:
        self._connection = handle.open_connection()
        self._accumulator = accumulator
        self._handle = handle
        self._stream = handle.name
        self._incarnation = handle.incarnation
        self._acks = config.acks
        self._compression = config.compression or handle.config.compression
        self._checksum = handle.config.checksum
        self._ordering = handle.config.ordering_rule
        self._id = secrets.token_hex(8)
        self._keys = [*handle.keys, keys.producer(handle.name, self._id), *handle.index_keys]
        #: The batches in flight. A forked child abandons them.
        self.window = InFlightWindow()
        self._stream_epoch = 0  # at the time of the last acknowledgement
        self._path = path_of(handle.epochs)  # of the epochs last read; each position includes it
        self._known_epoch = newest_epoch(handle.epochs)
        self._send_whole = False  # whether to send the script's text, because the server lacks it
        self._acked: Position | None = None  # the position after the last acknowledged batch
        self._failures = 0  # consecutive failures
        self._reason: MeteorError | None = None  # the last failure's error
        self._acknowledged_at = 0.0  # time of the last acknowledgement, on the monotonic clock
        self._producer_renewed_at = 0.0
        self._overruns = OverrunWatch(handle)
        self._line = DirectLine(
            *(accumulator, self._connection, self.window),
            compression=self._compression,
            checksum=self._checksum,
            delivery_timeout_s=config.delivery_timeout,
        )
        accumulator.use_line(self._line)
        #: When a check for lost records must end, on the monotonic clock. ``close`` sets it.
        self.check_by = math.inf
        self._abandoned = SignalSafeEvent()
        self._thread = JoinableThread(self._run, f"{SENDER_PREFIX}-{handle.name}")

    def start(self) -> None:
        self._thread.start()

    def abandon(self) -> None:
        """Stop sending, and fail the remaining batches. Interrupts a wait for the server."""
        self._abandoned.set()
        self._connection.interrupt()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._abandoned.is_set():
                due = self._overruns.is_due(self._end())
                if not due:  # if due, first settle the batches in flight
                    self._fill()
                if self.window:
                    self._exchange()
                elif due:
                    self._overruns.check(self._connection, self._end())
                elif (check := self._accumulator.checks_to_do()) is not None:
                    self._check_for_loss()
                    self._accumulator.finish_check(check)
                elif self._accumulator.drained():
                    self._check_for_loss()
                    if self._overruns.is_due(self._end(), last=True):
                        self._overruns.check(self._connection, self._end())
                    break
        except BaseException as error:
            _log.exception("The sender for stream %r died.", self._stream)
            self._accumulator.close(reply_errors.publisher_failed(self._stream, error))
        finally:
            self._fail_rest()
            self._connection.close()
            self._accumulator.note_sender_ended()

    def _end(self) -> int:
        """Return the offset after the last acknowledged record."""
        return 0 if self._acked is None else self._acked.offset

    def _fill(self) -> None:
        """Take batches until the window is full. Wait for a batch only if the window is empty."""
        while self.window.has_room():
            if self.window:
                batch = self._accumulator.take(busy=True)
            else:
                batch = self._accumulator.take(busy=False, lend=self._prepare_line())
                self._take_over_line()
            if batch is None:
                return
            self.window.add([batch])  # before encoding, so that a forked child finds it here
            try:
                assert batch.columns is not None
                batch.encoded = encode(batch.columns, self._compression)
                if self._ordering is not None:
                    batch.index = self._ordering.index(batch.columns)
            except Exception as error:
                failure = reply_errors.publisher_failed(self._stream, error)
                self._accumulator.settle(self.window.pop_newest(), failure)
                continue
            self.window.number_newest()

    def _prepare_line(self) -> bool:
        """Prepare the direct line for the next record; return whether it may be lent."""
        history = self._connection.known_history
        if (
            history is None
            or self._connection.wire is None
            or self._acked is None
            or self._acks
            or self._failures
            or self._send_whole
            or not self.window.next_sequence  # the server does not know this producer epoch yet
            or self._idle_s() > _REPLICATION_ID_S
        ):
            return False
        known = (self._incarnation, history, self.window.epoch)
        self._line.prepare(
            self._connection.script_call(PUBLISH, self._keys, known),
            self._ordering,
            self._known_epoch,
            self._acknowledged_at,
            _REPLICATION_ID_S,
            self._producer_renewed_at + _RENEW_PRODUCER_S,
        )
        return True

    def _take_over_line(self) -> None:
        """Take the connection back from the direct line, and adopt the progress made on it."""
        broken = self._line.take_over()
        if self._line.end_offset and self._acked is not None:
            self._stream_epoch = self._known_epoch  # the line accepts only replies in that epoch
            self._acknowledged_at = max(self._acknowledged_at, self._line.acknowledged_at)
            self._acked = Position(
                self._incarnation, self._stream_epoch, self._line.end_offset, self._path
            )
            self._line.end_offset = 0
        if broken:
            self._connection.close()
            self.window.doubt_sent()
            self.window.rewind()

    def _exchange(self) -> None:
        """Send the unsent batches, read one reply, and handle failures."""
        try:
            self._limit_wait()
            self._send()
            self._limit_wait()
            self._receive()
        except ConnectionFailed as error:
            self.window.doubt_sent()
            self._send_again(error)
            self._pause()
        except ServerRefused as error:  # the server refused a command other than publish
            self.window.doubt_sent()
            self._reason = error  # the errors of batches in doubt name it as their cause
            self._refuse(error)
        self._expire()

    def _limit_wait(self) -> None:
        """Limit the next wait for the server to the client's timeout and the oldest deadline."""
        left_s = self.window.oldest.deadline - time.monotonic()
        self._connection.timeout_s = min(max(left_s, _WAIT_MIN_S), self._handle.connector.timeout_s)

    def _send(self) -> None:
        idle = self._idle_s() > _REPLICATION_ID_S
        if idle and not self.window.sent and self._connection.connected:
            self._connection.refresh_history()
        replication_id = self._connection.history  # connects, if needed
        for batch in self.window.unsent():
            assert batch.encoded is not None
            name, payload = batch.encoded
            arguments = (
                self._incarnation,
                replication_id,
                self.window.epoch,
                batch.sequence,
                batch.count,
                fingerprint(payload),
                PRODUCER_TTL_MS,
                name,
                payload,
                crc32(payload) if self._checksum else "",
                self._known_epoch,
                *batch.index,
            )
            batch.stream_epoch = self._known_epoch
            self._producer_renewed_at = time.monotonic()
            command = self._connection.script_call(
                PUBLISH, self._keys, arguments, whole=self._send_whole
            )
            self._limit_wait()  # again, because the batches before it may have taken long
            self.window.sent += 1  # before sending: an interrupted send leaves the batch in doubt
            self._connection.send([command])
            self._send_whole = False

    def _idle_since(self) -> float:
        return max(self._acknowledged_at, self._line.acknowledged_at)

    def _idle_s(self) -> float:
        return time.monotonic() - self._idle_since()

    def _receive(self) -> None:
        try:
            reply = self._connection.read()
        except ConnectionFailed as error:
            if error.answered and not self.window.next_to_reply.in_doubt:
                self.window.doubt_after_next_to_reply()
                self.window.rewind_to_acknowledged()  # this batch is not in the log
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
            self._refuse(reply_errors.corrupt_stream(self._stream))
        except ServerRefused as error:
            self._drain()
            self._refuse(error)
        else:
            if type(reply) is int:  # a bare offset, in the epoch that the request named
                self._acknowledge(reply, self.window.next_to_reply.stream_epoch)
            elif reply[0] == b"OK":
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
        all_acknowledged = self.window.acknowledged == self.window.sent
        if all_acknowledged or not (self._acks or self._in_new_epoch()):
            self._settle_acknowledged()

    def _settle_acknowledged(self) -> None:
        if self._in_new_epoch():  # another client has begun this epoch: check for lost records
            try:
                _, lost_from = self._lost_from()
            except ServerRefused:  # no permission to read meta; a warning was logged earlier
                self._known_epoch, lost_from = self._stream_epoch, None
            if lost_from is not None:
                self._report_loss(lost_from)
        missing = self._missing_replicas() if self._acks else None
        for _ in range(self.window.acknowledged):
            batch = self.window.pop_oldest()
            self._note_acknowledged(batch)
            error = self._not_replicated(batch, missing) if missing else None
            self._accumulator.settle(batch, error)

    def _note_acknowledged(self, batch: Batch) -> None:
        """Remember that the server has the records up to the end of a batch."""
        offset = batch.base_offset + batch.count
        self._acked = Position(self._incarnation, self._stream_epoch, offset, self._path)

    def _missing_replicas(self) -> str | None:
        """Wait for the replicas. Return None if enough confirmed in time, else the problem."""
        left_ms = max(int((self.window.oldest.deadline - time.monotonic()) * 1000), 1)
        timeout_s = left_ms / 1000 + self._connection.timeout_s
        wanted = self._acks
        try:
            seen = int(self._connection.call("WAIT", wanted, left_ms, timeout_s=timeout_s))
        except ServerRefused as error:
            return f"the server refused to wait for replicas: {error}"
        if seen >= wanted:
            return None
        return f"only {seen} of {wanted} replicas confirmed it in time. Check the replicas."

    # -- failures ------------------------------------------------------------------------------

    def _handle_refusal(self, reply: list[Any]) -> None:
        """Handle a script reply that says that the oldest batch was not appended."""
        code = reply[0].decode()
        if code == "HISTORY":
            self.window.rewind()
            found = reply[1].decode()
            begin_epoch(self._connection, self._stream, self._incarnation, found)
            self._lose_or(self.window.doubt_acknowledged)
        elif code == "ORDERED":
            self._start_indexing(reply[1].decode())
        elif code == "FULL":
            self._try_later(reply_errors.stream_full(self._stream, reply[1]))
        elif code == "OUTOFSEQ" and reply[1] < self.window.oldest.sequence and self._acked:
            # This proves a loss, even if the server hides its replication id.
            _, lost_from = self._lost_from()
            self._lose(self._acked.offset - 1 if lost_from is None else lost_from)
        elif code == "NOPRODUCER":
            self._lose_or(self._renumber)  # the producer's key was lost, expired, or evicted
        elif code in ("NOSTREAM", "INCARNATION"):
            last = self._acked.offset - 1 if self._acked else -1
            lost = self._connection.data_lost
            self._fail_all(reply_errors.stream_gone(self._stream, reply[0], last, data_lost=lost))
        elif code == "EXHAUSTED":
            self._refuse(
                ServerRefused(
                    f"Stream {self._stream!r} has used up its offsets. Publish to a new stream."
                )
            )
        elif code == "INVALID":
            self._refuse(ServerRefused(f"The server refused a frame for stream {self._stream!r}."))
        else:  # STALEPRODUCER, or OUTOFSEQ with a higher sequence: another process uses our id
            _log.error(
                "Another process is using producer id %s in stream %r: %s",
                self._id, self._stream, reply,
            )  # fmt: skip
            self._id = secrets.token_hex(8)
            self._keys[2] = keys.producer(self._stream, self._id)
            self._renumber()

    def _start_indexing(self, ordering_key: str) -> None:
        """Send all batches again with index entries: the stream now has an ordering key."""
        self._handle.adopt_ordering_key(ordering_key)
        self._ordering = OrderingRule(ordering_key)
        self._keys = [*self._keys[:3], *self._handle.index_keys]
        for batch in self.window:
            if batch.columns is not None:  # None if the batch is already settled
                batch.index = self._ordering.index(batch.columns)
        self.window.rewind()

    def _try_later(self, error: MeteorError) -> None:
        """Retry the oldest batch after a pause, because the refusal is only temporary.

        A batch in doubt stays in doubt: an earlier attempt may still arrive and find room.
        """
        self._send_again(error)
        self._pause()

    def _refuse(self, error: MeteorError) -> None:
        """Fail the oldest batch, which was refused for good, or whose deadline has passed."""
        batch = self.window.pop_oldest()
        if not batch.in_doubt and not batch.acknowledged:
            self.window.clear_doubts()  # no later batch can be in the log without it
        self._fail(batch, error)
        self._renumber()

    @property
    def must_check(self) -> bool:
        """Whether acknowledged records might have been lost since the last acknowledgement.

        For one second, and on the same connection, an acknowledgement proves that its records
        still exist. If the connection is readable although no reply is due, the server has
        probably closed it.
        """
        idle_since = self._idle_since()
        if self._acked is None:
            return False
        if self._idle_s() > _REPLICATION_ID_S or not self._connection.connected:
            return True
        readable = self._connection.readable
        # Check for a due reply only now: another thread may have just read it from the socket.
        is_due = self.window or self._line.batch is not None
        return readable and not is_due and self._idle_since() == idle_since

    def _check_for_loss(self) -> None:
        """Report acknowledged records that a failover has lost. Takes a few seconds at most.

        If the publisher sends another record, the reply reveals the loss. If it only flushes or
        closes, only this check does.
        """
        deadline = min(time.monotonic() + _CHECK_MAX_S, self.check_by)
        attempt = 0
        while (left_s := deadline - time.monotonic()) > 0:
            if not self.must_check or self._abandoned.is_set():
                return
            attempt += 1
            self._connection.timeout_s = min(left_s, _CHECK_S)
            try:
                incarnation, lost_from = self._lost_from()
            except ConnectionFailed as error:
                self._reason = error
                self._abandoned.wait(min(pause_s(attempt, *_BACKOFF_S), left_s))
            except ServerRefused as error:
                self._reason = error
                break
            else:
                self._report_if_lost(incarnation, lost_from)
                return
        _log.warning(
            "Cannot check that the server still has the records published to stream %r: %s",
            self._stream, self._reason,
        )  # fmt: skip

    def _report_if_lost(self, incarnation: bytes | None, lost_from: int | None) -> None:
        assert self._acked is not None, "checked before"
        try:
            reply_errors.check_incarnation(
                *(self._stream, self._incarnation, incarnation, self._acked.offset - 1),
                data_lost=self._connection.data_lost,
            )
        except MeteorError as error:
            self._accumulator.report_loss(error)
        else:
            if lost_from is not None:
                self._report_loss(lost_from)

    def _in_new_epoch(self) -> bool:
        return self._stream_epoch != self._known_epoch

    def _lost_from(self) -> tuple[bytes | None, int | None]:
        """Read the stream's epochs, and find the first acknowledged offset that was lost.

        Returns:
            The stream's incarnation, and that offset. The offset is None if none was lost, or if
            the stream is gone.
        """
        fields = ("incarnation", "epochs", "next")
        incarnation, epochs, end = self._connection.call("HMGET", self._keys[1], *fields)
        if epochs is None or end is None:
            return incarnation, None  # the stream is gone; the next reply to a batch will say so
        epochs = epochs.decode()
        self._path, self._known_epoch = path_of(epochs), newest_epoch(epochs)
        if self._acked is None:
            return incarnation, None
        return incarnation, diverged_at(self._acked, epochs, int(end))

    def _lose_or(self, proceed: Callable[[], None]) -> None:
        _, lost_from = self._lost_from()
        if lost_from is None:
            proceed()
        else:
            self._lose(lost_from)

    def _lose(self, first: int) -> None:
        """Report lost acknowledged records, and fail all pending records.

        None of the pending records can be in the log.
        """
        self._fail_all(self._report_loss(first))

    def _report_loss(self, first: int) -> LogTruncated:
        assert self._acked is not None, "only acknowledged records are reported lost"
        last = self._acked.offset - 1
        error = reply_errors.acknowledged_records_lost(self._stream, min(first, last), last)
        self._acked = None
        self._accumulator.report_loss(error)
        return error

    def _fail_all(self, error: MeteorError) -> None:
        self.window.clear_doubts()
        self.window.add(self._accumulator.take_all())  # so that a forked child finds them here
        while self.window:
            self._accumulator.settle(self.window.oldest, error)
            self.window.pop_oldest()
        self._renumber()

    def _renumber(self) -> None:
        """Begin the next producer epoch.

        First fail the batches in doubt and settle the acknowledged ones: if the sender sent them
        again in the next epoch, they could be in the log twice.
        """
        while self.window and (self.window.oldest.in_doubt or self.window.oldest.acknowledged):
            self._fail(self.window.pop_oldest(), None)
        self.window.renumber()

    def _expire(self) -> None:
        """Fail the batches whose deadline has passed."""
        while self.window and time.monotonic() > self.window.oldest.deadline:
            if self.window.sent:  # a late reply must not be attributed to another batch
                self._connection.close()
                self.window.doubt_unacknowledged()
            self._refuse(self._expiry_error())
        for batch in self._accumulator.take_expired():
            self._accumulator.settle(batch, self._expiry_error())

    def _expiry_error(self) -> MeteorError:
        return self._reason or ConnectionFailed(
            f"The record could not be sent to stream {self._stream!r} in time. The server "
            f"at {self._connection.address} is too slow, or delivery_timeout is too short."
        )

    def _fail_rest(self) -> None:
        """Fail the remaining batches when the thread ends."""
        self._take_over_line()
        self.window.doubt_unacknowledged()
        self.window.add(self._accumulator.take_all())
        while self.window:
            self._fail(self.window.oldest, closed_error(self._stream))
            self.window.pop_oldest()

    def _fail(self, batch: Batch, error: MeteorError | None) -> None:
        """Settle a batch: with ``error``, unless the batch is, or may be, in the log."""
        if batch.in_doubt or (error is None and not batch.acknowledged):
            error = reply_errors.outcome_unknown(self._stream, self._reason)
        elif batch.acknowledged:
            self._note_acknowledged(batch)
            interrupted = "the wait for replicas was interrupted."
            error = self._not_replicated(batch, interrupted) if self._acks else None
        self._accumulator.settle(batch, error)

    def _drain(self) -> None:
        """Read the replies to the batches after a refused one. These batches must be sent again.

        Also settles the batches before the refused one, so that the refused one is the oldest.
        """
        for batch in self.window.behind_next_to_reply():
            try:
                reply = self._connection.read()
            except ConnectionFailed:
                raise
            except MeteorError:
                continue  # the batch is sent again, and gets another reply
            # If this batch is in the log, an earlier attempt has put it and the refused one there.
            if type(reply) is int or reply[0] == b"OK":
                batch.in_doubt = True
        if self.window.acknowledged:
            self._settle_acknowledged()

    def _send_again(self, reason: MeteorError) -> None:
        """Mark the whole window as unsent, after a failure."""
        self.window.rewind()
        self._failures += 1
        self._reason = reason

    def _pause(self) -> None:
        pause = pause_after_s(self._reason, max(self._failures, 1), _BACKOFF_S)
        left = self.window.oldest.deadline - time.monotonic() if self.window else 0
        self._abandoned.wait(max(min(pause, left), 0))

    def _not_replicated(self, batch: Batch, missing: str) -> NotReplicated:
        why = f"is in the log, but {missing}"
        return NotReplicated(why, stream=self._stream, offset=batch.base_offset)
