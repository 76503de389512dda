"""Acknowledgements: the outcome of a publish or a confirm.

An :class:`Ack` is an index into a completion, which all records of a batch share.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

from meteor_py.errors import NotReplicated, fresh
from meteor_py.runtime.completion import Completion, in_callback

_log = logging.getLogger(__name__)


class _Outcome(msgspec.Struct, gc=False, eq=False):
    """Base class for Ack and ManyAck. An outcome is done when its last batch is settled."""

    _completion: Completion

    def done(self) -> bool:
        """Return whether the outcome is known."""
        return self._completion.poll()

    def result(self, timeout: float | None = None) -> int:
        """Wait for the outcome and return the (first) offset.

        Args:
            timeout: Seconds. None waits until the operation is settled. That takes at most a few
                seconds longer than the publisher's ``delivery_timeout`` or, for a confirm, than 30
                seconds.

        Raises:
            TimeoutError: The outcome is not known yet.
            MeteorError: The record was not published, or the offset was not confirmed.
            OutcomeUnknown: The record may or may not have been published.
            NotReplicated: The record was published, but too few replicas confirmed it in time.
        """
        error = self.exception(timeout)
        if error is not None:
            raise fresh(error)  # a copy: all records in the batch share this error
        offset = self.offset
        assert offset is not None, "settled without an error"
        return offset

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait for the outcome and return the error, or None if there is none.

        Raises:
            TimeoutError: The outcome is not known after ``timeout`` seconds.
        """
        if not self._completion.wait(timeout):
            raise _no_reply(timeout)
        return self._error()

    @property
    def offset(self) -> int | None:
        """The (first) offset once it is acknowledged, else None."""
        raise NotImplementedError  # pragma: no cover

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(ack)`` when the outcome is known, or at once if it already is.

        The callback runs in a background thread, or in this one if the outcome is already known. It
        must not block. An exception in it is logged.
        """

        def call() -> None:
            try:
                callback(self)
            except BaseException as error:
                if not isinstance(error, Exception) and not in_callback():
                    raise
                _log.exception("A callback added with add_done_callback() raised an exception.")

        self._completion.on_settled(call)

    def __await__(self) -> Generator[Any, None, int]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()

        def finish() -> None:
            if future.done():  # the awaiting task was cancelled
                return
            error = self._error()
            if error is None:
                future.set_result(self.result())
            else:
                future.set_exception(fresh(error))

        def finish_soon() -> None:
            try:
                loop.call_soon_threadsafe(finish)
            except RuntimeError:  # the loop was closed, so no task is waiting
                _log.debug("The event loop was closed before an awaited Ack was settled.")

        self._completion.on_settled(finish_soon)
        return (yield from future)

    def _error(self) -> Exception | None:
        raise NotImplementedError  # pragma: no cover


class Ack(_Outcome, gc=False, eq=False):
    """The outcome of one ``publish`` or ``confirm``. Can be awaited in asyncio.

    >>> ack = pub.publish(b"hello")                           # doctest: +SKIP
    >>> ack.result(timeout=5.0)                               # doctest: +SKIP
    0

    For a confirm, the offset is that of the next record to process.
    """

    _index: int

    def result(self, timeout: float | None = None) -> int:
        done = self._completion
        if done.wait(timeout) and done.error is None:  # the usual case: make no further calls
            done.observed = True
            return done.base_offset + self._index
        if not done.settled:
            raise _no_reply(timeout)
        return _Outcome.result(self)

    result.__doc__ = _Outcome.result.__doc__

    @property
    def offset(self) -> int | None:
        """The offset once it is acknowledged, else None."""
        done = self._completion
        return done.base_offset + self._index if done.poll() and done.error is None else None

    def _error(self) -> Exception | None:
        self._completion.observed = True
        return _error_of(self._completion, self._index)

    def __repr__(self) -> str:
        return f"<Ack: {_describe(self)}>"


class ManyAck(_Outcome, gc=False, eq=False):
    """The outcome of one ``publish_many``. Can be awaited in asyncio.

    ``result()`` returns the first offset. If other publishers publish at the same time, the records
    may occupy several ``ranges`` of offsets.
    """

    #: (batch, index of the first record in it, number of records), in order.
    _parts: Sequence[tuple[Completion, int, int]]

    @property
    def offset(self) -> int | None:
        """The first offset once all records are acknowledged, else None."""
        settled = all(batch.poll() and batch.error is None for batch, _, _ in self._parts)
        return self.ranges[0].start if settled else None

    @property
    def ranges(self) -> list[range]:
        """The offsets acknowledged so far, in order, with adjacent ranges merged."""
        found: list[range] = []
        for batch, index, count in self._parts:
            if not batch.settled or batch.error is not None:
                continue
            start = batch.base_offset + index
            if found and found[-1].stop == start:
                start = found.pop().start
            found.append(range(start, batch.base_offset + index + count))
        return found

    def _error(self) -> Exception | None:
        for batch, _, _ in self._parts:
            batch.observed = True
        errors = (_error_of(batch, index) for batch, index, _ in self._parts)
        return next((error for error in errors if error), None)

    def __repr__(self) -> str:
        return f"<ManyAck: {_describe(self)}>"


def _error_of(batch: Completion, index: int) -> Exception | None:
    """Return the error for the record at ``index`` in a batch."""
    error = batch.error
    return error.at(error.offset + index) if isinstance(error, NotReplicated) else error


def _no_reply(timeout: float | None) -> TimeoutError:
    return TimeoutError(f"No reply arrived within {timeout} seconds. The outcome is still pending.")


def _describe(ack: _Outcome) -> str:
    if not ack.done():
        return "pending"
    return f"offset {ack.offset}" if ack.offset is not None else "failed"
