"""Decoding restores the encoded records, and bytes that are not a frame raise a typed error.

Covers round trips for every layout, thousands of broken frames (flipped bits, cut ends, spliced
halves), frames from a newer version, and foreign entries. ``test_bombs.py`` covers decompression
bombs, ``test_batches.py`` covers decoded batches, and ``test_gaps.py`` covers readers that reach a
bad frame.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meteor_py as meteor
from meteor_py.records.config import OFFSET_MAX, Compression
from meteor_py.records.frame import Columns, decode, encode, entry_span
from meteor_py.records.record import Record, RecordBatch

APPENDED = 1_700_000_000_000
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)
PRESENT = list(product([False, True], repeat=3))
Entry = tuple[bytes, list[bytes]]


def entry(columns: Columns, compression: Compression = "none", first: int = 0) -> Entry:
    """Return the log entry for these columns."""
    name, payload = encode(columns, compression)
    return raw_entry(name, bytes(payload), first, len(columns))


def raw_entry(name: str, payload: bytes, first: int = 0, n: int = 1) -> Entry:
    return b"%d-%d" % (first + n - 1, n), [b"t", b"%d" % APPENDED, name.encode(), payload]


def batch_of(*entries: Entry) -> RecordBatch:
    chunks = decode("s", entries)
    return RecordBatch("s", chunks[0].first, chunks)


def sample(n: int, *, c: bool = False, h: bool = False, k: bool = False) -> Columns:
    """Return columns with occasional nulls, and values that compress well."""
    return Columns(
        [b"value-%d" % i * 5 for i in range(n)],
        [None if i % 3 == 2 else b"key-%d" % (i % 7) for i in range(n)] if k else None,
        [None if i % 4 == 3 else {"h\u00e9": b"x", "n": b"%d" % i} for i in range(n)]
        if h
        else None,
        [None if i % 5 == 4 else APPENDED - i for i in range(n)] if c else None,
    )


def records_of(columns: Columns, first: int) -> list[Record]:
    n = len(columns)
    times = columns.timestamps or [None] * n
    return [
        Record(
            first + i,
            columns.values[i],
            columns.keys[i] if columns.keys else None,
            columns.headers[i] if columns.headers else None,
            APPENDED if times[i] is None else times[i],
            APPENDED,
        )
        for i in range(n)
    ]


def check_well_formed(batch: RecordBatch) -> None:
    """Check that a batch's records and columns agree, and that all types are valid."""
    records = list(batch)
    assert [r.offset for r in records] == list(batch.offsets)
    assert [r.value for r in records] == batch.values()
    assert [r.key for r in records] == batch.keys()
    for record in records:
        assert type(record.value) is bytes
        assert record.key is None or type(record.key) is bytes
        for name, value in (record.headers or {}).items():
            assert type(name) is str
            assert type(value) is bytes
        assert record.time.tzinfo is not None
    table = batch.to_arrow()
    table.validate(full=True)
    assert table.num_rows == len(batch)


# Round trip

rows = st.tuples(
    st.binary(max_size=100),
    st.none() | st.binary(max_size=10),
    st.none() | st.dictionaries(st.text(max_size=5), st.binary(max_size=5), max_size=3),
    st.none() | st.integers(0, 253_402_300_799_999),
)


