"""What Spark writes to a stream is there exactly once, and what it cannot write is said."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

import meteor_py as meteor
from meteor_py import keys, transaction
from pyspark_meteor import writers
from pyspark_meteor.server import ServerOptions
from pyspark_meteor.sink_options import SinkOptions, parse_sink
from pyspark_meteor.writing import publish_all, stage_all
from tests.spark import END_S, batches, failure, stream_of
from tests.staging import contents, lasting, numbers
from tests.waiting import eventually

MIB = 1024 * 1024


@pytest.fixture
def m(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


@pytest.fixture
def target(m: meteor.Client) -> meteor.Stream:
    return m.stream("s", capacity=100_000)


def source(m: meteor.Client, first: int, last: int) -> None:
    """Records that a query reads."""
    with m.stream("source", capacity=100_000).publisher() as pub:
        for start in range(first, last, 100):
            pub.publish_many([b"%d" % i for i in range(start, min(start + 100, last))])


def begin(frame: DataFrame, url: str, folder: Path, **options: str) -> StreamingQuery:
    writer = frame.writeStream.format("meteor").option("url", url).options(**options)
    return (
        writer.option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )


def copy(spark: SparkSession, url: str, folder: Path, **options: str) -> StreamingQuery:
    """Copy what is new in the source, in micro-batches of 1000."""
    frame = stream_of(spark, url, stream="source", maxOffsetsPerTrigger=1000, minPartitions=2)
    query = begin(frame.select("value"), url, folder, **{"stream": "s"} | options)
    assert query.awaitTermination(END_S), "the query does not end"
    return query


def forget_last_commit(folder: Path) -> None:
    """As if the driver had died before it had noted that its last batch was committed."""
    commits = folder / "checkpoint" / "commits"
    names = [path.name for path in commits.iterdir() if path.name.isdigit()]
    last = max(names, key=int)
    (commits / last).unlink()
    (commits / f".{last}.crc").unlink()


def rows(spark: SparkSession, first: int, last: int, partitions: int = 3) -> DataFrame:
    return spark.range(first, last, 1, partitions).select(col("id").cast("string").alias("value"))


def write(frame: DataFrame, url: str, **options: Any) -> None:
    options = {"url": url, "stream": "s"} | options
    given = {name: value for name, value in options.items() if value is not None}
    frame.write.format("meteor").options(**given).mode("append").save()


# Queries


def test_a_copy_in_micro_batches_has_every_row_once_and_in_order(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream, tmp_path: Path
) -> None:
    source(m, 0, 3500)
    before = lasting(target)
    assert batches(copy(spark, url, tmp_path)) == [1000, 1000, 1000, 500]
    assert contents(target) == numbers(3500)
    left = {keys.log("s").encode(), keys.fences("s").encode()}
    assert lasting(target) - before == left
    assert m.redis.keys("*stage*") == m.redis.keys("*plan*") == []


def test_a_batch_that_is_asked_for_again_writes_nothing_twice(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream, tmp_path: Path
) -> None:
    source(m, 0, 1500)
    copy(spark, url, tmp_path)
    forget_last_commit(tmp_path)
    assert batches(copy(spark, url, tmp_path)) == [500]
    assert contents(target) == numbers(1500)
    source(m, 1500, 1800)
    forget_last_commit(tmp_path)
    copy(spark, url, tmp_path)
    assert contents(target) == numbers(1800)
    assert m.redis.keys("*stage*") == []


def test_a_query_of_another_checkpoint_is_another_writer(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream, tmp_path: Path
) -> None:
    source(m, 0, 500)
    copy(spark, url, tmp_path / "a")
    copy(spark, url, tmp_path / "b")
    assert contents(target) == f"{numbers(500)} {numbers(500)}"


def test_a_commit_that_fails_half_way_is_finished_by_the_restarted_query(
    spark: SparkSession, m: meteor.Client, url: str, tmp_path: Path
) -> None:
    """The engine aborts the batch, and must not take its frames away."""
    target = m.stream("s", capacity=100)  # frames of as many
    source(m, 0, 1000)
    m.redis.hset(keys.meta("s"), "next", meteor.config.OFFSET_MAX - 450)
    frame = stream_of(spark, url, stream="source").select("value")
    assert "used up its offsets" in failure(begin(frame, url, tmp_path, stream="s"))
    (fence,) = m.call("HVALS", keys.fences("s"))
    assert fence == b"0:4:10"
    m.redis.delete(keys.log("s"))
    m.redis.hset(keys.meta("s"), mapping={"next": 0, "capacity": 100_000})
    copy(spark, url, tmp_path)
    assert contents(target) == " ".join(map(str, range(400, 1000)))


def test_batches_without_rows_write_nothing(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream, tmp_path: Path
) -> None:
    source(m, 0, 1500)
    frame = stream_of(spark, url, stream="source", maxOffsetsPerTrigger=1000).select("value")
    query = begin(frame.where("cast(value as string) = '1200'"), url, tmp_path, stream="s")
    assert query.awaitTermination(END_S)
    assert contents(target) == "1200"
    write(rows(spark, 0, 0), url)
    assert contents(target) == "1200"


def test_at_least_once_publishes_at_once_and_leaves_no_fence(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream, tmp_path: Path
) -> None:
    source(m, 0, 1500)
    copy(spark, url, tmp_path, delivery="atLeastOnce")
    assert sorted(map(int, contents(target).split())) == list(range(1500))
    assert not m.redis.exists(keys.fences("s"))


# Batch writes


def test_a_batch_write_with_a_txn_id_is_done_once_per_version(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream
) -> None:
    for _ in range(2):
        write(rows(spark, 0, 1000), url, txnId="job: {1}")
    assert contents(target) == numbers(1000)
    write(rows(spark, 1000, 1500), url, txnId="job: {1}", txnVersion=2)
    write(rows(spark, 0, 1000), url, txnId="job: {1}", txnVersion=1)
    assert contents(target) == numbers(1500)
    write(rows(spark, 1500, 1600), url, txnId="job 2")
    assert contents(target) == numbers(1600)
    assert m.redis.keys("*stage*") == []


def test_a_batch_write_without_a_txn_id_is_done_each_time_and_leaves_no_fence(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream
) -> None:
    write(rows(spark, 0, 100), url)
    rows(spark, 100, 200).write.format("meteor").option("url", url).mode("append").save("s")
    assert contents(target) == numbers(200)
    assert not m.redis.exists(keys.fences("s"))


def test_rows_go_to_the_streams_that_a_column_names(
    spark: SparkSession, m: meteor.Client, url: str
) -> None:
    columns = "cast(id as string) value", "cast(id % 2 as string) stream"
    frame = spark.range(0, 1000, 1, 3).selectExpr(*columns)
    for _ in range(2):
        write(frame, url, stream=None, txnId="t")
    assert contents(m.stream("0", create=False)) == " ".join(map(str, range(0, 1000, 2)))
    assert contents(m.stream("1", create=False)) == " ".join(map(str, range(1, 1000, 2)))
    write(frame, url, stream="s", txnId="t")  # the option beats the column
    assert contents(m.stream("s", create=False)) == numbers(1000)


def test_keys_headers_and_times_are_those_of_the_columns(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream
) -> None:
    time = datetime(2024, 2, 29, 12, 30, 0, 250_000, tzinfo=UTC)
    given = [
        ("é", b"k", {"a": b"1", "b": b""}, time),
        ("", None, None, None),
        ("x", b"", {}, datetime(1970, 1, 1, tzinfo=UTC)),
    ]
    schema = "value string, key binary, headers map<string, binary>, timestamp timestamp"
    write(spark.createDataFrame(given, schema).coalesce(1), url)
    records = [record for batch in target.read() for record in batch]
    assert [record.value for record in records] == ["é".encode(), b"", b"x"]
    assert [record.key for record in records] == [b"k", None, b""]
    assert records[0].headers == {"a": b"1", "b": b""}
    assert not records[1].headers
    assert records[0].time == time
    assert records[1].timestamp == records[1].appended
    assert records[2].time == datetime(1970, 1, 1, tzinfo=UTC)


# What is refused


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown column": ("'a' value, 1 extra", {}, "column extra int cannot be written"),
    "a column of another type": ("1 value", {}, "column value int cannot be written"),
    "no value": ("'a' key", {}, "A record needs a value"),
    "no stream": ("'a' value", {"stream": None}, "Name the stream"),
    "an unknown option": ("'a' value", {"other": "x"}, "no option 'other'"),
    "an option of queries": ("'a' value", {"delivery": "atLeastOnce"}, "delivery"),
    "a version of nothing": ("'a' value", {"txnVersion": "2"}, "txnVersion"),
    "two names": ("'a' value", {"path": "t"}, "once will do"),
    "a version that is no number": ("'a' value", {"txnId": "a", "txnVersion": "x"}, "txnVersion"),
    "so many replicas": ("'a' value", {"commitDurability": "all"}, "commitDurability"),
    "a null header": ("'k1' key, 'a' value, map('h', binary(null)) headers", {}, "'h' is null in"),
    "a null value": ("cast(null as string) value", {}, "A value is null"),
    "a null stream": ("'a' value, cast(null as string) stream", {"stream": None}, "has no stream"),
    "a name that cannot be": ("'a' value, '.b' stream", {"stream": None}, "cannot be the name"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_written_is_refused_by_name_and_writes_nothing(
    spark: SparkSession, m: meteor.Client, url: str, what: str
) -> None:
    columns, options, words = REFUSED[what]
    frame = spark.sql(f"select {columns}")
    with pytest.raises(PySparkException) as caught:
        write(frame, url, **options)
    assert words in str(caught.value)
    assert m.redis.keys("*:log") == m.redis.keys("*stage*") == []


def test_a_row_that_cannot_be_written_keeps_the_others_back(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream
) -> None:
    frame = rows(spark, 0, 1000).selectExpr("if(value = '990', null, value) value")
    with pytest.raises(PySparkException, match="A value is null"):
        write(frame, url, txnId="t")
    assert contents(target) == ""
    write(rows(spark, 0, 10), url, txnId="t")
    assert contents(target) == numbers(10)


def test_a_stream_cannot_be_overwritten(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream, tmp_path: Path
) -> None:
    writer = rows(spark, 0, 10).write.format("meteor").option("url", url).option("stream", "s")
    with pytest.raises(AnalysisException, match="only ever appended to"):
        writer.mode("overwrite").save()
    source(m, 0, 10)
    counts = stream_of(spark, url, stream="source").groupBy("value").count().select("value")
    query = counts.writeStream.format("meteor").option("url", url).option("stream", "s")
    query = query.option("checkpointLocation", str(tmp_path)).outputMode("complete")
    with pytest.raises(PySparkException, match="only ever appended to"):
        query.trigger(availableNow=True).start().awaitTermination(END_S)
    assert contents(target) == ""


def test_a_query_with_a_wrong_option_is_refused_by_its_name(
    spark: SparkSession, m: meteor.Client, url: str, tmp_path: Path
) -> None:
    source(m, 0, 10)
    frame = stream_of(spark, url, stream="source").select("value")
    wrong = {"txnId": "a", "delivery": "never", "asyncProgressTrackingEnabled": "true"}
    for name, value in wrong.items():
        words = "async progress" if name.startswith("async") else name  # Spark sees to that one
        with pytest.raises(PySparkException, match=words):
            begin(frame, url, tmp_path, stream="s", **{name: value}).awaitTermination(END_S)
    assert m.redis.keys("*{s}*") == []


# Attempts of one task


class Task:
    """What a task knows of itself: the same for each of its attempts, after a restart even."""

    def __init__(self, batch: int) -> None:
        self._known = {"sql.streaming.queryId": "q", "streaming.sql.batchId": str(batch)}

    def getLocalProperty(self, name: str) -> str | None:
        return self._known.get(name)

    def partitionId(self) -> int:
        return 0

    def taskAttemptId(self) -> int:
        return 0

    def get(self) -> Task:
        return self


@pytest.fixture
def options(url: str, m: meteor.Client, monkeypatch: pytest.MonkeyPatch) -> SinkOptions:
    """Those of a task that is in this process; the column says where to."""
    schema = StructType([StructField("value", BinaryType()), StructField("stream", StringType())])
    options = parse_sink({"url": url}, schema, streaming=True)
    monkeypatch.setattr(type(options.server), "connect", lambda _: m)
    return options


def some(stream: str, size: int = 1) -> pa.RecordBatch:
    """Two rows of so many bytes."""
    return pa.RecordBatch.from_pydict({"value": [b"x" * size] * 2, "stream": [stream] * 2})


def test_a_task_that_fails_leaves_nothing_of_what_it_has_staged(
    options: SinkOptions, m: meteor.Client
) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        for stream in ("a", "b"):
            yield some(stream, MIB)
            assert len(m.redis.keys(f"*{{{stream}}}*stage*")) == 1, "it is sent by now"
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        stage_all(options, rows(), "q.0.0.x")
    assert m.redis.keys("*stage*") == []


def test_a_task_that_fails_says_why_though_it_cannot_clean_up(
    options: SinkOptions, m: meteor.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise meteor.ConnectionFailed("gone")

    def rows() -> Iterator[pa.RecordBatch]:
        yield some("a")
        monkeypatch.setattr(m, "call", refuse)
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        stage_all(options, rows(), "q.0.0.x")


def test_a_task_that_cannot_publish_to_one_stream_fails_when_the_others_have_their_rows(
    options: SinkOptions, m: meteor.Client
) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield some("a")
        eventually(lambda: m.stream("a").end().offset == 2, 10, "it is not published at once")
        m.stream("a").delete()
        yield some("a")
        yield some("b")

    with pytest.raises(meteor.MeteorError, match="'a'"):
        publish_all(options, rows())
    assert contents(m.stream("b", create=False)) == "x x"


def test_a_task_that_fails_while_it_publishes_says_why_and_not_what_came_of_it(
    options: SinkOptions, m: meteor.Client, caplog: pytest.LogCaptureFixture
) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield some("b")
        yield some("a")
        eventually(lambda: m.stream("a").end().offset == 2, 10, "it is not published at once")
        m.stream("a").delete()
        yield some("a")
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        publish_all(options, rows())
    assert "When a task of a query ended" in caplog.text
    assert contents(m.stream("b", create=False)) == "x x"


class Sink:
    """A query's sink, in this process."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch, **options: str) -> None:
        schema = StructType([StructField("value", BinaryType())])
        given = {"url": url, "stream": "s"} | options
        self.writer = writers.StreamWriter(parse_sink(given, schema, streaming=True))
        self._monkeypatch = monkeypatch

    def attempt(self, value: str, batch: int = 0) -> writers.Written:
        """One attempt of the only task of a batch, which writes two rows."""
        self._monkeypatch.setattr(writers, "TaskContext", Task(batch))
        arrow = pa.RecordBatch.from_pydict({"value": [value.encode()] * 2})
        written = self.writer.write(iter([arrow]))
        assert isinstance(written, writers.Written)
        return written


