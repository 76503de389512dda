"""The segments of one stream incarnation, as a single log."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import pyarrow as pa

from meteor_py.errors import CorruptSegment, MeteorError
from meteor_py.redis import reply_errors
from meteor_py.store.base import DeferredBatch
from meteor_py.store.errors import corrupt_segment, store_unavailable, unavailable
from meteor_py.store.listing import Listings
from meteor_py.store.segment import Segment, SegmentTable, Span, state_name, state_term
from meteor_py.store.segment_file import BAD_BYTES, SegmentFile, examine, write
from meteor_py.store.storage import Entry, RemoteStorage, Storage

_T = TypeVar("_T")


class _Vanished(Exception):
    """A file was compacted or deleted after this process had listed it."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment


class SegmentLog:
    """The segments of one incarnation. Each call sees the current segments; see ``Listings``."""

    def __init__(
        self,
        storage: Storage,
        stream: str,
        incarnation: str,
        location: str,
        listings: Listings | None = None,
    ) -> None:
        self.storage = storage
        self.stream = stream
        self.incarnation = incarnation
        #: The address without secrets, for messages.
        self.location = location
        self._listings = listings or Listings()

    def path(self, name: str) -> str:
        return f"{self.incarnation}/{name}"

    def entries(self) -> list[Entry]:
        """Return all files, including unfinished ones."""
        with unavailable(self.stream, self.location, "listed"):
            return self.storage.entries(self.incarnation)

    def sizes(self) -> dict[Segment, int]:
        """Return all segments with their sizes in bytes."""
        return {
            segment: entry.size
            for entry in self.entries()
            if (segment := Segment.parse(entry.name)) is not None
        }

    def table(self) -> SegmentTable:
        """Return all segments."""
        with unavailable(self.stream, self.location, "listed"):
            return self._listings.table(self.storage, self.incarnation)

    def spans(self, end: int | None = None, start: int = 0) -> list[Span]:
        """Return the live spans; see ``SegmentTable.spans``."""
        return self.table().spans(end, start)

    def write(self, term: int, records: pa.Table) -> Segment:
        """Add a segment. In an object store, open it once to check that it arrived.

        Raises:
            StoreUnavailable: The segment could not be written, or did not arrive complete.
        """
        first, last = (records.column("offset")[index].as_py() for index in (0, -1))
        about = {"stream": self.stream, "life": self.incarnation, "term": term}
        with unavailable(self.stream, self.location, "written to"):
            with self.storage.build(self.path("segment")) as built:
                segment = Segment(first, last, term, write(built, records, about))
                self.storage.publish(built, self.path(segment.name))
            if isinstance(self.storage, RemoteStorage):
                try:
                    self._open(segment).close()
                except (pa.ArrowException, ValueError) as error:
                    raise OSError(f"{segment.name} did not arrive complete: {error}") from error
        return segment

    def save_state(self, term: int, state: bytes) -> None:
        """See ``StatefulStore.save_state``."""
        with (
            unavailable(self.stream, self.location, "written to"),
            self.storage.build(self.path("state")) as built,
        ):
            with built.open("xb") as file:
                file.write(state)
                file.flush()
                os.fsync(file.fileno())
            self.storage.publish(built, self.path(state_name(term)))

    def load_states(self) -> dict[int, bytes]:
        """See ``StatefulStore.load_states``."""
        with unavailable(self.stream, self.location, "read"):
            terms = map(state_term, self.storage.names(self.incarnation))
            found = {
                term: self.storage.read(self.path(state_name(term)))
                for term in terms
                if term is not None
            }
        # Another process may have removed a file since it was listed.
        return {term: state for term, state in found.items() if state is not None}

    # -- reading -------------------------------------------------------------------------------

    def read(
        self, start: int, stop: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """See ``RingbufferStore.read`` and, with ``columns``, ``ColumnStore.read_columns``."""
        for read_batch in self.deferred_batches(start, stop, columns):
            yield read_batch()

    def deferred_batches(
        self,
        start: int,
        stop: int,
        columns: Sequence[str] | None = None,
        vanished: Segment | None = None,
    ) -> Iterator[DeferredBatch]:
        """See ``ConcurrentStore.deferred_batches``.

        Args:
            vanished: A segment whose file was missing although it was listed. If the file is
                missing again, its records are lost.
        """
        while start < stop:
            try:
                for end, read_batch in self._deferred_batches(start, stop, columns, vanished):
                    yield read_batch
                    start = end
            except _Vanished as error:
                if error.segment == vanished:  # the file is still listed, but still missing
                    last = min(vanished.last, stop - 1)
                    raise reply_errors.records_lost(self.stream, start, last) from None
                vanished = error.segment

    def _deferred_batches(
        self, start: int, stop: int, columns: Sequence[str] | None, vanished: Segment | None
    ) -> Iterator[tuple[int, DeferredBatch]]:
        """Yield, for each batch, the offset after it and the function that reads it."""
        for span in self.spans(stop, start):
            if span.first > start:
                raise reply_errors.records_lost(self.stream, start, span.first - 1)
            file = self._checked(span, partial(self._open, span.segment))
            file.close_when_unused()  # the batches may be read later, or dropped
            while start < span.stop:
                group = file.group_of(start)
                end = min(file.edges[group + 1], span.stop)
                yield end, partial(self._read_batch, file, span, start, end, columns, vanished)
                start = end
        if start < stop:
            raise reply_errors.records_lost(self.stream, start, stop - 1)

    def _read_batch(
        self,
        file: SegmentFile,
        span: Span,
        start: int,
        end: int,
        columns: Sequence[str] | None,
        vanished: Segment | None,
    ) -> pa.RecordBatch:
        """Read the records from ``start`` to ``end`` - 1, which are in one row group."""
        group = file.group_of(start)
        first = file.edges[group]
        part = Span(max(first, span.first), end, span.segment)
        try:
            batch = self._checked(part, partial(file.read, group, columns))
        except _Vanished:
            if span.segment == vanished:  # the file is still listed, but cannot be read
                raise reply_errors.records_lost(self.stream, start, end - 1) from None
            # The file was compacted or deleted while it was open. List the segments again.
            again = self.deferred_batches(start, end, columns, vanished=span.segment)
            return pa.concat_batches([read_batch() for read_batch in again])
        return batch.slice(start - first, end - start)

    def row_group_ends(self, offsets: Sequence[int], end: int) -> list[int]:
        """Return the end of each offset's row group, or the offset itself if none can be found.

        Raises:
            StoreUnavailable: A file cannot be read.
        """
        table = self.table()
        return [self._row_group_end(table.spans(end, offset)[:1], offset) for offset in offsets]

    def _row_group_end(self, spans: list[Span], offset: int) -> int:
        for span in spans:
            if span.first <= offset:
                try:
                    with self._opened(span) as file:
                        return min(int(file.edges[file.group_of(offset) + 1]), span.stop)
                except (_Vanished, CorruptSegment):
                    pass  # the file was just merged, or its reader will get the error
        return offset

    def locate(self, ms: int, start: int, stop: int) -> int:
        """See ``RingbufferStore.locate``. Find the span, then the row group, then the record."""
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
        spans = self.spans(stop, start)
        if start < stop and (not spans or spans[0].first > start):
            last = spans[0].first - 1 if spans else stop - 1
            raise reply_errors.records_lost(self.stream, start, last)
        late = bisect_left(spans, True, key=lambda span: self._last_appended(span) >= ms)
        if late == len(spans):
            return stop
        span = spans[late]
        with self._opened(span) as file:
            groups = range(file.group_of(span.first), file.group_of(span.stop - 1) + 1)
            # Search all row groups but the last, which may be only partly live.
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
        return self._checked(span, partial(file.appended, group))

    def _open(self, segment: Segment) -> SegmentFile:
        return SegmentFile(self.storage.open(self.path(segment.name)), segment)

    @contextmanager
    def _opened(self, span: Span) -> Iterator[SegmentFile]:
        file = self._checked(span, lambda: self._open(span.segment))
        try:
            yield file
        finally:
            file.close()

    def _checked(self, span: Span, work: Callable[[], _T]) -> _T:
        """Call ``work``, which reads a file; distinguish damage from a temporary failure."""
        try:
            return work()
        except FileNotFoundError:
            raise _Vanished(span.segment) from None
        except BAD_BYTES as error:
            raise self._diagnose(span, error) from error

    def _diagnose(self, span: Span, failure: BaseException) -> MeteorError:
        """Return the error to raise after ``failure``.

        Check the whole file, because pyarrow raises the same errors for damage and for a lost
        connection.
        """
        name = span.segment.name
        with unavailable(self.stream, self.location, "read"):
            data = self.storage.read(self.path(name))
        if data is None:
            raise _Vanished(span.segment)
        problem = examine(data, span.segment)
        if problem is None:
            return store_unavailable(self.stream, self.location, "read", failure)
        file = f"{self.stream}/{self.path(name)}"
        return corrupt_segment(self.stream, span.first, span.stop - 1, file, problem)