@given(
    st.lists(rows, min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from(PRESENT),
    st.sampled_from(COMPRESSIONS),
    st.integers(0, OFFSET_MAX - 100),
    st.booleans(),
)
def test_every_layout_is_decoded_as_it_was_encoded(
    some: list[tuple[Any, ...]],
    times: int,
    present: tuple[bool, bool, bool],
    compression: Compression,
    first: int,
    from_arrow: bool,
) -> None:
    values, keys, headers, stamps = (list(column) for column in zip(*some * times, strict=True))
    k, h, c = present
    columns = Columns(values, keys if k else None, headers if h else None, stamps if c else None)
    expected = records_of(columns, first)
    if from_arrow:
        arrow = columns.to_arrow(columns.letters())
        names = {"value": "values", "key": "keys", "headers": "headers", "timestamp": "timestamps"}
        columns = Columns(**{names[n]: arrow.column(n) for n in arrow.schema.names})
    assert list(batch_of(entry(columns, compression, first))) == expected


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(("c", "h", "k"), PRESENT)
def test_a_frames_name_encodes_its_columns_and_compression(
    compression: Compression, c: bool, h: bool, k: bool
) -> None:
    letters = "c" * c + "h" * h + "k" * k + "v"
    one, _ = encode(sample(1, c=c, h=h, k=k), compression)
    many, payload = encode(sample(50, c=c, h=h, k=k), compression)
    assert one == f"0{letters}"
    assert many == f"1{letters}" + ("" if compression == "none" else f".{compression}")
    if compression != "none":
        assert struct.unpack_from("<I", payload)[0] > len(payload)


def test_a_bare_record_is_encoded_as_its_value() -> None:
    assert encode(Columns([b"plain in redis-cli"]), "zstd") == ("0v", b"plain in redis-cli")


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_highly_compressible_frame_is_not_mistaken_for_a_bomb(
    compression: Compression,
) -> None:
    columns = Columns([bytes(1000)] * 500)
    name, _ = encode(columns, compression)
    if name == "1v":
        return
    assert batch_of(entry(columns, compression)).values() == columns.values


def test_small_adjacent_frames_are_merged_even_if_their_columns_differ() -> None:
    parts = [
        sample(1), sample(3, k=True), sample(1, h=True), sample(32, c=True), sample(2),
    ]  # fmt: skip
    entries, expected, first = [], [], 7
    for part in parts:
        entries.append(entry(part, first=first))
        expected += records_of(part, first)
        first += len(part)
    chunks = decode("s", entries)
    assert len(chunks) == 1
    assert list(RecordBatch("s", 7, chunks)) == expected


def test_frames_with_a_hole_between_them_are_not_merged() -> None:
    chunks = decode("s", [entry(sample(2)), entry(sample(2), first=3)])
    assert [chunk.first for chunk in chunks] == [0, 3]


# Broken frames


def bases() -> Iterator[tuple[str, Entry]]:
    for (c, h, k), n in product(PRESENT, [1, 5, 40]):
        for compression in COMPRESSIONS if n == 40 else COMPRESSIONS[:1]:
            columns = sample(n, c=c, h=h, k=k)
            name, _ = encode(columns, compression)
            yield f"{n} of {name}", entry(columns, compression, first=100)


BASES = dict(bases())


def mutate(rng: random.Random, payload: bytes, other: bytes) -> bytes:
    data = bytearray(payload)
    kind = rng.randrange(7)
    if kind <= 1 and data:
        # In half of these cases, mutate only the front, where lengths and tables are.
        reach = len(data) if kind else min(len(data), 400)
        for _ in range(rng.choice([1, 1, 1, 2, 8])):
            data[rng.randrange(reach)] ^= 1 << rng.randrange(8)
    elif kind == 2:
        del data[rng.randrange(len(data) + 1) :]
    elif kind == 3:
        cut = rng.randrange(len(data) + 1)
        data[cut:] = other[rng.randrange(len(other) + 1) :]
    elif kind == 4 and data:
        start = rng.randrange(len(data))
        data[start : start + rng.choice([1, 4, 8])] = rng.choice(
            [b"", bytes(8), b"\xff" * 8, b"\xff\xff\xff\x7f", rng.randbytes(8)]
        )
    elif kind == 5 and len(data) >= 8:
        # Overwrite what may be a length or an offset: Arrow aligns these, and puts tables first.
        at = 4 * rng.randrange(min(len(data) - 4, 400) // 4)
        struct.pack_into("<I", data, at, rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, len(data)]))
    else:
        data[:0] = rng.randbytes(rng.choice([1, 4, 8]))
    return bytes(data)


@pytest.mark.parametrize("base", BASES)
def test_a_mutated_frame_raises_a_typed_error_or_decodes_to_a_well_formed_batch(
    base: str, rng: random.Random
) -> None:
    refused = decode_mutants(base, rng, 150)
    for each in refused:
        assert (each.stream, each.first) == ("s", 100)
        assert f"{each.first} to {each.last}" in str(each)
    assert refused or base == "1 of 0v"  # its mutants are also valid values


