"""Meteor's headline benchmark: 4 publishers and 16 subscribers that each read every record.

As in Meteor's own benchmark, there are no groups, and the ring holds 10,000 x publishers x 2
records. After each 10,000 records, a publisher waits until the slowest subscriber is less than
10,000 records behind all publishers together. The clock runs from the first publish until every
subscriber has every record. Unlike in Meteor, records are distinct and pass through a socket to a
server. Meteor's figure (4.3 M deliveries/s, 4 cores) is for one JVM that contains the ring and all
clients.

Each publisher is a process. The subscribers share one process per core, in which a loop polls them
in turn. Each has its own connection and reads every record itself. In the variant with one call per
record, each subscriber is a process.
"""

from __future__ import annotations

import multiprocessing
import os
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.common import (
    PIPELINE,
    Bench,
    Ready,
    Row,
    at_once,
    connected,
    cut,
    faster,
    plain_client,
    values_of,
)
from benchmarks.common import RECORD_BYTES as SIZE

PUBLISHERS = 4
SUBSCRIBERS = 16
WINDOW = 10_000
CAPACITY = 10_000 * PUBLISHERS * 2
METEOR_DELIVERIES = 4_300_000.0
#: Measured with Meteor's own program on a machine with 2 cores.
METEOR_DELIVERIES_2_CORES = 3_500_000.0
#: An iterating subscriber reports its progress each time it has read this many records.
REPORT = 500

#: Every value starts with the publisher's number and the record's number.
_MARK = struct.Struct(">HQ")


class Counters:
    """Progress counters in memory that all processes share; each process writes only its own."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.sent = context.RawArray("q", PUBLISHERS)
        self.received = context.RawArray("q", SUBSCRIBERS)

    def wait_for_readers(self) -> None:
        while sum(self.sent) - min(self.received) >= WINDOW:
            time.sleep(0.001)


def run(bench: Bench) -> list[Row]:
    each = bench.pick(500_000, 50_000)
    bench.step("4 x 16, order of every record")
    measure(bench, publisher, subscribers, bench.pick(20_000, 10_000), check=True)
    best = bench.best(
        {
            "4 x 16": lambda: measure(bench, publisher, subscribers, each),
            "4 x 16, redis-py": lambda: measure(
                bench, xadd_publisher, xread_subscribers, bench.pick(20_000, 10_000)
            ),
        },
        repeats=bench.pick(3, 1),
    )
    one_by_one = bench.best(
        {
            "4 x 16, one call per record": lambda: measure(
                bench, looping_publisher, iterating_subscriber, each // 5, workers=SUBSCRIBERS
            )
        },
        repeats=bench.pick(3, 1),
    )
    published, peer = best["4 x 16"], best["4 x 16, redis-py"]
    name = f"redis-py, pipeline of {PIPELINE} XADD, XREAD COUNT {PIPELINE}"
    what = f"{PUBLISHERS} publishers x {SUBSCRIBERS} subscribers"
    deliveries = published * SUBSCRIBERS
    return [
        faster(f"{what}, published", published, peer, name),
        faster(f"{what}, deliveries", deliveries, peer * SUBSCRIBERS, name, 9),
        faster(f"{what}, deliveries", deliveries, METEOR_DELIVERIES, "Meteor, on 4 cores", 1),
        faster(
            f"{what}, deliveries, one call per record",
            one_by_one["4 x 16, one call per record"] * SUBSCRIBERS,
            METEOR_DELIVERIES_2_CORES,
            "Meteor, on 2 cores, on another day",
            1,
        ),
    ]


def measure(
    bench: Bench,
    publish: Any,
    subscribe: Any,
    each: int,
    *,
    check: bool = False,
    workers: int | None = None,
) -> float:
    """Return records published per second. Every record reaches every subscriber."""
    bench.clear()
    with connected(bench.url) as client:
        client.stream("fanout", capacity=CAPACITY)
    counters = Counters()
    workers = workers or min(os.cpu_count() or 1, SUBSCRIBERS)
    mine = [tuple(range(worker, SUBSCRIBERS, workers)) for worker in range(workers)]
    publishing = [(publish, (bench.url, i, each, counters)) for i in range(PUBLISHERS)]
    reading = [(subscribe, (bench.url, ids, each, counters, check)) for ids in mine]
    times = at_once(*publishing, *reading)
    assert list(counters.received) == [PUBLISHERS * each] * SUBSCRIBERS, "records are missing"
    seconds: float = max(times[PUBLISHERS:]) - min(times[:PUBLISHERS])
    return PUBLISHERS * each / seconds


def marked_values(number: int, count: int) -> list[bytes]:
    rest = values_of(count, seed=number, size=SIZE - _MARK.size)
    return [_MARK.pack(number, index) + value for index, value in enumerate(rest)]


# -- ours --------------------------------------------------------------------------------------


def publisher(ready: Ready, url: str, number: int, count: int, counters: Counters) -> float:
    calls = cut(marked_values(number, count), WINDOW)
    with connected(url) as client, client.stream("fanout").publisher() as pub:
        start = ready()
        for call in calls:
            pub.publish_many(call)
            counters.sent[number] += len(call)
            counters.wait_for_readers()
    return start


def subscribers(
    ready: Ready, url: str, ids: Sequence[int], each: int, counters: Counters, check: bool
) -> float:
    with ExitStack() as stack:
        client = stack.enter_context(connected(url))
        stream = client.stream("fanout")
        subs = [stack.enter_context(stream.subscriber()) for _ in ids]

        def poll(index: int, wait: bool) -> list[bytes]:
            position = subs[index].position
            batch = subs[index].poll(timeout=0.1 if wait else 0, max_records=CAPACITY)
            assert batch.first_offset == position, "records were skipped"
            return batch.values()

        return read_all(ready, poll, ids, each, counters, check)


def looping_publisher(ready: Ready, url: str, number: int, count: int, counters: Counters) -> float:
    """Publish one record per call, as Meteor's program does."""
    values = marked_values(number, count)
    with connected(url) as client, client.stream("fanout").publisher() as pub:
        start = ready()
        for call in cut(values, WINDOW):
            for value in call:
                pub.publish(value)
            counters.sent[number] += len(call)
            counters.wait_for_readers()
    return start


