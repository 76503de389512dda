"""Shared groups: the duration of the longest call in the worst cases, measured by the server.

The server runs nothing else during a call, so calls must not take longer in larger groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pyarrow as pa

import meteor_py as meteor
from benchmarks.common import Bench, Row, connected, plain_client, within

_GOAL_MS = 2.0
_GROUP = "g"
#: Commands that are not measured, because they wait or belong to the benchmark.
_OTHERS = (b"XREAD", b"SLOWLOG", b"CONFIG", b"FLUSHALL", b"INFO", b"SCRIPT")

Case = Callable[["Setting", int], None]


class Setting:
    """A stream with a shared group, and the longest call in the server's slow log."""

    def __init__(self, client: meteor.Client, plain: Any, stack: ExitStack) -> None:
        self._plain = plain
        self._stack = stack
        self.stream = client.stream("shared", capacity=10_000_000, ordering_key="key")
        self.longest_ms = 0.0

    def fill(self, keys: list[bytes]) -> None:
        with self.stream.publisher() as pub:
            for start in range(0, len(keys), 4_096):
                part = pa.array(keys[start : start + 4_096])
                values = pa.array([b"x"] * len(part), pa.binary())
                pub.publish_many(values, keys=part).result(30)

    def consumer(self) -> meteor.SharedSubscriber:
        options: dict[str, Any] = {"prefetch": 10_000, "max_per_key": 0, "lease_ttl": 600.0}
        return self._stack.enter_context(self.stream.shared_subscriber(_GROUP, **options))

    @property
    def group(self) -> meteor.SharedGroup:
        return self.stream.shared_group(_GROUP)

    @contextmanager
    def measured(self) -> Iterator[None]:
        self._plain.config_set("slowlog-log-slower-than", 100)
        self._plain.config_set("slowlog-max-len", 10_000)
        self._plain.slowlog_reset()
        yield
        for call in self._plain.slowlog_get(10_000):
            if call["command"].split()[0].upper() not in _OTHERS:
                self.longest_ms = max(self.longest_ms, call["duration"] / 1000)


def run(bench: Bench) -> list[Row]:
    count = bench.pick(10_000, 2_000)
    cases: dict[str, Case] = {
        f"claim {count:,} records of distinct keys": _claim,
        f"return {count:,} records of distinct keys": _return_distinct,
        f"return {count:,} records of one key": _return_one_key,
        f"release {count:,} records of 500 keys": _release,
        f"fsck, keys() and purge() with {10 * count:,} waiting records": _inspect,
        f"delete a group with {count:,} waiting keys": _delete,
    }
    rows: list[Row] = []
    for what, case in cases.items():
        # Other processes can only prolong calls, so the lowest result is closest to the truth.
        best = min(_longest(bench, case, count) for _ in range(bench.pick(3, 1)))
        rows.append(within(f"shared: longest call, {what}", "ms", best, _GOAL_MS))
    return rows


def _longest(bench: Bench, case: Case, count: int) -> float:
    bench.step("shared: longest call")
    bench.clear()
    with connected(bench.url) as client, plain_client(bench.url) as plain, ExitStack() as stack:
        setting = Setting(client, plain, stack)
        case(setting, count)
        return setting.longest_ms


def _distinct(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def _hold(consumer: meteor.SharedSubscriber, count: int) -> None:
    """Claim records without fetching them."""
    while len(consumer._deliveries.holdings) < count:
        consumer._deliveries.exchange(512)


def _claim(setting: Setting, count: int) -> None:
    setting.fill(_distinct(count))
    consumer = setting.consumer()
    with setting.measured():
        _hold(consumer, count)


def _return_all(setting: Setting, count: int, keys: list[bytes]) -> None:
    """Leave the group. This returns the records, just as a consumer's death does."""
    setting.fill(keys)
    consumer = setting.consumer()
    _hold(consumer, count)
    with setting.measured():
        consumer.close()


def _return_distinct(setting: Setting, count: int) -> None:
    _return_all(setting, count, _distinct(count))


def _return_one_key(setting: Setting, count: int) -> None:
    _return_all(setting, count, [b"hot"] * count)


def _release(setting: Setting, count: int) -> None:
    setting.fill([b"%d" % (number % 500) for number in range(count)])
    consumer, found = setting.consumer(), 0
    while found < count:
        found += len(consumer.poll(5))
    with setting.measured():
        consumer.rollback()


def _inspect(setting: Setting, count: int) -> None:
    setting.fill([*_distinct(count), *[b"hot"] * 10 * count])
    owner, other = setting.consumer(), setting.consumer()
    _hold(owner, count)
    owner._deliveries.exchange(1)
    with setting.measured():
        while other._deliveries.exchange(512).next < 11 * count:
            pass
        setting.group.fsck()
        setting.group.keys(look_ahead=True)
        setting.group.purge("hot")


def _delete(setting: Setting, count: int) -> None:
    _return_all(setting, count, _distinct(count))
    with setting.measured():
        setting.group.delete(force=True)
