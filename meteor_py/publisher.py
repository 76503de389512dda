"""The publisher: checks and encodes records, and gives them to its outbox and sender."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from operator import countOf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from meteor_py import ack
from meteor_py.ack import Ack, ManyAck
from meteor_py.codec import Codec
from meteor_py.config import (
    FRAME_BYTES_MAX,
    FRAME_RECORDS_MAX,
    RECORD_BYTES_MAX,
    PublisherConfig,
    check_seconds,
)
from meteor_py.errors import MeteorError, PublisherClosed, RecordTooLarge
from meteor_py.frame import Columns
from meteor_py.outbox import RECORD_OVERHEAD, Outbox, closed_error
from meteor_py.sender import Route, Sender
from meteor_py.times import to_ms, to_ms_column

if TYPE_CHECKING:
    from meteor_py.client import Client
    from meteor_py.stream import Stream

#: So many values at once are made an Arrow array of; fewer join what else is waiting.
_ARROW_MIN = 256
#: Seconds that closing waits for the thread, beyond the wait for records.
JOIN_TIMEOUT_S = 6.0
#: Seconds that the end of a client or program waits for a publisher whose closing was interrupted.
_INTERRUPTED_S = 1.0

_log = logging.getLogger(__name__)

_HEADER_MAP = pa.map_(pa.string(), pa.binary())


class Publisher:
    """Publishes records to one stream, in the order of the calls. Safe for several threads.

    >>> with stream.publisher() as pub:                       # doctest: +SKIP
    ...     pub.publish(b"hello", key=b"k").result()
    0

    ``publish`` returns at once; a thread sends. Close it, or use ``with``: closing waits for what
    is still on its way and raises if something failed that nobody was told of.
    """

    def __init__(self, stream: Stream, config: PublisherConfig, codec: Codec | None) -> None:
        self.stream = stream
        self.config = config
        self._codec = codec
        settings = stream.config
        self._outbox = Outbox(
            stream=stream.name,
            records_max=min(FRAME_RECORDS_MAX, settings.capacity),
            bytes_max=FRAME_BYTES_MAX,
            pending_max=config.max_pending_bytes,
            linger_s=config.linger,
            delivery_timeout_s=config.delivery_timeout,
        )
        self._sender = Sender(
            stream.client.open_link(),
            self._outbox,
            Route(
                stream=stream.name,
                incarnation=stream.incarnation,
                compression=config.compression or settings.compression,
                checksum=settings.checksum,
                acks=config.acks,
            ),
        )
        self._closed = False
        self._ended = False
        self._close_lock = threading.Lock()
        self._put_value = self._outbox.put_value
        self._sender.start()
        _open_publishers.add(self)
        # Again each time: at the end the last registered is called first, and this one has to be
        # called before the embedded server that the publisher may be using is let go.
        atexit.unregister(_close_all)
        atexit.register(_close_all)

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
            ValueError: The timestamp has no timezone, or is not from 1970 to 9999.
            RecordTooLarge: Over 1 MiB in all.
            PublisherFull: ``max_pending_bytes`` are waiting, and none left for
                ``delivery_timeout`` seconds.
            PublisherClosed: The publisher is closed.
            LogTruncated: The server has lost records that it had acknowledged; raised once.
        """
        if self._codec is not None:
            value = self._codec.encode(value)
        if type(value) is not bytes:
            value = _to_bytes(value)
        size = len(value)
        if key is None and headers is None and timestamp is None and size <= RECORD_BYTES_MAX:
            return self._put_value(value, size)
        if key is not None:
            size += len(_checked_key(key))
        if headers is not None:
            headers = _checked_headers(headers)
            size += _headers_size(headers)
        if timestamp is not None:
            timestamp = to_ms(timestamp)
        if size > RECORD_BYTES_MAX:
            raise self._too_large(size)
        return self._outbox.put(value, key, headers, timestamp, size)

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
        if not isinstance(values, (pa.Array, pa.ChunkedArray)):
            values = values if isinstance(values, list) else _to_list(values)
            if self._codec is not None:
                values = [self._codec.encode(value) for value in values]
        if isinstance(values, list) and len(values) < _ARROW_MIN:
            parts = self._outbox.put_rows(*self._rows(values, keys, headers, timestamps))
        else:
            parts = self._outbox.put_frames(self._frames(values, keys, headers, timestamps))
        return ManyAck(parts[-1][0], parts)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all that was published is settled.

        Args:
            timeout: Seconds; None waits as long as the publisher tries (``delivery_timeout``).

        Raises:
            TimeoutError: Something is still on its way.
            MeteorError: Something failed that nobody was told of.
        """
        limit = self._time_limit(timeout)
        if not self._outbox.wait_empty(limit):
            raise TimeoutError(f"Records were still on their way after {limit:g} seconds.")
        self._raise_failure()

    def close(self, timeout: float | None = None) -> None:
        """Send what is left and end. What could not be sent in time fails; closing twice is fine.

        Args:
            timeout: Seconds; None waits as long as the publisher tries (``delivery_timeout``).

        Raises:
            MeteorError: Something failed that nobody was told of.
        """
        limit = self._time_limit(timeout)
        with self._close_lock:
            if not self._ended:  # closed and not ended: an interrupt came while it waited
                self._closed = True
                self._outbox.close(closed_error(self.stream.name))
                if not self._outbox.wait_empty(limit):
                    self._sender.abandon()
                self._sender.join(JOIN_TIMEOUT_S)
                self._ended = True
                _open_publishers.discard(self)
        self._raise_failure()

    @property
    def closed(self) -> bool:
        """Whether it takes no more records."""
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"While closing the publisher: {failure}")

    def __repr__(self) -> str:
        return f"<Publisher of {self.stream.name!r}{' (closed)' if self._closed else ''}>"

    # -- columns -------------------------------------------------------------------------------

    def _rows(
        self, values: list[Any], keys: Any, headers: Any, timestamps: Any
    ) -> tuple[Columns, list[int]]:
        """Check columns given as lists; return them and the size of each record."""
        rows = [_to_bytes(value) for value in values]
        columns = Columns(rows)
        sizes = list(map(len, rows))
        if keys is not None:
            columns.keys = [k if k is None else _checked_key(k) for k in _as_list(keys)]
            _check_length("keys", columns.keys, rows)
            sizes = [a + len(k or b"") for a, k in zip(sizes, columns.keys, strict=True)]
        if headers is not None:
            columns.headers = [h if h is None else _checked_headers(h) for h in headers]
            _check_length("headers", columns.headers, rows)
            extra = [0 if h is None else _headers_size(h) for h in columns.headers]
            sizes = [a + b for a, b in zip(sizes, extra, strict=True)]
        if timestamps is not None:
            columns.timestamps = [t if t is None else to_ms(t) for t in timestamps]
            _check_length("timestamps", columns.timestamps, rows)
        if not rows:
            raise ValueError("There is nothing to publish: values is empty.")
        largest = max(sizes)
        if largest > RECORD_BYTES_MAX:
            raise self._too_large(largest)
        return columns, sizes

    def _frames(
        self, values: Any, keys: Any, headers: Any, timestamps: Any
    ) -> list[tuple[Columns, int]]:
        """Check columns; return them as Arrow arrays, cut into frames, with their sizes."""
        size = len(values)
        if isinstance(values, list):
            values = _checked_values(values)
        columns = {"values": _as_arrow(values, pa.binary(), "values")}
        if columns["values"].null_count:
            raise TypeError("A value cannot be null; publish b'' for an empty one.")
        if keys is not None:
            if not isinstance(keys, (pa.Array, pa.ChunkedArray)):
                keys = [k if k is None else _checked_key(k) for k in keys]
            columns["keys"] = _as_arrow(keys, pa.binary(), "keys")
        if headers is not None:
            rows = [h if h is None else list(_checked_headers(h).items()) for h in headers]
            columns["headers"] = _as_arrow(rows, _HEADER_MAP, "headers")
        if timestamps is not None:
            if isinstance(timestamps, (pa.Array, pa.ChunkedArray)):
                timestamps = to_ms_column(timestamps)
            else:
                timestamps = [t if t is None else to_ms(t) for t in timestamps]
            columns["timestamps"] = _as_arrow(timestamps, pa.int64(), "timestamps")
        for name, column in columns.items():
            _check_length(name, column, range(size))
        if not size:
            raise ValueError("There is nothing to publish: values is empty.")
        records_max = min(FRAME_RECORDS_MAX, self.stream.config.capacity)
        frames: list[tuple[Columns, int]] = []
        for start in range(0, size, records_max):
            stop = min(start + records_max, size)
            self._cut({n: c.slice(start, stop - start) for n, c in columns.items()}, frames)
        return frames

    def _cut(self, columns: dict[str, Any], frames: list[tuple[Columns, int]]) -> None:
        """Halve columns until each part fits into a frame."""
        records = len(columns["values"])
        size = sum(column.nbytes for column in columns.values())
        if size <= FRAME_BYTES_MAX:
            whole = {n: _one_array(column) for n, column in columns.items()}
            frames.append((Columns(**whole), size + records * RECORD_OVERHEAD))
        elif records == 1:
            row_size = _row_size(columns)
            if row_size > RECORD_BYTES_MAX:
                raise self._too_large(row_size)
            frames.append((Columns(**{n: _one_array(c) for n, c in columns.items()}), size))
        else:
            half = records // 2
            self._cut({n: column.slice(0, half) for n, column in columns.items()}, frames)
            self._cut({n: column.slice(half) for n, column in columns.items()}, frames)

    # -- small parts ---------------------------------------------------------------------------

    def _time_limit(self, timeout: float | None) -> float:
        ack.forbid_waiting()
        if timeout is None:
            return self.config.delivery_timeout + JOIN_TIMEOUT_S
        return check_seconds("timeout", timeout, zero=True)

    def _raise_failure(self) -> None:
        failure = self._outbox.take_failure()
        if failure is not None:
            raise failure.with_traceback(None)

    def _too_large(self, size: int) -> RecordTooLarge:
        return RecordTooLarge(
            f"A record of {size} bytes is over the limit of {RECORD_BYTES_MAX}; publish a "
            "reference to it, or cut it into pieces.",
            stream=self.stream.name,
        )

    def _close_finally(self) -> None:
        """Close it unless that is done; Ctrl-C while it was closing means: no second long wait."""
        self.close(_INTERRUPTED_S if self._closed else None)

    def _forget(self) -> None:
        """In a forked child: the thread is not here, and what waits is the parent's to send."""
        reason = PublisherClosed(
            f"This publisher of stream {self.stream.name!r} belongs to the parent process; open "
            "another here with stream.publisher().",
            stream=self.stream.name,
        )
        self._closed = self._ended = True
        self._close_lock = threading.Lock()
        for batch in [*self._sender.window, *self._outbox.forget(reason)]:
            batch.disown(reason)


