"""Ordering keys, and the index that lists them.

A stream with an ordering key has an index in addition to its log, so that shared groups can read
the keys without decoding frames. An index entry describes up to 64 records in one frame, so that a
consumer that claims one record need not read the keys of 4,096. The entry's ID is
``<last offset>-<number of records in its frame up to that offset>``. The entry consists of one
field and its value:

1. One byte for each record: the index of its key in the list that follows.
2. The ordering keys of these records, each once, as a MessagePack array of strings.

Releases before 0.3 wrote one entry per frame, with the frame's ID. The entry's first string has two
bytes for each record, little endian. The keys follow as separate strings, with an empty string at
the end if the number of keys is even. Readers accept both forms.

The index lists an empty string for a record without an ordering key, and for a record whose key is
too long. ``publish`` refuses keys that are too long, but a dead letter may have one, because it
keeps its record unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from meteor_py.records.record import Headers, Record

#: The longest ordering key, in bytes.
ORDERING_KEY_BYTES_MAX = 256

#: Maximum number of records in an index entry, and in one that a consumer builds from the store.
ENTRY_RECORDS = 64
STORED_ENTRY_RECORDS = 256

_HEADER = "header:"
#: The key list of an entry whose records have no ordering keys.
_NO_KEY = b"\x91\xa0"


class OrderingRule:
    """The source of a record's ordering key: ``"key"``, or ``"header:NAME"``.

    Raises:
        TypeError: ``ordering_key`` is not a str.
        ValueError: ``ordering_key`` has neither form.
    """

    def __init__(self, ordering_key: str) -> None:
        if not isinstance(ordering_key, str):
            raise TypeError(f"ordering_key must be a str, not {type(ordering_key).__name__}.")
        named = ordering_key.startswith(_HEADER) and len(ordering_key) > len(_HEADER)
        if ordering_key != "key" and not named:
            raise ValueError(f'ordering_key must be "key" or "header:NAME", not {ordering_key!r}.')
        self._header = ordering_key[len(_HEADER) :] if named else None

    def key_of(self, record: Record) -> bytes:
        """Return a record's ordering key; empty if there is none or the key is too long."""
        header = self._header
        key = record.key if header is None else (record.headers or {}).get(header)
        return key if key is not None and len(key) <= ORDERING_KEY_BYTES_MAX else b""

    def check(self, key: bytes | None, headers: Headers | None) -> None:
        """Raise ``ValueError`` for a record whose ordering key is too long."""
        self._check(len(self._key_of(key, headers)))

    def check_columns(self, columns: Any) -> None:
        """Raise ``ValueError`` if a record's ordering key is too long."""
        column = columns.keys if self._header is None else columns.headers
        if column is None:
            return
        if isinstance(column, list):
            self._check(max(map(len, self._keys(column)), default=0))
            return
        import pyarrow.compute as pc

        longest = pc.max(pc.binary_length(self._arrow(column))).as_py()
        self._check(longest or 0)

    def index(self, columns: Any, size: int = ENTRY_RECORDS) -> list[bytes]:
        """Return the index entries for a frame (``frame.Columns``): two strings each."""
        column = columns.keys if self._header is None else columns.headers
        records = len(columns)
        if column is None:
            whole, rest = divmod(records, size)
            return [bytes(size), _NO_KEY] * whole + ([bytes(rest), _NO_KEY] if rest else [])
        if isinstance(column, list):
            keys = self._keys(column)
            numbers: dict[bytes, int] = {}
            order = [numbers.setdefault(key, len(numbers)) for key in keys]
            return list(_entries(order, list(numbers), size))
        import pyarrow.compute as pc

        encoded = pc.fill_null(self._arrow(column), b"").dictionary_encode()
        return list(_entries(encoded.indices.to_pylist(), encoded.dictionary.to_pylist(), size))

    def index_rows(self, batch: pa.RecordBatch) -> list[bytes]:
        """Return one index entry for up to 256 records from a store (``record.ARROW_SCHEMA``)."""
        from meteor_py.records.frame import Columns

        keys, headers = batch.column("key"), batch.column("headers")
        columns = Columns(values=batch.column("value"), keys=keys, headers=headers)
        return self.index(columns, STORED_ENTRY_RECORDS)

    def keys_of_rows(self, batch: pa.RecordBatch) -> list[bytes]:
        """Return the ordering keys of records from a store.

        The key is empty for a record that has none, or whose key is too long.
        """
        column = batch.column("key" if self._header is None else "headers")
        return [_short(key or b"") for key in self._arrow(column).to_pylist()]

    def _key_of(self, key: bytes | None, headers: Headers | None) -> bytes:
        if self._header is None:
            return key or b""
        return (headers or {}).get(self._header, b"")

    def _keys(self, column: list[Any]) -> list[bytes]:
        if self._header is None:
            return [key or b"" for key in column]
        return [(row or {}).get(self._header, b"") for row in column]

    def _arrow(self, column: Any) -> Any:
        import pyarrow.compute as pc

        # If a header occurs more than once, the last one counts, as in the dict that readers get.
        return column if self._header is None else pc.map_lookup(column, self._header, "last")

    def _check(self, longest: int) -> None:
        if longest > ORDERING_KEY_BYTES_MAX:
            what = "key" if self._header is None else f"header {self._header!r}"
            raise ValueError(
                f"In this stream, a record's {what} is its ordering key. The limit is "
                f"{ORDERING_KEY_BYTES_MAX} bytes, but this one has {longest}. Use its hash instead."
            )


