"""Shared groups: the server's cost of claiming and acknowledging, and the speed of consumers."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import shared_cost, shared_longest
from benchmarks.common import SEED, Bench, Row, cheaper, connected, faster, plain_client, values_of

PEER = "XREADGROUP + XACK, unordered"
_KEYS = 1_000
_CONSUMERS = 4
_BATCH = 256
#: Seconds after which consumers count as stuck.
_STUCK_S = 120.0


def run(bench: Bench) -> list[Row]:
    count = bench.pick(200_000, 40_000)
    cpu, peer_cpu = in_turn(bench, count)
    rates = bench.best(
        {
            "shared": lambda: processes(bench, count, consume, publish),
            "shared, keyless": lambda: processes(bench, count, consume, publish_keyless),
            PEER: lambda: processes(bench, count, consume_plain, add),
        },
        repeats=3,
    )
    what = f"shared: claim and ack, {_KEYS:,} ordering keys, {_CONSUMERS} consumers"
    keyless = f"shared: claim and ack, keyless, {_CONSUMERS} consumers"
    return [
        cheaper(f"{what}, server CPU", "us", cpu, peer_cpu, PEER),
        faster(f"{what}, processes", rates["shared"], rates[PEER], PEER, 0.7),
        faster(f"{keyless}, processes", rates["shared, keyless"], rates[PEER], PEER, 1.0),
        with_stuck_owner(bench),
        empty_claims(bench),
        *shared_cost.run(bench),
        *shared_longest.run(bench),
    ]


def publish(url: str, count: int) -> None:
    """Publish records with shuffled ordering keys."""
    _publish(url, values_of(count), keys_of(count))


def publish_keyless(url: str, count: int) -> None:
    _publish(url, values_of(count), [None] * count)


def _publish(url: str, values: list[bytes], keys: Sequence[bytes | None]) -> None:
    with connected(url) as client:
        stream = client.stream("shared", capacity=10_000_000, ordering_key="key")
        with stream.publisher() as pub:
            for start in range(0, len(values), 10_000):
                stop = start + 10_000
                pub.publish_many(values[start:stop], keys=keys[start:stop])
        stream.shared_subscriber("g").close()  # creates the group


def add(url: str, count: int) -> None:
    """Add the same records as plain entries."""
    with plain_client(url) as client:
        pairs = list(zip(keys_of(count), values_of(count), strict=True))
        for start in range(0, count, 500):
            pipe = client.pipeline(transaction=False)
            for key, value in pairs[start : start + 500]:
                pipe.xadd("plain", {"k": key, "v": value})
            pipe.execute()
        client.xgroup_create("plain", "g", "0")


def keys_of(count: int) -> list[bytes]:
    rng = random.Random(SEED)
    return [b"key-%d" % rng.randrange(_KEYS) for _ in range(count)]


# -- the server's CPU --------------------------------------------------------------------------


def in_turn(bench: Bench, count: int) -> tuple[float, float]:
    """Return microseconds of server CPU per record, for our consumers and for the peer's."""
    bench.step("shared: server CPU")
    bench.clear()
    publish(bench.url, count)
    with connected(bench.url) as client, plain_client(bench.url) as plain:
        stream = client.stream("shared", create=False)
        subs = [stream.shared_subscriber("g", prefetch=_BATCH) for _ in range(_CONSUMERS)]

        def poll() -> int:
            done = 0
            for sub in subs:
                records = sub.poll(0)
                sub.ack(records)
                done += len(records)
            return done

        ours = cpu_of(plain, count, poll)
        for sub in subs:
            sub.close()
        bench.clear()
        add(bench.url, count)

        def read() -> int:
            done = 0
            for number in range(_CONSUMERS):
                found = plain.xreadgroup("g", f"c{number}", {"plain": ">"}, count=_BATCH)
                if found:
                    ids = [entry for entry, _ in found[0][1]]
                    plain.xack("plain", "g", *ids)
                    done += len(ids)
            return done

        return ours, cpu_of(plain, count, read)


def cpu_of(plain: Any, count: int, turn: Callable[[], int]) -> float:
    before, done = used(plain), 0
    while done < count:
        done += turn()
    return (used(plain) - before) / count * 1e6


def used(plain: Any) -> float:
    facts = plain.info("cpu")
    return float(facts["used_cpu_sys"] + facts["used_cpu_user"])


# -- consumers in processes --------------------------------------------------------------------


