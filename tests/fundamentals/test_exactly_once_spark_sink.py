"""Exactly-once sink, in Spark: each row from ``df.writeStream`` is in the stream exactly once.

Spark repeats a micro-batch if the driver dies before it has recorded the commit. The stream
identifies the batch by its query and number, so the repeated batch adds nothing.
"""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import meteor_py as meteor
from tests.fundamentals.reading import numbers, publish
from tests.support.spark import END_S, batches, stream_of


def test_micro_batch_that_spark_repeats_appears_once(
    spark: SparkSession, m: meteor.Client, url: str, tmp_path: Path
) -> None:
    checkpoint, results = tmp_path / "checkpoint", m.stream("results", create=True)
    publish(m.stream("source", create=True), range(100))

    def run_query() -> StreamingQuery:
        """Copy all new records from the stream "source" to the stream "results"."""
        sink = stream_of(spark, url, stream="source").select("value").writeStream.format("meteor")
        sink = sink.option("url", url).option("stream", "results")
        sink = sink.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        query = sink.start()
        assert query.awaitTermination(END_S), "the query did not end"
        return query

    run_query()
    # Delete Spark's notes of its commits, as if the driver had died before it wrote them.
    for note in (checkpoint / "commits").iterdir():
        note.unlink()
    publish(m.stream("source", create=True), range(100, 150))
    assert batches(run_query()) == [100, 50]  # repeats the first batch, then runs another
    assert numbers(results) == list(range(150))
