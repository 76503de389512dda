"""What Spark writes to a stream is there exactly once, and what it cannot write is said."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col
from pyspark.sql.streaming.query import StreamingQuery

import meteor_py as meteor
from meteor_py.records.config import OFFSET_MAX
from meteor_py.redis import keys
from tests.support.spark import END_S, batches, failure, stream_of
from tests.support.transactions import contents, lasting, numbers


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
    m.redis.hset(keys.meta("s"), "next", OFFSET_MAX - 450)
    frame = stream_of(spark, url, stream="source").select("value")
    assert "used up its offsets" in failure(begin(frame, url, tmp_path, stream="s"))
    (fence,) = m._connector.call("HVALS", keys.fences("s"))
    assert fence == b"0:4:10:1000"
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


def test_a_batch_write_without_a_txn_id_that_fails_leaves_nothing_but_its_records(
    spark: SparkSession, m: meteor.Client, url: str
) -> None:
    target = m.stream("s", capacity=100)  # frames of as many
    m.redis.hset(keys.meta("s"), "next", OFFSET_MAX - 450)
    before = lasting(target)
    with pytest.raises(PySparkException, match="used up its offsets"):
        write(rows(spark, 0, 1000), url)
    assert m.redis.xlen(keys.log("s")) > 0
    assert set(m.redis.keys("*")) == before | {keys.log("s").encode()}


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
    "a capacity of nothing": ("'a' value", {"capacity": "0"}, "capacity is a number from 1 on"),
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
