"""Readers refuse Parquet files that no archiver wrote, before such files use much memory."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import meteor_py as meteor
from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.store import segment_file
from meteor_py.store.base import TERMS
from meteor_py.store.parquet import ParquetStore
from meteor_py.store.parquet_layout import _flat_struct, _read_struct, read_footer
from meteor_py.store.segment import Segment
from meteor_py.store.segment_file import GROUP_BYTES, UNPACKED_MAX
from tests.support.parquet_mutants import OPTIONS, fuzz, varint

ROWS, INCARNATION = 1_500, "abcd"
MIB = 1 << 20
#: Memory pools must outlive their buffers.
_POOLS: list[pa.MemoryPool] = []


def table(rows: int, **columns: Any) -> pa.Table:
    """Return records with these columns; the other columns have simple values."""
    times = {"timestamp": [0] * rows, "appended": [0] * rows}
    others = {"key": [None] * rows, "value": [b""] * rows, "headers": [None] * rows}
    found = {"offset": range(rows)} | times | others | columns
    arrays: dict[str, pa.Array] = {}
    for field in ARROW_SCHEMA:
        given: Any = found[field.name]
        is_array = isinstance(given, pa.Array)
        arrays[field.name] = given if is_array else pa.array(given, field.type)
    fields = [field.with_type(arrays[field.name].type) for field in ARROW_SCHEMA]
    return pa.table(arrays, schema=pa.schema(fields))


def plant(folder: Path, records: pa.Table, **options: object) -> tuple[ParquetStore, Path]:
    """Return a store that holds one file from another program, and the file's path."""
    store = ParquetStore(folder, "orders")
    store.claim("ab" * 8)
    name = Segment(0, len(records) - 1, TERMS + 1, "0" * 8).name
    path = folder / "orders" / INCARNATION / name
    path.parent.mkdir()
    pq.write_table(records, path, **{**OPTIONS, "store_schema": False, **options})
    return store, path


def refusal(store: ParquetStore, rows: int) -> str:
    """Read the file, which must be refused before it takes much memory; return the reason."""
    usual = pa.default_memory_pool()
    counted = pa.proxy_memory_pool(usual)
    _POOLS.append(counted)
    pa.set_memory_pool(counted)
    try:
        with pytest.raises(meteor.CorruptSegment) as refused:
            next(store.read(INCARNATION, 0, rows))
    finally:
        pa.set_memory_pool(usual)
    assert (counted.max_memory() or 0) < 16 * MIB
    return str(refused.value)


def repeated(entry: bytes, rows: int, kind: pa.DataType | None = None) -> pa.Array:
    """Return an array that repeats one entry many times but stores it only once."""
    one = pa.array([entry], kind or pa.binary())
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), one)


# The unpacked size of row groups


def test_value_that_a_dictionary_repeats_is_refused(tmp_path: Path) -> None:
    records = table(ROWS, value=repeated(bytes(MIB), ROWS))
    options = {"use_dictionary": True, "column_encoding": None}
    store, _ = plant(tmp_path, records, dictionary_pagesize_limit=4 * MIB, **options)
    assert "segments do not" in refusal(store, ROWS)


def test_key_that_a_dictionary_repeats_is_refused(tmp_path: Path) -> None:
    records = table(ROWS, key=repeated(bytes(MIB), ROWS))
    store, path = plant(tmp_path, records, dictionary_pagesize_limit=4 * MIB)
    assert path.stat().st_size < MIB // 50
    assert f"unpacks to more than {UNPACKED_MAX >> 20} MiB" in refusal(store, ROWS)


def test_header_name_that_a_dictionary_repeats_is_refused(tmp_path: Path) -> None:
    names = repeated(b"x" * MIB, ROWS, pa.string())
    values = pa.array([b""] * ROWS, pa.binary())
    headers = pa.MapArray.from_arrays(pa.array(range(ROWS + 1), pa.int32()), names, values)
    store, _ = plant(tmp_path, table(ROWS, headers=headers), dictionary_pagesize_limit=4 * MIB)
    assert f"unpacks to more than {UNPACKED_MAX >> 20} MiB" in refusal(store, ROWS)


def test_record_with_too_many_headers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_file, "UNPACKED_MAX", 4 * MIB)
    count = 200_000
    headers = pa.array([[("", None)] * count], ARROW_SCHEMA.field("headers").type)
    store, path = plant(tmp_path, table(1, headers=headers))
    assert path.stat().st_size < 10_000
    assert "unpacks to more than 4 MiB" in refusal(store, 1)


def test_pages_that_unpack_to_more_than_the_footer_claims_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_file, "UNPACKED_MAX", 4 * MIB)
    rows = 100
    store, path = plant(tmp_path, table(rows, value=[bytes(MIB)] * rows))
    data = path.read_bytes()
    column = pq.read_metadata(path).row_group(0).column(4)
    true = varint(column.total_uncompressed_size)
    small = bytes([true[0] | 128, *[128] * (len(true) - 2), 0])  # a small number of the same length
    assert (data.count(true), len(data) < 50_000) == (1, True)
    path.write_bytes(data.replace(true, small))
    assert pq.read_metadata(path).row_group(0).column(4).total_uncompressed_size < 256
    assert "unpacks to more than 4 MiB" in refusal(store, rows)


