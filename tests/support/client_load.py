"""Clients that use one stream while its servers change, and checks that compare their results.

with Load(client) as load:
    cluster.move_slot(...)
load.check_nothing_lost()
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Self

import meteor_py as meteor

STREAM = "orders"
GROUP = "billing"
SHARED = "workers"
PEERS = "crew"
KEYS = 50
BATCH = 20
CAPACITY = 10_000_000
#: Timeouts in seconds: for one result, for joining a thread, and for consumers to reach the end.
RESULT_S = 30.0
JOIN_S = 60.0
DRAIN_S = 60.0
LEASE_S = 3.0


class Client(threading.Thread):
    """A thread that calls ``step`` until it is stopped or fails, and keeps the error."""

    def __init__(self, name: str) -> None:
        super().__init__(name=f"load-{name}", daemon=True)
        self.problems: list[str] = []
        self._stopped = threading.Event()

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                self.step()
            self.finish()
        except Exception as error:
            self.problems.append(f"{self.name}: {error!r}")

    def step(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Close everything that the thread has opened."""

    def stop(self) -> None:
        self._stopped.set()
        self.join(JOIN_S)
        if self.is_alive():
            self.problems.append(f"{self.name} did not end within {JOIN_S:g} s")


class Publishing(Client):
    """A thread that publishes numbered values in batches, each value with a key.

    ``window`` is the number of batches in flight. Use 1 to measure pauses. With a larger window, a
    failover can lose more records.
    """

    def __init__(
        self,
        stream: meteor.Stream,
        *,
        window: int = 1,
        batch: int = BATCH,
        acks: int = 0,
        prefix: bytes = b"",
    ) -> None:
        super().__init__(f"{prefix.decode()}publisher")
        self._prefix = prefix
        self.publisher = stream.publisher(acks=acks, delivery_timeout=RESULT_S)
        #: Acknowledged offsets and values. After a failover, an offset can appear twice.
        self.acked: list[tuple[int, bytes]] = []
        #: Values whose outcome is unknown, and values that were refused.
        self.unknown: set[bytes] = set()
        self.refused: set[bytes] = set()
        #: Ranges of offsets that LogTruncated errors reported as lost: first and last of each.
        self.reported: list[tuple[int, int]] = []
        self.longest_pause_s = 0.0
        self.errors: Counter[str] = Counter()
        self._window, self._batch = window, batch
        self._next = 0
        self._last_ack_at = 0.0
        self._pending: deque[tuple[list[bytes], meteor.ManyAck]] = deque()

    def step(self) -> None:
        numbers = range(self._next, self._next + self._batch)
        values = [b"%s%d" % (self._prefix, number) for number in numbers]
        keys = [b"k%d" % (number % KEYS) for number in numbers]
        self._next += self._batch
        try:
            self._pending.append((values, self.publisher.publish_many(values, keys=keys)))
        except meteor.LogTruncated as error:
            self._note_loss(error)
            self.refused.update(values)
        except meteor.MeteorError as error:
            self.errors[type(error).__name__] += 1
            self.refused.update(values)
            self._stopped.wait(0.05)
        self._settle(self._window - 1)
        self._stopped.wait(0.002)

    def finish(self) -> None:
        self._settle(0)
        for last_chance in (self.publisher.flush, self.publisher.close):
            try:
                last_chance(RESULT_S)
            except meteor.LogTruncated as error:
                self._note_loss(error)
            except meteor.MeteorError as error:
                self.errors[type(error).__name__] += 1

    def continues(self) -> bool:
        """Wait until another batch is acknowledged; return whether that happened in time."""
        before = len(self.acked)
        wait_until(lambda: len(self.acked) > before or bool(self.problems))
        return len(self.acked) > before

    def _settle(self, most: int) -> None:
        while len(self._pending) > most:
            values, ack = self._pending.popleft()
            error = ack.exception(RESULT_S)
            offsets = [offset for each in ack.ranges for offset in each]
            if error is None:
                self.acked.extend(zip(offsets, values, strict=True))
                self._note_ack()
                continue
            self.errors[type(error).__name__] += 1
            self.unknown.update(values)
            if isinstance(error, meteor.LogTruncated):
                self._note_loss(error)

    def _note_ack(self) -> None:
        now = time.monotonic()
        if self._last_ack_at:
            self.longest_pause_s = max(self.longest_pause_s, now - self._last_ack_at)
        self._last_ack_at = now

    def _note_loss(self, error: meteor.LogTruncated) -> None:
        self.reported.append((error.first, error.last))


class GroupReading(Client):
    """A group's only member, which reads and confirms every record."""

    def __init__(self, stream: meteor.Stream, group: str = GROUP) -> None:
        super().__init__(f"group-{group}")
        self.subscriber = stream.subscriber(
            group=group, initial_offset="earliest", lease_ttl=LEASE_S
        )
        self.seen: list[tuple[int, bytes]] = []
        self.reported: list[tuple[int, int]] = []
        #: Number of confirms whose outcome is unknown.
        self.unknown = 0

    def step(self) -> None:
        try:
            batch = self.subscriber.poll(0.3)
            self.seen.extend(zip(batch.offsets, batch.values(), strict=True))
            if batch:
                self.subscriber.confirm(batch)
        except meteor.ConnectionFailed:
            self._stopped.wait(0.05)
        except meteor.LogTruncated as error:
            self.reported.append((error.first, error.last))
            self._skip()
        except meteor.OutcomeUnknown:
            self.unknown += 1

    def reach(self, end: int) -> bool:
        """Wait until the group has read up to ``end``; return whether it did in time."""
        return wait_until(
            lambda: self.subscriber.position is not None and self.subscriber.position >= end
        )

    def _skip(self) -> None:
        try:
            self.subscriber.skip_gap()
        except meteor.ConnectionFailed:
            pass  # the next poll raises LogTruncated again

    def finish(self) -> None:
        try:
            self.subscriber.close()
        except meteor.LogTruncated as error:
            self.reported.append((error.first, error.last))
        except (meteor.ConnectionFailed, meteor.OutcomeUnknown):
            self.unknown += 1


