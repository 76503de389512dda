"""Count words per time window with Spark while they are published, without setting up a server.

    pip install 'meteor-py[spark]'          # and Java 17 or newer
    python examples/spark_word_count.py

It takes about twenty seconds, mostly to start Spark, and leaves nothing behind.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import meteor_py as meteor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SECONDS, PAUSE_S = 8.0, 0.02
#: Window length, and maximum lateness of a record, in seconds.
WINDOW_S, LATE_S = 2, 1
SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "the meteor falls and the dog barks",
    "a fox sees the meteor",
)


def main() -> None:
    """Publish in a thread and count in Spark."""
    require_spark()
    print("Starting Spark, which takes a few seconds...", flush=True)
    spark = start_spark()
    try:
        with tempfile.TemporaryDirectory(prefix="meteor-spark-") as folder:
            # Spark's processes find the embedded server through its directory.
            url = f"embedded://{folder}/server"
            with meteor.connect(url) as m:
                try:
                    with publishing(m.stream("sentences", codec="text")) as words:
                        count(spark, url, f"{folder}/checkpoint", words)
                finally:
                    spark.stop()  # before the server, which stops with its last client
    finally:
        spark.stop()


def require_spark() -> None:
    """Exit with a short message if Java or PySpark is missing."""
    home = os.environ.get("JAVA_HOME")
    if not (Path(home, "bin", "java").exists() if home else shutil.which("java")):
        sys.exit("Spark needs Java 17 or newer (Debian: apt-get install openjdk-17-jre-headless).")
    try:
        import pyspark_meteor  # noqa: F401
    except ImportError as error:
        sys.exit(f"PySpark is missing or too old: pip install 'meteor-py[spark]'. ({error})")


def start_spark() -> SparkSession:
    """Return a quiet Spark session on this machine."""
    from pyspark.sql import SparkSession

    # Spark's worker processes need this Python, which has meteor_py.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")  # the default, 200, is for clusters
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )


@contextmanager
def publishing(stream: meteor.Stream) -> Iterator[threading.Thread]:
    """Run a thread that publishes sentences for a few seconds; stop it when the block ends."""
    ended = threading.Event()
    thread = threading.Thread(target=publish, args=(stream, ended))
    thread.start()
    try:
        yield thread
    finally:
        ended.set()
        thread.join()


def publish(stream: meteor.Stream, ended: threading.Event) -> None:
    """Publish sentences. After a pause, publish one more, which closes the last window."""
    with stream.publisher() as pub:
        for _ in range(int(SECONDS / PAUSE_S)):
            pub.publish(random.choice(SENTENCES))
            if ended.wait(PAUSE_S):
                return
        ended.wait(WINDOW_S + LATE_S)
        pub.publish("end").result()


def count(spark: SparkSession, url: str, checkpoint: str, words: threading.Thread) -> None:
    """Print each window when it is complete: no further record can belong to it."""
    from pyspark.sql import functions as f

    sentences = (
        spark.readStream.format("meteor")
        .option("url", url)
        .option("stream", "sentences")
        .option("startingOffsets", "earliest")
        .option("valueFormat", "string")
        .option("group", "word-count")  # `meteor top` shows its progress
        .load()
    )
    counts = (
        sentences.withWatermark("timestamp", f"{LATE_S} seconds")
        .select("timestamp", f.explode(f.split("value", " ")).alias("word"))
        .groupBy(f.window("timestamp", f"{WINDOW_S} seconds"), "word")
        .count()
    )
    query = (
        counts.writeStream.outputMode("append")
        .foreachBatch(show)
        .option("checkpointLocation", checkpoint)
        .trigger(processingTime="1 second")
        .start()
    )
    while words.is_alive() and query.isActive:
        words.join(0.5)
    query.processAllAvailable()
    query.stop()


def show(batch: DataFrame, number: int) -> None:
    """Print the windows that a micro-batch has closed, with their three most frequent words."""
    windows: dict[str, list[str]] = {}
    for row in batch.orderBy("window", "count", ascending=[True, False]).collect():
        start, end = row["window"]
        span = f"{start:%H:%M:%S} to {end:%H:%M:%S}"
        windows.setdefault(span, []).append(f"{row['word']} {row['count']}")
    for span, words in windows.items():
        print(f"{span}: {', '.join(words[:3])}", flush=True)


if __name__ == "__main__":
    main()
