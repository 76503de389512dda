"""The direct line: a publishing thread sends a record itself, and a waiting thread reads its reply.

While the sender has nothing to do, it lends its connection. The next publish then sends its record
from the calling thread, and ``ack.result()`` reads the reply in the thread that calls it. Without
the direct line, each record changes threads twice and needs 18 system calls instead of 4, which
takes longer than the server's work. The sender takes the connection back for everything else, and
continues as if it had sent the record itself.

The line is in one of six states:

    SENDER     the sender owns the connection
    FREE       lent, no record in flight
    SENT       lent, one record in flight, and no thread is reading its reply
    READING    lent, and a thread is reading the reply
    RETURNED   lent, and the sender must continue: handle a reply, or call a callback
    BROKEN     a thread is in the middle of sending or settling, or was interrupted there

Invariants:

1. One owner. The sender owns connection, window and sequence numbers in state SENDER. In all other
   states the thread that holds the accumulator's lock owns them, except that a READING thread may
   receive. Only the sender's thread enters and leaves SENDER, with the lock held.
2. Order. At most one record is in flight on the line, and only if no other record waits. So records
   are in the log in the order in which their publishers took the lock.
3. One moment of publishing. ``send`` registers a record with assignments that no signal
   handler can interrupt. If ``publish()`` is interrupted before them, nothing is published. If it
   is interrupted after them, the record is still sent, if need be by the sender. A record is
   settled in the same way.
4. No guesses. The state is BROKEN from before the first byte is sent until after the last, and
   while a record is settled. If the sender finds BROKEN, it closes the connection and sends the
   record again under the same sequence number, which the server recognises.
5. The sender decides. Only the sender retries, fails records, closes connections, calls callbacks,
   and handles a reply that is not a bare offset.
6. Exact counts. A record in flight here counts as pending, in bytes and as a batch, from the moment
   of publishing until it is settled. ``flush()``, ``close()`` and ``max_pending_bytes`` see it.
7. No stale server. If the last acknowledgement is more than a second old, no record may use the
   line: the sender must read the server's replication id first. The same applies when the
   producer's lifetime must be renewed.
8. Bounded waits, one lock. A thread reads for at most one second, and not beyond its record's
   deadline. No thread takes the accumulator's lock while it holds the lock of a completion. If a
   signal handler uses the publisher while its own thread is READING, it stops that read first.

A signal handler may run during any call, even while its thread holds the lock, and may flush. A
flush releases the lock, and the sender takes over. So each method checks the state and changes it
in consecutive statements, without a call between them.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import redis
from zlib_ng.zlib_ng import crc32

from meteor_py.publish.batch import Batch
from meteor_py.publish.in_flight import InFlightWindow
from meteor_py.records.config import Compression
from meteor_py.records.frame import Columns, encode, fingerprint
from meteor_py.records.ordering_index import OrderingRule
from meteor_py.redis.connection import Connection
from meteor_py.redis.connection import encode as encode_commands
from meteor_py.redis.wire import NO_REPLY, Wire
from meteor_py.runtime.locks import SignalSafeCondition

if TYPE_CHECKING:
    from meteor_py.publish.accumulator import Accumulator

#: Largest record that is sent directly, in bytes. It always fits into an empty send buffer.
BYTES_MAX = 16_384
#: The same limit if the publisher compresses. Records of this size stay uncompressed, and
#: compressing larger ones would hold the lock for too long.
_COMPRESSED_BYTES_MAX = 511
#: Seconds that a thread waits for a reply before it leaves the record to the sender.
_READ_S = 1.0
#: Seconds between the sender's checks on a lent line. If no thread has read a reply for two checks,
#: the sender reads it.
_LOOK_S = 0.05
#: Seconds for which the sender lends the line before it checks whether other work is due.
_LEND_S = 1.0
#: Seconds that the sender waits before it lends the line after a batch of several records. In a
#: loop of ``publish()`` calls the next batch is about to arrive, and waiting keeps frames large.
_BULK_S = 0.002


#: Value, key, headers and timestamp of a record.
Row = tuple[bytes, bytes | None, dict[str, bytes] | None, int | None]


class State(enum.Enum):
    """The states of the line; see the module docstring."""

    SENDER = enum.auto()
    FREE = enum.auto()
    SENT = enum.auto()
    READING = enum.auto()
    RETURNED = enum.auto()
    BROKEN = enum.auto()


# Module-level names, because looking up an enum member is slower.
_SENDER, _FREE, _SENT = State.SENDER, State.FREE, State.SENT
_READING, _RETURNED, _BROKEN = State.READING, State.RETURNED, State.BROKEN


class DirectLine:
    """A publisher's direct line."""

    def __init__(
        self,
        accumulator: Accumulator,
        connection: Connection,
        window: InFlightWindow,
        *,
        compression: Compression,
        checksum: bool,
        delivery_timeout_s: float,
    ) -> None:
        self._accumulator = accumulator
        self._connection = connection
        self._window = window
        self._compression = compression
        self._checksum = checksum
        self._ordering: OrderingRule | None = None
        self._delivery_timeout_s = delivery_timeout_s
        self._bytes_max = BYTES_MAX if compression == "none" else _COMPRESSED_BYTES_MAX
        self.state = _SENDER
        #: The record in flight on the line.
        self.batch: Batch | None = None
        self._settling: Batch | None = None  # settled, but waiting threads may not be awake yet
        self._uncalled: deque[Batch] = deque()  # settled batches with callbacks still to be called
        self._next_sequence = 0
        #: The offset after the last record acknowledged since the line was lent; 0 if none was.
        self.end_offset = 0
        #: The time of the last acknowledgement on the line; 0 before the first.
        self.acknowledged_at = 0.0
        self._reader = 0  # the identifier of the READING thread; 0 if there is none
        self._read_until = 0.0  # when that thread must end its read, on the monotonic clock
        self._usable_until = 0.0  # when the line stops accepting records, on the same clock
        self._renew_at = self._valid_s = 0.0
        self._stream_epoch = 0
        self._lent = 0  # number of times that the line was lent
        self._command: Sequence[Any] = ()  # the command that ``_head`` encodes
        self._head = self._epoch_argument = b""

    def use_lock(self, lock: threading.RLock, work: SignalSafeCondition) -> None:
        """Share the accumulator's lock, and the condition that wakes the sender."""
        self._lock = lock
        self._work = work

    # -- for the sender's thread ---------------------------------------------------------------

    def prepare(
        self,
        command: Sequence[Any],
        ordering: OrderingRule | None,
        stream_epoch: int,
        acknowledged_at: float,
        valid_s: float,
        renew_at: float,
    ) -> None:
        """Make the line ready to be lent.

        Args:
            command: The publish command, up to and including the producer epoch.
            ordering: The stream's ordering rule, if it has an ordering key.
            stream_epoch: The last stream epoch that the sender has read.
            acknowledged_at: When the server last acknowledged a batch, on the monotonic clock.
            valid_s: Seconds after an acknowledgement for which the line may be used.
            renew_at: When the sender must send a batch itself, to renew the producer's lifetime.
        """
        if self._command != command:
            self._command = command
            # Omit the number of arguments, which depends on the index entry.
            self._head = b"".join(encode_commands([command])).partition(b"\r\n")[2]
        self._ordering = ordering
        self._stream_epoch = stream_epoch
        self._epoch_argument = b"$%d\r\n%d\r\n" % (len(str(stream_epoch)), stream_epoch)
        self._next_sequence = self._window.next_sequence
        self.end_offset = 0
        self._valid_s, self._renew_at = valid_s, renew_at
        self._usable_until = min(acknowledged_at + valid_s, renew_at)

    def lend(self, bulk: bool, has_work: Callable[[], bool]) -> None:
        """Let publishers use the connection until the sender has work. The caller holds the lock.

        Args:
            bulk: Whether the last batch had several records.
            has_work: Returns whether the sender has work; see ``Accumulator.has_work``.
        """
        if bulk and (self._work.wait(_BULK_S) or has_work()):
            return
        self._lent += 1
        self.state = _FREE
        self._wait_for_work(has_work)
        if self.state in (_FREE, _SENT):
            # The caller releases the lock before it takes the line over. Until then, no thread may
            # send a record ahead of those that wait for the sender, or read the next reply.
            self.state = _RETURNED

    def _wait_for_work(self, has_work: Callable[[], bool]) -> None:
        """Wait until the sender has work, or the lent line needs its attention."""
        lent_until = time.monotonic() + _LEND_S
        unread: Batch | None = None  # the batch in flight at the last check
        while True:
            woken = self._work.wait(_LOOK_S)
            now = time.monotonic()
            if self.state is _READING:
                if now < self._read_until + _READ_S:
                    continue  # the reading thread wakes this thread if there is work
                self._break_off()  # the reading thread was interrupted
            batch = self.batch
            if self.state in (_RETURNED, _BROKEN) or self._uncalled or has_work():
                return
            if not woken and ((batch is unread is not None) or now > lent_until):
                return
            if batch is None and now > self._usable_until:
                return
            unread = batch

    def take_over(self) -> bool:
        """Take the connection back; return whether the caller must close it and send again.

        Moves the record in flight, if any, into the window, as if the sender had sent the record.
        """
        if self.state is _SENDER:
            return False
        with self._lock:
            broken = self.state in (_BROKEN, _READING)
            self.state = _SENDER
            self._window.next_sequence = self._next_sequence
            if self.batch is not None:
                self._window.add_sent(self.batch)
            settling = self._settling
            self.batch = self._settling = None
        if settling is not None:  # the thread that was settling it was interrupted, so finish
            settling.settle_quietly()
            settling.run_callbacks()
        while self._uncalled:
            self._uncalled.popleft().run_callbacks()
        return broken

    def abandon(self) -> list[Batch]:
        """Return the record in flight, in a forked child. The parent process sends it."""
        batch = self.batch
        self.batch = self._settling = None
        self.state = _SENDER
        return [] if batch is None else [batch]

    # -- for publishing threads, which hold the lock -------------------------------------------

    def is_free(self) -> bool:
        """Return whether the next record may be sent on the line. If so, no other is in flight."""
        if self.state is _SENT:
            self._settle_if_replied()
        else:
            self.stop_own_read()
        return self.state is _FREE and time.monotonic() < self._usable_until

    def send(self, row: Row, size: int, nbytes: int) -> Batch | None:
        """Send one record on a free line; return None if the sender must send it.

        Args:
            row: Value, key, headers and timestamp.
            size: Size of the record in bytes.
            nbytes: Number of bytes that count as pending.
        """
        if size > self._bytes_max:
            return None
        lent, accumulator = self._lent, self._accumulator
        batch = self._make_batch(row, nbytes)
        request = self._request(batch)
        wire = self._connection.wire
        if self.state is not _FREE or self._lent != lent or wire is None:
            return None  # a signal handler has flushed, so the sender has taken the line over
        self.state = _BROKEN
        self.batch = batch
        self._next_sequence = batch.sequence + 1
        accumulator.begun += 1
        accumulator.pending_bytes += nbytes
        try:
            whole = wire.send_at_once(request)
        except (OSError, redis.RedisError):
            whole = False
        if whole and self.state is _BROKEN and self.batch is batch:
            self.state = _SENT
        elif not whole:
            self._work.notify_all()
        return batch

    def _make_batch(self, row: Row, nbytes: int) -> Batch:
        now = time.monotonic()
        value, key, headers, timestamp = row
        columns = Columns([value])
        batch = Batch(now, now + self._delivery_timeout_s, columns)
        if key is None and headers is None and timestamp is None and self._ordering is None:
            batch.encoded = ("0v", value)
        else:
            batch.columns = columns = Columns(*(None if cell is None else [cell] for cell in row))
            batch.encoded = encode(columns, self._compression)
            if self._ordering is not None:
                batch.index = self._ordering.index(columns)
        batch.count = 1
        batch.nbytes = nbytes
        batch.sequence = self._next_sequence
        batch.stream_epoch = self._stream_epoch
        batch.line = self
        return batch

    def _request(self, batch: Batch) -> bytes:
        """Return the command that publishes a batch. It does not change the producer's lifetime."""
        assert batch.encoded is not None
        name, payload = batch.encoded
        sequence, mark = b"%d" % batch.sequence, b"%d" % fingerprint(payload)
        check = b"%d" % crc32(payload) if self._checksum else b""
        index = b""
        for cell in batch.index:
            index += b"$%d\r\n%b\r\n" % (len(cell), cell)
        return (
            b"*%d\r\n%b$%d\r\n%b\r\n$1\r\n1\r\n$%d\r\n%b\r\n$0\r\n\r\n"
            b"$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n%b%b"
        ) % (
            len(self._command) + 8 + len(batch.index),
            *(self._head, len(sequence), sequence, len(mark), mark),
            *(len(name), name.encode(), len(payload), payload, len(check), check),
            *(self._epoch_argument, index),
        )

    def _settle_if_replied(self) -> None:
        """Settle the record in flight if its reply has arrived."""
        batch, wire = self.batch, self._connection.wire
        if self.state is not _SENT or batch is None or wire is None:
            return
        self.state = _BROKEN
        try:
            reply = wire.read_now()
        except (OSError, redis.RedisError):
            self._work.notify_all()
            return
        if reply is not NO_REPLY:
            self._settle(batch, wire, reply)
        elif self.state is _BROKEN and self.batch is batch:
            self.state = _SENT

    def _settle(self, batch: Batch, wire: Wire, reply: Any) -> None:
        """Settle the record in flight, or leave the reply to the sender. The state is BROKEN."""
        if type(reply) is not int:
            wire.unread(reply)
            if self.state is _BROKEN and self.batch is batch:
                self.state = _RETURNED
            self._work.notify_all()
            return
        accumulator, now = self._accumulator, time.monotonic()
        usable_until = min(now + self._valid_s, self._renew_at)
        if self.state is not _BROKEN or self.batch is not batch:
            return  # a signal handler has flushed, so the sender has taken the record over
        self.batch, self._settling = None, batch
        batch.base_offset = reply
        batch.settled = True
        accumulator.settled += 1
        accumulator.pending_bytes -= batch.nbytes
        self.end_offset, self.acknowledged_at = reply + 1, now
        self._usable_until = usable_until
        batch.settle_quietly()
        if batch.has_callbacks:  # a callback added after settling runs at once
            self._uncalled.append(batch)
            self._work.notify_all()
        accumulator.note_settled()
        if self._settling is batch:
            self._settling = None
            if self.state is _BROKEN:
                self.state = _FREE

    def stop_own_read(self) -> None:
        """End this thread's read, if there is one. The caller is then a signal handler."""
        if self.state is _READING and self._reader == get_ident():
            self._break_off()

    def _break_off(self) -> None:
        """Take the line from a READING thread. The thread wakes when the sender disconnects."""
        if self.state is _READING:
            self._reader = 0
            self.state = _BROKEN
            self._work.notify_all()

    # -- for threads that wait for a record ----------------------------------------------------

    def look_for_reply(self, batch: Batch) -> None:
        """Settle ``batch`` if its reply has arrived and no thread is reading the reply."""
        if self.batch is batch:
            with self._lock:
                self._settle_if_replied()

    def leave_to_sender(self, batch: Batch) -> None:
        """Have the sender read the reply to ``batch`` without delay and call the callbacks."""
        with self._lock:
            if self.state is _SENT and self.batch is batch:
                self.state = _RETURNED
                self._work.notify_all()

    def read_reply(self, batch: Batch, timeout_s: float | None) -> float | None:
        """Read the reply to ``batch`` in this thread, unless another thread is reading it.

        If the batch is still unsettled afterwards, the sender settles it.

        Returns:
            The rest of ``timeout_s``.
        """
        me = get_ident()
        if self.batch is not batch and self._reader != me:
            return timeout_s  # the record is settled, or in the sender's window
        if timeout_s is not None and timeout_s <= 0:
            self.look_for_reply(batch)
            return 0.0
        started = time.monotonic()
        read_s = _READ_S if timeout_s is None else min(timeout_s, _READ_S)
        try:
            wire = self._start_reading(batch, started + read_s, me)
            if wire is not None:
                self._stop_reading(me, wire, wire.read(read_s))
        except redis.TimeoutError:
            self._stop_reading(me, wire, NO_REPLY)
        except (OSError, redis.RedisError):
            self._stop_reading(me)
        except BaseException:  # Ctrl-C: the reply may have been received and lost
            self._stop_reading(me)
            raise
        return None if timeout_s is None else max(started + timeout_s - time.monotonic(), 0.0)

    def _start_reading(self, batch: Batch, read_until: float, me: int) -> Wire | None:
        """Return the wire to read from; None if this thread must not read the reply."""
        with self._lock:
            self.stop_own_read()
            wire = self._connection.wire
            if self.state is not _SENT or self.batch is not batch:
                return None
            if read_until > batch.deadline or wire is None:
                self.state = _RETURNED
                self._work.notify_all()
                return None
            self._read_until, self._reader = read_until, me
            self.state = _READING
            # New records need not wake the sender: they must wait for this reply anyway.
            self._accumulator.note_sender_waits(False)
            return wire

    def _stop_reading(self, me: int, wire: Wire | None = None, reply: Any = None) -> None:
        """End this thread's read, and settle the record if its reply was read.

        ``reply`` is ``NO_REPLY`` after a timeout, and None if the reply may have been lost.
        """
        with self._lock:
            batch = self.batch
            if self.state is not _READING or self._reader != me:
                return  # the sender or a signal handler has broken off this read
            self._reader = 0
            self.state = _BROKEN if reply is not NO_REPLY else _RETURNED
            self._accumulator.note_sender_waits(True)
            if reply is not None and reply is not NO_REPLY and batch is not None and wire:
                self._settle(batch, wire, reply)
            if self.state is not _FREE or self._accumulator.has_work():
                self._work.notify_all()
