"""The data source works with Spark's SQL, output modes, filters, listeners and joins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr
from pyspark.sql.types import StructType

import meteor_py as meteor
from pyspark_meteor.listener import Lag, LagListener
from tests.support.readers import fill
from tests.support.spark import END_S, failure, start, stream_of
from tests.support.transactions import contents
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def m(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


# Tables and views


def test_temporary_views_can_be_read_and_written(
    spark: SparkSession, url: str, m: meteor.Client
) -> None:
    fill(m.stream("orders", capacity=1000), 100)
    given = f"USING meteor OPTIONS (url '{url}', stream '%s')"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW all_columns {given % 'orders'}")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW offsets(offset bigint) {given % 'orders'}")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW copy(value binary) {given % 'copy'}")
    counts = "SELECT count(*), max(offset) FROM"
    assert tuple(*spark.sql(f"{counts} all_columns").collect()) == (100, 99)
    assert tuple(*spark.sql(f"{counts} offsets").collect()) == (100, 99)
    spark.sql("INSERT INTO copy SELECT cast('x' as binary)")
    assert contents(m.stream("copy", create=False)) == "x"


def test_create_table_is_refused_with_a_suggestion(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = f"USING meteor OPTIONS (url '{url}', stream 'orders')"
    with pytest.raises(AnalysisException, match="Use CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE orders {given}")
    spark.sql(f"CREATE TABLE orders(offset bigint) {given}")
    try:
        with pytest.raises(AnalysisException, match="Use CREATE TEMPORARY VIEW"):
            spark.sql("SELECT * FROM orders").collect()
    finally:
        spark.sql("DROP TABLE orders")


def test_empty_schema_counts_all_rows(spark: SparkSession, url: str, m: meteor.Client) -> None:
    fill(m.stream("orders", capacity=10_000), *[100] * 20)
    reader = spark.read.format("meteor").option("url", url).schema(StructType([]))
    assert reader.load("orders").count() == 2000


# Output modes


def test_update_mode_in_foreach_batch_writes_exactly_once(
    spark: SparkSession, url: str, m: meteor.Client, tmp_path: Path
) -> None:
    stream, target = m.stream("orders", capacity=1000), m.stream("totals", capacity=1000)

    def write(rows: DataFrame, number: int) -> None:
        writer = rows.write.format("meteor").options(url=url, stream="totals")
        for _ in range(2):  # as after a crash between this write and Spark's commit
            writer.options(txnId="totals", txnVersion=number).mode("append").save()

    def run() -> None:
        totals = stream_of(spark, url, stream="orders").groupBy("stream").count()
        rows = totals.selectExpr("stream AS key", "cast(count AS string) AS value")
        writer = rows.writeStream.outputMode("update").foreachBatch(write)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        assert writer.trigger(availableNow=True).start().awaitTermination(END_S)

    fill(stream, 10)
    run()
    fill(stream, 5)
    run()
    assert contents(target) == "10 15"


# Filters


def test_filters_in_one_query_do_not_affect_another_on_the_same_frame(
    spark: SparkSession, url: str, m: meteor.Client
) -> None:
    fill(m.stream("orders", capacity=1000), 100)
    setting = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(setting, "true")
    try:
        frame = spark.read.format("meteor").option("url", url).load("orders")
        assert frame.where("offset = 7").count() == 1
        assert frame.count() == 100
        assert frame.where("offset = 5").union(frame.where("offset = 6")).count() == 2
    finally:
        spark.conf.unset(setting)


# Lag


def test_listener_reports_the_lag_after_each_batch(
    spark: SparkSession, url: str, m: meteor.Client, tmp_path: Path
) -> None:
    fill(m.stream("orders", capacity=1000), 100)
    fill(m.stream("audit", capacity=1000), 10)
    found: list[Lag] = []
    listener = LagListener(found.append)
    spark.streams.addListener(listener)
    try:
        given: dict[str, str | int] = {"streams": "orders,audit", "maxOffsetsPerTrigger": 55}
        query = start(stream_of(spark, url, **given), tmp_path, follow=True)
        query.processAllAvailable()
        eventually(lambda: found and found[-1].records == 0, 20, "the lag was not reported")
        assert listener.lags[str(query.id)] == found[-1]
        query.stop()
        eventually(lambda: not listener.lags, 20, "the lag was not forgotten")
    finally:
        spark.streams.removeListener(listener)
    records = [lag.records for lag in found]
    assert records == sorted(records, reverse=True)
    assert len({*records}) >= 3
    assert found[0].streams == {"orders": 100, "audit": 10}


# Groups


def test_second_load_for_a_group_in_one_query_raises_a_clear_error(
    spark: SparkSession, url: str, m: meteor.Client, tmp_path: Path
) -> None:
    stream = m.stream("orders", capacity=1000)
    fill(stream, 10)

    def load(group: str) -> DataFrame:
        return stream_of(spark, url, stream="orders", group=group)

    def join(one: DataFrame, other: DataFrame) -> DataFrame:
        left, right = one.selectExpr("offset AS a"), other.selectExpr("offset AS b")
        return left.join(right, expr("a = b")).selectExpr("a AS offset")

    error = failure(start(join(load("g"), load("g")), tmp_path / "same"))
    assert "GroupActive" in error
    assert "Each load() is a separate member, even within one query" in error
    once = load("once")
    for name, joined in (("once", join(once, once)), ("two", join(load("h"), load("i")))):
        query = start(joined, tmp_path / name)
        assert query.awaitTermination(END_S)
        assert spark.read.parquet(str(tmp_path / name / "rows")).count() == 10
