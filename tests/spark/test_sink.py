"""Rows that Spark writes are in the stream exactly once. Errors name invalid rows and options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, udf
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

import meteor_py as meteor
from meteor_py.publish.transaction import StageOwner
from meteor_py.records.config import OFFSET_MAX
from meteor_py.redis import keys
from pyspark_meteor.sink_options import parse_sink
from pyspark_meteor.writing import stage_all
from tests.support.spark import END_S, batches, failure, forget_last_commit, stream_of
from tests.support.spark_engine import own_process
from tests.support.transactions import contents, lasting, numbers


@pytest.fixture
def m(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


@pytest.fixture
def target(m: meteor.Client) -> meteor.Stream:
    return m.stream("s", capacity=100_000)


def source(m: meteor.Client, first: int, last: int) -> None:
    """Publish the numbers from ``first`` to ``last - 1``, for a query to copy."""
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
    """Copy new records from the source, in micro-batches of at most 1000."""
    frame = stream_of(spark, url, stream="source", maxOffsetsPerTrigger=1000, minPartitions=2)
    query = begin(frame.select("value"), url, folder, **{"stream": "s"} | options)
    assert query.awaitTermination(END_S), "the query did not end"
    return query


@contextmanager
def arrow_batches_of(spark: SparkSession, count: int) -> Iterator[None]:
    """Make Spark pass rows to Python in batches of at most ``count``."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    spark.conf.set(name, count)
    try:
        yield
    finally:
        spark.conf.unset(name)


def rows(spark: SparkSession, first: int, last: int, partitions: int = 3) -> DataFrame:
    return spark.range(first, last, 1, partitions).select(col("id").cast("string").alias("value"))


def write(frame: DataFrame, url: str, **options: Any) -> None:
    options = {"url": url, "stream": "s"} | options
    given = {name: value for name, value in options.items() if value is not None}
    frame.write.format("meteor").options(**given).mode("append").save()


# Queries


def test_query_writes_every_row_once_even_if_a_batch_is_repeated(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream, tmp_path: Path
) -> None:
    source(m, 0, 2500)
    before = lasting(target)
    assert batches(copy(spark, url, tmp_path / "a")) == [1000, 1000, 500]
    assert contents(target) == numbers(2500)
    assert lasting(target) - before == {keys.log("s").encode(), keys.fences("s").encode()}
    forget_last_commit(tmp_path / "a")
    source(m, 2500, 2800)
    assert batches(copy(spark, url, tmp_path / "a")) == [500, 300]
    assert contents(target) == numbers(2800)
    assert m.redis.keys("*stage*") == m.redis.keys("*plan*") == []
    copy(spark, url, tmp_path / "b")  # a query with another checkpoint is another writer
    assert contents(target) == f"{numbers(2800)} {numbers(2800)}"


@pytest.mark.single_server("the tasks look up keys with a client for one server")
def test_rows_from_a_retried_task_are_written_once(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream, tmp_path: Path
) -> None:
    width = 2000  # the rows are large, so a task sends some before it has read all
    with m.stream("source", capacity=100_000).publisher() as pub:
        for start in range(0, 3000, 500):
            pub.publish_many([b"%0*d" % (width, i) for i in range(start, start + 500)])
    stages, index = keys.stage("s", "*.PART.*"), keys.stages("s", "*")

    def fail_once(value: bytes) -> bytes:
        """Fail the first attempt of each task once some of its rows are staged."""
        import time

        import redis
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is not None and int(value) % 1500 == 1490 and not context.attemptNumber():
            with redis.Redis.from_url(url) as plain:
                while not plain.keys(stages.replace("PART", str(context.partitionId()))):
                    time.sleep(0.01)
                for listed in plain.keys(index):
                    plain.sadd("runs", *plain.hvals(listed))
            raise RuntimeError("The first attempt fails.")
        return value

    frame = stream_of(spark, url, stream="source", minPartitions=2)
    frame = frame.select(udf(fail_once, "binary", useArrow=False)("value").alias("value"))
    with arrow_batches_of(spark, 100):
        query = begin(frame, url, tmp_path, stream="s")
        assert query.awaitTermination(END_S)
    assert list(map(int, contents(target).split())) == list(range(3000))
    assert m.redis.keys("*stage*") == [], "stages of failed attempts remain"
    assert m.redis.smembers("runs") == {f"1:{query.runId}".encode()}


