"""The checker for one group: deliveries and confirms.

A term belongs to one member. It begins where the earlier terms ended: neither above the offsets
that they asked to confirm, nor below an acknowledged confirm, nor at an offset that only a refused
confirm could have reached. Within a term, offsets increase one by one, except for reported gaps.
Once a newer term has begun, an older one neither confirms anything nor receives another batch.
Across all terms, every confirmed record was delivered to the group or reported as gone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from tests.chaos.history import Event
from tests.chaos.violation import Findings, ViolationKind

#: Events that prove that a member has a term.
PROOFS = ("assigned", "deliver", "confirmed")
#: Events about records that were delivered, or are known to be gone.
SPANS = ("deliver", "missing", "gap")
#: Events that show where a term begins.
BEGINS = ("assigned", "deliver", "gap")


def check_terms(
    mine: Sequence[Event], log: dict[int, str], findings: Findings, *, whole: bool
) -> None:
    """Check the events of one group, sorted by time."""
    terms: defaultdict[int, list[Event]] = defaultdict(list)
    for event in mine:
        if event.term >= 0:
            terms[event.term].append(event)
    in_order = [terms[term] for term in sorted(terms)]
    for term in in_order:
        check_owner(term, findings)
        check_dense(term, findings)
        check_results(term, findings)
    check_starts(in_order, findings)
    check_refusals(in_order, findings)
    check_stale(in_order, findings)
    check_values(mine, log, findings, whole=whole)
    if any(event.kind == "confirmed" for event in mine):
        check_coverage(mine, findings)


def check_owner(term: Sequence[Event], findings: Findings) -> None:
    owners: dict[str, Event] = {}
    for event in term:
        if event.kind in PROOFS:
            owners.setdefault(event.who, event)
    if len(owners) > 1:
        first, second, *_ = owners.values()
        text = f"term {first.term} belongs to both {first.who} and {second.who}"
        findings.add(ViolationKind.TWO_OWNERS, text, second)


def check_dense(term: Sequence[Event], findings: Findings) -> None:
    """Check that each member's deliveries and gaps are contiguous."""
    positions: dict[str, int] = {}
    starts: dict[str, int] = {}
    for event in term:
        if event.kind not in BEGINS or event.first < 0:
            continue
        start = starts.setdefault(event.who, event.first)
        expected = positions.setdefault(event.who, event.first)
        if event.kind == "assigned":
            continue
        what = f"{event.who} in term {event.term}: {event.kind} from {event.first}"
        if event.first > expected:
            findings.add(ViolationKind.SKIPPED, f"{what}, after {expected - 1}", event)
        elif event.first < start:
            findings.add(ViolationKind.REORDERED, f"{what}, though it began at {start}", event)
        elif event.first < expected:
            findings.add(ViolationKind.DUPLICATED, f"{what}, repeated up to {expected - 1}", event)
        positions[event.who] = max(expected, end_of(event))


def end_of(event: Event) -> int:
    """Return the offset after a delivery or a gap."""
    return event.last + 1 if event.last >= 0 else event.first + len(event.values)


def check_results(term: Sequence[Event], findings: Findings) -> None:
    """Check that no confirm returns less than was requested."""
    asked: dict[tuple[str, int], int] = {}
    for event in term:
        if event.kind == "confirm":
            asked[event.who, event.number] = event.first
        elif event.kind == "confirmed":
            wanted = asked.get((event.who, event.number), -1)
            if event.first < wanted:
                text = f"{event.who} confirmed {wanted} and got {event.first}"
                findings.add(ViolationKind.WENT_BACK, text, event)


