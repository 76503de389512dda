"""Segment files: writing records to Parquet, and reading them back with checks.

Row groups are small, so fetching a single record is cheap. Offsets are dense, so a reader finds the
row group that holds an offset by counting. Pages carry checksums, which every read verifies. The
checksums do not cover the footer, so the file's name contains a checksum of the whole file.

A file may come from another writer, and its metadata may be wrong. So a reader first loads the
bytes, then checks the footer and all page headers in memory, and only then decodes the same bytes.
Whatever the file claims, a row group unpacks to at most ``UNPACKED_MAX`` bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa

from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.store.parquet_layout import Column, read_footer, read_pages
from meteor_py.store.segment import Segment

#: Maximum size of a row group in records, and its approximate maximum in bytes. A row group never
#: exceeds twice that size in bytes, unless it holds only one record.
GROUP_RECORDS = 32_768
GROUP_BYTES = 4 * 1024 * 1024
#: Maximum unpacked size of a row group in bytes, whoever wrote it. Releases before 0.3 wrote larger
#: row groups if record sizes differed widely.
UNPACKED_MAX = 256 * 1024 * 1024
#: Bytes that a value takes in addition to its content.
_PER_VALUE = 16
#: Maximum size of a footer in bytes, and the maximum number of zero bytes in it. Each struct ends
#: with a zero, and pyarrow uses up to a kilobyte of memory for a struct.
_FOOTER_MAX = 4 * 1024 * 1024
_FOOTER_ZEROS_MAX = 250_000
#: Largest file, in bytes, for which buffers come from pyarrow's memory pool.
_POOLED_MAX = 128 * 1024 * 1024
#: Bytes to read at the end of a file. They usually contain the whole footer.
_TAIL = 65_536
_MAGIC = b"PAR1"
#: The zstd level for values that do not compress: zstd soon gives up and stores the bytes
#: unchanged. The level does not affect the file format.
_LEVEL_FASTEST = -20
#: Number of samples to take from the values, and the maximum records and bytes in each. Values are
#: worth compressing if the samples shrink to less than ``_WORTHWHILE`` of their size.
_SAMPLES, _SAMPLE_RECORDS, _SAMPLE_BYTES = 8, 64, 8192
_WORTHWHILE = 0.9
#: Errors that pyarrow raises for damaged bytes.
BAD_BYTES = (pa.ArrowException, OSError, ValueError, KeyError, EOFError, MemoryError)

_METADATA = b"meteor"


def write(path: Path, records: pa.Table, about: dict[str, Any]) -> str:
    """Write a file, sync it to disk, read it back, and return its ``digest``.

    Raises:
        OSError: The file could not be written, or reading it back gave other records.
    """
    records = records.replace_schema_metadata({_METADATA: json.dumps(about)})
    _encode(path, records)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    with pa.OSFile(str(path)) as written:
        data = written.read_buffer()
    if not _holds(data, records):
        raise OSError(f"{path.name} does not contain the records that were written to it.")
    return digest(data)


def _encode(path: Path, records: pa.Table) -> None:
    import pyarrow.parquet as pq  # imported here, so that programs without a store never load it

    size = max(records.nbytes // max(len(records), 1), 1)
    writer = pq.ParquetWriter(
        path,
        records.schema,
        compression="zstd",
        compression_level=None if _compresses(records) else {"value": _LEVEL_FASTEST},
        # No dictionary for values: they rarely repeat, and building one would take too long.
        use_dictionary=["key", "timestamp", "appended", "headers.key_value.key"],
        column_encoding={"offset": "DELTA_BINARY_PACKED"},
        write_statistics=["offset", "timestamp", "appended"],
        write_page_checksum=True,
    )
    with writer:
        for part in _row_groups(records, min(max(GROUP_BYTES // size, 1), GROUP_RECORDS)):
            writer.write_table(part, row_group_size=len(part))


def _compresses(records: pa.Table) -> bool:
    """Return whether compression makes a sample of the values noticeably smaller."""
    values = records.column("value")
    step = max(len(values) // _SAMPLES, 1)
    sample = bytearray()
    for start in range(0, len(values), step):
        room = len(sample) + _SAMPLE_BYTES
        for value in values.slice(start, _SAMPLE_RECORDS):
            sample += memoryview(value.as_buffer())[: room - len(sample)]
    packed = pa.compress(bytes(sample), "zstd", asbytes=True)
    return len(packed) < _WORTHWHILE * len(sample)


def _row_groups(records: pa.Table, rows: int) -> Iterator[pa.Table]:
    """Divide records into row groups of ``rows`` records, or fewer if the records are large."""
    for start in range(0, len(records), rows):
        part = records.slice(start, rows)
        if part.nbytes > 2 * GROUP_BYTES and len(part) > 1:
            yield from _row_groups(part, (len(part) + 1) // 2)
        else:
            yield part


def _holds(data: pa.Buffer, records: pa.Table) -> bool:
    """Return whether ``data`` holds these records.

    Compare one row group at a time, to save memory.
    """
    first, last = (records.column("offset")[index].as_py() for index in (0, -1))
    try:
        file = SegmentFile(data, Segment(first, last, 0, ""))
        for group, start in enumerate(file.edges[:-1]):
            part = pa.Table.from_batches([file.read(group)])
            if not part.equals(records.slice(start - first, len(part))):
                return False
    except BAD_BYTES:
        return False
    return True


def _copy(data: bytes) -> pa.Buffer:
    """Copy the bytes into memory that pyarrow owns.

    pyarrow's threads may release a buffer shortly after the call has returned. To release a Python
    object, they take the GIL, which aborts the process if the interpreter is shutting down at that
    moment (apache/arrow issue 34314).
    """
    buffer = pa.allocate_buffer(len(data))
    with pa.FixedSizeBufferWriter(buffer) as writer:
        writer.write(data)
    return buffer


def digest(data: bytes | pa.Buffer) -> str:
    """Return the part of the bytes' SHA-256 that goes into the file name."""
    return hashlib.sha256(data).hexdigest()[:8]


