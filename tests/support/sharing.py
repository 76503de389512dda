"""Shared groups for tests: a queue as in Qpid's tests, simulated deaths, and state checks.

    with Queue(any_url, "AAB") as queue:
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "A-0"
        queue.ack(c1, "A-0")

Records are named as in Qpid's tests, by key and offset. ``get`` fetches one record without
prefetch, by raising the consumer's limit to one more than it holds. At the end, the queue checks
the group's state.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.redis.scripts import _read
from meteor_py.shared import subscriber as subscribers
from meteor_py.shared.group_state import Progress
from meteor_py.shared.protocol import StepRequest
from meteor_py.shared.record import Standing

STREAM = "orders"
GROUP = "billing"

#: A lease time in seconds that does not expire during a test.
LONG_S = 60.0


class Queue:
    """A stream, one shared group, and the group's consumers. Closes everything that it opened."""

    def __init__(
        self,
        url: str,
        records: Iterable[str] = "",
        *,
        ordering_key: str = "key",
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._stack = ExitStack()
        self.url = url
        self.client = self._stack.enter_context(meteor.connect(url))
        self.stream = self.client.stream(STREAM, ordering_key=ordering_key, **(settings or {}))
        self._options: dict[str, Any] = {"lease_ttl": LONG_S, "max_per_key": 10_000} | options
        self._names: dict[int, str] = {}
        self._held: dict[meteor.SharedSubscriber, dict[str, meteor.SharedRecord]] = {}
        self.publish(records)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        with self._stack:
            if kind is None:
                self.check()

    def publish(self, records: Iterable[str], *, frame: int = 1) -> None:
        """Publish a record for each key in ``records``, in frames of ``frame`` records."""
        names = list(records)
        with self.stream.publisher() as pub:
            for start in range(0, len(names), frame):
                part = names[start : start + frame]
                first = pub.publish_many(
                    [name.encode() for name in part], keys=[name.encode() for name in part]
                ).result(20)
                self._names |= {first + i: f"{name}-{first + i}" for i, name in enumerate(part)}

    # -- consumers -----------------------------------------------------------------------------

    def consumer(self, **options: Any) -> meteor.SharedSubscriber:
        consumer = self.stream.shared_subscriber(GROUP, **(self._options | options))
        self._stack.callback(discard, consumer)
        self._held[consumer] = {}
        return consumer

    def consumers(self, number: int, **options: Any) -> list[meteor.SharedSubscriber]:
        return [self.consumer(**options) for _ in range(number)]

    def get(self, consumer: meteor.SharedSubscriber) -> str | None:
        """Fetch one record and return its name; None if none is available to this consumer."""
        record = get(consumer)
        if record is None:
            return None
        name = f"{record.ordering_key.decode()}-{record.offset}"
        self._held[consumer][name] = record
        return name

    def record(self, consumer: meteor.SharedSubscriber, name: str) -> meteor.SharedRecord:
        """Return the consumer's last record with that name."""
        return self._held[consumer][name]

    def ack(self, consumer: meteor.SharedSubscriber, *names: str) -> None:
        """Acknowledge these records (by default, all that the consumer holds) and flush."""
        for name in names or self._names_held(consumer):
            self.record(consumer, name).ack()
        consumer.flush()
        self.check()

    def release(self, consumer: meteor.SharedSubscriber, *names: str, **how: Any) -> None:
        for name in names or self._names_held(consumer):
            self.record(consumer, name).release(**how)
            consumer.flush()
        self.check()

    def reject(self, consumer: meteor.SharedSubscriber, name: str, reason: str = "") -> None:
        self.record(consumer, name).reject(reason)
        consumer.flush()
        self.check()

    def _names_held(self, consumer: meteor.SharedSubscriber) -> list[str]:
        held = self._held[consumer].items()
        return [name for name, record in held if record.standing is Standing.HELD]

    # -- the group as seen from outside --------------------------------------------------------

    @property
    def shared(self) -> meteor.SharedGroup:
        return self.stream.shared_group(GROUP)

    def keys(self) -> dict[str, meteor.KeyState]:
        return {state.key.decode(): state for state in self.shared.keys(look_ahead=True)}

    def browse(self) -> list[str]:
        """Return the records that a plain reader sees, from the beginning."""
        return [self._names[record.offset] for batch in self.stream.read() for record in batch]

    def check(self) -> None:
        """Check that the state is consistent."""
        check(self.stream, GROUP)

    def key(self, part: str) -> str:
        return keys.shared(STREAM, GROUP, part)


def check(stream: meteor.Stream, *groups: str) -> None:
    """Check the state of the given shared groups (default: all).

    End without an error if a group or the stream was deleted, or the log was truncated.
    """
    try:
        found = groups or [each.name for each in stream.groups() if each.kind == "shared"]
        for name in found:
            assert stream.shared_group(name).fsck() == []
    except (meteor.GroupNotFound, meteor.StreamNotFound, meteor.LogTruncated):
        pass


def get(consumer: meteor.SharedSubscriber, timeout: float = 0.0) -> meteor.SharedRecord | None:
    """Fetch one record, in addition to those that the consumer holds."""
    prefetcher = consumer._prefetcher
    prefetcher.config = replace(prefetcher.config, prefetch=len(prefetcher.deliveries.holdings) + 1)
    records = consumer.poll(timeout, 1)
    return records[0] if records else None


def die(consumer: meteor.SharedSubscriber) -> None:
    """Stop a consumer without letting it leave, like a killed process; make its lease expire."""
    expire(consumer)
    consumer._closed = True
    consumer._prefetcher.halt()
    consumer._lease_renewer.stop()
    consumer._lease_renewer.join(20)
    consumer._prefetcher.close()
    subscribers._open_subscribers.discard(consumer)
    expire(consumer)


def expire(consumer: meteor.SharedSubscriber) -> None:
    """Make a consumer's lease expire now, so that the next consumer to act treats it as dead."""
    protocol, deliveries = consumer._shared._protocol, consumer._deliveries
    make_due(consumer.stream.client._connector, protocol, "leases", deliveries._consumer)


#: Script that changes numbers in the group's progress. KEYS: 1 meta. ARGV: 1 the number of changes;
#: then, for each change, the number's position and the amount to add (or 'x' and the new value).
_CHANGE = b"""
local format = '<ddddddddddddddddc6c6'
local p = {struct.unpack(format, redis.call('HGET', KEYS[1], 'progress'))}
for i = 1, tonumber(ARGV[1]) do
  local place, change = tonumber(ARGV[2 * i]), ARGV[2 * i + 1]
  local value = string.match(change, '^x(.*)$')
  p[place] = value and tonumber(value) or p[place] + change
end
redis.call('HSET', KEYS[1], 'progress', struct.pack(format, unpack(p, 1, 18)))
"""
#: The position of each number in the progress; see ``redis/lua/shared/_group.lua``.
PLACES = {name: number for number, name in enumerate(Progress._fields, 1)}


def change_progress(connector: Any, protocol: Any, **changes: int | str) -> None:
    """Add to numbers in the group's progress. A value such as "x1" sets a number instead."""
    flat = [part for name, value in changes.items() for part in (PLACES[name], value)]
    script = _read("_fake") + _CHANGE  # fakeredis lacks struct
    connector.call("EVAL", script, 1, protocol.key("meta"), len(changes), *flat)


def make_due(connector: Any, protocol: Any, part: str, *members: Any) -> None:
    """Make the given members of ``part`` (``leases``, ``delayed`` or ``dying``) due at once."""
    for member in members:
        connector.call("ZADD", protocol.key(part), "XX", 1, member)
    if connector.call("EXISTS", protocol.key("meta")):
        change_progress(connector, protocol, **{"reap_at" if part == "leases" else "due": "x1"})


def discard(consumer: meteor.SharedSubscriber) -> None:
    """Close a consumer, ignoring errors."""
    try:
        consumer.close()
    except meteor.MeteorError:
        pass


def offsets(records: Iterable[meteor.SharedRecord]) -> list[int]:
    return [record.offset for record in records]


def drain(consumer: meteor.SharedSubscriber, timeout: float = 0.0) -> list[meteor.SharedRecord]:
    """Take and acknowledge all available records."""
    found: list[meteor.SharedRecord] = []
    while records := consumer.poll(timeout):
        for record in records:
            record.ack()
        found += records
    return found


def rest(queue: Queue, consumer: meteor.SharedSubscriber) -> list[str]:
    """Fetch records until none is available to the consumer; return their names."""
    found: list[str] = []
    while name := queue.get(consumer):
        found.append(name)
    return found


class Runner:
    """Runs ``run(handler)`` in a thread during the block."""

    def __init__(
        self,
        consumer: meteor.SharedSubscriber,
        handler: Callable[[meteor.SharedRecord], object],
        concurrency: int = 1,
    ) -> None:
        self._consumer = consumer
        self.error: BaseException | None = None

        def run() -> None:
            try:
                consumer.run(handler, concurrency=concurrency)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, name="test-runner")

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.thread.is_alive():
            self._consumer.stop()
        self.join()

    def join(self) -> None:
        self.thread.join(30)
        assert not self.thread.is_alive(), "run() did not return"


class Steps:
    """Counts the acks, other settlements and requested records in each step of a consumer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, consumer: meteor.SharedSubscriber) -> None:
        protocol = consumer._deliveries.protocol
        real = protocol.step
        self.acks: list[int] = []
        self.others: list[int] = []
        self.wants: list[int] = []

        def step(connection: Any, consumer_id: str, request: StepRequest) -> Any:
            batches = consumer._deliveries.holdings._batches
            partial = [one for one in request.settlements if one.kind == "A"]
            whole = sum(len(batches[number].open) for number in request.acks)
            self.acks.append(whole + sum(len(one.offsets) for one in partial))
            self.others.append(len(request.settlements) - len(partial))
            self.wants.append(request.want)
            return real(connection, consumer_id, request)

        monkeypatch.setattr(protocol, "step", step)


def collect() -> None:
    for _ in range(3):
        gc.collect()
