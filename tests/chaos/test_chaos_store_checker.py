"""The chaos checker for runs with a store judges hand-made histories correctly."""

from __future__ import annotations

import pytest

from tests.chaos.archiving import UNAVAILABLE
from tests.chaos.history_builder import HistoryBuilder
from tests.chaos.reading import span_of
from tests.chaos.stored import KEPT_NS, MERGING
from tests.chaos.violation import Violation, ViolationKind

#: The ring keeps two records, and up to four more that wait for the archiver.
CAPACITY, UNARCHIVED = 2, 4
VALUES = [f"p-{n}" for n in range(6)]
OLD, NEW = 10, 20


class StoreHistoryBuilder(HistoryBuilder):
    """Builds histories with archivers and files."""

    def append(self, who: str, term: int, first: int, last: int, *, done: bool = True) -> None:
        self.add("append", who=who, term=term, first=first, last=last)
        if done:
            self.add("appended", who=who, term=term, first=first, last=last)

    def archived(self, archived: int, end: int = 6, first: int = 0) -> None:
        """Add a sample in which records below ``archived`` are archived."""
        self.sample(6, end, first=first, archived=archived)

    def listed(self, *spans: str, before: int = 6, after: int = 6) -> None:
        self.add("listed", who="r1", first=before, last=after, values=list(spans))

    def file(self, first: int, *values: str) -> None:
        offsets = list(range(first, first + len(values)))
        self.add("stored", offsets=offsets, values=list(values), text=f"file-{first}")

    def unavailable(self, text: str = "the store is missing", began: int = -1) -> None:
        began = self.now if began < 0 else began
        self.add("unavailable", who="r1", began=began, text=text)

    def finish(self, *files: int) -> None:
        """Record the log from offset 0, and the files that begin at these offsets."""
        self.add("healed")
        self.archived(6, first=4)
        self.add("reading", who="log", first=0)
        self.add("log", who="log", first=0, values=VALUES)
        self.add("archived", last=6)
        for first, stop in zip(files, [*files[1:], 6], strict=True):
            self.file(first, *VALUES[first:stop])

    def found(
        self, capacity: int | None = CAPACITY, max_unarchived: int | None = UNARCHIVED
    ) -> list[Violation]:
        return super().found(capacity, max_unarchived)

    def kinds(
        self, capacity: int | None = CAPACITY, max_unarchived: int | None = UNARCHIVED
    ) -> set[ViolationKind]:
        return super().kinds(capacity, max_unarchived)


@pytest.fixture
def builder() -> StoreHistoryBuilder:
    """Six records: a first archiver has archived two of them, a second two more."""
    builder = StoreHistoryBuilder()
    builder.publish(*VALUES[:4], at=0)
    builder.sample(0, 4, archived=0)
    builder.append("a1", OLD, 0, 1)
    builder.sample(0, 4, first=2, archived=2)
    builder.publish(*VALUES[4:], at=4)
    builder.assigned("m1", 5, 0)
    builder.deliver("m1", 5, 0, *VALUES)
    builder.confirm("m1", 5, 6)
    builder.append("a1", OLD, 2, 4, done=False)  # a1 was killed during this append
    builder.append("a2", NEW, 2, 3)
    builder.append("a2", NEW, 4, 5)
    builder.archived(4, first=3)
    return builder


def test_correct_history_is_clean(builder: StoreHistoryBuilder) -> None:
    builder.listed("0-1", "2-3", before=4, after=6)
    builder.finish(0, 2, 4)
    assert builder.found() == []


def test_dropped_records_are_a_violation_without_a_store(builder: StoreHistoryBuilder) -> None:
    builder.finish(0, 2, 4)
    assert builder.kinds(None, None) == {ViolationKind.OVERTRIMMED}


# The samples


def test_ring_that_drops_unarchived_records_is_found(
    builder: StoreHistoryBuilder,
) -> None:
    builder.archived(4, first=5)
    builder.finish(0, 2, 4)
    assert builder.kinds() == {ViolationKind.UNARCHIVED, ViolationKind.OVERTRIMMED}
    assert builder.kinds(1) == {ViolationKind.UNARCHIVED}


