"""The public publisher. It puts records into an accumulator, and its sender sends the batches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from meteor_py.errors import MeteorError, PublisherClosed, fresh
from meteor_py.log.handle import StreamHandle
from meteor_py.publish.accumulator import Accumulator, closed_error
from meteor_py.publish.ack import Ack, ManyAck
from meteor_py.publish.sender import Sender
from meteor_py.publish.validation import (
    RecordValidator,
    check_headers,
    check_key,
    headers_size,
    is_arrow,
    to_bytes,
    to_list,
)
from meteor_py.records.codec import Codec
from meteor_py.records.config import (
    FRAME_BYTES_MAX,
    FRAME_RECORDS_MAX,
    PublisherConfig,
    check_seconds,
)
from meteor_py.records.times import to_ms
from meteor_py.runtime.completion import forbid_waiting, in_callback
from meteor_py.runtime.lifecycle import Closeable, ClosingOrder, Registry, close_each
from meteor_py.runtime.locks import run_locked

if TYPE_CHECKING:
    from meteor_py.stream import Stream

#: Minimum number of values that ``publish_many`` converts to Arrow. Fewer values join the open
#: batch.
_ARROW_MIN = 256
#: Seconds that ``close`` waits for the sender thread to end, after all records are settled or its
#: timeout has expired.
JOIN_TIMEOUT_S = 6.0
#: Seconds that a client, or the exit of the program, waits for the records of a publisher whose own
#: ``close`` was interrupted.
_INTERRUPTED_S = 1.0

_log = logging.getLogger(__name__)


class Publisher(Closeable):
    """Publishes records to one stream, in call order. Thread-safe.

    >>> with stream.publisher() as pub:                       # doctest: +SKIP
    ...     pub.publish(b"hello", key=b"k").result()
    0

    ``publish`` does not wait for the reply. It sends a lone record itself, and a background thread
    sends the others. Close the publisher when done, or use a ``with`` block. Closing waits for
    pending records and raises the first error that the application has not seen. Until then, such
    an error is only logged. To be notified, pass ``on_error``.
    """

    def __init__(
        self, stream: Stream, handle: StreamHandle, config: PublisherConfig, codec: Codec | None
    ) -> None:
        self.stream = stream
        self._handle = handle
        self.config = config
        self._codec = codec
        settings = handle.config
        records_max = min(FRAME_RECORDS_MAX, settings.capacity)
        self._plain_max = config.max_record_bytes
        self._validator = RecordValidator(handle, records_max, config.max_record_bytes)
        self._accumulator = Accumulator(
            stream=stream.name,
            records_max=records_max,
            bytes_max=FRAME_BYTES_MAX,
            pending_max=config.max_pending_bytes,
            linger_s=config.linger,
            delivery_timeout_s=config.delivery_timeout,
            on_error=config.on_error,
        )
        self._sender = Sender(handle, config, self._accumulator)
        self._closed = False
        self._ended = False
        self._close_lock = threading.RLock()  # a signal handler may call close() during close()
        self._put_value = self._accumulator.put_value
        try:
            _open_publishers.add(self)
            self._sender.start()
        except BaseException:  # Ctrl-C: the caller gets no publisher that it could close
            self._closed = self._ended = True
            self._sender.abandon()
            self._accumulator.close(closed_error(stream.name))  # wakes the sender, which then ends
            _open_publishers.discard(self)
            raise

    def publish(
        self,
        value: Any,
        key: bytes | str | None = None,
        headers: Mapping[str, bytes | str] | None = None,
        timestamp: datetime | int | None = None,
    ) -> Ack:
        """Publish one record, and return an ``Ack`` for its offset.

        Args:
            value: Bytes, or a value that the codec encodes.
            key: Optional bytes, or text, which is encoded as UTF-8.
            headers: Optional header names and values. Values are bytes or text, like keys.
            timestamp: The creation time: an aware datetime, or ms since 1970. By default, the time
                at which the server appends the record.

        Raises:
            TypeError: The value, key, headers or timestamp are of the wrong type.
            ValueError: The timestamp has no time zone, is not from 1970 to 9999, or looks like
                seconds instead of ms. Or the record has too many headers, text that cannot be
                encoded as UTF-8, or an ordering key of more than 256 bytes.
            RecordTooLarge: Value, key and headers exceed ``max_record_bytes`` (default 1 MiB).
            PublisherFull: ``max_pending_bytes`` left no room for the record, and no room became
                available within ``delivery_timeout`` seconds.
            PublisherClosed: The publisher is closed.
            LogTruncated: The server has lost this publisher's acknowledged records; raised once.
        """
        if self._codec is not None:
            value = self._codec.encode(value)
        if type(value) is not bytes:
            value = to_bytes(value)
        size = len(value)
        if key is None and headers is None and timestamp is None and size <= self._plain_max:
            return self._put_value(value, size)
        raw_key = None if key is None else check_key(key)
        if raw_key is not None:
            size += len(raw_key)
        raw_headers = None if headers is None else check_headers(headers)
        if raw_headers is not None:
            size += headers_size(raw_headers)
        if timestamp is not None:
            timestamp = to_ms(timestamp)
        self._validator.check_size(size)
        ordering = self._handle.config.ordering_rule  # another client may have added it
        if ordering is not None:
            ordering.check(raw_key, raw_headers)
        return self._accumulator.put(value, raw_key, raw_headers, timestamp, size=size)

    def publish_many(
        self,
        values: Iterable[Any] | pa.Array | pa.ChunkedArray,
        keys: Sequence[bytes | str | None] | pa.Array | pa.ChunkedArray | None = None,
        headers: Sequence[Mapping[str, bytes | str] | None] | None = None,
        timestamps: Sequence[datetime | int | None] | None = None,
    ) -> ManyAck:
        """Publish many records, several times faster than a loop. Arrow arrays are faster still.

        Not atomic: other publishers' records may be appended between these (see
        :attr:`ManyAck.ranges`). All records are validated before the first is accepted. An Arrow
        array of values must be of a binary or string type, and bypasses the codec.

        >>> pub.publish_many([b"a", b"b"], keys=[b"k", None]).result()      # doctest: +SKIP
        1

        Raises:
            ValueError: ``values`` is empty, columns differ in length, or a time is out of range.
            TypeError, RecordTooLarge, PublisherFull, PublisherClosed, LogTruncated: See
                ``publish``.
        """
        if not is_arrow(values):
            values = values if isinstance(values, list) else to_list("values", values)
            if self._codec is not None:
                values = [self._codec.encode(value) for value in values]
        if isinstance(values, list) and len(values) < _ARROW_MIN:
            parts = self._accumulator.put_rows(
                *self._validator.rows(values, keys, headers, timestamps)
            )
        else:
            parts = self._accumulator.put_frames(
                self._validator.frames(values, keys, headers, timestamps)
            )
        return ManyAck(parts[-1][0], parts)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every record published so far is acknowledged or has failed.

        Args:
            timeout: Seconds. None waits until every record is acknowledged or has failed, which
                takes at most a few seconds longer than ``delivery_timeout``.

        Raises:
            TimeoutError: Records are still unacknowledged.
            MeteorError: A record failed, and the application has not seen the error.
        """
        limit = self._time_limit(timeout)
        deadline = time.monotonic() + limit
        if not self._accumulator.wait_empty(limit):
            raise TimeoutError(
                f"Records were still unacknowledged after {limit:g} seconds. Flush again, or use a "
                "longer timeout."
            )
        if self._sender.must_check:
            self._accumulator.wait_checked(max(deadline - time.monotonic(), 0.0))
        self._raise_failure()

    def close(self, timeout: float | None = None) -> None:
        """Send pending records, then stop. Records that are not sent in time fail. Idempotent.

        Args:
            timeout: Seconds. None waits until every record is acknowledged or has failed, which
                takes at most a few seconds longer than ``delivery_timeout``.

        Raises:
            MeteorError: A record failed, and the application has not seen the error.
            TimeoutError: The sender thread did not end.
        """
        limit = self._time_limit(timeout)
        run_locked(self._close_lock, limit + JOIN_TIMEOUT_S, lambda: self._close(limit))
        self._raise_failure()

    def _close(self, timeout_s: float) -> None:
        if self._ended:  # false if an interrupt ended an earlier close()
            return
        self._closed = True
        self._sender.check_by = time.monotonic() + timeout_s
        self._accumulator.close(closed_error(self.stream.name))
        if not self._accumulator.wait_empty(timeout_s):
            self._sender.abandon()
        ended = self._accumulator.wait_sender_ended(JOIN_TIMEOUT_S)
        if not (ended and self._sender.join(JOIN_TIMEOUT_S)):
            raise TimeoutError(
                f"The sender thread for stream {self.stream.name!r} did not end within "
                f"{JOIN_TIMEOUT_S:g} seconds: it is still connecting, or a callback is blocking."
            )
        self._ended = True
        _open_publishers.discard(self)

    @property
    def closed(self) -> bool:
        """Whether the publisher is closed. ``publish`` then raises ``PublisherClosed``."""
        return self._closed

    def __repr__(self) -> str:
        return f"<Publisher of {self.stream.name!r}{' (closed)' if self._closed else ''}>"

    def _time_limit(self, timeout: float | None) -> float:
        forbid_waiting()
        if timeout is None:
            return self.config.delivery_timeout + JOIN_TIMEOUT_S
        return check_seconds("timeout", timeout, zero=True)

    def _raise_failure(self) -> None:
        failure = self._accumulator.take_failure()
        if failure is not None:
            raise fresh(failure)

    def _close_finally(self) -> None:
        """Close the publisher. If an interrupt ended an earlier close, wait only briefly."""
        self.close(_INTERRUPTED_S if self._closed else None)

    def _abandon(self) -> None:
        """Settle all records in a forked child. The child has no sender; the parent sends them."""
        reason = PublisherClosed(
            f"This publisher for stream {self.stream.name!r} belongs to the parent process. Open "
            "another here with stream.publisher().",
            stream=self.stream.name,
        )
        self._closed = self._ended = True
        self._close_lock = threading.RLock()
        for batch in [*self._sender.window, *self._accumulator.abandon(reason)]:
            batch.abandon(reason)


