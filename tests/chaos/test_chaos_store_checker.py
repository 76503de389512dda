"""The checker of chaos runs with a store, on hand-made histories."""

from __future__ import annotations

import pytest

from tests.chaos.archiving import UNAVAILABLE
from tests.chaos.reading import span_of
from tests.chaos.stored import KEPT_NS, MERGING
from tests.chaos.story import Story
from tests.chaos.violation import Violation, Wrong

#: The ring keeps two records, and up to four more that wait for the archiver.
CAPACITY, UNARCHIVED = 2, 4
VALUES = [f"p-{n}" for n in range(6)]
OLD, NEW = 10, 20


class StoreStory(Story):
    """A story with archivers and files."""

    def append(self, who: str, term: int, first: int, last: int, *, done: bool = True) -> None:
        self.add("append", who=who, term=term, first=first, last=last)
        if done:
            self.add("appended", who=who, term=term, first=first, last=last)

    def archived(self, archived: int, end: int = 6, first: int = 0) -> None:
        """Add a sample."""
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
        """Read the log from 0, and the files that begin at these offsets."""
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
    ) -> set[Wrong]:
        return super().kinds(capacity, max_unarchived)


@pytest.fixture
def story() -> StoreStory:
    """Six records: a first archiver has archived two of them, a second two more."""
    story = StoreStory()
    story.publish(*VALUES[:4], at=0)
    story.sample(0, 4, archived=0)
    story.append("a1", OLD, 0, 1)
    story.sample(0, 4, first=2, archived=2)
    story.publish(*VALUES[4:], at=4)
    story.assigned("m1", 5, 0)
    story.deliver("m1", 5, 0, *VALUES)
    story.confirm("m1", 5, 6)
    story.append("a1", OLD, 2, 4, done=False)  # killed
    story.append("a2", NEW, 2, 3)
    story.append("a2", NEW, 4, 5)
    story.archived(4, first=3)
    return story


def test_correct_history_is_clean(story: StoreStory) -> None:
    story.listed("0-1", "2-3", before=4, after=6)
    story.finish(0, 2, 4)
    assert story.found() == []


def test_dropped_records_are_a_violation_without_a_store(story: StoreStory) -> None:
    story.finish(0, 2, 4)
    assert story.kinds(None, None) == {Wrong.OVERTRIMMED}


# The samples


def test_ring_that_drops_unarchived_records_is_found(
    story: StoreStory,
) -> None:
    story.archived(4, first=5)
    story.finish(0, 2, 4)
    assert story.kinds() == {Wrong.UNARCHIVED, Wrong.OVERTRIMMED}
    assert story.kinds(1) == {Wrong.UNARCHIVED}


def test_archived_offset_that_decreases_is_found(story: StoreStory) -> None:
    story.archived(2, first=2)
    story.finish(0, 2, 4)
    assert story.kinds() >= {Wrong.WENT_BACK}


def test_archived_offset_above_the_end_is_found(story: StoreStory) -> None:
    story.append("a2", NEW, 6, 6)
    story.archived(7, first=4)
    assert Wrong.PHANTOM in story.kinds()


def test_too_many_unarchived_records_are_found(story: StoreStory) -> None:
    story.finish(0, 2, 4)
    assert story.kinds(max_unarchived=3) == {Wrong.OVERGROWN}
    for event in story.events:
        event.waiting = 1  # one large frame
    assert story.kinds(max_unarchived=3) == set()


def test_archivers_that_do_not_reach_the_end_are_not_drained(story: StoreStory) -> None:
    story.add("healed")
    story.archived(4, first=4)
    story.log(*VALUES)
    assert story.kinds() == {Wrong.NOT_DRAINED}


# Commits


def test_commit_before_the_append_is_found(story: StoreStory) -> None:
    story.append("a3", 30, 6, 7, done=False)
    story.archived(8, end=8, first=6)
    story.add("appended", who="a3", term=30, first=6, last=7)
    assert Wrong.STALE_COMMIT in story.kinds()


def test_commit_of_an_older_term_is_stale_once_a_newer_one_has_appended() -> None:
    story = StoreStory()
    story.append("a1", OLD, 0, 3)
    story.append("a2", NEW, 0, 1)
    story.sample(0, 4, archived=0)
    assert story.kinds() == set()
    story.sample(0, 4, archived=4)
    assert story.kinds() == {Wrong.STALE_COMMIT}


def test_commit_of_an_older_term_before_the_newer_has_begun_is_not_stale() -> None:
    story = StoreStory()
    story.append("a1", OLD, 0, 4)
    story.sample(0, 6, archived=5)
    story.append("a2", NEW, 5, 5)
    story.sample(0, 6, archived=5)
    story.sample(0, 6, archived=6)
    assert story.kinds() == set()


