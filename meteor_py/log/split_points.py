"""Offsets at which parallel readers can split a stream without fetching a frame twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meteor_py.errors import MeteorError
from meteor_py.redis import keys
from meteor_py.redis.scripts import SPLIT_POINTS
from meteor_py.store.parquet import ParquetStore

if TYPE_CHECKING:
    from meteor_py.log.handle import StreamHandle


def split_points(stream: StreamHandle, offsets: Sequence[int]) -> list[int]:
    """Return, for each offset, the end of the frame or Parquet row group that holds it.

    If the offset does not exist, or its store has no row groups, return the offset itself.
    """
    ends: list[int] = []
    while len(ends) < len(offsets):  # each call resolves at least one offset
        rest = list(offsets[len(ends) :])
        ends += stream.connector.run(SPLIT_POINTS, [keys.log(stream.name)], rest)
    found = dict(zip(offsets, map(int, ends), strict=True))
    absent = [offset for offset, end in found.items() if not end]
    found.update(zip(absent, _split_points_in_store(stream, absent), strict=True))
    return [found[offset] for offset in offsets]


def _split_points_in_store(stream: StreamHandle, offsets: list[int]) -> list[int]:
    if stream.config.store is None or not offsets:
        return offsets
    try:
        store = stream.find_store()
        stream.check_store()
        if isinstance(store, ParquetStore):
            end = stream.archived_bounds()[1]
            return store.row_group_ends(stream.incarnation, offsets, end)
    except MeteorError:
        pass  # the readers will get the same error
    return offsets
