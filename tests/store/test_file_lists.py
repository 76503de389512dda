"""The files of a store: ``files`` is complete or raises, ``segments`` lists the existing ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from tests.support.archivers import Depot
from tests.support.group_members import STREAM


@pytest.fixture
def depot(url: str, tmp_path: Path) -> Iterator[Depot]:
    with Depot(url, tmp_path / "store") as depot:
        yield depot


def test_files_of_an_unmounted_disk_raise_store_unavailable(depot: Depot) -> None:
    depot.fill(100)
    depot.archive()
    archive = depot.stream.store
    before = archive.files()
    away = depot.root.with_name("away")
    depot.root.rename(away)
    with pytest.raises(meteor.StoreUnavailable, match="there is no store"):
        archive.files()
    away.rename(depot.root)
    assert archive.files() == before


def test_files_include_segments_merged_during_the_call(
    depot: Depot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the bounds were read, more records arrived, and their files have been merged."""
    depot.fill(60)
    depot.archive()
    depot.fill(60)
    depot.archive()
    files = meteor.ParquetStore.files

    def files_late(store: meteor.ParquetStore, *args: Any) -> list[str]:
        monkeypatch.undo()
        depot.fill(60)
        depot.archive()
        assert depot.stream.store.compact() > 0
        return files(store, *args)

    monkeypatch.setattr(meteor.ParquetStore, "files", files_late)
    assert depot.stored() == list(range(180))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_files_raise_records_lost_for_a_missing_file(depot: Depot, number: int) -> None:
    for _ in range(3):
        depot.fill(60)
        depot.archive()
    Path(depot.stream.store.files()[number]).unlink()
    with pytest.raises(meteor.RecordsLost) as caught:
        depot.stream.store.files()
    assert (caught.value.first, caught.value.last) == (60 * number, 60 * number + 59)
    assert depot.harm()


# segments()


def test_segments_describe_the_listed_files(depot: Depot) -> None:
    for _ in range(3):
        depot.fill(60)
        depot.archive()
    archive = depot.stream.store
    found = archive.segments()
    assert [segment.file for segment in found] == archive.files()
    assert [(segment.first, segment.last, segment.records) for segment in found] == [
        (first, first + 59, 60) for first in (0, 60, 120)
    ]
    assert [segment.size for segment in found] == [
        Path(segment.file).stat().st_size for segment in found
    ]
    assert {segment.epoch for segment in found} == {depot.stream.describe().epoch}
    assert [segment.term for segment in found] == sorted({segment.term for segment in found})
    archive.compact()
    (merged,) = archive.segments()
    assert (merged.first, merged.last) == (0, 179)


def test_segments_skip_a_missing_file_but_not_a_missing_disk(depot: Depot) -> None:
    for _ in range(3):
        depot.fill(60)
        depot.archive()
    archive = depot.stream.store
    Path(archive.files()[1]).unlink()
    assert [segment.first for segment in archive.segments()] == [0, 120]
    depot.root.rename(depot.root.with_name("away"))
    with pytest.raises(meteor.StoreUnavailable, match="there is no store"):
        archive.segments()


def test_segments_show_only_the_live_part_of_a_file(depot: Depot) -> None:
    depot.fill(60)
    depot.archive()
    archive = depot.stream.store
    depot.redis.hset(keys.meta(STREAM), "archived", 50)  # as after a failover
    (segment,) = archive.segments()
    assert (segment.first, segment.last, segment.records) == (0, 49, 50)


def test_segments_of_a_memory_store_raise_type_error(url: str) -> None:
    with meteor.connect(url) as m:
        stream = m.stream("s", store=meteor.MemoryStore("s"), archive=False)
        with pytest.raises(TypeError, match=r"segments\(\) needs a store of files"):
            stream.store.segments()
