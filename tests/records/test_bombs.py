"""The decoder refuses a frame that would unpack to more than the limit, without unpacking it.

A bomb can hide in the frame's own compression, in Arrow's compression inside a message, and in
lengths that MessagePack declares without providing the data. Arrow's compression can be declared in
three ways, old and new.
"""

from __future__ import annotations

import io
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import meteor_py as meteor
from meteor_py.records.frame import Columns, decode, encode


def raw_entry(name: str, payload: bytes, n: int = 1) -> tuple[bytes, list[bytes]]:
    return b"%d-%d" % (n - 1, n), [b"t", b"1", name.encode(), payload]


def arrow_message(
    columns: dict[str, pa.Array], metadata: dict[str, str] | None = None, **options: Any
) -> bytes:
    """Return a record batch message as pyarrow writes it, without the schema message before it."""
    batch = pa.RecordBatch.from_pydict(columns)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as out:
        out.write_batch(batch, custom_metadata=metadata)
    mark = 0 if options.get("use_legacy_format") else 4
    (schema_size,) = struct.unpack_from("<i", sink.getvalue(), mark)
    return sink.getvalue()[mark + 4 + schema_size :]


MIB = 1024 * 1024


def packed(compression: str, payload: bytes, size: int) -> bytes:
    codec = {"lz4": "lz4_raw", "zstd": "zstd"}[compression]
    return struct.pack("<I", size) + bytes(pa.compress(payload, codec=codec))


def arrow_bomb(compression: str, **options: Any) -> bytes:
    return arrow_message({"value": pa.array([bytes(40 * MIB)])}, compression=compression, **options)


def masked_arrow_bomb(compression: str) -> bytes:
    """Return a bomb in the layout before Arrow 0.15, disguised as a harmless message.

    pyarrow still reads the old layout. It has padding where today's layout has a pointer to its
    tables. Here that padding points to harmless tables appended at the end.
    """
    bomb = bytearray(arrow_bomb(compression, use_legacy_format=True))
    bomb += bytes(-len(bomb) % 8)
    table = len(bomb) + 12
    assert bomb[8:12] == bytes(4)
    struct.pack_into("<I", bomb, 8, table - 8)
    bomb += struct.pack("<HHHHHH", 10, 8, 0, 0, 4, 0)  # a message; its header is at 4
    bomb += struct.pack("<iI", 12, 4)
    bomb += struct.pack("<iHH", -4, 4, 4)  # a header without fields
    return bytes(bomb)


def experimental_arrow_bomb(compression: str) -> bytes:
    """Return a bomb whose compression is declared in the message metadata, as in Arrow 0.17."""
    message = bytearray(
        arrow_bomb(
            compression,
            metadata={"ARROW:experimental_compression": compression},
            metadata_version=pa.ipc.MetadataVersion.V4,
        )
    )
    _, fields = flatbuffer_table(message, 8)
    vtable, _ = flatbuffer_table(message, fields[2])
    # Remove the field in which current versions declare the compression.
    struct.pack_into("<H", message, vtable + 4 + 2 * 3, 0)
    return bytes(message)


def flatbuffer_table(data: bytearray, pointer: int) -> tuple[int, list[int]]:
    """Return the positions of the vtable and of the fields in the table at ``pointer``."""
    table = pointer + struct.unpack_from("<I", data, pointer)[0]
    vtable = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, vtable)
    fields = struct.unpack_from(f"<{(size - 4) // 2}H", data, vtable + 4)
    return vtable, [table + field for field in fields]


def bombs() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    noise = random.Random(1).randbytes(MIB)
    for kind in ("lz4", "zstd"):
        name = f"1v.{kind}"
        yield f"{kind} of 65 MiB", name, partial(packed, kind, noise, 65 * MIB)
        yield f"{kind} that claims 4 GiB", name, partial(packed, kind, b"x", 2**32 - 1)
        yield f"{kind} x 1000", name, partial(packed, kind, bytes(40 * MIB), 40 * MIB)
        yield f"Arrow's {kind} inside", "1v", partial(arrow_bomb, kind)
        yield f"Arrow's {kind}, masked", "1v", partial(masked_arrow_bomb, kind)
        yield f"Arrow's {kind}, experimental", "1v", partial(experimental_arrow_bomb, kind)
    yield "nested lists", "0kv", lambda: b"\x91" * 200_000
    yield "nested maps", "0hv", lambda: b"\x92" + b"\x81\xa1a" * 200_000
    yield "a list of 2^32", "0kv", lambda: b"\xdd\xff\xff\xff\xff"
    yield "bytes of 2^32", "0kv", lambda: b"\x92\xc6\xff\xff\xff\xff"
    yield "a map of 2^32", "0hv", lambda: b"\x92\xdf\xff\xff\xff\xff"