def _close_together(publishers: Sequence[Publisher]) -> None:
    """Close a client's publishers, then raise the first failure."""
    _stop_accepting(publishers)
    close_each(publishers, Publisher._close_finally, (MeteorError, TimeoutError))


def _close_within(publishers: Sequence[Publisher], timeout_s: float) -> None:
    """Close publishers under one deadline."""
    _stop_accepting(publishers)
    deadline = time.monotonic() + timeout_s
    close_each(
        publishers,
        lambda publisher: publisher.close(max(deadline - time.monotonic(), 0.0)),
        (MeteorError, TimeoutError),
    )


def _stop_accepting(publishers: Sequence[Publisher]) -> None:
    """Refuse new records, so that all senders finish in parallel and their waits do not add up."""
    if not in_callback():  # in a callback, each close() raises before it changes anything
        for publisher in publishers:
            publisher._accumulator.close(closed_error(publisher.stream.name))


def _at_exit(publishers: Sequence[Publisher]) -> None:
    _stop_accepting(publishers)
    for publisher in publishers:
        try:
            publisher._close_finally()
        except (MeteorError, TimeoutError) as error:
            _log.error(
                "Closing the publisher for stream %r at exit failed: %s",
                *(publisher.stream.name, error),
            )


def _after_fork(publishers: Sequence[Publisher]) -> None:
    for publisher in publishers:
        publisher._abandon()


_open_publishers: Registry[Publisher] = Registry(
    ClosingOrder.PUBLISHERS,
    owner=lambda publisher: publisher._handle.connector,
    close=_close_together,
    at_exit=_at_exit,
    after_fork=_after_fork,
    keep=True,
    close_within=_close_within,
)
