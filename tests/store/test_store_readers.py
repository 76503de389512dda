"""A store's files are plain Parquet: pyarrow, DuckDB and Spark can read them directly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.store import segment_file
from meteor_py.testing.store_contract import INCARNATION, NEWEST, appended_at, records
from tests.support.parquet_store import claimed, make_old

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

END = 200


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A store's files after a failover, a compaction and a crash."""
    monkeypatch.setattr(segment_file, "GROUP_RECORDS", 30)
    store = claimed(tmp_path)
    store.append(INCARNATION, 1, records(0, 70))
    store.append(INCARNATION, 1, records(70, 120, branch=1))
    store.append(INCARNATION, 2, records(70, 100))
    store.append(INCARNATION, 2, records(100, 150))
    store.compact(INCARNATION, 0, 150, records=100, size=1 << 30)
    store.append(INCARNATION, 3, records(150, END))
    store.append(INCARNATION, 3, records(END, END + 50, branch=3))  # never committed
    (tmp_path / "s" / INCARNATION / "_0123.tmp").write_bytes(b"PAR1")
    store.tidy(INCARNATION, NEWEST, END, lambda: True)
    return store.files(INCARNATION, 0, END)


def hexed(value: bytes | None) -> str | None:
    return None if value is None else value.hex().upper()


def rows() -> list[dict[str, Any]]:
    """Return the records as other programs show them: bytes in hex, times in milliseconds."""
    columns = records(0, END).to_pydict()
    return [
        {
            "offset": n,
            "timestamp": appended_at(n) - n % 5,
            "appended": appended_at(n),
            "key": hexed(columns["key"][n]),
            "value": hexed(columns["value"][n]),
            "headers": None
            if columns["headers"][n] is None
            else {name: hexed(value) for name, value in columns["headers"][n]},
        }
        for n in range(END)
    ]


def test_pyarrow_reads_store_files(files: list[str]) -> None:
    dataset = ds.dataset(files, format="parquet")
    assert dataset.schema.equals(ARROW_SCHEMA)
    assert dataset.to_table().equals(records(0, END))
    assert dataset.count_rows(filter=ds.field("offset") >= 150) == END - 150


def test_row_groups_have_statistics_for_skipping(files: list[str]) -> None:
    for file in files:
        metadata = pq.read_metadata(file)
        for group in range(metadata.num_row_groups):
            for column in ("offset", "timestamp", "appended"):
                index = ARROW_SCHEMA.get_field_index(column)
                assert metadata.row_group(group).column(index).statistics.has_min_max


def test_folder_without_leftovers_can_be_read_as_a_whole(files: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "s" / INCARNATION
    for name in os.listdir(folder):
        make_old(folder / name)
    (folder / "_begun.tmp").write_bytes(b"PAR1")  # an archiver has begun to write
    claimed(tmp_path).tidy(INCARNATION, NEWEST, END, lambda: True)
    table = ds.dataset(folder, format="parquet").to_table().sort_by("offset")
    assert table.equals(records(0, END))


def test_duckdb_reads_store_files(files: list[str]) -> None:
    with duckdb.connect() as connection:
        found = connection.read_parquet(files)
        assert dict(zip(found.columns, map(str, found.types), strict=True)) == {
            "offset": "BIGINT",
            "timestamp": "TIMESTAMP WITH TIME ZONE",
            "appended": "TIMESTAMP WITH TIME ZONE",
            "key": "BLOB",
            "value": "BLOB",
            "headers": "MAP(VARCHAR, BLOB)",
        }
        counts = 'count(*), count(distinct "offset"), sum("offset")'
        assert found.aggregate(counts).fetchall() == [(END, END, sum(range(END)))]
        shown = found.order('"offset"').project(
            '"offset", epoch_ms("timestamp"), epoch_ms(appended), key, value, headers'
        )
        for row, expected in zip(shown.fetchall(), rows(), strict=True):
            headers = row[5] and {name: hexed(value) for name, value in row[5].items()}
            assert (*row[:3], hexed(row[3]), hexed(row[4])) == tuple(expected.values())[:5]
            assert (headers or None) == (expected["headers"] or None)


@pytest.mark.timeout(400)  # starting Spark is slow on a loaded machine
def test_spark_reads_store_files(files: list[str], spark: SparkSession) -> None:
    from pyspark.sql import functions as f

    records = spark.read.parquet(*files)
    columns = [
        f.col("offset"),
        f.unix_millis("timestamp").alias("timestamp"),
        f.unix_millis("appended").alias("appended"),
        f.hex("key").alias("key"),
        f.hex("value").alias("value"),
        f.transform_values("headers", lambda _, value: f.hex(value)).alias("headers"),
    ]
    found = [row.asDict() for row in records.where("offset >= 10").select(columns).collect()]
    types = dict(records.dtypes)
    assert types == {
        "offset": "bigint",
        "timestamp": "timestamp",
        "appended": "timestamp",
        "key": "binary",
        "value": "binary",
        "headers": "map<string,binary>",
    }
    assert sorted(found, key=lambda row: row["offset"]) == rows()[10:]
