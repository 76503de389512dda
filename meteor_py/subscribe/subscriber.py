"""The subscriber: delivers a stream's records in order, alone or as a member of a group."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from meteor_py.errors import GroupError, InvalidInitialOffset, LeaseLost, MeteorError, NotGrouped
from meteor_py.log.handle import StreamHandle
from meteor_py.publish.ack import Ack
from meteor_py.records.codec import Codec
from meteor_py.records.config import (
    OFFSET_MAX,
    InitialOffset,
    SubscriberConfig,
    check_int,
    check_seconds,
)
from meteor_py.records.position import Position
from meteor_py.records.record import ARROW_SCHEMA, Record, RecordBatch
from meteor_py.runtime.clock import now
from meteor_py.runtime.completion import SESSION_PREFIX, forbid_waiting, in_callback
from meteor_py.runtime.lifecycle import Closeable, ClosingOrder, Registry, close_each
from meteor_py.runtime.threads import join_named
from meteor_py.subscribe.fetcher import Fetcher
from meteor_py.subscribe.group_session import GroupSession
from meteor_py.subscribe.lease import member_name
from meteor_py.subscribe.receiver import Handler, OnError, Receiver

if TYPE_CHECKING:
    from meteor_py.stream import Stream

_log = logging.getLogger(__name__)

#: Seconds that ``close()`` and ``deactivate()`` wait for the reply to the last confirm.
_FLUSH_S = 5.0
#: Seconds to wait at interpreter exit for receivers to stop, and the same again for leases to be
#: released.
_EXIT_S = 1.0


class Subscriber(Closeable):
    """A reader of one stream, alone or as a member of a group.

    >>> with stream.subscriber(group="billing") as sub:    # doctest: +SKIP
    ...     for record in sub:
    ...         print(record.offset, record.value)
    ...         sub.confirm(record)

    Only one member of a group reads at a time: the one that holds the group's lease. The others
    wait in ``poll()``. If the owner closes, hangs or dies, one of them continues after the last
    confirmed record.

    Create a subscriber with ``stream.subscriber()``. Use it from one thread at a time, except for
    ``confirm`` and ``close``, which any thread may call.
    """

    def __init__(
        self, stream: Stream, handle: StreamHandle, config: SubscriberConfig, codec: Codec | None
    ) -> None:
        if config.group is None and config.starts_at is InitialOffset.NONE:
            raise InvalidInitialOffset(
                "InitialOffset.NONE requires a group with a confirmed offset. Without a group, use "
                "EARLIEST or LATEST.",
                stream=stream.name,
            )
        self.stream = stream
        self.config = config
        self._handle = handle
        #: The name of this subscriber in its group: host, process and a random part.
        self.member = member_name()
        self._codec = codec
        self._closed = False
        self._pid = os.getpid()
        self._receiver: Receiver | None = None
        self._fetcher = Fetcher(handle, config, self.member, _on_assigned(weakref.ref(self)))
        try:
            if config.group is not None:
                # A subscriber that is garbage-collected without a close() must not keep its lease.
                weakref.finalize(self, self._fetcher.stop).atexit = False
                _open_subscribers.add(self)
            elif config.starts_at is InitialOffset.EARLIEST:
                self.seek("earliest")
            elif not isinstance(config.starts_at, InitialOffset):
                self.seek(config.starts_at)
        except BaseException:
            self._fetcher.close(0.0)
            raise

    def _read_columns(self, columns: Sequence[str]) -> None:
        """Read only these ``ARROW_SCHEMA`` columns from the store.

        Call this before the first poll, and use the batches only for ``to_arrow()``. There, all
        other columns except the offset are null. Records in the ring have all columns, because the
        server sends whole frames.

        Raises:
            ValueError: There is no such column.
        """
        unknown = set(columns) - set(ARROW_SCHEMA.names)
        if unknown:
            raise ValueError(
                f"Records have no column {sorted(unknown)[0]!r}. Use the names in ARROW_SCHEMA."
            )
        self._fetcher.buffer.read_columns(list(columns))

    @property
    def group(self) -> str | None:
        """The name of the group; None if the subscriber reads alone."""
        return self.config.group

    # -- reading -------------------------------------------------------------------------------

    def poll(self, timeout: float | None = 1.0, max_records: int = 10_000) -> RecordBatch:
        """Return the next records, waiting up to ``timeout`` seconds for the first of them.

        In a group, ``poll`` first acquires the lease. If another member holds the lease until the
        timeout, ``poll`` returns an empty batch.

        Args:
            timeout: Seconds to wait; 0 returns only records that are already available. None waits
                until there are records, or until another thread or a signal handler closes the
                subscriber; the batch is then empty.
            max_records: Maximum number of records to return.

        Returns:
            A batch of consecutive records, empty after the timeout. ``position`` is then the offset
            after the last of them.

        Raises:
            RecordsLost: The next record is gone. Every poll raises this until ``skip_gap()`` or
                ``seek()``.
            LogTruncated: The server lost records that were already read. Every poll raises this,
                too, until ``skip_gap()`` or ``seek()``.
            LeaseLost, OutcomeUnknown: A confirm was, or may have been, refused, and its Ack was
                never checked. Raised once.
            CorruptFrame, UnsupportedFrame, CorruptStream: The next frame is unreadable.
            CorruptSegment: The next records are damaged in the store. ``skip_gap()`` skips them.
            StreamNotFound, GroupNotFound: The stream or the group was deleted.
            ConnectionFailed, StoreUnavailable: The server or the store could not be reached within
                the timeout, or for 30 seconds if the timeout is None.
        """
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        check_int("max_records", max_records, 1, OFFSET_MAX)
        self._check_reader()
        fetcher = self._fetcher
        if self.config.auto_confirm:
            fetcher.confirm_handed_out()
        fetcher.fetch(timeout, max_records)
        batch = fetcher.buffer.peek(max_records, self._codec)
        fetcher.buffer.position += len(batch)
        return batch

    def __iter__(self) -> Iterator[Record]:
        """Yield records one by one until the subscriber is closed.

        In the loop, ``position`` is the offset after the current record. If the server or the store
        is unreachable, the iterator retries for 30 seconds before it raises ``ConnectionFailed`` or
        ``StoreUnavailable``.
        """
        if not self._closed:
            self._check_reader()
        return self._iterate()

    def _iterate(self) -> Iterator[Record]:
        # The generator refers to ``self``, so the subscriber stays alive during a loop.
        yield from self._fetcher.iterate(self._codec)

    # -- confirming ----------------------------------------------------------------------------

    def confirm(self, record: Record | RecordBatch | int | None = None) -> Ack:
        """Confirm a record and all before it, so that the group will not read them again.

        A background thread merges confirms and sends them within 50 ms, or at once if a caller
        waits for an Ack. ``close()`` and ``deactivate()`` wait for the last confirm.

        Args:
            record: A record, a batch, or an offset. An empty batch confirms the records delivered
                before it. None confirms everything delivered so far: all records returned by
                ``poll()``, or in a loop or a receiver, all records up to the current one.

        Returns:
            An Ack. Its ``result()`` returns the offset after the record. It raises ``LeaseLost`` if
            the confirm had no effect, or ``OutcomeUnknown`` if the outcome cannot be determined.

        Raises:
            LeaseLost: This member has lost the lease. If it has not noticed yet, the Ack raises
                this error later. If the Ack is not checked, the next ``poll()`` raises it.
            ValueError: The record was not delivered by this subscriber.
            NotGrouped: The subscriber has no group.
        """
        session = self._grouped("confirm")
        term = self._fetcher.buffer.term  # read it before the position: a new term may begin
        if record is None:
            return session.confirm(self.position, term)
        if isinstance(record, RecordBatch):
            offset = record.first_offset + len(record)
        else:
            last = record.offset if isinstance(record, Record) else record
            offset = check_int("offset", last, 0, OFFSET_MAX) + 1
        if offset > self.position:
            if offset > self._fetcher.handed_out:
                raise ValueError(
                    f"Record {offset - 1} has not been delivered yet: the position is "
                    f"{self.position}. Confirm only records that this subscriber has delivered."
                )
            raise LeaseLost(
                f"Record {offset - 1} was delivered in an earlier term of {session.lease}, and "
                "this member has lost the lease since. The record will be delivered again.",
                stream=self.stream.name,
                group=session.lease.group,
            )
        return session.confirm(offset, term)

    @property
    def confirmed(self) -> int:
        """The group's next offset to process, according to the server's last reply."""
        return self._grouped("confirmed").confirmed

    @property
    def is_assigned(self) -> bool:
        """Whether this member holds the group's lease."""
        session = self._grouped("is_assigned")
        return session.term is not None and now() < session.valid_until

    @property
    def term(self) -> int | None:
        """The number of this member's term, or None if it has no term. Numbers only increase.

        Use ``is_assigned`` to find out whether the member currently holds the lease.
        """
        term = self._grouped("term").term
        return None if term is None else term.number

    def deactivate(self, timeout: float = _FLUSH_S) -> None:
        """Send the last confirm, then release the lease and stop competing for it.

        Until ``reactivate()``, ``poll()`` only waits.

        Args:
            timeout: Seconds to wait for the last confirm.

        Raises:
            MeteorError: A confirm failed and its Ack was never checked.
        """
        session = self._grouped("deactivate")
        session.deactivate(check_seconds("timeout", timeout, zero=True))
        session.raise_refusal()

    def reactivate(self) -> None:
        """Compete for the lease again, from the next ``poll()`` on."""
        self._grouped("reactivate").reactivate()

    # -- moving --------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The offset of the next record to be delivered."""
        return self._fetcher.buffer.position

    @property
    def checkpoint(self) -> Position:
        """The position with the stream's incarnation and epoch, for the application to store.

        Later, pass it to ``seek()`` or return it from ``on_assigned``. If the server has since lost
        records before the checkpoint, ``LogTruncated`` is raised. A bare offset might silently
        refer to a different record.
        """
        return self._fetcher.buffer.checkpoint

    @property
    def skipped(self) -> int:
        """Number of lost or damaged records skipped by ``on_gap="skip"`` or ``skip_gap()``."""
        return self._fetcher.buffer.skipped

    @property
    def lag(self) -> int:
        """Number of records from the position to the end of the stream.

        In a group, counts from the confirmed offset instead of the position. Uses the end of the
        stream in the server's last reply.
        """
        session = self._fetcher.session
        done = self.position if session is None else session.confirmed
        return max(self._fetcher.buffer.end_offset - done, 0)

    def seek(self, to: int | str | datetime | Position) -> None:
        """Continue from another position.

        Args:
            to: An offset, "earliest", "latest", a stored ``checkpoint``, or an aware datetime,
                which means the first record appended at that time or later.

        Raises:
            LogTruncated: The server has lost records before that checkpoint.
            ValueError: The offset is negative or beyond the end, or the datetime has no time zone.
            GroupError: The subscriber is in a group, which starts at its confirmed offset.
        """
        self._check_reader()
        if self._fetcher.session is not None:
            raise GroupError(
                f"A subscriber in group {self.config.group!r} starts at the group's confirmed "
                "offset. Move the group with stream.seek_group(), or choose where each term "
                "starts with on_assigned=.",
                stream=self.stream.name,
                group=self.config.group,
            )
        if isinstance(to, Position):
            self._fetcher.buffer.resume(to)
            return
        offset, floating = self._handle.resolve(to)
        self._fetcher.buffer.seek(offset, floating=floating)

    def skip_gap(self) -> None:
        """Continue with the first record after the gap that the last poll reported.

        After ``LogTruncated``, continue with the records that the server still has or, in a group,
        from the confirmed offset that it now has. Without a gap, the call does nothing.
        """
        self._check_reader()
        self._fetcher.skip_gap()
        if self._fetcher.stream is not self._handle:  # the stream was reopened
            self._handle = self._fetcher.stream
            self.stream = self.stream._at(self._handle)

    # -- receiving and closing ------------------------------------------------------------------

    def attach_receiver(
        self,
        handler: Handler,
        *,
        on_error: OnError = "stop",
        tries: int | None = None,
        acks: int = 0,
    ) -> Receiver:
        """Start a background thread that passes records to a handler, one by one.

        >>> receiver = sub.attach_receiver(print, on_error="retry")    # doctest: +SKIP

        Args:
            handler: Called with each record. Within the handler, ``confirm()`` confirms that record
                and all before it.
            on_error: What to do if the handler raises an exception: "stop" the receiver, "skip" the
                record, or "retry" it. Pass a stream to publish the record there as a dead letter.
                If that stream does not exist, the receiver creates it with room for many letters.
            tries: Number of times to call the handler with a record before ``on_error`` applies.
                Default: 1 for "stop" and "skip", no limit for "retry", and 3 for dead letters.
            acks: Number of replicas that must have a dead letter before its record is confirmed.
                Needed only if the dead letters are on another server. On the same server, no
                failover can keep the confirm and lose the dead letter.

        Raises:
            MeteorError: The subscriber already has a receiver, or is closed.
            TypeError, ValueError: An argument has the wrong type or value.
        """
        self._check_open()
        if self._receiver is not None:
            raise MeteorError(
                f"This subscriber for stream {self.stream.name!r} already has a receiver. Open "
                "another subscriber."
            )
        self._receiver = Receiver(self, self._fetcher, self._codec, handler, on_error, tries, acks)
        _open_subscribers.add(self)
        self._receiver.start()
        return self._receiver

    def close(self, timeout: float = _FLUSH_S) -> None:
        """Stop the receiver, send the last confirm, and release the lease. Idempotent.

        Args:
            timeout: Seconds to wait for the last confirm, and for the handler to return.

        Raises:
            MeteorError: A confirm failed and its Ack was never checked.
            TimeoutError: The handler, or the thread that renews the lease, did not end in time.
            Exception: The error that ended the receiver.
        """
        check_seconds("timeout", timeout, zero=True)
        if self._pid != os.getpid():
            self._closed = True
            return
        if self._fetcher.session is not None:
            forbid_waiting()  # raise before changing anything
        try:
            if self._receiver is not None:
                self._receiver.close(timeout)
        finally:
            self._closed = True
            self._fetcher.close(timeout)
            _open_subscribers.discard(self)
        if self._fetcher.session is not None:
            self._fetcher.session.raise_refusal()

    @property
    def closed(self) -> bool:
        """Whether the subscriber is closed."""
        return self._closed

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"at {self.position}"
        if self.config.group is None:
            return f"<Subscriber of {self.stream.name!r} ({state})>"
        if not self._closed:
            state += f", term {self.term}" if self.is_assigned else ", waiting for the lease"
        return f"<Subscriber of {self.stream.name!r} in group {self.config.group!r} ({state})>"

    # -- checks --------------------------------------------------------------------------------

    def _grouped(self, what: str) -> GroupSession:
        self._check_open()
        session = self._fetcher.session
        if session is None:
            raise NotGrouped(
                f"{what} needs a group, but this subscriber for stream {self.stream.name!r} is not "
                "in one. Open it with stream.subscriber(group=...).",
                stream=self.stream.name,
                group=None,
            )
        return session

    def _check_reader(self) -> None:
        """Raise if the subscriber is closed or a receiver takes its records."""
        self._check_open()
        if self._receiver is not None and not self._receiver.is_current_thread():
            raise MeteorError(
                f"This subscriber for stream {self.stream.name!r} passes its records to a "
                "receiver. Open another subscriber to read them yourself."
            )

    def _check_open(self) -> None:
        if self._closed:
            raise MeteorError(
                f"This subscriber for stream {self.stream.name!r} is closed. Open another with "
                "stream.subscriber()."
            )
        if self._fetcher.session is not None:
            self._fetcher.session.check_process()