def iterating_subscriber(
    ready: Ready, url: str, ids: Sequence[int], each: int, counters: Counters, _: bool
) -> float:
    """Take one record at a time, in a loop."""
    (number,) = ids
    total = PUBLISHERS * each
    with connected(url) as client, client.stream("fanout").subscriber() as sub:
        ready()
        for found, _record in enumerate(sub, start=1):
            if found % REPORT == 0 or found == total:
                counters.received[number] = found
                if found == total:
                    break
        return time.monotonic()


def read_all(
    ready: Ready,
    poll: Callable[[int, bool], list[bytes]],
    ids: Sequence[int],
    each: int,
    counters: Counters,
    check: bool,
) -> float:
    """Poll the subscribers in rounds until each has read everything.

    Only the first poll of a round waits, and only if the previous round found no records.
    """
    orders = [Order() for _ in ids]
    ready()
    total = PUBLISHERS * each
    idle = False
    while min(counters.received[i] for i in ids) < total:
        found = 0
        for index, number in enumerate(ids):
            values = poll(index, idle and index == 0)
            if check:
                orders[index].check(values)
            counters.received[number] += len(values)
            found += len(values)
        idle = not found
    return time.monotonic()


class Order:
    """Checks that each publisher's records arrive in order, without gaps or repeats."""

    def __init__(self) -> None:
        self._expected = [0] * PUBLISHERS

    def check(self, values: Sequence[bytes]) -> None:
        for value in values:
            number, index = _MARK.unpack_from(value)
            assert index == self._expected[number], "records out of order"
            self._expected[number] += 1


# -- redis-py ----------------------------------------------------------------------------------


def xadd_publisher(ready: Ready, url: str, number: int, count: int, counters: Counters) -> float:
    calls = cut(marked_values(number, count), WINDOW)
    with plain_client(url) as client:
        pipe = client.pipeline(transaction=False)
        client.ping()
        start = ready()
        for call in calls:
            for part in cut(call, PIPELINE):
                for value in part:
                    pipe.xadd("peer", {"v": value}, maxlen=CAPACITY, approximate=True)
                pipe.execute()
            counters.sent[number] += len(call)
            counters.wait_for_readers()
    return start


def xread_subscribers(
    ready: Ready, url: str, ids: Sequence[int], each: int, counters: Counters, check: bool
) -> float:
    with ExitStack() as stack:
        clients = [stack.enter_context(plain_client(url)) for _ in ids]
        last: list[Any] = [b"0-0"] * len(ids)
        for client in clients:
            client.ping()

        def poll(index: int, wait: bool) -> list[bytes]:
            answer = clients[index].xread(
                {"peer": last[index]}, count=PIPELINE, block=100 if wait else None
            )
            if not answer:
                return []
            entries = answer[0][1]
            last[index] = entries[-1][0]
            return [fields[b"v"] for _, fields in entries]

        return read_all(ready, poll, ids, each, counters, check)
