"""Sink tasks: each converts Arrow batches to frames, and stages or publishes them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from meteor_py.errors import MeteorError, StreamConfigMismatch, StreamNotFound
from meteor_py.publish.transaction import Stage, Staged, StageOwner, discard_stale
from meteor_py.publish.validation import RecordValidator
from meteor_py.records.config import FRAME_RECORDS_MAX
from pyspark_meteor.outages import outlast

if TYPE_CHECKING:
    from meteor_py import Publisher, Stream
    from pyspark_meteor.sink_options import SinkOptions

_log = logging.getLogger(__name__)

#: Maximum record size in bytes. There is no option for it.
_MAX_RECORD_BYTES = 32 * 1024 * 1024
#: Minimum delivery timeout for a publisher, in seconds.
_DELIVERY_S = 1.0
#: Maximum number of bytes that an error message shows of a key or value.
_EXCERPT_BYTES = 40


def open_stream(options: SinkOptions, name: str) -> Stream:
    """Open a stream, or create it if it does not exist.

    Tries to open the stream first, because that needs no permission to create streams.
    """
    m = options.server.connect()
    try:
        return m.stream(name, create=False)
    except StreamNotFound:
        pass
    try:
        stream = m.stream(name, capacity=options.capacity, create=True)
    except StreamConfigMismatch:  # another client just created it with a different capacity
        return m.stream(name, create=False)
    if options.capacity is None:
        _log.warning(
            "Created stream %r, which did not exist, with a ring capacity of %d records. To set "
            "another, use the capacity option.",
            *(name, stream.config.capacity),
        )
    return stream


def _open(options: SinkOptions, name: str) -> Stream:
    return outlast(options.server, lambda: open_stream(options, name))


def stage_all(
    options: SinkOptions, batches: Iterator[pa.RecordBatch], name: str, owner: StageOwner
) -> dict[str, Staged]:
    """Stage a task's rows. The stage is called ``name`` in every stream."""
    retry = partial(outlast, options.server)
    retry(options.server.require_no_eviction)
    stages: dict[str, tuple[Stage, RecordValidator]] = {}
    try:
        for stream_name, rows in _by_stream(options, batches):
            if stream_name not in stages:
                stream = _open(options, stream_name)
                if owner.run:  # delete the stages that earlier runs left, to free their memory
                    retry(partial(discard_stale, stream._handle, owner))
                records = min(FRAME_RECORDS_MAX, stream.config.capacity)
                validator = RecordValidator(stream._handle, records, _MAX_RECORD_BYTES)
                stages[stream_name] = Stage(stream._handle, name, retry, owner), validator
            stage, validator = stages[stream_name]
            for columns, _ in validator.frames(**_arguments(rows)):
                stage.write(columns)
        return {stream_name: stage.finish() for stream_name, (stage, _) in stages.items()}
    except BaseException:
        # No commit will include these stages, and until they expire, they use server memory.
        for stage, _ in stages.values():
            stage.abandon()
        raise


def publish_all(options: SinkOptions, batches: Iterator[pa.RecordBatch]) -> None:
    """Publish a task's rows as they arrive. If the task is retried, they are published again."""
    publishers: dict[str, Publisher] = {}
    timeout_s = max(options.server.timeout_s, _DELIVERY_S)
    try:
        for stream_name, rows in _by_stream(options, batches):
            if stream_name not in publishers:
                publishers[stream_name] = _open(options, stream_name).publisher(
                    codec="bytes",
                    max_record_bytes=_MAX_RECORD_BYTES,
                    acks=options.replicas,
                    delivery_timeout=timeout_s,
                )
            publishers[stream_name].publish_many(**_arguments(rows))
        for publisher in publishers.values():
            publisher.flush()
    finally:
        for publisher in publishers.values():
            try:
                publisher.close()
            except MeteorError as error:
                _log.warning("A task could not close its publisher: %s", error)


def _by_stream(
    options: SinkOptions, batches: Iterator[pa.RecordBatch]
) -> Iterator[tuple[str, pa.Table]]:
    """Yield rows for one stream at a time, in the order in which they arrive."""
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
                raise ValueError(
                    "A row has no stream: its stream column is null. Fill the column, or set the "
                    "stream option."
                )
            yield name.as_py(), rows.filter(compute.equal(column, name))


def _arguments(rows: pa.Table) -> dict[str, Any]:
    """Return the columns as arguments for ``publish_many``."""
    values = rows.column("value")
    if values.null_count:
        raise ValueError(
            "A value is null, but a record needs a value. Filter out such rows, or use coalesce."
        )
    names = rows.column_names
    return {
        "values": values,
        "keys": rows.column("key") if "key" in names else None,
        "headers": _headers(rows) if "headers" in names else None,
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
                        f"In the headers column, {name!r} is null in the row with the "
                        f"{_describe(rows, row)}, but a header needs a value. Remove it with "
                        "map_filter, or replace it."
                    )
    return headers


def _describe(rows: pa.Table, row: int) -> str:
    """Identify a row for the user by its key or, without a key, by its value."""
    key = rows["key"][row].as_py() if "key" in rows.column_names else None
    name, found = ("value", rows["value"][row].as_py()) if key is None else ("key", key)
    return f"{name} {found[:_EXCERPT_BYTES]!r}" + ("..." if len(found) > _EXCERPT_BYTES else "")
