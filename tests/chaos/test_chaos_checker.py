"""The chaos checker finds every violation in hand-made histories, and no others."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.chaos import history
from tests.chaos.history import Writer, payload, value_of
from tests.chaos.history_builder import GROUP, HistoryBuilder
from tests.chaos.violation import KEPT, ViolationKind


@pytest.fixture
def builder() -> HistoryBuilder:
    """Six records; a group member has received three of them and confirmed two."""
    builder = HistoryBuilder()
    builder.publish("p-0", "p-1", at=0)
    builder.publish("p-2", at=2)
    builder.sample(0, 3)
    builder.publish("p-3", "p-4", "p-5", at=3)
    builder.assigned("m1", 10, 0)
    builder.deliver("m1", 10, 0, "p-0", "p-1")
    builder.confirm("m1", 10, 2)
    builder.deliver("m1", 10, 2, "p-2")
    builder.sample(2, 6)
    return builder


def finish(builder: HistoryBuilder) -> None:
    """Have a second member take over and drain the group, and record the log."""
    builder.assigned("m2", 20, 2)
    builder.deliver("m2", 20, 2, "p-2", "p-3", "p-4", "p-5")
    builder.confirm("m2", 20, 6)
    builder.add("healed")
    builder.sample(6, 6)
    builder.log("p-0", "p-1", "p-2", "p-3", "p-4", "p-5")


def test_correct_history_is_clean(builder: HistoryBuilder) -> None:
    finish(builder)
    assert builder.found() == []


def test_order_of_events_does_not_matter(builder: HistoryBuilder, rng: random.Random) -> None:
    finish(builder)
    rng.shuffle(builder.events)
    assert builder.found() == []


def test_unknown_outcomes_and_refused_confirms_are_not_violations(builder: HistoryBuilder) -> None:
    # Of the two records with an unknown outcome, only q-1 is in the log.
    builder.add("publish", who="q", values=["q-0", "q-1"])
    builder.add("unknown", who="q", values=["q-0", "q-1"])
    builder.add("publish", who="q", values=["q-2"])
    builder.add("failed", who="q", values=["q-2"])
    # This confirm has no outcome: the member was killed, and the server may have executed it.
    builder.ask("m1", 10, 3, number=99)
    builder.assigned("m2", 20, 3)
    builder.ask("m1", 10, 3, number=100)
    builder.add("refused", group=GROUP, who="m1", term=10, first=3, number=100)
    builder.deliver("m2", 20, 3, "p-3", "p-4", "p-5", "q-1")
    builder.confirm("m2", 20, 7)
    builder.add("healed")
    builder.sample(7, 7)
    builder.log("p-0", "p-1", "p-2", "p-3", "p-4", "p-5", "q-1")
    assert builder.found() == []


# The log


def test_acknowledged_record_missing_from_the_log_is_reported_as_lost(
    builder: HistoryBuilder,
) -> None:
    builder.publish("p-6", at=6)
    finish(builder)
    assert builder.kinds() == {ViolationKind.LOST}


def test_acknowledged_record_at_another_offset_is_found(builder: HistoryBuilder) -> None:
    builder.add("publish", who="q", values=["q-0"])
    builder.add("acked", who="q", values=["q-0"], offsets=[4])
    finish(builder)
    assert ViolationKind.TWO_PAYLOADS in builder.kinds()


def test_payload_at_two_offsets_is_reported_as_duplicated(builder: HistoryBuilder) -> None:
    finish(builder)
    builder.log("p-5", first=6)
    assert builder.kinds() == {ViolationKind.DUPLICATED}


def test_unpublished_record_is_a_phantom(builder: HistoryBuilder) -> None:
    finish(builder)
    builder.log("x-0", first=6)
    assert builder.kinds() == {ViolationKind.PHANTOM}


def test_failed_record_in_the_log_is_a_phantom(builder: HistoryBuilder) -> None:
    builder.add("publish", who="q", values=["q-0"])
    builder.add("failed", who="q", values=["q-0"])
    finish(builder)
    builder.log("q-0", first=6)
    assert builder.kinds() == {ViolationKind.PHANTOM}


def test_offset_with_two_payloads_is_found(builder: HistoryBuilder) -> None:
    builder.add("seen", who="reader", first=4, values=["p-3"])
    finish(builder)
    assert ViolationKind.TWO_PAYLOADS in builder.kinds()


def test_records_out_of_their_publishers_order_are_reported_as_reordered() -> None:
    builder = HistoryBuilder()
    builder.add("publish", who="q", values=["q-0", "q-1"])
    builder.log("q-1", "q-0")
    assert builder.kinds() == {ViolationKind.REORDERED}


def test_record_below_one_acknowledged_before_it_was_published_is_reported_as_reordered() -> None:
    builder = HistoryBuilder()
    builder.publish("p-0", at=1)
    builder.add("publish", who="q", values=["q-0"])
    builder.log("q-0", "p-0")
    assert builder.kinds() == {ViolationKind.REORDERED}


def test_hole_in_the_log_is_found(builder: HistoryBuilder) -> None:
    finish(builder)
    builder.add("publish", who="q", values=["q-0"])
    builder.log("q-0", first=8)
    assert builder.kinds() == {ViolationKind.SKIPPED}


# Deliveries


def test_offset_delivered_twice_in_a_term_is_reported_as_duplicated(
    builder: HistoryBuilder,
) -> None:
    builder.deliver("m1", 10, 2, "p-2")
    finish(builder)
    assert builder.kinds() == {ViolationKind.DUPLICATED}


def test_offset_delivered_in_two_terms_is_not_a_violation(builder: HistoryBuilder) -> None:
    finish(builder)
    assert builder.found() == []  # both terms delivered offset 2


def test_delivery_before_the_start_of_its_term_is_reported_as_reordered(
    builder: HistoryBuilder,
) -> None:
    finish(builder)
    builder.deliver("m2", 20, 1, "p-1")
    assert builder.kinds() == {ViolationKind.REORDERED}


def test_hole_inside_a_term_is_reported_as_skipped(builder: HistoryBuilder) -> None:
    builder.deliver("m1", 10, 4, "p-4")
    finish(builder)
    assert builder.kinds() == {ViolationKind.SKIPPED}


def test_term_that_begins_above_the_confirmed_offset_is_reported_as_skipped(
    builder: HistoryBuilder,
) -> None:
    builder.assigned("m2", 20, 3)
    builder.deliver("m2", 20, 3, "p-3")
    assert builder.kinds() >= {ViolationKind.SKIPPED}


def test_term_that_begins_below_the_confirmed_offset_is_found(builder: HistoryBuilder) -> None:
    builder.deliver("m2", 20, 1, "p-1")
    builder.log("p-0", "p-1", "p-2", "p-3", "p-4", "p-5")
    assert builder.kinds() == {ViolationKind.WENT_BACK}


def test_delivery_that_differs_from_the_log_is_found(builder: HistoryBuilder) -> None:
    builder.deliver("m1", 10, 3, "p-4")
    finish(builder)
    assert builder.kinds() == {ViolationKind.TWO_PAYLOADS}


def test_delivery_missing_from_the_log_is_reported_as_lost(builder: HistoryBuilder) -> None:
    finish(builder)
    builder.deliver("m2", 20, 6, "p-6")
    assert builder.kinds() == {ViolationKind.LOST}


def test_records_confirmed_but_never_delivered_are_reported_as_skipped(
    builder: HistoryBuilder,
) -> None:
    builder.assigned("m2", 20, 2)
    builder.confirm("m2", 20, 6)
    builder.add("healed")
    builder.sample(6, 6)
    builder.log("p-0", "p-1", "p-2", "p-3", "p-4", "p-5")
    assert builder.kinds() == {ViolationKind.SKIPPED}


# Terms and confirms


def test_two_members_in_one_term_are_reported_as_two_owners(builder: HistoryBuilder) -> None:
    builder.assigned("m3", 10, 2)
    finish(builder)
    assert builder.kinds() == {ViolationKind.TWO_OWNERS}


def test_confirm_from_an_older_term_is_stale_once_a_newer_term_has_begun(
    builder: HistoryBuilder,
) -> None:
    finish(builder)
    builder.confirm("m1", 10, 3)
    assert ViolationKind.STALE_CONFIRM in builder.kinds()


def test_late_confirm_without_a_reply_is_stale(builder: HistoryBuilder) -> None:
    builder.ask("m1", 10, 3, number=7)
    builder.assigned("m2", 20, 2)
    builder.sample(2, 6)
    builder.sample(3, 6)
    builder.log("p-0", "p-1", "p-2", "p-3", "p-4", "p-5")
    assert builder.kinds() == {ViolationKind.STALE_CONFIRM}


@pytest.mark.parametrize("other", ["none", "unknown", "unanswered"])
def test_term_start_that_only_a_refused_confirm_explains_is_a_false_refusal(
    builder: HistoryBuilder, other: str
) -> None:
    builder.ask("m1", 10, 3, number=99)
    builder.add("refused", group=GROUP, who="m1", term=10, first=3, number=99, text="LeaseLost")
    if other != "none":  # another confirm explains where the next term begins
        builder.ask("m1", 10, 3, number=100)
    if other == "unknown":
        builder.add("refused", group=GROUP, who="m1", term=10, number=100, text="OutcomeUnknown")
    builder.assigned("m2", 20, 3)
    assert (ViolationKind.FALSE_REFUSAL in builder.kinds()) == (other == "none")


def test_confirm_requested_before_the_newer_term_is_not_stale(builder: HistoryBuilder) -> None:
    asked = builder.ask("m1", 10, 3, number=7)
    builder.assigned("m2", 20, 3)
    builder.done("m1", 10, 3, number=7, began=asked.t)  # the reply was late
    builder.log("p-0", "p-1", "p-2", "p-3", "p-4", "p-5")
    assert builder.found() == []


def test_repeated_confirm_is_not_stale(builder: HistoryBuilder) -> None:
    finish(builder)
    builder.confirm("m1", 10, 2)
    assert builder.found() == []


def test_batch_requested_after_a_newer_term_has_begun_is_stale(builder: HistoryBuilder) -> None:
    asked = builder.now
    finish(builder)
    builder.deliver("m1", 10, 3, "p-3", began=asked)
    assert builder.found() == []
    builder.deliver("m1", 10, 4, "p-4")
    assert builder.kinds() == {ViolationKind.STALE_DELIVERY}


def test_confirm_that_returns_less_than_requested_is_found(builder: HistoryBuilder) -> None:
    builder.confirm("m1", 10, 3, result=1)
    finish(builder)
    assert builder.kinds() >= {ViolationKind.WENT_BACK}


def test_confirmed_offset_that_decreases_is_found(builder: HistoryBuilder) -> None:
    builder.sample(1, 6)
    finish(builder)
    assert builder.kinds() == {ViolationKind.WENT_BACK}


def test_loss_of_an_acknowledged_confirm_is_found(builder: HistoryBuilder) -> None:
    builder.confirm("m1", 10, 3)
    builder.sample(2, 6)
    assert ViolationKind.WENT_BACK in builder.kinds()


def test_confirmed_offset_that_no_member_requested_is_reported_as_skipped(
    builder: HistoryBuilder,
) -> None:
    builder.sample(5, 6)
    builder.log("p-0", "p-1", "p-2", "p-3", "p-4", "p-5")
    assert ViolationKind.SKIPPED in builder.kinds()


def test_group_that_does_not_reach_the_end_is_reported_as_not_drained(
    builder: HistoryBuilder,
) -> None:
    builder.add("healed")
    builder.sample(2, 6)
    builder.log("p-0", "p-1", "p-2", "p-3", "p-4", "p-5")
    assert builder.kinds() == {ViolationKind.NOT_DRAINED}


# Gaps and the ring


def overtaken(builder: HistoryBuilder, gone_to: int, end: int = 6, first: int = 4) -> None:
    """Let a ring of two records overtake the group, whose second member gets a gap from 2 on."""
    builder.assigned("m2", 20, 2)
    builder.gap("m2", 20, 2, gone_to)
    builder.sample(gone_to + 1, end, first=first)
    rest = [f"p-{n}" for n in range(gone_to + 1, 6)]
    builder.deliver("m2", 20, gone_to + 1, *rest)
    builder.confirm("m2", 20, 6)
    builder.add("healed")
    builder.sample(6, 6, first=first)
    builder.add("seen", who="reader", first=0, values=["p-0", "p-1", "p-2", "p-3"])
    builder.log("p-4", "p-5", first=4)


def test_gap_in_records_that_a_small_ring_dropped_is_not_a_violation(
    builder: HistoryBuilder,
) -> None:
    overtaken(builder, gone_to=3)
    assert builder.found(capacity=2) == []


def test_record_missing_from_a_small_ring_is_reported_as_lost(builder: HistoryBuilder) -> None:
    builder.publish("p-6", at=6)
    overtaken(builder, gone_to=3)
    assert ViolationKind.LOST in builder.kinds(capacity=2)


def test_records_that_the_recorder_also_missed_are_not_reported(
    builder: HistoryBuilder,
) -> None:
    overtaken(builder, gone_to=3)
    builder.events = [event for event in builder.events if event.kind != "seen"]
    assert ViolationKind.LOST in builder.kinds(capacity=2)
    builder.add("gap", who="reader", first=0, last=3)
    assert builder.found(capacity=2) == []


def test_gap_in_records_that_the_ring_must_hold_is_a_violation(builder: HistoryBuilder) -> None:
    overtaken(builder, gone_to=4)
    assert builder.kinds(capacity=2) == {ViolationKind.WRONG_GAP}


def test_any_gap_is_a_violation_if_the_ring_must_keep_all_records(builder: HistoryBuilder) -> None:
    overtaken(builder, gone_to=3)
    assert ViolationKind.WRONG_GAP in builder.kinds()


def test_hole_that_a_gap_covers_only_partly_is_reported_as_skipped(builder: HistoryBuilder) -> None:
    builder.assigned("m2", 20, 2)
    builder.gap("m2", 20, 2, 2)
    builder.deliver("m2", 20, 4, "p-4", "p-5")
    builder.log("p-4", "p-5", first=4)
    assert ViolationKind.SKIPPED in builder.kinds(capacity=2)


def test_ring_that_holds_less_than_its_capacity_is_overtrimmed(builder: HistoryBuilder) -> None:
    overtaken(builder, gone_to=3, first=5)
    assert builder.kinds(capacity=2) == {ViolationKind.OVERTRIMMED}


def test_unexplained_errors_and_truncations_are_found(builder: HistoryBuilder) -> None:
    builder.add("error", who="m1", group=GROUP, text="ValueError: what is this")
    builder.add("truncated", who="m1", group=GROUP, first=3, last=4)
    finish(builder)
    assert builder.kinds() == {ViolationKind.UNEXPECTED, ViolationKind.LOST}


# The report


def test_violation_shows_the_events_around_it(builder: HistoryBuilder) -> None:
    builder.add("fault", who="nemesis", text="pause m1")
    finish(builder)
    builder.confirm("m1", 10, 3)
    (stale,) = [each for each in builder.found() if each.kind is ViolationKind.STALE_CONFIRM]
    assert "m1 confirmed 3 in term 10" in str(stale)
    assert any("pause m1" in line for line in stale.around)
    assert any("assigned m2" in line for line in stale.around)


def test_many_violations_of_one_kind_are_counted(builder: HistoryBuilder) -> None:
    finish(builder)
    builder.log(*(f"x-{n}" for n in range(100)), first=6)
    *_, last = builder.found()
    assert last.text == f"{100 - KEPT} more of this kind"


def test_correct_history_of_100_000_records_is_clean() -> None:
    builder = HistoryBuilder()
    for n in range(0, 100_000, 10):
        values = [f"p-{k}" for k in range(n, n + 10)]
        builder.publish(*values, at=n)
        builder.deliver("m1", 10, n, *values)
        builder.confirm("m1", 10, n + 10)
        builder.log(*values, first=n)
    assert builder.found() == []


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


def test_torn_last_line_from_a_killed_process_is_ignored(tmp_path: Path) -> None:
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
