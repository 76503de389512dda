"""The checker for the store and its readers.

In the samples, the ring drops no record before it is archived, no more records wait than allowed,
and ``archived`` only increases, in steps that the newest term committed. At any time, the files
hold all archived records, each once. At the end, the values in the files match the log. Each reader
without a group continues where it left off, without repeats, and without holes other than reported
gaps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from tests.chaos.history import Event
from tests.chaos.terms import end_of
from tests.chaos.violation import Findings, ViolationKind

#: Maximum nanoseconds from the return of a hidden store to the start of a request that reports the
#: store as unavailable. Such a request reports an earlier failed read-ahead; a pause can delay it.
KEPT_NS = 10_000_000_000
#: Text of the error for files that are being merged.
MERGING = "has superseded or uncommitted records"


def check_store(
    history: Sequence[Event],
    samples: Sequence[Event],
    log: dict[int, str],
    max_unarchived: int,
    findings: Findings,
) -> None:
    """Check the history of a stream with a store."""
    check_archived(samples, max_unarchived, findings)
    check_commits(history, samples, findings)
    check_listed(history, findings)
    check_stored(history, log, findings)
    for event in history:
        if event.kind == "flaw":
            text = f"{event.first} to {event.last} of the store: {event.text}"
            findings.add(ViolationKind.DAMAGED, text, event)
    if samples and any(event.kind == "healed" for event in history):
        last = samples[-1]
        if last.archived < last.last:
            text = f"{last.archived} of {last.last} records are archived"
            findings.add(ViolationKind.NOT_DRAINED, text, last)


def check_archived(samples: Sequence[Event], max_unarchived: int, findings: Findings) -> None:
    archived = 0
    for sample in samples:
        if sample.archived < archived:
            text = f"archived fell from {archived} to {sample.archived}"
            findings.add(ViolationKind.WENT_BACK, text, sample)
        archived = sample.archived
        if sample.first > archived:
            text = f"the ring begins at {sample.first}, but the archive ends at {archived}"
            findings.add(ViolationKind.UNARCHIVED, text, sample)
        if archived > sample.last:
            text = f"{archived} of {sample.last} records are archived"
            findings.add(ViolationKind.PHANTOM, text, sample)
        # The server accepts a frame that exceeds the limit if no other frame waits.
        if sample.last - archived > max_unarchived and sample.waiting != 1:
            text = f"{sample.last - archived} records are unarchived, more than {max_unarchived}"
            findings.add(ViolationKind.OVERGROWN, text, sample)


def check_commits(history: Sequence[Event], samples: Sequence[Event], findings: Findings) -> None:
    """Check that each commit covers appended records, and that no older term commits.

    A term appends from ``archived`` on, and only after it has fenced the older terms.
    """
    appends = [event for event in history if event.kind in ("append", "appended")]
    newest, who, place, reported = -1, "no archiver", 0, -1
    known = {0}  # possible values of archived
    for sample in samples:
        before: set[int] = set()
        while place < len(appends) and appends[place].t <= sample.t:
            event = appends[place]
            place += 1
            if event.t >= sample.began:
                before |= known  # the sample may be older than this event
            if event.term > newest:
                newest, who, known = event.term, event.who, {event.first}
            if event.term == newest and event.kind == "appended":
                known.add(event.last + 1)
        if sample.archived not in known | before and sample.archived != reported:
            reported = sample.archived  # report each offset once
            text = (
                f"archived is {sample.archived}, but {who}, in the newest term {newest}, has "
                f"appended {min(known)} to {max(known) - 1}"
            )
            findings.add(ViolationKind.STALE_COMMIT, text, sample)


def check_listed(history: Sequence[Event], findings: Findings) -> None:
    """Check that the listed files hold all archived records, each once."""
    for event in history:
        if event.kind != "listed":
            continue
        reached = 0
        for span in event.values:
            first, last = map(int, span.split("-"))
            if first != reached:
                kind = ViolationKind.LOST if first > reached else ViolationKind.DUPLICATED
                text = f"{event.who} got files to {reached - 1}, then {first} to {last}"
                findings.add(kind, text, event)
            reached = last + 1
        if reached < event.first:
            text = f"{event.who} got files to {reached - 1}; {event.first - 1} is archived"
            findings.add(ViolationKind.LOST, text, event)
        elif reached > event.last:
            text = f"{event.who} got files to {reached - 1}; {event.last} is not archived"
            findings.add(ViolationKind.PHANTOM, text, event)


def check_stored(history: Sequence[Event], log: dict[int, str], findings: Findings) -> None:
    """Check that, at the end, the files hold the archived part of the log, each record once."""
    end = max((event.last for event in history if event.kind == "archived"), default=-1)
    if end < 0:
        return  # the run failed to record the store
    places: dict[int, str] = {}
    for event in history:
        if event.kind != "stored":
            continue
        for offset, value in zip(event.offsets, event.values, strict=True):
            if offset in places:
                text = f"{offset} is in {places[offset]} and in {event.text}"
                findings.add(ViolationKind.DUPLICATED, text, event)
            elif offset >= end:
                text = f"{offset} in {event.text} is not archived: the archive ends at {end}"
                findings.add(ViolationKind.PHANTOM, text, event)
            elif log.get(offset, value) != value:
                text = f"{offset} in {event.text} is {value}, but {log[offset]} in the log"
                findings.add(ViolationKind.TWO_PAYLOADS, text, event)
            places[offset] = event.text
    for offset in range(end):
        if offset not in places:
            findings.add(ViolationKind.LOST, f"{offset} is archived, but in no file")


# Readers, with a store or without


def check_readers(history: Sequence[Event], findings: Findings) -> None:
    """Check that readers continue without holes, except for reported gaps."""
    positions: dict[str, int] = {}
    for event in history:
        if event.kind == "reading":
            positions[event.who] = event.first
        elif event.kind in ("seen", "log", "gap") and event.who in positions:
            expected = positions[event.who]
            if event.first != expected:
                kind = ViolationKind.SKIPPED if event.first > expected else ViolationKind.DUPLICATED
                text = f"{event.who} got {event.first} instead of {expected}"
                findings.add(kind, text, event)
            positions[event.who] = max(expected, end_of(event))


def check_unavailable(history: Sequence[Event], findings: Findings) -> None:
    """Check that the store was unavailable only while it was hidden or its files were merged."""
    hidden = [event.t for event in history if event.kind == "hidden"]
    shown = [event.t for event in history if event.kind == "shown"]
    merged = any(event.kind == "compacted" for event in history)
    for event in history:
        if event.kind != "unavailable":
            continue
        # The index of the last time that the store was hidden before this event.
        number = bisect_right(hidden, event.t) - 1
        back = shown[number] if 0 <= number < len(shown) else event.t
        away = number >= 0 and event.began - KEPT_NS <= back
        if not away and not (merged and MERGING in event.text):
            findings.add(ViolationKind.UNEXPECTED, f"{event.who}: {event.text}", event)
