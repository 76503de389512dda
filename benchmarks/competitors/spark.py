"""How fast Spark reads from our source, from its own Kafka source, and from Parquet files."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import values_of
from benchmarks.competitors.systems.kafka import Kafka
from benchmarks.competitors.systems.ours import Meteor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BATCHES = range(3, 33)
_QUERY_S = 120.0


@contextmanager
def session(libraries: Path) -> Iterator[SparkSession]:
    """Yield a local Spark session with two cores and Spark's Kafka source."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    jars = ",".join(str(path) for path in sorted(libraries.glob("*.jar")))
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", jars)
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "2g")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    try:
        yield spark
    finally:
        spark.stop()


def read_rows(
    spark: SparkSession, ours: Meteor, kafka: Kafka, count: int, rounds: int
) -> dict[str, float]:
    """Return the median rows per second when all columns are read into the noop sink."""
    meteor_options, kafka_options = (_options(_fill(system, count)) for system in (ours, kafka))
    with tempfile.TemporaryDirectory(prefix="competitors-") as folder:
        spark.read.format("meteor").options(**meteor_options).load().write.parquet(f"{folder}/p")
        cases: dict[str, Callable[[], DataFrame]] = {
            "meteor_py": lambda: spark.read.format("meteor").options(**meteor_options).load(),
            "Spark's Kafka source, minPartitions 2": lambda: (
                spark.read.format("kafka").options(**kafka_options, minPartitions="2").load()
            ),
            "Spark's own Parquet": lambda: spark.read.parquet(f"{folder}/p"),
        }
        found: dict[str, list[float]] = {name: [] for name in cases}
        for turn in range(rounds + 1):
            for name, load in cases.items():
                frame = load()
                if turn == 0 and (rows := frame.count()) != count:
                    raise RuntimeError(f"{name} has {rows} rows instead of {count}.")
                began = time.monotonic()
                frame.write.format("noop").mode("overwrite").save()
                if turn:  # the first round is a warm-up
                    found[name].append(count / (time.monotonic() - began))
    return {name: statistics.median(rates) for name, rates in found.items()}


def micro_batches(spark: SparkSession, ours: Meteor, kafka: Kafka, rounds: int) -> dict[str, float]:
    """Return the median duration of a one-row micro-batch, in milliseconds."""
    systems = {"meteor_py": _fill(ours, 10_000), "Spark's Kafka source": _fill(kafka, 10_000)}
    found: dict[str, list[float]] = {name: [] for name in systems}
    with tempfile.TemporaryDirectory(prefix="competitors-") as folder:
        for turn in range(rounds + 1):
            for name, system in systems.items():
                took = _one_row_batches(spark, system, f"{folder}/{name}{turn}")
                if turn:
                    found[name].append(took)
    return {name: statistics.median(times) for name, times in found.items()}


def _one_row_batches(spark: SparkSession, system: Meteor | Kafka, checkpoint: str) -> float:
    source = "meteor" if isinstance(system, Meteor) else "kafka"
    limits = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "1"}
    query = (
        spark.readStream.format(source)
        .options(**_options(system), **limits)
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", checkpoint)
        .trigger(processingTime="0 seconds")
        .start()
    )
    try:
        deadline = time.monotonic() + _QUERY_S
        while (query.lastProgress or {"batchId": -1})["batchId"] < _BATCHES.stop:
            if not query.isActive or time.monotonic() > deadline:
                raise RuntimeError(f"The query on {system.name} stopped: {query.exception()}")
            time.sleep(0.1)
        return statistics.median(
            float(progress["durationMs"]["triggerExecution"])
            for progress in query.recentProgress
            if progress["batchId"] in _BATCHES and progress["numInputRows"] == 1
        )
    finally:
        query.stop()


def _fill(system: Meteor | Kafka, count: int) -> Meteor | Kafka:
    fresh = system.fresh()
    publisher = fresh.publisher()
    publisher.send_bulk(values_of(count))
    publisher.close()
    return fresh


def _options(system: Meteor | Kafka) -> dict[str, str]:
    if isinstance(system, Meteor):
        return {"url": system.url, "stream": "bench"}
    return {"kafka.bootstrap.servers": system.servers, "subscribe": system.topic}
