"""After any sequence of operations, the log matches a simple model.

Hypothesis drives a real server (AOF, every write on disk) through publishing by several producers,
retries, stale producers, new producer epochs, trims, kill -9 with restart, deleting and recreating,
and reads at any offset. The model is a few lists. If a test fails, Hypothesis searches for a
shorter sequence that also fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import meteor_py as meteor
from meteor_py.records.frame import Columns, encode, fingerprint
from meteor_py.redis import keys, scripts
from tests.conftest import ServerFactory
from tests.support.servers import Server

PRODUCERS = ("a", "b", "c")
producers = st.sampled_from(PRODUCERS)
sizes = st.sampled_from([1, 1, 2, 5, 33, 40])
capacities = st.sampled_from([1, 3, 10, 50, 200])
names = count()


@dataclass
class Sent:
    """One of a producer's batches: the request and its reply."""

    count: int
    name: str
    payload: bytes
    first: int


@dataclass
class Producer:
    epoch: int = 0
    sent: list[Sent] = field(default_factory=list)


class Model:
    """The expected state of one incarnation of the stream."""

    def __init__(self, incarnation: int, capacity: int) -> None:
        self.incarnation = incarnation
        self.capacity = capacity
        self.frames: list[tuple[int, int]] = []  # each frame's first and last offset
        self.next = 0
        self.producers: dict[str, Producer] = {}

    @property
    def first(self) -> int:
        return self.frames[0][0] if self.frames else self.next

    def value(self, offset: int) -> bytes:
        return b"incarnation %d, record %d" % (self.incarnation, offset)

    def append(self, n: int) -> None:
        self.frames.append((self.next, self.next + n - 1))
        self.next += n
        self.trim()

    def trim(self) -> None:
        self.frames = [frame for frame in self.frames if frame[1] >= self.next - self.capacity]


