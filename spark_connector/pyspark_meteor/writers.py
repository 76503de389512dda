"""The sinks: tasks stage rows, and the driver commits them.

Spark may run a task twice, even at the same time, and an attempt does not learn which one won. So
tasks only stage their rows, each attempt under a unique name. The driver commits the stages from
the attempts that Spark reports as successful.

If the driver dies after a commit, Spark repeats the batch. The stream already has it, so the tasks
stage nothing and only count their rows. A different row count means that the checkpoint was
restored and this is a different batch. The commit checks the count. It also checks that the stream
still has the batch, since a failover may have lost it.

The object that commits a batch runs in a different process from the objects that wrote it. It knows
only what their messages contain.
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
#: The local property with the id of the job group, which for a streaming query is the run id.
_RUN = "spark.jobGroup.id"
#: The stream remembers a batch write for this many seconds after its last commit, even a repeated
#: one. Without a txnId, the driver makes the stream forget the write earlier, unless it dies first.
_TXN_S = 30 * 86_400


@dataclass
class Written(WriterCommitMessage):
    """A task's result. Contains only names and numbers."""

    writer: str
    partition: int
    stages: dict[str, Staged] = field(default_factory=dict)
    #: Number of rows that the task only counted, because the stream already had the batch. None if
    #: the task staged or published them.
    counted: int | None = None


class StreamWriter(DataSourceStreamArrowWriter):
    """The writer for ``df.writeStream``."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage a task's rows. With ``delivery=atLeastOnce``, publish them instead."""
        context = TaskContext.get()
        assert context is not None, "Spark calls write() in a task"
        query, batch = context.getLocalProperty(_QUERY), context.getLocalProperty(_BATCH)
        if not self._options.exactly_once:
            publish_all(self._options, iterator)
            return Written("", context.partitionId())
        if not query or batch is None:
            raise RuntimeError(
                "Spark did not pass the query and batch ids, so the batch cannot be written "
                "exactly once. Use delivery=atLeastOnce."
            )
        try:
            done = stream_has(self._options, query, int(batch))
        except VersionPassed as error:
            raise _passed(error) from None
        owner = StageOwner(query, int(batch), context.getLocalProperty(_RUN) or "")
        return _write(self._options, iterator, owner, context.partitionId(), done=done)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """On the driver, move a batch's staged rows into streams that do not have them yet."""
        if self._options.exactly_once:
            try:
                outlast(self._options.server, lambda: commit_all(self._options, messages, batchId))
            except VersionPassed as error:
                raise _passed(error) from None
            except VersionDiffers as error:
                raise _differs(error) from None

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """On the driver, discard staged rows. If a task sent no message, its stages expire."""
        discard_all(self._options, messages)


class BatchWriter(DataSourceArrowWriter):
    """The writer for ``df.write``. Pickled copies of one object write and commit."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        run = uuid.uuid4().hex
        self._writer = f"txn.{options.txn_id}" if options.txn_id else f"job.{run}"
        self._owner = StageOwner(self._writer, options.txn_version, run)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage a task's rows, unless the stream has this version of the ``txnId``."""
        context = TaskContext.get()
        assert context is not None, "Spark calls write() in a task"
        options, writer, partition = self._options, self._writer, context.partitionId()
        try:
            done = bool(options.txn_id) and stream_has(options, writer, options.txn_version)
        except VersionPassed:
            return Written(writer, partition, counted=0)
        return _write(options, iterator, self._owner, partition, done=done)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver, move staged rows into streams that do not have them yet."""
        options = self._options

        def commit_again() -> list[StreamHandle]:
            return commit_all(options, messages, options.txn_version, again=True, lifetime_s=_TXN_S)

        streams = outlast(options.server, commit_again)
        if options.txn_id is None:
            for stream in streams:
                outlast(options.server, partial(forget, stream, self._writer))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver, discard staged rows.

        With a ``txnId``, keep a commit that failed halfway: if the write is submitted again, it
        finishes the commit. Without a ``txnId``, nothing could finish the commit.
        """
        discard_all(self._options, messages, discard if self._options.txn_id else abandon)


def stream_has(options: SinkOptions, writer: str, version: int) -> bool:
    """Return whether the stream has a version, so that a task need not stage its rows.

    Returns False if a column names the streams, because they are not known until the rows arrive.

    Raises:
        VersionPassed: The stream has a later version.
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
    """Stage a task's rows, or only count them if the stream already has them."""
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
    """Commit the stages from all tasks. Within each stream, keep the partition order.

    Each stream gets the batch exactly once. It may become visible in one stream before another.

    Args:
        again: Whether the version may have been written before. If a stream already has this
            version (even with different rows) or a later one, nothing is written to it.
        lifetime_s: Seconds for which the streams remember the writer. None means forever.

    Returns:
        The streams that the batch writes to.

    Raises:
        VersionPassed: A stream has a later version, and ``again`` is false.
        VersionDiffers: A stream has this version with a different number of rows, ``again`` is
            false, and failOnDataLoss is true.
        ServerRefused: The server may evict keys.
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
        for stream, _, records in shares:  # check all streams before anything is written
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
            hint = "Use a new txnVersion for new rows." if again else "failOnDataLoss is false."
            _log.warning("%s %s", error, hint)
    return [stream for stream, _, _ in shares]


def _let_expire(stream: StreamHandle, writer: str, lifetime_s: float) -> None:
    try:
        let_expire(stream, writer, lifetime_s)
    except AccessDenied as error:  # the user's ACL was written for an older release
        _log.warning("The stream will never forget writer %s: %s", writer, error)


def _divide(
    options: SinkOptions, written: list[Written], some_done: bool
) -> list[tuple[StreamHandle, list[Staged], int]]:
    """Return each stream in a batch, with its stages and its record count."""
    by_stream = _stages_by_stream(written)
    if some_done:
        assert options.stream is not None, "without a stream, stream_has() returns False"
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
    """Delete the stages that tasks wrote.

    Args:
        drop: ``discard`` keeps a commit that has begun, so that a repeated batch can finish it.
            ``abandon`` deletes it too.
    """
    written = [message for message in messages if isinstance(message, Written)]
    m = options.server.connect()
    for name, stages in _stages_by_stream(written).items():
        try:
            stream = m.stream(name, create=False)._handle
            drop(stream, written[0].writer, [stage.name for stage in stages])
        except StreamNotFound:
            pass  # the stages were deleted with the stream


_NEW_CHECKPOINT = (
    "give the query a new checkpointLocation. It is then a new query, which starts at "
    "startingOffsets"
)


def _passed(error: VersionPassed) -> PublishError:
    return PublishError(
        f"Batch {error.version} of query {error.writer} was not written: stream {error.stream!r} "
        f"already has batch {error.known} of the query, and Spark repeats only the last batch. "
        "Either the checkpoint was restored or copied, or an older driver for the query is still "
        f"running. Stop that driver, or {_NEW_CHECKPOINT}.",
        stream=error.stream,
    )


def _differs(error: VersionDiffers) -> PublishError:
    return PublishError(
        f"Batch {error.version} of query {error.writer} was not written: stream {error.stream!r} "
        f"already has a batch {error.version} from this query, with {error.known} rows instead of "
        f"{error.records}, so it is a different batch. If the query produces different rows each "
        "time, or rows that it reads are gone, set failOnDataLoss=false to treat the batch as "
        f"written. If the checkpoint was restored or copied, {_NEW_CHECKPOINT}.",
        stream=error.stream,
    )
