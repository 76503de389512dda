"""A publisher, a group, a shared group and a peer group under load, and a check of the outcome.

with ClusterLoad(url, rng) as load:
    load.run_until(acknowledged=1_000)
    ...  # move slots, kill nodes
load.check(lost=0)
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Any, Self

import meteor_py as meteor
from tests.support.waiting import eventually

#: Names of the stream and of the peer group. They are in different slots.
STREAM, PEERS = "orders", "workers"
_KEYS = 16
#: Seconds for everything that the load waits for.
PATIENCE_S = 60.0


class Losses:
    """The ranges of acknowledged records that were reported lost."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def note(self, error: BaseException) -> None:
        assert isinstance(error, meteor.LogTruncated), error
        self.ranges.append((error.first, error.last))

    def __contains__(self, offset: int) -> bool:
        return any(first <= offset <= last for first, last in self.ranges)


class ClusterLoad:
    """Clients of one stream that remember what was acknowledged, read and reported lost."""

    def __init__(self, url: str, rng: random.Random, *, acks: int = 0, batch: int = 20) -> None:
        self._url, self._rng, self._acks, self._batch = url, rng, acks, batch
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []
        self._stack = ExitStack()
        #: The offset at which each value was acknowledged.
        self.acknowledged: dict[bytes, int] = {}
        self.unknown: set[bytes] = set()
        self.losses = Losses()
        #: The longest time between two acknowledgements, in seconds.
        self.longest_pause_s = 0.0
        self.received: list[tuple[int, bytes]] = []
        self.shared: dict[bytes, int] = defaultdict(int)

    def __enter__(self) -> Self:
        self._client = self._stack.enter_context(meteor.connect(self._url))
        self.stream = self._client.stream(STREAM, capacity=10_000_000, ordering_key="key")
        for work in (self._publish, self._read_group, self._read_shared):
            thread = threading.Thread(target=self._guarded, args=(work,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        try:
            assert not any(thread.is_alive() for thread in self._threads)
        finally:
            self._stack.close()
        if self._errors:
            raise self._errors[0]

    def run_until(self, acknowledged: int) -> None:
        """Wait until this many records more are acknowledged."""
        goal = len(self.acknowledged) + acknowledged
        eventually(
            lambda: len(self.acknowledged) >= goal or self._errors, PATIENCE_S, "load stands still"
        )

    # -- threads -------------------------------------------------------------------------------

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            self._errors.append(error)

    def _publish(self) -> None:
        number, last = 0, time.monotonic()
        pub = self.stream.publisher(acks=self._acks)
        while not self._stop.is_set():
            batch = {
                b"%d" % (number + i): b"%d" % ((number + i) % _KEYS) for i in range(self._batch)
            }
            number += self._batch
            try:
                acks = {value: pub.publish(value, key=key) for value, key in batch.items()}
            except meteor.LogTruncated as error:
                self.losses.note(error)
                continue
            for value, ack in acks.items():
                try:
                    self.acknowledged[value] = ack.result(PATIENCE_S)
                    now = time.monotonic()
                    self.longest_pause_s = max(self.longest_pause_s, now - last)
                    last = now
                except meteor.LogTruncated as error:
                    self.losses.note(error)
                except (meteor.OutcomeUnknown, meteor.NotReplicated):
                    self.unknown.add(value)
        try:
            pub.close()
        except meteor.LogTruncated as error:
            self.losses.note(error)

    def _read_group(self) -> None:
        with self.stream.subscriber(group="g", initial_offset="earliest") as sub:
            while not self._done(len(self.received)):
                try:
                    batch = sub.poll(0.2)
                except meteor.LogTruncated:
                    sub.skip_gap()
                    continue
                except meteor.ConnectionFailed:  # for longer than the timeout
                    continue
                self.received += [(record.offset, record.value) for record in batch]
                if batch:
                    sub.confirm()

    def _read_shared(self) -> None:
        with self.stream.shared_subscriber("w") as sub:
            while not self._done(len(self.shared)):
                try:
                    for record in sub.poll(0.2):
                        self.shared[record.value] += 1
                        record.ack()
                except (
                    *(meteor.ConnectionFailed, meteor.Fenced),
                    *(meteor.LogTruncated, meteor.OutcomeUnknown),
                ):
                    pass

    def _done(self, count: int) -> bool:
        """Whether a reader has everything, or has waited for long enough."""
        if not self._stop.is_set():
            self._give_up_at = time.monotonic() + 5
            return False
        published = not self._threads[0].is_alive()
        return (published and count >= len(self.log())) or time.monotonic() > self._give_up_at

    # -- the outcome ---------------------------------------------------------------------------

    def log(self) -> list[tuple[int, bytes]]:
        """All records that the log holds now."""
        with meteor.connect(self._url) as m:
            found = m.stream(STREAM, create=False).read(0)
            return [(record.offset, record.value) for batch in found for record in batch]

    def check(self, *, losing: bool = False) -> None:
        """Compare the log with what was acknowledged, and what was read with the log.

        Args:
            losing: Whether the servers may have lost acknowledged records. Each must be reported.
        """
        log = self.log()
        values = [value for _, value in log]
        assert len(values) == len(set(values)), "duplicates"
        at = {value: offset for offset, value in log}
        missing = {v: o for v, o in self.acknowledged.items() if at.get(v) != o}
        assert losing or not missing, f"{len(missing)} lost"
        silent = [offset for offset in missing.values() if offset not in self.losses]
        assert not silent, f"lost without a report: {silent[:10]}, {self.losses.ranges}"
        assert not set(at) - set(self.acknowledged) - self.unknown, "published without an outcome"
        by_key: dict[int, list[int]] = defaultdict(list)
        for _, value in log:
            by_key[int(value) % _KEYS].append(int(value))
        assert all(numbers == sorted(numbers) for numbers in by_key.values()), "out of order"
        if not losing:
            assert not self.losses.ranges, "a loss was reported that did not happen"
            assert self.received == log
            assert self.shared == dict.fromkeys(values, 1)
        with meteor.connect(self._url) as m:
            assert m.stream(STREAM, create=False).shared_group("w").fsck() == []
