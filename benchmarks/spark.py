"""Spark: throughput of the data source, and the cost of a micro-batch with little or no data.

Spark runs in a separate process, so that its JVM exits after the measurement. Each case alternates
with its peers in that process, so ratios compare figures from one run.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import redis

from benchmarks.common import CALL, Bench, Row, cheaper, connected, cut, faster, values_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_STREAM = "spark"
#: Number of distinct values, which are published repeatedly.
_VALUES = 500_000
#: Rows per batch of the in-memory peer, as in our source.
_BATCH = 65_536
#: Rows per partition, for our source and its peer.
_PARTITION = 500_000
#: Seconds between offset changes in a source without rows. A batch takes less time than this.
_PACE_S = 0.25
_STUCK_S = 600.0


def possible() -> bool:
    """Return whether Java is installed."""
    home = os.environ.get("JAVA_HOME")
    return Path(home, "bin", "java").exists() if home else shutil.which("java") is not None


def run(bench: Bench) -> list[Row]:
    count = bench.pick(2_000_000, 500_000)
    bench.clear()
    bench.step("publishing")
    with connected(bench.url) as client:
        stream = client.stream(_STREAM, capacity=count)
        calls = cut(values_of(min(_VALUES, count)), CALL)
        with stream.publisher() as pub:
            for number in range(count // CALL):
                pub.publish_many(calls[number % len(calls)])
        bench.step("running Spark")
        found = measured(bench, count)
    rows, micro, empty, idle = (found[part] for part in ("rows", "micro", "empty", "idle"))
    read = "read and discard"
    small = "a micro-batch of 1 row"
    none = "a micro-batch without rows"
    look = "an empty trigger"
    return [
        faster(f"Spark: {read}", rows["ours"], rows["memory"], "an in-memory source", 0.85),
        faster(f"Spark: {read}", rows["ours"], rows["parquet"], "Spark's Parquet source", 0.6),
        cheaper(f"Spark: {small}", "ms", micro["ours"], micro["nothing"], "a Python source", 1.15),
        cheaper(f"Spark: {small}", "ms", micro["ours"], micro["rate"], "Spark's rate source"),
        cheaper(f"Spark: {none}", "ms", empty["ours"], empty["nothing"], "a Python source", 1.15),
        cheaper(f"Spark: {none}", "ms", empty["ours"], empty["rate"], "Spark's rate source"),
        cheaper(f"Spark: {look}", "ms", idle["ours"], idle["nothing"], "a Python source", 1.2),
        cheaper(f"Spark: {look}", "ms", idle["ours"], idle["ping"], "a Python source with PING"),
        cheaper(f"Spark: {look}", "ms", idle["ours"], idle["rate"], "Spark's rate source"),
    ]


def measured(bench: Bench, count: int) -> dict[str, dict[str, float]]:
    """Return the figures that the Spark process measured."""
    with tempfile.TemporaryDirectory(prefix="meteor-bench-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.spark", bench.url, str(count), str(bench.quick)],
            cwd=Path(__file__).parents[1],
            env=os.environ | {"PYSPARK_PYTHON": sys.executable, "TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=_STUCK_S,
        )
    if done.returncode:
        raise RuntimeError(f"The Spark benchmark failed:\n{done.stderr}")
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- in the process with Spark -----------------------------------------------------------------


def main(url: str, count: int, quick: bool) -> None:
    spark = started()
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "rows": rows(spark, url, count, folder, 3 if quick else 7),
            "micro": micro_batches(spark, url, folder, 15 if quick else 60),
            "empty": empty_batches(spark, url, folder, 15 if quick else 60),
            "idle": looks(spark, url, folder),
        }
    spark.stop()
    print(json.dumps(found))


def started() -> SparkSession:
    from pyspark.sql import SparkSession

    cores = min(os.cpu_count() or 1, 4)
    return (
        SparkSession.builder.master(f"local[{cores}]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )


def rows(spark: SparkSession, url: str, count: int, folder: str, repeats: int) -> dict[str, float]:
    """Return each source's rows per second when every column is read and discarded."""
    from pyspark_meteor.source import MeteorDataSource

    spark.dataSource.register(memory_source())
    parquet = f"{folder}/rows.parquet"
    ours = spark.read.format("meteor").option("url", url).option("stream", _STREAM)
    options = {"rows": str(count), "partition": str(_PARTITION), "batch": str(_BATCH)}
    schema = MeteorDataSource({"stream": _STREAM}).schema()
    cases: dict[str, Callable[[], DataFrame]] = {
        "ours": ours.load,
        "memory": spark.read.format("memory_rows").schema(schema).options(**options).load,
        "parquet": lambda: spark.read.parquet(parquet),
    }
    ours.load().write.parquet(parquet)
    took: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 1):
        for name, load in cases.items():
            frame = load()
            start = time.perf_counter()
            frame.write.format("noop").mode("overwrite").save()
            if turn:  # the first turn is a warm-up
                took[name].append(time.perf_counter() - start)
        if not turn:
            assert cases["ours"]().count() == cases["memory"]().count() == count
    return {name: count / statistics.median(times) for name, times in took.items()}


