"""Grouping: which group each record of a stream belongs to, and how the index says so.

A stream with an ordering key has an index beside its log: for each frame an entry with the same ID
and no payload, so that who only wants to know whose records these are need not take frames apart.
Its strings, two of which Redis calls a field and its value, are: two bytes for each record, the
lower one first, that number its group among those that follow; then the groups, each once, and an
empty string if their number is even. The group of a record that has none is the empty string; so is
one that is too long: such a record cannot be published, but may come as a dead letter, whole.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from meteor_py.records.record import Headers, Record

#: Bytes of a group at most.
GROUP_BYTES_MAX = 256

_HEADER = "header:"


class Grouping:
    """The rule of one stream: ``"key"``, or ``"header:NAME"``.

    Raises:
        ValueError: It is neither.
    """

    def __init__(self, ordering_key: str) -> None:
        if not isinstance(ordering_key, str):
            raise TypeError(f"ordering_key must be a str, not {type(ordering_key).__name__}.")
        named = ordering_key.startswith(_HEADER) and len(ordering_key) > len(_HEADER)
        if ordering_key != "key" and not named:
            raise ValueError(f'ordering_key must be "key" or "header:NAME", not {ordering_key!r}.')
        self._header = ordering_key[len(_HEADER) :] if named else None

    def of(self, record: Record) -> bytes:
        """The group of a record; empty if it has none, or one that is too long."""
        return _short(self._of(record.key, record.headers))

    def check(self, key: bytes | None, headers: Headers | None) -> None:
        """Raise ``ValueError`` for a record whose group is too long."""
        self._check(len(self._of(key, headers)))

    def check_columns(self, columns: Any) -> None:
        """The same for many, of which none must be published if one is."""
        column = columns.keys if self._header is None else columns.headers
        if column is None:
            return
        if isinstance(column, list):
            self._check(max(map(len, self._rows(column)), default=0))
            return
        import pyarrow.compute as pc

        longest = pc.max(pc.binary_length(self._arrow(column))).as_py()
        self._check(longest or 0)

    def index(self, columns: Any) -> list[bytes]:
        """The entry of the index for a frame: lists or Arrow arrays, as ``frame.Columns``."""
        column = columns.keys if self._header is None else columns.headers
        size = len(columns)
        if column is None:
            return [bytes(2 * size), b""]
        if isinstance(column, list):
            return _entry(self._rows(column))
        import pyarrow.compute as pc

        encoded = pc.fill_null(self._arrow(column), b"").dictionary_encode()
        numbers = encoded.indices.cast(pa.uint16())
        start = 2 * numbers.offset
        numbers = numbers.buffers()[1][start : start + 2 * size].to_pybytes()
        return _even([numbers, *map(_short, encoded.dictionary.to_pylist())])

    def index_rows(self, batch: pa.RecordBatch) -> list[bytes]:
        """The same for records that lie in a store (``record.ARROW_SCHEMA``)."""
        from meteor_py.records.frame import Columns

        keys, headers = batch.column("key"), batch.column("headers")
        return self.index(Columns(values=batch.column("value"), keys=keys, headers=headers))

    def _of(self, key: bytes | None, headers: Headers | None) -> bytes:
        if self._header is None:
            return key or b""
        return (headers or {}).get(self._header, b"")

    def _rows(self, column: list[Any]) -> list[bytes]:
        if self._header is None:
            return [key or b"" for key in column]
        return [(row or {}).get(self._header, b"") for row in column]

    def _arrow(self, column: Any) -> Any:
        import pyarrow.compute as pc

        # As a dict made of them would have it, the last counts.
        return column if self._header is None else pc.map_lookup(column, self._header, "last")

    def _check(self, longest: int) -> None:
        if longest > GROUP_BYTES_MAX:
            what = "key" if self._header is None else f"header {self._header!r}"
            raise ValueError(
                f"The {what} of a record is its group here, and may have {GROUP_BYTES_MAX} bytes, "
                f"not {longest}; use a hash of it."
            )


def packed(entry: Iterable[bytes]) -> bytes:
    """The entry as one string: its parts, each with its length before it."""
    return b"".join(b"%d:%b" % (len(part), part) for part in entry)


def _entry(groups: list[bytes]) -> list[bytes]:
    numbers: dict[bytes, int] = {}
    order = [numbers.setdefault(group, len(numbers)) for group in groups]
    return _even([struct.pack(f"<{len(order)}H", *order), *map(_short, numbers)])


def _short(group: bytes) -> bytes:
    return group if len(group) <= GROUP_BYTES_MAX else b""


def _even(strings: list[bytes]) -> list[bytes]:
    return strings if len(strings) % 2 == 0 else [*strings, b""]
