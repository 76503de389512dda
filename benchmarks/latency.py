"""The time from publishing one record to having it in another process, one at a time."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

from benchmarks.common import (
    PIPELINE,
    Bench,
    Ready,
    Row,
    at_once,
    cheaper,
    connected,
    percentile,
    plain_client,
)

#: Records before those that count.
WARM_UP = 100
#: Seconds that the reader gets to be waiting in the server when the next record is sent.
SETTLE_S = 0.0005


def run(bench: Bench) -> list[Row]:
    count = bench.pick(1500, 300)
    ours: list[float] = []
    peer: list[float] = []
    for _ in range(bench.pick(3, 2)):
        for samples, name, pair in (
            (ours, "latency", (publisher, subscriber)),
            (peer, "latency, redis-py", (xadd, xread)),
        ):
            bench.step(name)
            bench.clear()
            with connected(bench.url) as client:
                client.stream("latency")
            samples += _one_run(bench.url, count, *pair)
    name = "redis-py, XADD to XREAD BLOCK"
    return [
        cheaper(
            f"latency of one record, p{percent}",
            "us",
            percentile(ours, percent),
            percentile(peer, percent),
            name,
            goal,
        )
        for percent, goal in ((50, 1.5), (99, None))
    ]


def _one_run(url: str, count: int, send: Any, receive: Any) -> list[float]:
    # The receiver asks for the next record: the same way for both, outside the measured time.
    asked, ask = multiprocessing.get_context("spawn").Pipe(duplex=False)
    total = WARM_UP + count
    _, nanoseconds = at_once((send, (url, total, asked)), (receive, (url, total, ask)))
    return [sample / 1000 for sample in nanoseconds[WARM_UP:]]


def publisher(ready: Ready, url: str, count: int, asked: Any) -> None:
    with connected(url) as client, client.stream("latency").publisher() as pub:
        pub.publish(b"0").result()
        ready()
        for _ in range(count):
            asked.recv_bytes()
            time.sleep(SETTLE_S)
            pub.publish(b"%d" % time.monotonic_ns())


def subscriber(ready: Ready, url: str, count: int, ask: Any) -> list[int]:
    samples: list[int] = []
    with connected(url) as client, client.stream("latency").subscriber() as sub:
        ready()
        sub.seek("latest")
        while len(samples) < count:
            ask.send_bytes(b"next")
            values: list[bytes] = []
            while not values:
                values = sub.poll(timeout=2.0).values()
            samples.append(time.monotonic_ns() - int(values[0]))
            assert len(values) == 1, "more than one record in flight"
    return samples


def xadd(ready: Ready, url: str, count: int, asked: Any) -> None:
    with plain_client(url) as client:
        client.xadd("peer", {"v": b"0"})
        ready()
        for _ in range(count):
            asked.recv_bytes()
            time.sleep(SETTLE_S)
            client.xadd("peer", {"v": b"%d" % time.monotonic_ns()})


def xread(ready: Ready, url: str, count: int, ask: Any) -> list[int]:
    samples: list[int] = []
    with plain_client(url) as client:
        ready()
        last = client.xrevrange("peer", count=1)[0][0]
        while len(samples) < count:
            ask.send_bytes(b"next")
            answer: Any = None
            while not answer:
                answer = client.xread({"peer": last}, count=PIPELINE, block=2000)
            last, fields = answer[0][1][-1]
            samples.append(time.monotonic_ns() - int(fields[b"v"]))
    return samples
