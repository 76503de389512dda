"""Subscriber groups: reading with confirms, idle groups and their cost, and takeover."""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import meteor_py as meteor
from benchmarks.common import (
    CALL,
    Bench,
    Row,
    connected,
    cut,
    faster,
    plain_client,
    values_of,
    within,
)
from benchmarks.read import PEER, drain, drain_group, filled

#: Count idle members' commands for this many seconds.
_COUNT_S = 20.0


def run(bench: Bench) -> list[Row]:
    return [*reading(bench), idle_groups(bench), take_over(bench), *idle_traffic(bench)]


# -- reading -----------------------------------------------------------------------------------


def reading(bench: Bench) -> list[Row]:
    """Drain a stream in a group that confirms each batch, and without a group."""
    with filled(bench) as (stream, plain):
        # Measure redis-py separately: the memory it leaves behind would favor the next case.
        best = bench.best(
            {
                "grouped": lambda: drain_grouped(stream),
                "ungrouped": lambda: drain(stream, meteor.RecordBatch.values),
            },
            repeats=bench.pick(10, 3),
        ) | bench.best({"redis-py": lambda: drain_group(plain)})
    rate = best["grouped"]
    return [
        faster(
            "read in a group, a confirm per batch", rate, best["ungrouped"], "ours, no group", 0.9
        ),
        faster("read in a group, a confirm per batch", rate, best["redis-py"], PEER),
    ]


def drain_grouped(stream: meteor.Stream) -> float:
    """Read the whole stream in a new group, including its lease and confirms; return records/s."""
    with stream.subscriber(group="drain") as sub:
        end = stream.describe().next
        count, start = 0, time.perf_counter()
        while count < end:
            batch = sub.poll()
            count += len(batch.values())
            ack = sub.confirm()
        assert ack.result() == end
        took = time.perf_counter() - start
    stream.delete_group("drain")
    return count / took


# -- idle groups -------------------------------------------------------------------------------


def idle_groups(bench: Bench) -> Row:
    """Publish while 1,000 groups have members that hold their leases and read nothing."""
    values = values_of(bench.pick(500_000, 100_000))
    count = bench.pick(1_000, 200)
    bench.clear()
    with connected(bench.url) as client:
        stream = client.stream("idle", capacity=100_000)

        def publish() -> float:
            with stream.publisher() as pub:
                pub.publish(b"warm").result()
                start = time.perf_counter()
                for call in cut(values, CALL):
                    pub.publish_many(call)
                pub.flush()
                return len(values) / (time.perf_counter() - start)

        alone: list[float] = []
        beside: list[float] = []
        for _ in range(bench.pick(4, 1)):
            bench.step("publishing alone, and with idle groups")
            alone += [publish() for _ in range(4)]
            with members(bench.url, count):
                beside += [publish() for _ in range(4)]
    # Use medians: each run is short and noisy, but the goal allows a difference of only 5 %.
    ours, peer = statistics.median(beside), statistics.median(alone)
    return faster(f"publish_many with {count:,} idle groups", ours, peer, "without groups", 0.95)


@contextmanager
def members(url: str, count: int) -> Iterator[None]:
    """Run one process that holds the leases of ``count`` groups."""
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=hold, args=(url, count, ready, done), daemon=True)
    process.start()
    try:
        assert ready.wait(120), "the members did not start"
        yield
    finally:
        done.set()
        process.join(60)
        process.kill()
        process.join()


def hold(url: str, count: int, ready: Any, done: Any) -> None:
    with connected(url) as client, ExitStack() as stack:
        stream = client.stream("idle", create=False)
        for number in range(count):
            stream.seek_group(f"g{number}", "latest")
            sub = stack.enter_context(stream.subscriber(group=f"g{number}"))
            sub.poll(0)
            assert sub.is_assigned
        ready.set()
        done.wait(120)


# -- takeover ----------------------------------------------------------------------------------


def take_over(bench: Bench) -> Row:
    """Measure the time from the owner's close to its successor's first record."""
    bench.clear()
    samples: list[float] = []
    with connected(bench.url) as client:
        stream = client.stream("turns")
        with stream.publisher() as pub:
            pub.publish(b"x").result()
        owner = stream.subscriber(group="g")
        owner.poll()
        for _ in range(bench.pick(100, 20)):
            bench.step("takeover")
            found: list[float] = []
            heir = stream.subscriber(group="g")
            thread = threading.Thread(target=wait_for_record, args=(heir, found))
            thread.start()
            time.sleep(0.05)  # time for the successor to begin waiting for the lease
            start = time.perf_counter()
            owner.close()
            thread.join(30)
            samples.append(found[0] - start)
            owner = heir
        owner.close()
    return within("takeover after a clean close, p50", "ms", statistics.median(samples) * 1e3, 20)


def wait_for_record(sub: meteor.Subscriber, found: list[float]) -> None:
    assert len(sub.poll(20)) == 1
    found.append(time.perf_counter())


# -- idle traffic ------------------------------------------------------------------------------


def idle_traffic(bench: Bench) -> list[Row]:
    """Measure an idle group's requests per second, by its owner and by other members."""
    bench.clear()
    seconds = _COUNT_S if not bench.quick else 7.0
    with connected(bench.url) as client, plain_client(bench.url) as plain:
        stream = client.stream("quiet", create=True)
        with stream.subscriber(group="g") as owner, stream.subscriber(group="g") as waiter:
            owner.poll(0)
            bench.step("idle traffic")
            silent = requests_per_s(plain, seconds)
            polling = threading.Thread(target=owner.poll, args=(seconds,))
            polling.start()
            in_poll = requests_per_s(plain, seconds)
            polling.join()
            waiting = threading.Thread(target=waiter.poll, args=(seconds,))
            waiting.start()
            one_waits = requests_per_s(plain, seconds)
            waiting.join()
    what = "requests by an idle group"
    return [
        within(f"{what}, its owner between polls", "/group/s", silent),
        within(f"{what}, its owner in a poll", "/group/s", in_poll),
        within(f"{what}, each waiting member", "/group/s", one_waits - silent),
    ]


def requests_per_s(plain: Any, seconds: float) -> float:
    """Return the rate of client requests: scripts and blocking reads.

    A blocking read counts as one request, together with the read of ``meta`` that is sent with it.
    Counts only commands that no script calls, because the statistics include calls from scripts.
    """
    plain.config_resetstat()
    start = time.perf_counter()
    time.sleep(seconds)
    stats = plain.info("commandstats")
    names = ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_xread")
    calls = sum(stats[name]["calls"] for name in names if name in stats)
    return float(calls) / (time.perf_counter() - start)
