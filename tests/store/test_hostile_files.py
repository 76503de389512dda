"""Readers refuse Parquet files that no archiver wrote before they use much memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import meteor_py as meteor
from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.store.base import TERMS
from meteor_py.store.parquet import ParquetStore
from meteor_py.store.segment import Segment

ROWS, INCARNATION = 1_500, "abcd"


def plant(folder: Path, values: pa.Array, rows: int, **options: object) -> ParquetStore:
    """Return a store with one file that another program wrote."""
    store = ParquetStore(folder, "orders")
    store.claim("ab" * 8)
    path = folder / "orders" / INCARNATION / Segment(0, rows - 1, TERMS + 1, "0" * 8).name
    path.parent.mkdir()
    fields = [
        pa.field("value", values.type, nullable=False) if field.name == "value" else field
        for field in ARROW_SCHEMA
    ]
    columns = {"offset": list(range(rows)), "timestamp": [0] * rows, "appended": [0] * rows}
    table = pa.table(
        {**columns, "key": [None] * rows, "value": values, "headers": [None] * rows},
        schema=pa.schema(fields),
    )
    pq.write_table(table, path, compression="zstd", store_schema=False, **options)
    return store


def test_a_value_that_a_dictionary_repeats_is_refused(tmp_path: Path) -> None:
    one = pa.array([bytes(1 << 20)], pa.binary())
    values = pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), one)
    store = plant(tmp_path, values, ROWS, dictionary_pagesize_limit=1 << 22)
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    with pytest.raises(meteor.CorruptSegment, match="dictionary"):
        next(store.read(INCARNATION, 0, ROWS))
    assert pa.total_allocated_bytes() - before < 1 << 20
    tracemalloc.stop()


def test_a_row_group_of_too_many_records_is_refused(tmp_path: Path) -> None:
    rows = 100_000
    values = pa.array([b""] * rows, pa.binary())
    store = plant(tmp_path, values, rows, use_dictionary=False)
    with pytest.raises(meteor.CorruptSegment, match="too large for a segment"):
        next(store.read(INCARNATION, 0, rows))
