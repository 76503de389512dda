"""Ordering keys of records, and the index that lists them.

A stream with an ordering key has an index in addition to its log. The index has one entry per
frame, with the same ID but no payload, so that shared groups can read the keys without decoding
frames. An entry is a list of strings. Their number is even, because Redis treats them as fields and
values:

1. Two bytes for each record, little endian: the number of its key among the strings that follow.
2. The ordering keys of the frame, each once.
3. An empty string if the number of keys is even.

The index lists an empty string for a record without an ordering key, and for a record whose key is
too long. ``publish`` refuses keys that are too long, but a dead letter may have one, because it
keeps its record unchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from meteor_py.records.record import Headers, Record

#: The longest ordering key, in bytes.
ORDERING_KEY_BYTES_MAX = 256

_HEADER = "header:"


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
        return _short(self._key_of(record.key, record.headers))

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

    def index(self, columns: Any) -> list[bytes]:
        """Return the index entry of a frame (``frame.Columns``)."""
        column = columns.keys if self._header is None else columns.headers
        size = len(columns)
        if column is None:
            return [bytes(2 * size), b""]
        if isinstance(column, list):
            return _entry(self._keys(column))
        import pyarrow.compute as pc

        encoded = pc.fill_null(self._arrow(column), b"").dictionary_encode()
        numbers = encoded.indices.cast(pa.uint16())
        start = 2 * numbers.offset
        numbers = numbers.buffers()[1][start : start + 2 * size].to_pybytes()
        return _even([numbers, *map(_short, encoded.dictionary.to_pylist())])

    def index_rows(self, batch: pa.RecordBatch) -> list[bytes]:
        """Return the index entry of records from a store (``record.ARROW_SCHEMA``)."""
        from meteor_py.records.frame import Columns

        keys, headers = batch.column("key"), batch.column("headers")
        return self.index(Columns(values=batch.column("value"), keys=keys, headers=headers))

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
                f"The {what} of a record is its ordering key in this stream and may have at most "
                f"{ORDERING_KEY_BYTES_MAX} bytes, not {longest}. Use a hash of it instead."
            )


def packed(entry: Iterable[bytes]) -> bytes:
    """Return an entry as one string, in which each part follows its length."""
    return b"".join(b"%d:%b" % (len(part), part) for part in entry)


def _entry(keys: list[bytes]) -> list[bytes]:
    numbers: dict[bytes, int] = {}
    order = [numbers.setdefault(key, len(numbers)) for key in keys]
    return _even([struct.pack(f"<{len(order)}H", *order), *map(_short, numbers)])


def _short(key: bytes) -> bytes:
    return key if len(key) <= ORDERING_KEY_BYTES_MAX else b""


def _even(strings: list[bytes]) -> list[bytes]:
    return strings if len(strings) % 2 == 0 else [*strings, b""]
