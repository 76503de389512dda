"""Frames, the wire format of records.

Each log entry holds one frame, in a field whose name is the frame's format. The name consists of a
version, the columns that any of the records has, and a compression:

* ``0v``: one record, the bare value. ``0kv``, ``0hkv``, ``0chkv``...: one record, a MessagePack
  list of its columns. An Arrow message would take 300 bytes more.
* ``1v``, ``1kv``...: one or more records, an Arrow IPC record batch message without its schema,
  which the name implies.
* ``1kv.lz4``, ``1kv.zstd``: such a message, compressed. The message's uncompressed size (uint32,
  little endian) comes first, then one compressed block.

The columns, always in this order: ``c`` timestamp (int64, ms), ``h`` headers
(map<string, binary>), ``k`` key (binary), ``v`` value (binary, never null).

The reader does not trust bytes from the log. It validates each frame as a whole, and raises
:class:`~meteor_py.CorruptFrame` with the frame's offsets if the bytes are not a frame. The limits
below bound the unpacked size of a frame and the Python objects made from it, so that one frame
takes at most 256 MiB of memory.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

import lz4.block
import msgspec
import pyarrow as pa
from zlib_ng.zlib_ng import crc32

from meteor_py.errors import CorruptFrame, CorruptStream, UnsupportedFrame
from meteor_py.records.config import FRAME_RECORDS_MAX, OFFSET_MAX, Compression
from meteor_py.records.record import ArrowChunk, Chunk, Headers, ListChunk, to_pairs
from meteor_py.records.times import MAX_MS, check_ms_column

#: Limits on a frame's decompressed size: in bytes, and as a multiple of the compressed size.
_UNPACKED_MAX = 64 * 1024 * 1024
_RATIO_MAX = 100
#: Maximum records and headers that a reader accepts in one frame. Publishers write at most 4,096
#: records.
_RECORDS_MAX = 16 * FRAME_RECORDS_MAX
_HEADERS_MAX = 1024 * 1024
#: ``MetadataVersion.V5``, which Arrow has written since 1.0.
_ARROW_V5 = 4
#: Frames of up to this many records are merged into lists, to avoid the overhead of one chunk per
#: frame.
_SMALL = 32
#: Size in bytes below which compression does not pay off.
_COMPRESS_MIN = 512

# The C library's allocator reuses the frames' memory, because frames are similar in size. Arrow's
# default, mimalloc, returns memory to the system each time, which takes as long as the rest of
# encoding.
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
    "h": msgspec.Raw,
    "k": bytes | None,
    "v": bytes,
}
_LETTERS = tuple("".join(letters) for letters in product(("", "c"), ("", "h"), ("", "k"), ("v",)))
_SCHEMAS = {letters: pa.schema([_FIELDS[letter] for letter in letters]) for letters in _LETTERS}
_DECODERS = {
    letters: msgspec.msgpack.Decoder(tuple[tuple(_TYPES[letter] for letter in letters)])  # type: ignore[misc]  # made at run time
    for letters in _LETTERS
}
#: Also matches formats from later versions, which may have other columns.
_NAME = re.compile(rb"(\d{1,3})([a-z]{1,16})(?:\.([a-z0-9]{1,16}))?")
_ID = re.compile(rb"(\d{1,16})-(\d{1,16})")
_HEADERS = msgspec.msgpack.Decoder(dict[str, bytes] | None)
#: Exceptions that decoding raises if the bytes are not a frame.
_NOT_A_FRAME = (
    pa.ArrowException, msgspec.MsgspecError, lz4.block.LZ4BlockError, struct.error, ValueError,
    LookupError, ArithmeticError, OSError, EOFError, MemoryError, RecursionError,
)  # fmt: skip


@dataclass(slots=True)
class Columns:
    """Columns of records to be encoded: lists, or Arrow arrays of the types in ``_FIELDS``."""

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
        arrays: list[Any] = []
        for letter, field in zip(letters, schema, strict=True):
            column = columns[letter]
            if not isinstance(column, pa.Array):
                column = pa.array(to_pairs(column) if letter == "h" else column, field.type)
            arrays.append(column)
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


# -- encoding ----------------------------------------------------------------------------------


def encode(columns: Columns, compression: Compression) -> tuple[str, Any]:
    """Return the name of the frame's format, and the frame's content, as bytes or a buffer."""
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
        # The block is no smaller, or so small that readers would take it for a decompression bomb.
        return f"1{letters}", message
    return f"1{letters}.{compression}", struct.pack("<I", message.size) + block


def fingerprint(payload: Any) -> int:
    """Return a checksum that tells a publisher's batches apart. It does not detect corruption.

    For a payload over 8 KiB, it covers only the length and the first and last 4 KiB: a crc32 of all
    bytes would take as long as building the frame.
    """
    if len(payload) <= 8192:
        return crc32(payload)
    view = memoryview(payload)
    return crc32(view[-4096:], crc32(view[:4096], len(view)))


# -- decoding ----------------------------------------------------------------------------------


def entry_span(stream: str, entry_id: bytes) -> tuple[int, int]:
    """Return the first and last offset of the entry with this ID.

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
    """Return the records in entries, merging small frames with consecutive offsets.

    Stop before a bad frame, or before decompressing more than 64 MiB in total. The caller calls
    this again for the remaining entries. If the first frame is bad, raise an error.

    Raises:
        CorruptStream: No meteor_py publisher wrote the first entry.
        UnsupportedFrame: A newer version wrote the first frame.
        CorruptFrame: The first frame is damaged.
    """
    chunks: list[Chunk] = []
    unpacked = 0
    bare: ListChunk | None = None  # the last chunk, if it has only values
    for entry_id, fields in entries:
        if bare is not None and _append_bare(bare, entry_id, fields):
            continue
        try:
            first, last = entry_span(stream, entry_id)
            time, name, payload = _open(stream, entry_id, fields, first, last)
            if b"." in name:
                unpacked += int.from_bytes(payload[:4], "little")
                if chunks and unpacked > _UNPACKED_MAX:
                    break  # enough for one call; the next call begins here
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


