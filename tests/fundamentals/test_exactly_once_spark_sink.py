"""Exactly-once sink, in Spark: what ``df.writeStream`` writes is in the stream exactly once.

Spark runs a micro-batch again if the driver dies before it has noted that the batch was committed.
The stream knows the batch by the query and its number, so the repeated batch adds nothing.
"""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

import meteor_py as meteor
from tests.fundamentals.reading import numbers, publish
from tests.spark import END_S


def test_micro_batch_that_spark_repeats_appears_once(
    spark: SparkSession, m: meteor.Client, url: str, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"

    def run_query() -> None:
        """Copy all that is new in the stream "source" to the stream "results"."""
        source = spark.readStream.format("meteor").option("url", url).option("stream", "source")
        sink = source.load().select("value").writeStream.format("meteor").option("url", url)
        sink = sink.option("stream", "results").option("checkpointLocation", str(checkpoint))
        assert sink.trigger(availableNow=True).start().awaitTermination(END_S)

    results = m.stream("results")
    publish(m.stream("source"), range(100))
    run_query()
    for note in (checkpoint / "commits").glob("*0*"):  # as if the driver had died just before
        note.unlink()
    run_query()
    assert numbers(results) == list(range(100))
    publish(m.stream("source"), range(100, 150))
    run_query()
    assert numbers(results) == list(range(150))
