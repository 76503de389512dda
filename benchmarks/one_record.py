"""One-record frames: the cost to read them, the server's cost to publish one, and 50 publishers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import meteor_py as meteor
from benchmarks.common import (
    PIPELINE,
    Bench,
    Ready,
    Row,
    at_once,
    cheaper,
    connected,
    faster,
    plain_client,
    values_of,
    within,
)
from benchmarks.publish import xadd_all
from benchmarks.read import PEER, drain, drain_group
from meteor_py.redis import keys
from meteor_py.redis.scripts import PUBLISH

#: Number of publishers that publish at the same time. Each waits for every acknowledgement.
PUBLISHERS = 50
#: Capacity of the ring, and of redis-py's stream.
CAPACITY = 10_000
#: Goal, in microseconds, for the script that appends one record.
SCRIPT_GOAL_US = 13


def run(bench: Bench) -> list[Row]:
    values = values_of(bench.pick(40_000, 8_000))
    bench.clear()
    with connected(bench.url) as client, plain_client(bench.url) as plain:
        stream = client.stream("single", capacity=len(values))
        costs = server_costs(bench, stream, plain, values)
        assert stream.describe().frames == len(values), "a frame has more than one record"
        plain.delete("peer")
        xadd_all(plain, values)
        best = bench.best(
            {
                "read one-record frames": lambda: drain(stream, meteor.RecordBatch.values),
                "read one-record frames, redis-py": lambda: drain_group(plain),
            },
            repeats=bench.pick(7, 3),
        )
    rate, peer = best.values()
    return [
        faster("read one-record frames as bytes", rate, peer, PEER, 1.2),
        *costs,
        script_cost(bench),
        *fifty_publishers(bench),
    ]


def server_costs(bench: Bench, stream: meteor.Stream, plain: Any, values: list[bytes]) -> list[Row]:
    """Measure server CPU for records published one by one; ours and the peer's alternate."""
    part = len(values) // 4
    ours: list[tuple[float, float]] = []
    peer: list[tuple[float, float]] = []
    with stream.publisher() as pub:
        for start in range(0, len(values), part):
            some = values[start : start + part]

            def publish(some: list[bytes] = some) -> None:
                for value in some:
                    pub.publish(value).result()

            def xadd(some: list[bytes] = some) -> None:
                for value in some:
                    plain.xadd("peer", {"v": value})

            bench.step("server CPU of a one-record publish")
            ours.append(cpu_us(plain, publish, len(some), "evalsha"))
            bench.step("server CPU of XADD")
            peer.append(cpu_us(plain, xadd, len(some), "xadd"))
    whole, inside = min(x for x, _ in ours), min(y for _, y in ours)
    peer_whole, peer_inside = min(x for x, _ in peer), min(y for _, y in peer)
    what = "server CPU of a one-record publish"
    return [
        cheaper(f"{what}, total", "us", whole, peer_whole, "bare XADD", 8),
        cheaper(f"{what}, inside the command", "us", inside, peer_inside, "bare XADD"),
    ]


def script_cost(bench: Bench) -> Row:
    """Measure the publish script in pipelines, which keep the server's caches warm."""
    bench.step("publish script")
    bench.clear()
    value, costs = values_of(1)[0], []
    with connected(bench.url) as client, plain_client(bench.url) as plain:
        # The ring is soon full, so each new frame drops an old one.
        stream = client.stream("script", capacity=PIPELINE)
        stream_keys = [keys.log("script"), keys.meta("script"), keys.producer("script", "bench")]
        history = plain.info("replication")["master_replid"]
        epoch = plain.hget(keys.meta("script"), "epoch")
        sha = plain.script_load(PUBLISH.source)
        for first in range(0, bench.pick(60, 20) * PIPELINE, PIPELINE):
            pipe = plain.pipeline(transaction=False)
            for sequence in range(first, first + PIPELINE):
                lifetime = "" if sequence else 60_000
                numbers = (0, sequence, 1, 0, lifetime)
                frame = ("0v", value, "", epoch)
                pipe.evalsha(sha, 3, *stream_keys, stream.incarnation, history, *numbers, *frame)
            plain.config_resetstat()
            assert pipe.execute()[-1] == first + PIPELINE - 1, "a frame was refused"
            stats = plain.info("commandstats")["cmdstat_evalsha"]
            costs.append(float(stats["usec_per_call"]))
    return within("publish script, one record, pipelined", "us", min(costs), SCRIPT_GOAL_US)


