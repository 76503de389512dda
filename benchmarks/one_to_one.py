"""One publisher and one subscriber at once, each in its own process."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.common import (
    CALL,
    PIPELINE,
    Bench,
    Ready,
    Row,
    at_once,
    connected,
    cut,
    faster,
    plain_client,
    values_of,
)
from benchmarks.publish import xadd_all
from benchmarks.read import read_group

#: Part of the records that each process handles before the clock starts, to warm up.
WARM_UP = 5
PEER = f"redis-py, pipeline of {PIPELINE} XADD, XREADGROUP COUNT {PIPELINE} + XACK"


def run(bench: Bench) -> list[Row]:
    best = bench.best(
        {
            "1:1": lambda: ours(bench, bench.pick(2_000_000, 500_000)),
            "1:1 redis-py": lambda: theirs(bench, bench.pick(100_000, 30_000)),
        }
    )
    what = "1 publisher and 1 subscriber at once"
    return [faster(what, best["1:1"], best["1:1 redis-py"], PEER, 28)]


def ours(bench: Bench, count: int) -> float:
    bench.clear()
    with connected(bench.url) as client:
        # The ring is large enough for a slow reader to lose nothing. It is full from the start, as
        # in production: each new frame takes the memory of an old one.
        stream = client.stream("both", capacity=count)
        with stream.publisher() as pub:
            for call in cut(values_of(count), CALL):
                pub.publish_many(call)
    start, end = at_once((publisher, (bench.url, count)), (subscriber, (bench.url, count)))
    return (count - count // WARM_UP) / float(end - start)


def publisher(ready: Ready, url: str, count: int) -> float:
    values = values_of(count)
    with connected(url) as client, client.stream("both").publisher() as pub:
        for call in cut(values[: count // WARM_UP], CALL):
            pub.publish_many(call)
        pub.flush()
        start = ready()
        for call in cut(values[count // WARM_UP :], CALL):
            pub.publish_many(call)
        pub.flush()
    return start


def subscriber(ready: Ready, url: str, count: int) -> float:
    # The ring was filled with ``count`` records.
    with connected(url) as client, client.stream("both").subscriber(initial_offset=count) as sub:
        found = 0
        while found < count // WARM_UP:
            batch = sub.poll()
            found += len(batch.values())
        ready()
        while found < count:
            batch = sub.poll()  # the last batch is dropped after this, as in most programs
            found += len(batch.values())
        return time.monotonic()


def theirs(bench: Bench, count: int) -> float:
    bench.clear()
    with plain_client(bench.url) as client:
        client.xgroup_create("peer", "g", id="$", mkstream=True)
    start, end = at_once((xadd, (bench.url, count)), (xreadgroup, (bench.url, count)))
    return (count - count // WARM_UP) / float(end - start)


def xadd(ready: Ready, url: str, count: int) -> float:
    values = values_of(count)
    with plain_client(url) as client:
        xadd_all(client, values[: count // WARM_UP])
        start = ready()
        xadd_all(client, values[count // WARM_UP :])
    return start


def xreadgroup(ready: Ready, url: str, count: int) -> float:
    client: Any
    with plain_client(url) as client:
        found = 0
        while found < count // WARM_UP:
            values = read_group(client, "peer", block_ms=1000)
            found += len(values)
        ready()
        while found < count:
            values = read_group(client, "peer", block_ms=1000)
            found += len(values)
        return time.monotonic()
