"""Readers that need few columns read only a small part of the files and get correct values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import meteor_py as meteor
from meteor_py.store.base import read_columns
from meteor_py.store.parquet import ParquetStore
from meteor_py.store.storage import LocalStorage
from meteor_py.testing.store_contract import INCARNATION, records
from tests.support.parquet_store import claimed
from tests.support.stored_streams import archive, kept

BYTES = 5_000


class CountingFile:
    """A file that counts the bytes read from it."""

    def __init__(self, path: Path, counter: list[int]) -> None:
        self._file = path.open("rb")
        self._counter = counter

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._counter[0] += len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that holds the number of bytes read from local files since the fixture was set up."""
    counter = [0]

    def open_counted(storage: LocalStorage, path: str) -> Any:
        return pa.PythonFile(CountingFile(storage._inside(path), counter), "r")

    monkeypatch.setattr(LocalStorage, "open", open_counted)
    return counter


@pytest.fixture
def stream(url: str, tmp_path: Path) -> Iterator[meteor.Stream]:
    """A stream with 2,000 archived, incompressible records; the ring also holds the last ten."""
    with meteor.connect(url) as m:
        stream = kept(m, tmp_path, max_unarchived=10_000)
        with stream.publisher() as pub:
            for _ in range(10):
                pub.publish_many([os.urandom(BYTES) for _ in range(200)]).result()
        archive(stream)
        yield stream


def read(stream: meteor.Stream, columns: Sequence[str] | None) -> pa.Table:
    tables = []
    with stream.subscriber() as sub:
        if columns is not None:
            sub._read_columns(columns)
        end = sub.position
        sub.seek(0)
        while sub.position < end:
            tables.append(sub.poll().to_arrow())
    return pa.concat_tables(tables)


def test_reading_one_column_does_not_read_the_values(
    stream: meteor.Stream, bytes_read: list[int]
) -> None:
    whole = read(stream, None)
    everything = bytes_read[0]
    assert everything > 1_900 * BYTES
    for columns in (["offset"], ["timestamp", "key"], []):
        bytes_read[0] = 0
        found = read(stream, columns)
        assert bytes_read[0] < everything / 50
        assert found.select(["offset", *columns]).equals(whole.select(["offset", *columns]))


def test_columns_that_were_not_read_are_null_except_the_offset(stream: meteor.Stream) -> None:
    found = read(stream, ["appended"])
    assert found.schema.equals(meteor.ARROW_SCHEMA)
    assert found.column("offset").to_pylist() == list(range(2_000))
    assert found.column("value").slice(0, 1_000).null_count == 1_000
    assert found.column("appended").null_count == 0
    assert found.column("value")[-1].as_py() is not None  # frames in the ring are whole


def test_unknown_column_is_refused(stream: meteor.Stream) -> None:
    with stream.subscriber() as sub, pytest.raises(ValueError, match="no column 'price'"):
        sub._read_columns(["offset", "price"])


def test_columns_are_selected_after_reading_if_the_store_has_no_read_columns(
    tmp_path: Path,
) -> None:
    class Plain:
        def __init__(self, inner: ParquetStore) -> None:
            self.read = inner.read

    store = claimed(tmp_path)
    store.append(INCARNATION, 1, records(0, 20))
    plain: Any = Plain(store)
    found = pa.Table.from_batches(list(read_columns(plain, INCARNATION, 3, 9, ["key"])))
    assert found.equals(records(3, 9).select(["key"]).combine_chunks())


# Datasets


def test_dataset_holds_each_archived_record_once(stream: meteor.Stream) -> None:
    dataset = stream.store.dataset()
    assert dataset.schema.equals(meteor.ARROW_SCHEMA)
    table = dataset.to_table(columns=["offset"]).sort_by("offset")
    assert table.column("offset").to_pylist() == list(range(2_000))


def test_dataset_from_an_empty_store_is_empty(url: str, tmp_path: Path) -> None:
    with meteor.connect(url) as m:
        dataset = kept(m, tmp_path).store.dataset()
        assert dataset.count_rows() == 0
        assert dataset.schema.equals(meteor.ARROW_SCHEMA)


def test_paths_can_be_opened_with_the_filesystem(stream: meteor.Stream) -> None:
    store = stream.store
    assert store.paths() == store.files()
    assert all(info.is_file for info in store.filesystem.get_file_info(store.paths()))


def test_dataset_begins_at_its_start_offset(tmp_path: Path) -> None:
    store = claimed(tmp_path)
    store.append(INCARNATION, 1, records(0, 40))
    store.append(INCARNATION, 1, records(40, 60))
    found = store.dataset(INCARNATION, 25, 60).to_table().column("offset").to_pylist()
    assert found == list(range(25, 60))
