"""A program that copies a stream to another with Spark, to be killed, or to have tasks that fail.

    with Copy(url, folder, rows_per_batch=100, follow=True) as copy:
        ...
        copy.kill()

It goes on from the checkpoint in its folder, and ends when all is copied unless it follows.
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
from meteor_py.redis import keys
from tests.support.java import SPARK_ENVIRONMENT, SPARK_PYTHON
from tests.support.servers import plain_client
from tests.support.waiting import eventually

SOURCE, TARGET = "source", "target"
#: Rows of each of the two tasks of a batch, if tasks are to fail.
TASK_ROWS = 1500
#: Many times what it takes, on a machine that has other things to do.
END_S = 100


def fill(m: meteor.Client, count: int, width: int = 0) -> None:
    """Publish numbers, with zeros before them, to be copied."""
    with m.stream(SOURCE, capacity=100_000).publisher() as pub:
        for start in range(0, count, 500):
            pub.publish_many([f"{i:0{width}}".encode() for i in range(start, start + 500)])


class Copy:
    """The program in a process of its own, with its Java."""

    def __init__(self, url: str, folder: Path, **orders: Any) -> None:
        folder.mkdir(exist_ok=True)
        self._log = folder / "log"
        self._marks = folder / "marks"
        self._marks.mkdir(exist_ok=True)
        orders = {"url": url, "folder": str(folder), "marks": str(self._marks)} | orders
        environment = os.environ | SPARK_ENVIRONMENT | SPARK_PYTHON
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.spark_copy", json.dumps(orders)],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # a group to be killed with all that is in it
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End driver and Java with SIGKILL; the workers notice, and end by themselves."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def wait(self) -> None:
        """Wait until it has ended well."""
        assert self._process.wait(END_S) == 0, self._log.read_text()[-5000:]

    def wait_until(self, condition: Any, message: str) -> None:
        """Wait for something while it runs."""

        def met() -> bool:
            assert self._process.poll() is None, self._log.read_text()[-5000:]
            return bool(condition())

        eventually(met, END_S, message)

    @property
    def marks(self) -> set[str]:
        """What its tasks have done."""
        return {path.name for path in self._marks.iterdir()}


# In the process


def main() -> None:
    run(**json.loads(sys.argv[1]))


def run(
    url: str,
    folder: str,
    marks: str,
    rows_per_batch: int,
    master: str = "local[2]",
    follow: bool = False,
    failing: bool = False,
) -> None:
    """Copy. With ``failing`` the first try of each task fails."""
    import pyspark
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import udf

    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.codegen.wholeStage", "false")
    builder = builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    builder = builder.config("spark.driver.memory", "512m").config("spark.executor.memory", "512m")
    # A cluster of two is small: do not wait for more executors to come.
    builder = builder.config("spark.scheduler.maxRegisteredResourcesWaitingTime", "1s")
    spark = builder.getOrCreate()
    reader = spark.readStream.format("meteor").option("url", url).option("stream", SOURCE)
    reader = reader.option("startingOffsets", "earliest").option("minPartitions", 2)
    rows = reader.option("maxOffsetsPerTrigger", rows_per_batch).load().select("value")
    if failing:
        hook = udf(_Hook(url, marks).__call__, "binary", useArrow=False)
        rows = rows.select(hook("value").alias("value"))
    writer = rows.writeStream.format("meteor").option("url", url).option("stream", TARGET)
    writer = writer.option("checkpointLocation", f"{folder}/checkpoint")
    query = (writer if follow else writer.trigger(availableNow=True)).start()
    query.awaitTermination()
    application = spark.sparkContext.applicationId
    spark.stop()
    # Workers of a local cluster have no other place for their logs.
    shutil.rmtree(Path(pyspark.__file__).parent / "work" / application, ignore_errors=True)


class _Hook:
    """Lets the first try of each task fail, when some of its rows are staged."""

    def __init__(self, url: str, marks: str) -> None:
        self._url = url
        self._marks = marks

    def __call__(self, value: bytes) -> bytes:
        if int(value) % TASK_ROWS == TASK_ROWS - 10:
            self._fail()
        return value

    def _fail(self) -> None:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        partition, attempt = context.partitionId(), context.attemptNumber()
        Path(self._marks, f"{partition}.{attempt}").touch()
        if attempt:
            return
        with plain_client(self._url) as plain:
            pattern = keys.stage(TARGET, f"*.{partition}.*")
            eventually(lambda: plain.keys(pattern), END_S, "nothing was staged")
        raise RuntimeError("The first try fails.")


if __name__ == "__main__":
    main()
