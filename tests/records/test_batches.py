"""A RecordBatch is a sequence of records, however they were framed, and does not copy Arrow frames.

Most tests run on batches of every kind: small frames merged into lists, one Arrow frame, several
of both, sliced or not. All of them must behave the same.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import meteor_py as meteor
from meteor_py.records import memory
from meteor_py.records.codec import Codec, find_codec
from meteor_py.records.frame import Columns, decode, encode
from meteor_py.records.memory import keep_arenas
from meteor_py.records.record import Record, RecordBatch, TableChunk
from meteor_py.records.times import to_ms

FIRST = 1000
APPENDED = 1_700_000_000_000
MS = pa.timestamp("ms", tz="UTC")


def expected(offset: int) -> Record:
    """Return the record that all batches here have at this offset."""
    appended = APPENDED + offset // 50
    explicit = None if offset % 3 == 0 else APPENDED - offset
    return Record(
        offset,
        b"value-%d" % offset,
        None if offset % 4 == 0 else b"key-%d" % offset,
        None if offset % 5 == 0 else {"name": b"%d" % offset, "\u00fc": b""},
        appended if explicit is None else explicit,
        appended,
    )


def entry(first: int, n: int) -> tuple[bytes, list[bytes]]:
    """Return a log entry with ``n`` records, whose append time is that of the first record."""
    records = [expected(offset) for offset in range(first, first + n)]
    times = [None if r.offset % 3 == 0 else r.timestamp for r in records]
    columns = Columns(
        [r.value for r in records], [r.key for r in records], [r.headers for r in records], times
    )
    name, payload = encode(columns, "none")
    fields = [b"t", b"%d" % records[0].appended, name.encode(), bytes(payload)]
    return b"%d-%d" % (first + n - 1, n), fields


# Frame sizes per layout. Each layout starts a new frame at every multiple of 50, where the append
# time changes, so that a record is the same in all layouts.
MAKES = {
    "one record": [1],
    "lists": [1, 3, 1, 32, 13],
    "one frame": [50],
    "frames": [50, 50, 50],
    "both": [50, 1, 9, 1, 39, 50, 25, 25],
}


def make(sizes: Sequence[int], codec: Codec | None = None) -> RecordBatch:
    entries, first = [], FIRST
    for size in sizes:
        entries.append(entry(first, size))
        first += size
    return RecordBatch("s", FIRST, decode("s", entries), codec)


def as_sliced(batch: RecordBatch) -> RecordBatch:
    """Return an equal batch that is a slice of a larger one."""
    whole = make([*MAKES["both"], 50, 50, 50])
    part = whole[: len(batch)]
    assert isinstance(part, RecordBatch)
    return part


@pytest.fixture(params=[*MAKES, *(f"{name}, sliced" for name in MAKES), "empty"])
def batch(request: pytest.FixtureRequest) -> RecordBatch:
    name, _, sliced = request.param.partition(", ")
    if name == "empty":
        return RecordBatch("s", FIRST, [])
    whole = make(MAKES[name])
    return as_sliced(whole) if sliced else whole


def test_iterating_yields_every_record_once_in_order(batch: RecordBatch) -> None:
    assert list(batch) == [expected(offset) for offset in batch.offsets]
    assert list(batch) == list(batch)  # a batch can be iterated again


@pytest.mark.parametrize("table", [False, True])
def test_scattered_records_of_a_chunk_equal_those_that_iterating_yields(
    batch: RecordBatch, table: bool
) -> None:
    for each in batch._chunks:
        chunk = TableChunk(each.first, each.to_arrow()) if table else each
        for step in (1, 2, 7):
            offsets = range(chunk.first, chunk.first + len(chunk), step)
            assert chunk.to_lists().pick(offsets) == [expected(offset) for offset in offsets]


def test_length_truth_value_and_offsets_agree(batch: RecordBatch) -> None:
    n = len(batch)
    assert bool(batch) is (n > 0)
    assert batch.offsets == range(FIRST, FIRST + n)
    assert (batch.first_offset, batch.last_offset) == (FIRST, FIRST + n - 1)
    assert repr(batch) == (
        f"<RecordBatch of 's': {FIRST}..{FIRST + n - 1}>" if n else "<RecordBatch of 's': empty>"
    )


def test_indexing_works_as_on_a_list(batch: RecordBatch) -> None:
    records = list(batch)
    for index in range(-len(records), len(records)):
        assert batch[index] == records[index]
    for index in (len(records), -len(records) - 1):
        with pytest.raises(IndexError):
            batch[index]


def test_slicing_works_as_on_a_list(batch: RecordBatch, rng: random.Random) -> None:
    records = list(batch)
    bounds = [None, 0, 1, -1, len(records), len(records) + 5, -len(records) - 5]
    bounds += [rng.randrange(-60, 60) for _ in range(4)]
    for start in bounds:
        for stop in bounds:
            part = batch[start:stop]
            assert isinstance(part, RecordBatch)
            assert list(part) == records[start:stop]
            assert part.values() == [r.value for r in records[start:stop]]
            if part:
                assert part.first_offset == records[start:stop][0].offset


def test_a_slice_with_a_step_is_refused() -> None:
    for step in (2, -1):
        with pytest.raises(ValueError, match="consecutive offsets"):
            make([5])[::step]


def test_a_batch_is_a_sequence(batch: RecordBatch) -> None:
    records = list(batch)
    assert isinstance(batch, Sequence)
    assert list(reversed(batch)) == records[::-1]
    if records:
        assert records[-1] in batch
        assert batch.index(records[-1]) == len(records) - 1
        assert batch.count(records[0]) == 1


def test_values_and_keys_equal_the_records_values_and_keys(batch: RecordBatch) -> None:
    assert batch.values() == [expected(offset).value for offset in batch.offsets]
    assert batch.keys() == [expected(offset).key for offset in batch.offsets]


def test_changing_returned_lists_does_not_change_the_batch(batch: RecordBatch) -> None:
    before = list(batch)
    values: list[Any] = batch.values()
    values += [b"mine"] * 3
    batch.keys().append(b"mine")
    values[:2] = []
    assert len(batch) == len(before)
    assert list(batch) == before
    assert batch.values() == [record.value for record in before]


def test_to_arrow_has_the_documented_schema_and_every_column(batch: RecordBatch) -> None:
    table = batch.to_arrow()
    table.validate(full=True)
    assert table.schema == meteor.ARROW_SCHEMA
    records = [expected(offset) for offset in batch.offsets]
    assert table.column("offset").to_pylist() == [r.offset for r in records]
    assert table.column("value").to_pylist() == [r.value for r in records]
    assert table.column("key").to_pylist() == [r.key for r in records]
    headers = [pairs and dict(pairs) for pairs in table.column("headers").to_pylist()]
    assert headers == [r.headers for r in records]
    for name in ("timestamp", "appended"):
        column = table.column(name)
        assert column.type == MS
        assert column.null_count == 0
        assert column.cast(pa.int64()).to_pylist() == [getattr(r, name) for r in records]


def test_to_arrow_without_keys_headers_or_times_has_the_same_schema() -> None:
    for n in (1, 5, 50):
        name, payload = encode(Columns([b"v"] * n), "none")
        chunks = decode("s", [(b"%d-%d" % (n - 1, n), [b"t", b"7", name.encode(), bytes(payload)])])
        table = RecordBatch("s", 0, chunks).to_arrow()
        assert table.schema == meteor.ARROW_SCHEMA
        assert table.column("key").null_count == table.column("headers").null_count == n
        assert table.column("timestamp").cast(pa.int64()).to_pylist() == [7] * n


def test_values_in_a_frame_and_its_slices_are_not_copied() -> None:
    entry_id, fields = entry(FIRST, 50)
    payload = pa.py_buffer(fields[3])
    whole = RecordBatch("s", FIRST, decode("s", [(entry_id, fields)]))
    for batch in (whole, whole[10:20], whole[10:20][3:]):
        for name in ("value", "key"):
            data = batch.to_arrow().column(name).chunk(0).buffers()[2]
            assert payload.address <= data.address < payload.address + payload.size


def test_a_records_time_is_an_aware_datetime() -> None:
    record = make([3])[1]
    assert record.time.tzinfo is UTC
    assert record.time == datetime.fromtimestamp(record.timestamp / 1000, UTC)


@pytest.mark.parametrize("ms", [0, 1, 999, 1_700_000_000_123, 253_402_300_799_999])
def test_a_records_time_is_exact(ms: int) -> None:
    assert to_ms(Record(0, b"", None, None, ms, ms).time) == ms
    assert Record(0, b"", None, None, ms, ms).time.microsecond == ms % 1000 * 1000


def test_a_record_cannot_be_changed() -> None:
    record = make([1])[0]
    with pytest.raises(AttributeError):
        record.offset = 5  # type: ignore[misc]  # mypy rejects it too


@pytest.mark.parametrize("sizes", [[1] * 20, [20], [50, 10]])
def test_a_value_that_the_codec_cannot_decode_is_reported_with_the_raw_record(
    sizes: list[int],
) -> None:
    batch = make(sizes, find_codec("json"))  # value-1000 is not JSON
    for use in (batch.values, lambda: list(batch), lambda: batch[0]):
        with pytest.raises(meteor.DecodeError, match=f"record {FIRST} of stream 's'") as caught:
            use()
        assert caught.value.record == expected(FIRST)
        assert caught.value.record.value == b"value-%d" % FIRST


def test_codec_does_not_change_keys_and_arrow_columns_and_applies_to_slices() -> None:
    batch = make([50, 10], find_codec("text"))
    assert batch.values() == [f"value-{offset}" for offset in batch.offsets]
    assert batch[5].value == "value-1005"
    assert batch[5:7].values() == ["value-1005", "value-1006"]
    assert batch.keys()[1] == b"key-1001"
    assert batch.to_arrow().column("value")[5].as_py() == b"value-1005"


def test_any_exception_in_a_codec_becomes_a_decode_error() -> None:
    class FailingCodec:
        def encode(self, value: Any) -> bytes:
            raise NotImplementedError

        def decode(self, data: bytes) -> Any:
            if data.endswith(b"3"):
                raise KeyError(data)
            return data

    batch = make([50], FailingCodec())
    with pytest.raises(meteor.DecodeError) as caught:
        batch.values()
    assert caught.value.record.offset == FIRST + 3
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(batch[:3].values()) == 3


@pytest.mark.parametrize(("form", "size"), [("list", 100), ("RecordBatch.values", 479)])
def test_objects_of_a_batch_reuse_the_memory_of_earlier_batches(form: str, size: int) -> None:
    program = """
import resource, sys
import pyarrow as pa
from meteor_py.records import memory
from meteor_py.records.record import ArrowChunk, RecordBatch
form, size = eval(sys.argv[1]), int(sys.argv[2])
values = pa.array([b"%0*d" % (size, number) for number in range(10_000)], pa.binary())
columns = pa.RecordBatch.from_arrays([values], ["value"])
def read():
    for _ in range(40):
        assert len(form(RecordBatch("s", 0, [ArrowChunk(0, columns, 0)]))) == len(values)
read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
read()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, len(memory._kept))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, form, str(size)],
        capture_output=True,
        check=True,
        timeout=60,
        text=True,
    )
    new_pages, kept = map(int, ran.stdout.split())
    assert new_pages < 1000, "400,000 values of 100 bytes take 53 MB, which is 13,000 pages"
    assert 0 < kept <= 16


def test_large_values_are_not_kept_for_their_memory() -> None:
    before = list(memory._kept)
    keep_arenas([bytes(1000)] * 10_000)
    assert list(memory._kept) == before
