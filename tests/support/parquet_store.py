"""A Parquet store with three segments of three row groups, for tests that inspect its files."""

from __future__ import annotations

import os
import traceback
from itertools import pairwise
from pathlib import Path

import pyarrow as pa

from meteor_py.errors import CorruptSegment
from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.store import maintenance
from meteor_py.store.parquet import ParquetStore
from meteor_py.testing.store_contract import INCARNATION, records

#: The first offset of each segment, and the end of the last segment.
EDGES = (0, 40, 80, 120)
END = EDGES[-1]
#: Records per row group. Tests set `segment_file.GROUP_RECORDS` to this.
GROUP = 16


def claimed(root: Path) -> ParquetStore:
    store = ParquetStore(root, "s")
    store.claim("id")
    return store


def filled(root: Path) -> ParquetStore:
    store = claimed(root)
    for first, stop in pairwise(EDGES):
        store.append(INCARNATION, 1, records(first, stop))
    return store


def names(root: Path) -> set[str]:
    """Return all file names in the folder, including files that are not part of the log."""
    return set(os.listdir(root / "s" / INCARNATION))


def paths(store: ParquetStore, stop: int = END) -> list[Path]:
    return [Path(file) for file in store.files(INCARNATION, 0, stop)]


def flaws(store: ParquetStore, start: int = 0, stop: int = END) -> list[tuple[str, int, int]]:
    return [(flaw.kind, flaw.first, flaw.last) for flaw in store.verify(INCARNATION, start, stop)]


def make_old(path: Path, seconds: float = maintenance.GRACE_S + 60) -> None:
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def readable(store: ParquetStore, start: int = 0, stop: int = END) -> set[int]:
    """Check the readable records and return their offsets; skip damage as a user would."""
    found: set[int] = set()
    while start < stop:
        try:
            for batch in store.read(INCARNATION, start, stop):
                at = start + len(batch)
                assert pa.Table.from_batches([batch], ARROW_SCHEMA).equals(records(start, at))
                found.update(range(start, at))
                start = at
        except CorruptSegment as error:
            damaged = range(error.first, error.last + 1)
            start = damaged.stop if start in damaged else stop + 1
    assert start == stop, "the error names the wrong offsets"
    return found


def everything_said(error: BaseException) -> str:
    """Return everything that a log could show about an error, including its causes."""
    return "".join(traceback.format_exception(error, chain=True)) + repr(error)
