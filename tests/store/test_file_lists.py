"""A store's ``files()`` returns all files or raises; ``segments()`` lists those that exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from tests.support.archivers import StoredStream
from tests.support.group_members import STREAM


@pytest.fixture
def stored(url: str, tmp_path: Path) -> Iterator[StoredStream]:
    with StoredStream(url, tmp_path / "store") as stored:
        yield stored


def test_files_on_an_unmounted_disk_raise_store_unavailable(stored: StoredStream) -> None:
    stored.fill(100)
    stored.archive()
    archive = stored.stream.store
    before = archive.files()
    away = stored.root.with_name("away")
    stored.root.rename(away)
    with pytest.raises(meteor.StoreUnavailable, match="There is no store"):
        archive.files()
    away.rename(stored.root)
    assert archive.files() == before


def test_files_include_segments_merged_during_the_call(
    stored: StoredStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More records arrive after the bounds were read, and their files are merged."""
    stored.fill(60)
    stored.archive()
    stored.fill(60)
    stored.archive()
    files = meteor.ParquetStore.files

    def files_late(store: meteor.ParquetStore, *args: Any) -> list[str]:
        monkeypatch.undo()
        stored.fill(60)
        stored.archive()
        assert stored.stream.store.compact() > 0
        return files(store, *args)

    monkeypatch.setattr(meteor.ParquetStore, "files", files_late)
    assert stored.stored() == list(range(180))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_files_raise_records_lost_for_a_missing_file(stored: StoredStream, number: int) -> None:
    for _ in range(3):
        stored.fill(60)
        stored.archive()
    Path(stored.stream.store.files()[number]).unlink()
    with pytest.raises(meteor.RecordsLost) as caught:
        stored.stream.store.files()
    assert (caught.value.first, caught.value.last) == (60 * number, 60 * number + 59)
    assert stored.harm()


# segments()


def test_segments_describe_the_listed_files(stored: StoredStream) -> None:
    for _ in range(3):
        stored.fill(60)
        stored.archive()
    archive = stored.stream.store
    found = archive.segments()
    assert [segment.file for segment in found] == archive.files()
    assert [(segment.first, segment.last, segment.records) for segment in found] == [
        (first, first + 59, 60) for first in (0, 60, 120)
    ]
    assert [segment.size for segment in found] == [
        Path(segment.file).stat().st_size for segment in found
    ]
    assert {segment.epoch for segment in found} == {stored.stream.describe().epoch}
    assert [segment.term for segment in found] == sorted({segment.term for segment in found})
    archive.compact()
    (merged,) = archive.segments()
    assert (merged.first, merged.last) == (0, 179)


def test_segments_skip_a_missing_file_but_not_a_missing_disk(stored: StoredStream) -> None:
    for _ in range(3):
        stored.fill(60)
        stored.archive()
    archive = stored.stream.store
    Path(archive.files()[1]).unlink()
    assert [segment.first for segment in archive.segments()] == [0, 120]
    stored.root.rename(stored.root.with_name("away"))
    with pytest.raises(meteor.StoreUnavailable, match="There is no store"):
        archive.segments()


def test_segments_show_only_the_live_part_of_a_file(stored: StoredStream) -> None:
    stored.fill(60)
    stored.archive()
    archive = stored.stream.store
    stored.redis.hset(keys.meta(STREAM), "archived", 50)  # as after a failover
    (segment,) = archive.segments()
    assert (segment.first, segment.last, segment.records) == (0, 49, 50)


def test_segments_raises_type_error_for_a_memory_store(url: str) -> None:
    with meteor.connect(url) as m:
        stream = m.stream("s", store=meteor.MemoryStore("s"), archive=False)
        with pytest.raises(TypeError, match=r"segments\(\) needs a file-based store"):
            stream.store.segments()