BOMBS = {name: (kind, build) for name, kind, build in bombs()}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_before_it_unpacks(bomb: str) -> None:
    name, build = BOMBS[bomb]
    payload = build()
    assert len(payload) < 2 * MIB
    pool = pa.default_memory_pool()
    pool_before = pool.bytes_allocated()
    tracemalloc.start()
    try:
        with pytest.raises(meteor.CorruptFrame):
            decode("s", [raw_entry(name, payload)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MIB
    assert pool.bytes_allocated() == pool_before


@pytest.mark.parametrize("bomb", [name for name in BOMBS if name.startswith("Arrow")])
def test_pyarrow_would_unpack_the_bomb(bomb: str) -> None:
    """Prove that the bombs in the test above are real."""
    schema = pa.schema([pa.field("value", pa.binary(), nullable=False)])
    batch = pa.ipc.read_record_batch(pa.py_buffer(BOMBS[bomb][1]()), schema)
    assert batch.nbytes > 40 * MIB


def test_messages_in_arrows_old_layout_are_refused() -> None:
    """The decoder refuses the old layout, because it could not find hidden compression in it."""
    payload = arrow_message({"value": pa.array([b"a", b"b"])}, use_legacy_format=True)
    assert (
        pa.ipc.read_record_batch(
            pa.py_buffer(payload), pa.schema([pa.field("value", pa.binary())])
        ).num_rows
        == 2
    )  # pyarrow would accept it
    with pytest.raises(meteor.CorruptFrame):
        decode("s", [raw_entry("1v", payload, 2)])


def test_one_fetch_does_not_unpack_all_of_many_compressed_frames(rng: random.Random) -> None:
    # 20 MiB: far more than a publisher sends, but only fifty times the compressed size
    one = Columns([rng.randbytes(16_384) * 64 for _ in range(20)])
    message = bytes(one.to_arrow("v").serialize())
    payload = packed("lz4", message, len(message))
    fields = [b"t", b"1", b"1v.lz4", payload]
    entries = [(b"%d-20" % (20 * i + 19), fields) for i in range(20)]
    chunks = decode("s", entries)
    assert sum(map(len, chunks)) == 60  # the fourth would exceed 64 MiB
    assert decode("s", entries[3:])[0].first == 60


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("wrong", [-1, +1, +4096])
def test_a_block_that_does_not_unpack_to_the_size_it_claims_is_corrupt(
    compression: str, wrong: int
) -> None:
    """A short block leaves process memory in the buffer, which must not become values."""
    _, message = encode(Columns([b"value %d" % i for i in range(50)]), "none")
    payload = packed(compression, bytes(message), message.size + wrong)
    with pytest.raises(meteor.CorruptFrame):
        decode("s", [raw_entry(f"1v.{compression}", payload, 50)])


# Small, valid frames that would decode to huge results


def empty_values(n: int) -> pa.Array:
    offsets = pa.py_buffer(bytes(4 * n + 4))
    return pa.BinaryArray.from_buffers(pa.binary(), n, [None, offsets, pa.py_buffer(b"")])


def frame_of_records(n: int) -> tuple[bytes, list[bytes]]:
    return raw_entry("1v", arrow_message({"value": empty_values(n)}), n)


def frame_of_headers(n: int) -> tuple[bytes, list[bytes]]:
    names = pa.StringArray.from_buffers(n, pa.py_buffer(bytes(4 * n + 4)), pa.py_buffer(b""))
    lists = pa.array([0, n, n], pa.int32())
    headers = pa.MapArray.from_arrays(lists, names, empty_values(n))
    return raw_entry("1hv", arrow_message({"headers": headers, "value": empty_values(2)}), 2)


def packed_headers(n: int) -> tuple[bytes, list[bytes]]:
    pairs = b"".join(b"\xa3%03x\xc4\x00" % (number % 4096) for number in range(n))
    return raw_entry("0hv", b"\x92\xdf" + struct.pack(">I", n) + pairs + b"\xc4\x00")


@pytest.mark.parametrize(
    "entry",
    [frame_of_records(4_000_000), frame_of_headers(4_000_000), packed_headers(2_000_000)],
    ids=["records", "headers", "headers-of-one-record"],
)
def test_a_frame_with_too_many_records_or_headers_is_refused_before_objects_are_made(
    entry: tuple[bytes, list[bytes]],
) -> None:
    tracemalloc.start()
    with pytest.raises(meteor.CorruptFrame):
        decode("s", [entry])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 * MIB


def test_an_arrow_message_without_metadata_is_corrupt() -> None:
    message = bytearray(arrow_message({"value": pa.array([b"a", b"b"])}))
    message[4:8] = bytes(4)  # pyarrow raises EOFError
    with pytest.raises(meteor.CorruptFrame):
        decode("s", [raw_entry("1v", bytes(message), 2)])


def lz4_sequence(literals: bytes, match: tuple[int, int] | None = None) -> bytes:
    """Return an LZ4 sequence: literals, then a match given as (distance, length)."""
    length = len(literals)
    token = (min(length, 15) << 4) | (match[1] - 4 if match else 0)
    more = b"" if length < 15 else b"\xff" * ((length - 15) // 255) + bytes([(length - 15) % 255])
    return bytes([token]) + more + literals + (struct.pack("<H", match[0]) if match else b"")


def test_an_lz4_block_that_ends_early_is_refused_instead_of_padded_with_stale_memory() -> None:
    message = arrow_message({"value": pa.array([b"x" * 200] * 40)})
    size = len(message)
    # The block is three bytes short. Decoding into a smaller buffer would not reveal that, because
    # of LZ4's rules for the end of a block.
    block = lz4_sequence(message[: size - 12], (1, 4)) + lz4_sequence(b"LAST5")
    with pytest.raises(meteor.CorruptFrame, match="unpacks to"):
        decode("s", [raw_entry("1v.lz4", struct.pack("<I", size) + block, 40)])
