"""Latency of one record at a time: publish to receipt, acknowledgement, groups, and round trips.

Each process runs our client and redis-py's in turn, so that noise affects both equally. Every row
is measured over a unix socket and over TCP on the loopback interface.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import meteor_py as meteor
from benchmarks.common import (
    RECORD_BYTES,
    Bench,
    Ready,
    Row,
    at_once,
    cheaper,
    connected,
    percentile,
    plain_client,
)

#: Number of warm-up records per client.
WARM_UP = 100
#: Seconds to wait before each record, so that the receiver is already blocked in the server.
SETTLE_S = 0.0005
#: Maximum number of seconds that the receiver blocks in one read.
BLOCK_S = 2.0
BLOCK_MS = int(BLOCK_S * 1000)
#: When acknowledgements are timed, one client publishes this many records before the other's turn.
BLOCK_OF = 25
#: Capacity of redis-py's stream, which is trimmed like ours.
MAXLEN = 10_000

#: Latencies in nanoseconds.
Samples = list[int]
#: Goals for p50 and p99, as multiples of redis-py's.
Goals = tuple[float | None, float | None]


def run(bench: Bench) -> list[Row]:
    with tcp_address(bench) as tcp:
        rows: list[Row] = []
        for name, url, goals in (
            ("unix socket", bench.url, {"one": (0.9, 1.0)}),
            ("TCP", tcp, {"one": (1.0, 1.0)}),
        ):
            rows += one_way(bench, url, name, goals["one"])
            rows += acknowledged(bench, url, name)
            rows += in_group(bench, url, name)
            rows += round_trip(bench, url, name)
    return rows


@contextmanager
def tcp_address(bench: Bench) -> Iterator[str]:
    """Make the server also listen on a loopback port; yield the URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with plain_client(bench.url) as client:
        client.config_set("bind", "127.0.0.1")
        client.config_set("port", port)
        try:
            yield f"redis://127.0.0.1:{port}"
        finally:
            client.config_set("port", 0)


def compared(
    what: str, ours: Sequence[int], peer: Sequence[int], peer_name: str, goals: Goals
) -> list[Row]:
    return [
        cheaper(
            f"{what}, p{percent}",
            "us",
            percentile([sample / 1000 for sample in ours], percent),
            percentile([sample / 1000 for sample in peer], percent),
            peer_name,
            goal,
        )
        for percent, goal in zip((50, 99), goals, strict=True)
    ]


# -- publish to receipt ------------------------------------------------------------------------


def one_way(bench: Bench, url: str, name: str, goals: Goals) -> list[Row]:
    ours, peer = exchange(bench, url, f"latency, {name}", receiver)
    what = f"one record, publish to receipt, {name}"
    return compared(what, ours[0], peer[0], "redis-py, XADD to XREAD BLOCK", goals)


def in_group(bench: Bench, url: str, name: str) -> list[Row]:
    """Measure the times until a group receives a record, and until that record is confirmed."""
    ours, peer = exchange(bench, url, f"latency in a group, {name}", group_receiver)
    peer_name = "redis-py, XADD to XREADGROUP, XACK"
    what = f"one record to a group, {name}"
    return [
        *compared(f"{what}, to receipt", ours[0], peer[0], peer_name, (1.1, None)),
        *compared(f"{what}, to confirmed", ours[1], peer[1], peer_name, (1.1, None)),
    ]


def exchange(bench: Bench, url: str, step: str, receive: Any) -> Any:
    """Return the samples from our receiver and from redis-py's."""
    pairs = bench.pick(5000, 600)
    bench.step(step)
    bench.clear()
    with connected(url) as client, plain_client(url) as plain:
        client.stream("latency", create=True)
        plain.xgroup_create("peer", "g", mkstream=True)
    # For both clients, the receiver asks for the next record through a pipe, outside the measured
    # time.
    asked, ask = multiprocessing.get_context("spawn").Pipe(duplex=False)
    total = WARM_UP + pairs
    _, samples = at_once((sender, (url, total, asked)), (receive, (url, total, ask)))
    return [[found[WARM_UP:] for found in way] for way in samples]


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


def receiver(ready: Ready, url: str, pairs: int, ask: Any) -> list[list[Samples]]:
    with connected(url) as client, plain_client(url) as plain:
        ready()
        with client.stream("latency").subscriber() as sub:
            ways = [(polling(sub), no_confirm), (reading(plain, "peer"), no_confirm)]
            return receive_all(ways, pairs, ask)


def group_receiver(ready: Ready, url: str, pairs: int, ask: Any) -> list[list[Samples]]:
    with (
        connected(url) as client,
        plain_client(url) as plain,
        client.stream("latency").subscriber(group="g") as sub,
    ):
        sub.poll(timeout=0)  # acquire the lease
        ready()
        while sub.poll(timeout=0.05) or plain.xreadgroup("g", "c", {"peer": ">"}):
            pass  # skip the sender's first records
        ids: list[bytes] = []

        def read() -> list[bytes]:
            answer = plain.xreadgroup("g", "c", {"peer": ">"}, block=BLOCK_MS)
            entries = answer[0][1] if answer else []
            ids[:] = [entry_id for entry_id, _ in entries]
            return [fields[b"v"] for _, fields in entries]

        ways = [
            (polling(sub), lambda: sub.confirm().result()),
            (read, lambda: plain.xack("peer", "g", *ids)),
        ]
        return receive_all(ways, pairs, ask)