def decode_lone(entry: tuple[bytes, list[bytes]], offset: int) -> ListChunk | None:
    """Decode an entry that is one record at ``offset`` with only a value; otherwise return None."""
    chunk = ListChunk(offset, [], None, None, None, [])
    return chunk if _append_bare(chunk, *entry) else None


def _append_bare(chunk: ListChunk, entry_id: bytes, fields: list[bytes]) -> bool:
    """Append an entry that directly follows the chunk and holds just a value (the fast path).

    Return whether the entry was appended.
    """
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
    """Return an entry's append time, format and payload, after checking its checksum."""
    size = len(fields)
    if size not in (4, 6) or fields[0] != b"t" or not fields[1].isdigit() or len(fields[1]) > 15:
        raise foreign_entry(stream, entry_id)
    time = int(fields[1])
    if size == 6:
        if fields[4] != b"crc" or not fields[5].isdigit() or len(fields[5]) > 10:
            raise foreign_entry(stream, entry_id)
        if crc32(fields[3]) != int(fields[5]):
            raise _corrupt(stream, first, last, "its checksum does not match")
    if time > MAX_MS or not _NAME.fullmatch(fields[2]):
        raise foreign_entry(stream, entry_id)
    return time, fields[2], fields[3]


def _decode(stream: str, name: bytes, payload: bytes, first: int, last: int, time: int) -> Chunk:
    n = last - first + 1
    if name == b"0v" and n == 1:
        return ListChunk(first, [payload], None, None, None, [time])
    match = _NAME.fullmatch(name)
    assert match is not None, "checked in _open"
    version, letters, compression = match[1], match[2].decode(), (match[3] or b"").decode()
    known = letters in _SCHEMAS
    try:
        if version == b"0" and known and not compression:
            return _decode_one(letters, payload, first, n, time)
        if version == b"1" and known and (not compression or compression in _CODECS):
            if compression:
                payload = _unpack(compression, payload)
            return _decode_many(letters, payload, first, n, time)
    except _NOT_A_FRAME as error:
        raise _corrupt(stream, first, last, str(error)) from None
    raise UnsupportedFrame(
        f"Records {first} to {last} of stream {stream!r} have the frame format "
        f"{name.decode()!r}, which this version cannot read. To read them, upgrade meteor-py.",
        stream=stream,
        first=first,
        last=last,
    )


def _decode_one(letters: str, payload: bytes, offset: int, n: int, time: int) -> ListChunk:
    if n != 1:
        raise ValueError(f"its format holds one record, but its entry claims {n}")
    row = dict(zip(letters, _DECODERS[letters].decode(payload), strict=True))
    return ListChunk(
        offset,
        [row["v"]],
        [row["k"]] if "k" in row else None,
        [_decode_headers(row["h"])] if "h" in row else None,
        [row["c"]] if "c" in row else None,
        [time],
    )