def test_archived_offset_that_decreases_is_found(builder: StoreHistoryBuilder) -> None:
    builder.archived(2, first=2)
    builder.finish(0, 2, 4)
    assert builder.kinds() >= {ViolationKind.WENT_BACK}


def test_archived_offset_above_the_end_is_found(builder: StoreHistoryBuilder) -> None:
    builder.append("a2", NEW, 6, 6)
    builder.archived(7, first=4)
    assert ViolationKind.PHANTOM in builder.kinds()


def test_too_many_unarchived_records_are_found(builder: StoreHistoryBuilder) -> None:
    builder.finish(0, 2, 4)
    assert builder.kinds(max_unarchived=3) == {ViolationKind.OVERGROWN}
    for event in builder.events:
        event.waiting = 1  # all waiting records are in one large frame
    assert builder.kinds(max_unarchived=3) == set()


def test_archivers_that_do_not_reach_the_end_are_reported_as_not_drained(
    builder: StoreHistoryBuilder,
) -> None:
    builder.add("healed")
    builder.archived(4, first=4)
    builder.log(*VALUES)
    assert builder.kinds() == {ViolationKind.NOT_DRAINED}


# Commits


def test_commit_before_the_append_is_found(builder: StoreHistoryBuilder) -> None:
    builder.append("a3", 30, 6, 7, done=False)
    builder.archived(8, end=8, first=6)
    builder.add("appended", who="a3", term=30, first=6, last=7)
    assert ViolationKind.STALE_COMMIT in builder.kinds()


def test_commit_from_an_older_term_is_stale_once_a_newer_term_has_appended() -> None:
    builder = StoreHistoryBuilder()
    builder.append("a1", OLD, 0, 3)
    builder.append("a2", NEW, 0, 1)
    builder.sample(0, 4, archived=0)
    assert builder.kinds() == set()
    builder.sample(0, 4, archived=4)
    assert builder.kinds() == {ViolationKind.STALE_COMMIT}


def test_commit_from_an_older_term_is_not_stale_before_a_newer_term_has_begun() -> None:
    builder = StoreHistoryBuilder()
    builder.append("a1", OLD, 0, 4)
    builder.sample(0, 6, archived=5)
    builder.append("a2", NEW, 5, 5)
    builder.sample(0, 6, archived=5)
    builder.sample(0, 6, archived=6)
    assert builder.kinds() == set()


def test_slow_sample_can_show_the_earlier_state() -> None:
    builder = StoreHistoryBuilder()
    builder.append("a1", OLD, 0, 4)
    began = builder.now
    builder.append("a1", OLD, 5, 5)
    builder.append("a2", NEW, 6, 6)
    builder.add("sample", began=began, first=0, last=7, archived=5)
    assert builder.kinds() == set()


# Files


def test_listing_with_a_hole_is_found(builder: StoreHistoryBuilder) -> None:
    builder.listed("0-1", "4-5")
    builder.finish(0, 2, 4)
    assert builder.kinds() == {ViolationKind.LOST}


def test_overlapping_files_in_a_listing_are_found(builder: StoreHistoryBuilder) -> None:
    builder.listed("0-3", "2-5")
    builder.finish(0, 2, 4)
    assert builder.kinds() == {ViolationKind.DUPLICATED}


def test_listing_that_ends_too_early_is_found(builder: StoreHistoryBuilder) -> None:
    builder.listed("0-1", "2-3")
    builder.finish(0, 2, 4)
    assert builder.kinds() == {ViolationKind.LOST}


def test_unarchived_records_in_a_listing_are_found(builder: StoreHistoryBuilder) -> None:
    builder.listed("0-1", "2-4", before=2, after=4)
    builder.finish(0, 2, 4)
    assert builder.kinds() == {ViolationKind.PHANTOM}


def test_archived_record_in_no_file_is_reported_as_lost(builder: StoreHistoryBuilder) -> None:
    builder.finish(0, 4)
    builder.events = [event for event in builder.events if event.text != "file-0"]
    assert builder.kinds() == {ViolationKind.LOST}


