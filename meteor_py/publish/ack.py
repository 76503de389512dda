"""Acknowledgements: what became of a published record, or of a confirm.

A :class:`Batch` is the records that travel as one frame and share one fate; an :class:`Ack` is a
record's place in it. No future is made per record: that alone would cost more than publishing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

from meteor_py.errors import NotReplicated
from meteor_py.records.frame import Columns

_log = logging.getLogger(__name__)
# Guards the rare things, waiting and callbacks, of all batches. Re-entrant, because a finalizer may
# run in the middle of it and do one of these things.
_lock = threading.RLock()


class Batch:
    """Records on their way, until they are settled: in the log, or failed."""

    __slots__ = (
        "_callbacks",
        "_event",
        "columns",
        "count",
        "deadline",
        "encoded",
        "error",
        "first",
        "gathered_at",
        "in_doubt",
        "index",
        "nbytes",
        "observed",
        "sequence",
        "settled",
    )  # fmt: skip

    def __init__(self, gathered_at: float, deadline: float) -> None:
        self.columns: Columns | None = Columns([])
        #: Name of the format and payload, once it is on its way.
        self.encoded: tuple[str, Any] | None = None
        self.index: Sequence[bytes] = ()  # its entry there, if the stream has one
        self.count = 0
        self.nbytes = 0
        #: By the monotonic clock: when its first record came, and when it fails at the latest.
        self.gathered_at = gathered_at
        self.deadline = deadline
        self.sequence = -1
        #: It was sent, and that sending's answer never came: it may be in the log.
        self.in_doubt = False
        self.first = -1
        self.error: Exception | None = None
        self.settled = False
        #: Somebody has been told of the error.
        self.observed = False
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[], None]] | None = None

    def settle(self, error: Exception | None = None) -> None:
        """Make the fate known: ``first`` was set before, or there is an error."""
        self.error = error
        self.columns = None
        self.encoded = None
        self.index = ()
        self.settled = True
        with _lock:
            event, callbacks = self._event, self._callbacks
            self._callbacks = None
        if event is not None:
            event.set()
        if callbacks is not None:
            self.observed = True
            for callback in callbacks:
                callback()

    def disown(self, error: Exception) -> None:
        """In a forked child: nobody waits here, and callbacks are the parent's to call."""
        self.error = error
        self.settled = True

    def wait(self, timeout: float | None) -> bool:
        """Wait until it is settled, at most ``timeout`` seconds; tell whether it is."""
        if self.settled:
            return True
        forbid_waiting()
        with _lock:
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        # Settled in between: nobody saw the event. After the deadline it is settled in any case.
        return self.settled or event.wait(timeout)

    def on_settled(self, callback: Callable[[], None]) -> None:
        with _lock:
            if not self.settled:
                self._callbacks = self._callbacks or []
                self._callbacks.append(callback)
                return
        self.observed = True
        callback()


def forget_waiters() -> None:
    """In a forked child: a thread that is not here may have held the lock."""
    global _lock
    _lock = threading.RLock()


#: Names of the threads that send; what runs in one must not wait for it.
SENDER_PREFIX = "meteor-sender"
SESSION_PREFIX = "meteor-session"


def in_callback() -> bool:
    """Whether this thread is one that sends."""
    return threading.current_thread().name.startswith((SENDER_PREFIX, SESSION_PREFIX))


def forbid_waiting() -> None:
    """Raise if this is a callback."""
    if in_callback():
        raise RuntimeError(
            "A callback must not wait for an Ack, flush or close: it runs in the thread that sends."
        )