@pytest.fixture
def sink(
    url: str, m: meteor.Client, target: meteor.Stream, monkeypatch: pytest.MonkeyPatch
) -> Sink:
    monkeypatch.setattr(ServerOptions, "connect", lambda _: m)
    return Sink(url, monkeypatch)


def test_of_the_attempts_of_a_task_only_the_one_that_the_engine_counts_is_written(
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
    assert (again.stages, again.done) == ({}, True)  # nothing is staged for a batch that is done
    sink.writer.commit([again], 0)
    sink.writer.commit([sink.attempt("next", 1)], 1)
    assert contents(target) == "counted counted next next"


def test_a_batch_that_was_done_and_is_lost_by_a_fail_over_fails_and_is_written_when_asked_again(
    m: meteor.Client, target: meteor.Stream, sink: Sink
) -> None:
    sink.writer.commit([sink.attempt("x")], 0)
    done = sink.attempt("x")
    m.redis.delete(keys.fences("s"))  # the replica that is promoted now has not had it yet
    with pytest.raises(meteor.PublishError, match="the server has lost it"):
        sink.writer.commit([done], 0)
    m.redis.delete(keys.log("s"))
    m.redis.hset(keys.meta("s"), "next", 0)
    sink.writer.commit([sink.attempt("x")], 0)
    assert contents(target) == "x x"


def test_a_batch_older_than_the_last_is_refused_with_what_to_do_and_leaves_nothing(
    m: meteor.Client, target: meteor.Stream, sink: Sink
) -> None:
    early = sink.attempt("early", 4)
    sink.writer.commit([sink.attempt("x", 5)], 5)
    words = r"^Batch 4 of query q was not written: stream 's' has its batch 5 already"
    with pytest.raises(meteor.PublishError, match=words):
        sink.attempt("again", 4)
    with pytest.raises(meteor.PublishError, match=words):
        sink.writer.commit([early], 4)
    assert contents(target) == "x x"
    assert m.redis.keys("*stage*") == []


def test_a_commit_that_replicas_do_not_confirm_fails_and_is_done_when_asked_again(
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
    assert contents(target) == "x x", "it was in the log"
