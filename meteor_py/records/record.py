"""Records, and batches of them that stay in Arrow until the application asks for objects.

A :class:`RecordBatch` is a run of consecutive offsets in one or more chunks. A chunk is a frame
as it came (Arrow, not copied), a number of small frames put together (lists), or a part of a store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import chain, repeat
from typing import Any, overload

import msgspec
import pyarrow as pa

from meteor_py.errors import DecodeError
from meteor_py.records.codec import Codec
from meteor_py.records.times import EPOCH

Headers = dict[str, bytes]

_MILLISECONDS = pa.timestamp("ms", tz="UTC")
_HEADERS = pa.map_(pa.string(), pa.binary())
#: The columns of ``RecordBatch.to_arrow()``.
ARROW_SCHEMA = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", _MILLISECONDS, nullable=False),
        pa.field("appended", _MILLISECONDS, nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("headers", _HEADERS),
    ]
)


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record as it was published, and where it lies."""

    offset: int
    #: The value: bytes, or what the codec made of them.
    value: Any
    key: bytes | None
    headers: Headers | None
    #: Creation time in ms since 1970: the publisher's if it gave one, else ``appended``.
    timestamp: int
    #: Time in ms since 1970 at which the server appended it; never goes back in a stream.
    appended: int

    @property
    def time(self) -> datetime:
        """``timestamp`` as an aware datetime."""
        return EPOCH + timedelta(milliseconds=self.timestamp)


class ListChunk:
    """Records of small frames, as lists of equal length; None = no record has one."""

    __slots__ = ("appended", "first", "headers", "keys", "timestamps", "values")

    def __init__(
        self,
        first: int,
        values: list[bytes],
        keys: list[bytes | None] | None,
        headers: list[Headers | None] | None,
        timestamps: list[int | None] | None,
        appended: list[int],
    ) -> None:
        self.first = first
        self.values = values
        self.keys = keys
        self.headers = headers
        self.timestamps = timestamps
        self.appended = appended

    def __len__(self) -> int:
        return len(self.values)

    def is_bare(self) -> bool:
        return self.keys is None and self.headers is None and self.timestamps is None

    def slice(self, start: int, stop: int) -> ListChunk:
        return ListChunk(
            self.first + start,
            self.values[start:stop],
            self.keys and self.keys[start:stop],
            self.headers and self.headers[start:stop],
            self.timestamps and self.timestamps[start:stop],
            self.appended[start:stop],
        )

    def rows(self) -> Iterator[Record]:
        return map(
            Record,
            range(self.first, self.first + len(self)),
            self.values,
            self.keys or repeat(None),
            self.headers or repeat(None),
            self._times(),
            self.appended,
        )

    def value_list(self) -> list[bytes]:
        return self.values.copy()  # the caller's to change

    def key_list(self) -> list[bytes | None]:
        return self.keys.copy() if self.keys else [None] * len(self)

    def to_arrow(self) -> pa.RecordBatch:
        size = len(self)
        return pa.RecordBatch.from_arrays(
            [
                pa.arange(self.first, self.first + size),
                pa.array(self._times(), _MILLISECONDS),
                pa.array(self.appended, _MILLISECONDS),
                pa.array(self.keys, pa.binary()) if self.keys else pa.nulls(size, pa.binary()),
                pa.array(self.values, pa.binary()),
                pa.array(_pairs(self.headers), _HEADERS)
                if self.headers
                else pa.nulls(size, _HEADERS),
            ],
            schema=ARROW_SCHEMA,
        )

    def _times(self) -> list[int]:
        if not self.timestamps:
            return self.appended
        pairs = zip(self.timestamps, self.appended, strict=True)
        return [appended if time is None else time for time, appended in pairs]


