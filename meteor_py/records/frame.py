"""Frames: how records travel. The name of an entry's field says how its value is laid out.

The name is a version, the columns that any of the frame's records has, and a compression:

* ``0v``: one record, the value itself. ``0kv``, ``0hkv``, ``0chkv``...: one record, MessagePack of
  a list of its columns. One record as an Arrow message would cost 300 bytes more.
* ``1v``, ``1kv``...: many records, one Arrow IPC record batch message without its schema, which
  the name implies.
* ``1kv.lz4``, ``1kv.zstd``: that message compressed as a whole: its size (uint32, little endian)
  and one block.

The columns, always in this order: ``c`` timestamp (int64, ms), ``h`` headers
(map<string, binary>), ``k`` key (binary), ``v`` value (binary, never null).

Bytes from the log are not trusted: a frame is decoded and validated whole, or it is a
:class:`~meteor_py.CorruptFrame` that names its offsets.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

import msgspec
import pyarrow as pa

from meteor_py.errors import CorruptFrame, CorruptStream, UnsupportedFrame
from meteor_py.records.config import OFFSET_MAX, Compression
from meteor_py.records.record import ArrowChunk, Chunk, Headers, ListChunk
from meteor_py.records.times import MAX_MS, check_ms_column

#: What a frame may unpack to, in bytes, and as a multiple of what came.
_UNPACKED_MAX = 64 * 1024 * 1024
_RATIO_MAX = 100
#: ``MetadataVersion.V5``, what Arrow has written since 1.0.
_ARROW_V5 = 4
#: Frames of up to this many records are put together into lists: a chunk has its overhead.
_SMALL = 32
#: Smaller frames are not worth compressing.
_COMPRESS_MIN = 512

# Frames are alike in size, so the C library reuses their memory; mimalloc, Arrow's default, gives
# it back and asks for it again, which costs as much as all the rest of encoding.
_POOL = pa.system_memory_pool()

_CODECS = {"lz4": "lz4_raw", "zstd": "zstd"}
_FIELDS = {
    "c": pa.field("timestamp", pa.int64()),
    "h": pa.field("headers", pa.map_(pa.string(), pa.binary())),
    "k": pa.field("key", pa.binary()),
    "v": pa.field("value", pa.binary(), nullable=False),
}
_TYPES: dict[str, Any] = {
    "c": Annotated[int, msgspec.Meta(ge=0, le=MAX_MS)] | None,
    "h": dict[str, bytes] | None,
    "k": bytes | None,
    "v": bytes,
}
_LETTERS = tuple("".join(letters) for letters in product(("", "c"), ("", "h"), ("", "k"), ("v",)))
_SCHEMAS = {letters: pa.schema([_FIELDS[letter] for letter in letters]) for letters in _LETTERS}
_DECODERS = {
    letters: msgspec.msgpack.Decoder(tuple[tuple(_TYPES[letter] for letter in letters)])  # type: ignore[misc]  # made at run time
    for letters in _LETTERS
}
#: Also that of a later version, which may have other columns.
_NAME = re.compile(rb"(\d{1,3})([a-z]{1,16})(?:\.([a-z0-9]{1,16}))?")
_ID = re.compile(rb"(\d{1,16})-(\d{1,16})")


@dataclass(slots=True)
class Columns:
    """Records on their way out, by column: lists, or Arrow arrays of the types above."""

    values: Any
    keys: Any = None
    headers: Any = None
    timestamps: Any = None

    def __len__(self) -> int:
        return len(self.values)

    def letters(self) -> str:
        present = (("c", self.timestamps), ("h", self.headers), ("k", self.keys))
        return "".join(letter for letter, column in present if column is not None) + "v"

    def to_arrow(self, letters: str) -> pa.RecordBatch:
        columns = {"c": self.timestamps, "h": self.headers, "k": self.keys, "v": self.values}
        schema = _SCHEMAS[letters]
        arrays = [
            column if isinstance(column, pa.Array) else pa.array(_plain(column), field.type)
            for field, column in zip(schema, (columns[x] for x in letters), strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _plain(column: list[Any]) -> list[Any]:
    """Headers as pairs, which is what Arrow makes a map of."""
    first = next((row for row in column if row is not None), None)
    if not isinstance(first, dict):
        return column
    return [None if row is None else list(row.items()) for row in column]


# -- out ---------------------------------------------------------------------------------------


def encode(columns: Columns, compression: Compression) -> tuple[str, Any]:
    """Return the name of the frame's format and its bytes, or a buffer of them."""
    letters = columns.letters()
    if len(columns) == 1:
        value = columns.values[0]
        if isinstance(columns.values, list) and (
            compression == "none" or len(value) < _COMPRESS_MIN
        ):
            if letters == "v":
                return "0v", value
            row = {
                "c": columns.timestamps and columns.timestamps[0],
                "h": columns.headers and columns.headers[0],
                "k": columns.keys and columns.keys[0],
                "v": value,
            }
            return f"0{letters}", msgspec.msgpack.encode([row[letter] for letter in letters])
    message = columns.to_arrow(letters).serialize(memory_pool=_POOL)
    if compression == "none" or message.size < _COMPRESS_MIN:
        return f"1{letters}", message
    block = pa.compress(message, codec=_CODECS[compression], asbytes=True)
    if not message.size / _RATIO_MAX < len(block) + 4 < message.size:
        return f"1{letters}", message  # it does not help, or readers would take it for a bomb
    return f"1{letters}.{compression}", struct.pack("<I", message.size) + block


