"""Merging, removing and expiring Parquet segments does not disturb readers."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meteor_py.errors import StoreUnavailable
from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.store import maintenance, segment_file
from meteor_py.store.base import Bounds
from meteor_py.store.parquet import ParquetStore
from meteor_py.store.segment import Segment
from meteor_py.testing.store_contract import INCARNATION, NEWEST, appended_at, check, records
from tests.chaos.stored import MERGING
from tests.support.parquet_store import (
    END,
    GROUP,
    claimed,
    filled,
    flaws,
    make_old,
    names,
    paths,
    readable,
)


@pytest.fixture(autouse=True)
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_file, "GROUP_RECORDS", GROUP)


@pytest.fixture
def empty(tmp_path: Path) -> ParquetStore:
    return claimed(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> ParquetStore:
    return filled(tmp_path)


# Compaction


def test_compaction_merges_segments_and_changes_no_record(store: ParquetStore) -> None:
    small = paths(store)
    progress: list[tuple[int, int]] = []
    saved = store.compact(
        INCARNATION, 0, END, records=1000, size=1 << 30, progress=lambda *x: progress.append(x)
    )
    assert saved == 2
    assert progress[-1] == (120, 120)
    (merged,) = paths(store)
    assert merged.name.startswith(f"{0:020d}-{119:020d}-1-")
    assert pq.read_table(merged).equals(records(0, END))
    check(store, 0, END)
    assert flaws(store) == [], "small files that await removal count as flaws"
    assert all(path.exists() for path in small)
    assert store.compact(INCARNATION, 0, END, records=1000, size=1 << 30) == 0


def test_compacted_segments_are_no_larger_than_allowed(store: ParquetStore) -> None:
    assert store.compact(INCARNATION, 0, END, records=80, size=1 << 30) == 1
    assert [pq.read_metadata(path).num_rows for path in paths(store)] == [80, 40]
    assert store.compact(INCARNATION, 0, END, records=119, size=1 << 30) == 0
    largest = max(path.stat().st_size for path in paths(store))
    assert store.compact(INCARNATION, 0, END, records=1000, size=largest) == 0
    check(store, 0, END)


def test_uncommitted_records_are_not_compacted(store: ParquetStore) -> None:
    store.append(INCARNATION, 2, records(120, 130, branch=2))
    assert store.compact(INCARNATION, 0, END, records=1000, size=1 << 30) == 2
    assert len(paths(store)) == 1
    store.append(INCARNATION, 3, records(120, 140))
    check(store, 0, 140)


def test_merged_segment_gets_the_newest_of_its_terms(empty: ParquetStore) -> None:
    empty.append(INCARNATION, 1, records(0, 30))
    empty.append(INCARNATION, 2, records(20, 40))
    empty.append(INCARNATION, 5, records(40, 50))
    assert empty.compact(INCARNATION, 0, 50, records=1000, size=1 << 30) == 2
    (merged,) = paths(empty, 50)
    assert Segment.parse(merged.name) == Segment(0, 49, 5, merged.stem[-8:])
    check(empty, 0, 50)


def test_damaged_segments_are_not_compacted(store: ParquetStore, tmp_path: Path) -> None:
    path = paths(store)[1]
    path.write_bytes(path.read_bytes()[:-1])
    before = names(tmp_path)
    assert store.compact(INCARNATION, 0, END, records=1000, size=1 << 30) == 0
    assert names(tmp_path) == before
    assert readable(store) == {*range(40), *range(80, 120)}


def test_reader_in_progress_survives_a_compaction(store: ParquetStore) -> None:
    small = paths(store)
    batches = store.read(INCARNATION, 0, END)
    found = [next(batches)]
    store.compact(INCARNATION, 0, END, records=1000, size=1 << 30)
    found.append(next(batches))
    for path in small:  # all files that the reader has listed, including the current one
        path.unlink()
    found.extend(batches)
    assert pa.Table.from_batches(found, ARROW_SCHEMA).equals(records(0, END))


def test_search_in_progress_survives_a_compaction(
    store: ParquetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = paths(store)
    opened: list[str] = []
    open_file = store._storage.open

    def compact_and_open(path: str) -> Any:
        if not opened:
            opened.append(path)
            store.compact(INCARNATION, 0, END, records=1000, size=1 << 30)
            for each in small:
                each.unlink()
        return open_file(path)

    monkeypatch.setattr(store._storage, "open", compact_and_open)
    assert store.locate(INCARNATION, appended_at(63), 0, END) == 63


def test_many_readers_survive_merging_and_removal(
    empty: ParquetStore, tmp_path: Path, rng: random.Random
) -> None:
    end = 0
    over = threading.Event()
    failures: list[BaseException] = []

    def consume(choose: random.Random) -> None:
        mine = ParquetStore(tmp_path, "s")
        try:
            while not over.is_set():
                stop = end
                check(mine, choose.randint(0, stop), stop)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=consume, args=[random.Random(rng.random())]) for _ in "ab"]
    for thread in threads:
        thread.start()
    try:
        for step in range(24):
            empty.append(INCARNATION, 1, records(end, end + 5))
            end += 5
            if step % 4 == 3:
                before = names(tmp_path)
                empty.compact(INCARNATION, 0, end, records=60, size=1 << 30)
                for name in before - {path.name for path in paths(empty, end)}:
                    (tmp_path / "s" / INCARNATION / name).unlink()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert len(paths(empty, end)) < 8
    check(empty, 0, end)


# Cleanup


@pytest.fixture
def untidy(store: ParquetStore, tmp_path: Path) -> Iterator[ParquetStore]:
    """A store with old leftovers of every kind: merged, lost in a failover, and unfinished."""
    store.compact(INCARNATION, 0, 80, records=1000, size=1 << 30)
    store.append(INCARNATION, 2, records(120, 140, branch=2))  # not committed
    folder = tmp_path / "s" / INCARNATION
    (folder / "_0123456789abcdef.tmp").write_bytes(b"PAR1")
    for name in os.listdir(folder):
        make_old(folder / name)
    yield store
    check(store, 0, END)


def test_leftovers_are_removed_after_the_grace_period(untidy: ParquetStore, tmp_path: Path) -> None:
    untidy.tidy(INCARNATION, NEWEST, END, lambda: True)
    assert names(tmp_path) == {path.name for path in paths(untidy)}
    assert len(names(tmp_path)) == 2
    assert flaws(untidy) == []


def test_young_leftovers_are_not_removed(untidy: ParquetStore, tmp_path: Path) -> None:
    before = names(tmp_path)
    live = {path.name for path in paths(untidy)}
    for name in before - live:
        make_old(tmp_path / "s" / INCARNATION / name, 120 - maintenance.GRACE_S)
    untidy.tidy(INCARNATION, NEWEST, END, lambda: True)
    assert names(tmp_path) == before


def test_merged_segments_stay_while_their_replacement_is_young(
    untidy: ParquetStore, tmp_path: Path
) -> None:
    """A reader may have listed the small segments just before the large one appeared."""
    merged = paths(untidy)[0]
    make_old(merged, -maintenance.GRACE_S)
    untidy.tidy(INCARNATION, NEWEST, END, lambda: True)
    assert {name[:41] for name in names(tmp_path)} == {
        f"{first:020d}-{last:020d}" for first, last in [(0, 39), (40, 79), (0, 79), (80, 119)]
    }


def test_expiry_does_not_remove_superseded_segments_above_the_expired_offset(
    store: ParquetStore, tmp_path: Path
) -> None:
    """A reader may have listed the small segments just before the merged one appeared."""
    store.compact(INCARNATION, 40, END, records=1000, size=1 << 30)
    store.delete(INCARNATION, 40)
    assert {name[:41] for name in names(tmp_path)} == {
        f"{first:020d}-{last:020d}" for first, last in [(40, 79), (80, 119), (40, 119)]
    }
    check(store, 40, END)


def test_nothing_is_removed_once_the_term_may_be_over(untidy: ParquetStore, tmp_path: Path) -> None:
    before = names(tmp_path)
    asked: list[set[str]] = []

    def is_current() -> bool:
        """Called after the files were listed, so the list contains no newer files."""
        asked.append(names(tmp_path))
        return False

    untidy.tidy(INCARNATION, NEWEST, END, is_current)
    assert asked == [before]
    assert names(tmp_path) == before


def test_segment_added_during_tidying_is_not_removed(untidy: ParquetStore, tmp_path: Path) -> None:
    """Another archiver has just taken over and archived more records."""

    def is_current() -> bool:
        untidy.append(INCARNATION, 7, records(120, 160))
        for path in paths(untidy, 160):
            make_old(path)
        return True

    untidy.tidy(INCARNATION, NEWEST, END, is_current)
    check(untidy, 0, 160)


# After a failover


def test_mending_after_a_failover_makes_the_file_list_exact(
    store: ParquetStore, tmp_path: Path
) -> None:
    store.append(INCARNATION, 2, records(70, 100, branch=2))  # after a failover to offset 70
    with pytest.raises(StoreUnavailable, match=MERGING):
        store.files(INCARNATION, 0, 100)
    before = names(tmp_path)
    store.tidy(INCARNATION, NEWEST, 100, lambda: True)
    files = paths(store, 100)
    assert [Segment.parse(path.name)[:3] for path in files] == [  # type: ignore[index]
        (0, 39, 1),
        (40, 69, 1),
        (70, 99, 2),
    ]
    assert pq.read_table(files[1]).equals(records(40, 70))
    check(store, 0, 70)
    check(store, 70, 100, branch=2)
    assert names(tmp_path) > before  # the old files are still too young to remove
    store.tidy(INCARNATION, NEWEST, 100, lambda: True)
    assert paths(store, 100) == files


def test_mending_cuts_a_segment_at_the_committed_end(store: ParquetStore) -> None:
    with pytest.raises(StoreUnavailable):  # the second segment extends past the end
        store.files(INCARNATION, 0, 70)
    store.tidy(INCARNATION, NEWEST, 70, lambda: True)
    assert pa.concat_tables(map(pq.read_table, paths(store, 70))).equals(records(0, 70))


def test_expiry_does_not_revive_a_lost_branch(empty: ParquetStore, tmp_path: Path) -> None:
    empty.append(INCARNATION, 1, records(0, 50, branch=1))
    empty.append(INCARNATION, 1, records(50, 90, branch=1))  # lost by the server
    for first in (40, 60, 80):
        empty.append(INCARNATION, 2, records(first, first + 20, branch=2))
    for below in (40, 45, 60, 80):
        edge = max(empty.segment_end(INCARNATION, below), 40)
        empty.delete(INCARNATION, edge)
        assert empty.bounds(INCARNATION) == Bounds(edge, 100, 2)
        check(empty, edge, 100, branch=2)
    assert {name[:20] for name in names(tmp_path)} == {f"{80:020d}"}


def test_segment_end_and_fitting_return_file_boundaries(store: ParquetStore) -> None:
    assert [store.segment_end(INCARNATION, n) for n in (0, 39, 40, 79, 80, 119, 120, 500)] == [
        *(0, 0, 40, 40, 80, 80, 120, 120)
    ]
    sizes = [path.stat().st_size for path in paths(store)]
    assert store.fitting(INCARNATION, END, sum(sizes)) == 0
    assert store.fitting(INCARNATION, END, sum(sizes) - 1) == 40
    assert store.fitting(INCARNATION, END, sizes[2]) == 80
    assert store.fitting(INCARNATION, END, sizes[2] - 1) == END
