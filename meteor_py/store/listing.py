"""Cached listings of segment folders, each reused until its folder changes.

A reader first asks the stream where its history ends, and then lists the segments. An older listing
could lack segments that supersede others, and the reader would return records that the server has
lost. So a listing is reused only if the folder's modification time has not changed. Folders in an
object store have no modification time, so every call lists them again. On some mounted object
stores, the modification time never changes. Such a mount is detected if a file is newer than its
folder, or if the files change but the time does not. In any case, a listing is reused for only a
few seconds.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from meteor_py.store.segment import Segment, SegmentTable
from meteor_py.store.storage import Storage

#: Number of listings to keep: usually those of the current and the previous incarnation.
_KEPT = 2
#: Maximum age of a reused listing, in seconds.
_TRUSTED_S = 5.0


class _Listing(NamedTuple):
    #: A value that changes with the folder's contents; None if it might miss a change.
    version: object | None
    taken_at: float
    names: frozenset[str]
    segments: dict[str, Segment]
    table: SegmentTable


class Listings:
    """The most recent listings of a store. Thread-safe: listings are immutable."""

    def __init__(self) -> None:
        self._known: dict[str, _Listing] = {}
        self._is_dated = True  # whether the folder's modification time can be trusted

    def table(self, storage: Storage, incarnation: str) -> SegmentTable:
        """Return an incarnation's segments, as of this call.

        Raises:
            OSError: The folder cannot be listed.
        """
        now = time.monotonic()
        # Read the version before the names, so that the next call notices a change in between.
        version = storage.version(incarnation)
        known = self._known.get(incarnation)
        is_same = known is not None and version is not None and known.version == version
        if known is not None and is_same and self._is_dated and now < known.taken_at + _TRUSTED_S:
            return known.table
        names = frozenset(storage.names(incarnation))
        if known is not None and known.names == names:
            table, segments = known.table, known.segments
        else:
            segments = _parse(names, {} if known is None else known.segments)
            table = SegmentTable(segments.values())
            newest = max(table.segments, key=lambda x: (x.term, x.last), default=None)
            is_newer = newest and storage.is_newer_than_folder(f"{incarnation}/{newest.name}")
            if is_same or is_newer:
                self._is_dated = False
        others = [item for item in self._known.items() if item[0] != incarnation][1 - _KEPT :]
        listing = _Listing(version, now, names, segments, table)
        self._known = dict(others) | {incarnation: listing}
        return table


def _parse(names: frozenset[str], known: dict[str, Segment]) -> dict[str, Segment]:
    found = ((name, known.get(name) or Segment.parse(name)) for name in names)
    return {name: segment for name, segment in found if segment is not None}
