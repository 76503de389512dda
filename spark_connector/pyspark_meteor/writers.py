"""The sinks: tasks stage rows, and the driver commits them.

Spark may run a task twice, even at the same time, and does not inform the attempt that lost. Tasks
therefore only stage their rows, each attempt under a unique name, and the driver commits the stages
of the attempts that the engine counts.

If the driver died after a commit, the engine repeats the batch. The stream has it, so the tasks
stage nothing and only count their rows: a different number means a different batch, from a
checkpoint that was restored. The commit checks the number, and that the stream still has the batch,
since a failover may have lost it.

The object that commits a batch is not the one that wrote it, and lives in another process. It
knows only what the messages say.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from meteor_py.errors import AccessDenied, PublishError, StreamNotFound
from meteor_py.publish.transaction import (
    Staged,
    StageOwner,
    VersionDiffers,
    VersionPassed,
    abandon,
    commit,
    discard,
    forget,
    is_done,
    let_expire,
)
from pyspark_meteor.outages import outlast
from pyspark_meteor.writing import publish_all, stage_all

if TYPE_CHECKING:
    import pyarrow as pa

    from meteor_py.log.handle import StreamHandle
    from pyspark_meteor.sink_options import SinkOptions

_log = logging.getLogger(__name__)

_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"
#: Spark runs the jobs of a streaming query in a group that is named after the run of the query.
_RUN = "spark.jobGroup.id"
#: Seconds for which a txnId is remembered after it was last written or submitted again.
_TXN_S = 30 * 86_400


@dataclass
class Written(WriterCommitMessage):
    """The result of a task: nothing but names and numbers."""

    writer: str
    partition: int
    stages: dict[str, Staged] = field(default_factory=dict)
    #: Rows that the task only counted, because the stream had the batch; None: it staged them.
    counted: int | None = None


class StreamWriter(DataSourceStreamArrowWriter):
    """The writer for ``df.writeStream``."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of a task, or with ``delivery=atLeastOnce`` publish them."""
        context = TaskContext.get()
        assert context is not None, "in a task"
        query, batch = context.getLocalProperty(_QUERY), context.getLocalProperty(_BATCH)
        if not self._options.exactly_once:
            publish_all(self._options, iterator)
            return Written("", context.partitionId())
        if not query or batch is None:
            raise RuntimeError(
                "Spark did not pass the ids of the query and the batch, so the batch cannot be "
                "written exactly once. Use delivery=atLeastOnce."
            )
        try:
            done = stream_has(self._options, query, int(batch))
        except VersionPassed as error:
            raise _passed(error) from None
        owner = StageOwner(query, int(batch), context.getLocalProperty(_RUN) or "")
        return _write(self._options, iterator, owner, context.partitionId(), done=done)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Move the staged rows of a batch into the streams, unless they are there. Driver only."""
        if self._options.exactly_once:
            try:
                outlast(self._options.server, lambda: commit_all(self._options, messages, batchId))
            except VersionPassed as error:
                raise _passed(error) from None
            except VersionDiffers as error:
                raise _differs(error) from None

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Discard staged rows, on the driver. Stages of tasks that sent no message expire."""
        discard_all(self._options, messages)


class BatchWriter(DataSourceArrowWriter):
    """The writer for ``df.write``. Copies of one object, by pickle, write and commit."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        run = uuid.uuid4().hex
        self._writer = f"txn.{options.txn_id}" if options.txn_id else f"job.{run}"
        self._owner = StageOwner(self._writer, options.txn_version, run)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of a task, unless the stream has this version of the ``txnId``."""
        context = TaskContext.get()
        assert context is not None, "in a task"
        options, writer, partition = self._options, self._writer, context.partitionId()
        try:
            done = bool(options.txn_id) and stream_has(options, writer, options.txn_version)
        except VersionPassed:
            return Written(writer, partition, counted=0)
        return _write(options, iterator, self._owner, partition, done=done)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Move staged rows into the streams, unless they are there. Driver only."""
        options = self._options

        def commit_again() -> list[StreamHandle]:
            lifetime_s = _TXN_S if options.txn_id else None
            return commit_all(
                options, messages, options.txn_version, again=True, lifetime_s=lifetime_s
            )

        streams = outlast(options.server, commit_again)
        if options.txn_id is None:
            for stream in streams:
                outlast(options.server, partial(forget, stream, self._writer))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Discard staged rows, on the driver.

        With a ``txnId``, a commit that failed half-way is kept: submitting the write again
        finishes it. Without one, nothing could finish it.
        """
        discard_all(self._options, messages, discard if self._options.txn_id else abandon)


def stream_has(options: SinkOptions, writer: str, version: int) -> bool:
    """Returns whether the stream has a version, so that a task need not stage its rows.

    Returns False if a column names the streams, because only the rows tell which they are.
    """
    if options.stream is None:
        return False
    name = options.stream

    def has() -> bool:
        stream = options.server.connect().stream(name, create=False)
        return is_done(stream._handle, writer, version)

    try:
        return outlast(options.server, has)
    except StreamNotFound:
        return False


