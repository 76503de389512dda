"""Latency of one record at a time, from the publish until another process has it.

Two processes, a sender and a receiver, each with our client and with redis-py's, take turns: one
record through ours, the next by XADD and XREAD BLOCK. Noise therefore affects both.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import meteor_py as meteor
from benchmarks.common import (
    Bench,
    Ready,
    Row,
    at_once,
    cheaper,
    connected,
    percentile,
    plain_client,
)

#: Pairs of records for warming up.
WARM_UP = 100
#: Seconds before each record is sent, so that the receiver is already blocked in the server.
SETTLE_S = 0.0005
#: Seconds for which one read of the receiver blocks.
BLOCK_S = 2.0


def run(bench: Bench) -> list[Row]:
    pairs = bench.pick(5000, 600)
    bench.step("latency, ours and redis-py's")
    bench.clear()
    with connected(bench.url) as client:
        client.stream("latency", create=True)
    # The receiver asks for the next record: the same way for both, outside the measured time.
    asked, ask = multiprocessing.get_context("spawn").Pipe(duplex=False)
    total = WARM_UP + pairs
    _, samples = at_once((sender, (bench.url, total, asked)), (receiver, (bench.url, total, ask)))
    ours, peer = ([nanoseconds / 1000 for nanoseconds in found[WARM_UP:]] for found in samples)
    return [
        cheaper(
            f"latency of one record, p{percent}",
            "us",
            percentile(ours, percent),
            percentile(peer, percent),
            "redis-py, XADD to XREAD BLOCK",
            goal,
        )
        for percent, goal in ((50, 1.5), (99, None))
    ]


def sender(ready: Ready, url: str, pairs: int, asked: Any) -> None:
    """Publish the current time whenever the receiver asks, alternating between both clients."""
    with (
        connected(url) as client,
        client.stream("latency").publisher() as pub,
        plain_client(url) as plain,
    ):

        def xadd(value: bytes) -> None:
            plain.xadd("peer", {"v": value})

        pub.publish(b"0").result()
        xadd(b"0")
        ready()
        for _ in range(pairs):
            for publish in (pub.publish, xadd):
                asked.recv_bytes()
                time.sleep(SETTLE_S)
                publish(b"%d" % time.monotonic_ns())


def receiver(ready: Ready, url: str, pairs: int, ask: Any) -> tuple[list[int], list[int]]:
    """Ask, wait for the record, and note its age in nanoseconds."""
    ours: list[int] = []
    peer: list[int] = []
    with connected(url) as client, plain_client(url) as plain:
        ready()
        with client.stream("latency").subscriber() as sub:
            ways = ((polling(sub), ours), (reading(plain), peer))
            for _ in range(pairs):
                for receive, samples in ways:
                    ask.send_bytes(b"next")
                    values: list[bytes] = []
                    while not values:
                        values = receive()
                    samples.append(time.monotonic_ns() - int(values[0]))
                    assert len(values) == 1, "more than one record in flight"
    return ours, peer


def polling(sub: meteor.Subscriber) -> Callable[[], list[bytes]]:
    return lambda: sub.poll(timeout=BLOCK_S).values()


def reading(plain: Any) -> Callable[[], list[bytes]]:
    last = plain.xrevrange("peer", count=1)[0][0]

    def read() -> list[bytes]:
        nonlocal last
        answer = plain.xread({"peer": last}, block=int(BLOCK_S * 1000))
        if not answer:
            return []
        entries = answer[0][1]
        last = entries[-1][0]
        return [fields[b"v"] for _, fields in entries]

    return read