class SegmentFile:
    """A segment file that is open for reading. Thread-safe, except for ``close``.

    Args:
        source: A file, or all bytes of a file in memory that pyarrow owns.

    Raises:
        BAD_BYTES: On opening and reading, if the file is damaged or cannot be reached.
    """

    def __init__(self, source: Any, segment: Segment) -> None:
        import pyarrow.parquet as pq

        self.segment = segment
        self._bytes: pa.Buffer | None = None
        if isinstance(source, pa.Buffer):
            self._bytes, source = source, pa.BufferReader(source)
        self._source = source if isinstance(source, pa.NativeFile) else pa.PythonFile(source)
        self._size = self._source.size()
        footer = _read_footer(self._source, self._size)
        self._groups = read_footer(footer, self._size)
        self._metadata = pq.read_metadata(pa.BufferReader(_copy(footer)))
        if not self._metadata.schema.to_arrow_schema().equals(ARROW_SCHEMA):
            raise ValueError("its columns are not those of a segment")
        #: The first offset of each row group, and the offset after the last one.
        self.edges = list(accumulate((x.rows for x in self._groups), initial=segment.first))
        if self.edges[-1] != segment.last + 1:
            records = self.edges[-1] - segment.first
            raise ValueError(f"it has {records} records instead of {len(segment)}")

    def group_of(self, offset: int) -> int:
        """Return the number of the row group that holds an offset."""
        return bisect_right(self.edges, offset) - 1

    def read(self, group: int, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Return all records of a row group, with all columns or only ``columns``."""
        # Always read the offsets, to check that these are the right records.
        wanted = None if columns is None else sorted({"offset", *columns})
        table = self._decode(group, wanted)
        first, stop = self.edges[group], self.edges[group + 1]
        if len(table) != stop - first or not table.column("offset").equals(
            pa.chunked_array([pa.arange(first, stop)])
        ):
            raise ValueError(
                f"its row group {group} does not hold the records {first} to {stop - 1}"
            )
        batches = table.to_batches()
        batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        batch.validate(full=True)
        return batch if columns is None else batch.select(list(columns))

    def appended(self, group: int) -> list[int]:
        """Return the append times of a row group's records, in ms."""
        column = self._decode(group, ["appended"]).column("appended")
        times: list[int] = column.cast(pa.int64()).to_pylist()
        if len(times) != self.edges[group + 1] - self.edges[group]:
            raise ValueError(
                f"its row group {group} has the wrong number of append times: {len(times)}"
            )
        return times

    def close(self) -> None:
        self._source.close()

    def close_when_unused(self) -> None:
        """Close the file as soon as no reference to this object is left."""
        weakref.finalize(self, self._source.close).atexit = False

    def _decode(self, group: int, columns: Sequence[str] | None) -> pa.Table:
        """Check and decode columns of a row group."""
        import pyarrow.parquet as pq

        row_group = self._groups[group]
        if row_group.rows > GROUP_RECORDS or row_group.largest > UNPACKED_MAX:
            raise ValueError(f"its row group {group} is too large for a segment")
        wanted = [x for x in row_group.columns if columns is None or x.name in columns]
        buffer = self._load(wanted) if self._bytes is None else self._bytes
        with memoryview(buffer).cast("B") as memory:
            unpacked, repeated = _count_unpacked(wanted, memory)
        _check_unpacked(group, unpacked)
        file = pq.ParquetFile(
            pa.BufferReader(buffer),
            metadata=self._metadata,
            read_dictionary=repeated,
        )
        table = file.read_row_group(group, columns=columns, use_threads=False)
        # So far, each dictionary entry is in memory once. The cast copies it for each value, so
        # check the size first.
        if repeated:
            _check_unpacked(group, unpacked + sum(_repeated_bytes(table, x) for x in repeated))
            table = table.cast(pa.schema([ARROW_SCHEMA.field(name) for name in table.column_names]))
        return table

    def _load(self, columns: Sequence[Column]) -> pa.Buffer:
        """Read columns of a row group into memory."""
        # pyarrow looks for columns at their positions in the file, so the buffer must be as large
        # as the file. The kernel allocates memory only for the parts that are filled. But pyarrow's
        # pool keeps freed buffers, and each row group fills another part. That saves time, but a
        # large file must not stay in memory as a whole.
        pool = None if self._size <= _POOLED_MAX else pa.system_memory_pool()
        buffer = pa.allocate_buffer(self._size, memory_pool=pool)
        with memoryview(buffer).cast("B") as memory:
            for start, stop in _merged(columns):
                # Such a stream has its own position, so several threads can read the file at once.
                stream = self._source.get_stream(start, stop - start)
                if stream.readinto(memory[start:stop]) != stop - start:
                    raise ValueError("it has become shorter since it was opened")
        return buffer


def _read_footer(source: Any, size: int) -> bytes:
    """Return the footer of a file, for both ``read_footer`` and pyarrow to parse."""
    tail: bytes = source.read_at(min(size, _TAIL), max(size - _TAIL, 0))
    if len(tail) < 12 or tail[-4:] != _MAGIC:
        raise ValueError("it does not end like a Parquet file")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length > min(size - 4, _FOOTER_MAX):
        raise ValueError("its footer is too large for a segment")
    if length > len(tail):
        tail = source.read_at(length, size - length)
    footer = tail[-length:]
    if footer.count(0) > _FOOTER_ZEROS_MAX:
        raise ValueError("its footer has too many entries for a segment")
    return footer


def _count_unpacked(columns: Sequence[Column], memory: memoryview) -> tuple[int, list[str]]:
    """Return the unpacked size of columns, and the columns for which that size may be too low.

    The latter have strings in a dictionary: a small page may repeat a large string any number of
    times. Count these strings after decoding.
    """
    unpacked, repeated = 0, []
    for column in columns:
        pages = read_pages(memory[column.start : column.stop], column)
        unpacked += pages.unpacked + pages.values * _PER_VALUE
        if pages.values * pages.dictionary > UNPACKED_MAX and column.name in ("key", "headers"):
            repeated.append(column.path)
    return unpacked, repeated


def _repeated_bytes(table: pa.Table, path: str) -> int:
    """Return the total size in bytes of the values in a column that was read as a dictionary."""
    import pyarrow.compute as pc

    name, _, is_nested = path.partition(".")
    total = 0
    for part in table.column(name).chunks:
        values = part.keys if is_nested else part
        sizes = pc.binary_length(values.dictionary).cast(pa.int64())
        total += pc.sum(pc.take(sizes, values.indices)).as_py() or 0
    return total


def _check_unpacked(group: int, size: int) -> None:
    if size > UNPACKED_MAX:
        raise ValueError(f"its row group {group} unpacks to more than {UNPACKED_MAX >> 20} MiB")


def _merged(columns: Sequence[Column]) -> list[tuple[int, int]]:
    """Return the byte ranges of columns. Merge adjacent ranges, to read them in few requests."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((column.start, column.stop) for column in columns):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def examine(data: bytes, segment: Segment) -> str | None:
    """Return a description of the damage to a file's bytes; None if they are intact."""
    changed = "its bytes have changed since they were written (checksum mismatch)"
    intact = digest(data) == segment.sha
    try:
        _read_all(data, segment)
    except BAD_BYTES as error:
        return str(error) if intact else f"{changed}: {error}"
    return None if intact else changed


def _read_all(data: bytes, segment: Segment) -> None:
    import pyarrow.compute as pc

    file = SegmentFile(_copy(data), segment)
    before = 0
    for group in range(len(file.edges) - 1):
        batch = file.read(group)
        appended = batch.column("appended").cast(pa.int64())
        rising = pc.all(pc.less_equal(appended[:-1], appended[1:])).as_py()
        if appended[0].as_py() < before or rising is False:  # None if there is only one record
            raise ValueError(f"append times decrease in row group {group}")
        before = appended[-1].as_py()