def test_row_group_with_too_many_records_is_refused(tmp_path: Path) -> None:
    rows = 100_000
    store, _ = plant(tmp_path, table(rows))
    assert "too large for a segment" in refusal(store, rows)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "snappy"},
        {"compression": "none"},
        {"data_page_version": "2.0"},
        {"column_encoding": {"offset": "PLAIN"}},
        {"column_encoding": {"value": "DELTA_BYTE_ARRAY"}},
    ],
    ids=str,
)
def test_layout_that_segments_do_not_have_is_refused(
    tmp_path: Path, options: dict[str, object]
) -> None:
    store, _ = plant(tmp_path, table(10, value=[b"x"] * 10), **options)
    assert "segment" in refusal(store, 10)


@pytest.mark.parametrize("declared", [1, 2, 4, 6, 8, 9, 12])
def test_list_that_declares_elements_of_another_type_is_refused(
    tmp_path: Path, declared: int
) -> None:
    store, path = plant(tmp_path, table(10, value=[b"x"] * 10))
    data = path.read_bytes()
    # The type of a binary column, and the head of the list of its encodings, which are numbers.
    head = re.compile(rb"\x15\x0c\x19(.)", re.DOTALL).search(data)
    assert head is not None
    assert head[1][0] & 15 == 5
    planted = data[: head.end() - 1] + bytes([head[1][0] & 0xF0 | declared]) + data[head.end() :]
    encodings = [pq.read_metadata(path).row_group(0).column(3).encodings]
    path.write_bytes(planted)
    encodings.append(pq.read_metadata(path).row_group(0).column(3).encodings)
    assert encodings[0] == encodings[1]  # pyarrow ignores the declared type
    assert "a list is unexpected" in refusal(store, 10)


@pytest.mark.parametrize(
    "footer",
    [
        b"\x89\x15\x02\x00",  # field 8 is a list of one number
        b"\x29\x1c\xe9\x18\x01a\x00",  # field 2 is a list of structs with a list of strings
        b"\x8c\x19\x15\x02\x00\x00",  # field 8 is a struct with a list of one number
        b"\x8a\x15\x02\x00",  # field 8 is a set of one number
    ],
)
def test_list_in_a_field_where_segments_have_none_is_refused(footer: bytes) -> None:
    with pytest.raises(ValueError, match=r"a list is unexpected|unknown type"):
        read_footer(footer, 1_000)


def test_footer_with_too_many_entries_is_refused(tmp_path: Path) -> None:
    store, path = plant(tmp_path, table(10))
    data = path.read_bytes()
    for footer in (bytes(300_000), b"\x01" * (5 * MIB)):
        path.write_bytes(data[:4] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
        assert "its footer " in refusal(store, 10)


# Valid segments


def test_row_groups_are_small_even_if_record_sizes_differ_widely(tmp_path: Path) -> None:
    store = ParquetStore(tmp_path, "orders")
    store.claim("ab" * 8)
    values = [b"small"] * 20_000 + [bytes([n]) * MIB for n in range(40)] + [bytes(12 * MIB)]
    store.append(INCARNATION, TERMS + 1, table(len(values), value=values))
    batches = list(store.read(INCARNATION, 0, len(values)))
    assert max(batch.nbytes for batch in batches[:-1]) <= 2 * GROUP_BYTES
    assert len(batches[-1]) == 1
    assert [value for batch in batches for value in batch.column("value").to_pylist()] == values


def test_one_large_key_and_header_among_many_small_ones_are_read(tmp_path: Path) -> None:
    """The dictionaries could repeat these entries for each record, but do not."""
    rows = 30_000
    keys = [b"small-%d" % (n % 100) for n in range(rows)]
    headers: list[Any] = [[("trace", b"")] for _ in range(rows)]
    keys[7], headers[9] = b"k" * 100_000, [("h" * 100_000, b"x"), ("trace", None)]
    store = ParquetStore(tmp_path, "orders")
    store.claim("ab" * 8)
    store.append(INCARNATION, TERMS + 1, table(rows, key=keys, headers=headers))
    found = pa.Table.from_batches(store.read(INCARNATION, 0, rows))
    assert found.schema.equals(ARROW_SCHEMA)
    assert found.column("key").to_pylist() == keys
    assert found.column("headers").to_pylist() == headers
    assert list(store.verify(INCARNATION, 0, rows)) == []


def flat_struct(rng: random.Random) -> bytes:
    """Return a struct with random numbers, strings and truth values, as Thrift would write it."""
    struct = bytearray()
    for _ in range(rng.randrange(6)):
        kind = rng.choice((1, 2, 4, 5, 6, 8))
        struct.append(rng.randrange(1, 16) << 4 | kind)
        if kind in (4, 5, 6):
            struct += varint(rng.choice((0, 5, 300, -(2**14))))
        elif kind == 8:
            size = rng.randrange(30)
            struct += bytes([size]) + rng.randbytes(size)
    return bytes(struct) + b"\0"


def test_a_skipped_struct_ends_where_a_read_one_does(rng: random.Random) -> None:
    skipped = 0
    for _ in range(20_000):
        data = bytearray(flat_struct(rng) + rng.randbytes(8))
        if rng.random() < 0.5:
            data[rng.randrange(len(data))] = rng.randrange(256)
        match = _flat_struct().match(data)
        if match is None:
            continue
        try:
            _, end = _read_struct(bytes(data), 0, None, 16)
        except ValueError:
            continue  # reading checks the size of each number, and skipping does not
        assert match.end() == end
        skipped += 1
    assert skipped > 5_000


# Broken files. tests/chaos/parquet_fuzz.py reads a hundred thousand of them.


def test_mutated_files_are_refused_or_read_in_bounded_memory(rng: random.Random) -> None:
    outcome = fuzz(rng.randrange(2**32), 3_000)
    assert outcome.refused > outcome.read > 0
    assert outcome.grown_mb < 256
