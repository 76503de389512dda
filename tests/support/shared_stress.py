"""Qpid's stress test for message groups, msg_group_test: generator, checker, stall detector.

A record contains its key, its number within the key, and whether it is the last. All receivers
share the checker: within each key, the numbers must arrive in order, each once, up to the last.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import meteor_py as meteor
from tests.support.sharing import GROUP, STREAM

#: Seconds without a record after which the receivers count as stalled.
STALL_S = 10.0


class Row(NamedTuple):
    """One configuration of the test: a row in Qpid's ``run_msg_group_tests``."""

    messages: int  # per sender
    group_size: int
    prefetch: int
    ack_every: int
    interleave: int
    random_sizes: bool = True
    senders: int = 3
    receivers: int = 2
    fill_first: bool = False
    second_group: bool = False


class Checker:
    """Checks the records of all receivers together."""

    def __init__(self, total: int) -> None:
        self._lock = threading.Lock()
        self._expected: dict[bytes, int] = {}
        self._finished: set[bytes] = set()
        self._receivers: dict[bytes, set[int]] = {}
        self.left = total
        self.heard_at = time.monotonic()
        self.failures: list[str] = []

    @property
    def done(self) -> bool:
        return bool(self.failures) or (self.left == 0 and not self._expected)

    def hear(self, receiver: int, key: bytes, value: bytes) -> None:
        number, last = value.split(b" ")
        with self._lock:
            self.heard_at = time.monotonic()
            expected = self._expected.get(key, 0)
            if key in self._finished or int(number) != expected:
                self.failures.append(f"{key!r}: got {number!r}, expected {expected}")
            self._expected[key] = expected + 1
            self._receivers.setdefault(key, set()).add(receiver)
            self.left -= 1
            if last == b"end":
                del self._expected[key]
                self._finished.add(key)

    def check(self) -> None:
        assert not self.failures, self.failures[:5]
        assert self.left == 0
        assert not self._expected
        several = sum(map(len, self._receivers.values())) / max(len(self._receivers), 1)
        print(f"{len(self._receivers)} keys, {several:.2f} receivers per key")


def generate(row: Row, sender: int, rng: random.Random) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values, alternating between ``interleave`` keys."""
    left, made = row.messages, 0
    turns: list[Iterator[tuple[bytes, bytes]]] = []

    def one(name: bytes, size: int) -> Iterator[tuple[bytes, bytes]]:
        for number in range(size):
            yield name, b"%d %b" % (number, b"end" if number == size - 1 else b"more")

    while left or turns:
        while left and len(turns) < row.interleave:
            size = rng.randint(1, row.group_size) if row.random_sizes else row.group_size
            size = min(size, left)
            turns.append(one(b"%d:%d" % (sender, made), size))
            left, made = left - size, made + 1
        for turn in list(turns):
            item = next(turn, None)
            if item is None:
                turns.remove(turn)
            else:
                yield item


def send(stream: meteor.Stream, row: Row, sender: int, rng: random.Random) -> None:
    with stream.publisher() as publisher:
        for key, value in generate(row, sender, rng):
            publisher.publish(value, key=key)


def receive(stream: meteor.Stream, row: Row, receiver: int, checker: Checker) -> None:
    """Acknowledge each record, but flush only every ``ack_every`` records.

    If ``ack_every`` exceeds the prefetch window, the subscriber must send the acks when the window
    is full.
    """
    try:
        with stream.shared_subscriber(GROUP, prefetch=row.prefetch) as sub:
            unsent = 0
            while not checker.done:
                for record in sub.poll(0.2, 1):
                    checker.hear(receiver, record.ordering_key, record.value)
                    record.ack()
                    unsent += 1
                    if unsent >= row.ack_every:
                        sub.flush()
                        unsent = 0
                if time.monotonic() - checker.heard_at > STALL_S:
                    checker.failures.append(f"stalled with {checker.left} records left")
    except BaseException as error:
        checker.failures.append(repr(error))


def stress(url: str, rng: random.Random, row: Row) -> None:
    with meteor.connect(url) as client:
        stream = client.stream(STREAM, ordering_key="key", capacity=10_000_000)
        if row.second_group:
            stream.shared_subscriber("another").close()
        checker = Checker(row.senders * row.messages)
        seeds = [rng.randrange(1 << 32) for _ in range(row.senders)]
        senders = [
            threading.Thread(target=send, args=(stream, row, number, random.Random(seed)))
            for number, seed in enumerate(seeds)
        ]
        receivers = [
            threading.Thread(target=receive, args=(stream, row, number, checker))
            for number in range(row.receivers)
        ]
        rounds = [senders, receivers] if row.fill_first else [[*senders, *receivers]]
        for threads in rounds:
            checker.heard_at = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        checker.check()
        shared = stream.shared_group(GROUP)
        assert shared.confirmed == stream.end().offset
        assert shared.describe().acked == row.senders * row.messages
        assert shared.fsck() == []