def cpu_us(plain: Any, work: Callable[[], None], count: int, command: str) -> tuple[float, float]:
    """Return server CPU per record in microseconds: total minus idle, and inside the command."""
    idle_start = _cpu_s(plain)
    time.sleep(0.2)
    idle = (_cpu_s(plain) - idle_start) / 0.2
    plain.config_resetstat()
    before, start = _cpu_s(plain), time.perf_counter()
    work()
    used = _cpu_s(plain) - before - idle * (time.perf_counter() - start)
    inside = plain.info("commandstats")[f"cmdstat_{command}"]["usec_per_call"]
    return used / count * 1e6, float(inside)


def _cpu_s(plain: Any) -> float:
    info = plain.info("cpu")
    return float(info["used_cpu_user"] + info["used_cpu_sys"])


# -- many publishers ---------------------------------------------------------------------------


def fifty_publishers(bench: Bench) -> list[Row]:
    """Measure 50 publishers that wait for each record: as threads, and as separate processes."""
    seconds = bench.pick(3, 1)
    rows = []
    for kind, goal, jobs in (("threads", 1.2, 1), ("processes", 1.0, PUBLISHERS)):
        rates = bench.best(
            {
                f"{PUBLISHERS} publishers in {kind}{suffix}": partial(
                    publish_at_once, bench, work, jobs, seconds
                )
                for work, suffix in ((publish_one, ""), (xadd_one, ", redis-py"))
            },
            repeats=bench.pick(3, 2),
        )
        ours, peer = rates.values()
        what = f"{PUBLISHERS} publishers in {kind}, one record at a time"
        rows.append(faster(what, ours, peer, "redis-py, XADD", goal))
    return rows


def publish_at_once(bench: Bench, work: Any, processes: int, seconds: int) -> float:
    """Return the records per second of 50 publishers, divided among ``processes`` processes."""
    bench.clear()
    with connected(bench.url) as client:
        client.stream("fifty", capacity=CAPACITY)
    job = (publish_in_threads, (bench.url, work, PUBLISHERS // processes, seconds))
    return float(sum(at_once(*[job] * processes)))


def publish_in_threads(ready: Ready, url: str, work: Any, count: int, seconds: int) -> float:
    """Run ``work`` in ``count`` threads; return records per second."""
    opened = threading.Barrier(count + 1)
    counts: list[int] = []

    def publish() -> None:
        with work(url) as publish_next:
            publish_next()
            opened.wait()
            opened.wait()
            end, done = time.monotonic() + seconds, 0
            while time.monotonic() < end:
                publish_next()
                done += 1
            counts.append(done)

    threads = [threading.Thread(target=publish) for _ in range(count)]
    for thread in threads:
        thread.start()
    opened.wait()
    ready()
    opened.wait()
    for thread in threads:
        thread.join()
    assert len(counts) == count, "a publisher failed"
    return sum(counts) / seconds


@contextmanager
def publish_one(url: str) -> Iterator[Callable[[], object]]:
    value = values_of(1)[0]
    with connected(url) as client, client.stream("fifty").publisher() as pub:
        yield lambda: pub.publish(value).result()


@contextmanager
def xadd_one(url: str) -> Iterator[Callable[[], object]]:
    value = values_of(1)[0]
    with plain_client(url) as plain:
        yield lambda: plain.xadd("peer", {"v": value}, maxlen=CAPACITY)
