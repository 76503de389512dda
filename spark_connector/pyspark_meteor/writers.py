"""The sinks: what the engine asks its tasks to write, and the driver to commit.

A task may be run twice, at the same time even, and nobody tells the one that lost: so tasks only
stage their rows, each try under a name of its own, and the driver commits those that the engine
counts. A batch that was committed before the driver died is asked for again: the stream knows, and
the tasks need not stage it. The commit checks that it still knows; after a fail-over it may not.
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

from meteor_py.errors import PublishError, StreamNotFound
from meteor_py.transaction import Staged, VersionPassed, commit, discard, forget, is_done
from pyspark_meteor.writing import publish_all, stage_all

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
    #: It has staged nothing, as the stream had it all.
    done: bool = False


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
        try:
            if found_done(self._options, query, int(batch)):
                return Written(query, context.partitionId(), done=True)
        except VersionPassed as error:
            raise _passed(error) from None
        # The numbers of attempts begin anew with each driver: they make no name.
        name = f"{query}.{batch}.{context.partitionId()}.{uuid.uuid4().hex}"
        stages = stage_all(self._options, iterator, name)
        return Written(query, context.partitionId(), stages)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """On the driver: move what was staged into the streams, unless that was done."""
        if self._options.exactly_once:
            try:
                commit_all(self._options, messages, batchId)
            except VersionPassed as error:
                raise _passed(error) from None

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """On the driver: what was staged is not wanted. What nobody tells of expires."""
        discard_all(self._options, messages)


class BatchWriter(DataSourceArrowWriter):
    """For ``df.write``. The same object, pickled, writes and commits."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._writer = f"txn.{options.txn_id}" if options.txn_id else f"job.{uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task: stage the rows, unless ``txnId`` was written."""
        context = TaskContext.get()
        assert context is not None, "in a task"
        if self._options.txn_id is not None and self._is_done():
            return Written(self._writer, context.partitionId(), done=True)
        name = f"{self._writer}.{context.partitionId()}.{uuid.uuid4().hex}"
        stages = stage_all(self._options, iterator, name)
        return Written(self._writer, context.partitionId(), stages)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver: move what was staged into the streams, unless ``txnId`` was written."""
        version = self._options.txn_version
        streams = commit_all(self._options, messages, version, skip_older=True)
        if self._options.txn_id is None:
            m = self._options.server.connect()
            for name in streams:
                forget(m.stream(name, create=False), self._writer)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver: what was staged is not wanted."""
        discard_all(self._options, messages)

    def _is_done(self) -> bool:
        try:
            return found_done(self._options, self._writer, self._options.txn_version)
        except VersionPassed:
            return True


def found_done(options: SinkOptions, writer: str, version: int) -> bool:
    """Whether a task need not begin; False also if only its rows tell where they go."""
    if options.stream is None:
        return False
    try:
        stream = options.server.connect().stream(options.stream, create=False)
    except StreamNotFound:
        return False
    return is_done(stream, writer, version)


def commit_all(
    options: SinkOptions,
    messages: list[WriterCommitMessage | None],
    version: int,
    *,
    skip_older: bool = False,
) -> list[str]:
    """Commit the stages of all tasks, for each stream in the order of the partitions.

    Each stream is written exactly once; one may have a batch before another has it.

    Args:
        skip_older: A stream that has a later version has this one, too, or never will.

    Returns:
        The streams.

    Raises:
        VersionPassed: A stream has a later version.
    """
    written = sorted(
        (message for message in messages if isinstance(message, Written)),
        key=lambda message: message.partition,
    )
    names = {name for message in written for name in message.stages}
    some_done = any(message.done for message in written)
    if some_done:
        assert options.stream is not None, "else no task asks"
        names.add(options.stream)
    m = options.server.connect()
    streams = [m.stream(name, create=False) for name in sorted(names)]
    writer = written[0].writer if written else ""
    if len(streams) > 1 and not skip_older:
        for stream in streams:  # raises before any of them is written
            is_done(stream, writer, version)
    for stream in streams:
        stages = [each.stages[stream.name] for each in written if stream.name in each.stages]
        try:
            commit(stream, writer, version, stages, begun=some_done, replicas=options.replicas)
        except VersionPassed:
            if not skip_older:
                raise
    return sorted(names)


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


def _passed(error: VersionPassed) -> PublishError:
    return PublishError(
        f"Batch {error.version} of query {error.writer} was not written: stream {error.stream!r} "
        f"has its batch {error.known} already, and Spark repeats none but the last. Its checkpoint "
        "was restored or copied, or an older driver of it is still running. Stop that one; or give "
        "the query another checkpointLocation: it is a new one then, and writes what it reads from "
        "startingOffsets on.",
        stream=error.stream,
    )
