"""Every store fulfils the store contract: in memory, on a disk, and on a pyarrow filesystem.

tests/store/test_store_uploads.py covers object stores.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.fs as fs
import pytest

from meteor_py.store.memory import MemoryStore
from meteor_py.store.parquet import ParquetStore
from meteor_py.testing.store_contract import OpenStore, StoreContract


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
