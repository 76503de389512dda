"""Spark reads streams as tables, by offset or time range, with all columns."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import meteor_py as meteor
from tests.support.readers import fill, later_than_all, value
from tests.support.stored_streams import archive
from tests.support.waiting import eventually

#: Seconds per test. On a loaded machine, starting Java may take most of this time.
pytestmark = pytest.mark.timeout(400)

MIB = 1024 * 1024


@pytest.fixture
def client(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


class Table:
    """Reads streams as tables, by default the stream ``orders``."""

    def __init__(self, spark: SparkSession, url: str) -> None:
        self._spark = spark
        self._url = url

    def load(self, **options: str | int) -> DataFrame:
        named = "streams" in options or "streamsPattern" in options
        given: dict[str, str | int] = {"url": self._url}
        if not named:
            given["stream"] = "orders"
        return self._spark.read.format("meteor").options(**given | options).load()

    def offsets(self, **options: str | int) -> list[int]:
        return sorted(row.offset for row in self.load(**options).select("offset").collect())

    def refusal(self, **options: str | int) -> str:
        with pytest.raises(PySparkException) as caught:
            self.load(**options).collect()
        return str(caught.value)


@pytest.fixture
def table(spark: SparkSession, url: str) -> Table:
    return Table(spark, url)


def test_columns_contain_the_published_values(table: Table, client: meteor.Client) -> None:
    stream = client.stream("orders", capacity=1000)
    large = bytes(range(256)) * (MIB // 256)
    with stream.publisher() as pub:
        pub.publish(b"", key=b"\xff\xfe", headers={"a": b"\x00\xff", "empty": b""}).result()
        pub.publish_many([large] * 20).result()
        pub.publish("ü".encode(), key=b"").result()
    frame = table.load(includeHeaders="true")
    assert frame.columns == ["stream", "offset", "timestamp", "key", "value", "appended", "headers"]
    rows = frame.orderBy("offset").collect()
    records = [record for batch in stream.read("earliest") for record in batch]
    assert len(rows) == len(records) == 22
    for row, record in zip(rows, records, strict=True):
        assert row.stream == "orders"
        assert row.offset == record.offset
        assert row.key == record.key
        assert row.value == record.value
        assert (row.headers or {}) == (record.headers or {})
    (row,) = table.load(endingOffsets='{"orders": 1}').selectExpr(
        "unix_millis(timestamp) as timestamp", "unix_millis(appended) as appended"
    ).collect()  # fmt: skip
    assert (row.timestamp, row.appended) == (records[0].timestamp, records[0].appended)

    # Invalid UTF-8 passes through unchanged, even though the column has the type string.
    text = table.load(valueFormat="string").where("offset in (0, 1, 21)")
    assert dict(text.dtypes)["value"] == "string"
    shown = text.orderBy("offset").selectExpr("cast(value as binary) as raw", "length(value) n")
    assert [row.raw for row in shown.collect()] == [b"", large, "ü".encode()]
    assert [row.n for row in shown.collect()][::2] == [0, 1]


def test_offset_or_time_range_is_read_from_store_and_ring(
    table: Table, client: meteor.Client, tmp_path: Path
) -> None:
    stream = client.stream("orders", capacity=50, store=tmp_path, archive=False)
    fill(stream, 50, 50)
    archive(stream)
    middle = eventually(lambda: later_than_all(stream), 10, "the clock did not advance")
    fill(stream, 50, 50)
    archive(stream)
    eventually(lambda: stream.describe().length < 200, 10, "the ring was not trimmed")
    assert table.offsets() == [*range(200)]
    found = table.load(startingOffsets='{"orders": 30}', endingOffsets="-20", minPartitions=4)
    assert found.rdd.getNumPartitions() == 4
    assert sorted((row.offset, bytes(row.value)) for row in found.collect()) == [
        (offset, value(offset)) for offset in range(30, 180)
    ]
    assert table.load(maxRecordsPerPartition=30).rdd.getNumPartitions() == 7
    assert table.offsets(startingOffsets="-5") == [*range(195, 200)]
    assert table.offsets(startingTimestamp=middle) == [*range(100, 200)]
    assert table.offsets(endingTimestamp=middle) == [*range(100)]
    iso = datetime.fromtimestamp(middle / 1000, UTC).isoformat()
    assert table.offsets(startingTimestamp=iso, endingOffsets='{"orders": 110}') == [
        *range(100, 110)
    ]
    assert table.offsets(startingOffsets="latest") == []


def test_several_streams_form_one_table_and_a_schema_selects_columns(
    spark: SparkSession, table: Table, client: meteor.Client, url: str
) -> None:
    for name, count in (("a", 3), ("b", 2), ("empty", 0), ("c", 1)):
        stream = client.stream(name, capacity=100)
        if count:
            fill(stream, count)
    counts = table.load(streams="a, b,empty").groupBy("stream").count().collect()
    assert {row["stream"]: row["count"] for row in counts} == {"a": 3, "b": 2}
    assert table.load(streamsPattern="a|c", endingOffsets='{"a": 1}').count() == 2
    assert table.load(streamsPattern="nothing").count() == 0
    assert table.load(streams="empty").count() == 0
    reader = spark.read.format("meteor").options(url=url)
    rows = reader.schema("value binary, offset bigint").load("b").orderBy("offset").collect()
    assert [tuple(row) for row in rows] == [(value(0), 0), (value(1), 1)]
    with pytest.raises(PySparkException, match="The schema has price int"):
        reader.schema("price int").load("b").collect()


def test_unreadable_range_fails_with_a_clear_error(table: Table, client: meteor.Client) -> None:
    assert "StreamNotFound" in table.refusal()
    stream = client.stream("orders", capacity=100)
    for _ in range(10):
        fill(stream, 100)
    first, end = stream.bounds()
    assert first
    error = table.refusal(startingOffsets='{"orders": 0}')
    assert "RecordsLost" in error
    assert f"0 to {first - 1}" in error
    lenient = table.offsets(startingOffsets='{"orders": 0}', failOnDataLoss="false")
    assert lenient == [*range(first, end)]
    assert "beyond the end" in table.refusal(startingOffsets='{"orders": 5000}')
    assert "group does not apply here" in table.refusal(group="g")
    assert "has no option 'startingoffset'" in table.refusal(startingOffset="earliest")
    assert "contradict each other" in table.refusal(endingOffsets="latest", endingTimestamp="1")
