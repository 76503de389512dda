"""Stores with many segments are listed rarely, and their small segments are merged."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meteor_py as meteor
from meteor_py.log.split_points import split_points
from meteor_py.store import listing, maintenance
from meteor_py.store.base import TERMS
from meteor_py.store.parquet import ParquetStore
from meteor_py.store.segment import Segment, SegmentTable, Span, _cover
from meteor_py.store.storage import LocalStorage
from meteor_py.testing.store_contract import INCARNATION, records
from tests.support.archivers import StoredStream
from tests.support.parquet_store import claimed, make_old
from tests.support.waiting import eventually

HOUR_S = 3600.0


def always() -> bool:
    return True


@pytest.fixture
def stored(url: str, tmp_path: Path) -> Iterator[StoredStream]:
    with StoredStream(url, tmp_path / "store", max_unarchived=100_000) as stored:
        yield stored


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders listed since the fixture was set up."""
    listed: list[str] = []
    names = LocalStorage.names

    def counted(storage: LocalStorage, path: str) -> list[str]:
        listed.append(path)
        return names(storage, path)

    monkeypatch.setattr(LocalStorage, "names", counted)
    return listed


def fill(store: ParquetStore, count: int, *, size: int = 10, term: int = 1) -> int:
    """Append segments; return the end offset."""
    first = store.bounds(INCARNATION).end
    for at in range(first, first + count * size, size):
        store.append(INCARNATION, term, records(at, at + size))
    return first + count * size


def folder_of(store: ParquetStore) -> Path:
    return Path(store.filesystem.normalize_path(store._storage.full_path(INCARNATION)))


def rest(store: ParquetStore) -> None:
    """Make the folder an hour older, and its files a minute older still."""
    folder = folder_of(store)
    for path in folder.iterdir():
        make_old(path, HOUR_S + 60)
    make_old(folder, HOUR_S)


def merge_all(store: ParquetStore, end: int, term: int = 1) -> int:
    """Merge small segments until there are none; return the number of merges."""
    merges = 0
    while store.merge_small(INCARNATION, term, end, always):
        merges += 1
        assert merges < 1_000, "merging did not end"
    return merges


def check(store: ParquetStore, end: int) -> None:
    offsets = [
        n for batch in store.read(INCARNATION, 0, end) for n in batch.column("offset").to_pylist()
    ]
    assert offsets == list(range(end))
    assert all(flaw.harmless for flaw in store.verify(INCARNATION, 0, end))


# Listing


def test_unchanged_folder_is_listed_only_once(tmp_path: Path, listings: list[str]) -> None:
    store = claimed(tmp_path)
    end = fill(store, 20)
    rest(store)
    listings.clear()
    for _ in range(5):
        assert store.bounds(INCARNATION).end == end
        check(store, end)
        assert len(store.files(INCARNATION, 0, end)) == 20
        assert store.epochs(INCARNATION) == {0: 0}
    assert len(listings) == 1


def test_every_change_to_a_folder_is_seen(tmp_path: Path, listings: list[str]) -> None:
    store, other = claimed(tmp_path), ParquetStore(tmp_path, "s")
    fill(store, 3)
    for _ in range(3):
        rest(store)
        end = store.bounds(INCARNATION).end
        assert fill(other, 1) == end + 10
        assert store.bounds(INCARNATION).end == end + 10
        Path(store.files(INCARNATION, 0, end)[-1]).unlink()
        with pytest.raises(meteor.RecordsLost):
            check(store, end)
        other.append(INCARNATION, 1, records(end - 10, end))
        check(store, end + 10)
    # Changes within the resolution of the modification time are seen as well.
    for _ in range(50):
        end = store.bounds(INCARNATION).end
        assert fill(other, 1) == end + 10
        assert store.bounds(INCARNATION).end == end + 10


def test_folder_at_the_same_path_on_another_disk_is_listed(tmp_path: Path) -> None:
    store = claimed(tmp_path)
    end = fill(store, 3)
    rest(store)
    assert store.bounds(INCARNATION).end == end
    folder = folder_of(store)
    modified = folder.stat().st_mtime_ns
    folder.rename(folder.with_name("away"))
    folder.mkdir()
    os.utime(folder, ns=(modified, modified))
    assert store.bounds(INCARNATION).end == 0


