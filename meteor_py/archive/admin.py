"""The archive of a stream: the part of its history that is in its store, as users see it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from meteor_py.archive.archiver import flush, run_archive_script
from meteor_py.errors import RecordsLost, StoreUnavailable
from meteor_py.records.config import OFFSET_MAX, check_int, check_seconds
from meteor_py.redis import keys
from meteor_py.redis.scripts import EXPIRE_HISTORY
from meteor_py.store.base import Flaw, Progress
from meteor_py.store.parquet import ParquetStore
from meteor_py.store.segment import SegmentDescription

if TYPE_CHECKING:
    from meteor_py.log.handle import StreamHandle
    from meteor_py.records.descriptions import GroupDescription

#: What a compacted segment has at most.
COMPACT_RECORDS = 1_000_000
COMPACT_BYTES = 256 * 1024 * 1024

_POLL_S = 0.02
#: Looks at the files until something that is wrong with them is believed.
_LOOKS = 5


class Archive:
    """What is in the store of a stream. Get it with ``stream.store``.

    >>> stream.store.files()  # doctest: +SKIP
    ['/data/meteor/orders/5f1d.../00000000000000000000-00000000000000099999-17...-9c2f01ab.parquet']
    """

    def __init__(
        self, stream: StreamHandle, list_groups: Callable[[], list[GroupDescription]]
    ) -> None:
        self._stream = stream
        self._list_groups = list_groups
        #: The store itself.
        self.backend = stream.find_store()
        stream.check_store()

    def __repr__(self) -> str:
        return f"<Archive of {self._stream.name!r} in {self.backend!r}>"

    @property
    def uri(self) -> str | None:
        """The address of the store, without secrets."""
        return self.backend.uri

    def bounds(self) -> tuple[int, int]:
        """The first offset in the store, and the one behind the last."""
        return self._stream.archived_bounds()

    def files(self) -> list[str]:
        """The files that hold the archived records, each record once, in order of the offsets.

        Paths, or URIs for an object store: pyarrow, Spark, DuckDB and Polars read them as they
        are. The columns are those of ``ARROW_SCHEMA``.

        Raises:
            StoreUnavailable: The store is not there; or an archiver or a server has failed, and no
                archiver has put things in order yet.
            RecordsLost: A file is missing.
        """
        store, incarnation = self._parquet("files()"), self._stream.incarnation
        for _ in range(_LOOKS):
            try:
                return store.files(incarnation, *self.bounds())
            except (StoreUnavailable, RecordsLost) as error:
                # A commit may be under way, or the last files were merged since.
                self._stream.check_store()
                failure = error
            time.sleep(_POLL_S)
        raise failure

    def segments(self) -> list[SegmentDescription]:
        """The files that count, in order of the offsets: what each is for, and how large it is.

        Unlike ``files`` it passes over what is missing, so that a damaged store can be looked at;
        the offsets tell.

        Raises:
            StoreUnavailable: The store is not there.
        """
        found = self._parquet("segments()").segments(self._stream.incarnation, *self.bounds())
        self._stream.check_store()  # a disk that is not mounted would be an empty list
        return found

    def flush(self, timeout: float = 30.0) -> int:
        """Have all that is in the stream now archived, and wait for it.

        Returns:
            The end of what is archived.

        Raises:
            StoreUnavailable: It was not done within ``timeout`` seconds.
        """
        check_seconds("timeout", timeout, zero=True)
        return flush(self._stream, timeout)

    def verify(self, progress: Progress | None = None) -> list[Flaw]:
        """Read everything, compare all checksums; return what is wrong, nothing if all is well.

        Args:
            progress: Called with the records read so far, and all there are.
        """
        return list(self.backend.verify(self._stream.incarnation, *self.bounds(), progress))

    def compact(
        self,
        *,
        max_records: int = COMPACT_RECORDS,
        max_bytes: int = COMPACT_BYTES,
        progress: Progress | None = None,
    ) -> int:
        """Merge small files into larger ones. Readers do not notice.

        The small ones stay for ten minutes at least, for readers that have a list of them. Then an
        archiver removes them.

        Args:
            max_records: The largest file to make, in records.
            max_bytes: The same in bytes.
            progress: Called with the records looked at so far, and all there are.

        Returns:
            How many files fewer there are to read.
        """
        return self._parquet("compact()").compact(
            self._stream.incarnation,
            *self.bounds(),
            records=check_int("max_records", max_records, 1, OFFSET_MAX),
            size=check_int("max_bytes", max_bytes, 1, OFFSET_MAX),
            progress=progress,
        )

    def expire(
        self,
        *,
        before: datetime | None = None,
        max_bytes: int | None = None,
        offset: int | None = None,
        force: bool = False,
        dry_run: bool = False,
    ) -> int:
        """Delete the oldest records from the store, in whole files.

        Those that the ring still holds can be read from there as long as it does.

        Args:
            before: Those that were appended before this time.
            max_bytes: So many that the files which stay are not larger together.
            offset: Those below.
            force: Also those that a group has not confirmed yet.
            dry_run: Delete nothing, only tell what would stay.

        Returns:
            The first offset that stays.
        """
        stream = self._stream
        groups = [] if force else self._list_groups()
        stays = self._expiring(before, max_bytes, offset, groups)
        if dry_run:
            return stays
        # Looked at once more by the script: one of them may have been moved back meanwhile.
        group_keys = [keys.group(stream.name, group.name) for group in groups]
        reply = run_archive_script(stream, EXPIRE_HISTORY, stays, group_keys=group_keys)
        stays = int(reply[1])
        # First the stream knows that they are gone, then they go.
        self.backend.delete(stream.incarnation, stays)
        return stays

    def _expiring(
        self,
        before: datetime | None,
        max_bytes: int | None,
        offset: int | None,
        groups: list[GroupDescription],
    ) -> int:
        """The first offset that stays, as it looks now."""
        stream = self._stream
        first, end = self.bounds()
        wanted = first
        if before is not None:
            wanted = max(wanted, stream.offset_at(before))
        if offset is not None:
            wanted = max(wanted, check_int("offset", offset, 0, OFFSET_MAX))
        if max_bytes is not None:
            check_int("max_bytes", max_bytes, 0, OFFSET_MAX)
            fitting = self._parquet("expire(max_bytes=...)").fitting(
                stream.incarnation, end, max_bytes
            )
            wanted = max(wanted, fitting)
        wanted = min([wanted, end, *(group.confirmed for group in groups)])
        if isinstance(self.backend, ParquetStore):
            wanted = self.backend.segment_end(stream.incarnation, wanted)
        return max(wanted, first)

    def _parquet(self, method: str) -> ParquetStore:
        if not isinstance(self.backend, ParquetStore):
            raise TypeError(f"{method} is for stores of files; {self.backend!r} has none.")
        return self.backend
