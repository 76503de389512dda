"""A Spark session that the tests in a worker share, and queries on it.

    query = start(stream_of(spark, url, stream="orders"), tmp_path)
    assert offsets(spark, tmp_path) == [...]

Queries write their rows to Parquet files, so that they can restart from a checkpoint.
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

#: Seconds within which a query must end: many times longer than it needs.
END_S = 100
#: Environment variable with the password. It must be set before Java starts, because Spark's Python
#: processes inherit the environment of Java.
PASSWORD_ENV = "METEOR_TEST_SPARK_PASSWORD"
PASSWORD = "geheim-4711"


@contextmanager
def session() -> Iterator[SparkSession]:
    """Start a Spark session with two cores that tries each task at most twice."""
    os.environ |= SPARK_PYTHON
    os.environ[PASSWORD_ENV] = PASSWORD
    builder = SparkSession.builder.master("local[2,2]").appName("meteor tests")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.codegen.wholeStage": "false",  # compiling a query takes longer than running it
        # Java does not run long enough here for its optimising compiler to pay off.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.sql.streaming.stopTimeout": "30s",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")  # queries that fail on purpose would log a lot
    gateway = spark.sparkContext._gateway
    try:
        yield spark
    finally:
        with warnings.catch_warnings():
            # py4j leaves its sockets to the garbage collector.
            warnings.simplefilter("ignore", ResourceWarning)
            spark.stop()
            if gateway is not None:
                gateway.shutdown()
                # Java exits when its input is closed; pytest-xdist would close it too late.
                gateway.proc.stdin.close()
                gateway.proc.wait(30)
        del os.environ[PASSWORD_ENV]


def stream_of(spark: SparkSession, url: str, **options: str | int) -> DataFrame:
    """Return a stream as a streaming DataFrame, by default from its beginning."""
    defaults: dict[str, str | int] = {"url": url, "startingOffsets": "earliest"}
    if "startingTimestamp" in options:
        del defaults["startingOffsets"]
    return spark.readStream.format("meteor").options(**defaults | options).load()


def start(frame: DataFrame, folder: Path, *, follow: bool = False) -> StreamingQuery:
    """Start a query, or continue from the folder's checkpoint.

    Without ``follow``, the query ends when it has read all records that exist now.
    """
    writer = frame.writeStream.format("parquet").option("path", str(folder / "rows"))
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    return (writer if follow else writer.trigger(availableNow=True)).start()


def run(frame: DataFrame, folder: Path) -> StreamingQuery:
    """Run a query that reads all records that exist now."""
    query = start(frame, folder)
    assert query.awaitTermination(END_S), "the query did not end"
    return query


def failure(query: StreamingQuery) -> str:
    """Return the error from a query that must fail."""
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(END_S)
    return str(caught.value)


def offsets(spark: SparkSession, folder: Path) -> list[int]:
    """Return the offsets that the queries in a folder have written, sorted."""
    rows = spark.read.parquet(str(folder / "rows")).select("offset").collect()
    return sorted(row.offset for row in rows)


def batches(query: StreamingQuery) -> list[int]:
    """Return the number of rows in each micro-batch that had any."""
    return [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]]


def forget_last_commit(folder: Path) -> None:
    """Remove Spark's record of its last commit, as if the driver had died just before."""
    commits = folder / "checkpoint" / "commits"
    names = [path.name for path in commits.iterdir() if path.name.isdigit()]
    last = max(names, key=int)
    (commits / last).unlink()
    # Spark writes the checksum last, so it may still be missing.
    (commits / f".{last}.crc").unlink(missing_ok=True)
