"""Spark in the tour: a Spark of its own, in another process, reads the stream of the tour."""

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
#: Seconds after which the tour gives up on Spark.
_PATIENCE_S = 90.0
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


@dataclass(frozen=True)
class Outcome:
    """What Spark has found."""

    #: Seconds until it had its first row, and in which it read all of them.
    start_s: float
    read_s: float
    rows: int
    #: The first and the last of them.
    first: int
    last: int


def missing() -> str | None:
    """What is needed before Spark can have a part, or None."""
    try:
        found = tuple(int(part) for part in version("pyspark").split(".")[:2])
    except PackageNotFoundError:
        found = (0, 0)
    if found < _PYSPARK:
        return "pip install 'meteor-py[spark]'"
    return None if _java_version() >= _JAVA else f"Java {_JAVA} or newer"


def _java_version() -> int:
    """0: there is none."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None:
        return 0
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r' version "(\d+)', said.stderr)  # that of Java 8 begins with 1
    return int(found[1]) if found else 0


def read(url: str, stream: str) -> Outcome:
    """Have Spark read all of a stream.

    Raises:
        RuntimeError: It failed; with the last thing it said.
    """
    # What Spark leaves where it works goes with the folder.
    with (
        tempfile.TemporaryDirectory(prefix="meteor-demo-") as folder,
        open(f"{folder}/out", "w+") as out,
        open(f"{folder}/said", "w+", errors="replace") as said,
    ):
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__, stream],
            cwd=folder,
            stdin=subprocess.PIPE,  # which is closed when we end, in whatever way
            stdout=out,
            stderr=said,  # Spark has much to say, even if all is well
            env=_environment(url, folder),
            start_new_session=True,  # Ctrl-C is for us: we see to the rest
        )
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"It did not end within {_PATIENCE_S:g} seconds.") from None
        finally:
            _end(process)
        out.seek(0)
        said.seek(0)
        if process.returncode:
            raise RuntimeError((said.read().strip().splitlines() or ["It ended."])[-1])
        return Outcome(**json.loads(out.read().splitlines()[-1]))


def _environment(url: str, folder: str) -> dict[str, str]:
    # Spark picks up settings from all of these; the tour needs none that it does not know.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_"))}
    return inherited | {
        # Neither on the command line nor among Spark's options: it may have a password in it.
        "METEOR_URL": url,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": folder,
        "TMPDIR": folder,
        # -XX: it starts sooner, and leaves no file in /tmp if it is killed.
        "JDK_JAVA_OPTIONS": f"-Djava.io.tmpdir={folder} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
        "-XX:-UsePerfData",
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and its Java, which is in its group; the Python that Java has started ends with it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all is gone
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def _work(stream: str) -> None:
    """What the other process does."""
    end_with_parent()  # Java ends when this end of its pipe is closed
    began = time.perf_counter()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[*]")
    for name, value in _SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    records = spark.read.format("meteor").option("stream", stream).load()
    records.limit(1).collect()  # Spark does most of its starting when there is something to do
    started = time.perf_counter()
    rows, first, last = records.selectExpr("count(*)", "min(offset)", "max(offset)").collect()[0]
    done = time.perf_counter()
    spark.stop()
    print(json.dumps(Outcome(started - began, done - started, rows, first, last).__dict__))


if __name__ == "__main__":
    _work(sys.argv[1])