def test_commit_that_fails_halfway_is_finished_by_the_restarted_query(
    spark: SparkSession, m: meteor.Client, url: str, tmp_path: Path
) -> None:
    # The engine aborts the batch, which must not delete frames from a commit that has begun.
    target = m.stream("s", capacity=100)  # frames of 100 records
    source(m, 0, 1000)
    m.redis.hset(keys.meta("s"), "next", OFFSET_MAX - 450)
    frame = stream_of(spark, url, stream="source").select("value")
    assert "offsets" in failure(begin(frame, url, tmp_path, stream="s"))
    (fence,) = m._connector.call("HVALS", keys.fences("s"))
    assert fence == b"1:4:10:1000"
    m.redis.delete(keys.log("s"))
    m.redis.hset(keys.meta("s"), mapping={"next": 0, "capacity": 100_000})
    copy(spark, url, tmp_path)
    assert contents(target) == " ".join(map(str, range(400, 1000)))


def test_empty_batches_write_nothing(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream, tmp_path: Path
) -> None:
    source(m, 0, 1500)
    frame = stream_of(spark, url, stream="source", maxOffsetsPerTrigger=1000).select("value")
    query = begin(frame.where("cast(value as string) = '1200'"), url, tmp_path, stream="s")
    assert query.awaitTermination(END_S)
    assert contents(target) == "1200"
    write(rows(spark, 0, 0), url)
    assert contents(target) == "1200"


def test_at_least_once_delivery_leaves_no_fence(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream, tmp_path: Path
) -> None:
    source(m, 0, 1500)
    copy(spark, url, tmp_path, delivery="atLeastOnce")
    assert sorted(map(int, contents(target).split())) == list(range(1500))
    assert not m.redis.exists(keys.fences("s"))


# Batch writes


