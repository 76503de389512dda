"""Threads read a store's batches in any order, while files are merged and removed."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from meteor_py.errors import RecordsLost
from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.store import segment_file
from meteor_py.store.base import DeferredBatch, deferred_batches
from meteor_py.store.memory import MemoryStore
from meteor_py.store.parquet import ParquetStore
from meteor_py.store.segment_file import SegmentFile
from meteor_py.testing.store_contract import INCARNATION, records
from tests.support.parquet_store import END, GROUP, filled, paths

THREADS = 4


@pytest.fixture(autouse=True)
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_file, "GROUP_RECORDS", GROUP)


@pytest.fixture
def store(tmp_path: Path) -> ParquetStore:
    return filled(tmp_path)


def table(batches: Iterator[pa.RecordBatch] | list[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(batches, ARROW_SCHEMA)


def read_shuffled(batches: list[DeferredBatch], rng: Random) -> pa.Table:
    """Read the batches in random order, in several threads, and return them in their order."""
    order = rng.sample(range(len(batches)), len(batches))
    with ThreadPoolExecutor(THREADS) as threads:
        found = dict(zip(order, threads.map(lambda at: batches[at](), order), strict=True))
    return table([found[at] for at in range(len(batches))])


@pytest.mark.parametrize(("start", "stop"), [(0, END), (5, 97), (39, 41), (70, 71)])
def test_batches_read_in_any_order_and_thread_are_those_of_read(
    store: ParquetStore, start: int, stop: int, rng: Random
) -> None:
    expected = table(store.read(INCARNATION, start, stop))
    assert expected.equals(records(start, stop))
    for _ in range(20):
        batches = list(store.deferred_batches(INCARNATION, start, stop))
        assert read_shuffled(batches, rng).equals(expected)


def test_batches_with_some_columns_are_those_of_read_columns(
    store: ParquetStore,
) -> None:
    columns = ["value", "offset"]
    found = [each() for each in store.deferred_batches(INCARNATION, 3, 100, columns)]
    assert pa.Table.from_batches(found).equals(records(3, 100).select(columns))


def test_store_that_cannot_read_concurrently_yields_the_same_batches(rng: Random) -> None:
    store = MemoryStore("s")
    store.append(INCARNATION, 1, records(0, 50))
    batches = list(deferred_batches(store, INCARNATION, 3, 40))
    assert read_shuffled(batches, rng).equals(records(3, 40))
    values = [read_batch() for read_batch in deferred_batches(store, INCARNATION, 3, 40, ["value"])]
    assert pa.Table.from_batches(values).equals(records(3, 40).select(["value"]))


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_file_stays_open_until_its_last_batch_is_read_or_dropped(store: ParquetStore) -> None:
    gc.collect()
    before = open_descriptors()
    batches = list(store.deferred_batches(INCARNATION, 0, END))
    assert open_descriptors() == before + 3
    for path in paths(store):
        path.unlink()  # an open local file stays readable
    last = batches[-1]
    del batches
    assert open_descriptors() == before + 1
    assert last().column("offset")[-1].as_py() == END - 1
    del last
    assert open_descriptors() == before


@pytest.fixture
def objects(store: ParquetStore, monkeypatch: pytest.MonkeyPatch) -> ParquetStore:
    """A store in which, as in an object store, a deleted file fails even if it is open."""
    read = SegmentFile.read

    def read_unless_deleted(file: SegmentFile, *args: Any) -> pa.RecordBatch:
        name = f"{INCARNATION}/{file.segment.name}"
        if file._bytes is None and not store._storage.size(name):
            raise FileNotFoundError(name)
        return read(file, *args)

    monkeypatch.setattr(SegmentFile, "read", read_unless_deleted)
    return store


def test_batch_of_a_merged_and_deleted_file_is_read_from_the_merged_one(
    objects: ParquetStore, rng: Random
) -> None:
    small = paths(objects)
    batches = list(objects.deferred_batches(INCARNATION, 7, END))
    objects.compact(INCARNATION, 0, END, records=1000, size=1 << 30)
    for path in small:
        path.unlink()
    assert read_shuffled(batches, rng).equals(records(7, END))


def test_batch_of_a_file_that_is_listed_but_cannot_be_read_is_reported_as_lost(
    store: ParquetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def vanish(file: SegmentFile, *args: Any) -> pa.RecordBatch:
        reads.append(file.segment.name)
        raise FileNotFoundError(file.segment.name)

    monkeypatch.setattr(SegmentFile, "read", vanish)
    batches = list(store.deferred_batches(INCARNATION, 0, END))
    with pytest.raises(RecordsLost) as caught:
        batches[1]()
    assert (caught.value.first, caught.value.last) == (GROUP, 2 * GROUP - 1)
    assert len(reads) == 2


def test_readers_call_the_methods_that_a_subclass_overrides(tmp_path: Path) -> None:
    calls: list[str] = []

    class Observed(ParquetStore):
        def read(self, incarnation: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
            calls.append("read")
            return super().read(incarnation, start, stop)

    class Renamed(Observed):
        """Changes nothing about reading."""

    class Deferred(Observed):
        def deferred_batches(self, *args: Any) -> Iterator[DeferredBatch]:
            calls.append("deferred_batches")
            return super().deferred_batches(*args)

    store = filled(tmp_path)
    for kind, expected in ((Observed, "read"), (Renamed, "read"), (Deferred, "deferred_batches")):
        other = kind(tmp_path, store.stream)
        found = [read_batch() for read_batch in deferred_batches(other, INCARNATION, 0, END)]
        assert table(found).equals(records(0, END))
        assert calls.pop() == expected
        assert not calls


def test_batch_of_a_deleted_file_is_reported_as_lost_with_its_exact_offsets(
    objects: ParquetStore,
) -> None:
    batches = list(objects.deferred_batches(INCARNATION, 0, END))
    paths(objects)[0].unlink()
    with pytest.raises(RecordsLost) as caught:
        batches[1]()
    assert (caught.value.first, caught.value.last) == (GROUP, 2 * GROUP - 1)
