"""What a task does: read one range of a stream, from the ring or the store, as Arrow."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark_meteor.columns import Columns

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from meteor_py import CorruptSegment, RecordsLost, Subscriber
    from pyspark_meteor.options import SourceOptions
    from pyspark_meteor.ranges import Range

_log = logging.getLogger(__name__)

#: Records of the first batch, so that ``show()`` and ``limit()`` end early, and of the others.
_FIRST, _OTHERS = 1_000, 65_536
#: Seconds to wait for records that are known to be there.
_POLL_S = 30.0


def read_range(
    options: SourceOptions, schema: StructType, wanted: Range
) -> Iterator[pa.RecordBatch]:
    """The records of a range, whatever the ring has dropped since it was planned.

    Raises:
        RecordsLost, CorruptSegment: Some are gone, and the query is to fail then.
        LogTruncated: The server has lost some of them, or the stream was created anew.
        StreamNotFound: It was deleted.
    """
    from meteor_py import LogTruncated, StreamNotFound

    try:
        yield from _read_range(options, schema, wanted)
    except (StreamNotFound, LogTruncated) as loss:
        if options.fail_on_data_loss:
            raise
        _log.warning("%s What is left of %r is skipped: failOnDataLoss is false.", loss, wanted)


def _read_range(
    options: SourceOptions, schema: StructType, wanted: Range
) -> Iterator[pa.RecordBatch]:
    """The same; what becomes of the stream meanwhile is raised."""
    from meteor_py import CorruptSegment, RecordsLost

    columns = Columns(schema)
    stream = options.server.connect().stream(wanted.stream, create=False)
    size = _FIRST
    with stream.subscriber(codec="bytes") as sub:
        stop = _find_end(sub, options, wanted)
        if stop <= wanted.first:
            return
        sub.seek(wanted.first)
        while sub.position < stop:
            try:
                batch = sub.poll(_POLL_S, min(stop - sub.position, size))
            except (RecordsLost, CorruptSegment) as loss:
                _judge(loss, options, wanted)
                sub.skip_gap()
                continue
            if batch.last_offset >= stop:  # behind a gap
                batch = batch[: max(stop - batch.first_offset, 0)]
            if not batch:
                if sub.position < stop:
                    raise TimeoutError(
                        f"Records from {sub.position} on of stream {wanted.stream!r} did not come "
                        f"in {_POLL_S:g} seconds, though they were there before."
                    )
                break
            yield from columns.batches(wanted.stream, batch)
            size = _OTHERS
        # What was read may be of another history, if that has changed meanwhile.
        _find_end(sub, options, wanted)


def _find_end(sub: Subscriber, options: SourceOptions, wanted: Range) -> int:
    """How far the history that the range was planned with still reaches; raise if not all of it.

    A batch that Spark repeats has to end some day, also when its records are gone for good.
    """
    from meteor_py import LogTruncated

    try:
        sub.seek(wanted.end)
    except LogTruncated as loss:
        if options.fail_on_data_loss:
            raise
        _log.warning("%s They are skipped: failOnDataLoss is false.", loss)
        return min(loss.first, wanted.end.offset)
    return wanted.end.offset


def _judge(loss: RecordsLost | CorruptSegment, options: SourceOptions, wanted: Range) -> None:
    """Raise, unless the query is to go on without these records."""
    if options.fail_on_data_loss:
        raise loss
    last = min(loss.last, wanted.end.offset - 1)
    _log.warning(
        "%d records are lost, %d to %d of stream %r, and skipped: failOnDataLoss is false.",
        *(last - loss.first + 1, loss.first, last, wanted.stream),
    )
