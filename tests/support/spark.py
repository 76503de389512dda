"""One Spark for the tests of a worker, and queries on it.

    query = start(stream_of(spark, url, stream="orders"), tmp_path)
    assert offsets(spark, tmp_path) == [...]

Results are written to Parquet files, by which a query can be restarted from its checkpoint.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.support.java import SPARK_PYTHON

#: Seconds in which a query has to end: many times what it takes.
END_S = 100
#: The processes of the source inherit the environment that Java was started with.
PASSWORD_ENV = "METEOR_TEST_SPARK_PASSWORD"
PASSWORD = "geheim-4711"


@contextmanager
def session() -> Iterator[SparkSession]:
    """A Spark in a process of its own, which ends with it."""
    os.environ |= SPARK_PYTHON
    os.environ[PASSWORD_ENV] = PASSWORD
    builder = SparkSession.builder.master("local[2]").appName("meteor tests")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.codegen.wholeStage": "false",  # compiling costs more than the tests' records
        # Nor does Java live long enough for its best compiler to pay.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.sql.streaming.stopTimeout": "30s",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")  # queries fail on purpose here, at great length
    gateway = spark.sparkContext._gateway
    try:
        yield spark
    finally:
        with warnings.catch_warnings():
            # py4j leaves its sockets to the collector.
            warnings.simplefilter("ignore", ResourceWarning)
            spark.stop()
            if gateway is not None:
                gateway.shutdown()
                # Java ends when its input does: that of a worker of pytest-xdist ends late.
                gateway.proc.stdin.close()
                gateway.proc.wait(30)
        del os.environ[PASSWORD_ENV]


def stream_of(spark: SparkSession, url: str, **options: str | int) -> DataFrame:
    """A stream as Spark sees it, from its beginning unless told otherwise."""
    defaults: dict[str, str | int] = {"url": url, "startingOffsets": "earliest"}
    if "startingTimestamp" in options:
        del defaults["startingOffsets"]
    return spark.readStream.format("meteor").options(**defaults | options).load()


def start(frame: DataFrame, folder: Path, *, follow: bool = False) -> StreamingQuery:
    """Begin, or go on from the folder's checkpoint; ends with what is there unless it follows."""
    writer = frame.writeStream.format("parquet").option("path", str(folder / "rows"))
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    return (writer if follow else writer.trigger(availableNow=True)).start()


def run(frame: DataFrame, folder: Path) -> StreamingQuery:
    """Have all read that is there now."""
    query = start(frame, folder)
    assert query.awaitTermination(END_S), "the query does not end"
    return query


def failure(query: StreamingQuery) -> str:
    """What a query says that has to fail."""
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(END_S)
    return str(caught.value)


def offsets(spark: SparkSession, folder: Path) -> list[int]:
    """What the queries of a folder have brought there, sorted."""
    rows = spark.read.parquet(str(folder / "rows")).select("offset").collect()
    return sorted(row.offset for row in rows)


def batches(query: StreamingQuery) -> list[int]:
    """How many rows each micro-batch had, of those that had any."""
    return [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]]
