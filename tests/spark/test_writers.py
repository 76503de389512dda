"""In the sink, retried tasks and repeated batches write each row once. Runs without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

import meteor_py as meteor
from meteor_py.publish import transaction
from meteor_py.publish.transaction import StageOwner
from meteor_py.redis import keys
from pyspark_meteor import writers
from pyspark_meteor.server import ServerOptions
from pyspark_meteor.sink_options import SinkOptions, parse_sink
from pyspark_meteor.writing import open_stream, publish_all, stage_all
from tests.support.spark_engine import Task
from tests.support.transactions import contents
from tests.support.waiting import eventually

MIB = 1024 * 1024
SCHEMA = StructType([StructField("value", BinaryType()), StructField("stream", StringType())])


@pytest.fixture
def m(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


@pytest.fixture
def target(m: meteor.Client) -> meteor.Stream:
    return m.stream("s", capacity=100_000)


# Attempts at one task


@pytest.fixture
def options(url: str, m: meteor.Client, monkeypatch: pytest.MonkeyPatch) -> SinkOptions:
    """Options for a task in this process; the ``stream`` column names the target."""
    options = parse_sink({"url": url}, SCHEMA, streaming=True)
    monkeypatch.setattr(type(options.server), "connect", lambda _: m)
    return options


def some(stream: str, size: int = 1, rows: int = 2) -> pa.RecordBatch:
    """Return rows for a stream, with values of ``size`` bytes."""
    return pa.RecordBatch.from_pydict({"value": [b"x" * size] * rows, "stream": [stream] * rows})


def test_failed_task_deletes_its_stages(options: SinkOptions, m: meteor.Client) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        for stream in ("a", "b"):
            yield some(stream, MIB)
            assert len(m.redis.keys(keys.stage(stream, "q.*"))) == 1, "nothing was sent"
        raise RuntimeError("the task fails")

    with pytest.raises(RuntimeError, match="the task fails"):
        stage_all(options, rows(), "q.0.0.x", StageOwner("q", 0, "run"))
    assert m.redis.keys("*stage*") == []


def test_failed_task_reports_its_error_even_if_it_cannot_clean_up(
    options: SinkOptions, m: meteor.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise meteor.ConnectionFailed("gone")

    def rows() -> Iterator[pa.RecordBatch]:
        yield some("a")
        monkeypatch.setattr(m._connector, "call", refuse)
        raise RuntimeError("the task fails")

    with pytest.raises(RuntimeError, match="the task fails"):
        stage_all(options, rows(), "q.0.0.x", StageOwner("q", 0, "run"))


def test_task_that_cannot_publish_to_one_stream_publishes_to_the_others_and_fails(
    options: SinkOptions, m: meteor.Client
) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield some("a")
        eventually(
            lambda: m.stream("a", create=True).end().offset == 2, 10, "the rows were not published"
        )
        m.stream("a", create=True).delete()
        yield some("a")
        yield some("b")

    with pytest.raises(meteor.MeteorError, match="'a'"):
        publish_all(options, rows())
    assert contents(m.stream("b", create=False)) == "x x"


def test_task_that_fails_while_publishing_reports_the_first_error(
    options: SinkOptions, m: meteor.Client, caplog: pytest.LogCaptureFixture
) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield some("b")
        yield some("a")
        eventually(
            lambda: m.stream("a", create=True).end().offset == 2, 10, "the rows were not published"
        )
        m.stream("a", create=True).delete()
        yield some("a")
        raise RuntimeError("the task fails")

    with pytest.raises(RuntimeError, match="the task fails"):
        publish_all(options, rows())
    assert "A task could not close its publisher" in caplog.text
    assert contents(m.stream("b", create=False)) == "x x"


def test_capacity_applies_to_streams_that_the_sink_creates(
    url: str, m: meteor.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ServerOptions, "connect", lambda _: m)
    large = parse_sink({"url": url, "capacity": "50000"}, SCHEMA, streaming=True)
    assert open_stream(large, "large").config.capacity == 50_000
    m.stream("small", capacity=7)
    assert open_stream(large, "small").config.capacity == 7
    assert caplog.text == ""
    create = m.stream

    def meet(name: str, **given: Any) -> meteor.Stream:
        if "capacity" in given:
            create(name, capacity=9)  # as if another process had created it meanwhile
        return create(name, **given)

    with monkeypatch.context() as patch:
        patch.setattr(m, "stream", meet)
        assert open_stream(large, "met").config.capacity == 9
    assert caplog.text == ""
    assert open_stream(parse_sink({"url": url}, SCHEMA, streaming=True), "any").config.capacity
    assert "Created stream 'any', which did not exist, with a ring capacity of 10000" in caplog.text


class Sink:
    """A query's sink in this process. If ``stream`` is empty, the column names the target."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch, **options: str) -> None:
        given = {"url": url, "stream": "s"} | options
        if not given["stream"]:
            del given["stream"]
        self.writer = writers.StreamWriter(parse_sink(given, SCHEMA, streaming=True))
        self._monkeypatch = monkeypatch

    def attempt(
        self, value: str, batch: int = 0, *, rows: int = 2, partition: int = 0, stream: str = "s"
    ) -> writers.Written:
        """Run one attempt at a task."""
        self._monkeypatch.setattr(writers, "TaskContext", Task(batch, partition))
        arrow = pa.RecordBatch.from_pydict(
            {"value": [value.encode()] * rows, "stream": [stream] * rows}
        )
        written = self.writer.write(iter([arrow]))
        assert isinstance(written, writers.Written)
        return written


