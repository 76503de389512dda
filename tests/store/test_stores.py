"""Each store keeps the contract of stores: in memory, on a disk, and by way of pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs as fs
import pytest

from meteor_py.store.memory import MemoryStore
from meteor_py.store.parquet import ParquetStore
from meteor_py.testing.store_contract import OpenStore, StoreContract
from tests.support.s3 import S3


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with S3() as s3:
        yield s3


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        store = MemoryStore("s")
        return lambda: store


class TestParquetStore(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda: ParquetStore(tmp_path / "not" / "yet", "s")


class TestParquetStoreInAFilesystem(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda: ParquetStore(str(tmp_path), "s", filesystem=fs.LocalFileSystem())


class TestParquetStoreInS3(StoreContract):
    @pytest.fixture
    def open_store(self, s3: S3) -> OpenStore:
        uri = s3.uri()
        return lambda: ParquetStore(uri, "s")
