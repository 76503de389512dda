"""The Spark step of the tour: another process starts Spark and reads the stream."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from meteor_cli.commands.demo.worker import end_with_parent

_JAVA, _PYSPARK = 17, (4, 2)
#: Seconds to wait for Spark.
_PATIENCE_S = 90.0
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


@dataclass(frozen=True)
class Outcome:
    #: Seconds until the first row, and seconds to read all rows after that.
    start_s: float
    read_s: float
    rows: int
    #: The first and the last offset.
    first: int
    last: int


def missing() -> str | None:
    """Return what must be installed to run Spark; None if nothing is missing."""
    try:
        found = tuple(int(part) for part in version("pyspark").split(".")[:2])
    except PackageNotFoundError:
        found = (0, 0)
    if found < _PYSPARK:
        return "pip install 'meteor-py[spark]'"
    return None if _java_version() >= _JAVA else f"Java {_JAVA} or newer"


def _java_version() -> int:
    """Return the major version of Java, or 0 if Java is not installed."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None:
        return 0
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r' version "(\d+)', said.stderr)  # Java 8 calls itself 1.8
    return int(found[1]) if found else 0


def read(url: str, stream: str) -> Outcome:
    """Read a whole stream with Spark. If Spark fails, raise its last log line as RuntimeError."""
    # Spark leaves files in its working directory, which is removed at the end.
    with (
        tempfile.TemporaryDirectory(prefix="meteor-demo-") as folder,
        open(f"{folder}/out", "w+") as out,
        open(f"{folder}/said", "w+", errors="replace") as said,
    ):
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__, stream],
            cwd=folder,
            stdin=subprocess.PIPE,  # closes when this process ends, even if it is killed
            stdout=out,
            stderr=said,  # a file, because Spark logs enough to fill a pipe, and would then block
            env=_environment(url, folder),
            start_new_session=True,  # Ctrl-C must reach only the parent, which ends Spark
        )
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"Spark took more than {_PATIENCE_S:g} seconds.") from None
        finally:
            _end(process)
        out.seek(0)
        said.seek(0)
        if process.returncode:
            raise RuntimeError((said.read().strip().splitlines() or ["It exited."])[-1])
        return Outcome(**json.loads(out.read().splitlines()[-1]))


def _environment(url: str, folder: str) -> dict[str, str]:
    # The user's own Spark settings could break the tour.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_"))}
    return inherited | {
        # Do not pass the URL as an argument or a Spark option: it may contain a password.
        "METEOR_URL": url,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": folder,
        "TMPDIR": folder,
        # The -XX options make Java start faster, and leave no files in /tmp after a kill.
        "JDK_JAVA_OPTIONS": f"-Djava.io.tmpdir={folder} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
        "-XX:-UsePerfData",
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill Spark's process group: Python and Java. The Python workers exit when Java does."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def _work(stream: str) -> None:
    end_with_parent()  # Java ends when this process closes its pipe
    began = time.perf_counter()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[*]")
    for name, value in _SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    records = spark.read.format("meteor").option("stream", stream).load()
    records.limit(1).collect()  # the first query starts most of Spark's processes
    started = time.perf_counter()
    rows, first, last = records.selectExpr("count(*)", "min(offset)", "max(offset)").collect()[0]
    done = time.perf_counter()
    spark.stop()
    print(json.dumps(Outcome(started - began, done - started, rows, first, last).__dict__))


if __name__ == "__main__":
    _work(sys.argv[1])
