"""Offsets at which parallel readers can split a stream without fetching anything twice."""

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
    """Return for each offset the end of the frame, or row group, that holds it.

    An offset that is nowhere, or in a store that does not tell, is its own split point.
    """
    if not offsets:
        return []
    ends = stream.connector.run(SPLIT_POINTS, [keys.log(stream.name)], list(offsets))
    return [
        int(end) or _split_point_in_store(stream, offset)
        for offset, end in zip(offsets, ends, strict=True)
    ]


def _split_point_in_store(stream: StreamHandle, offset: int) -> int:
    if stream.config.store is None:
        return offset
    try:
        store = stream.find_store()
        stream.check_store()
        if isinstance(store, ParquetStore):
            return store.row_group_end(stream.incarnation, offset, stream.archived_bounds()[1])
    except MeteorError:
        pass  # the reader of these records will be told
    return offset