# Strong: one that the user dropped without closing it has records to deliver, too.
_open_publishers: set[Publisher] = set()


def close_publishers(client: Client) -> None:
    """Deliver what the publishers of a client still have; raise the first failure."""
    failures: list[Exception] = []
    for publisher in list(_open_publishers):
        if publisher.stream.client is client:
            try:
                publisher._close_finally()
            except MeteorError as error:
                failures.append(error)
    if failures:
        raise failures[0]


def _close_all() -> None:
    """At the interpreter's end: deliver what the user did not wait for."""
    for publisher in list(_open_publishers):
        try:
            publisher._close_finally()
        except MeteorError as error:
            _log.error("At the end of the publisher of %r: %s", publisher.stream.name, error)


def _forget_all() -> None:
    ack.forget_waiters()
    for publisher in list(_open_publishers):
        publisher._forget()
    _open_publishers.clear()


os.register_at_fork(after_in_child=_forget_all)


def _to_bytes(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(
        f"A value must be bytes, not {type(value).__name__}; encode it, or open the stream with "
        'codec="text", "json" or "msgpack".'
    )


def _to_list(values: Any) -> list[Any]:
    # One value would be taken apart, into numbers or letters.
    if isinstance(values, (bytes, bytearray, memoryview, str)) or not isinstance(values, Iterable):
        raise TypeError(
            f"publish_many takes a list of values or an Arrow array, not {type(values).__name__}."
        )
    return list(values)


def _checked_values(values: list[Any]) -> list[Any]:
    """Bytes, and nothing that Arrow would quietly make bytes of."""
    if countOf(map(type, values), bytes) == len(values):
        return values
    return [_to_bytes(value) for value in values]


def _checked_key(key: Any) -> bytes:
    if type(key) is not bytes:
        raise TypeError(f"A key must be bytes, not {type(key).__name__}.")
    return key


def _checked_headers(headers: Any) -> dict[str, bytes]:
    if not isinstance(headers, Mapping):
        raise TypeError(f"Headers must be a mapping, not {type(headers).__name__}.")
    for name, value in headers.items():
        if not isinstance(name, str) or type(value) is not bytes:
            raise TypeError("Headers must be str names with bytes values.")
    try:
        "".join(headers).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"The name of a header cannot be written as UTF-8: {error}.") from None
    return dict(headers)


def _headers_size(headers: Mapping[str, bytes]) -> int:
    return sum(len(name.encode()) + len(value) for name, value in headers.items())


def _row_size(columns: dict[str, Any]) -> int:
    """The size of the one record in Arrow columns, counted as ``publish`` does."""
    cells = {name: column[0].as_py() for name, column in columns.items()}
    headers = dict(cells.get("headers") or ())
    return len(cells["values"]) + len(cells.get("keys") or b"") + _headers_size(headers)


def _check_length(name: str, column: Any, values: Sequence[Any]) -> None:
    if len(column) != len(values):
        raise ValueError(f"There are {len(values)} values, but {len(column)} {name}.")


def _as_list(column: Any) -> list[Any]:
    return column.to_pylist() if isinstance(column, (pa.Array, pa.ChunkedArray)) else list(column)


def _as_arrow(column: Any, kind: pa.DataType, name: str) -> pa.ChunkedArray:
    try:
        if isinstance(column, (pa.Array, pa.ChunkedArray)):
            whole = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
            return whole.cast(kind)
        return pa.chunked_array([pa.array(column, kind)])
    except (pa.ArrowException, TypeError) as error:
        raise TypeError(f"{name} cannot be published as {kind}: {error}.") from None


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
