"""Segment files: writing records to Parquet, and reading them back with checks.

Row groups are small enough to fetch a single record cheaply. Offsets are dense, so the row group of
an offset is found by counting. Pages carry checksums, which are verified on each read. They do not
cover the footer, so the file's name contains a checksum of the whole file.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa

from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.store.segment import Segment

#: Maximum size of a row group in records, and roughly in bytes.
GROUP_RECORDS = 32_768
GROUP_BYTES = 4 * 1024 * 1024
#: Maximum unpacked bytes of a row group to accept from any writer. Our row groups stay far below
#: this limit, except for one with a very large record.
_UNPACKED_MAX = 128 * 1024 * 1024
#: Errors that pyarrow raises for damaged bytes.
BAD_BYTES = (pa.ArrowException, OSError, ValueError, KeyError, EOFError, MemoryError)

_METADATA = b"meteor"


def write(path: Path, records: pa.Table, about: dict[str, Any]) -> str:
    """Write a file, sync it to disk, read it back, and return its ``digest``.

    Raises:
        OSError: The file could not be written, or reading it back gave other records.
    """
    import pyarrow.parquet as pq  # imported here, so that programs without a store never load it

    size = max(records.nbytes // max(len(records), 1), 1)
    pq.write_table(
        records.replace_schema_metadata({_METADATA: json.dumps(about)}),
        path,
        row_group_size=min(max(GROUP_BYTES // size, 1), GROUP_RECORDS),
        compression="zstd",
        # No dictionary for values: they rarely repeat, and building one would take too long.
        use_dictionary=["key", "timestamp", "appended", "headers.key_value.key"],
        column_encoding={"offset": "DELTA_BINARY_PACKED"},
        write_statistics=["offset", "timestamp", "appended"],
        write_page_checksum=True,
    )
    with path.open("rb") as file:
        os.fsync(file.fileno())
        data = file.read()
    if not _holds(data, records):
        raise OSError(f"{path.name} does not contain the records that were written to it.")
    return digest(data)


def _holds(data: bytes, records: pa.Table) -> bool:
    """Whether these bytes hold these records. To save memory, compares one row group at a time."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(_reader(data), page_checksum_verification=True)
    at = 0
    for group in range(file.num_row_groups):
        part = file.read_row_group(group)
        if not part.equals(records.slice(at, len(part))):
            return False
        at += len(part)
    return at == len(records)


def _reader(data: bytes) -> pa.BufferReader:
    """Copy the bytes into memory that pyarrow owns.

    pyarrow's threads may release a buffer shortly after the call has returned. To release a Python
    object, they take the GIL, which aborts the process if the interpreter is shutting down at that
    moment (apache/arrow issue 34314).
    """
    buffer = pa.allocate_buffer(len(data))
    with pa.FixedSizeBufferWriter(buffer) as writer:
        writer.write(data)
    return pa.BufferReader(buffer)


def digest(data: bytes) -> str:
    """Return the part of the sha256 that is in the name of a file."""
    return hashlib.sha256(data).hexdigest()[:8]


class SegmentFile:
    """A segment file that is open for reading.

    Raises:
        BAD_BYTES: On opening and reading, if the file is damaged or cannot be reached.
    """

    def __init__(self, source: Any, segment: Segment) -> None:
        import pyarrow.parquet as pq

        self.segment = segment
        self._file = pq.ParquetFile(source, page_checksum_verification=True)
        metadata = self._file.metadata
        if metadata.num_rows != len(segment):
            raise ValueError(f"it has {metadata.num_rows} records instead of {len(segment)}")
        if not self._file.schema_arrow.equals(ARROW_SCHEMA):
            raise ValueError("its columns are not those of a segment")
        _check_layout(metadata)
        sizes = (metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        #: The first offset of each row group, and the offset after the last one.
        self.edges = list(accumulate(sizes, initial=segment.first))
        if self.edges[-1] != segment.last + 1:
            raise ValueError("its row groups do not add up to its records")

    def group_of(self, offset: int) -> int:
        """Return the number of the row group that holds an offset."""
        return bisect_right(self.edges, offset) - 1

    def read(self, group: int, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Return all records of a row group, with all columns or only ``columns``."""
        # Always read the offsets, to check that these are the right records.
        wanted = None if columns is None else sorted({"offset", *columns})
        table = self._file.read_row_group(group, columns=wanted)
        first, stop = self.edges[group], self.edges[group + 1]
        if len(table) != stop - first or not table.column("offset").equals(
            pa.chunked_array([pa.arange(first, stop)])
        ):
            raise ValueError(
                f"its row group {group} does not hold the records {first} to {stop - 1}"
            )
        batches = table.to_batches()
        batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        return batch if columns is None else batch.select(list(columns))

    def appended(self, group: int) -> list[int]:
        """Return the append times of a row group's records, in ms."""
        column = self._file.read_row_group(group, columns=["appended"]).column("appended")
        times: list[int] = column.cast(pa.int64()).to_pylist()
        if len(times) != self.edges[group + 1] - self.edges[group]:
            raise ValueError(
                f"its row group {group} has the wrong number of append times: {len(times)}"
            )
        return times

    def close(self) -> None:
        self._file.close(force=True)


def _check_layout(metadata: Any) -> None:
    """Before unpacking, refuse a file that would unpack to far more than ``write`` ever writes.

    Also refuses a dictionary for the value column: it could repeat a large value very often.
    """
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(index) for index in range(group.num_columns)]
        unpacked = sum(column.total_uncompressed_size for column in columns)
        if group.num_rows > GROUP_RECORDS or unpacked > _UNPACKED_MAX:
            raise ValueError(f"its row group {number} is too large for a segment")
        if any(
            column.path_in_schema == "value" and column.has_dictionary_page for column in columns
        ):
            raise ValueError("its values have a dictionary, which segments never have")


def examine(data: bytes, segment: Segment) -> str | None:
    """Return a description of the damage to a file's bytes; None if they are intact."""
    changed = "its bytes have changed since they were written (checksum)"
    intact = digest(data) == segment.sha
    try:
        _read_all(data, segment)
    except BAD_BYTES as error:
        return str(error) if intact else f"{changed}: {error}"
    return None if intact else changed


def _read_all(data: bytes, segment: Segment) -> None:
    import pyarrow.compute as pc

    file = SegmentFile(_reader(data), segment)
    before = 0
    for group in range(len(file.edges) - 1):
        batch = file.read(group)
        batch.validate(full=True)
        appended = batch.column("appended").cast(pa.int64())
        rising = pc.all(pc.less_equal(appended[:-1], appended[1:])).as_py()
        if appended[0].as_py() < before or rising is False:  # None: only one record
            raise ValueError(f"append times decrease in row group {group}")
        before = appended[-1].as_py()
