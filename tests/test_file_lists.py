"""The list of the files of a store: whole, or an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from tests.archiving import Depot


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
