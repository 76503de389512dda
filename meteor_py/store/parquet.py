"""A store of Parquet files, on any filesystem that pyarrow can reach.

``<root>/<stream>/_store.json`` holds the store's id. ``<root>/<stream>/<incarnation>/`` holds the
segments ``<first>-<last>-<term>-<sha8>.parquet``. The file names are enough to find a record, so
there is no index that could disagree with them (see ``segment.py``). The same folder holds the
stream's states, ``.state-<term>.json`` (see ``state.py``). Other programs skip names that begin
with a dot.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import pyarrow as pa

from meteor_py.errors import StoreMismatch
from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.address import mask
from meteor_py.store import maintenance
from meteor_py.store.base import (
    TERMS,
    Bounds,
    ConcurrentStore,
    DeferredBatch,
    Flaw,
    Progress,
    StatefulStore,
)
from meteor_py.store.errors import store_unavailable, unavailable
from meteor_py.store.listing import Listings
from meteor_py.store.segment import Segment, SegmentDescription, Span, live_spans
from meteor_py.store.segment_log import SegmentLog
from meteor_py.store.storage import LocalStorage, RemoteStorage, Storage

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    import pyarrow.fs as fs

#: The file that holds the store's id and its stream's name.
IDENTITY_FILE = "_store.json"
_INCARNATION = re.compile(r"[0-9a-f]{1,64}")
#: Maximum number of segments to remember as too large to merge.
_LARGE_MAX = 100_000


class ParquetStore(StatefulStore, ConcurrentStore):
    """A store that keeps one stream's history in Parquet files.

    Args:
        uri: A path, ``file:///path``, ``s3://bucket/prefix?region=...``, ``gs://...``, or any other
            URI that pyarrow supports. A password in it is not saved in Redis.
        stream: The stream's name.
        filesystem: A pyarrow filesystem, for settings that a URI cannot express. ``uri`` is then a
            path in it, and every process must pass the store when it opens the stream.

    Raises:
        ValueError: The URI is malformed, unsupported, or would expose a secret.
        StoreUnavailable: pyarrow could not reach the filesystem.

    >>> ParquetStore("/data/meteor", "orders").uri
    'file:///data/meteor'
    """

    def __init__(
        self, uri: str | os.PathLike[str], stream: str, *, filesystem: fs.FileSystem | None = None
    ) -> None:
        self.stream = keys.check_name(stream)
        self._location = mask(os.fspath(uri))
        self._uri: str | None = None
        self._listings = Listings()
        self._large: set[Segment] = set()  # too large, or too damaged, to merge
        self._storage = self._open(os.fspath(uri), filesystem)

    def _open(self, uri: str, filesystem: fs.FileSystem | None) -> Storage:
        scheme, separator, place = uri.partition("://")
        if not uri or ".." in re.split(r"[/\\]", place if separator else uri):
            raise ValueError(
                f"{self._location!r} is not a valid store address: it is empty or contains '..'. "
                "Write the full address."
            )
        if filesystem is not None:
            return RemoteStorage(filesystem, uri, self.stream)
        if not separator and re.match(r"[a-z][a-z0-9+]+:", uri):
            raise ValueError(f"{self._location!r} lacks the two slashes after the colon.")
        if not separator:
            place = os.path.abspath(os.path.expanduser(uri))
        if not separator or scheme == "file":
            if not place.startswith("/"):
                raise ValueError(
                    f"{self._location!r} is not a path. Write file:///path, with three slashes."
                )
            self._uri = self._location = f"file://{os.path.normpath(place)}"
            return LocalStorage(os.path.normpath(place), self.stream)
        import pyarrow.fs as fs

        self._uri = _without_login(uri)
        with unavailable(self.stream, self._location, "reached"):
            try:
                filesystem, root = fs.FileSystem.from_uri(uri)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                reason = mask(str(error)).rstrip(".")
                raise ValueError(
                    f"{self._location!r} is not a valid store address: {reason}."
                ) from None
        if ".." in root.split("/") or not root.strip("/"):
            raise ValueError(f"{self._location!r} has no bucket or folder, or contains '..'.")
        return RemoteStorage(filesystem, root, self.stream)

    @property
    def uri(self) -> str | None:
        return self._uri

    def __repr__(self) -> str:
        return f"<ParquetStore of {self.stream!r} at {self._location}>"

    # -- identity ------------------------------------------------------------------------------

    def identity(self) -> str | None:
        with unavailable(self.stream, self._location, "read"):
            data = self._storage.read(IDENTITY_FILE)
        if data is None:
            return None
        try:
            found = json.loads(data)
            identity, stream = str(found["store"]), found["stream"]
        except (ValueError, KeyError, TypeError):
            raise StoreMismatch(
                f"The file {IDENTITY_FILE} for stream {self.stream!r} at {self._location} is "
                "damaged. Restore it from a backup, or use another folder.",
                stream=self.stream,
            ) from None
        if stream != self.stream:
            raise StoreMismatch(
                f"The folder for stream {self.stream!r} at {self._location} belongs to stream "
                f"{stream!r}. Use another folder.",
                stream=self.stream,
            )
        return identity

    def claim(self, identity: str, *, replacing: str | None = None) -> None:
        contents = {"version": 1, "store": identity, "stream": self.stream}
        replace = replacing is not None and self.identity() == replacing
        with unavailable(self.stream, self._location, "written to"):
            self._storage.create(IDENTITY_FILE, json.dumps(contents).encode(), replace=replace)

    def incarnations(self) -> list[str]:
        with unavailable(self.stream, self._location, "listed"):
            names = [name for name in self._storage.folders() if _INCARNATION.fullmatch(name)]
        found = sorted((self.bounds(name).term, name) for name in names)
        return [name for term, name in found if term]

    # -- records -------------------------------------------------------------------------------

    def bounds(self, incarnation: str) -> Bounds:
        table = self._segment_log(incarnation).table()
        spans = table.spans()
        if not spans:
            return Bounds(0, 0, 0)
        return Bounds(spans[0].first, spans[-1].stop, table.term)

    def epochs(self, incarnation: str) -> dict[int, int]:
        spans = self._segment_log(incarnation).spans()
        return {span.segment.term // TERMS: span.first for span in reversed(spans)}

    def append(self, incarnation: str, term: int, records: pa.Table) -> None:
        self._segment_log(incarnation).write(term, records)

    def read(self, incarnation: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        return self._segment_log(incarnation).read(start, stop)

    def read_columns(
        self, incarnation: str, start: int, stop: int, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        return self._segment_log(incarnation).read(start, stop, columns)

    def deferred_batches(
        self, incarnation: str, start: int, stop: int, columns: Sequence[str] | None = None
    ) -> Iterator[DeferredBatch]:
        return self._segment_log(incarnation).deferred_batches(start, stop, columns)

    def save_state(self, incarnation: str, term: int, state: bytes) -> None:
        self._segment_log(incarnation).save_state(term, state)

    def load_states(self, incarnation: str) -> dict[int, bytes]:
        return self._segment_log(incarnation).load_states()

    def locate(self, incarnation: str, ms: int, start: int, stop: int) -> int:
        return self._segment_log(incarnation).locate(ms, start, stop)

    @property
    def filesystem(self) -> fs.FileSystem:
        """The pyarrow filesystem that holds the files. ``paths`` returns paths in it."""
        return self._storage.filesystem

    def files(self, incarnation: str, start: int, stop: int) -> list[str]:
        """Return the files that hold the records from ``start`` to ``stop`` - 1, each record once.

        A local store returns paths; other stores return URIs without options (``s3://bucket/key``).
        The first file may begin before ``start``.

        Raises:
            StoreUnavailable: A file also holds superseded or uncommitted records. The archiver will
                replace it soon.
            RecordsLost: Some records are in no file.
        """
        spans = self._whole_spans(incarnation, start, stop)
        return [self._file(incarnation, span.segment) for span in spans]

    def paths(self, incarnation: str, start: int, stop: int) -> list[str]:
        """Return the same files as ``files``, as paths in ``filesystem``.

        Raises:
            StoreUnavailable, RecordsLost: See ``files``.
        """
        spans = self._whole_spans(incarnation, start, stop)
        return [self._storage.full_path(f"{incarnation}/{span.segment.name}") for span in spans]

    def dataset(self, incarnation: str, start: int, stop: int) -> ds.Dataset:
        """Return the records from ``start`` to ``stop`` - 1 as a pyarrow dataset.

        Raises:
            StoreUnavailable, RecordsLost: See ``files``.
        """
        import pyarrow.dataset as ds

        paths = self.paths(incarnation, start, stop)
        if not paths:
            return ds.dataset(ARROW_SCHEMA.empty_table())
        found = ds.dataset(paths, ARROW_SCHEMA, format="parquet", filesystem=self.filesystem)
        return found.filter(ds.field("offset") >= start) if start else found

    def _whole_spans(self, incarnation: str, start: int, stop: int) -> list[Span]:
        spans = self._segment_log(incarnation).spans(stop, start)
        at = start
        for span in spans:
            if span.first > at:
                raise reply_errors.records_lost(self.stream, at, span.first - 1)
            if not span.exact:
                reason = OSError(f"{span.segment.name} has superseded or uncommitted records")
                raise store_unavailable(self.stream, self._location, "listed", reason)
            at = span.stop
        if at < stop:
            raise reply_errors.records_lost(self.stream, at, stop - 1)
        return spans

    def segments(self, incarnation: str, start: int, stop: int) -> list[SegmentDescription]:
        """Describe the files with records from ``start`` to ``stop`` - 1; gaps are skipped."""
        sizes = self._segment_log(incarnation).sizes()
        return [
            SegmentDescription(
                first=max(span.first, start),
                last=span.stop - 1,
                size=sizes[span.segment],
                epoch=span.segment.term // TERMS,
                term=span.segment.term % TERMS,
                file=self._file(incarnation, span.segment),
            )
            for span in live_spans(sizes, stop, start)
        ]

    def _file(self, incarnation: str, segment: Segment) -> str:
        root = (self._uri or self._location).removeprefix("file://")
        if isinstance(self._storage, RemoteStorage) and self._uri is not None:
            # Options such as the region are specific to pyarrow, and other programs reject them.
            root = root.partition("?")[0]
        return f"{root.rstrip('/')}/{self.stream}/{incarnation}/{segment.name}"

    def row_group_ends(self, incarnation: str, offsets: Sequence[int], end: int) -> list[int]:
        """Return the end of each offset's row group; the offset itself if no row group holds it."""
        return self._segment_log(incarnation).row_group_ends(offsets, end)

    def segment_end(self, incarnation: str, offset: int) -> int:
        """Return the end of the last file that ends at or before ``offset``; 0 if there is none."""
        stops = (span.stop for span in self._segment_log(incarnation).spans())
        return max((stop for stop in stops if stop <= offset), default=0)

    def fitting(self, incarnation: str, end: int, size: int) -> int:
        """Return the first offset in the newest files before ``end`` that fit into ``size`` bytes.

        Return ``end`` if not even the newest file fits.
        """
        first = end
        for segment in reversed(self.segments(incarnation, 0, end)):
            size -= segment.size
            if size < 0:
                break
            first = segment.first
        return first

    # -- maintenance ---------------------------------------------------------------------------

    def verify(
        self, incarnation: str, start: int, stop: int, progress: Progress | None = None
    ) -> Iterator[Flaw]:
        return maintenance.verify(self._segment_log(incarnation), start, stop, progress)

    def tidy(self, incarnation: str, term: int, end: int, is_current: Callable[[], bool]) -> None:
        log = self._segment_log(incarnation)
        maintenance.mend(log, end)
        maintenance.sweep(log, term, end, is_current)

    def merge_small(
        self, incarnation: str, term: int, end: int, is_current: Callable[[], bool]
    ) -> bool:
        """Merge some small segments; return whether a merge was attempted.

        The archiver calls this occasionally, so that a slow stream does not leave one file per
        minute. A merged segment never spans epochs, and has at most about 32 MiB.

        Args:
            term: See ``tidy``.
            end: See ``tidy``.
            is_current: See ``tidy``.
        """
        log = self._segment_log(incarnation)
        if len(self._large) > _LARGE_MAX:
            self._large.clear()
        return maintenance.merge_small(log, term, end, is_current, self._large)

    def compact(
        self,
        incarnation: str,
        start: int,
        stop: int,
        *,
        records: int,
        size: int,
        progress: Progress | None = None,
    ) -> int:
        """Merge adjacent segments into files of up to ``records`` records and about ``size`` bytes.

        Returns:
            The reduction in the number of segments.
        """
        log = self._segment_log(incarnation)
        return maintenance.compact(log, start, stop, records, size, progress)

    def delete(self, incarnation: str, below: int | None = None) -> None:
        log = self._segment_log(incarnation)
        if below is not None:
            maintenance.remove_below(log, below)
            return
        with unavailable(self.stream, self._location, "written to"):
            # Keep the identity file: another incarnation may have begun.
            self._storage.remove_all(incarnation)

    def _segment_log(self, incarnation: str) -> SegmentLog:
        if not _INCARNATION.fullmatch(incarnation):
            raise ValueError(f"{incarnation[:100]!r} is not a valid stream incarnation.")
        return SegmentLog(self._storage, self.stream, incarnation, self._location, self._listings)


def _without_login(uri: str) -> str:
    """Return the address without its password and, for S3, without its access key.

    Raises:
        ValueError: The address has a secret elsewhere, or an unknown parameter that may be one.
    """
    parts = urlsplit(uri)
    login, _, host = parts.netloc.rpartition("@")
    # In an S3 address, the user is an access key; in an Azure address, a container or an account.
    user = "" if parts.scheme == "s3" else login.partition(":")[0]
    bare = urlunsplit(parts._replace(netloc=f"{user}@{host}" if user else host))
    if mask(bare) != bare:
        names = ", ".join(sorted({name[:64] for name, _ in parse_qsl(parts.query)})) or "none"
        raise ValueError(
            "The store address contains a secret or an unknown parameter, which would be saved in "
            f"Redis. Its parameters are: {names}. Escape special characters in a password. Pass "
            "secrets in the environment, or use filesystem=."
        )
    return bare