def check_starts(terms: Sequence[Sequence[Event]], findings: Findings) -> None:
    """Check that each term begins between what earlier terms confirmed and what they requested."""
    asked = done = 0
    for term in terms:
        begin = next((e for e in term if e.kind in BEGINS and e.first >= 0), None)
        if begin is not None and begin.first > asked:
            text = (
                f"term {begin.term} begins at {begin.first}; no member confirmed more than {asked}"
            )
            findings.add(ViolationKind.SKIPPED, text, begin)
        elif begin is not None and begin.first < done:
            text = f"term {begin.term} begins at {begin.first}, though {done} was confirmed before"
            findings.add(ViolationKind.WENT_BACK, text, begin)
        for event in term:
            if event.kind == "confirm":
                asked = max(asked, event.first)
            elif event.kind in ("missing", "gap"):  # skipping a gap confirms it
                asked = max(asked, event.last + 1)
            elif event.kind == "confirmed":
                done = max(done, event.first)


def check_refusals(terms: Sequence[Sequence[Event]], findings: Findings) -> None:
    """Check that no confirm refused with ``LeaseLost`` took effect.

    Any other outcome, or none, leaves open whether the confirm took effect.
    """
    refused = {
        (event.who, event.number)
        for term in terms
        for event in term
        if event.kind == "refused" and event.text.startswith("LeaseLost")
    }
    possible = claimed = 0
    for term in terms:
        begin = next((e for e in term if e.kind in BEGINS and e.first >= 0), None)
        if begin is not None and possible < begin.first <= claimed:
            text = (
                f"term {begin.term} begins at {begin.first}, which only a refused confirm reached"
            )
            findings.add(ViolationKind.FALSE_REFUSAL, text, begin)
        for event in term:
            if event.kind in ("missing", "gap"):
                possible = max(possible, event.last + 1)
            elif event.kind == "confirm" and (event.who, event.number) in refused:
                claimed = max(claimed, event.first)
            elif event.kind in ("confirm", "confirmed"):
                possible = max(possible, event.first)


def check_stale(terms: Sequence[Sequence[Event]], findings: Findings) -> None:
    """Check that no request from an older term succeeds once a newer one has begun."""
    newer = math.inf  # when a newer term was first seen
    newer_term = -1
    for term in reversed(terms):
        known = -1  # the highest confirm in this term: repeating it changes nothing
        for event in term:
            late = event.began > newer
            if event.kind == "confirmed":
                if late and event.first > known:
                    text = (
                        f"{event.who} confirmed {event.first} in term {event.term}, requested "
                        f"after term {newer_term} had begun"
                    )
                    findings.add(ViolationKind.STALE_CONFIRM, text, event)
                known = max(known, event.first)
            elif event.kind == "deliver" and late:
                text = (
                    f"{event.who} got {event.first} in term {event.term}, requested after "
                    f"term {newer_term} had begun"
                )
                findings.add(ViolationKind.STALE_DELIVERY, text, event)
        seen = min((event.t for event in term if event.kind in PROOFS), default=math.inf)
        if seen < newer:
            newer, newer_term = seen, term[0].term


def check_values(
    mine: Sequence[Event], log: dict[int, str], findings: Findings, *, whole: bool
) -> None:
    """Check that delivered values match the log."""
    for event in mine:
        if event.kind != "deliver":
            continue
        for offset, value in enumerate(event.values, event.first):
            there = log.get(offset)
            if there is None and whole:
                text = f"{value} was delivered at {offset}, which is not in the log"
                findings.add(ViolationKind.LOST, text, event)
            elif there is not None and there != value:
                text = f"{value} was delivered at {offset}, but the log has {there}"
                findings.add(ViolationKind.TWO_PAYLOADS, text, event)


def check_coverage(mine: Sequence[Event], findings: Findings) -> None:
    """Check that every confirmed record was delivered to some member, or reported as gone."""
    end = max(event.first for event in mine if event.kind == "confirmed")
    spans = sorted((e.first, end_of(e)) for e in mine if e.kind in SPANS)
    reached = 0
    for first, stop in [*spans, (end, end)]:
        if min(first, end) > reached:
            text = f"{reached} to {min(first, end) - 1} were confirmed but never delivered"
            findings.add(ViolationKind.SKIPPED, text, mine[-1])
        reached = max(reached, stop)
