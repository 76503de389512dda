"""The columns in a Parquet file, and their true unpacked sizes.

pyarrow trusts file contents too much to be safe with files from unknown writers. It allocates as
much memory as a page header requests, even if the footer says otherwise. Some of its metadata
accessors abort the process if the footer is inconsistent. So this module reads the footer and the
page headers itself. Both are structs in Thrift's compact protocol.

pyarrow must not interpret the same bytes differently. It skips a field with an unknown number
according to the type that the bytes declare, and so does this module. But pyarrow reads the
elements of a list as the type that it expects, whatever type the list declares. So this module
refuses lists in fields where segments have none, and lists that declare another type.

This module also verifies the pages' checksums, several times as fast as pyarrow would.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

from zlib_ng.zlib_ng import crc32

#: Type codes in Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_INTS = (_I16, _I32, _I64)
#: Maximum nesting depth of structs and lists. A footer needs nine levels.
_DEPTH_MAX = 16

#: Constants from the Parquet format.
_DATA_PAGE, _DICTIONARY_PAGE = 0, 2
_PLAIN, _PLAIN_DICTIONARY, _DELTA, _RLE_DICTIONARY = 0, 2, 5, 8
_ZSTD = 6

#: The allowed encodings for each column. Only dictionary-encoded columns have a dictionary page.
_DICTIONARY = (_PLAIN, _PLAIN_DICTIONARY, _RLE_DICTIONARY)
_ENCODINGS = {
    "offset": (_DELTA,),
    "timestamp": _DICTIONARY,
    "appended": _DICTIONARY,
    "key": _DICTIONARY,
    "value": (_PLAIN,),
    "headers.key_value.key": _DICTIONARY,
    "headers.key_value.value": (_PLAIN,),
}


class _Type(NamedTuple):
    """The type of a Thrift field that this module reads, or of a list that segments have."""

    kind: int
    #: The fields of the struct, or of each struct in the list; None if they are skipped.
    fields: _Fields | None = None
    #: The type code of the list's elements.
    elements: int = 0


_Fields = Mapping[int, _Type]


def _list_of(elements: int, fields: _Fields | None = None) -> _Type:
    return _Type(_LIST, fields, elements)


_SIZE_STATISTICS: _Fields = {2: _list_of(_I64), 3: _list_of(_I64)}
_COLUMN_METADATA: _Fields = {
    2: _list_of(_I32),  # encodings
    3: _list_of(_BINARY),  # path_in_schema
    4: _Type(_I32),  # codec
    5: _Type(_I64),  # num_values
    6: _Type(_I64),  # total_uncompressed_size
    7: _Type(_I64),  # total_compressed_size
    8: _list_of(_STRUCT),  # key_value_metadata
    9: _Type(_I64),  # data_page_offset
    11: _Type(_I64),  # dictionary_page_offset
    13: _list_of(_STRUCT),  # encoding_stats
    16: _Type(_STRUCT, _SIZE_STATISTICS),
}
_COLUMN_CHUNK: _Fields = {1: _Type(_BINARY), 3: _Type(_STRUCT, _COLUMN_METADATA)}
_ROW_GROUP: _Fields = {1: _list_of(_STRUCT, _COLUMN_CHUNK), 3: _Type(_I64)}
_FILE: _Fields = {
    2: _list_of(_STRUCT),  # schema
    3: _Type(_I64),  # num_rows
    4: _list_of(_STRUCT, _ROW_GROUP),
    5: _list_of(_STRUCT),  # key_value_metadata
    7: _list_of(_STRUCT),  # column_orders
}
_DATA_HEADER: _Fields = {1: _Type(_I32), 2: _Type(_I32)}
_PAGE_HEADER: _Fields = {
    1: _Type(_I32),  # page type
    2: _Type(_I32),  # bytes after decompression
    3: _Type(_I32),  # bytes in the file
    4: _Type(_I32),  # crc32 of these bytes
    5: _Type(_STRUCT, _DATA_HEADER),
    7: _Type(_STRUCT),  # dictionary page header
}
#: A field that is skipped according to the type that the bytes declare.
_SKIPPED = _Type(0)
#: Number of footers to remember, and the maximum size in bytes of each.
_REMEMBERED, _REMEMBERED_MAX = 16, 65_536


@dataclass(frozen=True, slots=True)
class Column:
    """A column's part of one row group, as the footer describes it."""

    path: str
    #: Start and end positions of the column's pages in the file.
    start: int
    stop: int
    values: int
    unpacked: int

    @property
    def name(self) -> str:
        """The name of the field that the column belongs to."""
        return self.path.partition(".")[0]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One row group, as the footer describes it."""

    rows: int
    columns: tuple[Column, ...]

    @property
    def largest(self) -> int:
        """The total bytes of all columns, in the file or unpacked, whichever is larger."""
        packed = sum(column.stop - column.start for column in self.columns)
        return max(packed, sum(column.unpacked for column in self.columns))


@dataclass(slots=True)
class Pages:
    """Totals over a column's page headers in one row group."""

    #: Number of values in all data pages, including nulls.
    values: int = 0
    #: Bytes of all pages after decompression.
    unpacked: int = 0
    #: Bytes of the dictionary after decompression. Each value may repeat any of its entries.
    dictionary: int = 0


