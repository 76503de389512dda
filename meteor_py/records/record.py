"""Records, and batches that stay in Arrow format until the application asks for objects.

A :class:`RecordBatch` holds records with consecutive offsets, in chunks. A chunk is one large frame
(Arrow, not copied), several small frames merged (lists), or records from a store (Arrow).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, repeat
from typing import Any, TypeVar, overload

import msgspec
import pyarrow as pa

from meteor_py.errors import DecodeError
from meteor_py.records.codec import Codec
from meteor_py.records.memory import keep_arenas
from meteor_py.records.times import EPOCH

Headers = dict[str, bytes]
_T = TypeVar("_T")

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
    """A published record and its offset."""

    offset: int
    #: The value: bytes, or the object that the codec decoded.
    value: Any
    key: bytes | None
    headers: Headers | None
    #: Creation time in ms since 1970: the publisher's ``timestamp``, or else ``appended``.
    timestamp: int
    #: Time in ms since 1970 at which the server appended the record; never decreases in a stream.
    appended: int

    @property
    def time(self) -> datetime:
        """``timestamp`` as an aware datetime."""
        return EPOCH + timedelta(milliseconds=self.timestamp)


@dataclass(slots=True, eq=False)
class ListChunk:
    """Records from small frames, as lists of equal length; None for a column that no record has."""

    first: int
    values: list[bytes]
    keys: list[bytes | None] | None
    headers: list[Headers | None] | None
    timestamps: list[int | None] | None
    appended: list[int]

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
        return self._records(range(self.first, self.first + len(self)))

    def pick(self, offsets: Sequence[int]) -> list[Record]:
        """Return the records at some of this chunk's offsets; create no other record objects."""
        rows = [offset - self.first for offset in offsets]
        picked = ListChunk(
            self.first,
            _items(self.values, rows),
            self.keys and _items(self.keys, rows),
            self.headers and _items(self.headers, rows),
            self.timestamps and _items(self.timestamps, rows),
            _items(self.appended, rows),
        )
        return list(picked._records(offsets))

    def to_lists(self) -> ListChunk:
        return self

    def _records(self, offsets: Iterable[int]) -> Iterator[Record]:
        return map(
            Record,
            offsets,
            self.values,
            self.keys or repeat(None),
            self.headers or repeat(None),
            self._times(),
            self.appended,
        )

    def value_list(self) -> list[bytes]:
        return self.values.copy()  # a copy, because the caller may change the list

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
                pa.array(to_pairs(self.headers), _HEADERS)
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


@dataclass(slots=True, eq=False)
class ArrowChunk:
    """One frame with many records, not copied. All were appended at the same time."""

    first: int
    columns: pa.RecordBatch
    appended: int

    def __len__(self) -> int:
        return int(self.columns.num_rows)

    def slice(self, start: int, stop: int) -> ArrowChunk:
        part = self.columns.slice(start, stop - start)
        return ArrowChunk(self.first + start, part, self.appended)

    def rows(self) -> Iterator[Record]:
        times = self._column("timestamp")
        return map(
            Record,
            range(self.first, self.first + len(self)),
            self.value_list(),
            self.key_list(),
            _dicts(self._column("headers")),
            repeat(self.appended) if times is None else times.fill_null(self.appended).to_pylist(),
            repeat(self.appended),
        )

    def to_lists(self) -> ListChunk:
        key, times = self._column("key"), self._column("timestamp")
        headers = self._column("headers")
        return ListChunk(
            self.first,
            self.value_list(),
            None if key is None else key.to_pylist(),
            None if headers is None else _dict_list(headers),
            None if times is None else times.to_pylist(),
            [self.appended] * len(self),
        )

    def value_list(self) -> list[bytes]:
        return _values(self.columns)

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