def memory_source() -> Any:
    """Return a minimal Python source, which yields batches built beforehand."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    class Reader(DataSourceReader):
        def __init__(self, schema: Any, options: dict[str, str]) -> None:
            self.schema, self.options = schema, options

        def partitions(self) -> Sequence[InputPartition]:
            total, size = int(self.options["rows"]), int(self.options["partition"])
            return [InputPartition(min(size, total - at)) for at in range(0, total, size)]

        def read(self, partition: InputPartition) -> Iterator[Any]:
            from benchmarks.spark import made

            batch = made(self.schema, int(self.options["batch"]))
            left = partition.value
            while left:
                part = batch[:left]
                left -= part.num_rows
                yield part

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "memory_rows"

        def reader(self, schema: Any) -> DataSourceReader:
            return Reader(schema, dict(self.options.items()))

    return Source


_made: dict[int, pa.RecordBatch] = {}


def made(schema: Any, size: int) -> pa.RecordBatch:
    """Return a batch, built once per process, outside the measured time."""
    from pyspark.sql.pandas.types import to_arrow_schema

    if size not in _made:
        times = pa.array([1_794_836_508_123_000] * size, pa.timestamp("us", "UTC"))
        columns = {
            "stream": pa.array([_STREAM] * size),
            "offset": pa.array(range(size), pa.int64()),
            "timestamp": times,
            "appended": times,
            "key": pa.nulls(size, pa.binary()),
            "value": pa.array(values_of(size), pa.binary()),
        }
        wanted = to_arrow_schema(schema, timezone="UTC")
        arrays = [columns[name] for name in wanted.names]
        _made[size] = pa.RecordBatch.from_arrays(arrays, schema=wanted)
    return _made[size]


# -- cost of a micro-batch ---------------------------------------------------------------------


def micro_batches(spark: SparkSession, url: str, folder: str, wanted: int) -> dict[str, float]:
    """Return the median duration of a one-row micro-batch, in milliseconds, for each source."""
    spark.dataSource.register(nothing_source())
    stream = spark.readStream
    cases: dict[str, Callable[[], DataFrame]] = {
        "ours": stream.format("meteor").option("url", url).option("stream", _STREAM)
        .option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", "1").load,
        "nothing": stream.format("nothing").load,
        "rate": spark.readStream.format("rate-micro-batch").option("rowsPerBatch", "1").load,
    }  # fmt: skip

    def times(load: Callable[[], DataFrame], place: str) -> list[float]:
        return batch_times(load(), place, wanted // 3)

    took = in_turn({name: partial(times, load) for name, load in cases.items()}, f"{folder}/micro")
    return {name: statistics.median(times) for name, times in took.items()}


def empty_batches(spark: SparkSession, url: str, folder: str, wanted: int) -> dict[str, float]:
    """Return the median duration of a batch without rows, in milliseconds, for each source.

    Spark runs such a batch if offsets have moved. Our offsets move when a new, empty stream matches
    the pattern. The Python source moves its offsets as often. The rate source moves once a second,
    and ramps up too slowly to have rows.
    """
    rate = spark.readStream.format("rate").option("rowsPerSecond", "1").option("rampUpTime", "1h")
    pace = str(_PACE_S)

    def ours(place: str) -> list[float]:
        prefix = place.rpartition("/")[2]
        frame = stream_of(spark, url, streamsPattern=f"{prefix}-.*", startingOffsets="earliest")
        with connected(url) as client:

            def another() -> None:
                client.stream(f"{prefix}-{time.monotonic_ns()}", create=True)

            return batch_times(frame, place, wanted // 3, another, empty=True)

    def nothing(place: str) -> list[float]:
        source = spark.readStream.format("nothing").options(rows="0", pace=pace)
        return batch_times(source.load(), place, wanted // 3, empty=True)

    took = in_turn(
        {
            "ours": ours,
            "nothing": nothing,
            "rate": lambda place: batch_times(rate.load(), place, wanted // 6, empty=True),
        },
        f"{folder}/empty",
    )
    return {name: statistics.median(times) for name, times in took.items()}


def looks(spark: SparkSession, url: str, folder: str) -> dict[str, float]:
    """Return, for each source, the duration of a trigger that finds nothing and runs no batch.

    The durations are means in milliseconds. Medians would be too coarse, because Spark reports
    whole milliseconds.
    """
    interval = "spark.sql.streaming.noDataProgressEventInterval"
    spark.conf.set(interval, "0")  # otherwise Spark reports one empty trigger every ten seconds
    cases: dict[str, Callable[[], DataFrame]] = {
        "ours": lambda: stream_of(spark, url, stream=_STREAM, startingOffsets="latest"),
        "nothing": spark.readStream.format("nothing").option("pace", "1e9").load,
        "ping": spark.readStream.format("nothing").options(pace="1e9", ping=url).load,
        # One row per second: most triggers find none.
        "rate": spark.readStream.format("rate").option("rowsPerSecond", "1").load,
    }
    took = in_turn(
        {name: partial(look_times, load) for name, load in cases.items()}, f"{folder}/idle"
    )
    spark.conf.unset(interval)
    return {name: statistics.fmean(times) for name, times in took.items()}


def stream_of(spark: SparkSession, url: str, **options: str) -> DataFrame:
    return spark.readStream.format("meteor").option("url", url).options(**options).load()


def in_turn(cases: dict[str, Callable[[str], list[float]]], folder: str) -> dict[str, list[float]]:
    """Run the cases alternately, each with a new checkpoint, and drop the first turn as warm-up."""
    took: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(4):
        for name, times_at in cases.items():
            times = times_at(f"{folder}-{name}-{turn}")
            if turn:
                took[name] += times
    return took


def batch_times(
    frame: DataFrame,
    checkpoint: str,
    wanted: int,
    move: Callable[[], None] | None = None,
    *,
    empty: bool = False,
) -> list[float]:
    """Run a query for at least ``wanted`` batches after a warm-up; return their durations in ms.

    The first three batches are the warm-up.

    Args:
        move: Called every ``_PACE_S`` seconds to move the source's offset. None if the offset moves
            by itself.
        empty: Whether every batch must be empty. If not, every batch must have rows.
    """
    with running(frame, checkpoint) as query:
        moved = 0.0
        while (query.lastProgress or {"batchId": -1})["batchId"] < wanted + 3:
            check(query)
            if move is not None and time.monotonic() - moved >= _PACE_S:
                moved = time.monotonic()
                move()
            time.sleep(0.05)
        progress = [p for p in query.recentProgress if "addBatch" in p["durationMs"]]
    assert all((p["numInputRows"] == 0) is empty for p in progress)
    return [p["durationMs"]["triggerExecution"] for p in progress if p["batchId"] >= 3]


def look_times(load: Callable[[], DataFrame], checkpoint: str) -> list[float]:
    """Run a query until enough triggers have found nothing; return their durations in ms."""
    with running(load(), checkpoint) as query:
        while len(query.recentProgress) < 90:  # Spark keeps only the last 100
            check(query)
            time.sleep(0.2)
        progress = query.recentProgress[10:]
    empty = [p["durationMs"] for p in progress if "addBatch" not in p["durationMs"]]
    return [durations["triggerExecution"] for durations in empty]


@contextmanager
def running(frame: DataFrame, checkpoint: str) -> Iterator[StreamingQuery]:
    query = (
        frame.writeStream.format("noop")
        .option("checkpointLocation", checkpoint)
        .trigger(processingTime="0 seconds")
        .start()
    )
    try:
        yield query
    finally:
        query.stop()


def check(query: StreamingQuery) -> None:
    if not query.isActive:
        raise RuntimeError(f"The query failed: {query.exception()}")


def nothing_source() -> Any:
    """Return a Python streaming source that generates one row per batch.

    With ``rows=0``, it generates none. With ``pace``, its offset moves every ``pace`` seconds. With
    ``ping``, it sends a PING to the server at that URL whenever Spark asks for its latest offset.
    """
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

    class Reader(DataSourceStreamReader):
        def __init__(self, rows: int, pace_s: float, ping: str | None) -> None:
            self.rows, self.pace_s = rows, pace_s
            self.server = redis.Redis.from_url(ping) if ping else None

        def __getstate__(self) -> dict[str, Any]:
            return self.__dict__ | {"server": None}  # tasks do not need the client

        def initialOffset(self) -> dict[str, Any]:
            return {"at": self.now()}

        def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
            if self.server is not None:
                self.server.ping()
            return {"at": self.now() if self.pace_s else start["at"] + 1}

        def now(self) -> int:
            return int(time.monotonic() / self.pace_s) if self.pace_s else 0

        def partitions(
            self, start: dict[str, Any], end: dict[str, Any]
        ) -> Sequence[InputPartition]:
            return [InputPartition(start["at"])] * self.rows

        def read(self, partition: InputPartition) -> Iterator[Any]:
            import pyarrow as pa

            yield pa.RecordBatch.from_pydict({"at": pa.array([partition.value], pa.int64())})

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "nothing"

        def schema(self) -> str:
            return "at bigint"

        def streamReader(self, schema: Any) -> DataSourceStreamReader:
            options = self.options
            rows, pace_s = int(options.get("rows", "1")), float(options.get("pace", "0"))
            return Reader(rows, pace_s, options.get("ping"))

    return Source


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True")