class ArrowChunk:
    """One frame of many records, as it came. All were appended at the same time."""

    __slots__ = ("appended", "columns", "first")

    def __init__(self, first: int, columns: pa.RecordBatch, appended: int) -> None:
        self.first = first
        self.columns = columns
        self.appended = appended

    def __len__(self) -> int:
        return int(self.columns.num_rows)

    def slice(self, start: int, stop: int) -> ArrowChunk:
        part = self.columns.slice(start, stop - start)
        return ArrowChunk(self.first + start, part, self.appended)

    def rows(self) -> Iterator[Record]:
        headers = self._column("headers")
        return map(
            Record,
            range(self.first, self.first + len(self)),
            self.value_list(),
            self._list("key"),
            repeat(None)
            if headers is None
            else [None if pairs is None else dict(pairs) for pairs in headers.to_pylist()],
            self._times(),
            repeat(self.appended),
        )

    def value_list(self) -> list[bytes]:
        values: list[bytes] = self.columns.column("value").to_pylist()
        return values

    def key_list(self) -> list[bytes | None]:
        column = self._column("key")
        return [None] * len(self) if column is None else column.to_pylist()

    def to_arrow(self) -> pa.RecordBatch:
        size = len(self)
        appended = pa.repeat(pa.scalar(self.appended, _MILLISECONDS), size)
        times = self._column("timestamp")
        key, headers = self._column("key"), self._column("headers")
        return pa.RecordBatch.from_arrays(
            [
                pa.arange(self.first, self.first + size),
                appended if times is None else times.fill_null(self.appended).view(_MILLISECONDS),
                appended,
                pa.nulls(size, pa.binary()) if key is None else key,
                self.columns.column("value"),
                pa.nulls(size, _HEADERS) if headers is None else headers,
            ],
            schema=ARROW_SCHEMA,
        )

    def _column(self, name: str) -> Any:
        index = self.columns.schema.get_field_index(name)
        return None if index < 0 else self.columns.column(index)

    def _list(self, name: str) -> Any:
        column = self._column(name)
        return repeat(None) if column is None else column.to_pylist()

    def _times(self) -> Any:
        column = self._column("timestamp")
        if column is None:
            return repeat(self.appended)
        return column.fill_null(self.appended).to_pylist()


class TableChunk:
    """Records from a store, with all columns of ``ARROW_SCHEMA``."""

    __slots__ = ("columns", "first")

    def __init__(self, first: int, columns: pa.RecordBatch) -> None:
        self.first = first
        self.columns = columns

    def __len__(self) -> int:
        return int(self.columns.num_rows)

    def slice(self, start: int, stop: int) -> TableChunk:
        return TableChunk(self.first + start, self.columns.slice(start, stop - start))

    def rows(self) -> Iterator[Record]:
        headers = self.columns.column("headers")
        return map(
            Record,
            range(self.first, self.first + len(self)),
            self.value_list(),
            self.key_list(),
            repeat(None)
            if headers.null_count == len(headers)
            else [None if pairs is None else dict(pairs) for pairs in headers.to_pylist()],
            self.columns.column("timestamp").view(pa.int64()).to_pylist(),
            self.columns.column("appended").view(pa.int64()).to_pylist(),
        )

    def value_list(self) -> list[bytes]:
        values: list[bytes] = self.columns.column("value").to_pylist()
        return values

    def key_list(self) -> list[bytes | None]:
        keys: list[bytes | None] = self.columns.column("key").to_pylist()
        return keys

    def to_arrow(self) -> pa.RecordBatch:
        return self.columns


Chunk = ListChunk | ArrowChunk | TableChunk


