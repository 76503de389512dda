"""Publishing into and seeking in a small and a large ring: both should cost the same."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import pyarrow as pa

import meteor_py as meteor
from benchmarks.common import SEED, Bench, Row, cheaper, connected, values_of

SMALL = 10_000
LARGE = 10_000_000
#: Ten million records have to fit into the memory of any machine.
VALUE_BYTES = 10


def run(bench: Bench) -> list[Row]:
    bench.clear()
    chooser = random.Random(SEED)
    count = bench.pick(1500, 300)
    with connected(bench.url) as client:
        bench.step("fill the rings")
        rings = {size: client.stream(f"ring-{size}", capacity=size) for size in (SMALL, LARGE)}
        for size, ring in rings.items():
            # Small frames, and so many of them, that the index of the large ring is large.
            fill(ring, size, frame=bench.pick(250, 1000))
        cost: dict[tuple[str, int], list[float]] = {}
        for _ in range(4):
            for size, ring in rings.items():
                for name, work in (("publish", publish_one), ("seek", seek_one)):
                    bench.step(f"{name} in a ring of {size:,}")
                    samples = work(ring, count // 4, chooser)
                    cost.setdefault((name, size), []).extend(samples)
    peer = f"ring of {SMALL:,}"
    return [
        cheaper(
            f"{what} in a ring of {LARGE:,}",
            "us",
            statistics.median(cost[name, LARGE]),
            statistics.median(cost[name, SMALL]),
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
    assert found.length == size, f"a ring of {found.length} records"


def publish_one(ring: meteor.Stream, count: int, _: random.Random) -> list[float]:
    with ring.publisher() as pub:
        return timed(lambda: pub.publish(b"0123456789").result(), count)


def seek_one(ring: meteor.Stream, count: int, chooser: random.Random) -> list[float]:
    """Anywhere in the ring, and read the record there."""
    state = ring.describe()
    with ring.subscriber() as sub:

        def seek() -> None:
            offset = chooser.randrange(state.first, state.next)
            sub.seek(offset)
            batch = sub.poll(max_records=1)
            assert batch.first_offset == offset, "another record than was asked for"

        return timed(seek, count)


def timed(work: Callable[[], object], count: int) -> list[float]:
    """Microseconds of each call, without the first ones."""
    samples: list[float] = []
    for _ in range(count + 10):
        start = time.perf_counter()
        work()
        samples.append((time.perf_counter() - start) * 1e6)
    return samples[10:]