def _on_assigned(subscriber: weakref.ref[Subscriber]) -> Callable[[], Position | int | None]:
    """Return a function that calls ``on_assigned`` without keeping the subscriber alive."""

    def call() -> Position | int | None:
        found = subscriber()
        callback = None if found is None else found.config.on_assigned
        return None if callback is None else callback(found)

    return call


def _at_exit(subscribers: Sequence[Subscriber]) -> None:
    """Release the leases, so that other members need not wait for them to expire."""
    # Stop all before joining any: waits for hung servers and handlers must not add up.
    receivers = [s._receiver for s in subscribers if s._receiver is not None]
    for subscriber in subscribers:
        subscriber._fetcher.interrupt()
    for receiver in receivers:
        receiver.stop()
    deadline = time.monotonic() + _EXIT_S
    for receiver in receivers:
        if not receiver.join(max(deadline - time.monotonic(), 0.0)):
            _log.error("%r was still running at interpreter exit.", receiver)
    for subscriber in subscribers:
        subscriber._fetcher.stop()
    # Also wait for the threads of subscribers that were just garbage-collected: interpreter exit
    # would kill these threads before they release their leases.
    join_named(SESSION_PREFIX, _EXIT_S)


def _close_together(subscribers: Sequence[Subscriber]) -> None:
    """Close a client's subscribers under one deadline, then raise the first failure.

    All of them leave their groups at the same time, so that waits for hung servers and handlers do
    not add up. Their own threads do the work. New threads could deadlock: this thread may be in a
    handler or a signal handler, and hold locks that they need.
    """
    deadline = time.monotonic() + _FLUSH_S

    def left_s(more_s: float = 0.0) -> float:
        return round(max(deadline + more_s - time.monotonic(), 0.0), 1)

    def start() -> None:
        if in_callback():
            return  # in a callback, each close() raises before it changes anything
        receivers = [s._receiver for s in subscribers if s._receiver is not None]
        for receiver in receivers:
            receiver.stop()
        for subscriber in subscribers:
            if subscriber._receiver is None:
                subscriber._fetcher.start_closing(left_s())
        for receiver in receivers:  # a handler may confirm its record before it returns
            if not receiver.is_current_thread():
                receiver.join(left_s())
        for subscriber in subscribers:
            if subscriber._receiver is not None:
                subscriber._fetcher.start_closing(left_s())

    def close(subscriber: Subscriber | None) -> None:
        if subscriber is None:
            start()
        else:  # a receiver may still be leaving its group at this time
            subscriber.close(left_s(_FLUSH_S))

    # A handler may have raised any BaseException.
    close_each([None, *subscribers], close, BaseException)


def _after_fork(subscribers: Sequence[Subscriber]) -> None:
    for subscriber in subscribers:
        if subscriber._fetcher.session is not None:
            subscriber._fetcher.session.abandon()


#: Open subscribers that are in a group or have a receiver.
_open_subscribers: Registry[Subscriber] = Registry(
    ClosingOrder.SUBSCRIBERS,
    owner=lambda subscriber: subscriber._handle.connector,
    close=_close_together,
    at_exit=_at_exit,
    after_fork=_after_fork,
)
