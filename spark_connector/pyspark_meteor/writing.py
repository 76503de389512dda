"""What a task of the sink does: make frames of Arrow batches, and stage or publish them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from meteor_py.errors import MeteorError, StreamConfigMismatch, StreamNotFound
from meteor_py.publish.transaction import Stage, Staged
from meteor_py.publish.validation import RecordValidator
from meteor_py.records.config import FRAME_RECORDS_MAX

if TYPE_CHECKING:
    from meteor_py import Publisher, Stream
    from pyspark_meteor.sink_options import SinkOptions

_log = logging.getLogger(__name__)

#: Bytes of a record at most; Spark users have no other place to say so.
_RECORD_BYTES = 32 * 1024 * 1024
#: Bytes of a key or value that an error shows.
_SHOWN = 40


def open_stream(options: SinkOptions, name: str) -> Stream:
    """Open a stream, or create it: who may only write to those there are needs no more rights."""
    m = options.server.connect()
    try:
        return m.stream(name, create=False)
    except StreamNotFound:
        pass
    try:
        stream = m.stream(name, capacity=options.capacity)
    except StreamConfigMismatch:  # somebody else has made it in between, and may have his reasons
        return m.stream(name, create=False)
    if options.capacity is None:
        _log.warning(
            "There was no stream %r, so it was made, with a ring that keeps the last %d records; "
            "the option capacity says how many it is to keep.",
            *(name, stream.config.capacity),
        )
    return stream


def stage_all(
    options: SinkOptions, batches: Iterator[pa.RecordBatch], name: str
) -> dict[str, Staged]:
    """Stage the rows of a task, for each stream under this name."""
    stages: dict[str, tuple[Stage, RecordValidator]] = {}
    try:
        for stream_name, rows in _by_stream(options, batches):
            if stream_name not in stages:
                stream = open_stream(options, stream_name)
                records = min(FRAME_RECORDS_MAX, stream.config.capacity)
                intake = RecordValidator(
                    stream_name, records, _RECORD_BYTES, stream.config.ordering_rule
                )
                stages[stream_name] = Stage(stream._handle, name), intake
            stage, intake = stages[stream_name]
            for columns, _ in intake.frames(**_arguments(rows)):
                stage.write(columns)
        return {stream_name: stage.finish() for stream_name, (stage, _) in stages.items()}
    except BaseException:
        # Nobody will hear of them; they would take memory of the server until they expire.
        for stage, _ in stages.values():
            stage.abandon()
        raise


def publish_all(options: SinkOptions, batches: Iterator[pa.RecordBatch]) -> int:
    """Publish the rows of a task as they come: at least once, if it is tried again."""
    publishers: dict[str, Publisher] = {}
    count = 0
    try:
        for stream_name, rows in _by_stream(options, batches):
            if stream_name not in publishers:
                stream = open_stream(options, stream_name)
                publishers[stream_name] = stream.publisher(
                    codec="bytes", max_record_bytes=_RECORD_BYTES, acks=options.replicas
                )
            publishers[stream_name].publish_many(**_arguments(rows))
            count += rows.num_rows
        for publisher in publishers.values():
            publisher.flush()
    finally:
        for publisher in publishers.values():
            try:
                publisher.close()
            except MeteorError as error:
                _log.warning("When a task of a query ended: %s", error)
    return count


def _by_stream(
    options: SinkOptions, batches: Iterator[pa.RecordBatch]
) -> Iterator[tuple[str, pa.Table]]:
    """The rows for each stream, in the order in which they came."""
    from pyarrow import compute

    for batch in batches:
        rows = pa.Table.from_batches([batch])
        if not rows.num_rows:
            continue
        if options.stream is not None:
            yield options.stream, rows
            continue
        column = rows.column("stream")
        for name in compute.unique(column):
            if not name.is_valid:
                raise ValueError("A row has no stream: the column stream is null.")
            yield name.as_py(), rows.filter(compute.equal(column, name))


def _arguments(rows: pa.Table) -> dict[str, Any]:
    """The columns, as ``publish_many`` takes them."""
    values = rows.column("value")
    if values.null_count:
        raise ValueError("A value is null, and a record needs one; filter such rows, or coalesce.")
    names = rows.column_names
    headers = _headers(rows) if "headers" in names else None
    return {
        "values": values,
        "keys": rows.column("key") if "key" in names else None,
        "headers": headers,
        "timestamps": rows.column("timestamp") if "timestamp" in names else None,
    }


def _headers(rows: pa.Table) -> list[dict[str, bytes] | None]:
    column = rows["headers"]
    headers = [None if pairs is None else dict(pairs) for pairs in column.to_pylist()]
    if any(chunk.items.null_count for chunk in column.chunks):
        for row, pairs in enumerate(headers):
            for name, value in (pairs or {}).items():
                if value is None:
                    raise ValueError(
                        f"In the column headers, {name!r} is null in the row with the "
                        f"{_shown(rows, row)}, and a header needs a value; leave it out with "
                        "map_filter, or coalesce."
                    )
    return headers


def _shown(rows: pa.Table, row: int) -> str:
    """By what somebody finds a row: its key, else its value, or how it begins."""
    key = rows["key"][row].as_py() if "key" in rows.column_names else None
    name, found = ("value", rows["value"][row].as_py()) if key is None else ("key", key)
    return f"{name} {found[:_SHOWN]!r}" + ("..." if len(found) > _SHOWN else "")