class RecordBatch(Sequence[Record]):
    """Records with consecutive offsets, possibly none.

    >>> batch = sub.poll()          # doctest: +SKIP
    >>> len(batch), batch.offsets   # doctest: +SKIP
    (3, range(0, 3))

    ``values()`` is several times faster than a loop over records, ``to_arrow()`` again faster.
    """

    __slots__ = ("_chunks", "_codec", "_length", "_stream", "first_offset")

    def __init__(
        self, stream: str, first_offset: int, chunks: Sequence[Chunk], codec: Codec | None = None
    ) -> None:
        self._stream = stream
        self._chunks = chunks
        self._codec = codec
        self._length = sum(map(len, chunks))
        #: Offset of the first record; of an empty batch, the offset that would come next.
        self.first_offset = first_offset

    @property
    def last_offset(self) -> int:
        """Offset of the last record; ``first_offset - 1`` if the batch is empty."""
        return self.first_offset + self._length - 1

    @property
    def offsets(self) -> range:
        """The offsets of all records."""
        return range(self.first_offset, self.first_offset + self._length)

    def values(self) -> list[Any]:
        """The values of all records, decoded.

        Raises:
            DecodeError: The codec could not read one of them.
        """
        raw = self._raw_values()
        return raw if self._codec is None else self._decoded(raw)

    def keys(self) -> list[bytes | None]:
        """The keys of all records; None where there is none."""
        if len(self._chunks) == 1:
            return self._chunks[0].key_list()
        return list(chain.from_iterable(chunk.key_list() for chunk in self._chunks))

    def to_arrow(self) -> pa.Table:
        """As an Arrow table (:data:`ARROW_SCHEMA`); values and keys are not copied or decoded."""
        return pa.Table.from_batches([c.to_arrow() for c in self._chunks], schema=ARROW_SCHEMA)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Record]:
        if self._codec is None:
            return chain.from_iterable(chunk.rows() for chunk in self._chunks)
        return chain.from_iterable(self._decoded_rows(chunk) for chunk in self._chunks)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> RecordBatch: ...
    def __getitem__(self, index: int | slice) -> Record | RecordBatch:
        """A record, or with a slice (of step 1) a batch that shares the memory of this one."""
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step != 1:
                raise ValueError("A batch is a run of consecutive offsets; slice it with step 1.")
            return self._part(start, max(start, stop))
        if not -self._length <= index < self._length:
            raise IndexError(f"Record {index} of a batch of {self._length}.")
        index %= self._length
        return next(iter(self._part(index, index + 1)))

    def _part(self, start: int, stop: int) -> RecordBatch:
        chunks: list[Chunk] = []
        base = 0
        for chunk in self._chunks:
            low, high = max(start - base, 0), min(stop - base, len(chunk))
            if low < high:
                chunks.append(chunk.slice(low, high))
            base += len(chunk)
        return RecordBatch(self._stream, self.first_offset + start, chunks, self._codec)

    def __repr__(self) -> str:
        span = f"{self.first_offset}..{self.last_offset}" if self._length else "empty"
        return f"<RecordBatch of {self._stream!r}: {span}>"

    def _raw_values(self) -> list[bytes]:
        values: list[bytes] = []
        for chunk in self._chunks:
            values += chunk.value_list()
        return values

    def _decoded(self, raw: list[bytes]) -> list[Any]:
        assert self._codec is not None
        decode = self._codec.decode
        try:
            return [decode(value) for value in raw]
        except Exception:
            return [record.value for record in self]  # raises again, naming the record

    def _decoded_rows(self, chunk: Chunk) -> Iterator[Record]:
        assert self._codec is not None
        for record in chunk.rows():
            yield decode_record(self._stream, self._codec, record)


def decode_record(stream: str, codec: Codec, record: Record) -> Record:
    """The same record with its value decoded.

    Raises:
        DecodeError: The codec cannot read it.
    """
    try:
        value = codec.decode(record.value)
    except Exception as error:
        raise DecodeError(
            f"The codec cannot read record {record.offset} of stream {stream!r}: {error}",
            stream=stream,
            record=record,
        ) from error
    return msgspec.structs.replace(record, value=value)


def _pairs(headers: list[Headers | None]) -> list[list[tuple[str, bytes]] | None]:
    return [None if row is None else list(row.items()) for row in headers]
