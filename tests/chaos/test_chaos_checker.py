"""The checker of chaos runs finds every violation in hand-made histories, and no others."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.chaos import history
from tests.chaos.history import Writer, payload, value_of
from tests.chaos.story import GROUP, Story
from tests.chaos.violation import KEPT, Wrong


@pytest.fixture
def story() -> Story:
    """Six records; a group member has received three of them and confirmed two."""
    story = Story()
    story.publish("p-0", "p-1", at=0)
    story.publish("p-2", at=2)
    story.sample(0, 3)
    story.publish("p-3", "p-4", "p-5", at=3)
    story.assigned("m1", 10, 0)
    story.deliver("m1", 10, 0, "p-0", "p-1")
    story.confirm("m1", 10, 2)
    story.deliver("m1", 10, 2, "p-2")
    story.sample(2, 6)
    return story


def finish(story: Story) -> None:
    """A second member takes over and drains the group, and the log is read."""
    story.assigned("m2", 20, 2)
    story.deliver("m2", 20, 2, "p-2", "p-3", "p-4", "p-5")
    story.confirm("m2", 20, 6)
    story.add("healed")
    story.sample(6, 6)
    story.log("p-0", "p-1", "p-2", "p-3", "p-4", "p-5")


def test_correct_history_is_clean(story: Story) -> None:
    finish(story)
    assert story.found() == []


def test_order_of_events_does_not_matter(story: Story, rng: random.Random) -> None:
    finish(story)
    rng.shuffle(story.events)
    assert story.found() == []


def test_unknown_outcomes_and_refused_confirms_are_no_violations(story: Story) -> None:
    # One unknown record is in the log, the other is not.
    story.add("publish", who="q", values=["q-0", "q-1"])
    story.add("unknown", who="q", values=["q-0", "q-1"])
    story.add("publish", who="q", values=["q-2"])
    story.add("failed", who="q", values=["q-2"])
    story.ask("m1", 10, 3, number=99)  # killed before the reply: the confirm may have been executed
    story.assigned("m2", 20, 3)
    story.ask("m1", 10, 3, number=100)
    story.add("refused", group=GROUP, who="m1", term=10, first=3, number=100)
    story.deliver("m2", 20, 3, "p-3", "p-4", "p-5", "q-1")
    story.confirm("m2", 20, 7)
    story.add("healed")
    story.sample(7, 7)
    story.log("p-0", "p-1", "p-2", "p-3", "p-4", "p-5", "q-1")
    assert story.found() == []


# The log


def test_acknowledged_record_missing_from_the_log_is_lost(story: Story) -> None:
    story.publish("p-6", at=6)
    finish(story)
    assert story.kinds() == {Wrong.LOST}


def test_acknowledged_record_at_another_offset_is_found(story: Story) -> None:
    story.add("publish", who="q", values=["q-0"])
    story.add("acked", who="q", values=["q-0"], offsets=[4])
    finish(story)
    assert Wrong.TWO_PAYLOADS in story.kinds()


def test_payload_at_two_offsets_is_duplicated(story: Story) -> None:
    finish(story)
    story.log("p-5", first=6)
    assert story.kinds() == {Wrong.DUPLICATED}


def test_unpublished_record_is_a_phantom(story: Story) -> None:
    finish(story)
    story.log("x-0", first=6)
    assert story.kinds() == {Wrong.PHANTOM}


def test_failed_record_in_the_log_is_a_phantom(story: Story) -> None:
    story.add("publish", who="q", values=["q-0"])
    story.add("failed", who="q", values=["q-0"])
    finish(story)
    story.log("q-0", first=6)
    assert story.kinds() == {Wrong.PHANTOM}


def test_offset_with_two_payloads_is_found(story: Story) -> None:
    story.add("seen", who="reader", first=4, values=["p-3"])
    finish(story)
    assert Wrong.TWO_PAYLOADS in story.kinds()


def test_records_out_of_their_publishers_order_are_reordered() -> None:
    story = Story()
    story.add("publish", who="q", values=["q-0", "q-1"])
    story.log("q-1", "q-0")
    assert story.kinds() == {Wrong.REORDERED}


def test_record_before_one_acknowledged_earlier_is_reordered() -> None:
    story = Story()
    story.publish("p-0", at=1)
    story.add("publish", who="q", values=["q-0"])
    story.log("q-0", "p-0")
    assert story.kinds() == {Wrong.REORDERED}


def test_hole_in_the_log_is_found(story: Story) -> None:
    finish(story)
    story.add("publish", who="q", values=["q-0"])
    story.log("q-0", first=8)
    assert story.kinds() == {Wrong.SKIPPED}


# Deliveries


def test_offset_delivered_twice_in_a_term_is_duplicated(story: Story) -> None:
    story.deliver("m1", 10, 2, "p-2")
    finish(story)
    assert story.kinds() == {Wrong.DUPLICATED}


def test_offset_delivered_in_two_terms_is_no_violation(story: Story) -> None:
    finish(story)
    assert story.found() == []  # offset 2 is in both terms


def test_delivery_before_the_start_of_its_term_is_reordered(story: Story) -> None:
    finish(story)
    story.deliver("m2", 20, 1, "p-1")
    assert story.kinds() == {Wrong.REORDERED}


def test_hole_inside_a_term_is_skipped(story: Story) -> None:
    story.deliver("m1", 10, 4, "p-4")
    finish(story)
    assert story.kinds() == {Wrong.SKIPPED}


def test_term_that_begins_above_the_confirmed_offset_skips_records(story: Story) -> None:
    story.assigned("m2", 20, 3)
    story.deliver("m2", 20, 3, "p-3")
    assert story.kinds() >= {Wrong.SKIPPED}


def test_term_that_begins_below_the_confirmed_offset_is_found(story: Story) -> None:
    story.deliver("m2", 20, 1, "p-1")
    story.log("p-0", "p-1", "p-2", "p-3", "p-4", "p-5")
    assert story.kinds() == {Wrong.WENT_BACK}


def test_delivery_that_differs_from_the_log_is_found(story: Story) -> None:
    story.deliver("m1", 10, 3, "p-4")
    finish(story)
    assert story.kinds() == {Wrong.TWO_PAYLOADS}


def test_delivery_missing_from_the_log_is_lost(story: Story) -> None:
    finish(story)
    story.deliver("m2", 20, 6, "p-6")
    assert story.kinds() == {Wrong.LOST}


def test_records_confirmed_but_never_delivered_are_skipped(story: Story) -> None:
    story.assigned("m2", 20, 2)
    story.confirm("m2", 20, 6)
    story.add("healed")
    story.sample(6, 6)
    story.log("p-0", "p-1", "p-2", "p-3", "p-4", "p-5")
    assert story.kinds() == {Wrong.SKIPPED}


# Terms and confirms


def test_two_members_in_one_term_are_two_owners(story: Story) -> None:
    story.assigned("m3", 10, 2)
    finish(story)
    assert story.kinds() == {Wrong.TWO_OWNERS}


def test_confirm_of_an_older_term_after_a_newer_began_is_stale(story: Story) -> None:
    finish(story)
    story.confirm("m1", 10, 3)
    assert Wrong.STALE_CONFIRM in story.kinds()


def test_late_confirm_without_a_reply_is_stale(story: Story) -> None:
    story.ask("m1", 10, 3, number=7)
    story.assigned("m2", 20, 2)
    story.sample(2, 6)
    story.sample(3, 6)
    story.log("p-0", "p-1", "p-2", "p-3", "p-4", "p-5")
    assert story.kinds() == {Wrong.STALE_CONFIRM}


@pytest.mark.parametrize("other", ["none", "unknown", "unanswered"])
def test_refused_confirm_that_took_effect_is_a_false_refusal(story: Story, other: str) -> None:
    story.ask("m1", 10, 3, number=99)
    story.add("refused", group=GROUP, who="m1", term=10, first=3, number=99, text="LeaseLost")
    if other != "none":  # another confirm explains where the next term begins
        story.ask("m1", 10, 3, number=100)
    if other == "unknown":
        story.add("refused", group=GROUP, who="m1", term=10, number=100, text="OutcomeUnknown")
    story.assigned("m2", 20, 3)
    assert (Wrong.FALSE_REFUSAL in story.kinds()) == (other == "none")


def test_confirm_requested_before_the_newer_term_is_not_stale(story: Story) -> None:
    asked = story.ask("m1", 10, 3, number=7)
    story.assigned("m2", 20, 3)
    story.done("m1", 10, 3, number=7, began=asked.t)  # the reply was late
    story.log("p-0", "p-1", "p-2", "p-3", "p-4", "p-5")
    assert story.found() == []


def test_repeated_confirm_is_not_stale(story: Story) -> None:
    finish(story)
    story.confirm("m1", 10, 2)
    assert story.found() == []


def test_batch_requested_after_a_newer_term_began_is_stale(story: Story) -> None:
    asked = story.now
    finish(story)
    story.deliver("m1", 10, 3, "p-3", began=asked)
    assert story.found() == []
    story.deliver("m1", 10, 4, "p-4")
    assert story.kinds() == {Wrong.STALE_DELIVERY}


def test_confirm_with_a_lower_result_is_found(story: Story) -> None:
    story.confirm("m1", 10, 3, result=1)
    finish(story)
    assert story.kinds() >= {Wrong.WENT_BACK}


def test_confirmed_offset_that_decreases_is_found(story: Story) -> None:
    story.sample(1, 6)
    finish(story)
    assert story.kinds() == {Wrong.WENT_BACK}


def test_lost_acknowledged_confirm_is_found(story: Story) -> None:
    story.confirm("m1", 10, 3)
    story.sample(2, 6)
    assert Wrong.WENT_BACK in story.kinds()


def test_confirmed_offset_that_no_member_requested_skips_records(story: Story) -> None:
    story.sample(5, 6)
    story.log("p-0", "p-1", "p-2", "p-3", "p-4", "p-5")
    assert Wrong.SKIPPED in story.kinds()


def test_group_that_does_not_reach_the_end_is_not_drained(story: Story) -> None:
    story.add("healed")
    story.sample(2, 6)
    story.log("p-0", "p-1", "p-2", "p-3", "p-4", "p-5")
    assert story.kinds() == {Wrong.NOT_DRAINED}


# Gaps and the ring


def overtaken(story: Story, gone_to: int, end: int = 6, first: int = 4) -> None:
    """A ring of two records; the second member gets a gap from 2 on."""
    story.assigned("m2", 20, 2)
    story.gap("m2", 20, 2, gone_to)
    story.sample(gone_to + 1, end, first=first)
    rest = [f"p-{n}" for n in range(gone_to + 1, 6)]
    story.deliver("m2", 20, gone_to + 1, *rest)
    story.confirm("m2", 20, 6)
    story.add("healed")
    story.sample(6, 6, first=first)
    story.add("seen", who="reader", first=0, values=["p-0", "p-1", "p-2", "p-3"])
    story.log("p-4", "p-5", first=4)


def test_gap_of_records_that_a_small_ring_dropped_is_no_violation(story: Story) -> None:
    overtaken(story, gone_to=3)
    assert story.found(capacity=2) == []


def test_record_missing_from_a_small_ring_is_lost(story: Story) -> None:
    story.publish("p-6", at=6)
    overtaken(story, gone_to=3)
    assert Wrong.LOST in story.kinds(capacity=2)


def test_records_that_the_recorder_missed_too_are_not_judged(
    story: Story,
) -> None:
    overtaken(story, gone_to=3)
    story.events = [event for event in story.events if event.kind != "seen"]
    assert Wrong.LOST in story.kinds(capacity=2)
    story.add("gap", who="reader", first=0, last=3)
    assert story.found(capacity=2) == []


def test_gap_of_records_that_the_ring_must_hold_is_wrong(story: Story) -> None:
    overtaken(story, gone_to=4)
    assert story.kinds(capacity=2) == {Wrong.WRONG_GAP}


def test_any_gap_is_wrong_if_the_ring_is_not_trimmed(story: Story) -> None:
    overtaken(story, gone_to=3)
    assert Wrong.WRONG_GAP in story.kinds()


def test_hole_that_a_gap_covers_only_in_part_is_skipped(story: Story) -> None:
    story.assigned("m2", 20, 2)
    story.gap("m2", 20, 2, 2)
    story.deliver("m2", 20, 4, "p-4", "p-5")
    story.log("p-4", "p-5", first=4)
    assert Wrong.SKIPPED in story.kinds(capacity=2)


def test_ring_that_holds_less_than_its_capacity_is_overtrimmed(story: Story) -> None:
    overtaken(story, gone_to=3, first=5)
    assert story.kinds(capacity=2) == {Wrong.OVERTRIMMED}


def test_unexplained_errors_and_truncations_are_found(story: Story) -> None:
    story.add("error", who="m1", group=GROUP, text="ValueError: what is this")
    story.add("truncated", who="m1", group=GROUP, first=3, last=4)
    finish(story)
    assert story.kinds() == {Wrong.UNEXPECTED, Wrong.LOST}


# The report


def test_violation_shows_the_events_around_it(story: Story) -> None:
    story.add("fault", who="nemesis", text="pause m1")
    finish(story)
    story.confirm("m1", 10, 3)
    (stale,) = [each for each in story.found() if each.kind is Wrong.STALE_CONFIRM]
    assert "m1 confirmed 3 in term 10" in str(stale)
    assert any("pause m1" in line for line in stale.around)
    assert any("assigned m2" in line for line in stale.around)


def test_many_violations_of_a_kind_are_counted(story: Story) -> None:
    finish(story)
    story.log(*(f"x-{n}" for n in range(100)), first=6)
    *_, last = story.found()
    assert last.text == f"{100 - KEPT} more of this kind"


def test_long_history_is_checked_in_seconds() -> None:
    story = Story()
    for n in range(0, 100_000, 10):
        values = [f"p-{k}" for k in range(n, n + 10)]
        story.publish(*values, at=n)
        story.deliver("m1", 10, n, *values)
        story.confirm("m1", 10, n + 10)
        story.log(*values, first=n)
    assert story.found() == []


# Files and payloads


def test_events_round_trip_through_a_file(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.jsonl")
    other = Writer(tmp_path / "b.jsonl")
    written = [
        writer.add("publish", who="p", values=["p-0"]),
        other.add("sample", confirmed={"g": 3}, first=0, last=9),
        writer.add("acked", who="p", values=["p-0"], offsets=[0]),
    ]
    writer.close()
    other.close()
    assert history.read(tmp_path) == written


def test_torn_last_line_of_a_killed_process_is_ignored(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.jsonl")
    whole = writer.add("publish", who="p", values=["p-0"])
    writer.add("publish", who="p", values=["p-1"])
    writer.close()
    path = tmp_path / "a.jsonl"
    os.truncate(path, path.stat().st_size - 5)
    assert history.read_file(path) == [whole]


def test_payload_names_its_author_and_reveals_damage() -> None:
    for counter in (0, 1, 98, 99, 100, 123_456):
        assert value_of(payload("p1-2", counter)) == f"p1-2-{counter}"
        assert history.author(f"p1-2-{counter}") == ("p1-2", counter)
    assert value_of(payload("p", 98)[:-1]).startswith("corrupt")
    assert value_of(payload("p", 98) + b"x").startswith("corrupt")
    assert value_of(b"\xff\x00").startswith("corrupt")