def fingerprint(payload: Any) -> int:
    """A checksum that tells one batch of a publisher from another, not a guard of its bytes.

    The ends suffice for that; a whole crc32 would take as long as building the frame.
    """
    view = memoryview(payload)
    if len(view) <= 8192:
        return zlib.crc32(view)
    return zlib.crc32(view[-4096:], zlib.crc32(view[:4096], len(view)))


# -- in ----------------------------------------------------------------------------------------


def entry_span(stream: str, entry_id: bytes) -> tuple[int, int]:
    """Return first and last offset of the entry with this ID.

    Raises:
        CorruptStream: The ID is not ``<last offset>-<n>``.
    """
    match = _ID.fullmatch(entry_id)
    if match:
        last, n = int(match[1]), int(match[2])
        if 1 <= n <= last + 1 <= OFFSET_MAX + 1:
            return last - n + 1, last
    raise foreign_entry(stream, entry_id)


def decode(stream: str, entries: Sequence[tuple[bytes, list[bytes]]]) -> list[Chunk]:
    """Return the records of some entries, small frames with consecutive offsets merged.

    What lies before a bad frame is returned; a bad first frame raises. What would unpack to more
    than 64 MiB in all is left for another call.

    Raises:
        CorruptStream: An entry that no publisher of ours wrote.
        UnsupportedFrame: A frame of a newer version.
        CorruptFrame: The bytes are not a frame.
    """
    chunks: list[Chunk] = []
    unpacked = 0
    bare: ListChunk | None = None  # the last chunk, while it is nothing but values
    for entry_id, fields in entries:
        if bare is not None and _append_bare(bare, entry_id, fields):
            continue
        try:
            first, last = entry_span(stream, entry_id)
            time, name, payload = _open(stream, entry_id, fields, first, last)
            if b"." in name:
                unpacked += int.from_bytes(payload[:4], "little")
                if chunks and unpacked > _UNPACKED_MAX:
                    break  # enough for one fetch; the next begins here
            chunk = _decode(stream, name, payload, first, last, time)
        except (CorruptStream, UnsupportedFrame, CorruptFrame):
            if chunks:
                break
            raise
        previous = chunks[-1] if chunks else None
        if (
            isinstance(chunk, ListChunk)
            and isinstance(previous, ListChunk)
            and previous.first + len(previous) == chunk.first
        ):
            _merge(previous, chunk)
        else:
            chunks.append(chunk)
        whole = chunks[-1]
        bare = whole if isinstance(whole, ListChunk) and whole.is_bare() else None
    return chunks


def _append_bare(chunk: ListChunk, entry_id: bytes, fields: list[bytes]) -> bool:
    """Fast path for a record without key, headers and time: append it to the last chunk."""
    if (
        len(fields) != 4
        or fields[2] != b"0v"
        or fields[0] != b"t"
        or entry_id != b"%d-1" % (chunk.first + len(chunk.values))
        or not fields[1].isdigit()
        or len(fields[1]) > 13
    ):
        return False
    chunk.values.append(fields[3])
    chunk.appended.append(int(fields[1]))
    return True