class SharedWorking(Client):
    """A shared group consumer that acknowledges each record."""

    def __init__(self, stream: meteor.Stream, number: int, deliveries: Deliveries) -> None:
        super().__init__(f"consumer-{number}")
        self._subscriber = stream.shared_subscriber(
            SHARED, initial_offset="earliest", lease_ttl=LEASE_S
        )
        self._deliveries = deliveries

    def step(self) -> None:
        try:
            for record in self._subscriber.poll(0.3):
                self._deliveries.add(record)
                record.ack()
        except meteor.ConnectionFailed:
            self._stopped.wait(0.05)

    def finish(self) -> None:
        self._subscriber.close()


class Deliveries:
    """Counts each record's deliveries.

    ``disorder`` lists the offsets of records whose first delivery was out of order for their key.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[bytes, int] = {}
        self.counts: Counter[int] = Counter()
        self.disorder: list[int] = []

    def add(self, record: Any) -> None:
        with self._lock:
            self.counts[record.offset] += 1
            first_time = self.counts[record.offset] == 1
            if first_time and record.offset < self._last.get(record.ordering_key, -1):
                self.disorder.append(record.offset)
            self._last[record.ordering_key] = max(
                record.offset, self._last.get(record.ordering_key, -1)
            )


class PeerTalking(Client):
    """A member of a peer group that sends messages to itself."""

    def __init__(self, client: meteor.Client) -> None:
        super().__init__("peer")
        self._group = client.peer_group(PEERS, ttl=LEASE_S)
        self._member = self._group.join("me")
        self.heard: list[object] = []
        self.sent = 0
        self._member.on("count")(lambda message: self.heard.append(message.body))

    def step(self) -> None:
        self._group.member("me").tell("count", self.sent).result(RESULT_S)
        self.sent += 1
        self._stopped.wait(0.1)

    def finish(self) -> None:
        deadline = time.monotonic() + DRAIN_S
        while len(self.heard) < self.sent and time.monotonic() < deadline:
            time.sleep(0.01)
        self._group.close()


class Load:
    """A publisher, a group, two shared consumers and a peer group on one cluster."""

    def __init__(self, client: meteor.Client) -> None:
        self.stream = client.stream(STREAM, capacity=CAPACITY, ordering_key="key")
        self.publishing = Publishing(self.stream)
        self.group = GroupReading(self.stream)
        self.deliveries = Deliveries()
        self.peer = PeerTalking(client)
        self._shared = [SharedWorking(self.stream, n, self.deliveries) for n in range(2)]

    def __enter__(self) -> Self:
        for each in (self.publishing, self.group, self.peer, *self._shared):
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.publishing.stop()
        total = len(self.publishing.acked)
        wait_until(
            lambda: (
                bool(self.problems)
                or (len(self.group.seen) >= total and len(self.deliveries.counts) >= total)
            )
        )
        for each in (self.group, self.peer, *self._shared):
            each.stop()

    @property
    def problems(self) -> list[str]:
        threads = (self.publishing, self.group, self.peer, *self._shared)
        return [problem for each in threads for problem in each.problems]

    def check_nothing_lost(self) -> None:
        """Check that no call failed, and that each record and message arrived once, in order."""
        publishing = self.publishing
        assert self.problems == []
        assert publishing.errors == {}
        assert publishing.reported == self.group.reported == []
        log = read_log(self.stream)
        assert list(log.items()) == publishing.acked
        assert list(log) == list(range(len(log)))
        assert duplicates(log.values()) == []
        assert self.group.seen == publishing.acked
        assert self.deliveries.counts == Counter(log.keys())
        assert self.deliveries.disorder == []
        assert self.stream.shared_group(SHARED).fsck() == []
        assert self.peer.heard == list(range(self.peer.sent))


def read_log(stream: meteor.Stream) -> dict[int, bytes]:
    return {
        offset: value
        for batch in stream.read("earliest")
        for offset, value in zip(batch.offsets, batch.values(), strict=True)
    }


def duplicates(values: Iterable[bytes]) -> list[bytes]:
    return [value for value, count in Counter(values).items() if count > 1]


def unreported(
    known: list[tuple[int, bytes]], log: dict[int, bytes], reported: list[tuple[int, int]]
) -> list[int]:
    """Return the offsets of ``known`` records that the log lost but that were not ``reported``."""
    return [
        offset
        for offset in lost(known, log)
        if not any(first <= offset <= last for first, last in reported)
    ]


def lost(known: list[tuple[int, bytes]], log: dict[int, bytes]) -> list[int]:
    """Return the offsets of ``known`` records that the log lacks or has replaced."""
    return [offset for offset, value in known if log.get(offset) != value]


def wait_until(condition: Callable[[], bool], timeout_s: float = DRAIN_S) -> bool:
    """Wait up to ``timeout_s`` seconds for a condition; return whether it became true."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