@pytest.mark.parametrize("shows", ["a newer file", "a change"])
def test_folder_without_a_reliable_modification_time_is_listed_each_time(
    tmp_path: Path, shows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mounted object stores can have such modification times."""
    store, other = claimed(tmp_path), ParquetStore(tmp_path, "s")
    end = fill(store, 3)
    folder = folder_of(store)

    def freeze() -> None:
        os.utime(folder, ns=(0, 0))
        if shows == "a change":  # then no file is newer than the folder
            monkeypatch.setattr(LocalStorage, "is_newer_than_folder", lambda *_: False)

    frozen = LocalStorage.version
    monkeypatch.setattr(
        LocalStorage, "version", lambda *args: frozen(*args) and os.stat(folder).st_mtime_ns
    )
    freeze()
    monkeypatch.setattr(listing, "_TRUSTED_S", 0.0 if shows == "a change" else HOUR_S)
    assert store.bounds(INCARNATION).end == end
    other.append(INCARNATION, 1, records(end, end + 10))
    freeze()
    assert store.bounds(INCARNATION).end == end + 10
    monkeypatch.setattr(listing, "_TRUSTED_S", HOUR_S)
    other.append(INCARNATION, 1, records(end + 10, end + 20))
    freeze()
    assert store.bounds(INCARNATION).end == end + 20


def test_many_split_points_are_found_with_one_listing(
    stored: StoredStream, listings: list[str]
) -> None:
    with stored.archiver():
        for _ in range(6):
            stored.fill(300)
            stored.stream.store.flush()
    edges = [segment.last + 1 for segment in stored.stream.store.segments()]
    listings.clear()
    offsets = range(0, 1_600, 16)  # the ring holds the last hundred
    found = split_points(stored.stream._handle, offsets)
    assert len(listings) == 1
    assert found == [min(edge for edge in edges if edge > offset) for offset in offsets]


# The segment table


def plain_spans(segments: list[Segment], end: int | None, start: int) -> list[Span]:
    """Return the spans according to the definition: compute each one from all segments."""
    candidates: list[Span] = []
    limit = floor = end if end is not None else 1 << 63
    term = None
    for segment in sorted(segments, key=lambda s: -s.term):
        if segment.term != term:
            limit, term = floor, segment.term
        stop = min(segment.last + 1, limit)
        if segment.first < stop:
            candidates.append(Span(segment.first, stop, segment))
        floor = min(floor, segment.first)
    return [span for span in _cover(sorted(candidates)) if span.stop > start]


any_segment = st.builds(
    lambda term, first, size, sha: Segment(first, first + size - 1, term, f"{sha:08x}"),
    *(st.integers(1, 4), st.integers(0, 30), st.integers(1, 12), st.integers(0, 1)),
)


@settings(max_examples=300)
@given(st.lists(any_segment, max_size=12, unique=True))
def test_segment_table_finds_the_spans_in_any_range(segments: list[Segment]) -> None:
    table = SegmentTable(segments)
    for end in (None, *range(0, 45, 3)):
        for start in range(0, 45, 7):
            found, expected = table.spans(end, start), plain_spans(segments, end, start)
            assert [span[:2] for span in found] == [span[:2] for span in expected]
            assert [span.exact for span in found] == [span.exact for span in expected]
            terms = [span.segment.term for span in expected]
            assert [span.segment.term for span in found] == terms


# Merging


def test_slow_stream_leaves_few_segments(tmp_path: Path) -> None:
    store = claimed(tmp_path)
    end = most = 0
    for _ in range(600):
        end = fill(store, 1, size=1 + end % 3)
        merge_all(store, end)
        most = max(most, len(store.files(INCARNATION, 0, end)))
    assert most < 40
    check(store, end)


def test_archiver_merges_its_own_segments(stored: StoredStream) -> None:
    stored.archiver(segment_age=0.0)
    for _ in range(60):
        stored.fill(5)
        stored.stream.store.flush()

    def files() -> list[str]:
        return stored.stream.store.files()

    eventually(lambda: len(files()) < 30, 20, "the segments were not merged")
    assert stored.read() == stored.stored() == list(range(300))
    assert stored.harm() == []


def test_source_segments_of_a_merge_are_removed_after_the_grace_period(tmp_path: Path) -> None:
    store = claimed(tmp_path)
    end = fill(store, 64)
    merge_all(store, end)
    folder = folder_of(store)
    before = len(list(folder.iterdir()))
    store.tidy(INCARNATION, 1, end, always)
    assert len(list(folder.iterdir())) == before  # a reader may have listed them
    for path in folder.iterdir():
        make_old(path, maintenance.GRACE_S + 60)
    store.tidy(INCARNATION, 1, end, always)
    assert len(list(folder.iterdir())) == len(store.files(INCARNATION, 0, end)) < before
    check(store, end)


def merge_as_the_archiver(store: ParquetStore, end: int) -> int:
    return merge_all(store, end, term=2 * TERMS + 1)


def compact_everything(store: ParquetStore, end: int) -> int:
    return store.compact(INCARNATION, 0, end, records=1_000_000, size=1 << 30)


@pytest.mark.parametrize("merge", [merge_as_the_archiver, compact_everything])
def test_segments_from_different_epochs_are_not_merged(tmp_path: Path, merge: Any) -> None:
    store = claimed(tmp_path)
    middle = fill(store, 40, term=TERMS + 1)
    end = fill(store, 40, term=2 * TERMS + 1)
    assert merge(store, end) > 0
    assert store.epochs(INCARNATION) == {1: 0, 2: middle}
    check(store, end)


def test_uncommitted_segments_and_segments_from_later_terms_are_not_merged(tmp_path: Path) -> None:
    store = claimed(tmp_path)
    end = fill(store, 40, term=2)
    assert merge_all(store, end, term=1) == 0
    assert not store.merge_small(INCARNATION, 2, end, lambda: False)
    merge_all(store, 105, term=2)
    spans = store._segment_log(INCARNATION).spans()
    assert {span.stop for span in spans if span.stop > 100} == set(range(110, end + 1, 10))


def test_large_segments_are_not_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = claimed(tmp_path)
    end = fill(store, 40)
    smallest = min(Path(path).stat().st_size for path in store.files(INCARNATION, 0, end))
    monkeypatch.setattr(maintenance, "_SMALL_BYTES", smallest - 1)
    assert merge_all(store, end) == 0
    assert len(store.files(INCARNATION, 0, end)) == 40


def test_damaged_segment_does_not_stop_merging(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = claimed(tmp_path)
    end = fill(store, 64)
    damaged = Path(store.files(INCARNATION, 0, end)[20])
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert merge_all(store, end) > 0
    assert len(list(store._segment_log(INCARNATION).spans(end))) < 64
    with pytest.raises(meteor.CorruptSegment) as caught:
        check(store, end)
    assert (caught.value.first, caught.value.last) == (200, 209)


def test_interrupted_merge_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = claimed(tmp_path)
    end = fill(store, 64)

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "publish", fail)
        with pytest.raises(meteor.StoreUnavailable):
            store.merge_small(INCARNATION, 1, end, always)
    check(store, end)
    assert merge_all(store, end) > 0
    check(store, end)


def test_lookups_do_not_list_all_segments_again(tmp_path: Path) -> None:
    """In a store with 3,000 segments, a hundred lookups take less time than twenty listings."""
    store = claimed(tmp_path)
    fill(store, 1)
    folder = folder_of(store)
    for at in range(10, 30_000, 10):
        (folder / Segment(at, at + 9, 1, "0badcafe").name).touch()
    rest(store)
    began = time.perf_counter()
    store.bounds(INCARNATION)
    first_s = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(100):
        store.bounds(INCARNATION)
    assert time.perf_counter() - began < 20 * first_s