@pytest.fixture
def sink(
    url: str, m: meteor.Client, target: meteor.Stream, monkeypatch: pytest.MonkeyPatch
) -> Sink:
    monkeypatch.setattr(ServerOptions, "connect", lambda _: m)
    return Sink(url, monkeypatch)


def test_only_the_attempt_that_spark_commits_is_written(
    m: meteor.Client, target: meteor.Stream, sink: Sink
) -> None:
    lost, counted, late = map(sink.attempt, ("lost", "counted", "late"))
    assert len({each.stages["s"].name for each in (lost, counted, late)}) == 3
    sink.writer.commit([counted, None], 0)
    sink.writer.commit([late], 0)
    sink.writer.abort([lost, None], 0)
    assert contents(target) == "counted counted"
    assert m.redis.keys("*stage*") == []
    again = sink.attempt("again")
    assert (again.stages, again.counted) == ({}, 2)  # a committed batch is not staged again
    sink.writer.commit([again], 0)
    sink.writer.commit([sink.attempt("next", 1)], 1)
    assert contents(target) == "counted counted next next"


def test_batch_lost_by_a_failover_fails_and_is_written_when_repeated(
    m: meteor.Client, target: meteor.Stream, sink: Sink
) -> None:
    sink.writer.commit([sink.attempt("x")], 0)
    done = sink.attempt("x")
    m.redis.delete(keys.fences("s"))  # as after a lagging replica was promoted
    with pytest.raises(meteor.PublishError, match="lost"):
        sink.writer.commit([done], 0)
    m.redis.delete(keys.log("s"))
    m.redis.hset(keys.meta("s"), "next", 0)
    sink.writer.commit([sink.attempt("x")], 0)
    assert contents(target) == "x x"


def test_batch_older_than_the_last_committed_one_is_refused_and_leaves_no_stage(
    m: meteor.Client, target: meteor.Stream, sink: Sink
) -> None:
    early = sink.attempt("early", 4)
    sink.writer.commit([sink.attempt("x", 5)], 5)
    words = r"^Batch 4 of query q was not written: stream 's' already has batch 5 of the query"
    with pytest.raises(meteor.PublishError, match=words):
        sink.attempt("again", 4)
    with pytest.raises(meteor.PublishError, match=words):
        sink.writer.commit([early], 4)
    assert contents(target) == "x x"
    assert m.redis.keys("*stage*") == []


