"""A stream's archive: the part of its history that is in the store."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

from meteor_py.archive.archiver import flush
from meteor_py.archive.expiry import delete_below, first_kept
from meteor_py.errors import RecordsLost, StoreUnavailable
from meteor_py.log.handle import StreamHandle
from meteor_py.records.config import OFFSET_MAX, check_int, check_seconds
from meteor_py.records.descriptions import GroupDescription
from meteor_py.store.base import Flaw, Progress
from meteor_py.store.parquet import ParquetStore
from meteor_py.store.segment import SegmentDescription

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    import pyarrow.fs as fs

_T = TypeVar("_T")

#: Default limits for a file that ``compact`` writes, in records and in bytes.
COMPACT_RECORDS = 1_000_000
COMPACT_BYTES = 256 * 1024 * 1024

_POLL_S = 0.02
#: Number of attempts to list the files. An attempt fails if the store changes while it runs.
_ATTEMPTS = 5


class Archive:
    """The archived part of a stream. Get it with ``stream.store``.

    >>> stream.store.files()  # doctest: +SKIP
    ['/data/meteor/orders/5f1d.../00000000000000000000-00000000000000099999-17...-9c2f01ab.parquet']
    """

    def __init__(
        self, stream: StreamHandle, list_groups: Callable[[], list[GroupDescription]]
    ) -> None:
        self._stream = stream
        self._list_groups = list_groups
        #: The ``RingbufferStore`` that holds the archive.
        self.backend = stream.find_store()
        stream.check_store()

    def __repr__(self) -> str:
        return f"<Archive of {self._stream.name!r} in {self.backend!r}>"

    @property
    def uri(self) -> str | None:
        """The store's address, without secrets; None if it has no address for other processes."""
        return self.backend.uri

    def bounds(self) -> tuple[int, int]:
        """Return the first offset in the store, and the offset after the last one."""
        return self._stream.archived_bounds()

    def files(self) -> list[str]:
        """Return the files that hold the archived records, each record once, ordered by offset.

        Each file is a Parquet file with the columns in ``ARROW_SCHEMA``. A local store returns
        paths, which pyarrow, Spark, DuckDB and Polars read directly. An object store returns URIs,
        such as ``s3://bucket/key``. Spark, DuckDB and Polars can read these URIs once they are
        configured for that object store. For pyarrow, use ``dataset()``, or ``paths()`` with
        ``filesystem``. A ``ParquetStore`` that was created with ``filesystem=`` returns paths in
        that filesystem.

        Raises:
            StoreUnavailable: The store cannot be reached, or a file still holds superseded or
                uncommitted records. An archiver must rewrite that file first.
            RecordsLost: A file is missing.
            TypeError: The store is not file-based.
        """
        store = self._parquet("files()")
        return self._consistent(lambda *span: store.files(*span))

    def paths(self) -> list[str]:
        """Return the same files as ``files``, as paths in ``filesystem`` without scheme or options.

        >>> pq.read_table(store.paths()[0], filesystem=store.filesystem)  # doctest: +SKIP

        Raises:
            StoreUnavailable, RecordsLost, TypeError: See ``files``.
        """
        store = self._parquet("paths()")
        return self._consistent(lambda *span: store.paths(*span))

    @property
    def filesystem(self) -> fs.FileSystem:
        """The pyarrow filesystem that holds the files, with the store's own credentials.

        Raises:
            TypeError: The store is not file-based.
        """
        return self._parquet("filesystem").filesystem

    def dataset(self) -> ds.Dataset:
        """Return the archived records as a pyarrow dataset, wherever the files are.

        This call reads no records. If you then select columns or filter by offset, pyarrow reads
        only the parts of the files that it needs:

        >>> stream.store.dataset().to_table(columns=["offset", "key"])  # doctest: +SKIP

        Raises:
            StoreUnavailable, RecordsLost, TypeError: See ``files``.
        """
        store = self._parquet("dataset()")
        return self._consistent(lambda *span: store.dataset(*span))

    def _consistent(self, find: Callable[[str, int, int], _T]) -> _T:
        """Call ``find``. Retry if it fails, because the store may have changed during the call."""
        for _ in range(_ATTEMPTS):
            try:
                return find(self._stream.incarnation, *self.bounds())
            except (StoreUnavailable, RecordsLost) as error:
                # Try again: an archiver may be committing a segment, or compaction may have just
                # merged files. ``check_store`` raises if the store itself is gone.
                self._stream.check_store()
                failure = error
            time.sleep(_POLL_S)
        raise failure

    def segments(self) -> list[SegmentDescription]:
        """Return a description of each file that readers use, ordered by offset.

        Unlike ``files``, this method skips missing files, so that it can show a damaged store. To
        find missing files, look for gaps in the offsets.

        Raises:
            StoreUnavailable: The store cannot be reached.
            TypeError: The store is not file-based.
        """
        found = self._parquet("segments()").segments(self._stream.incarnation, *self.bounds())
        self._stream.check_store()  # otherwise, an unmounted disk would look like an empty store
        return found

    def flush(self, timeout: float = 30.0) -> int:
        """Make the archiver archive all existing records now, and wait until it has done so.

        Returns:
            The offset after the last archived record.

        Raises:
            StoreUnavailable: The archiver did not finish within ``timeout`` seconds.
        """
        check_seconds("timeout", timeout, zero=True)
        return flush(self._stream, timeout)

    def verify(self, progress: Progress | None = None) -> list[Flaw]:
        """Read every archived record and verify all checksums. Return the flaws found.

        Args:
            progress: Called with the number of records read so far and the total.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        return list(self.backend.verify(self._stream.incarnation, *self.bounds(), progress))

    def compact(
        self,
        *,
        max_records: int = COMPACT_RECORDS,
        max_bytes: int = COMPACT_BYTES,
        progress: Progress | None = None,
    ) -> int:
        """Merge small files into larger ones, without disturbing readers.

        The small files stay for at least ten minutes, for readers that have listed them. Then an
        archiver removes them.

        Args:
            max_records: Maximum number of records in a merged file.
            max_bytes: Approximate maximum size of a merged file in bytes.
            progress: Called with the number of records examined so far, and the total.

        Returns:
            The reduction in the number of files, once the small files have been removed.

        Raises:
            StoreUnavailable: The store cannot be read or written to at the moment.
            TypeError: The store is not file-based.
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

        Records that the ring still holds stay readable there. If you pass several criteria, the one
        that deletes the most records applies.

        >>> stream.store.expire(max_bytes=10**12)  # doctest: +SKIP
        1200000

        Args:
            before: Delete the records appended before this time.
            max_bytes: Delete the oldest files until the remaining files fit into this many bytes.
            offset: Delete the records below this offset.
            force: Delete even records that a group has not confirmed yet.
            dry_run: Delete nothing, and only return the first offset that would be kept.

        Returns:
            The first offset that is kept.

        Raises:
            StoreUnavailable: The store cannot be read or written to at the moment.
            TypeError: ``max_bytes`` was passed, but the store is not file-based.
            ValueError: ``before`` has no time zone, or an argument is out of range.
        """
        stream, store = self._stream, self.backend
        groups = [] if force else self._list_groups()
        kept = first_kept(stream, store, groups, before=before, max_bytes=max_bytes, offset=offset)
        return kept if dry_run else delete_below(stream, store, groups, kept)

    def _parquet(self, method: str) -> ParquetStore:
        if not isinstance(self.backend, ParquetStore):
            raise TypeError(
                f"{method} needs a file-based store, such as a ParquetStore, not {self.backend!r}."
            )
        return self.backend