def processes(bench: Bench, count: int, work: Any, fill: Callable[[str, int], None]) -> float:
    """Return the records per second handled by several consumers, each in its own process."""
    bench.clear()
    fill(bench.url, count)
    context = multiprocessing.get_context("spawn")
    done, start = context.Value("q", 0), context.Event()
    ready = context.Semaphore(0)
    workers = [
        context.Process(
            target=work, args=(bench.url, number, count, ready, start, done), daemon=True
        )
        for number in range(_CONSUMERS)
    ]
    for worker in workers:
        worker.start()
    for _ in workers:
        assert ready.acquire(timeout=_STUCK_S), "a consumer did not start"
    began = time.perf_counter()
    start.set()
    for worker in workers:
        worker.join(_STUCK_S)
        assert worker.exitcode == 0, "a consumer failed"
    return count / (time.perf_counter() - began)


def consume(url: str, number: int, count: int, ready: Any, start: Any, done: Any) -> None:
    with (
        connected(url) as client,
        client.stream("shared", create=False).shared_subscriber("g", prefetch=_BATCH) as sub,
    ):
        ready.release()
        start.wait(_STUCK_S)
        while done.value < count:
            records = sub.poll(0.05)
            sub.ack(records)
            with done.get_lock():
                done.value += len(records)


def consume_plain(url: str, number: int, count: int, ready: Any, start: Any, done: Any) -> None:
    with plain_client(url) as client:
        client.ping()
        ready.release()
        start.wait(_STUCK_S)
        while done.value < count:
            found = client.xreadgroup("g", f"c{number}", {"plain": ">"}, count=_BATCH, block=50)
            if found:
                client.xack("plain", "g", *[entry for entry, _ in found[0][1]])
                with done.get_lock():
                    done.value += len(found[0][1])


# -- blocked keys ------------------------------------------------------------------------------


def with_stuck_owner(bench: Bench) -> Row:
    """Measure the rate for other keys while the owner of 90 % of the records is stuck."""
    count = bench.pick(200_000, 40_000)
    rng = random.Random(SEED)
    others = [b"key-%d" % rng.randrange(_KEYS) for _ in range(count // 10)]
    mixed = [key for other in others for key in (*[b"hot"] * 9, other)]

    def drain(keys: list[bytes], *, stuck: bool) -> float:
        bench.clear()
        with connected(bench.url) as client:
            stream = client.stream("shared", capacity=10_000_000, ordering_key="key")
            with stream.publisher() as pub:
                pub.publish(b"x", key=b"hot").result()
                pub.publish_many([b"x" * 100] * len(keys), keys=keys).result(_STUCK_S)
            holder = stream.shared_subscriber("g", prefetch=1)
            if stuck:
                assert holder.poll(5)[0].ordering_key == b"hot"
            done, want = 0, len(others)
            with stream.shared_subscriber("g", prefetch=_BATCH) as sub:
                began = time.perf_counter()
                while done < want:
                    for record in sub.poll(1):
                        done += record.ordering_key != b"hot"
                        record.ack()
                took = time.perf_counter() - began
            holder.close()
            return want / took

    cases = {
        "stuck": lambda: drain(mixed, stuck=True),
        "not stuck": lambda: drain(mixed, stuck=False),
    }
    best = bench.best(cases, repeats=bench.pick(3, 1))
    what = "shared: other keys, while the owner of 90 % of the records is stuck"
    return faster(what, best["stuck"], best["not stuck"], "no owner is stuck", 0.8)


def empty_claims(bench: Bench) -> Row:
    """Count the commands in a claim that finds nothing: another consumer holds the only key."""
    few, many = 1_000, bench.pick(999_999, 50_000)
    peer, ours = (commands_of_an_empty_claim(bench, size) for size in (few, many))
    what = f"shared: an empty claim behind {many:,} blocked records"
    return cheaper(what, "commands", ours, peer, f"behind {few:,}", 1.0)


def commands_of_an_empty_claim(bench: Bench, blocked: int) -> float:
    bench.step(f"shared: {blocked:,} blocked records")
    bench.clear()
    with connected(bench.url) as client, plain_client(bench.url) as plain:
        stream = client.stream("shared", capacity=10_000_000, ordering_key="key")
        with stream.publisher() as pub:
            for start in range(0, blocked + 1, 10_000):
                size = min(10_000, blocked + 1 - start)
                pub.publish_many([b"x"] * size, keys=[b"hot"] * size)
        with (
            stream.shared_subscriber("g", prefetch=1, max_per_key=1) as holder,
            stream.shared_subscriber("g") as sub,
        ):
            assert holder.poll(5)
            while stream.shared_group("g").describe().scanned <= blocked:
                assert not sub.poll(0)
            assert not sub.poll(0)
            before = calls(plain)
            assert not sub.poll(0)
            return calls(plain) - before


def calls(plain: Any) -> float:
    """Return how many commands the server has executed, including those called by scripts.

    Does not count INFO, which this function calls itself.
    """
    stats = plain.info("commandstats")
    return float(sum(stat["calls"] for name, stat in stats.items() if name != "cmdstat_info"))