def test_batch_write_with_a_txn_id_happens_once_per_version(
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


def test_batch_write_without_a_txn_id_happens_each_time_and_leaves_no_fence(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream
) -> None:
    write(rows(spark, 0, 100), url)
    rows(spark, 100, 200).write.format("meteor").option("url", url).mode("append").save("s")
    assert contents(target) == numbers(200)
    assert not m.redis.exists(keys.fences("s"))


def test_failed_batch_write_without_a_txn_id_leaves_nothing_but_its_records(
    spark: SparkSession, m: meteor.Client, url: str
) -> None:
    target = m.stream("s", capacity=100)  # frames of 100 records
    m.redis.hset(keys.meta("s"), "next", OFFSET_MAX - 450)
    before = lasting(target)
    with pytest.raises(PySparkException, match="offsets"):
        write(rows(spark, 0, 1000), url)
    assert m.redis.xlen(keys.log("s")) > 0
    assert set(m.redis.keys("*")) == before | {keys.log("s").encode()}


def test_stream_column_names_the_target_of_each_row(
    spark: SparkSession, m: meteor.Client, url: str
) -> None:
    columns = "cast(id as string) value", "cast(id % 2 as string) stream"
    frame = spark.range(0, 1000, 1, 3).selectExpr(*columns)
    for _ in range(2):
        write(frame, url, stream=None, txnId="t")
    assert contents(m.stream("0", create=False)) == " ".join(map(str, range(0, 1000, 2)))
    assert contents(m.stream("1", create=False)) == " ".join(map(str, range(1, 1000, 2)))
    write(frame, url, stream="s", txnId="t")  # the option overrides the column
    assert contents(m.stream("s", create=False)) == numbers(1000)


def test_keys_headers_and_times_come_from_the_columns(
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


# Refused writes


def columns(ddl: str) -> StructType:
    schema = StructType.fromDDL(ddl)
    assert isinstance(schema, StructType)
    return schema


@pytest.mark.usefixtures("spark")  # Spark parses the schema
@pytest.mark.parametrize(
    ("schema", "options", "words"),
    [
        ("value string, extra int", {}, "Cannot write column extra of type int to a stream"),
        ("value int", {}, "Cannot write column value of type int to a stream"),
        ("key string", {}, "A record needs a value"),
        ("value string", {"stream": None}, "No target stream is set"),
        ("value string", {"other": "x"}, "no option 'other'"),
        ("value string", {"delivery": "atLeastOnce"}, "delivery does not apply here"),
        ("value string", {"txnVersion": "2"}, "Set txnId as well"),
        ("value string", {"path": "t"}, "Set it only once"),
        ("value string", {"txnId": "a", "txnVersion": "x"}, "txnVersion must be from 0"),
        ("value string", {"capacity": "0"}, "capacity must be from 1"),
        ("value string", {"commitDurability": "all"}, "commitDurability must be from 0"),
        ("value string", {"streaming": True, "txnId": "a"}, "txnId does not apply here"),
        ("value string", {"streaming": True, "delivery": "never"}, "delivery must be one of"),
        (
            "value string",
            {"streaming": True, "asyncProgressTrackingEnabled": "true"},
            "asyncProgressTrackingEnabled",
        ),
    ],
)
def test_error_names_the_invalid_option_or_column(
    schema: str, options: dict[str, Any], words: str
) -> None:
    given = {"stream": "s"} | options
    streaming = given.pop("streaming", False)
    given = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(ValueError, match=words):
        parse_sink(given, columns(schema), streaming=streaming)


@pytest.mark.usefixtures("spark")  # Spark parses the schema
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"value": "a", "headers": [("h", None)], "key": b"k1"}, "'h' is null .* key b'k1'"),
        ({"value": None}, "A value is null"),
        ({"value": "a", "stream": None}, "A row has no stream"),
        ({"value": "a", "stream": ".b"}, "'.b'"),
    ],
)
def test_invalid_row_fails_its_task_and_stages_nothing(
    m: meteor.Client, url: str, row: dict[str, Any], words: str
) -> None:
    kinds = {"headers": pa.map_(pa.string(), pa.binary()), "key": pa.binary()}
    arrays = {name: pa.array([value], kinds.get(name, pa.string())) for name, value in row.items()}
    named = {} if "stream" in row else {"stream": "s"}
    schema = columns("value string" if named else "value string, stream string")
    options = parse_sink({"url": url} | named, schema, streaming=False)
    with own_process(), pytest.raises(ValueError, match=words):
        stage_all(
            options,
            iter([pa.RecordBatch.from_pydict(arrays)]),
            "q.0.0.x",
            StageOwner("q", 0, "run"),
        )
    assert m.redis.keys("*:log") == m.redis.keys("*stage*") == []


def test_invalid_row_prevents_the_whole_write(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream
) -> None:
    frame = rows(spark, 0, 1000).selectExpr("if(value = '990', null, value) value")
    with pytest.raises(PySparkException, match="A value is null"):
        write(frame, url, txnId="t")
    assert contents(target) == ""
    write(rows(spark, 0, 10), url, txnId="t")
    assert contents(target) == numbers(10)


def test_overwriting_and_wrong_options_fail_with_a_clear_error(
    spark: SparkSession, m: meteor.Client, url: str, target: meteor.Stream, tmp_path: Path
) -> None:
    with pytest.raises(PySparkException, match="Cannot write column extra of type int to a stream"):
        write(spark.sql("select 'a' value, 1 extra"), url)
    writer = rows(spark, 0, 10).write.format("meteor").option("url", url).option("stream", "s")
    with pytest.raises(AnalysisException, match="append-only"):
        writer.mode("overwrite").save()
    source(m, 0, 10)
    values = stream_of(spark, url, stream="source").select("value")
    counts = values.groupBy("value").count().select("value")
    query = counts.writeStream.format("meteor").option("url", url).option("stream", "s")
    query = query.option("checkpointLocation", str(tmp_path / "a")).outputMode("complete")
    with pytest.raises(PySparkException, match="append-only"):
        query.trigger(availableNow=True).start().awaitTermination(END_S)
    with pytest.raises(PySparkException, match="async progress"):  # Spark itself refuses this mode
        begin(values, url, tmp_path, stream="s", asyncProgressTrackingEnabled="true")
    assert contents(target) == ""
