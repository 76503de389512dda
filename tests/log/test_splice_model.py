"""After any sequence of publishing, archiving, merging and expiring, reading matches a list.

Two tests read a million records: random ranges, and all in order. State machines apply all
operations to small streams in any order, and compare the result with lists.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import meteor_py as meteor
from tests.support.servers import Server, binaries
from tests.support.stored_streams import archiving

# A million records

MILLION = 1_000_000


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Iterator[meteor.Stream]:
    """A stream of a million records, whose values are their offsets, with a ring of 10,000."""
    root = tmp_path_factory.mktemp("million")
    with Server(binaries()["valkey"]) as server, meteor.connect(server.url) as m:
        stream = m.stream("million", capacity=10_000, store=root, archive=False)
        with archiving(stream, segment_records=37_000), stream.publisher() as pub:
            pub.publish_many(values(0, MILLION)).result()
            assert stream.store.flush() == MILLION
        yield stream


def values(start: int, stop: int) -> pa.Array:
    return pc.cast(pc.cast(pa.arange(start, stop), pa.string()), pa.binary())


offsets = st.one_of(
    st.integers(0, MILLION),
    st.integers(MILLION - 15_000, MILLION - 5_000),  # where the ring begins
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(start=offsets, length=st.one_of(st.integers(0, 100), st.integers(0, 60_000)))
def test_any_range_of_a_million_records_is_read_exactly_as_published(
    million: meteor.Stream, start: int, length: int
) -> None:
    stop = min(start + length, MILLION)
    batches = [batch.to_arrow() for batch in million.read(start, start + length)]
    assert sum(map(len, batches)) == stop - start
    if batches:
        table = pa.concat_tables(batches).combine_chunks()
        assert table.column("offset").equals(pa.chunked_array([pa.arange(start, stop)]))
        assert table.column("value").equals(pa.chunked_array([values(start, stop)]))


def test_a_million_records_are_read_sequentially(million: meteor.Stream) -> None:
    found = million.describe()
    assert (found.first, found.next, found.archived) == (0, MILLION, MILLION)
    assert found.length < 20_000
    end = 0
    with million.subscriber(initial_offset="earliest") as sub:
        while batch := sub.poll(timeout=0):
            table = batch.to_arrow().combine_chunks()
            stop = end + len(table)
            assert table.column("value").equals(pa.chunked_array([values(end, stop)]))
            end = stop
    assert end == MILLION


# State machines

names = count()
sizes = st.sampled_from([1, 1, 2, 5, 33, 40, 300])
capacities = st.sampled_from([1, 3, 10, 50, 200])
most = st.sampled_from([1, 7, 40, 10_000])


class Model:
    """The expected state of the stream."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.records: list[meteor.Record] = []
        self.frames: list[tuple[int, int]] = []  # first and last offset of each frame in the ring
        self.archived = self.expired = 0

    @property
    def next(self) -> int:
        return len(self.records)

    @property
    def ring(self) -> int:
        return self.frames[0][0] if self.frames else self.next

    @property
    def first(self) -> int:
        """The first readable offset; all later ones are readable too."""
        return min(self.ring, self.expired)

    def gap(self, start: int) -> tuple[int, int] | None:
        return (start, self.first - 1) if start < self.first else None

    def trim(self) -> None:
        floor = min(self.next - self.capacity, self.archived)
        self.frames = [frame for frame in self.frames if frame[1] >= floor]


