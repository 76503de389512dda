"""Segment files: how records are written to Parquet, and read back with care.

Row groups are small enough for one record to be fetched on its own. Offsets are dense, so the row
group that holds one is found by counting. Pages carry checksums, which are compared on each read;
they leave the footer out, so the name of the file has a checksum of the whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa

from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.store.segment import Segment

#: What a row group has at most, in records and (about) in bytes.
GROUP_RECORDS = 32_768
GROUP_BYTES = 4 * 1024 * 1024
#: What pyarrow raises for bytes that are not what was written.
BAD_BYTES = (pa.ArrowException, OSError, ValueError, KeyError, EOFError, MemoryError)

_METADATA = b"meteor"


def write(path: Path, records: pa.Table, about: dict[str, Any]) -> str:
    """Write a file, force it to the disk, read it again; return the beginning of its sha256.

    Raises:
        OSError: It could not be written, or is not what was written.
    """
    import pyarrow.parquet as pq  # as everywhere here: who has no store need not load it

    size = max(records.nbytes // max(len(records), 1), 1)
    pq.write_table(
        records.replace_schema_metadata({_METADATA: json.dumps(about)}),
        path,
        row_group_size=min(max(GROUP_BYTES // size, 1), GROUP_RECORDS),
        compression="zstd",
        # Values are rarely equal, and trying to find that out costs more than all the rest.
        use_dictionary=["key", "timestamp", "appended", "headers.key_value.key"],
        column_encoding={"offset": "DELTA_BINARY_PACKED"},
        write_statistics=["offset", "timestamp", "appended"],
        write_page_checksum=True,
    )
    with path.open("rb") as file:
        os.fsync(file.fileno())
        data = file.read()
    if not _holds(data, records):
        raise OSError(f"{path.name} does not hold what was written to it.")
    return digest(data)


def _holds(data: bytes, records: pa.Table) -> bool:
    """Whether these are the bytes of a file with these records; by row groups, to reuse memory."""
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
    """The bytes in memory that is pyarrow's own.

    Its threads may let go of what they have read a moment after the call has returned. If that were
    an object of Python's, they would need the GIL for it, and in an interpreter that is just ending
    this aborts the process (apache/arrow issue 34314).
    """
    buffer = pa.allocate_buffer(len(data))
    with pa.FixedSizeBufferWriter(buffer) as writer:
        writer.write(data)
    return pa.BufferReader(buffer)


def digest(data: bytes) -> str:
    """The part of the sha256 that is in the name of a file."""
    return hashlib.sha256(data).hexdigest()[:8]


class SegmentFile:
    """A file that is open for reading.

    Raises:
        BAD_BYTES: On opening and reading, if it is damaged or cannot be reached.
    """

    def __init__(self, source: Any, segment: Segment) -> None:
        import pyarrow.parquet as pq

        self.segment = segment
        self._file = pq.ParquetFile(source, page_checksum_verification=True)
        metadata = self._file.metadata
        if metadata.num_rows != len(segment):
            raise ValueError(f"it has {metadata.num_rows} records in place of {len(segment)}")
        if not self._file.schema_arrow.equals(ARROW_SCHEMA):
            raise ValueError("its columns are not those of a segment")
        sizes = (metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        #: The first offset of each row group, and the end.
        self.edges = list(accumulate(sizes, initial=segment.first))
        if self.edges[-1] != segment.last + 1:
            raise ValueError("its row groups do not add up")

    def group_of(self, offset: int) -> int:
        """The number of the row group that holds an offset."""
        return bisect_right(self.edges, offset) - 1

    def read(self, group: int) -> pa.RecordBatch:
        """A row group as a whole."""
        table = self._file.read_row_group(group)
        first, stop = self.edges[group], self.edges[group + 1]
        if len(table) != stop - first or not table.column("offset").equals(
            pa.chunked_array([pa.arange(first, stop)])
        ):
            raise ValueError(
                f"its row group {group} does not hold the records {first} to {stop - 1}"
            )
        batches = table.to_batches()
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)

    def appended(self, group: int) -> list[int]:
        """When the records of a row group were appended, in ms."""
        column = self._file.read_row_group(group, columns=["appended"]).column("appended")
        times: list[int] = column.cast(pa.int64()).to_pylist()
        if len(times) != self.edges[group + 1] - self.edges[group]:
            raise ValueError(f"its row group {group} has {len(times)} append times")
        return times

    def close(self) -> None:
        self._file.close(force=True)


def examine(data: bytes, segment: Segment) -> str | None:
    """What is wrong with the bytes of a file; None if they are what was written."""
    if digest(data) != segment.sha:
        whole = "its bytes are not those that were written (checksum)"
        try:
            _read_all(data, segment)
        except BAD_BYTES as error:
            return f"{whole}: {error}"
        return whole
    try:
        _read_all(data, segment)
    except BAD_BYTES as error:
        return str(error)
    return None


def _read_all(data: bytes, segment: Segment) -> None:
    import pyarrow.compute as pc

    file = SegmentFile(_reader(data), segment)
    before = 0
    for group in range(len(file.edges) - 1):
        batch = file.read(group)
        batch.validate(full=True)
        appended = batch.column("appended").cast(pa.int64())
        rising = pc.all(pc.less_equal(appended[:-1], appended[1:])).as_py()
        if appended[0].as_py() < before or rising is False:  # None: there is only one
            raise ValueError(f"append times go back in row group {group}")
        before = appended[-1].as_py()
