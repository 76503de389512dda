"""The subscriber: hands out records in order, for itself or for a group."""

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
from meteor_py.records.record import Record, RecordBatch
from meteor_py.runtime.clock import now
from meteor_py.runtime.completion import SESSION_PREFIX, forbid_waiting
from meteor_py.runtime.lifecycle import Closeable, ClosingOrder, Registry, close_each
from meteor_py.runtime.threads import join_named
from meteor_py.subscribe.fetcher import Fetcher
from meteor_py.subscribe.group_session import GroupSession
from meteor_py.subscribe.lease import member_name
from meteor_py.subscribe.receiver import Handler, OnError, Receiver

if TYPE_CHECKING:
    from meteor_py.stream import Stream

_log = logging.getLogger(__name__)

#: Seconds that ``close()`` and ``deactivate()`` wait for the last confirm to be answered.
_FLUSH_S = 5.0
#: Seconds that the end of the interpreter waits for the same.
_EXIT_S = 1.0


class Subscriber(Closeable):
    """Reads one stream. Any number of them do not disturb each other, nor the publishers.

    >>> with stream.subscriber(group="billing") as sub:    # doctest: +SKIP
    ...     for record in sub:
    ...         print(record.offset, record.value)
    ...         sub.confirm(record)

    Of the subscribers of one group, one reads at a time: the one that holds the group's lease. The
    others wait in ``poll()`` and go on where it stopped, when it is closed, hung or dead.

    For one thread at a time, but ``confirm`` may come from any. Create it with
    ``stream.subscriber()``.
    """

    def __init__(
        self, stream: Stream, handle: StreamHandle, config: SubscriberConfig, codec: Codec | None
    ) -> None:
        if config.group is None and config.starts_at is InitialOffset.NONE:
            raise InvalidInitialOffset(
                "InitialOffset.NONE leaves an ungrouped subscriber nowhere to start; use EARLIEST "
                "or LATEST.",
                stream=stream.name,
            )
        self.stream = stream
        self.config = config
        self._handle = handle
        #: Its name as the owner of a group's lease.
        self.member = member_name()
        self._codec = codec
        self._closed = False
        self._pid = os.getpid()
        self._receiver: Receiver | None = None
        self._fetcher = Fetcher(handle, config, self.member, _on_assigned(weakref.ref(self)))
        try:
            if config.group is not None:
                # For one that is dropped without a close(): it must not keep its lease.
                weakref.finalize(self, self._fetcher.stop).atexit = False
                _open_subscribers.add(self)
            elif config.starts_at is InitialOffset.EARLIEST:
                self.seek("earliest")
        except BaseException:
            self._fetcher.close(0.0)
            raise

    # -- reading -------------------------------------------------------------------------------

    def poll(self, timeout: float = 1.0, max_records: int = 10_000) -> RecordBatch:
        """Return the next records, waiting for them if there are none.

        In a group, only the one that holds the lease is given any; the others wait for it.

        Args:
            timeout: Seconds to wait; 0 only looks.
            max_records: At most so many.

        Returns:
            A batch of consecutive offsets from ``position`` on, empty if none came in time.

        Raises:
            RecordsLost: The next record is gone; at each poll until ``skip_gap()`` or ``seek()``.
            LogTruncated: The server lost what was read; as ``RecordsLost``.
            LeaseLost: A confirm was refused and its Ack was never checked; raised once.
            CorruptFrame, UnsupportedFrame, CorruptStream: The next frame is unreadable.
            StreamNotFound, GroupNotFound: It was deleted.
            ConnectionFailed: The server could not be reached until the timeout.
        """
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
        """Records one by one, without end; ``position`` follows each.

        A server that is away is waited for, up to 30 seconds. Ends when the subscriber is closed.
        """
        if not self._closed:
            self._check_reader()
        return self._iterate()

    def _iterate(self) -> Iterator[Record]:
        yield from self._fetcher.iterate(
            self._codec
        )  # holds us: a loop must not lose its subscriber

    # -- confirming ----------------------------------------------------------------------------

    def confirm(self, record: Record | RecordBatch | int | None = None) -> Ack:
        """Note that a record and all before it are done: the group will not read them again.

        It is sent in the background, merged with others, within 50 ms or when the Ack is waited
        for; ``close()`` and ``deactivate()`` wait for it.

        Args:
            record: A record, a batch, or an offset. None: all that was handed out, which is the
                batch after ``poll()`` and the current record in a loop or receiver.

        Returns:
            An Ack, whose ``result()`` is the offset behind the record.

        Raises:
            LeaseLost: Another member has the lease; if that is not known yet, the Ack raises it,
                and the next ``poll`` if the Ack is never checked.
            ValueError: A record that was not handed out.
            NotGrouped: There is no group.
        """
        session = self._grouped("confirm")
        term = self._fetcher.buffer.term  # before the position: a new term may begin meanwhile
        if record is None:
            return session.confirm(self.position, term)
        if isinstance(record, (Record, RecordBatch)):
            record = record.offset if isinstance(record, Record) else record.last_offset
        offset = check_int("offset", record, 0, OFFSET_MAX) + 1
        if offset > self.position:
            if offset > self._fetcher.handed_out:
                raise ValueError(
                    f"Record {record} was not handed out: the position is {self.position}."
                )
            raise LeaseLost(
                f"Record {record} was handed out in an earlier term of {session.lease}; the lease "
                "was lost since, and it will be handed out again.",
                stream=self.stream.name,
                group=session.lease.group,
            )
        return session.confirm(offset, term)

    @property
    def confirmed(self) -> int:
        """The next offset that the group has to process, as far as is known; all below are done."""
        return self._grouped("confirmed").confirmed

    @property
    def is_assigned(self) -> bool:
        """Whether this member holds the group's lease."""
        session = self._grouped("is_assigned")
        return session.term is not None and now() < session.valid_until

    @property
    def term(self) -> int | None:
        """The number of this member's term; None once it is known to be over.

        It only ever rises. ``is_assigned`` tells whether the lease is held at this moment.
        """
        term = self._grouped("term").term
        return None if term is None else term.number

    def deactivate(self, timeout: float = _FLUSH_S) -> None:
        """Give up the lease, after the last confirm, and do not compete for it.

        Until ``reactivate()``, ``poll`` only waits.

        Args:
            timeout: Seconds to wait for the last confirm.

        Raises:
            MeteorError: A confirm failed and its Ack was never checked.
        """
        session = self._grouped("deactivate")
        session.deactivate(check_seconds("timeout", timeout, zero=True))
        session.raise_refusal()

    def reactivate(self) -> None:
        """Compete for the lease again, at the next ``poll``."""
        self._grouped("reactivate").reactivate()

    # -- moving --------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The offset of the next record that will be handed out."""
        return self._fetcher.buffer.position

    @property
    def checkpoint(self) -> Position:
        """The position in a form to keep outside: with the stream's incarnation and epoch.

        ``on_assigned`` may return it: should the server have lost records before it since, that
        is a ``LogTruncated``, where a bare offset would now mean another record.
        """
        return self._fetcher.buffer.checkpoint

    @property
    def skipped(self) -> int:
        """Records that were gone and skipped, with ``on_gap="skip"`` or by ``skip_gap()``."""
        return self._fetcher.buffer.skipped

    @property
    def lag(self) -> int:
        """Records up to the end of the stream when it was last seen.

        From the position on; in a group, from what is confirmed.
        """
        session = self._fetcher.session
        done = self.position if session is None else session.confirmed
        return max(self._fetcher.buffer.end_offset - done, 0)

    def seek(self, to: int | str | datetime | Position) -> None:
        """Go on from somewhere else.

        Args:
            to: An offset, "earliest", "latest", an aware datetime: the first record that was
                appended at that time or later; or a ``checkpoint`` that was kept.

        Raises:
            LogTruncated: The server has lost records before that checkpoint.
            ValueError: A negative offset, one beyond the end, or a datetime without a timezone.
            GroupError: In a group the confirmed offset decides.
        """
        self._check_reader()
        if self._fetcher.session is not None:
            raise GroupError(
                "A subscriber of a group goes on where the group is; move that with "
                "stream.seek_group(), or start each term elsewhere with on_assigned=.",
                stream=self.stream.name,
                group=self.config.group,
            )
        if isinstance(to, Position):
            self._fetcher.buffer.resume(to)
            return
        offset, floating = self._handle.resolve(to)
        self._fetcher.buffer.seek(offset, floating=floating)

    def skip_gap(self) -> None:
        """Go on behind the gap that the last poll named, with the first record there is.

        After ``LogTruncated``: with what the server has now in place of what it lost; in a group,
        from what is confirmed there. Without a gap nothing happens.
        """
        self._check_reader()
        self._fetcher.skip_gap()
        if self._fetcher.stream is not self._handle:  # the stream was recreated
            self._handle = self._fetcher.stream
            self.stream = self.stream._at(self._handle)

    # -- the end -------------------------------------------------------------------------------

    def attach_receiver(
        self, handler: Handler, *, on_error: OnError = "stop", tries: int | None = None
    ) -> Receiver:
        """Hand the records to a function, one by one, in a thread of its own; at most once.

        Args:
            handler: Called with each record. ``confirm()`` in it means that record.
            on_error: What to do about a record that the handler raises for: "stop" the receiver,
                "skip" the record, "retry" it, or publish it to a stream of dead letters.
            tries: How often a record is handed to the handler before it is given up: 1 for "stop"
                and "skip", without end for "retry", 3 for dead letters.

        Raises:
            MeteorError: There is a receiver already.
        """
        self._check_open()
        if self._receiver is not None:
            raise MeteorError("This subscriber has a receiver already; open another subscriber.")
        self._receiver = Receiver(self, self._fetcher, self._codec, handler, on_error, tries)
        _open_subscribers.add(self)
        self._receiver.start()
        return self._receiver

    def close(self, timeout: float = _FLUSH_S) -> None:
        """Stop the receiver, send the last confirm, give up the lease. Closing twice is fine.

        Args:
            timeout: Seconds to wait for the last confirm, and for the handler to return.

        Raises:
            MeteorError: A confirm failed and its Ack was never checked; or what ended the receiver.
            TimeoutError: The handler does not return.
        """
        check_seconds("timeout", timeout, zero=True)
        if self._pid != os.getpid():
            self._closed = True
            return
        if self._fetcher.session is not None:
            forbid_waiting()  # before anything is changed
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
        """Whether it hands out no more records."""
        return self._closed

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"at {self.position}"
        if self.config.group is None:
            return f"<Subscriber of {self.stream.name!r} ({state})>"
        if not self._closed:
            state += f", term {self.term}" if self.is_assigned else ", waiting for the lease"
        return f"<Subscriber of {self.stream.name!r} in group {self.config.group!r} ({state})>"

    # -- inside --------------------------------------------------------------------------------

    def _grouped(self, what: str) -> GroupSession:
        self._check_open()
        session = self._fetcher.session
        if session is None:
            raise NotGrouped(
                f"{what} is for subscribers of a group; open this one with "
                "stream.subscriber(group=...).",
                stream=self.stream.name,
                group=None,
            )
        return session

    def _check_reader(self) -> None:
        """Records go to one reader: the receiver, if there is one."""
        self._check_open()
        if self._receiver is not None and not self._receiver.is_current_thread():
            raise MeteorError(
                f"The records of this subscriber of stream {self.stream.name!r} go to its "
                "receiver; open another subscriber to read yourself."
            )

    def _check_open(self) -> None:
        if self._closed:
            raise MeteorError(
                f"This subscriber of stream {self.stream.name!r} is closed; open another with "
                "stream.subscriber()."
            )
        if self._fetcher.session is not None:
            self._fetcher.session.check_process()