def _open(
    stream: str, entry_id: bytes, fields: list[bytes], first: int, last: int
) -> tuple[int, bytes, bytes]:
    """Take an entry apart: append time, format, payload."""
    size = len(fields)
    if size not in (4, 6) or fields[0] != b"t" or not fields[1].isdigit() or len(fields[1]) > 15:
        raise foreign_entry(stream, entry_id)
    time = int(fields[1])
    if size == 6:
        if fields[4] != b"crc" or not fields[5].isdigit() or len(fields[5]) > 10:
            raise foreign_entry(stream, entry_id)
        if zlib.crc32(fields[3]) != int(fields[5]):
            raise _corrupt(stream, first, last, "its checksum does not match")
    if time > MAX_MS or not _NAME.fullmatch(fields[2]):
        raise foreign_entry(stream, entry_id)
    return time, fields[2], fields[3]


def _decode(stream: str, name: bytes, payload: bytes, first: int, last: int, time: int) -> Chunk:
    n = last - first + 1
    if name == b"0v" and n == 1:  # fast path for the most common small frame
        return ListChunk(first, [payload], None, None, None, [time])
    match = _NAME.fullmatch(name)
    assert match is not None, "checked in _open"
    version, letters, compression = match[1], match[2].decode(), (match[3] or b"").decode()
    known = letters in _SCHEMAS
    if version == b"0" and known and not compression:
        if n != 1:
            raise _corrupt(stream, first, last, f"a frame of one record claims {n}")
        return _decode_one(stream, letters, payload, first, time)
    if version == b"1" and known and (not compression or compression in _CODECS):
        if compression:
            payload = _unpack(stream, first, last, compression, payload)
        return _decode_many(stream, letters, payload, first, last, time)
    raise UnsupportedFrame(
        f"Records {first} to {last} of stream {stream!r} have the frame format "
        f"{name.decode()!r}, which this version does not know; upgrade meteor-py to read them.",
        stream=stream,
        first=first,
        last=last,
    )


def _decode_one(stream: str, letters: str, payload: bytes, offset: int, time: int) -> ListChunk:
    if letters == "v":
        return ListChunk(offset, [payload], None, None, None, [time])
    try:
        row = dict(zip(letters, _DECODERS[letters].decode(payload), strict=True))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _corrupt(stream, offset, offset, str(error)) from None
    return ListChunk(
        offset,
        [row["v"]],
        [row["k"]] if "k" in row else None,
        [row["h"]] if "h" in row else None,
        [row["c"]] if "c" in row else None,
        [time],
    )


def _decode_many(
    stream: str, letters: str, payload: bytes, first: int, last: int, time: int
) -> Chunk:
    n = last - first + 1
    try:
        _refuse_compression_inside(payload)
        batch = pa.ipc.read_record_batch(pa.py_buffer(payload), _SCHEMAS[letters])
        if batch.num_rows != n:
            raise ValueError(f"it has {batch.num_rows} records in place of {n}")
        batch.validate(full=True)
        if batch.column(batch.num_columns - 1).null_count:
            raise ValueError("a value is null")
        if "h" in letters and batch.column("headers").items.null_count:
            raise ValueError("a header has no value")
        if "c" in letters:
            check_ms_column(batch.column("timestamp"))
        chunk = ArrowChunk(first, batch, time)
        return _to_lists(chunk) if n <= _SMALL else chunk
    except (pa.ArrowException, ValueError, struct.error, OSError, MemoryError) as error:
        raise _corrupt(stream, first, last, str(error)) from None


def _refuse_compression_inside(message: bytes) -> None:
    """Raise if the buffers of an Arrow message are compressed: a bomb could hide there.

    Reads the flatbuffer by hand: the message table's ``header`` (field 2) is a record batch
    table, whose field 3 is ``compression``. pyarrow also reads what older ones wrote, without
    the mark at the start, or with the compression said elsewhere; none of that is ours.
    """
    if message[:4] != b"\xff\xff\xff\xff":
        raise ValueError("the message does not begin with Arrow's mark")
    _, table = _table(message, 8)
    if 0 not in table or struct.unpack_from("<h", message, table[0])[0] != _ARROW_V5:
        raise ValueError("the message is of an older version of Arrow")
    header = table.get(2)
    if header is None:
        raise ValueError("the message has no header")
    if 3 in _table(message, header)[1]:
        raise ValueError("Arrow's own compression is not used here")