class _Outcome(msgspec.Struct, gc=False, eq=False):
    """What Ack and ManyAck have in common, told by the last batch they are in."""

    _batch: Batch

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._batch.settled

    def result(self, timeout: float | None = None) -> int:
        """Wait for the outcome and return the (first) offset.

        Args:
            timeout: Seconds; None waits as long as it is tried: ``delivery_timeout`` of the
                publisher, 30 seconds for a confirm.

        Raises:
            TimeoutError: Not known yet.
            MeteorError: It was not published or confirmed; ``OutcomeUnknown`` if even that is
                not certain.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error.with_traceback(None)  # it is shared by all records of the batch
        offset = self.offset
        assert offset is not None, "settled without an error"
        return offset

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait for the outcome and return the error, or None if all is well."""
        if not self._batch.wait(timeout):
            raise TimeoutError(f"There was no answer within {timeout} seconds.")
        return self._error()

    @property
    def offset(self) -> int | None:
        """The (first) offset once it is acknowledged, else None."""
        raise NotImplementedError  # pragma: no cover

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(ack)`` when the outcome is known, at once if it is.

        It runs in the thread that sends and must not block; if it raises, that is
        logged and harms nobody.
        """

        def call() -> None:
            try:
                callback(self)
            except BaseException as error:
                if not isinstance(error, Exception) and not in_callback():
                    raise
                _log.exception("A callback of an Ack raised an exception.")

        self._batch.on_settled(call)

    def __await__(self) -> Generator[Any, None, int]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()

        def finish() -> None:
            if future.done():  # cancelled
                return
            error = self._error()
            if error is None:
                future.set_result(self.result())
            else:
                future.set_exception(error.with_traceback(None))

        def finish_soon() -> None:
            try:
                loop.call_soon_threadsafe(finish)
            except RuntimeError:  # the loop was closed; nobody waits any more
                _log.debug("The event loop of an awaited Ack is closed.")

        self._batch.on_settled(finish_soon)
        return (yield from future)

    def _error(self) -> Exception | None:
        raise NotImplementedError  # pragma: no cover


class Ack(_Outcome, gc=False, eq=False):
    """The outcome of one ``publish``, or of one ``confirm``. Can be awaited in asyncio.

    Of a confirm, the offset is the one behind the record: the next to process.
    """

    _index: int

    @property
    def offset(self) -> int | None:
        """The offset once it is acknowledged, else None."""
        batch = self._batch
        return batch.first + self._index if batch.settled and batch.error is None else None

    def _error(self) -> Exception | None:
        self._batch.observed = True
        return _error_of(self._batch, self._index)

    def __repr__(self) -> str:
        return f"<Ack: {_describe(self)}>"


class ManyAck(_Outcome, gc=False, eq=False):
    """The outcome of one ``publish_many``. Can be awaited in asyncio.

    ``result()`` is the first offset. The records may lie in several ranges, because others
    publish in between: see ``ranges``.
    """

    #: (batch, index of the first record in it, number of records), in order.
    _parts: list[tuple[Batch, int, int]]

    @property
    def offset(self) -> int | None:
        """The first offset once all records are acknowledged, else None."""
        settled = all(batch.settled and batch.error is None for batch, _, _ in self._parts)
        return self.ranges[0].start if settled else None

    @property
    def ranges(self) -> list[range]:
        """The offsets of the records acknowledged so far, in order; neighbours are joined."""
        found: list[range] = []
        for batch, index, count in self._parts:
            if not batch.settled or batch.error is not None:
                continue
            start = batch.first + index
            if found and found[-1].stop == start:
                start = found.pop().start
            found.append(range(start, batch.first + index + count))
        return found

    def _error(self) -> Exception | None:
        for batch, _, _ in self._parts:
            batch.observed = True
        errors = (_error_of(batch, index) for batch, index, _ in self._parts)
        return next((error for error in errors if error), None)

    def __repr__(self) -> str:
        return f"<ManyAck: {_describe(self)}>"


def _error_of(batch: Batch, index: int) -> Exception | None:
    """What befell the record at ``index`` of a batch."""
    error = batch.error
    return error.at(error.offset + index) if isinstance(error, NotReplicated) else error


def _describe(ack: _Outcome) -> str:
    if not ack.done():
        return "pending"
    return f"offset {ack.offset}" if ack.offset is not None else "failed"