def test_unreplicated_commit_fails_and_counts_as_done_when_repeated(
    url: str,
    target: meteor.Stream,
    sink: Sink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transaction, "_REPLICAS_S", 0.05)
    careful = Sink(url, monkeypatch, commitDurability="1")
    with pytest.raises(meteor.NotReplicated, match="0 of 1 replicas") as caught:
        careful.writer.commit([careful.attempt("x")], 0)
    assert caught.value.offset == 1
    sink.writer.commit([sink.attempt("y")], 0)
    assert contents(target) == "x x", "the batch is missing from the log, or repeated"


# A batch whose number was written with different rows


OTHER = (
    r"^Batch 0 of query q was not written: stream '{}' already has .*, with {} rows instead of {}"
)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_batch_from_a_restored_checkpoint_with_different_rows_is_refused(
    m: meteor.Client, target: meteor.Stream, sink: Sink, rows: int
) -> None:
    early = sink.attempt("early", rows=3)
    sink.writer.commit([sink.attempt("x")], 0)
    again = sink.attempt("y", rows=rows)
    assert (again.stages, again.counted) == ({}, rows)
    with pytest.raises(meteor.PublishError, match=OTHER.format("s", 2, rows)):
        sink.writer.commit([again], 0)
    with pytest.raises(meteor.PublishError, match=OTHER.format("s", 2, 3)):
        sink.writer.commit([early], 0)
    assert contents(target) == "x x"
    assert m.redis.keys("*stage*") == []


def test_repeated_batch_is_refused_only_if_its_total_number_of_rows_differs(
    m: meteor.Client, target: meteor.Stream, sink: Sink
) -> None:
    def attempts() -> list[writers.Written]:
        return [sink.attempt(str(part), rows=part + 1, partition=part) for part in (0, 1)]

    first, second = attempts(), attempts()
    sink.writer.commit([*first], 0)
    counted = sink.attempt("1", rows=2, partition=1)
    sink.writer.commit([second[0], counted], 0)
    more = sink.attempt("1", rows=4, partition=1)
    with pytest.raises(meteor.PublishError, match=OTHER.format("s", 3, 5)):
        sink.writer.commit([second[0], more], 0)
    assert contents(target) == "0 1 1"


def test_commit_that_has_begun_is_finished_before_different_rows_are_refused(
    m: meteor.Client, target: meteor.Stream, sink: Sink
) -> None:
    begun, other = sink.attempt("x"), sink.attempt("y", rows=3)
    assert transaction._plan(target._handle, "q", 0, [begun.stages["s"]]) == [b"OK", 0, 1]
    with pytest.raises(meteor.PublishError, match=OTHER.format("s", 2, 3)):
        sink.writer.commit([other], 0)
    assert contents(target) == "x x"
    assert m.redis.keys("*stage*") == m.redis.keys("*plan*") == []


