"""The sinks: what the engine asks its tasks to write, and the driver to commit.

A task may be run twice, at the same time even, and nobody tells the one that lost: so tasks only
stage their rows, each try under a name of its own, and the driver commits those that the engine
counts. A batch that was committed before the driver died is asked for again: the stream knows.
The writer that commits a stream's batch is another object than the one that wrote, in another
process: all it knows is in the messages.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from meteor_py.errors import StreamNotFound
from meteor_py.transaction import Staged, commit, discard, forget, is_done
from pyspark_meteor.writing import open_stream, publish_all, stage_all

if TYPE_CHECKING:
    import pyarrow as pa

    from pyspark_meteor.sink_options import SinkOptions

_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"


@dataclass
class Written(WriterCommitMessage):
    """What a task has staged: nothing but names and numbers."""

    writer: str
    partition: int
    stages: dict[str, Staged] = field(default_factory=dict)


class StreamWriter(DataSourceStreamArrowWriter):
    """For ``df.writeStream``."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task: stage the rows, or with ``delivery=atLeastOnce`` publish them."""
        context = TaskContext.get()
        assert context is not None, "in a task"
        query, batch = context.getLocalProperty(_QUERY), context.getLocalProperty(_BATCH)
        if not self._options.exactly_once:
            publish_all(self._options, iterator)
            return Written("", context.partitionId())
        if not query or batch is None:
            raise RuntimeError(
                "Spark does not tell which batch of which query this is, so it cannot be written "
                "exactly once; use delivery=atLeastOnce."
            )
        if self._options.stream and self._is_done(self._options.stream, query, int(batch)):
            return Written(query, context.partitionId())  # a batch that is asked for again
        # The numbers of attempts begin anew with each driver: they make no name.
        name = f"{query}.{batch}.{context.partitionId()}.{uuid.uuid4().hex}"
        stages = stage_all(self._options, iterator, name)
        return Written(query, context.partitionId(), stages)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """On the driver: move what was staged into the streams, unless that was done."""
        if self._options.exactly_once:
            commit_all(self._options, messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """On the driver: what was staged is not wanted. What nobody tells of expires."""
        discard_all(self._options, messages)

    def _is_done(self, stream: str, query: str, batch: int) -> bool:
        return is_done(open_stream(self._options, stream), query, batch)


class BatchWriter(DataSourceArrowWriter):
    """For ``df.write``. The same object, pickled, writes and commits."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._writer = f"txn.{options.txn_id}" if options.txn_id else f"job.{uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task: stage the rows."""
        context = TaskContext.get()
        assert context is not None, "in a task"
        name = f"{self._writer}.{context.partitionId()}.{uuid.uuid4().hex}"
        stages = stage_all(self._options, iterator, name)
        return Written(self._writer, context.partitionId(), stages)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver: move what was staged into the streams, unless ``txnId`` was written."""
        streams = commit_all(self._options, messages, self._options.txn_version)
        if self._options.txn_id is None:
            m = self._options.server.connect()
            for name in streams:
                forget(m.stream(name, create=False), self._writer)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver: what was staged is not wanted."""
        discard_all(self._options, messages)


def commit_all(
    options: SinkOptions, messages: list[WriterCommitMessage | None], version: int
) -> list[str]:
    """Commit the stages of all tasks, for each stream in the order of the partitions.

    Each stream is written exactly once; one may have a batch before another has it.

    Returns:
        The streams.
    """
    written = sorted(
        (message for message in messages if isinstance(message, Written)),
        key=lambda message: message.partition,
    )
    names = sorted({name for message in written for name in message.stages})
    m = options.server.connect()
    for name in names:
        stages = [message.stages[name] for message in written if name in message.stages]
        commit(m.stream(name, create=False), written[0].writer, version, stages)
    return names


def discard_all(options: SinkOptions, messages: list[WriterCommitMessage | None]) -> None:
    """Delete the stages of tasks, but not of a commit that was begun: a replay finishes it."""
    m = options.server.connect()
    for message in messages:
        if isinstance(message, Written):
            for name, stage in message.stages.items():
                try:
                    discard(m.stream(name, create=False), message.writer, [stage.name])
                except StreamNotFound:
                    pass  # and with it its stages
