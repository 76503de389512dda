"""Redis Cluster: the cost of routing, the gain from more nodes, and the pause in a failover.

All servers listen on TCP. A cluster of one node is compared with the same server without cluster
mode, and three nodes with one server. Three nodes can be faster only if the machine has a core for
each of them and for each publisher.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import meteor_py as meteor
from benchmarks.common import (
    CALL,
    Bench,
    Ready,
    Row,
    at_once,
    cheaper,
    connected,
    cut,
    faster,
    values_of,
    within,
)
from benchmarks.read import drain
from meteor_py.testing import Cluster, Server

_CAPACITY = 100_000
_NODE_TIMEOUT_S = 1.0
#: Seconds between planned failovers. After a shorter time, the primaries refuse to vote again.
_BETWEEN_S = 2.5 * _NODE_TIMEOUT_S


def run(bench: Bench) -> list[Row]:
    return [*one_node(bench), *three_nodes(bench), failover(bench)]


def one_node(bench: Bench) -> list[Row]:
    values = values_of(bench.pick(1_000_000, 200_000))
    with Server(port=0) as server, Cluster(primaries=1) as cluster:
        fill(server.url, "read", values)
        fill(cluster.url, "read", values)
        bench.step("one-node cluster")
        # Use medians: runs differ by far more than the 5 % that the goal allows.
        rates = in_turn(
            {
                "publish_many, one-node cluster": lambda: fill(cluster.url, "publish", values),
                "publish_many, no cluster": lambda: fill(server.url, "publish", values),
                "reading, one-node cluster": lambda: read(cluster.url),
                "reading, no cluster": lambda: read(server.url),
            },
            bench.pick(31, 2),
        )
    peer = "the same server without cluster mode"
    return [
        faster(
            f"{what} through a one-node cluster",
            rates[f"{what}, one-node cluster"],
            rates[f"{what}, no cluster"],
            peer,
            0.95,
        )
        for what in ("publish_many", "reading")
    ]


def fill(url: str, name: str, values: Sequence[bytes]) -> float:
    """Publish all values; return records per second."""
    with connected(url) as client:
        capacity = len(values) + 1 if name == "read" else _CAPACITY
        with client.stream(name, capacity=capacity).publisher() as pub:
            pub.publish(b"warm up").result()
            start = time.perf_counter()
            for call in cut(values, CALL):
                pub.publish_many(call)
            pub.flush()
            return len(values) / (time.perf_counter() - start)


def read(url: str) -> float:
    with connected(url) as client:
        return drain(client.stream("read"), meteor.RecordBatch.values)


def three_nodes(bench: Bench) -> list[Row]:
    count = bench.pick(1_000_000, 100_000)
    streams = bench.pick(1_000, 200)
    with Server(port=0) as server, Cluster(primaries=3) as cluster:
        names = names_on_each(cluster)
        rates = bench.best(
            {
                "three nodes": lambda: publish_to_all(cluster.url, names, count),
                "one server": lambda: publish_to_all(server.url, names, count),
            },
            repeats=bench.pick(5, 2),
        )
        create_streams(cluster.url, streams)
        create_streams(server.url, streams)
        bench.step("list streams")
        times = in_turn({"nodes": lister(cluster.url), "server": lister(server.url)}, 30)
    return [
        faster(
            "publish_many to 3 streams on three nodes, 3 processes",
            rates["three nodes"],
            rates["one server"],
            "one server",
            1.3,
        ),
        cheaper(
            f"list {streams:,} streams on three nodes",
            "ms",
            times["nodes"] * 1000,
            times["server"] * 1000,
            "one server",
            1.5,
        ),
    ]


def names_on_each(cluster: Cluster) -> list[str]:
    """Return one stream name per primary, each in that primary's slots."""
    found: dict[str, str] = {}
    primaries, numbers = cluster.primaries, itertools.count()
    while len(found) < len(primaries):
        name = f"stream-{next(numbers)}"
        found.setdefault(cluster.owner(name).id, name)
    return list(found.values())


def publish_to_all(url: str, names: Sequence[str], count: int) -> float:
    times = at_once(*((publisher, (url, name, count)) for name in names))
    started, ended = zip(*times, strict=True)
    rate: float = len(names) * count / (max(ended) - min(started))
    return rate


def publisher(ready: Ready, url: str, name: str, count: int) -> tuple[float, float]:
    calls = cut(values_of(count), CALL)
    with connected(url) as client, client.stream(name, capacity=_CAPACITY).publisher() as pub:
        pub.publish(b"warm up").result()
        start = ready()
        for call in calls:
            pub.publish_many(call)
        pub.flush()
        return start, time.monotonic()


def create_streams(url: str, count: int) -> None:
    with connected(url) as client:
        for number in range(count):
            client.stream(f"listed-{number}", create=True)


def lister(url: str) -> Callable[[], float]:
    """Return a function that lists all streams and returns the seconds taken."""

    def listing() -> float:
        with connected(url) as client:
            client.streams()  # connect before the clock starts
            start = time.perf_counter()
            client.streams()
            return time.perf_counter() - start

    return listing


def in_turn(cases: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Run the cases in turn, and return the median result of each.

    Every second round is in reverse order, because a run can affect the next one.
    """
    found: dict[str, list[float]] = {name: [] for name in cases}
    order = list(cases.items())
    for _ in range(repeats):
        for name, case in order:
            found[name].append(case())
        order.reverse()
    return {name: statistics.median(results) for name, results in found.items()}


def failover(bench: Bench) -> Row:
    """Measure a busy publisher's longest pause in each planned failover."""
    bench.step("CLUSTER FAILOVER")
    pauses: list[float] = []
    with (
        Cluster(replicas=1, node_timeout_s=_NODE_TIMEOUT_S) as cluster,
        connected(cluster.url) as client,
        client.stream("failover", capacity=_CAPACITY).publisher() as pub,
    ):
        pub.publish(b"warm up").result()
        for _ in range(bench.pick(11, 3)):
            pauses.append(longest_pause(pub, lambda: cluster.failover(cluster.owner("failover"))))
            cluster.wait_until_stable()
            time.sleep(_BETWEEN_S)
    what = "pause of publishing in a planned CLUSTER FAILOVER, median"
    return within(what, "ms", statistics.median(pauses) * 1000, 100)


def longest_pause(pub: meteor.Publisher, event: Callable[[], Any]) -> float:
    """Return the longest time between two acknowledgements while ``event`` runs."""
    done = threading.Event()
    longest = 0.0

    def publish() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not done.is_set():
            pub.publish(b"x" * 100).result(10.0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        event()
    finally:
        done.set()
        thread.join()
    return longest
