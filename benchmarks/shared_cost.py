"""Shared groups: script CPU per record from ``INFO commandstats``, and bytes per waiting record.

Consumers take turns in one process and fetch no payloads, so that only the scripts count.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa

import meteor_py as meteor
from benchmarks.common import SEED, Bench, Row, connected, plain_client, within
from meteor_py.shared.admin import open_shared
from meteor_py.shared.deliveries import Deliveries

_CONSUMERS = 4
_FRAME = 4_096
#: Number of runs. The lowest cost counts.
_RUNS = 5


def run(bench: Bench) -> list[Row]:
    count = bench.pick(40_000, 8_000)
    few = count // 10
    rng = random.Random(SEED)
    keys = [b"%d" % rng.randrange(1_000) for _ in range(count)]
    rows = [
        within(f"shared: script CPU per record, {what}", "us", least_cost(bench, *case), goal)
        for what, case, goal in (
            ("1,000 ordering keys", (count, keys.__getitem__, 256), 5.0),
            ("distinct keys", (count, lambda n: b"%d" % n, 256), 4.0),
            ("keyless", (count, None, 256), 1.5),
            ("one hot key", (count, lambda n: b"hot", 256), 7.0),
            ("prefetch 1", (few, keys.__getitem__, 1), 80.0),
        )
    ]
    busy, distinct = waiting_bytes(bench, count, 100), waiting_bytes(bench, count, count)
    rows.append(within("shared: bytes per waiting record, busy keys", "B", busy, 12.0))
    rows.append(within("shared: bytes per waiting record, distinct keys", "B", distinct, 220.0))
    return rows


def _fill(client: meteor.Client, count: int, key: Callable[[int], bytes] | None) -> meteor.Stream:
    stream = client.stream("shared", capacity=10_000_000, ordering_key="key")
    with stream.publisher() as pub:
        for start in range(0, count, _FRAME):
            size = min(_FRAME, count - start)
            values = pa.array([b"x"] * size, pa.binary())
            keys = None if key is None else pa.array([key(start + n) for n in range(size)])
            pub.publish_many(values, keys=keys).result(30)
    return stream


def _consumers(stream: meteor.Stream, number: int) -> list[Deliveries]:
    asked = {"lease_ttl": 600.0, "keyless": "free"}
    shared, settings = open_shared(
        stream, stream._handle, "g", asked, meteor.InitialOffset.EARLIEST
    )
    rule = stream.config.ordering_rule
    assert rule is not None
    return [
        Deliveries(shared._protocol, settings, rule, None, f"c{each}") for each in range(number)
    ]


def least_cost(bench: Bench, *case: Any) -> float:
    """Return the lowest cost of several runs.

    The server counts elapsed time, so a run in which the machine paused the server costs more.
    """
    return min(cost(bench, *case) for _ in range(bench.pick(_RUNS, 1)))


def cost(bench: Bench, count: int, key: Callable[[int], bytes] | None, prefetch: int) -> float:
    """Return the script time, in microseconds, per record that is claimed and acknowledged."""
    bench.step("shared: script CPU")
    bench.clear()
    with connected(bench.url) as client, plain_client(bench.url) as plain:
        consumers = _consumers(_fill(client, count, key), _CONSUMERS)
        for consumer in consumers:
            consumer.exchange(prefetch)
        plain.config_resetstat()
        done = 0
        while done < count:
            for consumer in consumers:
                done += acknowledge(consumer)
                asleep = consumer.idle is not None and _is_idle(plain, consumer)
                if not asleep:
                    consumer.exchange(prefetch, mode="wait")
        used = plain.info("commandstats")["cmdstat_evalsha"]["usec"]
        for consumer in consumers:
            consumer.close()
        return float(used) / done


def acknowledge(consumer: Deliveries) -> int:
    """Acknowledge everything that is granted, as if it had been fetched and processed."""
    held = consumer.holdings
    offsets = list(held.granted)
    for offset in offsets:
        batch = held._batch_of.pop(offset)
        batch.acked.append(offset)
        held._dirty[batch] = None
    held.granted.clear()
    return len(offsets)


def _is_idle(plain: Any, consumer: Deliveries) -> bool:
    return plain.zscore(consumer.protocol.key("idle"), consumer.consumer) is not None


def waiting_bytes(bench: Bench, count: int, keys: int) -> float:
    """Return the bytes of group state per waiting record, with ``keys`` ordering keys."""
    bench.step("shared: bytes per waiting record")
    bench.clear()
    with connected(bench.url) as client, plain_client(bench.url) as plain:
        owner, other = _consumers(_fill(client, count, lambda n: b"%08d" % (n % keys)), 2)
        owner.exchange(512)
        if keys < count:  # one consumer holds every key, so the other finds only waiting records
            while other.exchange(512).next < count:
                pass
        else:
            while owner.exchange(512).next < count:
                pass
            owner.exchange(leave=True)
        progress = other.protocol
        names = progress.keys("keys waiting ready blocked delayed")
        size = sum(plain.memory_usage(name, samples=0) or 0 for name in names)
        waiting = client.stream("shared", create=False).shared_group("g").describe().waiting
        for consumer in (owner, other):
            consumer.close()
        return float(size) / waiting
