"""Server memory per record and per key, for docs/production/sizing.md.

``python -m benchmarks.bytes_per_record`` starts a private server, fills a ring in several ways,
and prints, as a Markdown table, the bytes that ``MEMORY USAGE`` reports. It measures bytes, not
time, so a busy machine does not affect the results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.common import (
    CALL,
    PIPELINE,
    Bench,
    Row,
    connected,
    cut,
    plain_client,
    values_of,
    within,
)
from meteor_py.redis import keys
from meteor_py.server import open_embedded

SIZES = (100, 1_000)
#: Number of distinct 8-byte ordering keys, like the ids of the open carts in a shop.
CARTS = 1_000


@dataclass(frozen=True)
class Case:
    """One way to fill a ring."""

    size: int
    bulk: bool
    keyed: bool

    @property
    def what(self) -> str:
        how = "in bulk" if self.bulk else "singly"
        key = ", with an ordering key" if self.keyed else ""
        return f"{self.size} B, published {how}{key}"


CASES = [
    Case(size, bulk, keyed) for size in SIZES for bulk in (False, True) for keyed in (False, True)
]


def run(bench: Bench) -> list[Row]:
    """Measure the bytes per record in each case, then the size of a stream's other keys."""
    count = bench.pick(20_000, 4_000)
    rows = [
        within("100-byte record, published with redis-py's XADD", "B", bytes_of_xadd(bench, count))
    ]
    for case in CASES:
        bench.step(case.what)
        bench.clear()
        rows.append(within(f"record of {case.what}", "B", bytes_per_record(bench.url, case, count)))
    bench.step("other keys")
    bench.clear()
    rows += [within(what, "B", size) for what, size in other_keys(bench.url)]
    return rows


def bytes_of_xadd(bench: Bench, count: int) -> float:
    """Return the bytes per record in the peer's stream. Each record is an entry with one field."""
    bench.step("XADD")
    bench.clear()
    with plain_client(bench.url) as server:
        for values in cut(values_of(count), PIPELINE):
            pipe = server.pipeline(transaction=False)
            for value in values:
                pipe.xadd("peer", {"v": value})
            pipe.execute()
        return usage(server, "peer") / count


def bytes_per_record(url: str, case: Case, count: int) -> float:
    """Fill a ring beyond its capacity, and divide its memory by the number of records it holds."""
    values = values_of(2 * count, size=case.size)
    carts = [b"cart%04d" % (number % CARTS) for number in range(len(values))]
    with connected(url) as client, plain_client(url) as server:
        stream = client.stream("size", capacity=count, ordering_key="key" if case.keyed else None)
        with stream.publisher() as pub:
            if case.bulk:
                for some, their in zip(cut(values, CALL), cut(carts, CALL), strict=True):
                    pub.publish_many(list(some), keys=list(their) if case.keyed else None)
            else:
                for value, cart in zip(values, carts, strict=True):
                    pub.publish(value, key=cart if case.keyed else None).result()
        found = stream.describe()
        memory = usage(server, keys.log("size")) + usage(server, keys.index("size"))
        return memory / found.length


def other_keys(url: str) -> Iterator[tuple[str, float]]:
    """Yield the memory used by each of a stream's small keys while the stream is in use."""
    with connected(url) as client, plain_client(url) as server:
        stream = client.stream("size", ordering_key="key")
        with stream.publisher() as pub:
            for number in range(100):
                pub.publish(b"value", key=b"cart%04d" % number).result()
            with stream.subscriber(group="billing") as sub:
                sub.confirm(sub.poll()).result()
                yield "stream: settings and end of the log", usage(server, keys.meta("size"))
                yield "publisher", sum_of(server, keys.producer("size", "*"))
                yield "subscriber group", usage(server, keys.group("size", "billing"))
                yield "its lease", usage(server, keys.lease("size", "billing"))
            for _ in range(1_500):  # more changes than the log keeps
                stream.seek_group("billing", "earliest", force=True)
            yield "log of the last 1,000 group changes", usage(server, keys.events("size"))
            with stream.shared_subscriber("carts", prefetch=100) as sub:
                records = sub.poll()
                held = sum_of(server, keys.shared("size", "carts", "*"))
                for record in records:
                    record.ack()
                sub.flush()
                idle = sum_of(server, keys.shared("size", "carts", "*"))
                yield "shared group with one consumer", idle
                yield "record held by a consumer, one per key", (held - idle) / len(records)
                parts = [keys.shared("size", "carts", part) for part in ("keys", "waiting")]
                before = sum(usage(server, part) for part in parts)
                end = pub.publish_many([b"value"] * 10_001, keys=[b"busy"] * 10_001).result()
                sub.poll(max_records=1)
                group = stream.shared_group("carts")
                with stream.shared_subscriber("carts") as other:
                    while (found := group.describe()).scanned < end + 10_001:
                        other.poll(0)  # scans records but gets none
                    busy = sum(usage(server, part) for part in parts)
                    yield "record that waits for its key, one key", (busy - before) / found.waiting


def usage(server: Any, key: str) -> float:
    """Return a key's size in bytes, counting every element; 0 if the key does not exist."""
    return float(server.memory_usage(key, samples=0) or 0)


def sum_of(server: Any, pattern: str) -> float:
    return sum(usage(server, key) for key in server.scan_iter(match=pattern.replace("{", "[{]")))


def main() -> int:
    with open_embedded() as server:
        bench = Bench(server.url, "valkey", False, lambda what: print(what, file=sys.stderr))
        with plain_client(server.url) as client:
            info = client.info("server")
        rows = run(bench)
    version = info.get("valkey_version", info["redis_version"])
    print(f"Valkey {version}, bytes according to MEMORY USAGE:\n")
    print("| what | bytes |\n|---|---|")
    for row in rows:
        print(
            f"| {row.what} | {row.ours:.1f} |"
            if row.ours < 10_000
            else f"| {row.what} | {row.ours:.0f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