def test_slow_sample_may_show_the_earlier_state() -> None:
    story = StoreStory()
    story.append("a1", OLD, 0, 4)
    began = story.now
    story.append("a1", OLD, 5, 5)
    story.append("a2", NEW, 6, 6)
    story.add("sample", began=began, first=0, last=7, archived=5)
    assert story.kinds() == set()


# Files


def test_listing_with_a_hole_is_found(story: StoreStory) -> None:
    story.listed("0-1", "4-5")
    story.finish(0, 2, 4)
    assert story.kinds() == {Wrong.LOST}


def test_listing_of_overlapping_files_is_found(story: StoreStory) -> None:
    story.listed("0-3", "2-5")
    story.finish(0, 2, 4)
    assert story.kinds() == {Wrong.DUPLICATED}


def test_listing_that_ends_too_soon_is_found(story: StoreStory) -> None:
    story.listed("0-1", "2-3")
    story.finish(0, 2, 4)
    assert story.kinds() == {Wrong.LOST}


def test_listing_of_unarchived_records_is_found(story: StoreStory) -> None:
    story.listed("0-1", "2-4", before=2, after=4)
    story.finish(0, 2, 4)
    assert story.kinds() == {Wrong.PHANTOM}


def test_archived_record_in_no_file_is_lost(story: StoreStory) -> None:
    story.finish(0, 4)
    story.events = [event for event in story.events if event.text != "file-0"]
    assert story.kinds() == {Wrong.LOST}


def test_record_in_two_files_is_duplicated(story: StoreStory) -> None:
    story.finish(0, 2, 4)
    story.file(3, VALUES[3])
    assert story.kinds() == {Wrong.DUPLICATED}


def test_file_that_differs_from_the_log_is_found(story: StoreStory) -> None:
    story.finish(0, 4)
    story.events[-1].values[0] = VALUES[5]
    assert story.kinds() == {Wrong.TWO_PAYLOADS}


def test_file_of_unarchived_records_is_found(story: StoreStory) -> None:
    story.finish(0, 2, 4)
    story.file(6, "p-6")
    assert story.kinds() == {Wrong.PHANTOM}


def test_flaw_is_reported(story: StoreStory) -> None:
    story.finish(0, 2, 4)
    story.add("flaw", first=2, last=3, text="corrupt")
    assert story.kinds() == {Wrong.DAMAGED}


def test_file_name_contains_its_offsets() -> None:
    assert span_of(f"/a/b-1/{7:020d}-{12:020d}-17-0badcafe.parquet") == "7-12"


# Readers


def test_gap_is_wrong_with_a_store(story: StoreStory) -> None:
    story.add("missing", who="m2", group="g", term=6, first=0, last=1)
    story.finish(0, 2, 4)
    assert story.kinds() == {Wrong.WRONG_GAP}


def test_record_read_twice_is_found(story: StoreStory) -> None:
    story.add("reading", who="r1", first=2)
    story.add("seen", who="r1", first=2, values=VALUES[2:4])
    story.add("seen", who="r1", first=3, values=VALUES[3:5])
    story.finish(0, 2, 4)
    assert story.kinds() == {Wrong.DUPLICATED}


@pytest.mark.parametrize("skipped", [0, 3])
def test_record_missed_by_a_reader_is_found(story: StoreStory, skipped: int) -> None:
    story.add("reading", who="r1", first=0)
    for offset, value in enumerate(VALUES):
        if offset != skipped:
            story.add("seen", who="r1", first=offset, values=[value])
    story.finish(0, 2, 4)
    assert story.kinds() == {Wrong.SKIPPED}


def test_log_that_does_not_begin_at_offset_0_is_found(story: StoreStory) -> None:
    story.finish(0, 2, 4)
    (log,) = [event for event in story.events if event.kind == "log"]
    log.first, log.values = 1, log.values[1:]
    assert story.kinds() >= {Wrong.SKIPPED, Wrong.LOST}


# A store that cannot be read


def test_hidden_store_may_be_unavailable(story: StoreStory) -> None:
    assert len(UNAVAILABLE) == 2
    asked = story.now
    story.add("hidden")
    story.unavailable()
    story.add("shown")
    story.unavailable(began=asked)  # the error arrived late
    story.finish(0, 2, 4)
    assert story.found() == []


def test_visible_store_must_be_available(story: StoreStory) -> None:
    story.unavailable()
    story.add("hidden")
    story.add("shown")
    story.finish(0, 2, 4)
    story.unavailable(began=story.now + 2 * KEPT_NS)
    story.events[-1].t += 2 * KEPT_NS
    assert [violation.kind for violation in story.found()] == [Wrong.UNEXPECTED] * 2


def test_files_must_be_listable_except_during_a_merge(story: StoreStory) -> None:
    story.unavailable(f"The store {MERGING} that a file holds counts")
    story.finish(0, 2, 4)
    assert story.kinds() == {Wrong.UNEXPECTED}
    story.add("compacted", who="a1")
    assert story.found() == []