def read_footer(data: bytes, size: int) -> tuple[RowGroup, ...]:
    """Read the row groups from the footer of a file that has ``size`` bytes.

    Raises:
        ValueError: The footer differs from those that ``segment_file.write`` writes.
    """
    return _remembered(data, size) if len(data) <= _REMEMBERED_MAX else _row_groups(data, size)


def _row_groups(data: bytes, size: int) -> tuple[RowGroup, ...]:
    footer, _ = _read_struct(data, 0, _FILE, _DEPTH_MAX)
    groups = tuple(_row_group(group, size) for group in _field(footer, 4))
    if sum(group.rows for group in groups) != _field(footer, 3):
        raise ValueError("the record counts of its row groups do not add up to the file's")
    return groups


#: Callers often open the same file again, for one record at a time. Reading a footer takes several
#: milliseconds, much longer than comparing its bytes with those of the last footers.
_remembered = lru_cache(_REMEMBERED)(_row_groups)


def _row_group(group: Any, size: int) -> RowGroup:
    chunks = _field(group, 1)
    if len(chunks) != len(_ENCODINGS):
        raise ValueError("it does not have the columns of a segment")
    rows = _field(group, 3)
    return RowGroup(rows, tuple(map(_column, chunks, _ENCODINGS, [size] * len(chunks))))


def _column(chunk: Any, path: str, size: int) -> Column:
    about = _field(chunk, 3)
    if 1 in chunk or _field(about, 3) != path.encode().split(b".") or _field(about, 4) != _ZSTD:
        raise ValueError(f"column {path!r} does not have the layout of a segment column")
    start = _field(about, 9)
    if 0 < about.get(11, 0) < start:
        start = about[11]
    stop = start + _field(about, 7)
    if not 4 <= start <= stop <= size:
        raise ValueError(f"column {path!r} is outside the file")
    return Column(path, start, stop, _field(about, 5), _field(about, 6))


def read_pages(data: memoryview, column: Column) -> Pages:
    """Read all page headers of a column, whose bytes are in ``data``, and verify the checksums.

    Raises:
        ValueError: The pages differ from those that ``segment_file.write`` writes, or do not match
            the footer or their checksums.
    """
    pages, at, path = Pages(), 0, column.path
    while at < len(data):
        is_first = at == 0
        header, at = _read_struct(data, at, _PAGE_HEADER, _DEPTH_MAX)
        kind, unpacked = _field(header, 1), _field(header, 2)
        if kind == _DICTIONARY_PAGE and is_first and _ENCODINGS[path] is _DICTIONARY:
            pages.dictionary = unpacked
        elif kind == _DATA_PAGE:
            details = _field(header, 5)
            pages.values += _field(details, 1)
            if _field(details, 2) not in _ENCODINGS[path]:
                raise ValueError(f"column {path!r} has an encoding that segments do not use")
        else:
            raise ValueError(f"column {path!r} has a dictionary or page that segments do not have")
        pages.unpacked += unpacked
        start, at = at, at + _field(header, 3)
        if 4 in header and crc32(data[start:at]) != header[4] & 0xFFFF_FFFF:
            raise ValueError(f"a page of column {path!r} does not match its checksum")
    if at != len(data) or pages.values != column.values:
        raise ValueError(f"the pages of column {path!r} do not match the footer")
    return pages


