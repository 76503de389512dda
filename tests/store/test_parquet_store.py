"""Parquet segments on disk: damage is distinguished from loss, and a crash leaves nothing behind.

tests/store/test_segments.py covers which segment is live at an offset.
"""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meteor_py.errors import CorruptSegment, StoreUnavailable
from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.store import segment_file
from meteor_py.store.base import Bounds
from meteor_py.store.parquet import ParquetStore
from meteor_py.store.segment import Segment
from meteor_py.testing.store_contract import (
    INCARNATION,
    NEWEST,
    appended_at,
    check,
    check_lost,
    read,
    records,
)
from tests.support.parquet_store import END, GROUP, claimed, filled, flaws, names, paths, readable


@pytest.fixture(autouse=True)
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_file, "GROUP_RECORDS", GROUP)


@pytest.fixture
def empty(tmp_path: Path) -> ParquetStore:
    return claimed(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> ParquetStore:
    return filled(tmp_path)


def search(store: ParquetStore, offset: int) -> int | str:
    """Find a record by its append time. Return its offset, or where the store is corrupt."""
    try:
        return store.locate(INCARNATION, appended_at(offset), 0, END)
    except CorruptSegment as error:
        return "corrupt" if 40 <= error.first <= error.last < 80 else "corrupt elsewhere"


# Files


def test_row_groups_are_small_and_files_carry_metadata(
    store: ParquetStore,
) -> None:
    file = pq.ParquetFile(paths(store)[1])
    sizes = [file.metadata.row_group(n).num_rows for n in range(file.metadata.num_row_groups)]
    assert sizes == [16, 16, 8]
    assert file.schema_arrow.equals(ARROW_SCHEMA)
    assert json.loads(file.schema_arrow.metadata[b"meteor"]) == {
        "stream": "s",
        "life": INCARNATION,
        "term": 1,
    }


def test_row_group_with_large_values_has_few_records(empty: ParquetStore) -> None:
    table = records(0, 10)
    values = pa.array([bytes(segment_file.GROUP_BYTES // 2)] * 10)
    table = table.set_column(4, ARROW_SCHEMA.field("value"), values)
    empty.append(INCARNATION, 1, table)
    file = pq.ParquetFile(paths(empty, 10)[0])
    assert file.metadata.row_group(0).num_rows <= 2
    assert len(read(empty, 5, 6)) == 1


def test_values_that_do_not_compress_are_stored_with_the_same_codec(
    empty: ParquetStore, rng: random.Random
) -> None:
    sizes = []
    for first, values in (
        (0, [rng.randbytes(500) for _ in range(100)]),
        (100, [b"the same text" * 40 for _ in range(100)]),
    ):
        column = pa.array(values, pa.binary())
        table = records(first, first + 100).set_column(4, ARROW_SCHEMA.field("value"), column)
        assert segment_file._compresses(table) is bool(first)
        empty.append(INCARNATION, 1, table)
        metadata = pq.read_metadata(paths(empty, first + 100)[-1]).row_group(0).column(4)
        assert metadata.compression == "ZSTD"
        sizes.append(metadata.total_compressed_size / metadata.total_uncompressed_size)
        (batch,) = empty.read(INCARNATION, first, first + GROUP)
        assert batch.column("value").to_pylist() == values[:GROUP]
    assert sizes[1] < 0.5 < sizes[0]


def test_other_files_in_the_folder_are_ignored(store: ParquetStore, tmp_path: Path) -> None:
    folder = tmp_path / "s" / INCARNATION
    (folder / "notes.txt").write_text("mine")
    (folder / Segment(0, 500, 9, "0badcafe").name).mkdir()
    (folder / Segment(0, 600, 9, "0badcafe").name).symlink_to(paths(store)[0])
    (tmp_path / "s" / "not an incarnation").mkdir()
    check(store, 0, END)
    assert store.bounds(INCARNATION) == Bounds(0, END, 1)
    assert store.incarnations() == [INCARNATION]
    assert flaws(store) == []
    store.tidy(INCARNATION, NEWEST, END, lambda: True)
    assert (folder / "notes.txt").read_text() == "mine"


# Damage


def test_truncated_file_is_named_and_others_stay_readable(store: ParquetStore) -> None:
    path = paths(store)[1]
    whole = path.read_bytes()
    size = len(whole)
    for length in (0, 1, 4, 8, size // 3, size // 2, size - 100, size - 8, size - 4, size - 1):
        path.write_bytes(whole[:length])
        assert flaws(store) == [("corrupt", 40, 79)], length
        assert readable(store) == {*range(40), *range(80, 120)}, length
        with pytest.raises(CorruptSegment, match=path.name) as caught:
            read(store, 50, 51)
        assert 40 <= caught.value.first <= 50 <= caught.value.last < 80
        check(store, 0, 40)


def test_flipped_byte_is_detected_anywhere_and_no_wrong_record_is_read(
    store: ParquetStore, rng: random.Random
) -> None:
    path = paths(store)[1]
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    body = rng.sample(range(footer), 80)
    # Half of the file is the footer, which only the whole-file checksum covers.
    tail = [*rng.sample(range(footer, len(whole)), 80), *range(len(whole) - 12, len(whole))]
    damaged = 0
    for position in [0, 1, 2, 3, *body, footer, *tail]:
        data = bytearray(whole)
        data[position] ^= rng.randrange(1, 256)
        path.write_bytes(data)
        assert flaws(store, 40, 80) == [("corrupt", 40, 79)], position
        found = readable(store, 32, 88)
        assert found >= {*range(32, 40), *range(80, 88)}, position
        damaged += len(found) < 56
        assert search(store, 60) in (60, "corrupt"), position
    assert damaged > 50


def test_damage_to_part_of_a_file_leaves_the_rest_readable(store: ParquetStore) -> None:
    path = paths(store)[1]
    data = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(1).column(4)  # the values
    data[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptSegment) as caught:
        read(store, 40, 80)
    assert (caught.value.first, caught.value.last) == (56, 71)
    assert readable(store) == set(range(120)) - set(range(56, 72))


def test_missing_append_times_are_reported_as_damage(store: ParquetStore) -> None:
    path = paths(store)[1]
    whole = path.read_bytes()
    groups = pq.ParquetFile(path).metadata
    for group in range(groups.num_row_groups):
        data = bytearray(whole)
        # pyarrow skips a page of an unknown type without an error.
        data[groups.row_group(group).column(2).data_page_offset + 1] ^= 0x10
        path.write_bytes(data)
        found = {search(store, offset) for offset in range(42, 80, 3)}
        assert "corrupt" in found
        assert found <= {"corrupt", *range(42, 80, 3)}


def test_file_under_another_files_name_is_reported_as_damage(store: ParquetStore) -> None:
    first, second, _ = paths(store)
    second.write_bytes(first.read_bytes())
    assert flaws(store) == [("corrupt", 40, 79)]
    with pytest.raises(CorruptSegment, match="does not hold the records 40 to 55"):
        read(store, 40, 80)
    pq.write_table(pa.table({"offset": range(40, 80)}), second)
    with pytest.raises(CorruptSegment, match="columns"):
        read(store, 40, 80)


def test_missing_segment_is_reported_lost_with_its_offsets(store: ParquetStore) -> None:
    paths(store)[1].unlink()
    check_lost(store, 0, END, first=40, last=79)
    check_lost(store, 60, 70, first=60, last=69)
    assert flaws(store) == [("missing", 40, 79)]
    assert flaws(store, 50, END) == [("missing", 50, 79)]
    check(store, 0, 40)
    check(store, 80, END)
    assert store.locate(INCARNATION, appended_at(99), 80, END) == 99


def test_segment_that_is_listed_but_missing_is_reported_lost_with_its_offsets(
    store: ParquetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates an object store whose listing is stale."""
    gone, open_file = paths(store)[1].name, store._storage.open

    def open_unless_gone(path: str) -> Any:
        if path.endswith(gone):
            raise FileNotFoundError(path)
        return open_file(path)

    monkeypatch.setattr(store._storage, "open", open_unless_gone)
    check_lost(store, 0, END, first=40, last=79)
    check_lost(store, 60, 70, first=60, last=69)
    check(store, 80, END)


def test_read_error_is_not_reported_as_damage(
    store: ParquetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store._storage, "open", fail)
    with pytest.raises(StoreUnavailable, match="Input/output error") as caught:
        read(store, 0, 10)
    assert caught.value.retriable


# Writing


@pytest.mark.parametrize("step", ["fsync", "rename", "write_table"])
def test_failed_append_leaves_nothing_behind(
    store: ParquetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = names(tmp_path)

    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter if step == "write_table" else os, step, fail)
        with pytest.raises(StoreUnavailable, match="No space left") as caught:
            store.append(INCARNATION, 1, records(120, 160))
    assert caught.value.retriable
    assert names(tmp_path) == before
    assert store.bounds(INCARNATION) == Bounds(0, END, 1)
    store.append(INCARNATION, 2, records(120, 160))
    check(store, 0, 160)


def test_file_is_read_back_before_it_becomes_visible(
    store: ParquetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table: Any = pq.ParquetWriter.write_table

    def lie(writer: pq.ParquetWriter, table: pa.Table, **options: Any) -> None:
        write_table(writer, table.slice(0, len(table) - 1), **options)

    before = names(tmp_path)
    monkeypatch.setattr(pq.ParquetWriter, "write_table", lie)
    with pytest.raises(StoreUnavailable, match="does not contain the records"):
        store.append(INCARNATION, 1, records(120, 160))
    assert names(tmp_path) == before


def test_append_fails_if_the_streams_folder_is_gone(store: ParquetStore, tmp_path: Path) -> None:
    """The disk may be unmounted: the archiver must not create a folder with the same name."""
    (tmp_path / "s").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailable):
        store.append(INCARNATION, 1, records(120, 160))
    assert not (tmp_path / "s").exists()
    assert store.identity() is None
