"""Source tasks: each reads one range of a stream, from the ring or the store, as Arrow batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meteor_py import (
    CorruptFrame,
    CorruptSegment,
    LogTruncated,
    MeteorError,
    RecordBatch,
    RecordsLost,
    StreamNotFound,
    Subscriber,
)
from pyspark_meteor.columns import Columns
from pyspark_meteor.outages import outlast

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pyspark_meteor.options import SourceOptions
    from pyspark_meteor.ranges import Range

_log = logging.getLogger(__name__)

#: Maximum number of records in the first batch and in later batches. The first is small, so that
#: ``show()`` and ``limit()`` finish early.
_FIRST_RECORDS, _RECORDS = 1_000, 65_536
#: Bytes of records after which a batch is complete.
_BYTES = 8 * 1024 * 1024
#: Minimum seconds to wait for records that existed when the range was planned.
_POLL_S = 1.0


def read_range(
    options: SourceOptions, schema: StructType, wanted: Range
) -> Iterator[pa.RecordBatch]:
    """Yield the records in a range, from the ring or, if the ring has dropped them, the store.

    If failOnDataLoss is false, log lost and damaged records and skip them.

    Raises:
        RecordsLost, CorruptSegment, CorruptFrame: Some records are gone or damaged, and
            failOnDataLoss is true.
        LogTruncated: The server has lost some of the records or the stream was recreated, and
            failOnDataLoss is true.
        StreamNotFound: The stream was deleted, and failOnDataLoss is true.
        TimeoutError: A record that exists did not arrive in time.
    """
    columns = Columns(schema)
    server = options.server
    try:
        with outlast(server, lambda: _subscribe(options, columns, wanted)) as sub:
            stop = outlast(server, lambda: _find_end(sub, options, wanted))
            if stop <= wanted.first:
                return
            outlast(server, lambda: sub.seek(wanted.first))
            for tables in _groups(_poll(sub, options, wanted, stop)):
                yield from columns.combine(wanted.stream, tables)
            # A failover during the read may have replaced records, so check the history again.
            outlast(server, lambda: _find_end(sub, options, wanted))
    except (StreamNotFound, LogTruncated) as loss:
        if options.fail_on_data_loss:
            raise
        _log.warning("%s Skipping the rest of %r, because failOnDataLoss is false.", loss, wanted)


def _poll(
    sub: Subscriber, options: SourceOptions, wanted: Range, stop: int
) -> Iterator[RecordBatch]:
    """Yield the records up to ``stop`` in batches, as they arrive."""
    timeout_s = max(options.server.timeout_s, _POLL_S)
    size = _FIRST_RECORDS
    while sub.position < stop:
        try:
            batch = sub.poll(timeout_s, min(stop - sub.position, size))
        except (RecordsLost, CorruptSegment, CorruptFrame) as loss:
            _skip_gap(sub, loss, options, wanted)
            continue
        if batch.last_offset >= stop:  # after a gap, a batch may extend beyond the stop
            batch = batch[: max(stop - batch.first_offset, 0)]
        if batch:
            yield batch
            size = _RECORDS
        elif sub.position < stop:
            raise TimeoutError(
                f"Record {sub.position} of stream {wanted.stream!r} did not arrive within "
                f"{timeout_s:g} seconds, although it existed when the batch was planned."
            )


def _groups(batches: Iterator[RecordBatch]) -> Iterator[list[pa.Table]]:
    """Convert batches to tables, and yield lists of tables that have enough records or bytes.

    The first list has only one table, so that the first rows arrive soon.
    """
    tables: list[pa.Table] = []
    records = size = 0
    enough = 1
    try:
        for batch in batches:
            tables.append(batch.to_arrow())
            records += len(batch)
            size += tables[-1].get_total_buffer_size()
            if records >= enough or size >= _BYTES:
                yield tables
                tables, records, size, enough = [], 0, 0, _RECORDS
    except MeteorError:
        if tables:
            yield tables  # these records were read before the failure
        raise
    if tables:
        yield tables


def _subscribe(options: SourceOptions, columns: Columns, wanted: Range) -> Subscriber:
    stream = options.server.connect().stream(wanted.stream, create=False)
    subscriber = stream.subscriber(codec="bytes")
    subscriber._read_columns(columns.of_records())
    return subscriber


def _find_end(sub: Subscriber, options: SourceOptions, wanted: Range) -> int:
    """Return the offset up to which the planned records still exist.

    If failOnDataLoss is false, this never raises ``LogTruncated``: a batch that Spark repeats must
    succeed even if its records no longer exist.
    """
    try:
        sub.seek(wanted.end)
    except LogTruncated as loss:
        if options.fail_on_data_loss:
            raise
        _log.warning("%s Skipping these records, because failOnDataLoss is false.", loss)
        return min(loss.first, wanted.end.offset)
    return wanted.end.offset


def _skip_gap(
    sub: Subscriber,
    loss: RecordsLost | CorruptSegment | CorruptFrame,
    options: SourceOptions,
    wanted: Range,
) -> None:
    """Skip lost or damaged records, or raise if the query must not miss any."""
    if options.fail_on_data_loss:
        raise loss
    first, last = max(loss.first, wanted.first), min(loss.last, wanted.end.offset - 1)
    _log.warning(
        "Skipping %d lost or damaged records (%d to %d) in stream %r, because failOnDataLoss is "
        "false.",
        *(last - first + 1, first, last, wanted.stream),
    )
    if isinstance(loss, CorruptFrame):  # the frame exists, so skip_gap() would not skip it
        outlast(options.server, lambda: sub.seek(loss.last + 1))
    else:
        sub.skip_gap()