def decode_mutants(base: str, rng: random.Random, count: int) -> list[meteor.CorruptFrame]:
    """Decode mutants of a frame; check those that can be decoded, and return the others' errors."""
    entry_id, fields = BASES[base]
    other = rng.choice(list(BASES.values()))[1][3]
    refused: list[meteor.CorruptFrame] = []
    for _ in range(count):
        broken = [*fields[:3], mutate(rng, fields[3], other)]
        try:
            batch = batch_of((entry_id, broken))
        except meteor.CorruptFrame as error:
            refused.append(error)
        else:
            check_well_formed(batch)
    return refused


def test_a_mutated_entry_raises_a_typed_error_or_decodes_to_a_well_formed_batch(
    rng: random.Random,
) -> None:
    for _ in range(3000):
        entry_id, fields = rng.choice(list(BASES.values()))
        parts = [entry_id, *fields]
        for _ in range(rng.choice([1, 1, 2])):
            place = rng.randrange(len(parts) - 1)  # not the payload: the test above mutates it
            parts[place] = mutate(rng, parts[place], rng.choice(parts))
        if rng.random() < 0.1:
            parts.insert(rng.randrange(1, len(parts)), rng.randbytes(3))
        try:
            check_well_formed(batch_of((parts[0], parts[1:])))
        except (meteor.CorruptStream, meteor.CorruptFrame, meteor.UnsupportedFrame):
            pass


@pytest.mark.parametrize("at", [0, 100, 2000])
def test_a_checksum_detects_a_flipped_bit_in_a_well_formed_frame(at: int) -> None:
    payload = bytes(3000)
    crc = b"%d" % zlib.crc32(payload)
    flipped = bytearray(payload)
    flipped[at] ^= 1
    entry_id, fields = raw_entry("0v", payload)
    assert batch_of((entry_id, [*fields, b"crc", crc])).values() == [payload]
    with pytest.raises(meteor.CorruptFrame, match="checksum"):
        decode("s", [(entry_id, [*fields[:3], bytes(flipped), b"crc", crc])])


@pytest.mark.parametrize(("name", "n"), [("0v", 2), ("0kv", 2), ("1v", 4), ("1v", 6), ("1v", 1)])
def test_a_frame_with_a_wrong_number_of_records_is_corrupt(name: str, n: int) -> None:
    columns = sample(1 if name.startswith("0") else 5, k=name == "0kv")
    _, payload = encode(columns, "none")
    with pytest.raises(meteor.CorruptFrame) as caught:
        decode("s", [raw_entry(name, bytes(payload), 10, n)])
    assert (caught.value.first, caught.value.last) == (10, 10 + n - 1)


HEADERS = pa.map_(pa.string(), pa.binary())
BAD_COLUMNS: dict[str, tuple[str, dict[str, pa.Array]]] = {
    "a null value": ("1v", {"value": pa.array([b"a", None])}),
    "a header name that is not UTF-8": (
        "1hv",
        {
            "headers": pa.MapArray.from_arrays(
                [0, 1, 1],
                pa.Array.from_buffers(
                    pa.string(), 1, pa.array([b"\xff\xfe"]).buffers()
                ),
                pa.array([b"x"]),
            ),
            "value": pa.array([b"a", b"b"]),
        },
    ),
    "a header without a value": (
        "1hv",
        {"headers": pa.array([[("a", None)], []], HEADERS), "value": pa.array([b"a", b"b"])},
    ),
    "a time before 1970": (
        "1cv", {"timestamp": pa.array([-1, 5]), "value": pa.array([b"a", b"b"])}
    ),
    "a time after 9999": (
        "1cv", {"timestamp": pa.array([2**62, None]), "value": pa.array([b"a", b"b"])}
    ),
}  # fmt: skip


