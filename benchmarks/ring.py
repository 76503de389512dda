"""Publishing and seeking should cost the same in a large ring as in a small one."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import pyarrow as pa

import meteor_py as meteor
from benchmarks.common import SEED, Bench, Row, cheaper, connected, values_of

SMALL = 10_000
LARGE = 10_000_000
#: Small records: ten million of them must fit into any machine's memory.
VALUE_BYTES = 10
WARM_UP = 20

Key = tuple[str, int]


def run(bench: Bench) -> list[Row]:
    bench.clear()
    with connected(bench.url) as client, ExitStack() as stack:
        calls: dict[tuple[str, int], Callable[[], None]] = {}
        for size in (SMALL, LARGE):
            bench.step(f"fill a ring of {size:,}")
            ring = client.stream(f"ring-{size}", capacity=size)
            # Publish many small frames, so that the large ring has a large index.
            fill(ring, size, frame=bench.pick(250, 1000))
            calls["publish", size] = publishing(stack.enter_context(ring.publisher()))
            calls["seek", size] = seeking(ring, stack.enter_context(ring.subscriber()))
        bench.step("publish and seek in both rings")
        cost = medians_us(calls, bench.pick(2000, 400))
    peer = f"ring of {SMALL:,}"
    return [
        cheaper(
            f"{what} in a ring of {LARGE:,}",
            "us",
            cost[name, LARGE],
            cost[name, SMALL],
            peer,
            1.2,
        )
        for name, what in (("publish", "publish of one record"), ("seek", "seek to one record"))
    ]


def fill(ring: meteor.Stream, size: int, frame: int) -> None:
    frames = [
        pa.array(values_of(frame, seed, VALUE_BYTES), pa.binary()) for seed in range(SMALL // frame)
    ]
    with ring.publisher() as pub:
        for number in range(size // frame):
            pub.publish_many(frames[number % len(frames)])
    found = ring.describe()
    assert found.length == size, f"the ring holds {found.length} records"


def publishing(pub: meteor.Publisher) -> Callable[[], None]:
    def publish() -> None:
        pub.publish(b"0123456789").result()

    return publish


def seeking(ring: meteor.Stream, sub: meteor.Subscriber) -> Callable[[], None]:
    """Return a function that reads a random record in the newer half of the ring."""
    chooser = random.Random(SEED)
    found = ring.describe()
    first = found.first + found.length // 2  # publishing drops the oldest records

    def seek() -> None:
        offset = chooser.randrange(first, found.next)
        sub.seek(offset)
        batch = sub.poll(max_records=1)
        assert batch.first_offset == offset, "a seek returned another record"

    return seek


def medians_us(calls: Mapping[Key, Callable[[], None]], count: int) -> dict[Key, float]:
    """Make the calls in turn; return the median duration of each in microseconds."""
    samples: dict[Key, list[float]] = {name: [] for name in calls}
    for _ in range(WARM_UP + count):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            samples[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(found[WARM_UP:]) for name, found in samples.items()}
