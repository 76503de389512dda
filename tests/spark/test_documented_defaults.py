"""The defaults in the option tables in docs/spark.md match the connector's defaults."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from meteor_py.records.config import StreamConfig
from pyspark_meteor.options import parse_source
from pyspark_meteor.sink_options import parse_sink
from tests.docs.test_defaults import rows

VALUES = StructType([StructField("value", BinaryType())])
GIVEN = {"url": "redis://127.0.0.1:6379", "stream": "orders"}


def documented(kind: str) -> dict[str, str]:
    """Return the options whose documented default is a single value, with that value."""
    found: dict[str, str] = {}
    for names, default in rows("spark.md", f"option of the {kind}"):
        value = default.strip("`").replace(",", "")
        if len(names) == 1 and value and " " not in value:
            found[names[0]] = value
    return found


@pytest.mark.parametrize("option", sorted(documented("source")))
def test_source_option_with_its_documented_default_changes_nothing(option: str) -> None:
    given = GIVEN | ({"minOffsetsPerTrigger": "5"} if option == "maxTriggerDelay" else {})
    value = documented("source")[option]
    assert parse(given | {option: value}) == parse(given)


def parse(given: dict[str, str]) -> Any:
    return parse_source(given, streaming=True)


@pytest.mark.parametrize("option", sorted({*documented("sink")} - {"capacity"}))
def test_sink_option_with_its_documented_default_changes_nothing(option: str) -> None:
    value = documented("sink")[option]
    explicit = parse_sink(GIVEN | {option: value}, VALUES, streaming=True)
    assert explicit == parse_sink(GIVEN, VALUES, streaming=True)


def test_documented_capacity_of_new_streams_is_the_default_capacity() -> None:
    assert int(documented("sink")["capacity"]) == StreamConfig().capacity


def test_both_option_tables_contain_defaults() -> None:
    assert len(documented("source")) >= 5
    assert len(documented("sink")) >= 3
