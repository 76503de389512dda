"""The checker: finds violations in the events of all processes, without side effects.

In a correct history, each acknowledged record is in the log once, at the acknowledged offset. The
log contains no record that was never published or was reported as failed. Each publisher's records
are in the order in which it published them, and a record published after an acknowledgement follows
the acknowledged record. In the samples, confirmed offsets and the end of the log never decrease,
and the ring drops no record until it holds more than its capacity. terms.py checks groups, and
stored.py checks the store and readers without a group.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tests.chaos.history import Event, author, by_time
from tests.chaos.stored import check_readers, check_store, check_unavailable
from tests.chaos.terms import BEGINS, check_terms
from tests.chaos.violation import Findings, Violation, ViolationKind


def check(
    events: Iterable[Event],
    groups: Sequence[str] = (),
    capacity: int | None = None,
    max_unarchived: int | None = None,
) -> list[Violation]:
    """Return the violations in a history.

    Args:
        events: Events of all processes, in any order.
        groups: Groups that must have drained. Other groups in the history are checked too.
        capacity: Capacity of a ring that drops records; None if it drops none.
        max_unarchived: Maximum number of records that wait for a store's archiver. None if there is
            no store; records that the ring drops are then lost.
    """
    history = by_time(events)
    findings = Findings(history)
    log = read_log(history, findings)
    droppable = capacity if max_unarchived is None else None
    # The recorder has seen every record, unless it fell behind a small ring and missed some.
    whole = droppable is None or not any(e.kind == "gap" and not e.group for e in history)
    check_errors(history, findings)
    check_unavailable(history, findings)
    check_readers(history, findings)
    check_records(history, log, findings, whole=whole)
    check_order(history, log, findings)
    by_group: defaultdict[str, list[Event]] = defaultdict(list)
    for event in history:
        if event.group:
            by_group[event.group].append(event)
    samples = [event for event in history if event.kind == "sample"]
    for group in sorted({*groups, *by_group}):
        mine = by_group[group]
        check_terms(mine, log, findings, whole=whole)
        check_confirmed(group, mine, samples, findings)
        check_moved(group, mine, samples, findings)
    check_ring(samples, capacity, findings)
    if max_unarchived is not None:
        check_store(history, samples, log, max_unarchived, findings)
    check_gaps(history, samples, droppable, findings)
    check_drained(history, samples, groups, findings)
    return findings.report()


# The log


def read_log(history: Sequence[Event], findings: Findings) -> dict[int, str]:
    """Return the value at each offset, as readers without a group saw it."""
    log: dict[int, str] = {}
    for event in history:
        if event.kind in ("log", "seen"):
            for offset, value in enumerate(event.values, event.first):
                if log.setdefault(offset, value) != value:
                    text = f"offset {offset} has both {log[offset]} and {value}"
                    findings.add(ViolationKind.TWO_PAYLOADS, text, event)
    return dict(sorted(log.items()))


def check_errors(history: Sequence[Event], findings: Findings) -> None:
    for event in history:
        if event.kind == "error":
            findings.add(ViolationKind.UNEXPECTED, f"{event.who}: {event.text}", event)
        elif event.kind == "truncated":
            text = f"{event.who} got an error: {event.first} to {event.last} were lost"
            findings.add(ViolationKind.LOST, text, event)


def check_records(
    history: Sequence[Event], log: dict[int, str], findings: Findings, *, whole: bool
) -> None:
    """Check that the log has each acknowledged record once, at its offset.

    The log must not contain failed or unpublished records. If `whole`, the recorder has seen all
    records, so none may be missing.
    """
    published = {v for event in history if event.kind == "publish" for v in event.values}
    places: dict[str, int] = {}
    for offset, value in log.items():
        if value not in published:
            findings.add(ViolationKind.PHANTOM, f"{value} at {offset} was never published")
        if value in places:
            findings.add(ViolationKind.DUPLICATED, f"{value} is at {places[value]} and at {offset}")
        places.setdefault(value, offset)
    kept_from = min((e.first for e in history if e.kind == "log" and e.values), default=0)
    for event in history:
        if event.kind == "failed":
            for value in event.values:
                if value in places:
                    text = f"{value} failed, but is at {places[value]}"
                    findings.add(ViolationKind.PHANTOM, text, event)
        elif event.kind == "acked":
            for value, offset in zip(event.values, event.offsets, strict=True):
                if log.get(offset, value) != value:
                    text = f"{value} was acknowledged at {offset}, but {log[offset]} is there"
                    findings.add(ViolationKind.TWO_PAYLOADS, text, event)
                elif offset not in log and (whole or offset >= kept_from):
                    text = f"{value}, acknowledged at {offset}, is not in the log"
                    findings.add(ViolationKind.LOST, text, event)
    offsets = list(log)
    if whole and offsets != list(range(len(offsets))):
        hole = next(n for n, offset in enumerate(offsets) if n != offset)
        findings.add(
            ViolationKind.SKIPPED, f"the log has no offset {hole}, but has {offsets[hole]}"
        )


def check_order(history: Sequence[Event], log: dict[int, str], findings: Findings) -> None:
    """Check the order of the log.

    Each publisher's records are in order, and each record follows all records that were
    acknowledged before it was published.
    """
    newest: dict[str, int] = {}
    for offset, value in log.items():
        publisher, counter = author(value)
        # A repeated counter is a duplicate, which check_records finds.
        if counter < newest.get(publisher, -1):
            text = f"{value} at {offset} is after {publisher}-{newest[publisher]}"
            findings.add(ViolationKind.REORDERED, text)
        newest[publisher] = max(counter, newest.get(publisher, -1))
    begun: dict[str, Event] = {}
    floor, last = -1, ""  # the highest offset acknowledged so far, and its value
    floors: dict[str, tuple[int, str]] = {}
    for event in history:
        if event.kind == "publish":
            for value in event.values:
                begun[value] = event
                floors[value] = (floor, last)
        elif event.kind == "acked":
            for value, offset in zip(event.values, event.offsets, strict=True):
                if offset > floor:
                    floor, last = offset, value
    for offset, value in log.items():
        before, earlier = floors.get(value, (-1, ""))
        if offset <= before:
            text = f"{value}, published after {earlier} was at {before}, is at {offset}"
            findings.add(ViolationKind.REORDERED, text, begun[value])


# The samples


def check_confirmed(
    group: str, mine: Sequence[Event], samples: Sequence[Event], findings: Findings
) -> None:
    """Check that samples of the confirmed offset never decrease, and match the group's confirms.

    No sample may be below an acknowledged confirm, or above what a member has requested.
    """
    done = [event for event in mine if event.kind == "confirmed"]
    asked = [event for event in mine if event.kind in ("confirm", "missing", "gap")]
    done_to = asked_to = before = 0
    done_next = asked_next = 0
    for sample in samples:
        confirmed = sample.confirmed.get(group, 0)
        while done_next < len(done) and done[done_next].t < sample.began:
            done_to = max(done_to, done[done_next].first)
            done_next += 1
        while asked_next < len(asked) and asked[asked_next].t <= sample.t:
            asked_to = max(asked_to, asked[asked_next].first, asked[asked_next].last + 1)
            asked_next += 1
        at = Event(sample.t, "sample", group=group)
        if confirmed < before:
            findings.add(
                ViolationKind.WENT_BACK, f"confirmed fell from {before} to {confirmed}", at
            )
        elif confirmed < done_to:
            text = f"confirmed is {confirmed}, after a confirm of {done_to} was acknowledged"
            findings.add(ViolationKind.WENT_BACK, text, at)
        if confirmed > asked_to:
            text = f"confirmed is {confirmed}, though no member requested more than {asked_to}"
            findings.add(ViolationKind.SKIPPED, text, at)
        before = confirmed
        done_to = min(done_to, confirmed)  # report each decrease once


def check_moved(
    group: str, mine: Sequence[Event], samples: Sequence[Event], findings: Findings
) -> None:
    """Check that once a term has begun, only its own requests move the confirmed offset.

    This finds an accepted confirm from an older term even if its reply was lost.
    """
    newest, begun, limit, place = -1, -1, 0, 0
    for sample in samples:
        while place < len(mine) and mine[place].t <= sample.t:
            event = mine[place]
            place += 1
            if event.term > newest and event.kind in BEGINS and event.first >= 0:
                newest, begun, limit = event.term, event.t, event.first
            if event.term == newest and event.kind in ("confirm", "missing", "gap"):
                limit = max(limit, event.first, event.last + 1)
        confirmed = sample.confirmed.get(group, 0)
        if 0 <= begun < sample.began and confirmed > limit:
            text = f"confirmed is {confirmed}, though term {newest} requested no more than {limit}"
            findings.add(ViolationKind.STALE_CONFIRM, text, Event(sample.t, "sample", group=group))
            limit = confirmed  # report each increase once


def check_ring(samples: Sequence[Event], capacity: int | None, findings: Findings) -> None:
    end = 0
    for sample in samples:
        if sample.last < end:
            findings.add(
                ViolationKind.WENT_BACK, f"the log ended at {end}, then at {sample.last}", sample
            )
        end = sample.last
        must_hold = end if capacity is None else min(capacity, end)
        if end - sample.first < must_hold:
            text = f"the ring holds {sample.first} to {end}, but must hold {must_hold} records"
            findings.add(ViolationKind.OVERTRIMMED, text, sample)


def check_gaps(
    history: Sequence[Event], samples: Sequence[Event], capacity: int | None, findings: Findings
) -> None:
    """Check that no gap covers one of the last `capacity` records.

    If `capacity` is None, the ring drops no records, so every gap is a violation.
    """
    for event in history:
        if event.kind not in ("missing", "gap"):
            continue
        later = bisect_left(samples, event.t, key=lambda sample: sample.began)
        if capacity is None:
            text = f"{event.who} got a gap of {event.first} to {event.last}"
            findings.add(ViolationKind.WRONG_GAP, text, event)
        elif later < len(samples) and event.last >= samples[later].last - capacity:
            text = (
                f"{event.who} got a gap of {event.first} to {event.last} from a ring of "
                f"{capacity} that ended at {samples[later].last} or before"
            )
            findings.add(ViolationKind.WRONG_GAP, text, event)


def check_drained(
    history: Sequence[Event],
    samples: Sequence[Event],
    groups: Sequence[str],
    findings: Findings,
) -> None:
    if not any(event.kind == "healed" for event in history):
        return
    for group in groups:
        confirmed = samples[-1].confirmed.get(group, 0) if samples else 0
        end = samples[-1].last if samples else 0
        if confirmed < end:
            at = Event(samples[-1].t, "sample", group=group)
            findings.add(
                ViolationKind.NOT_DRAINED, f"the group has confirmed {confirmed} of {end}", at
            )