def test_query_that_allows_loss_continues_after_a_batch_with_different_rows(
    url: str,
    target: meteor.Stream,
    sink: Sink,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lenient = Sink(url, monkeypatch, failOnDataLoss="false")
    sink.writer.commit([sink.attempt("x")], 0)
    lenient.writer.commit([lenient.attempt("y", rows=3)], 0)
    assert "failOnDataLoss is false." in caplog.text
    lenient.writer.commit([lenient.attempt("z", 1)], 1)
    assert contents(target) == "x x z z"


def test_no_stream_is_written_to_if_one_already_has_different_rows(
    url: str, m: meteor.Client, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_column = Sink(url, monkeypatch, stream="")

    def attempts(batch: int, **rows: int) -> list[WriterCommitMessage | None]:
        each = enumerate(rows.items())
        return [
            by_column.attempt(name, batch, rows=count, partition=part, stream=name)
            for part, (name, count) in each
        ]

    by_column.writer.commit(attempts(0, b=2, c=1), 0)
    by_column.writer.commit(attempts(0, b=2, c=1), 0)
    with pytest.raises(meteor.PublishError, match=OTHER.format("c", 1, 2)):
        by_column.writer.commit(attempts(0, a=1, b=2, c=2), 0)
    early = attempts(0, a=1, c=1)
    by_column.writer.commit(attempts(1, c=1), 1)
    with pytest.raises(meteor.PublishError, match="stream 'c' already has batch 1 of the query"):
        by_column.writer.commit(early, 0)
    assert [contents(m.stream(name, create=True)) for name in "abc"] == ["", "b b", "c c"]


def test_repeated_txn_id_with_different_rows_writes_nothing_and_warns(
    url: str,
    target: meteor.Stream,
    sink: Sink,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(writers, "TaskContext", Task(0))

    def write(rows: int, version: str) -> None:
        given = {"url": url, "stream": "s", "txnId": "t", "txnVersion": version}
        writer = writers.BatchWriter(parse_sink(given, SCHEMA, streaming=False))
        writer.commit([writer.write(iter([some("", rows=rows)]))])

    write(2, "1")
    write(2, "1")
    assert caplog.text == ""
    write(3, "1")
    assert "Use a new txnVersion for new rows." in caplog.text
    write(1, "2")
    write(3, "1")
    assert contents(target) == "x x x"


def test_restarted_driver_deletes_its_predecessors_stages(
    m: meteor.Client, target: meteor.Stream, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("first", "second", "third"):  # each driver dies before the commit
        monkeypatch.setattr(writers, "TaskContext", Task(0, run=run))
        written = sink.writer.write(iter([pa.RecordBatch.from_pydict({"value": [b"x"]})]))
        assert len(m.redis.keys(keys.stage("s", "q.*"))) == 1
    sink.writer.commit([written], 0)
    assert contents(target) == "x"
    assert m.redis.keys("*stage*") == []


def test_txn_ids_are_remembered_for_30_days(
    url: str, m: meteor.Client, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "TaskContext", Task(0))

    def write(txn: str) -> None:
        given = {"url": url, "stream": "s", "txnId": txn}
        writer = writers.BatchWriter(parse_sink(given, SCHEMA, streaming=False))
        writer.commit([writer.write(iter([some("", rows=1)]))])

    write("a")
    times: Any = m.redis.zrange(keys.fence_times("s"), 0, -1, withscores=True)
    ((name, until),) = times
    month_ms = 30 * 86_400 * 1000
    assert name == b"txn.a"
    assert abs(m.redis.time()[0] * 1000 + month_ms - until) < 60_000
    monkeypatch.setattr(writers, "_TXN_S", 0.001)
    write("b")
    write("c")
    assert b"txn.b" not in m.redis.hkeys(keys.fences("s"))
    assert b"txn.a" in m.redis.hkeys(keys.fences("s"))


def test_write_without_a_txn_id_is_forgotten_even_if_the_driver_dies_after_the_commit(
    url: str, m: meteor.Client, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "TaskContext", Task(0))

    def write() -> None:
        given = {"url": url, "stream": "s"}
        writer = writers.BatchWriter(parse_sink(given, SCHEMA, streaming=False))
        writer.commit([writer.write(iter([some("", rows=1)]))])

    with monkeypatch.context() as patch:
        patch.setattr(writers, "_TXN_S", 0.001)
        patch.setattr(writers, "forget", lambda *_: None)  # as if the driver had died first
        write()
    assert len(m.redis.hkeys(keys.fences("s"))) == 1
    write()
    assert not m.redis.exists(keys.fences("s"), keys.fence_times("s"))


def test_failed_write_without_a_txn_id_leaves_no_expiry_time(
    url: str, m: meteor.Client, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "TaskContext", Task(0))
    monkeypatch.setattr(writers, "commit", fail)
    given = {"url": url, "stream": "s"}
    writer = writers.BatchWriter(parse_sink(given, SCHEMA, streaming=False))
    written = writer.write(iter([some("", rows=1)]))
    with pytest.raises(meteor.PublishError, match="failed"):
        writer.commit([written])
    assert m.redis.exists(keys.fence_times("s"))
    writer.abort([written])
    assert not m.redis.exists(keys.fences("s"), keys.fence_times("s"))


def fail(*_: Any, **__: Any) -> None:
    raise meteor.PublishError("The commit failed.", stream="s")


def test_streaming_query_is_never_forgotten(m: meteor.Client, sink: Sink) -> None:
    sink.writer.commit([sink.attempt("x")], 0)
    assert m.redis.hkeys(keys.fences("s")) == [b"q"]
    assert not m.redis.exists(keys.fence_times("s"))