@pytest.mark.parametrize("times", [1, 30])
@pytest.mark.parametrize("what", BAD_COLUMNS)
def test_valid_arrow_that_is_not_a_frame_is_corrupt(what: str, times: int) -> None:
    name, columns = BAD_COLUMNS[what]
    arrays = {n: pa.concat_arrays([c] * times) for n, c in columns.items()}
    payload = bytes(pa.RecordBatch.from_pydict(arrays).serialize())
    with pytest.raises(meteor.CorruptFrame):
        decode("s", [raw_entry(name, payload, 0, 2 * times)])


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("0kv", [b"k"]),
        ("0kv", [b"k", b"v", b"x"]),
        ("0kv", [b"k", None]),
        ("0kv", ["text", b"v"]),
        ("0cv", [-1, b"v"]),
        ("0cv", [2**63, b"v"]),
        ("0cv", [1.5, b"v"]),
        ("0hv", [{"h": None}, b"v"]),
        ("0hv", [{b"\xff": b"x"}, b"v"]),
        ("0kv", {"k": b"k", "v": b"v"}),
    ],
)
def test_valid_messagepack_that_is_not_a_frame_is_corrupt(name: str, row: Any) -> None:
    with pytest.raises(meteor.CorruptFrame):
        decode("s", [raw_entry(name, msgspec.msgpack.encode(row))])


# Other versions and foreign entries


@pytest.mark.parametrize(
    "name", ["2v", "99kv", "1v.snappy", "0v.lz4", "1gkv", "2z", "1vk", "3hkv.brotli"]
)
def test_a_frame_from_a_newer_version_is_reported_with_its_offsets(name: str) -> None:
    with pytest.raises(meteor.UnsupportedFrame, match="upgrade") as caught:
        decode("s", [raw_entry(name, b"?", 20, 5)])
    assert (caught.value.stream, caught.value.first, caught.value.last) == ("s", 20, 24)


FOREIGN: list[tuple[bytes, list[bytes]]] = [
    (b"1700000000000-0", [b"user", b"1"]),
    (b"5-7", [b"t", b"1", b"0v", b"x"]),
    (b"9007199254740992-1", [b"t", b"1", b"0v", b"x"]),
    (b"18446744073709551615-1", [b"t", b"1", b"0v", b"x"]),
    (b"0-1", [b"t", b"yesterday", b"0v", b"x"]),
    (b"0-1", [b"t", b"999999999999999", b"0v", b"x"]),
    (b"0-1", [b"x", b"1", b"0v", b"x"]),
    (b"0-1", [b"t", b"1", b"value", b"x"]),
    (b"0-1", [b"t", b"1", b"", b"x"]),
    (b"0-1", [b"t", b"1"]),
    (b"0-1", [b"t", b"1", b"0v", b"x", b"y", b"z"]),
    (b"0-1", [b"t", b"1", b"0v", b"x", b"crc", b"-1"]),
]


@pytest.mark.parametrize(("entry_id", "fields"), FOREIGN)
def test_an_entry_that_no_publisher_wrote_is_reported_with_its_id(
    entry_id: bytes, fields: list[bytes]
) -> None:
    with pytest.raises(meteor.CorruptStream) as caught:
        decode("s", [(entry_id, fields)])
    assert entry_id.decode() in str(caught.value)
    assert caught.value.stream == "s"


def test_an_id_is_the_last_offset_and_the_number_of_records() -> None:
    assert entry_span("s", b"9-3") == (7, 9)
    assert entry_span("s", b"0-1") == (0, 0)
    assert entry_span("s", b"9007199254740991-2") == (OFFSET_MAX - 1, OFFSET_MAX)


def test_frames_before_a_bad_frame_are_decoded_and_a_bad_first_frame_raises() -> None:
    good = [entry(sample(2)), entry(sample(40), first=2)]
    for bad in (raw_entry("1v", b"junk", 42, 3), raw_entry("9v", b"", 42, 3), FOREIGN[0]):
        chunks = decode("s", [*good, bad, entry(sample(1), first=45)])
        assert sum(map(len, chunks)) == 42
        with pytest.raises(meteor.MeteorError):
            decode("s", [bad, *good])