@dataclass(slots=True, eq=False)
class TableChunk:
    """Records from a store, with the columns that the reader requested, usually all of them."""

    first: int
    columns: pa.RecordBatch

    def __len__(self) -> int:
        return int(self.columns.num_rows)

    def slice(self, start: int, stop: int) -> TableChunk:
        return TableChunk(self.first + start, self.columns.slice(start, stop - start))

    def rows(self) -> Iterator[Record]:
        return map(
            Record,
            range(self.first, self.first + len(self)),
            self.value_list(),
            self.key_list(),
            _dicts(self.columns.column("headers")),
            self.columns.column("timestamp").view(pa.int64()).to_pylist(),
            self.columns.column("appended").view(pa.int64()).to_pylist(),
        )

    def to_lists(self) -> ListChunk:
        headers = self.columns.column("headers")
        return ListChunk(
            self.first,
            self.value_list(),
            self.key_list(),
            None if headers.null_count == len(self) else _dict_list(headers),
            self.columns.column("timestamp").view(pa.int64()).to_pylist(),
            self.columns.column("appended").view(pa.int64()).to_pylist(),
        )

    def value_list(self) -> list[bytes]:
        return _values(self.columns)

    def key_list(self) -> list[bytes | None]:
        keys: list[bytes | None] = self.columns.column("key").to_pylist()
        return keys

    def to_arrow(self) -> pa.RecordBatch:
        """Return all columns in ``ARROW_SCHEMA``.

        Columns that were not read are null, except the offset, which is known anyway.
        """
        size, names = len(self), self.columns.schema.names
        if len(names) == len(ARROW_SCHEMA):
            return self.columns
        columns = [
            self.columns.column(field.name) if field.name in names else pa.nulls(size, field.type)
            for field in ARROW_SCHEMA
        ]
        columns[0] = pa.arange(self.first, self.first + size)
        return pa.RecordBatch.from_arrays(columns, schema=ARROW_SCHEMA)


Chunk = ListChunk | ArrowChunk | TableChunk


class RecordBatch(Sequence[Record]):
    """Records with consecutive offsets, possibly none.

    >>> batch = sub.poll()          # doctest: +SKIP
    >>> len(batch), batch.offsets   # doctest: +SKIP
    (3, range(0, 3))

    ``values()`` is several times faster than a loop over records; ``to_arrow()`` is faster still.
    """

    __slots__ = ("_chunks", "_codec", "_length", "_stream", "first_offset")

    def __init__(
        self, stream: str, first_offset: int, chunks: Sequence[Chunk], codec: Codec | None = None
    ) -> None:
        self._stream = stream
        self._chunks = chunks
        self._codec = codec
        self._length = sum(map(len, chunks))
        #: Offset of the first record; for an empty batch, the next offset to read.
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
        """Return the values of all records, decoded.

        Raises:
            DecodeError: The codec could not decode one of them.
        """
        raw: list[bytes] = []
        for chunk in self._chunks:
            raw += chunk.value_list()
        if self._codec is None:
            return raw
        decode = self._codec.decode
        try:
            return [decode(value) for value in raw]
        except Exception:
            return [record.value for record in self]  # raises DecodeError with the record

    def keys(self) -> list[bytes | None]:
        """Return the keys of all records; None for a record without a key."""
        return list(chain.from_iterable(chunk.key_list() for chunk in self._chunks))

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table (:data:`ARROW_SCHEMA`).

        Values are not decoded. Those from large frames and from a store are not copied.
        """
        return pa.Table.from_batches([c.to_arrow() for c in self._chunks], schema=ARROW_SCHEMA)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Record]:
        rows = chain.from_iterable(chunk.rows() for chunk in self._chunks)
        codec = self._codec
        if codec is None:
            return rows
        return (decode_record(self._stream, codec, record) for record in rows)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> RecordBatch: ...
    def __getitem__(self, index: int | slice) -> Record | RecordBatch:
        """Return a record or, for a slice with step 1, a batch that shares this batch's memory."""
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step != 1:
                raise ValueError("A batch has consecutive offsets. Slice it with step 1.")
            return self._part(start, max(start, stop))
        if not -self._length <= index < self._length:
            raise IndexError(f"Index {index} is out of range: the batch length is {self._length}.")
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


def decode_record(stream: str, codec: Codec, record: Record) -> Record:
    """Return the record with its value decoded.

    Raises:
        DecodeError: The codec could not decode the value.
    """
    try:
        value = codec.decode(record.value)
    except Exception as error:
        raise DecodeError(
            f"The codec could not decode record {record.offset} of stream {stream!r}: {error}",
            stream=stream,
            record=record,
        ) from error
    return msgspec.structs.replace(record, value=value)


def to_pairs(headers: list[Headers | None]) -> list[list[tuple[str, bytes]] | None]:
    """Convert headers to lists of pairs, which Arrow accepts as maps."""
    return [None if row is None else list(row.items()) for row in headers]


def _values(columns: pa.RecordBatch) -> list[bytes]:
    values: list[bytes] = columns.column("value").to_pylist()
    keep_arenas(values)
    return values


def _dicts(headers: Any) -> Iterable[Headers | None]:
    """Convert an Arrow column of headers, which may be None, to one dict or None per record."""
    if headers is None or headers.null_count == len(headers):
        return repeat(None)
    return _dict_list(headers)


def _dict_list(headers: Any) -> list[Headers | None]:
    """Convert an Arrow column of headers to one dict or None per record."""
    return [None if pairs is None else dict(pairs) for pairs in headers.to_pylist()]


def _items(column: list[_T], rows: Iterable[int]) -> list[_T]:
    return [column[row] for row in rows]