def no_confirm() -> None:
    pass


def receive_all(
    ways: Sequence[tuple[Callable[[], list[bytes]], Callable[[], object]]], pairs: int, ask: Any
) -> list[list[Samples]]:
    """Ask, wait for the record, and note its age at receipt and after it was confirmed."""
    samples: list[list[Samples]] = [[[], []] for _ in ways]
    for _ in range(pairs):
        for (receive, confirm), (received, confirmed) in zip(ways, samples, strict=True):
            ask.send_bytes(b"next")
            values: list[bytes] = []
            while not values:
                values = receive()
            received.append(time.monotonic_ns() - int(values[0]))
            confirm()
            confirmed.append(time.monotonic_ns() - int(values[0]))
            assert len(values) == 1, "more than one record in flight"
    return samples


def polling(sub: meteor.Subscriber) -> Callable[[], list[bytes]]:
    return lambda: sub.poll(timeout=BLOCK_S).values()


def reading(plain: Any, key: str) -> Callable[[], list[bytes]]:
    newest = plain.xrevrange(key, count=1)
    last = newest[0][0] if newest else b"0-0"

    def read() -> list[bytes]:
        nonlocal last
        answer = plain.xread({key: last}, block=BLOCK_MS)
        if not answer:
            return []
        entries = answer[0][1]
        last = entries[-1][0]
        return [fields[b"v"] for _, fields in entries]

    return read


# -- publish to acknowledgement ----------------------------------------------------------------


def acknowledged(bench: Bench, url: str, name: str) -> list[Row]:
    bench.step(f"publish().result(), {name}")
    bench.clear()
    [(ours, peer)] = at_once((acknowledgements, (url, bench.pick(10_000, 1500))))
    what = f"publish().result(), {name}"
    return compared(what, ours, peer, "redis-py, XADD", (1.05, None))


def acknowledgements(ready: Ready, url: str, count: int) -> tuple[Samples, Samples]:
    value = bytes(RECORD_BYTES)
    with (
        connected(url) as client,
        client.stream("latency", capacity=MAXLEN, create=True).publisher() as pub,
        plain_client(url) as plain,
    ):
        ways: list[tuple[Callable[[], object], Samples]] = [
            (lambda: pub.publish(value).result(), []),
            (lambda: plain.xadd("peer", {"v": value}, maxlen=MAXLEN), []),
        ]
        ready()
        for _ in range(0, count + WARM_UP, BLOCK_OF):
            for publish, samples in ways:
                for _ in range(BLOCK_OF):
                    start = time.monotonic_ns()
                    publish()
                    samples.append(time.monotonic_ns() - start)
    return ways[0][1][WARM_UP:], ways[1][1][WARM_UP:]


# -- round trip --------------------------------------------------------------------------------


def round_trip(bench: Bench, url: str, name: str) -> list[Row]:
    """Measure the time until another process replies to a record on a second stream."""
    bench.step(f"round trip, {name}")
    bench.clear()
    with connected(url) as client:
        for stream in ("there", "back"):
            client.stream(stream, create=True)
    count = bench.pick(5000, 600) + WARM_UP
    (ours, peer), _ = at_once((asker, (url, count)), (answerer, (url, count)))
    what = f"round trip over two streams, {name}"
    return compared(
        what, ours[WARM_UP:], peer[WARM_UP:], "redis-py, two XADD and XREAD BLOCK", (1.0, None)
    )


@contextmanager
def both_ways(
    url: str, source: str, target: str
) -> Iterator[list[tuple[Callable[[bytes], object], Callable[[], list[bytes]]]]]:
    """Yield a function to publish and one to receive, for our client and for redis-py."""
    with (
        connected(url) as client,
        plain_client(url) as plain,
        client.stream(target).publisher() as pub,
        client.stream(source).subscriber() as sub,
    ):
        pub.publish(b"warm up").result()
        peer = f"peer-{target}"
        yield [
            (pub.publish, polling(sub)),
            (lambda value: plain.xadd(peer, {"v": value}), reading(plain, f"peer-{source}")),
        ]


def asker(ready: Ready, url: str, count: int) -> tuple[Samples, Samples]:
    samples: tuple[Samples, Samples] = [], []
    with both_ways(url, "back", "there") as ways:
        ready()
        for number in range(count):
            for (publish, receive), found in zip(ways, samples, strict=True):
                start = time.monotonic_ns()
                publish(b"%d" % number)
                while b"%d" % number not in receive():
                    pass
                found.append(time.monotonic_ns() - start)
    return samples


def answerer(ready: Ready, url: str, count: int) -> None:
    with both_ways(url, "there", "back") as ways:
        ready()
        for number in range(count):
            for publish, receive in ways:
                while b"%d" % number not in receive():
                    pass
                publish(b"%d" % number)
