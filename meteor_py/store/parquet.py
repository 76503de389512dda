"""A store of Parquet files, on any filesystem that pyarrow reaches.

``<root>/<stream>/_store.json`` holds the id of the store, ``<root>/<stream>/<incarnation>/`` the
segments ``<first>-<last>-<term>-<sha8>.parquet``. Their names are enough to find a record: there is
no index that could disagree with them (see ``segment.py``).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import pyarrow as pa

from meteor_py.errors import StoreMismatch
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.address import mask
from meteor_py.store import maintenance
from meteor_py.store.base import TERMS, Bounds, Flaw, Progress, RingbufferStore
from meteor_py.store.segment import Segment, SegmentDescription, Span, lay_out
from meteor_py.store.segment_log import SegmentLog, unavailable
from meteor_py.store.storage import LocalStorage, RemoteStorage, Storage

if TYPE_CHECKING:
    import pyarrow.fs as fs

#: The file with the id of the store and the name of its stream.
IDENTITY_FILE = "_store.json"
_INCARNATION = re.compile(r"[0-9a-f]{1,64}")
#: What pyarrow takes from the query of an address, and nobody else should see.
_SECRETS = ("client_secret", "sig")


class ParquetStore(RingbufferStore):
    """The history of one stream in Parquet files.

    Args:
        uri: A path, ``file:///path``, ``s3://bucket/prefix?region=...``, ``gs://...``, and what
            else pyarrow understands. A password in it is not kept in Redis.
        stream: The name of the stream.
        filesystem: One of pyarrow's own, for settings that no URI has. ``uri`` is then a path in
            it, and processes that open the stream without a store cannot find it by themselves.

    Raises:
        ValueError: The URI cannot be understood.
        StoreUnavailable: pyarrow could not reach it.

    >>> ParquetStore("/data/meteor", "orders").uri
    'file:///data/meteor'
    """

    def __init__(
        self, uri: str | os.PathLike[str], stream: str, *, filesystem: fs.FileSystem | None = None
    ) -> None:
        self.stream = keys.check_name(stream)
        self._shown = mask(os.fspath(uri))
        self._uri: str | None = None
        self._storage = self._open(os.fspath(uri), filesystem)

    def _open(self, uri: str, filesystem: fs.FileSystem | None) -> Storage:
        scheme, separator, place = uri.partition("://")
        if not uri or ".." in re.split(r"[/\\]", place if separator else uri):
            raise ValueError(
                f"The address of a store is not empty and has no '..', unlike {self._shown!r}; "
                "write it in full."
            )
        if filesystem is not None:
            return RemoteStorage(filesystem, uri, self.stream)
        if not separator and re.match(r"[a-z][a-z0-9+]+:", uri):
            raise ValueError(f"{self._shown!r} lacks the two slashes behind the colon.")
        if not separator:
            place = os.path.abspath(os.path.expanduser(uri))
        if not separator or scheme == "file":
            if not place.startswith("/"):
                raise ValueError(
                    f"{self._shown!r} is not a path; write file:///path, with three slashes."
                )
            self._uri = self._shown = f"file://{os.path.normpath(place)}"
            return LocalStorage(os.path.normpath(place), self.stream)
        import pyarrow.fs as fs

        self._uri = _without_login(uri)
        with unavailable(self.stream, self._shown, "reached"):
            try:
                filesystem, root = fs.FileSystem.from_uri(uri)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                reason = mask(str(error)).rstrip(".")
                raise ValueError(
                    f"{self._shown!r} is not the address of a store: {reason}."
                ) from None
        if ".." in root.split("/") or not root.strip("/"):
            raise ValueError(f"{self._shown!r} names no bucket or folder, or has '..' in it.")
        return RemoteStorage(filesystem, root, self.stream)

    @property
    def uri(self) -> str | None:
        return self._uri

    def __repr__(self) -> str:
        return f"<ParquetStore of {self.stream!r} at {self._shown}>"

    # -- identity ------------------------------------------------------------------------------

    def identity(self) -> str | None:
        with unavailable(self.stream, self._shown, "looked at"):
            data = self._storage.read(IDENTITY_FILE)
        if data is None:
            return None
        try:
            mark = json.loads(data)
            identity, stream = str(mark["store"]), mark["stream"]
        except (ValueError, KeyError, TypeError):
            raise StoreMismatch(
                f"The file {IDENTITY_FILE} of stream {self.stream!r} at {self._shown} cannot be "
                "read; put it back from a copy, or use another folder.",
                stream=self.stream,
            ) from None
        if stream != self.stream:
            raise StoreMismatch(
                f"The folder of stream {self.stream!r} at {self._shown} belongs to stream "
                f"{stream!r}; use another one.",
                stream=self.stream,
            )
        return identity

    def claim(self, identity: str, *, replacing: str | None = None) -> None:
        mark = {"version": 1, "store": identity, "stream": self.stream}
        replace = replacing is not None and self.identity() == replacing
        with unavailable(self.stream, self._shown, "written to"):
            self._storage.create(IDENTITY_FILE, json.dumps(mark).encode(), replace=replace)

    def incarnations(self) -> list[str]:
        with unavailable(self.stream, self._shown, "listed"):
            names = [name for name in self._storage.folders() if _INCARNATION.fullmatch(name)]
        found = sorted((self.bounds(name).term, name) for name in names)
        return [name for term, name in found if term]

    # -- records -------------------------------------------------------------------------------

    def bounds(self, incarnation: str) -> Bounds:
        segments = self._segment_log(incarnation).segments()
        spans = lay_out(segments)
        if not spans:
            return Bounds(0, 0, 0)
        return Bounds(spans[0].first, spans[-1].stop, max(segment.term for segment in segments))

    def epochs(self, incarnation: str) -> dict[int, int]:
        spans = self._segment_log(incarnation).spans()
        return {span.segment.term // TERMS: span.first for span in reversed(spans)}

    def append(self, incarnation: str, term: int, records: pa.Table) -> None:
        self._segment_log(incarnation).write(term, records)

    def read(self, incarnation: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        return self._segment_log(incarnation).read(start, stop)

    def locate(self, incarnation: str, ms: int, start: int, stop: int) -> int:
        return self._segment_log(incarnation).locate(ms, start, stop)

    def files(self, incarnation: str, start: int, stop: int) -> list[str]:
        """The files that together hold exactly the records from ``start`` to before ``stop``.

        Paths for a local store, else URIs. The first may begin before ``start``.

        Raises:
            StoreUnavailable: A file also holds records that do not count; the archiver will
                replace it soon.
            RecordsLost: Some are in no file.
        """
        spans = _behind(self._segment_log(incarnation).spans(stop), start)
        at = start
        for span in spans:
            if span.first > at:
                raise reply_errors.records_lost(self.stream, at, span.first - 1)
            if not span.exact:
                more = OSError(f"not all that {span.segment.name} holds counts, or not yet")
                raise reply_errors.store_unavailable(self.stream, self._shown, "listed", more)
            at = span.stop
        if at < stop:
            raise reply_errors.records_lost(self.stream, at, stop - 1)
        return [self._file(incarnation, span.segment) for span in spans]

    def segments(self, incarnation: str, start: int, stop: int) -> list[SegmentDescription]:
        """What counts from ``start`` to before ``stop``, in order; holes are passed over."""
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
            for span in _behind(lay_out(sizes, stop), start)
        ]

    def _file(self, incarnation: str, segment: Segment) -> str:
        root, mark, query = (self._uri or self._shown).removeprefix("file://"), "", ""
        if isinstance(self._storage, RemoteStorage) and self._uri is not None:
            root, mark, query = root.partition("?")
        return f"{root.rstrip('/')}/{self.stream}/{incarnation}/{segment.name}{mark}{query}"

    def row_group_end(self, incarnation: str, offset: int, end: int) -> int:
        """The end of the row group that holds an offset below ``end``, else the offset."""
        return self._segment_log(incarnation).row_group_end(offset, end)

    def segment_end(self, incarnation: str, offset: int) -> int:
        """The last end of a file at or before an offset; 0 if there is none."""
        stops = (span.stop for span in self._segment_log(incarnation).spans())
        return max((stop for stop in stops if stop <= offset), default=0)

    def fitting(self, incarnation: str, end: int, size: int) -> int:
        """The first offset of the last files before ``end`` that are no larger than ``size``."""
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

    def tidy(self, incarnation: str, term: int, end: int, still: Callable[[], bool]) -> None:
        log = self._segment_log(incarnation)
        maintenance.mend(log, end)
        maintenance.sweep(log, term, end, still)

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
        """Merge small segments into such of up to ``records``, and about ``size`` bytes as files.

        Returns:
            How many segments fewer there are to read.
        """
        log = self._segment_log(incarnation)
        return maintenance.compact(log, start, stop, records, size, progress)

    def delete(self, incarnation: str, below: int | None = None) -> None:
        log = self._segment_log(incarnation)
        if below is not None:
            maintenance.remove_below(log, below)
            return
        with unavailable(self.stream, self._shown, "written to"):
            # The identity file stays: another incarnation may have begun.
            self._storage.remove_all(incarnation)

    def _segment_log(self, incarnation: str) -> SegmentLog:
        if not _INCARNATION.fullmatch(incarnation):
            raise ValueError(f"{incarnation[:100]!r} is not an incarnation of a stream.")
        return SegmentLog(self._storage, self.stream, incarnation, self._shown)


def _behind(spans: list[Span], start: int) -> list[Span]:
    """Those of which something lies at ``start`` or behind."""
    return [span for span in spans if span.stop > start]


def _without_login(uri: str) -> str:
    """The address as others may see it.

    Raises:
        ValueError: There is a secret in another place than that of a password.
    """
    parts = urlsplit(uri)
    login, _, host = parts.netloc.rpartition("@")
    # In S3 it is a key and its secret; in Azure the user is a container or an account.
    user = "" if parts.scheme == "s3" else login.partition(":")[0]
    bare = urlunsplit(parts._replace(netloc=f"{user}@{host}" if user else host))
    if mask(bare) != bare or any(name in _SECRETS for name, _ in parse_qsl(parts.query)):
        raise ValueError(
            "The address of a store has a secret where it would not be kept one: escape special "
            "characters of a password; leave other secrets to the environment, or to filesystem=."
        )
    return bare
