"""Each offset is read from the right segment, whatever archivers do and wherever they crash.

Segment names alone determine which records are live, so the model needs no files. `MemoryLog` is a
segment log whose files are tables in memory; everything else about it is real. Hypothesis simulates
the stream, its failovers, and any number of archivers and compactors, some of which act too late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from meteor_py.store import maintenance
from meteor_py.store.segment import Segment, Span, live_spans
from meteor_py.store.segment_file import SegmentFile
from meteor_py.store.segment_log import SegmentLog
from meteor_py.store.storage import Entry
from meteor_py.testing.store_contract import NEWEST

# Names


def test_segment_name_holds_all_its_fields() -> None:
    segment = Segment(7, 9, 1_700_000_000_000, "0badcafe")
    assert segment.name == f"{7:020d}-{9:020d}-1700000000000-0badcafe.parquet"
    assert Segment.parse(segment.name) == segment
    assert len(segment) == 3


@pytest.mark.parametrize(
    "name",
    [
        "_0123456789abcdef.tmp",
        "_store.json",
        "part-0000.parquet",
        f"{0:020d}-{9:020d}-1-0badcafe.parquet.tmp",
        f"{0:020d}-{9:020d}-1-0badcafe.parquet\n",
        f"{0:020d}-{9:020d}-1-0BADCAFE.parquet",
        f"{0:020d}-{9:020d}--1-0badcafe.parquet",
        f"{0:020d}-{9:020d}-01-0badcafe.parquet",  # not the canonical name
        f"{0:020d}-{9:020d}-١-0badcafe.parquet",  # noqa: RUF001  a digit, but not an ASCII one
        f"{9:020d}-{0:020d}-1-0badcafe.parquet",
        f"{0:020d}-{9:019d}-1-0badcafe.parquet",
        f"{0:020d}-{10**20 - 1}-1-0badcafe.parquet",  # above the highest offset
    ],
)
def test_malformed_names_are_not_parsed_as_segments(name: str) -> None:
    assert Segment.parse(name) is None


# The definition


def _segment(term: int, first: int, size: int, sha: int) -> Segment:
    return Segment(first, first + size - 1, term, f"{sha:08x}")


any_segment = st.builds(
    _segment, st.integers(1, 4), st.integers(0, 30), st.integers(1, 12), st.integers(0, 1)
)


@settings(max_examples=200)
@given(st.lists(any_segment, max_size=12, unique=True), st.none() | st.integers(0, 45))
def test_live_record_belongs_to_the_newest_term_that_begins_at_or_before_its_offset(
    segments: list[Segment], end: int | None
) -> None:
    begins = {s.term: min(t.first for t in segments if t.term == s.term) for s in segments}

    def covered(offset: int) -> int | None:
        """Return the term of the live record; None if there is none."""
        if end is not None and offset >= end:
            return None
        term = max((term for term, begin in begins.items() if begin <= offset), default=0)
        there = (s.first <= offset <= s.last for s in segments if s.term == term)
        return term if any(there) else None

    spans = live_spans(segments, end)
    found = {n: span.segment for span in spans for n in range(span.first, span.stop)}
    assert sum(span.stop - span.first for span in spans) == len(found), "spans overlap"
    assert spans == sorted(spans)
    for offset in range(50):
        segment = found.get(offset)
        assert (segment.term if segment else None) == covered(offset)
        assert segment is None or segment.first <= offset <= segment.last


@given(st.lists(any_segment, max_size=12, unique=True))
def test_no_more_segments_are_read_than_needed(segments: list[Segment]) -> None:
    spans = live_spans(segments)
    for (one, two), three in zip(pairwise(spans), spans[2:], strict=False):
        if one.segment.term == three.segment.term and one.stop == two.first:
            # No segment could follow the first and reach the third: it would replace the second.
            ends = [s.last for s in segments if s.term == one.segment.term and s.first <= one.stop]
            assert max(ends) < three.first or two.stop < three.first


# The model


class MemoryFile(SegmentFile):
    """A file with one row group, which is a batch in memory."""

    def __init__(self, segment: Segment, batch: pa.RecordBatch) -> None:
        self.segment = segment
        self.edges = [segment.first, segment.last + 1]
        self._batch = batch

    def read(self, group: int, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        return self._batch if columns is None else self._batch.select(list(columns))

    def close(self) -> None:
        pass

    def close_when_unused(self) -> None:
        pass


class Crash(Exception):
    """Raised at the point where the process dies."""


class MemoryLog(SegmentLog):
    """A segment log in memory, in which every file is old enough to be removed."""

    def __init__(self) -> None:
        self.segments_by_name: dict[str, pa.RecordBatch] = {}
        self.removals_left = math.inf
        self._numbers = count()
        storage: Any = self  # this object is its own storage
        super().__init__(storage, "s", "incarnation", "memory")

    def version(self, path: str) -> None:
        return None

    def is_newer_than_folder(self, path: str) -> bool:
        return True

    def names(self, path: str) -> list[str]:
        # Return the names in an arbitrary order, as a disk would.
        return sorted(self.segments_by_name, key=lambda name: name[::-1])

    def entries(self) -> list[Entry]:
        return [Entry(name, 1, math.inf) for name in self.names("")]

    def write(self, term: int, records: pa.Table) -> Segment:
        offsets = records.column("offset").to_pylist()
        segment = Segment(offsets[0], offsets[-1], term, f"{next(self._numbers):08x}")
        self.segments_by_name[segment.name] = records.combine_chunks().to_batches()[0]
        return segment

    def remove(self, path: str) -> None:
        if self.removals_left == 0:
            raise Crash
        self.removals_left -= 1
        del self.segments_by_name[path.removeprefix("incarnation/")]

    def _open(self, segment: Segment) -> SegmentFile:
        if segment.name not in self.segments_by_name:
            raise FileNotFoundError(segment.name)
        return MemoryFile(segment, self.segments_by_name[segment.name])

    def ids(self, span: Span) -> list[int]:
        ids: list[int] = self.segments_by_name[span.segment.name].column("id").to_pylist()
        return ids[span.first - span.segment.first : span.stop - span.segment.first]


def table(first: int, ids: list[int]) -> pa.Table:
    return pa.table({"offset": range(first, first + len(ids)), "id": ids})


@dataclass
class Paused:
    """An archiver that was replaced, and the records that it may still append."""

    term: int
    first: int
    ids: list[int]


few = st.integers(1, 8)
some = st.integers(0, 20)


class Archiving(RuleBasedStateMachine):
    """A stream, its state on the server, and a segment log."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryLog()
        self.ids = count()
        self.log: list[int] = []  # the record at each offset
        self.archived = 0
        self.expired = 0
        self.term = 1
        self.paused: list[Paused] = []
        self.merged: list[tuple[int, pa.Table]] = []
        # Whether a late write has put segments below the expired offset, where nothing is read.
        self.late_below = False

    @rule(n=few)
    def publish(self, n: int) -> None:
        self.log.extend(next(self.ids) for _ in range(n))

    @precondition(lambda self: len(self.log) > self.archived)
    @rule(n=few, lost=st.sampled_from([0, 0, 0, 1, 3, 99]), again=st.booleans())
    def archive(self, n: int, lost: int, again: bool) -> None:
        """Append and commit records; a failover may lose some or all of them."""
        first = self.archived
        ids = self.log[first : first + n]
        if again:  # repeat after an attempt with an unknown outcome
            self.store.write(self.term, table(first, ids[: len(ids) // 2 + 1]))
        self.store.write(self.term, table(first, ids))
        self.archived = max(first + len(ids) - lost, first)
        if lost:
            self.term += 1

    @precondition(lambda self: self.paused)
    @rule(data=st.data())
    def append_late(self, data: st.DataObject) -> None:
        """Append for a term that has ended. The server would refuse the commit."""
        late = self.paused.pop(data.draw(st.integers(0, len(self.paused) - 1)))
        self.store.write(late.term, table(late.first, late.ids))
        self.late_below = self.late_below or late.first < self.expired

    @rule(n=few, back=some, kept=st.none() | st.integers(0, 3))
    def begin_a_term(self, n: int, back: int, kept: int | None) -> None:
        """Pause the archiver, which keeps the records that it has gathered; let another take over.

        With `kept`, simulate a failover: the server loses its last commits, and keeps at most
        `kept` records after the last remaining commit.
        """
        gathered = self.log[self.archived : self.archived + n]
        if gathered:
            self.paused.append(Paused(self.term, self.archived, gathered))
        self.term += 1
        if kept is not None:
            self.archived = max(self.archived - back, self.expired)
            del self.log[self.archived + kept :]

    @rule(records=st.integers(1, 30))
    def compact(self, records: int) -> None:
        maintenance.compact(self.store, self.expired, self.archived, records, 1_000, None)

    @precondition(lambda self: self.store.spans(self.archived))
    @rule(data=st.data())
    def start_compacting(self, data: st.DataObject) -> None:
        """Read some adjacent segments, to write them as one later."""
        spans = [span for span in self.store.spans(self.archived) if span.first >= self.expired]
        if not spans:
            return
        first = data.draw(st.integers(0, len(spans) - 1))
        run = spans[first : data.draw(st.integers(first + 1, len(spans)))]
        table = pa.Table.from_batches(self.store.read(run[0].first, run[-1].stop))
        self.merged.append((max(span.segment.term for span in run), table))

    @precondition(lambda self: self.merged)
    @rule()
    def finish_compacting(self) -> None:
        term, table = self.merged.pop(0)
        self.store.write(term, table)
        self.late_below = self.late_below or table.column("offset")[0].as_py() < self.expired

    @rule()
    def tidy(self) -> None:
        maintenance.mend(self.store, self.archived)
        maintenance.sweep(self.store, NEWEST, self.archived, lambda: True)
        spans = self.store.spans(self.archived)
        assert all(span.exact for span in spans)
        assert {span.segment.name for span in spans} == set(self.store.segments_by_name)

    @rule(ahead=some)
    def tidy_in_vain(self, ahead: int) -> None:
        """Tidy as an archiver that was replaced and has an outdated end. It must do no harm."""
        maintenance.mend(self.store, self.archived + ahead)
        maintenance.sweep(self.store, NEWEST, self.archived + ahead, lambda: False)

    @rule(n=some, removals=st.sampled_from([math.inf, 0, 1, 2]))
    def expire(self, n: int, removals: float) -> None:
        wanted = min(self.expired + n, self.archived)
        stops = (span.stop for span in self.store.spans() if span.stop <= wanted)
        self.expired = max(self.expired, *stops, 0)
        self.store.removals_left = removals
        try:
            maintenance.remove_below(self.store, self.expired)
        except Crash:
            pass
        self.store.removals_left = math.inf

    @invariant()
    def each_offset_is_read_from_the_right_segment(self) -> None:
        batches = self.store.read(self.expired, self.archived)
        found = [id_ for batch in batches for id_ in batch.column("id").to_pylist()]
        assert found == self.log[self.expired : self.archived]

    @invariant()
    def no_lost_record_is_revived(self) -> None:
        """Expired offsets that can still be read also have the right records."""
        for span in self.store.spans(self.archived):
            if not self.late_below:
                assert self.store.ids(span) == self.log[span.first : span.stop]

    @invariant()
    def the_bounds_cover_the_live_records(self) -> None:
        spans = self.store.spans()
        if self.archived > self.expired:
            assert spans[0].first <= self.expired
            assert spans[-1].stop >= self.archived


def test_interrupted_removal_does_not_revive_superseded_records() -> None:
    for removals in range(4):
        store = MemoryLog()
        store.write(3, table(0, [30, 31, 32]))
        store.write(3, table(3, [33, 34]))
        store.write(2, table(0, [20, 21, 22, 23]))  # too late: superseded
        store.removals_left = removals
        try:
            maintenance.remove_below(store, 3)
        except Crash:
            pass
        found = [id_ for span in store.spans() for id_ in store.ids(span)]
        assert found in ([30, 31, 32, 33, 34], [33, 34])


def test_each_offset_is_read_from_the_right_segment_whatever_archivers_do() -> None:
    run_state_machine_as_test(
        Archiving, settings=settings(max_examples=120, stateful_step_count=40)
    )
