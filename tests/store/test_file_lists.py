"""The files of a store: ``files`` is the whole list or an error, ``segments`` what is there."""

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


def test_a_disk_that_is_not_mounted_any_more_is_not_an_empty_list(depot: Depot) -> None:
    depot.fill(100)
    depot.archive()
    archive = depot.stream.store
    before = archive.files()
    away = depot.root.with_name("away")
    depot.root.rename(away)
    with pytest.raises(meteor.StoreUnavailable, match="nothing is there"):
        archive.files()
    away.rename(depot.root)
    assert archive.files() == before


def test_files_that_are_merged_with_later_ones_just_now_are_in_the_list(
    depot: Depot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bounds were looked at, then there were more records, in files that are merged by now."""
    depot.fill(60)
    depot.archive()
    depot.fill(60)
    depot.archive()
    look = meteor.ParquetStore.files

    def look_late(store: meteor.ParquetStore, *args: Any) -> list[str]:
        monkeypatch.undo()
        depot.fill(60)
        depot.archive()
        assert depot.stream.store.compact() > 0
        return look(store, *args)

    monkeypatch.setattr(meteor.ParquetStore, "files", look_late)
    assert depot.stored() == list(range(180))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_list_of_files_does_not_pass_over_a_lost_one(depot: Depot, number: int) -> None:
    for _ in range(3):
        depot.fill(60)
        depot.archive()
    Path(depot.stream.store.files()[number]).unlink()
    with pytest.raises(meteor.RecordsLost) as caught:
        depot.stream.store.files()
    assert (caught.value.first, caught.value.last) == (60 * number, 60 * number + 59)
    assert depot.harm()


# segments()


def test_segments_describe_the_files_that_are_listed(depot: Depot) -> None:
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


def test_segments_pass_over_a_lost_file_but_not_over_a_lost_disk(depot: Depot) -> None:
    for _ in range(3):
        depot.fill(60)
        depot.archive()
    archive = depot.stream.store
    Path(archive.files()[1]).unlink()
    assert [segment.first for segment in archive.segments()] == [0, 120]
    depot.root.rename(depot.root.with_name("away"))
    with pytest.raises(meteor.StoreUnavailable, match="nothing is there"):
        archive.segments()


def test_segments_show_of_a_file_only_what_counts(depot: Depot) -> None:
    depot.fill(60)
    depot.archive()
    archive = depot.stream.store
    depot.redis.hset(keys.meta(STREAM), "archived", 50)  # as a fail-over may leave it
    (segment,) = archive.segments()
    assert (segment.first, segment.last, segment.records) == (0, 49, 50)


def test_a_store_without_files_has_no_segments(url: str) -> None:
    with meteor.connect(url) as m:
        stream = m.stream("s", store=meteor.MemoryStore("s"), archive=False)
        with pytest.raises(TypeError, match=r"segments\(\) is for stores of files"):
            stream.store.segments()