def _field(struct: dict[int, Any], number: int) -> Any:
    """Return a required field. Raise ``ValueError`` if it is missing or negative."""
    value = struct.get(number)
    if value is None or (isinstance(value, int) and value < 0):
        raise ValueError("a field is missing or negative")
    return value


# -- Thrift ------------------------------------------------------------------------------------


def _read_struct(
    data: bytes | memoryview, at: int, fields: _Fields | None, depth: int
) -> tuple[dict[int, Any], int]:
    """Return a struct's fields by number, and the position after the struct."""
    found: dict[int, Any] = {}
    number = 0
    try:
        while tag := data[at]:
            step, kind = tag >> 4, tag & 15
            if step == 0:  # our structs never skip more than 15 numbers, or repeat one
                raise ValueError("a field has an unexpected number")
            number += step
            wanted = _SKIPPED
            if fields and number in fields:
                wanted = fields[number]
                if kind != wanted.kind:
                    raise ValueError("a field has an unexpected type")
            if kind in _INTS:
                raw, at = data[at + 1], at + 2
                if raw >= 128:  # most numbers have one byte
                    raw, at = _read_varint(data, at - 1, 16 << (kind - _I16))
                found[number] = (raw >> 1) ^ -(raw & 1)
            else:
                found[number], at = _read_value(data, at + 1, kind, wanted, depth)
    except IndexError:
        raise ValueError("a struct is incomplete") from None
    return found, at + 1


def _read_value(
    data: bytes | memoryview, at: int, kind: int, wanted: _Type, depth: int
) -> tuple[Any, int]:
    if kind in _INTS:
        raw, at = _read_varint(data, at, 16 << (kind - _I16))
        return (raw >> 1) ^ -(raw & 1), at
    if kind == _BINARY:
        length, at = _read_varint(data, at, 32)
        if length > len(data) - at:
            raise ValueError("a string is incomplete")
        return bytes(data[at : at + length]), at + length
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if depth == 0:
        raise ValueError("structs are nested too deeply")
    if kind == _STRUCT:
        if wanted.fields is None and (skipped := _flat_struct().match(data, at)):
            return {}, skipped.end()
        return _read_struct(data, at, wanted.fields, depth - 1)
    if kind == _LIST:
        return _read_list(data, at, wanted, depth - 1)
    if kind == _DOUBLE:
        return None, at + 8
    raise ValueError("a field has an unknown type")


@cache
def _flat_struct() -> re.Pattern[bytes]:
    """Return a pattern for short structs without lists, nested structs and long strings.

    Most structs in a footer hold statistics and have this form. Skipping one with the pattern takes
    a tenth of the time of reading it. Each byte has only one meaning, so backtracking is short.
    (Before 3.11.5, Python matched possessive quantifiers, such as ``*+``, incorrectly.)
    """

    def tags(*kinds: int) -> bytes:
        codes = bytes(step << 4 | kind for step in range(1, 16) for kind in kinds)
        return b"[%b]" % re.escape(codes)

    number = rb"[\x80-\xff]{0,8}[\x00-\x7f]"
    strings = b"|".join(rb"\x%02x.{%d}" % (size, size) for size in range(17))
    fields = (
        tags(*_INTS) + number,
        tags(_TRUE, _FALSE),
        tags(_BINARY) + b"(?:%b)" % strings,
    )
    return re.compile(rb"(?:%b){0,32}\x00" % b"|".join(fields), re.DOTALL)


def _read_list(
    data: bytes | memoryview, at: int, wanted: _Type, depth: int
) -> tuple[list[Any], int]:
    tag, at = data[at], at + 1
    count, kind = tag >> 4, tag & 15
    if count == 15:
        count, at = _read_varint(data, at, 32)
    if count and kind != wanted.elements:
        raise ValueError("a list is unexpected, or has elements of an unexpected type")
    if count > len(data) - at:  # each element takes at least one byte
        raise ValueError("a list is incomplete")
    element = _Type(kind, wanted.fields)
    found: list[Any] = []
    for _ in range(count):
        value, at = _read_value(data, at, kind, element, depth)
        found.append(value)
    return found, at


def _read_varint(data: bytes | memoryview, at: int, bits: int) -> tuple[int, int]:
    value = shift = 0
    while shift < bits:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            if value >> bits:
                break
            return value, at
        shift += 7
    raise ValueError("a number is too large")