def packed(entry: Iterable[bytes]) -> bytes:
    """Return an entry as one string, with each part preceded by its length."""
    return b"".join(b"%d:%b" % (len(part), part) for part in entry)


def read_entry(entry_id: bytes, strings: Sequence[bytes]) -> tuple[int, list[bytes]]:
    """Return an index entry's first offset, and the ordering keys of its records.

    In a malformed entry, keys that cannot be read are empty.
    """
    last, up_to = map(int, entry_id.split(b"-"))
    numbers: Sequence[int] = strings[0] if strings else b""
    keys: Sequence[bytes] = ()
    if len(strings) == 2 and len(numbers) == (up_to - 1) % ENTRY_RECORDS + 1:
        keys = unpack_keys(strings[1])
    elif len(numbers) == 2 * up_to:
        pairs = zip(strings[0][::2], strings[0][1::2], strict=True)
        numbers = [low + 256 * high for low, high in pairs]
        keys = strings[1:]
    else:
        numbers = [len(keys)] * up_to
    found = [keys[number] if number < len(keys) else b"" for number in numbers]
    return last - len(found) + 1, list(map(_short, found))


def pack_key(key: bytes) -> bytes:
    """Return a key as a MessagePack string."""
    size = len(key)
    if size < 32:
        return bytes((0xA0 | size,)) + key
    return (b"\xd9%c" % size if size < 256 else b"\xda" + size.to_bytes(2, "big")) + key


def unpack_keys(packed_keys: bytes) -> list[bytes]:
    """Return the strings in a MessagePack array; an empty list if it holds anything else."""
    found: list[bytes] = []
    try:
        head = packed_keys[0]
        count, at = (
            (head & 15, 1) if head >> 4 == 9 else (int.from_bytes(packed_keys[1:3], "big"), 3)
        )
        if head >> 4 != 9 and head != 0xDC:
            return []
        for _ in range(count):
            head, at = packed_keys[at], at + 1
            if head >> 5 == 5:
                size = head & 31
            elif head in (0xD9, 0xDA):
                width = head - 0xD8
                size, at = int.from_bytes(packed_keys[at : at + width], "big"), at + width
            else:
                return []
            found.append(packed_keys[at : at + size])
            at += size
    except IndexError:
        return []
    return found


def _entries(order: list[int], keys: list[bytes], size: int) -> Iterator[bytes]:
    """Yield an entry (two strings) per ``size`` records. ``order`` has each record's key number."""
    packed_keys = [pack_key(_short(key)) for key in keys]
    for start in range(0, len(order), size):
        part = order[start : start + size]
        local = {key: number for number, key in enumerate(dict.fromkeys(part))}
        count = len(local)
        head = bytes((0x90 | count,)) if count < 16 else b"\xdc" + count.to_bytes(2, "big")
        yield bytes([local[key] for key in part])
        yield head + b"".join([packed_keys[key] for key in local])


def _short(key: bytes) -> bytes:
    return key if len(key) <= ORDERING_KEY_BYTES_MAX else b""
