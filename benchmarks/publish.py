"""Publishing from one process: many records per call, and one record at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from benchmarks.common import CALL, PIPELINE, Bench, Row, connected, cut, faster, plain_client
from benchmarks.common import values_of as make_values

#: Capacity of a typical ring. The ring is soon full, so each further frame drops an old one.
#: redis-py's stream is not trimmed, which is less work.
CAPACITY = 100_000


def run(bench: Bench) -> list[Row]:
    values = make_values(bench.pick(1_000_000, 300_000))
    some = values[: bench.pick(100_000, 30_000)]
    calls = cut(values, CALL)
    arrays = [pa.array(call, pa.binary()) for call in calls]
    best = bench.best(
        {
            "publish_many of lists": lambda: ours(bench, publish_many, calls),
            "publish_many of Arrow arrays": lambda: ours(bench, publish_many, arrays),
            "publish in a loop": lambda: ours(bench, publish, [values[: len(values) // 2]]),
            "redis-py": lambda: theirs(bench, some),
        },
        repeats=bench.pick(7, 3),
    )
    peer, name = best.pop("redis-py"), f"redis-py, pipeline of {PIPELINE} XADD"
    many_goal = 30 if bench.server == "valkey" else 18
    goals = [many_goal, many_goal, 10]
    return [
        faster(what, rate, peer, name, goal)
        for (what, rate), goal in zip(best.items(), goals, strict=True)
    ]


def ours(bench: Bench, work: Callable[[Any, Sequence[Any]], None], parts: Sequence[Any]) -> float:
    bench.clear()
    with connected(bench.url) as client:
        stream = client.stream("publish", capacity=CAPACITY)
        with stream.publisher() as pub:
            pub.publish_many(list(map(bytes, make_values(1000)))).result()  # warm up
            start = time.perf_counter()
            work(pub, parts)
            pub.flush()
            seconds = time.perf_counter() - start
        count = sum(map(len, parts))
        assert stream.describe().next == count + 1000, "records are missing"
    return count / seconds


def publish_many(pub: Any, parts: Sequence[Any]) -> None:
    for part in parts:
        pub.publish_many(part)


def publish(pub: Any, parts: Sequence[Any]) -> None:
    send = pub.publish
    for part in parts:
        for value in part:
            send(value)


def theirs(bench: Bench, values: Sequence[bytes]) -> float:
    bench.clear()
    with plain_client(bench.url) as client:
        xadd_all(client, values[:PIPELINE])  # warm up
        start = time.perf_counter()
        xadd_all(client, values)
        return len(values) / (time.perf_counter() - start)


def xadd_all(client: Any, values: Sequence[bytes], key: str = "peer") -> None:
    pipe = client.pipeline(transaction=False)
    for part in cut(values, PIPELINE):
        for value in part:
            pipe.xadd(key, {"v": value})
        pipe.execute()
