"""The costs of a store: bytes read if only a few columns are needed, and times with many segments.

``python -m benchmarks.store_costs`` starts a private server, fills two stores, and prints the
figures for docs/history.md as a Markdown table. The bytes are those that the process reads from
files (``rchar`` in /proc/self/io). A busy machine affects only the times.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import meteor_py as meteor
from benchmarks.common import Bench, Row, connected, within
from meteor_py.log.split_points import split_points
from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.redis import keys
from meteor_py.server import open_embedded
from meteor_py.store import storage
from meteor_py.store.base import TERMS
from meteor_py.store.parquet import ParquetStore
from meteor_py.testing.store_contract import records

#: Bytes per value. Values are random, so compression does not reduce the bytes read.
_VALUE = 10_000
_RECORDS = 10_000
#: Records per small segment.
_SMALL = 10
_TASKS = 100


def run(bench: Bench) -> list[Row]:
    return [*columns(bench), *many_segments(bench, bench.pick(10_000, 2_000))]


def columns(bench: Bench) -> list[Row]:
    """Measure the bytes read for all columns, for two, and for one."""
    bench.step("columns")
    bench.clear()
    rows = []
    with tempfile.TemporaryDirectory(prefix="meteor-bench-") as folder, connected(bench.url) as m:
        stream = m.stream("columns", capacity=100, max_unarchived=_RECORDS, store=folder)
        with stream.publisher() as pub:
            for _ in range(_RECORDS // 200):
                pub.publish_many([os.urandom(_VALUE) for _ in range(200)]).result()
        stream.store.flush(120)
        end = stream.store.bounds()[1] - 100  # below this offset, only the store has records
        for names in (ARROW_SCHEMA.names, ["offset", "timestamp"], ["offset"]):
            before = bytes_read()
            assert read(stream, end, names) == end
            mib = (bytes_read() - before) / 2**20
            what = "all columns" if len(names) > 2 else " and ".join(names)
            rows.append(within(f"{end} archived records of 10 kB: {what} read", "MiB", mib))
    return rows


def read(stream: meteor.Stream, end: int, names: Sequence[str]) -> int:
    found = 0
    with stream.subscriber() as sub:
        sub._read_columns(names)
        sub.seek(0)
        while sub.position < end:
            found += sub.poll(max_records=end - sub.position).to_arrow().num_rows
    return found


def bytes_read() -> int:
    (line,) = (x for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("rchar"))
    return int(line.split()[1])


def many_segments(bench: Bench, count: int) -> list[Row]:
    """Measure planning, one read, one append and merging in a store with many small segments."""
    bench.clear()
    with tempfile.TemporaryDirectory(prefix="meteor-bench-") as folder, connected(bench.url) as m:
        stream = m.stream("many", capacity=10, store=folder, archive=False)
        term = stream.end().epoch * TERMS + 1
        bench.step(f"write {count} segments")
        write(folder, stream.incarnation, term, count)
        end = count * _SMALL
        fields: dict[Any, Any] = {"next": end, "archived": end}
        m.redis.hset(keys.meta("many"), mapping=fields)
        bench.step("use the segments")
        offsets = [end * task // _TASKS for task in range(1, _TASKS)]

        def opened() -> Any:  # like a new process, a new object has cached nothing
            return m.stream("many", create=False)

        def append() -> None:
            store = ParquetStore(folder, "many")
            store.bounds(stream.incarnation)
            store.append(stream.incarnation, term, records(end, end + _SMALL))

        what = f"{count} segments: "
        works: dict[str, Callable[[], object]] = {
            f"plan {_TASKS} tasks": lambda: split_points(opened()._handle, offsets),
            "one record": lambda: list(opened().read(end // 2, end // 2 + 1)),
            "an append": append,
        }
        rows = [within(f"{what}{name}", "s", timed(work)) for name, work in works.items()]
        merges, took = merge(folder, stream.incarnation, term, end)
        left = len(ParquetStore(folder, "many").files(stream.incarnation, 0, end))
        rows.append(within(f"{what}merged by {merges} archiver calls", "s", took))
        return [*rows, within(f"{what}left after that", "segments", left)]


def write(folder: str, incarnation: str, term: int, count: int) -> None:
    store = ParquetStore(folder, "many")
    no_sync = patch.object(storage, "_sync_folder", lambda _: None)
    with no_sync, patch.object(os, "fsync", lambda _: None):
        for first in range(0, count * _SMALL, _SMALL):
            store.append(incarnation, term, records(first, first + _SMALL))


def merge(folder: str, incarnation: str, term: int, end: int) -> tuple[int, float]:
    store = ParquetStore(folder, "many")
    merges, start = 0, time.perf_counter()
    while store.merge_small(incarnation, term, end, lambda: True):
        merges += 1
    return merges, time.perf_counter() - start


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> int:
    quick = "--quick" in sys.argv[1:]
    with open_embedded() as server:
        rows = run(Bench(server.url, "valkey", quick, lambda what: print(what, file=sys.stderr)))
    print("| what | figure |\n|---|---|")
    for row in rows:
        print(f"| {row.what} | {row.ours:.2f} {row.unit} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
