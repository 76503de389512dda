"""The segments of one incarnation of a stream as one log."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import pyarrow as pa

from meteor_py.errors import MeteorError
from meteor_py.redis import reply_errors
from meteor_py.store.segment import Segment, Span, lay_out
from meteor_py.store.segment_file import BAD_BYTES, SegmentFile, examine, write
from meteor_py.store.storage import Entry, RemoteStorage, Storage

_T = TypeVar("_T")


class _Vanished(Exception):
    """A file was compacted or deleted after it had been listed."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment


class SegmentLog:
    """The segments of one incarnation. Keeps no list of them: each call looks at the storage."""

    def __init__(self, storage: Storage, stream: str, incarnation: str, shown: str) -> None:
        self.storage = storage
        self.stream = stream
        self.incarnation = incarnation
        #: The address without secrets, for messages.
        self.shown = shown

    def path(self, name: str) -> str:
        return f"{self.incarnation}/{name}"

    def entries(self) -> list[Entry]:
        """All files."""
        with unavailable(self.stream, self.shown, "listed"):
            return self.storage.entries(self.incarnation)

    def sizes(self) -> dict[Segment, int]:
        """All segments, and the bytes that each has."""
        return {
            segment: entry.size
            for entry in self.entries()
            if (segment := Segment.parse(entry.name)) is not None
        }

    def segments(self) -> list[Segment]:
        with unavailable(self.stream, self.shown, "listed"):
            parsed = map(Segment.parse, self.storage.names(self.incarnation))
        return [segment for segment in parsed if segment is not None]

    def spans(self, end: int | None = None) -> list[Span]:
        """What counts below ``end``."""
        return lay_out(self.segments(), end)

    def write(self, term: int, records: pa.Table) -> Segment:
        """Add a segment, and open it once in an object store to check that it arrived.

        Raises:
            StoreUnavailable: It could not be written, or did not arrive whole.
        """
        first, last = (records.column("offset")[index].as_py() for index in (0, -1))
        about = {"stream": self.stream, "life": self.incarnation, "term": term}
        with unavailable(self.stream, self.shown, "written to"):
            with self.storage.build(self.path("segment")) as built:
                segment = Segment(first, last, term, write(built, records, about))
                self.storage.publish(built, self.path(segment.name))
            if isinstance(self.storage, RemoteStorage):
                try:
                    self._open(segment).close()
                except (pa.ArrowException, ValueError) as error:
                    raise OSError(f"{segment.name} has not arrived whole: {error}") from error
        return segment

    # -- reading -------------------------------------------------------------------------------

    def read(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """As ``RingbufferStore.read``."""
        vanished: Segment | None = None
        while start < stop:
            try:
                for batch in self._read(start, stop):
                    start += len(batch)
                    yield batch
            except _Vanished as error:
                if error.segment == vanished:  # still listed, and still not there
                    last = min(vanished.last, stop - 1)
                    raise reply_errors.records_lost(self.stream, start, last) from None
                vanished = error.segment

    def _read(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        for span in _from(self.spans(stop), start):
            if span.first > start:
                raise reply_errors.records_lost(self.stream, start, span.first - 1)
            for batch in self._read_span(span, start):
                start += len(batch)
                yield batch
        if start < stop:
            raise reply_errors.records_lost(self.stream, start, stop - 1)

    def _read_span(self, span: Span, start: int) -> Iterator[pa.RecordBatch]:
        with self._opened(span) as file:
            while start < span.stop:
                group = file.group_of(start)
                first, stop = file.edges[group : group + 2]
                part = Span(max(first, span.first), min(stop, span.stop), span.segment)
                batch = self._carefully(part, partial(file.read, group))
                batch = batch.slice(start - first, part.stop - start)
                yield batch
                start += len(batch)

    def row_group_end(self, offset: int, end: int) -> int:
        """The end of the row group that holds an offset; the offset itself if none does.

        Raises:
            CorruptSegment, StoreUnavailable: The file cannot be read.
        """
        for span in self.spans(end):
            if span.first <= offset < span.stop:
                try:
                    with self._opened(span) as file:
                        edge = file.edges[file.group_of(offset) + 1]
                except _Vanished:
                    break  # merged with others a moment ago
                return min(int(edge), span.stop)
        return offset

    def locate(self, ms: int, start: int, stop: int) -> int:
        """As ``RingbufferStore.locate``: the span, its row group, the record."""
        vanished: Segment | None = None
        while True:
            try:
                return self._locate(ms, start, stop)
            except _Vanished as error:
                if error.segment == vanished:
                    first, last = max(vanished.first, start), min(vanished.last, stop - 1)
                    raise reply_errors.records_lost(self.stream, first, last) from None
                vanished = error.segment

    def _locate(self, ms: int, start: int, stop: int) -> int:
        spans = _from(self.spans(stop), start)
        if start < stop and (not spans or spans[0].first > start):
            last = spans[0].first - 1 if spans else stop - 1
            raise reply_errors.records_lost(self.stream, start, last)
        late = bisect_left(spans, True, key=lambda span: self._last_appended(span) >= ms)
        if late == len(spans):
            return stop
        span = spans[late]
        with self._opened(span) as file:
            groups = range(file.group_of(span.first), file.group_of(span.stop - 1) + 1)
            # All but the last: of that one only a part may count.
            late = bisect_left(
                groups[:-1], True, key=lambda group: self._appended(span, file, group)[-1] >= ms
            )
            group = groups[late]
            found: int = file.edges[group] + bisect_left(self._appended(span, file, group), ms)
        return max(found, span.first, start)

    def _last_appended(self, span: Span) -> int:
        with self._opened(span) as file:
            group = file.group_of(span.stop - 1)
            at = span.stop - 1 - file.edges[group]
            return int(self._appended(span, file, group)[at])

    def _appended(self, span: Span, file: SegmentFile, group: int) -> list[int]:
        return self._carefully(span, partial(file.appended, group))

    def _open(self, segment: Segment) -> SegmentFile:
        return SegmentFile(self.storage.open(self.path(segment.name)), segment)

    @contextmanager
    def _opened(self, span: Span) -> Iterator[SegmentFile]:
        file = self._carefully(span, lambda: self._open(span.segment))
        try:
            yield file
        finally:
            file.close()

    def _carefully(self, span: Span, work: Callable[[], _T]) -> _T:
        """Call ``work`` on a file, and tell damage from a failure that may pass."""
        try:
            return work()
        except FileNotFoundError:
            raise _Vanished(span.segment) from None
        except BAD_BYTES as error:
            raise self._diagnose(span, error) from error

    def _diagnose(self, span: Span, failure: BaseException) -> MeteorError:
        """Look at the whole file: pyarrow has one error for damage and for a lost connection."""
        name = span.segment.name
        with unavailable(self.stream, self.shown, "read"):
            data = self.storage.read(self.path(name))
        if data is None:
            raise _Vanished(span.segment)
        problem = examine(data, span.segment)
        if problem is None:
            return reply_errors.store_unavailable(self.stream, self.shown, "read", failure)
        place = f"{self.stream}/{self.path(name)}"
        return reply_errors.corrupt_segment(self.stream, span.first, span.stop - 1, place, problem)


def _from(spans: list[Span], start: int) -> list[Span]:
    """The spans from the one on that holds ``start``, or comes next."""
    return spans[bisect_right(spans, start, key=lambda span: span.stop) :]


@contextmanager
def unavailable(stream: str, shown: str, done: str) -> Iterator[None]:
    """Raise errors of the filesystem as ``StoreUnavailable``."""
    try:
        yield
    except OSError as error:
        raise reply_errors.store_unavailable(stream, shown, done, error) from error
