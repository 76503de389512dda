"""Validation of records to publish, and their conversion to columns.

All records are checked before the first is accepted. An error means that none were published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import countOf
from typing import Any

import pyarrow as pa

from meteor_py.errors import RecordTooLarge
from meteor_py.log.handle import StreamHandle
from meteor_py.publish.fast_path import RECORD_OVERHEAD
from meteor_py.records.config import FRAME_BYTES_MAX, HEADERS_MAX
from meteor_py.records.frame import Columns
from meteor_py.records.times import to_ms, to_ms_column

_HEADER_MAP = pa.map_(pa.string(), pa.binary())


class RecordValidator:
    """Checks one publisher's records.

    Args:
        stream: The stream. Its ordering key may be added later.
        records_max: Maximum number of records in a frame.
        record_bytes_max: Maximum size of a record in bytes, including key and headers.
    """

    def __init__(self, stream: StreamHandle, records_max: int, record_bytes_max: int) -> None:
        self._stream = stream
        self._records_max = records_max
        self._record_bytes_max = record_bytes_max

    def rows(
        self, values: list[Any], keys: Any, headers: Any, timestamps: Any
    ) -> tuple[Columns, list[int]]:
        """Return columns as lists, and the size of each record in bytes."""
        columns = Columns([to_bytes(value) for value in values])
        sizes = list(map(len, columns.values))
        if keys is not None:
            columns.keys = [k if k is None else check_key(k) for k in to_list("keys", keys)]
            _check_length("keys", columns.keys, values)
            sizes = [a + len(k or b"") for a, k in zip(sizes, columns.keys, strict=True)]
        if headers is not None:
            rows = to_list("headers", headers)
            columns.headers = [h if h is None else check_headers(h) for h in rows]
            _check_length("headers", columns.headers, values)
            extra = [0 if h is None else headers_size(h) for h in columns.headers]
            sizes = [a + b for a, b in zip(sizes, extra, strict=True)]
        if timestamps is not None:
            rows = to_list("timestamps", timestamps)
            columns.timestamps = [t if t is None else to_ms(t) for t in rows]
            _check_length("timestamps", columns.timestamps, values)
        if not values:
            raise ValueError("publish_many got no values. Pass at least one.")
        self.check_size(max(sizes))
        ordering = self._stream.config.ordering_rule
        if ordering is not None:
            ordering.check_columns(columns)
        return columns, sizes

    def frames(
        self, values: Any, keys: Any, headers: Any, timestamps: Any
    ) -> list[tuple[Columns, int]]:
        """Return columns as Arrow arrays, cut into frames, each with its size in bytes."""
        size = len(values)
        # Refuse a str here: Arrow would accept it and store its UTF-8 bytes.
        if isinstance(values, list) and countOf(map(type, values), bytes) != size:
            values = [to_bytes(value) for value in values]
        columns = {"values": _to_arrow(values, pa.binary(), "values")}
        if columns["values"].null_count:
            raise TypeError("A value cannot be null. Publish b'' as an empty value.")
        if keys is not None:
            if not is_arrow(keys):
                keys = [k if k is None else check_key(k) for k in to_list("keys", keys)]
            columns["keys"] = _to_arrow(keys, pa.binary(), "keys")
        if headers is not None:
            rows = to_list("headers", headers)
            pairs = [h if h is None else list(check_headers(h).items()) for h in rows]
            columns["headers"] = _to_arrow(pairs, _HEADER_MAP, "headers")
        if timestamps is not None:
            if is_arrow(timestamps):
                timestamps = to_ms_column(timestamps)
            else:
                rows = to_list("timestamps", timestamps)
                timestamps = [t if t is None else to_ms(t) for t in rows]
            columns["timestamps"] = _to_arrow(timestamps, pa.int64(), "timestamps")
        for name, column in columns.items():
            _check_length(name, column, range(size))
        if not size:
            raise ValueError("publish_many got no values. Pass at least one.")
        frames: list[tuple[Columns, int]] = []
        for start in range(0, size, self._records_max):
            stop = min(start + self._records_max, size)
            self._cut({n: c.slice(start, stop - start) for n, c in columns.items()}, frames)
        ordering = self._stream.config.ordering_rule
        if ordering is not None:
            for frame, _ in frames:
                ordering.check_columns(frame)
        return frames

    def _cut(self, columns: dict[str, Any], frames: list[tuple[Columns, int]]) -> None:
        """Halve columns until each part fits into a frame; a large record gets its own frame."""
        records = len(columns["values"])
        size = sum(column.nbytes for column in columns.values())
        if size > min(FRAME_BYTES_MAX, self._record_bytes_max) and records > 1:
            half = records // 2
            self._cut({n: column.slice(0, half) for n, column in columns.items()}, frames)
            self._cut({n: column.slice(half) for n, column in columns.items()}, frames)
            return
        if size > self._record_bytes_max:
            self.check_size(_row_size(columns))
        whole = {n: _one_array(column) for n, column in columns.items()}
        frames.append((Columns(**whole), size + records * RECORD_OVERHEAD))

    def check_size(self, size: int) -> None:
        """Raise ``RecordTooLarge`` if ``size`` exceeds the limit."""
        if size > self._record_bytes_max:
            raise RecordTooLarge(
                f"The record is too large: it has {size} bytes, but max_record_bytes is "
                f"{self._record_bytes_max}.",
                stream=self._stream.name,
                hint="Publish a reference to it, split it, or raise max_record_bytes.",
            )


def is_arrow(column: Any) -> bool:
    return isinstance(column, (pa.Array, pa.ChunkedArray))


def to_bytes(value: Any) -> bytes:
    """Return a bytes-like value as bytes; raise ``TypeError`` for anything else."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(
        f"A value must be bytes, not {type(value).__name__}. Encode it, or open the stream with "
        'codec="text", "json" or "msgpack".'
    )