def _on_assigned(subscriber: weakref.ref[Subscriber]) -> Callable[[], Position | int | None]:
    """The caller's ``on_assigned``; by a weak reference, or no subscriber would be dropped."""

    def call() -> Position | int | None:
        found = subscriber()
        callback = None if found is None else found.config.on_assigned
        return None if callback is None else callback(found)

    return call


def _at_exit(subscribers: Sequence[Subscriber]) -> None:
    """Let other members have the leases at once."""
    # All at once: a server or a handler that does not reply delays us only once.
    receivers = [s._receiver for s in subscribers if s._receiver is not None]
    for subscriber in subscribers:
        subscriber._fetcher.interrupt()
    for receiver in receivers:
        receiver.stop()
    deadline = time.monotonic() + _EXIT_S
    for receiver in receivers:
        if not receiver.join(max(deadline - time.monotonic(), 0.0)):
            _log.error("At the end of %r: it is still at work.", receiver)
    for subscriber in subscribers:
        subscriber._fetcher.stop()
    # Those that were dropped a moment ago have leases too, and their threads would just stop.
    join_named(SESSION_PREFIX, _EXIT_S)


def _after_fork(subscribers: Sequence[Subscriber]) -> None:
    for subscriber in subscribers:
        subscriber._fetcher.abandon()


#: Those with a lease or a thread.
_open_subscribers: Registry[Subscriber] = Registry(
    ClosingOrder.SUBSCRIBERS,
    owner=lambda subscriber: subscriber._handle.connector,
    # The error of a handler can be anything.
    close=lambda subscribers: close_each(subscribers, Subscriber.close, BaseException),
    at_exit=_at_exit,
    after_fork=_after_fork,
)
