"""A Spark program that copies one stream to another, for tests that kill it.

    with Copy(url, folder, rows_per_batch=100, follow=True) as copy:
        ...
        copy.kill()

It continues from the checkpoint in its folder. Without ``follow``, it ends when it has copied all
records.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import meteor_py as meteor
from tests.support.java import SPARK_ENVIRONMENT, SPARK_PYTHON
from tests.support.waiting import eventually

SOURCE, TARGET = "source", "target"
#: Seconds within which the program must end: many times longer than it needs, for loaded machines.
END_S = 100


def fill(m: meteor.Client, count: int, first: int = 0) -> None:
    """Publish the numbers to copy, from ``first`` up to but not including ``count``.

    The difference must be a multiple of 500.
    """
    with m.stream(SOURCE, capacity=100_000).publisher() as pub:
        for start in range(first, count, 500):
            pub.publish_many([b"%d" % i for i in range(start, start + 500)])


class Copy:
    """The Spark program in a separate process, which has its own Java process."""

    def __init__(
        self, url: str, folder: Path, *, python: Path | None = None, **orders: Any
    ) -> None:
        """Start the program. ``python`` replaces the interpreter of Spark's workers."""
        folder.mkdir(exist_ok=True)
        self._log = folder / "log"
        orders = {"url": url, "folder": str(folder)} | orders
        environment = os.environ | SPARK_ENVIRONMENT | SPARK_PYTHON
        if python is not None:
            environment["METEOR_TEST_PYTHON"] = str(python)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.spark_copy", json.dumps(orders)],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # so that kill() ends its Java process too
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill the driver and its Java process. The Python workers notice and exit."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    @property
    def failed(self) -> bool:
        """Whether the program has ended with an error."""
        return bool(self._process.poll())

    def wait(self) -> None:
        """Wait until the program has ended; check that it succeeded."""
        assert self._process.wait(END_S) == 0, self._log.read_text()[-5000:]

    def wait_until(self, condition: Any, message: str) -> None:
        """Wait for a condition while the program runs."""

        def met() -> bool:
            assert self._process.poll() is None, self._log.read_text()[-5000:]
            return bool(condition())

        eventually(met, END_S, message)


# The copying process


def run(
    url: str,
    folder: str,
    rows_per_batch: int,
    master: str = "local[2]",
    follow: bool = False,
) -> None:
    """Copy the source to the target."""
    import pyspark
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.codegen.wholeStage", "false")
    builder = builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    builder = builder.config("spark.driver.memory", "512m").config("spark.executor.memory", "512m")
    # A local cluster has only two executors: start after a second, instead of waiting for others.
    builder = builder.config("spark.scheduler.maxRegisteredResourcesWaitingTime", "1s")
    spark = builder.getOrCreate()
    reader = spark.readStream.format("meteor").option("url", url).option("stream", SOURCE)
    reader = reader.option("startingOffsets", "earliest").option("minPartitions", 2)
    rows = reader.option("maxOffsetsPerTrigger", rows_per_batch).load().select("value")
    writer = rows.writeStream.format("meteor").option("url", url).option("stream", TARGET)
    writer = writer.option("checkpointLocation", f"{folder}/checkpoint")
    query = (writer if follow else writer.trigger(availableNow=True)).start()
    query.awaitTermination()
    application = spark.sparkContext.applicationId
    spark.stop()
    # Workers in a local cluster always write their logs there.
    shutil.rmtree(Path(pyspark.__file__).parent / "work" / application, ignore_errors=True)


if __name__ == "__main__":
    run(**json.loads(sys.argv[1]))
