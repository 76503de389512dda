"""From the store, a source reads only the columns in the query's schema."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import LongType, StringType, StructField, StructType

import meteor_py as meteor
from meteor_py.store.segment_file import SegmentFile
from pyspark_meteor.source import MeteorDataSource
from tests.support.readers import fill
from tests.support.spark_engine import own_process

OFFSETS = StructType([StructField("stream", StringType()), StructField("offset", LongType())])


@pytest.mark.parametrize(
    ("schema", "columns"), [(OFFSETS, ["offset"]), (StructType([]), []), (None, None)]
)
def test_only_columns_in_the_schema_are_read_from_the_store(
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    schema: StructType | None,
    columns: list[str] | None,
) -> None:
    with meteor.connect(url) as m:
        stream = m.stream("orders", capacity=10, store=tmp_path)
        fill(stream, 1_000)
        stream.store.flush()
    asked: list[list[str] | None] = []
    original = SegmentFile.read

    def read(file: SegmentFile, group: int, columns: Sequence[str] | None = None) -> Any:
        asked.append(None if columns is None else list(columns))
        return original(file, group, columns)

    monkeypatch.setattr(SegmentFile, "read", read)
    with own_process():
        source = MeteorDataSource(CaseInsensitiveDict({"url": url, "stream": "orders"}))
        reader = source.reader(source.schema() if schema is None else schema)
        batches: list[Any] = [each for part in reader.partitions() for each in reader.read(part)]
    assert sum(batch.num_rows for batch in batches) == 1_000
    assert asked
    if columns is None:
        assert all(each is None or "value" in each for each in asked)
    else:
        assert all(each is not None and set(each) <= {"offset"} for each in asked), asked
