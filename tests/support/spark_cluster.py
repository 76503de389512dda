"""A Spark cluster on loopback whose workers have different hosts, and a driver that uses it.

    with Cluster(folder) as cluster, Driver(cluster, url, folder) as driver:
        driver.wait()
        assert driver.attempts == [Attempt(1, 0, "127.0.0.2", speculative=False), ...]

Spark speculates (starts a second attempt at a slow task) neither in ``local[...]`` nor on the
first attempt's host, and all workers in ``local-cluster[...]`` are on one host.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import pyspark

from meteor_py.redis import keys
from tests.support.java import SPARK_ENVIRONMENT
from tests.support.servers import plain_client
from tests.support.waiting import eventually

SOURCE, TARGET = "source", "target"
TASKS = 4
#: Rows per task and their size, large enough that some are sent before the last is produced.
TASK_ROWS, ROW_BYTES = 1000, 2000
#: Seconds within which the program must end: many times longer than it needs, for loaded machines.
END_S = 250

_ROOT = Path(__file__).parents[2]
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"
#: On Linux all of 127/8 is loopback; macOS needs configuration for that.
_HOSTS = ("127.0.0.2", "127.0.0.3")


class Attempt(NamedTuple):
    """One attempt at a task, from Spark's event log."""

    stage: int
    partition: int
    host: str
    speculative: bool


class _Process:
    """A process in its own session, so that kill() ends its children too."""

    def __init__(self, log: Path, command: Sequence[str], **environment: str) -> None:
        self.log = log
        # Executors run in other directories, but need these packages.
        environment = {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(_ROOT)} | environment
        with log.open("wb") as file:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=os.environ | SPARK_ENVIRONMENT | environment,
                start_new_session=True,
            )

    def kill(self) -> None:
        try:
            os.killpg(self._popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._popen.wait()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the log matches a pattern; return the match."""

        def found() -> re.Match[str] | None:
            assert self._popen.poll() is None, self.tail
            return re.search(pattern, self.log.read_text())

        said = eventually(found, END_S, f"{pattern} is not in the log")
        assert said is not None
        return said

    def wait(self) -> None:
        """Wait until the process has ended; check that it succeeded."""
        assert self._popen.wait(END_S) == 0, self.tail

    @property
    def tail(self) -> str:
        return self.log.read_text()[-5000:]


class Cluster:
    """A master, and two workers with two cores each, on two hosts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[_Process] = []
        self.url = ""

    def __enter__(self) -> Self:
        try:
            master = self._start("master", _MASTER, "--host", "127.0.0.1", "--port", "0")
            self.url = master.wait_for(r"Starting Spark master at (spark://\S+)")[1]
            for host in _HOSTS:
                work = str(self._folder / f"work-{host}")
                ours = ("--host", host, "--cores", "2", "--memory", "1g", "--work-dir", work)
                self._start(f"worker-{host}", _WORKER, *ours, self.url)  # the driver waits for them
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.kill()

    def _start(self, name: str, main: str, *arguments: str) -> _Process:
        home = Path(pyspark.__file__).parent
        command = [str(home / "bin" / "spark-class"), main, "--webui-port", "0", *arguments]
        process = _Process(self._folder / f"{name}.log", command, SPARK_HOME=str(home))
        self._processes.append(process)
        return process


class Driver:
    """A program that copies a stream and writes a table, with tasks that are slow at first."""

    def __init__(self, cluster: Cluster, url: str, folder: Path) -> None:
        self._marks, self._events = folder / "marks", folder / "events"
        for made in (self._marks, self._events):
            made.mkdir()
        orders = {"master": cluster.url, "url": url, "folder": str(folder)}
        command = [sys.executable, "-m", "tests.support.spark_cluster", json.dumps(orders)]
        self._process = _Process(folder / "driver.log", command)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()

    def wait(self) -> None:
        """Wait until the process has ended; check that it succeeded."""
        self._process.wait()

    @property
    def marks(self) -> set[str]:
        """The attempts at slow tasks that reached their last rows, as "job.partition.attempt"."""
        return {path.name for path in self._marks.iterdir()}

    @property
    def attempts(self) -> list[Attempt]:
        """All task attempts, in the order in which they started."""
        (file,) = self._events.iterdir()
        events = [json.loads(line) for line in file.read_text().splitlines()]
        started = [
            (event["Stage ID"], event["Task Info"])
            for event in events
            if event["Event"] == "SparkListenerTaskStart"
        ]
        return [
            Attempt(stage, task["Index"], task["Host"], task["Speculative"])
            for stage, task in started
        ]


# The driver process


def main(master: str, url: str, folder: str) -> None:
    """Copy the source in two batches, then write a table of the same size as a batch."""
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import udf

    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.3",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{folder}/events",
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
        # Wait for both workers.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": f"{END_S}s",
        "spark.cores.max": str(TASKS),
    }
    builder = SparkSession.builder.master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    slow = udf(_Slow(url, f"{folder}/marks").__call__, "binary", useArrow=False)
    to = {"url": url, "stream": TARGET}

    per_batch = TASKS * TASK_ROWS
    given = {"url": url, "stream": SOURCE, "startingOffsets": "earliest"}
    limits = {"minPartitions": TASKS, "maxOffsetsPerTrigger": per_batch}
    source = spark.readStream.format("meteor").options(**given, **limits).load()
    writer = source.select(slow("value").alias("value")).writeStream.format("meteor")
    writer = writer.options(**to, checkpointLocation=f"{folder}/checkpoint")
    writer.trigger(availableNow=True).start().awaitTermination()

    table = spark.range(2 * per_batch, 3 * per_batch, 1, TASKS)
    rows = table.selectExpr(f"cast(lpad(id, {ROW_BYTES}, '0') as binary) value")
    written = rows.select(slow("value").alias("value")).write.format("meteor")
    written.options(**to, txnId="table").mode("append").save()
    spark.stop()


class _Slow:
    """Slows down the first attempt at each job's first task, after some rows are staged.

    In the second job the first attempt never continues, and Spark kills it. In the other jobs, both
    attempts wait for each other and continue, and Spark decides which one counts.
    """

    def __init__(self, url: str, marks: str) -> None:
        self._url = url
        self._marks = marks

    def __call__(self, value: bytes) -> bytes:
        job, row = divmod(int(value), TASKS * TASK_ROWS)
        if row == TASK_ROWS - 10:
            self._wait(job)
        return value

    def _wait(self, job: int) -> None:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        partition, attempt = context.partitionId(), context.attemptNumber()
        Path(self._marks, f"{job}.{partition}.{attempt}").touch()
        if attempt:
            first = Path(self._marks, f"{job}.{partition}.0")
            eventually(first.exists, END_S, "the first attempt makes no progress")
            return
        with plain_client(self._url) as plain:
            pattern = keys.stage(TARGET, f"*.{partition}.*")
            eventually(lambda: plain.keys(pattern), END_S, "nothing was staged")
        second = Path(self._marks, f"{job}.{partition}.{1 if job != 1 else 'never'}")
        eventually(second.exists, END_S, "there is no second attempt")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