def test_record_in_two_files_is_reported_as_duplicated(builder: StoreHistoryBuilder) -> None:
    builder.finish(0, 2, 4)
    builder.file(3, VALUES[3])
    assert builder.kinds() == {ViolationKind.DUPLICATED}


def test_file_that_differs_from_the_log_is_found(builder: StoreHistoryBuilder) -> None:
    builder.finish(0, 4)
    builder.events[-1].values[0] = VALUES[5]
    assert builder.kinds() == {ViolationKind.TWO_PAYLOADS}


def test_file_with_unarchived_records_is_found(builder: StoreHistoryBuilder) -> None:
    builder.finish(0, 2, 4)
    builder.file(6, "p-6")
    assert builder.kinds() == {ViolationKind.PHANTOM}


def test_flaw_in_the_store_is_reported(builder: StoreHistoryBuilder) -> None:
    builder.finish(0, 2, 4)
    builder.add("flaw", first=2, last=3, text="corrupt")
    assert builder.kinds() == {ViolationKind.DAMAGED}


def test_file_name_contains_its_offsets() -> None:
    assert span_of(f"/a/b-1/{7:020d}-{12:020d}-17-0badcafe.parquet") == "7-12"


# Readers


def test_any_gap_is_a_violation_with_a_store(builder: StoreHistoryBuilder) -> None:
    builder.add("missing", who="m2", group="g", term=6, first=0, last=1)
    builder.finish(0, 2, 4)
    assert builder.kinds() == {ViolationKind.WRONG_GAP}


def test_record_read_twice_is_found(builder: StoreHistoryBuilder) -> None:
    builder.add("reading", who="r1", first=2)
    builder.add("seen", who="r1", first=2, values=VALUES[2:4])
    builder.add("seen", who="r1", first=3, values=VALUES[3:5])
    builder.finish(0, 2, 4)
    assert builder.kinds() == {ViolationKind.DUPLICATED}


@pytest.mark.parametrize("skipped", [0, 3])
def test_record_missed_by_a_reader_is_found(builder: StoreHistoryBuilder, skipped: int) -> None:
    builder.add("reading", who="r1", first=0)
    for offset, value in enumerate(VALUES):
        if offset != skipped:
            builder.add("seen", who="r1", first=offset, values=[value])
    builder.finish(0, 2, 4)
    assert builder.kinds() == {ViolationKind.SKIPPED}


def test_log_that_does_not_begin_at_offset_0_is_found(builder: StoreHistoryBuilder) -> None:
    builder.finish(0, 2, 4)
    (log,) = [event for event in builder.events if event.kind == "log"]
    log.first, log.values = 1, log.values[1:]
    assert builder.kinds() >= {ViolationKind.SKIPPED, ViolationKind.LOST}


# A store that cannot be read


def test_hidden_store_may_be_unavailable(builder: StoreHistoryBuilder) -> None:
    assert len(UNAVAILABLE) == 2
    asked = builder.now
    builder.add("hidden")
    builder.unavailable()
    builder.add("shown")
    builder.unavailable(began=asked)  # the error arrived late
    builder.finish(0, 2, 4)
    assert builder.found() == []


def test_visible_store_must_be_available(builder: StoreHistoryBuilder) -> None:
    builder.unavailable()
    builder.add("hidden")
    builder.add("shown")
    builder.finish(0, 2, 4)
    builder.unavailable(began=builder.now + 2 * KEPT_NS)
    builder.events[-1].t += 2 * KEPT_NS
    assert [violation.kind for violation in builder.found()] == [ViolationKind.UNEXPECTED] * 2


def test_files_must_be_listable_except_during_a_merge(builder: StoreHistoryBuilder) -> None:
    builder.unavailable(f"The store cannot be listed at the moment: a file {MERGING}")
    builder.finish(0, 2, 4)
    assert builder.kinds() == {ViolationKind.UNEXPECTED}
    builder.add("compacted", who="a1")
    assert builder.found() == []