def _decode_headers(packed: msgspec.Raw) -> Headers | None:
    """Decode a MessagePack map, after checking the length that it declares."""
    data = bytes(packed)
    length = {0xDE: data[1:3], 0xDF: data[1:5]}.get(data[0], b"")
    if int.from_bytes(length, "big") > _HEADERS_MAX:
        raise ValueError(f"it has more than {_HEADERS_MAX} headers")
    headers: Headers | None = _HEADERS.decode(data)
    return headers


def _decode_many(letters: str, payload: bytes, first: int, n: int, time: int) -> Chunk:
    if n > _RECORDS_MAX:
        raise ValueError(f"it claims {n} records, but a frame has at most {_RECORDS_MAX}")
    _refuse_compression_inside(payload)
    batch = pa.ipc.read_record_batch(pa.py_buffer(payload), _SCHEMAS[letters])
    if batch.num_rows != n:
        raise ValueError(f"it has {batch.num_rows} records instead of {n}")
    batch.validate(full=True)
    if batch.column(batch.num_columns - 1).null_count:
        raise ValueError("a value is null")
    if "h" in letters:
        items = batch.column("headers").items
        if len(items) > _HEADERS_MAX:
            raise ValueError(f"it has more than {_HEADERS_MAX} headers")
        if items.null_count:
            raise ValueError("a header has no value")
    if "c" in letters:
        check_ms_column(batch.column("timestamp"))
    chunk = ArrowChunk(first, batch, time)
    return chunk.to_lists() if n <= _SMALL else chunk  # lists can be merged with their neighbours


def _refuse_compression_inside(message: bytes) -> None:
    """Raise if an Arrow message's buffers are compressed: they could be a decompression bomb.

    Parses the flatbuffer directly. The message table's ``header`` (field 2) is a record batch
    table, whose field 3 is ``compression``. pyarrow also reads older formats, which lack the marker
    at the start or declare the compression elsewhere. Frames never use those formats,
    so they are refused, too.
    """
    if message[:4] != b"\xff\xff\xff\xff":
        raise ValueError("the message does not begin with Arrow's marker")
    table = _table(message, 8)
    if 0 not in table or struct.unpack_from("<h", message, table[0])[0] != _ARROW_V5:
        raise ValueError("an older version of Arrow wrote the message")
    header = table.get(2)
    if header is None:
        raise ValueError("the message has no header")
    if 3 in _table(message, header):
        raise ValueError("frames must not use Arrow's own compression")


def _table(data: bytes, pointer: int) -> dict[int, int]:
    """Return the position of each field in the flatbuffer table that ``pointer`` refers to."""
    position = pointer + struct.unpack_from("<I", data, pointer)[0]
    vtable = position - struct.unpack_from("<i", data, position)[0]
    if vtable < 0:
        raise ValueError("the table points before the start of the message")
    (size,) = struct.unpack_from("<H", data, vtable)
    fields = struct.unpack_from(f"<{max(size - 4, 0) // 2}H", data, vtable + 4)
    return {number: position + at for number, at in enumerate(fields) if at}


def _unpack(compression: str, payload: bytes) -> bytes:
    (size,) = struct.unpack_from("<I", payload)
    if not 8 <= size <= min(_UNPACKED_MAX, _RATIO_MAX * len(payload)):
        raise ValueError(f"its {len(payload)} bytes cannot unpack to {size} bytes")
    block = memoryview(payload)[4:]
    unpacked: bytes
    if compression == "lz4":
        # Do not use pyarrow here: it does not report how many bytes it unpacked. The rest of its
        # buffer is uninitialized process memory, which must not reach the application.
        unpacked = lz4.block.decompress(block, uncompressed_size=size)
        if len(unpacked) != size:
            raise ValueError(f"it unpacks to {len(unpacked)} bytes instead of {size}")
    else:  # a zstd block declares its size, which pyarrow verifies
        unpacked = pa.decompress(block, decompressed_size=size, codec="zstd", asbytes=True)
    return unpacked


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
    """Return the error for a log entry that no meteor_py publisher wrote."""
    name = entry_id[:64].decode("ascii", "replace")
    return CorruptStream(
        f"Entry {name!r} in the log of stream {stream!r} is not a meteor_py frame. Remove it "
        "with stream.repair(dry_run=False) or `meteor streams repair`, and let only publishers "
        "write to the log (docs/acl.md).",
        stream=stream,
    )


def _corrupt(stream: str, first: int, last: int, why: str) -> CorruptFrame:
    return CorruptFrame(
        f"Records {first} to {last} of stream {stream!r} are corrupt: {why.strip().rstrip('.')}.",
        stream=stream,
        first=first,
        last=last,
        hint=f"Call seek({last + 1}) to continue after them.",
    )