def _table(data: bytes, pointer: int) -> tuple[int, dict[int, int]]:
    """Follow the offset at ``pointer`` to a flatbuffer table; return where each field lies."""
    position = pointer + struct.unpack_from("<I", data, pointer)[0]
    vtable = position - struct.unpack_from("<i", data, position)[0]
    if vtable < 0:
        raise ValueError("the message's table points before its start")
    (size,) = struct.unpack_from("<H", data, vtable)
    fields = struct.unpack_from(f"<{max(size - 4, 0) // 2}H", data, vtable + 4)
    return position, {number: position + at for number, at in enumerate(fields) if at}


def _unpack(stream: str, first: int, last: int, compression: str, payload: bytes) -> bytes:
    try:
        (size,) = struct.unpack_from("<I", payload)
        if not 8 <= size <= min(_UNPACKED_MAX, _RATIO_MAX * len(payload)):
            raise ValueError(f"{len(payload)} bytes claim to unpack to {size}")
        block, codec = memoryview(payload)[4:], _CODECS[compression]
        unpacked: bytes = pa.decompress(block, decompressed_size=size, codec=codec, asbytes=True)
        if compression == "lz4" and _fits(block, size - 1):
            raise ValueError(f"it unpacks to less than the {size} bytes it claims")
    except (pa.ArrowException, ValueError, struct.error, OSError) as error:
        raise _corrupt(stream, first, last, str(error)) from None
    return unpacked


def _fits(block: memoryview, size: int) -> bool:
    """Whether an lz4 block unpacks to at most ``size`` bytes.

    pyarrow does not tell how much was unpacked, and what was not filled is memory of this
    process, which must not be handed out as values. (A zstd block knows its own size.)
    """
    try:
        pa.decompress(block, decompressed_size=size, codec="lz4_raw", asbytes=True)
    except OSError:
        return False
    return True


def _to_lists(chunk: ArrowChunk) -> ListChunk:
    """A small frame as lists, so that it can be merged with its neighbours."""
    names = chunk.columns.schema.names
    columns = {name: chunk.columns.column(name).to_pylist() for name in names}
    headers: list[Headers | None] | None = None
    if "headers" in columns:
        headers = [None if pairs is None else dict(pairs) for pairs in columns["headers"]]
    return ListChunk(
        chunk.first,
        columns["value"],
        columns.get("key"),
        headers,
        columns.get("timestamp"),
        [chunk.appended] * len(chunk),
    )


def _merge(into: ListChunk, chunk: ListChunk) -> None:
    into.keys = _joined(into.keys, len(into), chunk.keys, len(chunk))
    into.headers = _joined(into.headers, len(into), chunk.headers, len(chunk))
    into.timestamps = _joined(into.timestamps, len(into), chunk.timestamps, len(chunk))
    into.values += chunk.values
    into.appended += chunk.appended


def _joined(a: list[Any] | None, size_a: int, b: list[Any] | None, size_b: int) -> Any:
    if a is None and b is None:
        return None
    a = [None] * size_a if a is None else a
    a += [None] * size_b if b is None else b
    return a


def foreign_entry(stream: str, entry_id: bytes) -> CorruptStream:
    """The error of an entry in the log that no publisher of ours wrote."""
    shown = entry_id[:64].decode("ascii", "replace")
    return CorruptStream(
        f"Entry {shown!r} in the log of stream {stream!r} is not a frame of ours; delete it "
        "(XDEL), and let only publishers write the log (docs/acl.md).",
        stream=stream,
    )


def _corrupt(stream: str, first: int, last: int, why: str) -> CorruptFrame:
    return CorruptFrame(
        f"Records {first} to {last} of stream {stream!r} are corrupt: {why.strip().rstrip('.')}. "
        f"seek({last + 1}) goes on behind them.",
        stream=stream,
        first=first,
        last=last,
    )
