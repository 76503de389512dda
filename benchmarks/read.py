"""Reading a full stream from one process, as bytes, as Arrow and as Record objects."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import meteor_py as meteor
from benchmarks.common import (
    CALL,
    PIPELINE,
    Bench,
    Row,
    connected,
    cut,
    faster,
    plain_client,
    values_of,
)
from benchmarks.publish import xadd_all

PEER = f"redis-py, XREADGROUP COUNT {PIPELINE} + XACK"


def run(bench: Bench) -> list[Row]:
    with filled(bench) as (stream, plain):
        best = bench.best(
            {
                "bytes": lambda: drain(stream, meteor.RecordBatch.values),
                "Arrow": lambda: drain(stream, meteor.RecordBatch.to_arrow),
                "Records": lambda: drain(stream, list),
                "redis-py": lambda: drain_group(plain),
            },
            repeats=bench.pick(7, 3),
        )
    peer = best["redis-py"]
    return [
        faster("read values as bytes", best["bytes"], peer, PEER, 30),
        faster("read as Arrow", best["Arrow"], best["bytes"], "ours as bytes", 1.2),
        faster("read as Record objects", best["Records"], peer, PEER),
    ]


@contextmanager
def filled(bench: Bench) -> Iterator[tuple[meteor.Stream, Any]]:
    """Yields a full stream, and a plain client whose stream has a tenth as many records."""
    values = values_of(bench.pick(1_000_000, 300_000))
    bench.clear()
    with connected(bench.url) as client, plain_client(bench.url) as plain:
        stream = client.stream("read", capacity=len(values))
        with stream.publisher() as pub:
            for call in cut(values, CALL):
                pub.publish_many(call)
        xadd_all(plain, values[: len(values) // 10])
        yield stream, plain


def drain(stream: meteor.Stream, form: Callable[[meteor.RecordBatch], Any]) -> float:
    """Read the whole stream; return records per second."""
    with stream.subscriber() as sub:
        end = sub.position
        sub.seek("earliest")
        sub.poll(max_records=1)  # warm up
        sub.seek("earliest")
        count, start = 0, time.perf_counter()
        while count < end:
            batch = sub.poll()
            count += len(form(batch))
        return count / (time.perf_counter() - start)


def drain_group(client: Any, key: str = "peer") -> float:
    """Do the same with redis-py: read as a group and acknowledge."""
    end = client.xlen(key)
    client.xgroup_create(key, "g", id="0")
    try:
        count, start = 0, time.perf_counter()
        while count < end:
            count += len(read_group(client, key))
        return count / (time.perf_counter() - start)
    finally:
        client.xgroup_destroy(key, "g")


def read_group(client: Any, key: str, block_ms: int | None = None) -> list[bytes]:
    """Read and acknowledge the next values of the group; returns [] if none arrive in time."""
    answer = client.xreadgroup("g", "c", {key: ">"}, count=PIPELINE, block=block_ms)
    if not answer:
        return []
    entries = answer[0][1]
    client.xack(key, "g", *[entry_id for entry_id, _ in entries])
    return [fields[b"v"] for _, fields in entries]
