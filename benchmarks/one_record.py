"""Frames of one record: the speed of reading them, and the server's cost of publishing one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import meteor_py as meteor
from benchmarks.common import Bench, Row, cheaper, connected, faster, plain_client, values_of
from benchmarks.publish import xadd_all
from benchmarks.read import PEER, drain, drain_group


def run(bench: Bench) -> list[Row]:
    values = values_of(bench.pick(40_000, 8_000))
    bench.clear()
    with connected(bench.url) as client, plain_client(bench.url) as plain:
        stream = client.stream("single", capacity=len(values))
        costs = server_costs(bench, stream, plain, values)
        assert stream.describe().frames == len(values), "frames of more than one record"
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
    return [faster("read one-record frames as bytes", rate, peer, PEER, 1.2), *costs]


def server_costs(bench: Bench, stream: meteor.Stream, plain: Any, values: list[bytes]) -> list[Row]:
    """Measure the server's CPU for records published one by one; ours and the peer's alternate."""
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


def cpu_us(plain: Any, work: Callable[[], None], count: int, command: str) -> tuple[float, float]:
    """Returns microseconds of server CPU per record: in total minus idle, and by commandstats."""
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
