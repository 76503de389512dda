"""Archives: archiving while publishing, reading the history, and reading a single old record."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq

import meteor_py as meteor
from benchmarks.common import (
    CALL,
    SEED,
    Bench,
    Ready,
    Row,
    at_once,
    connected,
    cut,
    faster,
    values_of,
    within,
)
from meteor_py.store.storage import LocalStorage

_CAPACITY = 100_000
#: Number of distinct values, which are published repeatedly.
_VALUES = 500_000
_SAMPLES = 200


def run(bench: Bench) -> list[Row]:
    return [*archiving(bench), *history(bench)]


# -- archiving ---------------------------------------------------------------------------------


def archiving(bench: Bench) -> list[Row]:
    """Measure a publisher with an archiver in another process, and a publisher without one."""
    count = bench.pick(4_000_000, 1_000_000)
    runs: list[tuple[float, float]] = []

    def with_store() -> float:
        runs.append(publish_and_archive(bench, count))
        return runs[-1][0]

    best = bench.best(
        {"archiving": with_store, "no store": lambda: publish_alone(bench, count)},
        repeats=bench.pick(3, 1),
    )
    archived = max(rate for _, rate in runs)
    what = "publish_many while an archiver stores every record"
    return [
        faster(what, best["archiving"], best["no store"], "ours, no store"),
        faster(
            "archiver, until the last record is stored", archived, best["archiving"], "publisher"
        ),
    ]


def publish_and_archive(bench: Bench, count: int) -> tuple[float, float]:
    bench.clear()
    with tempfile.TemporaryDirectory(prefix="meteor-bench-") as folder:
        (start, end), archived = at_once(
            (publisher, (bench.url, count)), (archiver, (bench.url, count, folder))
        )
    return count / (end - start), count / (archived - start)


def publish_alone(bench: Bench, count: int) -> float:
    bench.clear()
    with connected(bench.url) as client:
        client.stream("archive", capacity=_CAPACITY)
    ((start, end),) = at_once((publisher, (bench.url, count)))
    return float(count / (end - start))


def publisher(ready: Ready, url: str, count: int) -> tuple[float, float]:
    calls = cut(values_of(_VALUES), CALL)
    with connected(url) as client:
        start = ready()
        with client.stream("archive", create=False).publisher(delivery_timeout=120) as pub:
            for number in range(count // CALL):
                pub.publish_many(calls[number % len(calls)])
            pub.flush()
    return start, time.monotonic()


def archiver(ready: Ready, url: str, count: int, folder: str) -> float:
    with connected(url) as client:
        stream = client.stream("archive", capacity=_CAPACITY, store=folder)
        ready()
        while stream.describe().next < count:
            time.sleep(0.02)
        stream.store.flush(120)
        archived = time.monotonic()
        assert not [flaw for flaw in stream.store.verify() if not flaw.harmless]
        return archived


# -- reading the archive -----------------------------------------------------------------------


def history(bench: Bench) -> list[Row]:
    count = bench.pick(10_000_000, 1_000_000)
    with archived(bench, count) as stream:
        files = stream.store.files()
        end = stream.store.bounds()[1] - _CAPACITY  # below this offset, only the store has records
        best = bench.best(
            {
                "cold": lambda: read_cold(stream, end),
                "pyarrow": lambda: read_files(files),
                "threads": lambda: read_files(files, use_threads=True),
            },
            repeats=bench.pick(3, 2),
        )
        opens, micros = one_by_one(stream, end)
    what = f"read one of {count // 1_000_000} M archived records"
    return [
        faster(
            "read history with stream.read, as Arrow",
            best["cold"],
            max(best["pyarrow"], best["threads"]),
            "pyarrow, the same files",
            0.85,
        ),
        within(f"{what}: files opened", "files", opens, 3),
        within(f"{what}, p50", "us", micros),
    ]


@contextmanager
def archived(bench: Bench, count: int) -> Iterator[meteor.Stream]:
    bench.clear()
    bench.step("publish and archive")
    with tempfile.TemporaryDirectory(prefix="meteor-bench-") as folder, connected(bench.url) as m:
        stream = m.stream("history", capacity=_CAPACITY, store=folder)
        calls = cut(values_of(_VALUES), CALL)
        with stream.publisher(delivery_timeout=120) as pub:
            for number in range(count // CALL):
                pub.publish_many(calls[number % len(calls)])
        stream.store.flush(120)
        stream.store.compact()
        yield stream


def read_cold(stream: meteor.Stream, end: int) -> float:
    start = time.perf_counter()
    found = sum(batch.to_arrow().num_rows for batch in stream.read(0, end))
    took = time.perf_counter() - start
    assert found == end
    return float(found / took)


def read_files(files: list[str], *, use_threads: bool = False) -> float:
    """Read the files with pyarrow alone, one file at a time; return records per second."""
    start = time.perf_counter()
    found = 0
    for name in files:
        with pq.ParquetFile(name) as file:
            for batch in file.iter_batches(batch_size=32_768, use_threads=use_threads):
                found += batch.num_rows
    return float(found / (time.perf_counter() - start))


def one_by_one(stream: meteor.Stream, end: int) -> tuple[float, float]:
    """Return the maximum number of files opened by one read, and the median time in us."""
    rng = random.Random(SEED)
    took: list[float] = []
    opened: list[int] = []
    really = LocalStorage.open

    def counted(folder: LocalStorage, path: str) -> Any:
        opened[-1] += 1
        return really(folder, path)

    with patch.object(LocalStorage, "open", counted):
        for _ in range(_SAMPLES):
            offset = rng.randrange(end)
            opened.append(0)
            start = time.perf_counter()
            (batch,) = stream.read(offset, offset + 1)
            took.append(time.perf_counter() - start)
            assert batch.first_offset == offset
    return max(opened), statistics.median(took) * 1e6
