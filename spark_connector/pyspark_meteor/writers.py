"""The sinks: what the engine asks its tasks to write, and the driver to commit.

A task may be run twice, at the same time even, and nobody tells the one that lost: so tasks only
stage their rows, each try under a name of its own, and the driver commits those that the engine
counts. A batch that was committed before the driver died is asked for again: the stream knows, and
the tasks need not stage it. They count it: with another number of rows it is another batch, of a
checkpoint that was restored. The commit checks that, and that the stream still knows; after a
fail-over it may not.
The writer that commits a stream's batch is another object than the one that wrote, in another
process: all it knows is in the messages.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from meteor_py.errors import PublishError, StreamNotFound
from meteor_py.publish.transaction import (
    Staged,
    VersionDiffers,
    VersionPassed,
    abandon,
    commit,
    discard,
    forget,
    is_done,
)
from pyspark_meteor.writing import publish_all, stage_all

if TYPE_CHECKING:
    import pyarrow as pa

    from meteor_py.log.handle import StreamHandle
    from pyspark_meteor.sink_options import SinkOptions

_log = logging.getLogger(__name__)

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
    #: Rows that it has not staged then.
    counted: int = 0


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
                return Written(query, context.partitionId(), done=True, counted=count(iterator))
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
            except VersionDiffers as error:
                raise _differs(error) from None

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
        version = self._options.txn_version
        try:
            if self._options.txn_id and found_done(self._options, self._writer, version):
                return Written(
                    self._writer, context.partitionId(), done=True, counted=count(iterator)
                )
        except VersionPassed:
            return Written(self._writer, context.partitionId(), done=True)
        name = f"{self._writer}.{context.partitionId()}.{uuid.uuid4().hex}"
        stages = stage_all(self._options, iterator, name)
        return Written(self._writer, context.partitionId(), stages)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver: move what was staged into the streams, unless ``txnId`` was written."""
        version = self._options.txn_version
        streams = commit_all(self._options, messages, version, again=True)
        if self._options.txn_id is None:
            m = self._options.server.connect()
            for name in streams:
                forget(m.stream(name, create=False)._handle, self._writer)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver: what was staged is not wanted; nor is a commit that failed half-way.

        But with a ``txnId``, who submits it again finishes that.
        """
        give_up = discard if self._options.txn_id else abandon
        discard_all(self._options, messages, give_up)


def found_done(options: SinkOptions, writer: str, version: int) -> bool:
    """Whether a task need not begin; False also if only its rows tell where they go."""
    if options.stream is None:
        return False
    try:
        stream = options.server.connect().stream(options.stream, create=False)
    except StreamNotFound:
        return False
    return is_done(stream._handle, writer, version)


def count(batches: Iterator[pa.RecordBatch]) -> int:
    """The rows of a task that need not be staged."""
    return sum(batch.num_rows for batch in batches)


@dataclass(frozen=True)
class _Share:
    """What one stream gets."""

    stream: StreamHandle
    stages: list[Staged]
    records: int


def commit_all(
    options: SinkOptions,
    messages: list[WriterCommitMessage | None],
    version: int,
    *,
    again: bool = False,
) -> list[str]:
    """Commit the stages of all tasks, for each stream in the order of the partitions.

    Each stream is written exactly once; one may have a batch before another has it.

    Args:
        again: It may have been written before, with other rows even, and is not written then. Nor
            is it to a stream that has a later version: that has this one, too, or never will.

    Returns:
        The streams.

    Raises:
        VersionPassed: A stream has a later version.
        VersionDiffers: A stream has this one, with another number of rows.
    """
    written = sorted(
        (message for message in messages if isinstance(message, Written)),
        key=lambda message: message.partition,
    )
    writer = written[0].writer if written else ""
    some_done = any(message.done for message in written)
    shares = _divide(options, written, some_done)
    is_strict = options.fail_on_data_loss and not again
    if len(shares) > 1 and not again:
        for share in shares:  # raises before any of them is written
            is_done(share.stream, writer, version, share.records if is_strict else None)
    for share in shares:
        try:
            commit(
                *(share.stream, writer, version, share.stages),
                begun=some_done,
                records=share.records,
                replicas=options.replicas,
            )
        except VersionPassed:
            if not again:
                raise
        except VersionDiffers as error:
            if is_strict:
                raise
            hint = "Other rows need another txnVersion." if again else "failOnDataLoss is false."
            _log.warning("%s %s", error, hint)
    return [share.stream.name for share in shares]


def _divide(options: SinkOptions, written: list[Written], some_done: bool) -> list[_Share]:
    names = {name for message in written for name in message.stages}
    if some_done:
        assert options.stream is not None, "else no task asks"
        names.add(options.stream)
    m = options.server.connect()
    counted = sum(message.counted for message in written)
    shares: list[_Share] = []
    for name in sorted(names):
        stages = [message.stages[name] for message in written if name in message.stages]
        records = counted + sum(stage.records for stage in stages)
        shares.append(_Share(m.stream(name, create=False)._handle, stages, records))
    return shares


def discard_all(
    options: SinkOptions,
    messages: list[WriterCommitMessage | None],
    give_up: Callable[[StreamHandle, str, list[str]], None] = discard,
) -> None:
    """Delete the stages of tasks, but not of a commit that was begun: a replay finishes it.

    Args:
        give_up: ``abandon`` if nobody will repeat it.
    """
    written = [message for message in messages if isinstance(message, Written)]
    m = options.server.connect()
    for name in sorted({name for message in written for name in message.stages}):
        stages = [message.stages[name].name for message in written if name in message.stages]
        try:
            give_up(m.stream(name, create=False)._handle, written[0].writer, stages)
        except StreamNotFound:
            pass  # and with it its stages


_ANOTHER = (
    "give the query another checkpointLocation: it is a new one then, and writes what it reads "
    "from startingOffsets on"
)


def _passed(error: VersionPassed) -> PublishError:
    return PublishError(
        f"Batch {error.version} of query {error.writer} was not written: stream {error.stream!r} "
        f"has its batch {error.known} already, and Spark repeats none but the last. Its checkpoint "
        "was restored or copied, or an older driver of it is still running. Stop that one; or "
        f"{_ANOTHER}.",
        stream=error.stream,
    )


def _differs(error: VersionDiffers) -> PublishError:
    return PublishError(
        f"Batch {error.version} of query {error.writer} was not written: stream {error.stream!r} "
        f"has a batch {error.version} of it already, with {error.known} rows, and this one has "
        f"{error.records}, so it is another one. Its checkpoint was restored or copied; or the "
        "query is one that gives other rows each time, or rows that it reads are gone. Then say "
        f"failOnDataLoss=false, by which the batch counts as written; else {_ANOTHER}.",
        stream=error.stream,
    )
