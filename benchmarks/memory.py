"""Memory of a publisher that sends gigabytes, and of a subscriber that reads them."""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import (
    CALL,
    RECORD_BYTES,
    Bench,
    Ready,
    Row,
    at_once,
    connected,
    cut,
    values_of,
    within,
)

#: Goals for memory growth. The publisher limits its pending records to 64 MiB (max_pending_bytes),
#: but holds them as Python objects, which take more. A subscriber fetches about 1 MiB at a time.
PUBLISHER_MIB = 192
SUBSCRIBER_MIB = 96
#: The library's limit for the size of one fetch, and records that would exceed this limit: many
#: small ones, then large ones.
FETCH_MIB = 128
SMALL, LARGE, LARGE_BYTES = 300, 40, 16 * 1024 * 1024


def run(bench: Bench) -> list[Row]:
    gigabytes = bench.pick(20, 5) / 10
    total = int(gigabytes * 1e9) // RECORD_BYTES // CALL * CALL
    capacity = total // 4
    bench.clear()
    bench.step(f"memory for {gigabytes:g} GB")
    with connected(bench.url) as client:
        client.stream("memory", capacity=capacity)
    done = multiprocessing.get_context("spawn").RawArray("q", 1)
    grown = at_once(
        (publisher, (bench.url, total, capacity // 2, done)), (subscriber, (bench.url, total, done))
    )
    bench.clear()
    rows: list[Row] = []
    for who, (half, whole), goal in zip(
        ("publisher", "subscriber"), grown, (PUBLISHER_MIB, SUBSCRIBER_MIB), strict=True
    ):
        what = f"memory of a {who} after {gigabytes:g} GB ({half:.0f} MiB after half of it)"
        rows.append(within(what, "MiB", whole, goal))
    return [*rows, largest_fetch(bench)]


def largest_fetch(bench: Bench) -> Row:
    """Measure the size of one fetch when records suddenly grow."""
    bench.step("one fetch of large records")
    read, published = (multiprocessing.get_context("spawn").Event() for _ in range(2))
    _, (fetched, grown) = at_once(
        (small_then_large, (bench.url, read, published)), (fetch, (bench.url, read, published))
    )
    bench.clear()
    what = f"one fetch when records grow from 4 B to 16 MiB ({grown:.0f} MiB of memory)"
    return within(what, "MiB", fetched, FETCH_MIB)


def small_then_large(ready: Ready, url: str, read: Any, published: Any) -> None:
    with connected(url) as client:
        stream = client.stream("memory", capacity=1_000)
        ready()
        with stream.publisher(max_record_bytes=LARGE_BYTES) as pub:
            for _ in range(SMALL):
                pub.publish(b"tiny").result()
            read.wait()
            for _ in range(LARGE):
                pub.publish(bytes(LARGE_BYTES)).result()
        published.set()


def fetch(ready: Ready, url: str, read: Any, published: Any) -> tuple[float, float]:
    """Return the size of the records in one fetch, and the memory that the fetch took, in MiB."""
    with connected(url) as client:
        ready()
        stream = client.stream("memory", capacity=1_000)
        with stream.subscriber(initial_offset="earliest") as sub:
            left = SMALL
            while left:
                left -= len(sub.poll())
            read.set()
            published.wait()
            before = peak_mib()
            values = sub.poll(max_records=LARGE).values()
            return sum(map(len, values)) / 2**20, peak_mib() - before


def publisher(ready: Ready, url: str, total: int, lag_max: int, done: Any) -> tuple[float, float]:
    """Publish as fast as possible without overrunning the subscriber.

    Returns how many MiB the peak memory has grown after half of the records, and at the end.
    """
    calls = cut(values_of(CALL * 10), CALL)
    with connected(url) as client, client.stream("memory").publisher() as pub:
        pub.publish(b"0").result()
        ready()
        before, half = peak_mib(), 0.0
        for number in range(total // CALL):
            pub.publish_many(calls[number % len(calls)])
            while (number + 1) * CALL - done[0] > lag_max:
                time.sleep(0.001)
            if not half and number * CALL > total // 2:
                half = peak_mib() - before
        pub.flush()
        return half, peak_mib() - before


def subscriber(ready: Ready, url: str, total: int, done: Any) -> tuple[float, float]:
    with connected(url) as client, client.stream("memory").subscriber() as sub:
        ready()
        before, half = peak_mib(), 0.0
        while done[0] < total:
            done[0] += len(sub.poll().values())
            if not half and done[0] > total // 2:
                half = peak_mib() - before
        return half, peak_mib() - before


def peak_mib() -> float:
    """Return the peak memory of this process in MiB."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would start at the parent's peak
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    unit = 1024 * 1024 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