def _write(
    options: SinkOptions,
    batches: Iterator[pa.RecordBatch],
    owner: StageOwner,
    partition: int,
    *,
    done: bool,
) -> Written:
    """Stage the rows of a task, or only count them if the stream has them."""
    if done:
        return Written(owner.writer, partition, counted=sum(batch.num_rows for batch in batches))
    # Attempt numbers restart with each driver, so they do not make a name unique.
    name = f"{owner.writer}.{owner.version}.{partition}.{uuid.uuid4().hex}"
    return Written(owner.writer, partition, stage_all(options, batches, name, owner))


def commit_all(
    options: SinkOptions,
    messages: list[WriterCommitMessage | None],
    version: int,
    *,
    again: bool = False,
    lifetime_s: float | None = None,
) -> list[StreamHandle]:
    """Commit the stages of all tasks, for each stream in the order of the partitions.

    Each stream is written exactly once; one may show a batch before another does.

    Args:
        again: The version may have been written before, even with other rows, and is then not
            written again. Nor is it written to a stream that has a later version.
        lifetime_s: Seconds for which the streams remember the writer; None: for good.

    Returns:
        The streams.

    Raises:
        VersionPassed: A stream has a later version.
        VersionDiffers: A stream has this version with another number of rows.
        ServerRefused: The server may delete keys.
    """
    options.server.require_no_eviction()
    written = sorted(
        (message for message in messages if isinstance(message, Written)),
        key=lambda message: message.partition,
    )
    writer = written[0].writer if written else ""
    some_done = any(message.counted is not None for message in written)
    shares = _divide(options, written, some_done)
    is_strict = options.fail_on_data_loss and not again
    if len(shares) > 1 and not again:
        for stream, _, records in shares:  # raises before any of them is written
            is_done(stream, writer, version, records if is_strict else None)
    for stream, stages, records in shares:
        if lifetime_s is not None:
            _let_expire(stream, writer, lifetime_s)
        try:
            commit(
                *(stream, writer, version, stages),
                begun=some_done,
                records=records,
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
    return [stream for stream, _, _ in shares]


def _let_expire(stream: StreamHandle, writer: str, lifetime_s: float) -> None:
    try:
        let_expire(stream, writer, lifetime_s)
    except AccessDenied as error:  # the user's rights were granted for an older release
        _log.warning("The txnId will be remembered for good: %s", error)


def _divide(
    options: SinkOptions, written: list[Written], some_done: bool
) -> list[tuple[StreamHandle, list[Staged], int]]:
    """Returns each stream of a batch, with its stages and its number of records."""
    by_stream = _stages_by_stream(written)
    if some_done:
        assert options.stream is not None, "stream_has is false without it"
        by_stream.setdefault(options.stream, [])
    m = options.server.connect()
    counted = sum(message.counted or 0 for message in written)
    return [
        (m.stream(name, create=False)._handle, stages, counted + sum(s.records for s in stages))
        for name, stages in by_stream.items()
    ]


def _stages_by_stream(written: list[Written]) -> dict[str, list[Staged]]:
    names = sorted({name for message in written for name in message.stages})
    return {name: [w.stages[name] for w in written if name in w.stages] for name in names}


def discard_all(
    options: SinkOptions,
    messages: list[WriterCommitMessage | None],
    drop: Callable[[StreamHandle, str, list[str]], None] = discard,
) -> None:
    """Delete the stages of tasks.

    Args:
        drop: ``discard`` keeps a commit that has begun, for a repetition to finish. ``abandon``
            deletes it too.
    """
    written = [message for message in messages if isinstance(message, Written)]
    m = options.server.connect()
    for name, stages in _stages_by_stream(written).items():
        try:
            stream = m.stream(name, create=False)._handle
            drop(stream, written[0].writer, [stage.name for stage in stages])
        except StreamNotFound:
            pass  # its stages were deleted with it


_NEW_CHECKPOINT = (
    "give the query a new checkpointLocation, with which it is a new query and writes what it "
    "reads from startingOffsets on"
)


def _passed(error: VersionPassed) -> PublishError:
    return PublishError(
        f"Batch {error.version} of query {error.writer} was not written: stream {error.stream!r} "
        f"has its batch {error.known} already, and Spark repeats only the last batch. Either the "
        "checkpoint was restored or copied, or an older driver of the query is still running. Stop "
        f"that driver, or {_NEW_CHECKPOINT}.",
        stream=error.stream,
    )


def _differs(error: VersionDiffers) -> PublishError:
    return PublishError(
        f"Batch {error.version} of query {error.writer} was not written: stream {error.stream!r} "
        f"has a batch {error.version} of it already, with {error.known} rows, but this one has "
        f"{error.records}, so it is a different batch. If the query produces other rows each time, "
        "or rows that it reads are gone, set failOnDataLoss=false, with which the batch counts as "
        f"written. If the checkpoint was restored or copied, {_NEW_CHECKPOINT}.",
        stream=error.stream,
    )