class Machine(RuleBasedStateMachine):
    server: Server

    def __init__(self) -> None:
        super().__init__()
        self.name = f"model-{next(names)}"
        self.client = meteor.connect(self.server.url)
        self.restarts = 0
        self.history = self.server_history()
        self.meta_history = self.history

    @initialize(capacity=capacities)
    def create(self, capacity: int) -> None:
        self.model = Model(0, capacity)
        self.stream = self.client.stream(self.name, capacity=capacity)
        self.tail = self.stream.subscriber()
        self.skipping = False

    def teardown(self) -> None:
        if hasattr(self, "tail"):
            self.tail.close()
        self.client.close()

    # -- publishing ----------------------------------------------------------------------------

    def server_history(self) -> str:
        return str(self.server.info("replication")["master_replid"])

    def call(self, producer: str, epoch: int, sequence: int, sent: Sent) -> tuple[Any, ...]:
        def publish() -> tuple[Any, ...]:
            reply = self.client._connector.run(
                scripts.PUBLISH,
                [keys.log(self.name), keys.meta(self.name), keys.producer(self.name, producer)],
                [
                    self.stream.incarnation, self.history, epoch, sequence, sent.count,
                    fingerprint(sent.payload), 60_000, sent.name, sent.payload, "",
                ],
            )  # fmt: skip
            return tuple(x.decode() if isinstance(x, bytes) else x for x in reply)

        if self.history != self.meta_history:
            assert publish() == ("HISTORY", self.meta_history)
            begun = self.client._connector.run(
                scripts.NEW_EPOCH,
                [keys.meta(self.name)],
                [self.stream.incarnation, self.meta_history, self.history, 1],
            )
            assert begun == [b"OK"]
            self.meta_history = self.history
        reply = publish()
        return reply[:2] if reply[0] == "OK" else reply

    def batch(self, n: int) -> Sent:
        values = [self.model.value(self.model.next + i) for i in range(n)]
        name, payload = encode(Columns(values), "none")
        return Sent(n, name, bytes(payload), self.model.next)

    def state(self, producer: str) -> Producer:
        return self.model.producers.setdefault(producer, Producer())

    @rule(producer=producers, n=sizes)
    def publish(self, producer: str, n: int) -> None:
        state, sent = self.state(producer), self.batch(n)
        reply = self.call(producer, state.epoch, len(state.sent), sent)
        assert reply == ("OK", self.model.next)
        state.sent.append(sent)
        self.model.append(n)

    @rule(producer=producers, back=st.integers(1, 10))
    def repeat(self, producer: str, back: int) -> None:
        state = self.state(producer)
        if back > len(state.sent):
            return
        sequence = len(state.sent) - back
        reply = self.call(producer, state.epoch, sequence, state.sent[sequence])
        first = state.sent[sequence].first
        assert reply == (("OK", first) if back <= 8 else ("OUTOFSEQ", len(state.sent)))

    @rule(producer=producers, n=sizes)
    def publish_with_a_hole(self, producer: str, n: int) -> None:
        state = self.state(producer)
        reply = self.call(producer, state.epoch, len(state.sent) + 2, self.batch(n))
        expected = ("OUTOFSEQ", len(state.sent)) if state.sent else ("NOPRODUCER",)
        assert reply == expected

    @rule(producer=producers, n=sizes)
    def bump(self, producer: str, n: int) -> None:
        state, sent = self.state(producer), self.batch(n)
        former = state.epoch
        known = bool(state.sent)
        state.epoch += 1
        assert self.call(producer, state.epoch, 0, sent) == ("OK", self.model.next)
        state.sent = [sent]
        self.model.append(n)
        if known:
            late = self.call(producer, former, 0, sent)
            assert late == ("STALEPRODUCER", state.epoch)

    @rule(n=sizes)
    def publish_by_the_library(self, n: int) -> None:
        first = self.model.next
        with self.stream.publisher() as pub:
            values = [self.model.value(first + i) for i in range(n)]
            frames = [values[i : i + self.model.capacity] for i in range(0, n, self.model.capacity)]
            for part in frames:
                assert pub.publish_many(part).result() == self.model.next
                self.model.append(len(part))
        self.meta_history = self.history

    # -- everything else -----------------------------------------------------------------------

    @rule(capacity=capacities)
    def configure(self, capacity: int) -> None:
        self.stream.configure(capacity=capacity)
        self.model.capacity = capacity
        self.model.trim()

    @precondition(lambda self: self.restarts < 2)
    @rule(really=st.integers(0, 5))
    def kill(self, really: int) -> None:
        if really:
            return  # restart rarely: it takes as long as a hundred other steps
        self.restarts += 1
        self.server.kill()
        self.server.restart()
        self.history = self.server_history()

    @rule(capacity=capacities)
    def delete_and_create(self, capacity: int) -> None:
        tail_was_at = self.tail.position
        self.stream.delete()
        with pytest.raises(meteor.StreamNotFound):
            self.tail_poll_to_the_end()
        self.stream = self.client.stream(self.name, capacity=capacity)
        self.meta_history = self.history
        self.model = Model(self.model.incarnation + 1, capacity)
        with pytest.raises(meteor.LogTruncated) as caught:
            self.tail_poll_to_the_end()
        assert caught.value.first == 0
        assert caught.value.last + 1 >= tail_was_at
        self.tail.skip_gap()
        self.skipping = True
        assert self.tail.position == 0

    def tail_poll_to_the_end(self) -> None:
        while self.tail.poll(timeout=0):
            pass

    @rule(data=st.data(), most=st.sampled_from([1, 7, 10_000]))
    def read(self, data: st.DataObject, most: int) -> None:
        start = data.draw(st.integers(0, self.model.next + 1))
        with self.stream.subscriber() as sub:
            if start > self.model.next:
                with pytest.raises(ValueError, match="beyond the end"):
                    sub.seek(start)
                return
            sub.seek(start)
            if start < self.model.first:
                with pytest.raises(meteor.RecordsLost) as caught:
                    sub.poll(timeout=0)
                assert (caught.value.first, caught.value.last) == (start, self.model.first - 1)
                sub.skip_gap()
                start = self.model.first
            batch = sub.poll(timeout=0, max_records=most)
            self.check(batch, start)
            assert bool(batch) is (start < self.model.next)

    @rule(most=st.sampled_from([1, 7, 10_000]))
    def poll_the_tail(self, most: int) -> None:
        position, skipped = self.tail.position, self.tail.skipped
        try:
            batch = self.tail.poll(timeout=0, max_records=most)
        except meteor.RecordsLost as lost:
            where = (lost.first, lost.last)
            assert not self.skipping
            assert where == (position, self.model.first - 1)
            self.tail.skip_gap()
            self.skipping = True
        else:
            if self.skipping and batch:  # records dropped in the meantime are part of the gap
                assert self.tail.skipped == skipped + batch.first_offset - position
                position = max(position, self.model.first)
            self.skipping = False
            self.check(batch, position)
            assert bool(batch) is (position < self.model.next)

    def check(self, batch: meteor.RecordBatch, start: int) -> None:
        assert batch.first_offset == start
        assert batch.values() == [self.model.value(offset) for offset in batch.offsets]

    @invariant()
    def ring_matches_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        described = self.stream.describe()
        assert (described.first, described.next) == (self.model.first, self.model.next)
        assert described.frames == len(self.model.frames)
        assert described.config.capacity == self.model.capacity


def test_the_log_matches_a_simple_model(private_server: ServerFactory) -> None:
    Machine.server = private_server("--appendonly", "yes", "--appendfsync", "always")
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=70,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