class Machine(RuleBasedStateMachine):
    """A stream with a file-based or in-memory store, and its model."""

    url: str
    in_files: bool

    def __init__(self) -> None:
        super().__init__()
        self.name = f"model-{next(names)}"
        self.client = meteor.connect(self.url)
        self.folder = tempfile.TemporaryDirectory(prefix="meteor-model-")

    @initialize(capacity=capacities)
    def create(self, capacity: int) -> None:
        store: Any = Path(self.folder.name) if self.in_files else meteor.MemoryStore(self.name)
        self.model = Model(capacity)
        self.stream = self.client.stream(
            self.name, capacity=capacity, max_unarchived=1_000_000, store=store, archive=False
        )
        self.pub = self.stream.publisher()
        self.tail = self.stream.subscriber()
        self.sub = self.stream.subscriber(initial_offset="earliest")
        # Whether the next poll skips dropped records without reporting a gap. False at first,
        # because the stream is empty.
        self.floating = False
        # Because of its segment_age, this archiver writes segments only on request (``flush``).
        self.archiver = self.stream.archiver(segment_age=1e6).start()

    def teardown(self) -> None:
        if hasattr(self, "archiver"):
            self.archiver.close()
            for each in (self.pub, self.tail, self.sub):
                each.close()
        self.client.close()
        self.folder.cleanup()

    # -- operations ----------------------------------------------------------------------------

    @rule(n=sizes, shape=st.integers(0, 7), stamp=st.integers(2**32, 2**41))
    def publish(self, n: int, shape: int, stamp: int) -> None:
        first = self.model.next
        span = range(first, first + n)
        columns: dict[str, Any] = {}
        if shape & 1:
            columns["keys"] = [None if i % 3 else b"key %d" % i for i in span]
        if shape & 2:
            columns["headers"] = [{"n": b"%d" % i} if i % 2 else None for i in span]
        if shape & 4:
            columns["timestamps"] = [stamp + i if i % 5 else None for i in span]
        # The ring's capacity when a publisher is opened limits the size of its frames.
        self.pub.close()
        self.pub = self.stream.publisher()
        ack = self.pub.publish_many([b"%d" % i * (i % 50) for i in span], **columns)
        assert ack.result() == first
        while self.tail.position < span.stop:
            batch = self.tail.poll(timeout=5)
            self.model.records += batch  # as read from the ring
        assert self.model.next == span.stop
        for i, record in zip(span, self.model.records[first:], strict=True):
            assert (record.offset, record.value) == (i, b"%d" % i * (i % 50))
        step = self.model.capacity
        for start in range(first, span.stop, step):
            self.model.frames.append((start, min(start + step, span.stop) - 1))
        self.model.trim()

    @rule()
    def archive(self) -> None:
        assert self.stream.store.flush() == self.model.next
        self.model.archived = self.model.next
        self.model.trim()

    @rule(capacity=capacities)
    def configure(self, capacity: int) -> None:
        self.stream.configure(capacity=capacity)
        self.model.capacity = capacity
        self.model.trim()

    @rule(records=st.sampled_from([10, 100, 1_000_000]))
    def compact(self, records: int) -> None:
        if self.in_files:
            before = len(self.stream.store.files())
            saved = self.stream.store.compact(max_records=records)
            assert len(self.stream.store.files()) == before - saved

    @rule(back=st.integers(0, 300))
    def expire(self, back: int) -> None:
        wanted = max(self.model.next - back, 0)
        stays = self.stream.store.expire(offset=wanted)
        highest = max(min(wanted, self.model.archived), self.model.expired)
        assert self.model.expired <= stays <= highest
        assert self.in_files or stays == highest
        self.model.expired = stays

    # -- reads ---------------------------------------------------------------------------------

    @rule(data=st.data(), length=st.integers(0, 400), elsewhere=st.booleans())
    def read(self, data: st.DataObject, length: int, elsewhere: bool) -> None:
        start = data.draw(st.integers(0, self.model.next))
        stream = self.stream
        if elsewhere and self.in_files:
            stream = self.client.stream(self.name, create=True)  # this handle must find the store
        gap = self.model.gap(start)
        found: list[meteor.Record] = []
        lost: tuple[int, int] | None = None
        try:
            for batch in stream.read(start, start + length):
                found += batch
        except meteor.RecordsLost as error:
            lost = (error.first, error.last)
        else:
            assert found == self.model.records[start : start + length]
        assert lost == (gap if length else None)

    @rule(most=most)
    def poll(self, most: int) -> None:
        position, gap = self.sub.position, self.model.gap(self.sub.position)
        try:
            batch = self.sub.poll(timeout=0, max_records=most)
        except meteor.RecordsLost as error:
            lost = (error.first, error.last)
            self.sub.skip_gap()
            assert (lost, self.floating) == (gap, False)
            self.floating = True
            return
        if self.floating and batch and gap is not None and batch.first_offset > position:
            position = gap[1] + 1
        self.floating = False
        assert list(batch) == self.model.records[position : position + len(batch)]
        assert len(batch) <= most
        assert bool(batch) is (position < self.model.next)

    @rule(data=st.data())
    def seek(self, data: st.DataObject) -> None:
        target = data.draw(st.integers(0, self.model.next))
        self.sub.seek(target)
        assert self.sub.position == target
        self.floating = False

    @rule()
    def seek_earliest(self) -> None:
        self.sub.seek("earliest")
        assert self.sub.position == self.model.first
        self.floating = self.model.first < self.model.next

    @rule(data=st.data(), around=st.integers(-1, 1))
    def seek_time(self, data: st.DataObject, around: int) -> None:
        model = self.model
        there = model.records[model.first :]
        if not there:
            return
        ms = data.draw(st.sampled_from(there)).appended + around
        time = datetime.fromtimestamp(ms / 1000, UTC)
        first = next((r.offset for r in there if r.appended >= ms), model.next)
        assert self.stream.offset_at(time) == first
        self.sub.seek(time)
        assert self.sub.position == first
        self.floating = False

    @invariant()
    def stream_matches_the_model(self) -> None:
        if not hasattr(self, "archiver"):
            return
        model, found = self.model, self.stream.describe()
        assert (found.first, found.next) == (model.first, model.next)
        assert (found.length, found.frames) == (model.next - model.ring, len(model.frames))
        assert found.archived == model.archived
        assert self.stream.store.bounds() == (model.expired, model.archived)


@pytest.mark.parametrize("in_files", [True, False])
def test_a_stream_with_a_store_matches_a_list(
    url: str, monkeypatch: pytest.MonkeyPatch, in_files: bool
) -> None:
    monkeypatch.setattr("meteor_py.store.segment_file.GROUP_RECORDS", 16)
    monkeypatch.setattr("meteor_py.archive.archive_term._REFRESH_S", 0.005)
    monkeypatch.setattr("meteor_py.archive.admin._POLL_S", 0.002)
    machine = type("Model", (Machine,), {"url": url, "in_files": in_files})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
