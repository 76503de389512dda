"""Reading a full stream from one process: as bytes, as Arrow, as Records, and record by record."""

from __future__ import annotations

import threading
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
    within,
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
                "for record in sub": lambda: iterate(stream),
                "receiver": lambda: receive(stream),
                "receiver in a group": lambda: receive(stream, group="g"),
                "redis-py": lambda: drain_group(plain),
            },
            repeats=bench.pick(7, 3),
        )
    peer = best["redis-py"]
    return [
        faster("read values as bytes", best["bytes"], peer, PEER, 30),
        faster("read as Arrow", best["Arrow"], best["bytes"], "ours as bytes", 1.2),
        faster("read as Record objects", best["Records"], peer, PEER, 30),
        *(
            within(f"{what}, per record", "us", 1e6 / best[what], 0.5)
            for what in ("for record in sub", "receiver", "receiver in a group")
        ),
    ]


@contextmanager
def filled(bench: Bench) -> Iterator[tuple[meteor.Stream, Any]]:
    """Yield a full stream, and a plain client whose stream has a tenth as many records."""
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


def iterate(stream: meteor.Stream) -> float:
    """Read the whole stream in a loop over records; return records per second."""
    with stream.subscriber(initial_offset="earliest") as sub:
        last = stream.describe().next - 1
        sub.poll(max_records=1)  # warm up
        sub.seek("earliest")
        start = time.perf_counter()
        for record in sub:
            if record.offset == last:
                break
        return (last + 1) / (time.perf_counter() - start)


def receive(stream: meteor.Stream, group: str | None = None) -> float:
    """Read the whole stream with a receiver; return records per second."""
    last = stream.describe().next - 1
    done = threading.Event()

    def handle(record: meteor.Record) -> None:
        if record.offset == last:
            done.set()

    with stream.subscriber(initial_offset="earliest", group=group) as sub:
        start = time.perf_counter()
        sub.attach_receiver(handle)
        assert done.wait(60), "the receiver is stuck"
        return (last + 1) / (time.perf_counter() - start)


def drain_group(client: Any, key: str = "peer") -> float:
    """Read a whole stream in a group with redis-py, and acknowledge it; return records/s."""
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
    """Read and acknowledge the group's next values; return [] if none arrive in time."""
    answer = client.xreadgroup("g", "c", {key: ">"}, count=PIPELINE, block=block_ms)
    if not answer:
        return []
    entries = answer[0][1]
    client.xack(key, "g", *[entry_id for entry_id, _ in entries])
    return [fields[b"v"] for _, fields in entries]