def to_list(name: str, column: Any) -> list[Any]:
    """Return an iterable as a list. Refuse strings and mappings, which iterate over their parts."""
    if is_arrow(column):
        rows: list[Any] = column.to_pylist()
        return rows
    one = isinstance(column, (bytes, bytearray, memoryview, str, Mapping))
    if one or not isinstance(column, Iterable):
        raise TypeError(
            f"publish_many takes {name} as a list or an Arrow array, not {type(column).__name__}."
        )
    return list(column)


def check_key(key: Any) -> bytes:
    """Return a key as bytes; text is encoded as UTF-8."""
    if type(key) is bytes:
        return key
    if isinstance(key, str):
        return _utf8("A key", key)
    raise TypeError(f"A key must be bytes or str, not {type(key).__name__}.")


def check_headers(headers: Any) -> dict[str, bytes]:
    """Return headers with their values as bytes; text is encoded as UTF-8."""
    if not isinstance(headers, Mapping):
        raise TypeError(f"Headers must be a mapping, not {type(headers).__name__}.")
    if len(headers) > HEADERS_MAX:
        raise ValueError(f"A record can have at most {HEADERS_MAX} headers, not {len(headers)}.")
    raw: dict[str, bytes] = {}
    for name, value in headers.items():
        if isinstance(name, str) and type(value) is bytes:
            raw[name] = value
        elif isinstance(name, str) and isinstance(value, str):
            raw[name] = _utf8(f"The header {name!r}", value)
        else:
            raise TypeError("Headers must be str names with bytes or str values.")
    _utf8("A header name", "".join(raw))
    return raw


def _utf8(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} cannot be encoded as UTF-8: {error}.") from None


def headers_size(headers: Mapping[str, bytes]) -> int:
    return sum(len(name.encode()) + len(value) for name, value in headers.items())


def _row_size(columns: dict[str, Any]) -> int:
    """Return the size of the only record in Arrow columns, counted as in ``publish``."""
    cells = {name: column[0].as_py() for name, column in columns.items()}
    headers = dict(cells.get("headers") or ())
    return len(cells["values"]) + len(cells.get("keys") or b"") + headers_size(headers)


def _check_length(name: str, column: Any, values: Sequence[Any]) -> None:
    if len(column) != len(values):
        raise ValueError(f"There are {len(values)} values, but {len(column)} {name}.")


def _to_arrow(column: Any, kind: pa.DataType, name: str) -> pa.ChunkedArray:
    try:
        if is_arrow(column):
            whole = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
            # A cast, even to the same type, would import Arrow's compute functions.
            return whole if whole.type == kind else whole.cast(kind)
        return pa.chunked_array([pa.array(column, kind)])
    except (pa.ArrowException, TypeError) as error:
        raise TypeError(f"{name} cannot be published as {kind}: {error}.") from None


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
