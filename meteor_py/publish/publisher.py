"""The publisher: puts records into its accumulator, from which its sender takes batches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from meteor_py.errors import MeteorError, PublisherClosed
from meteor_py.log.handle import StreamHandle
from meteor_py.publish.accumulator import Accumulator, closed_error
from meteor_py.publish.ack import Ack, ManyAck
from meteor_py.publish.sender import Route, Sender
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
from meteor_py.runtime.completion import forbid_waiting
from meteor_py.runtime.lifecycle import Closeable, ClosingOrder, Registry, close_each

if TYPE_CHECKING:
    from meteor_py.stream import Stream

#: This many values at once become an Arrow array; fewer join the open batch.
_ARROW_MIN = 256
#: Seconds that closing waits for the thread, beyond the wait for records.
JOIN_TIMEOUT_S = 6.0
#: Seconds that the end of a client or program waits for a publisher whose closing was interrupted.
_INTERRUPTED_S = 1.0

_log = logging.getLogger(__name__)


class Publisher(Closeable):
    """Publishes records to one stream, in the order of the calls. Safe for several threads.

    >>> with stream.publisher() as pub:                       # doctest: +SKIP
    ...     pub.publish(b"hello", key=b"k").result()
    0

    ``publish`` returns at once; a thread sends. Close it, or use ``with``: closing waits for what
    is still on its way, and raises the first error that the application has not seen.
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
        self._ordering = settings.ordering_rule
        self._validator = RecordValidator(
            stream.name, records_max, config.max_record_bytes, self._ordering
        )
        self._accumulator = Accumulator(
            stream=stream.name,
            records_max=records_max,
            bytes_max=FRAME_BYTES_MAX,
            pending_max=config.max_pending_bytes,
            linger_s=config.linger,
            delivery_timeout_s=config.delivery_timeout,
        )
        self._sender = Sender(
            handle.connector.open_connection(),
            self._accumulator,
            Route(
                stream=stream.name,
                incarnation=stream.incarnation,
                compression=config.compression or settings.compression,
                checksum=settings.checksum,
                acks=config.acks,
                ordering=self._ordering,
            ),
        )
        self._closed = False
        self._ended = False
        self._close_lock = threading.RLock()  # a signal handler may close what is being closed
        self._put_value = self._accumulator.put_value
        self._sender.start()
        _open_publishers.add(self)

    # -- publishing ----------------------------------------------------------------------------

    def publish(
        self,
        value: Any,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp: datetime | int | None = None,
    ) -> Ack:
        """Publish one record.

        Args:
            value: Bytes, or what the stream's codec takes.
            key: Optional bytes.
            headers: Optional names and bytes.
            timestamp: When the record came about: an aware datetime, or ms since 1970. Without
                one it is the time of appending.

        Raises:
            TypeError: The value, key, headers or timestamp are of the wrong type.
            ValueError: The timestamp has no timezone, or is not from 1970 to 9999; or the
                ordering key of the record has more than 256 bytes.
            RecordTooLarge: Over ``max_record_bytes`` in all (1 MiB).
            PublisherFull: ``max_pending_bytes`` are waiting, and none left for
                ``delivery_timeout`` seconds.
            PublisherClosed: The publisher is closed.
            LogTruncated: The server has lost records that it had acknowledged; raised once.
        """
        if self._codec is not None:
            value = self._codec.encode(value)
        if type(value) is not bytes:
            value = to_bytes(value)
        size = len(value)
        if key is None and headers is None and timestamp is None and size <= self._plain_max:
            return self._put_value(value, size)
        if key is not None:
            size += len(check_key(key))
        if headers is not None:
            headers = check_headers(headers)
            size += headers_size(headers)
        if timestamp is not None:
            timestamp = to_ms(timestamp)
        self._validator.check_size(size)
        if self._ordering is not None:
            self._ordering.check(key, headers)
        return self._accumulator.put(value, key, headers, timestamp, size=size)

    def publish_many(
        self,
        values: Iterable[Any] | pa.Array | pa.ChunkedArray,
        keys: Sequence[bytes | None] | pa.Array | pa.ChunkedArray | None = None,
        headers: Sequence[Mapping[str, bytes] | None] | None = None,
        timestamps: Sequence[datetime | int | None] | None = None,
    ) -> ManyAck:
        """Publish many records: several times faster than a loop, faster again from Arrow.

        Not atomic: others may publish in between, see :attr:`ManyAck.ranges`. All records are
        checked before the first is taken. Arrow arrays of binary or string type are taken as
        they are, whatever the codec.

        Raises:
            ValueError: Nothing to publish, columns of different length, or times out of range.
            TypeError, RecordTooLarge, PublisherFull, PublisherClosed, LogTruncated: As ``publish``.
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
        """Wait until all that was published is settled.

        Args:
            timeout: Seconds; None waits as long as the publisher tries (``delivery_timeout``).

        Raises:
            TimeoutError: Something is still on its way.
            MeteorError: Something failed, and the application has not seen the error.
        """
        limit = self._time_limit(timeout)
        if not self._accumulator.wait_empty(limit):
            raise TimeoutError(f"Records were still on their way after {limit:g} seconds.")
        self._raise_failure()

    def close(self, timeout: float | None = None) -> None:
        """Send what is left and end. What could not be sent in time fails; closing twice is fine.

        Args:
            timeout: Seconds; None waits as long as the publisher tries (``delivery_timeout``).

        Raises:
            MeteorError: Something failed, and the application has not seen the error.
            TimeoutError: The sending thread could not be ended.
        """
        limit = self._time_limit(timeout)
        if not self._close_lock.acquire(timeout=limit + JOIN_TIMEOUT_S):
            raise TimeoutError("Another thread is still closing this publisher.")
        try:
            if not self._ended:  # closed and not ended: an interrupt came while it waited
                self._closed = True
                self._accumulator.close(closed_error(self.stream.name))
                if not self._accumulator.wait_empty(limit):
                    self._sender.abandon()
                if not self._sender.join(JOIN_TIMEOUT_S):
                    raise TimeoutError(
                        f"The sending thread of stream {self.stream.name!r} does not end: it is "
                        "still trying to connect, or a callback waits for something."
                    )
                self._ended = True
                _open_publishers.discard(self)
        finally:
            self._close_lock.release()
        self._raise_failure()

    @property
    def closed(self) -> bool:
        """Whether it takes no more records."""
        return self._closed

    def __repr__(self) -> str:
        return f"<Publisher of {self.stream.name!r}{' (closed)' if self._closed else ''}>"

    # -- small parts ---------------------------------------------------------------------------

    def _time_limit(self, timeout: float | None) -> float:
        forbid_waiting()
        if timeout is None:
            return self.config.delivery_timeout + JOIN_TIMEOUT_S
        return check_seconds("timeout", timeout, zero=True)

    def _raise_failure(self) -> None:
        failure = self._accumulator.take_failure()
        if failure is not None:
            raise failure.with_traceback(None)

    def _close_finally(self) -> None:
        """Close it unless that is done; Ctrl-C while it was closing means: no second long wait."""
        self.close(_INTERRUPTED_S if self._closed else None)

    def _abandon(self) -> None:
        """In a forked child, which has no sender: the parent sends what waits."""
        reason = PublisherClosed(
            f"This publisher of stream {self.stream.name!r} belongs to the parent process; open "
            "another here with stream.publisher().",
            stream=self.stream.name,
        )
        self._closed = self._ended = True
        self._close_lock = threading.RLock()
        for batch in [*self._sender.window, *self._accumulator.abandon(reason)]:
            batch.abandon(reason)


def _at_exit(publishers: Sequence[Publisher]) -> None:
    """Deliver what the user did not wait for."""
    for publisher in publishers:
        try:
            publisher._close_finally()
        except (MeteorError, TimeoutError) as error:
            _log.error("At the end of the publisher of %r: %s", publisher.stream.name, error)


def _after_fork(publishers: Sequence[Publisher]) -> None:
    for publisher in publishers:
        publisher._abandon()


_open_publishers: Registry[Publisher] = Registry(
    ClosingOrder.PUBLISHERS,
    owner=lambda publisher: publisher._handle.connector,
    close=lambda publishers: close_each(
        publishers, Publisher._close_finally, (MeteorError, TimeoutError)
    ),
    at_exit=_at_exit,
    after_fork=_after_fork,
    keep=True,
)
