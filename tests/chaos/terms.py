"""The judge of one group: who was given what, and who confirmed it.

A term belongs to one member. It begins where the terms before it have confirmed to: not above what
any of them asked for, not below what any was acknowledged. Inside a term offsets rise one by
one, and what is left out was named as a gap. Once a newer term has begun, an older one neither
confirms anything nor is given another batch. Over all terms, every record was given to the group.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from tests.chaos.history import Event
from tests.chaos.violation import Findings, Wrong

#: What proves that a member has a term.
PROOFS = ("assigned", "deliver", "confirmed")
#: What was given to a group, or is known to be gone.
SPANS = ("deliver", "missing", "gap")
#: What tells where a term begins.
BEGINS = ("assigned", "deliver", "gap")


def check_terms(
    mine: Sequence[Event], log: dict[int, str], findings: Findings, *, whole: bool
) -> None:
    """Judge the events of one group, which come by time."""
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
        text = f"term {first.term} is that of {first.who} and of {second.who}"
        findings.add(Wrong.TWO_OWNERS, text, second)


def check_dense(term: Sequence[Event], findings: Findings) -> None:
    """Deliveries and gaps follow each other without a hole, for each member of the term."""
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
            findings.add(Wrong.SKIPPED, f"{what}, after {expected - 1}", event)
        elif event.first < start:
            findings.add(Wrong.REORDERED, f"{what}, though it began at {start}", event)
        elif event.first < expected:
            findings.add(Wrong.DUPLICATED, f"{what}, which it had up to {expected - 1}", event)
        positions[event.who] = max(expected, end_of(event))


def end_of(event: Event) -> int:
    """The offset behind what was delivered, or named as gone."""
    return event.last + 1 if event.last >= 0 else event.first + len(event.values)


def check_results(term: Sequence[Event], findings: Findings) -> None:
    """A confirm gives no less than was asked for."""
    asked: dict[tuple[str, int], int] = {}
    for event in term:
        if event.kind == "confirm":
            asked[event.who, event.number] = event.first
        elif event.kind == "confirmed":
            wanted = asked.get((event.who, event.number), -1)
            if event.first < wanted:
                text = f"{event.who} confirmed {wanted} and got {event.first}"
                findings.add(Wrong.WENT_BACK, text, event)


def check_starts(terms: Sequence[Sequence[Event]], findings: Findings) -> None:
    """Each term begins where the earlier ones have confirmed to."""
    asked = done = 0
    for term in terms:
        begin = next((e for e in term if e.kind in BEGINS and e.first >= 0), None)
        if begin is not None and begin.first > asked:
            text = f"term {begin.term} begins at {begin.first}; nobody confirmed more than {asked}"
            findings.add(Wrong.SKIPPED, text, begin)
        elif begin is not None and begin.first < done:
            text = f"term {begin.term} begins at {begin.first}, though {done} was confirmed before"
            findings.add(Wrong.WENT_BACK, text, begin)
        for event in term:
            if event.kind == "confirm":
                asked = max(asked, event.first)
            elif event.kind in ("missing", "gap"):  # to skip one is to confirm it
                asked = max(asked, event.last + 1)
            elif event.kind == "confirmed":
                done = max(done, event.first)


def check_stale(terms: Sequence[Sequence[Event]], findings: Findings) -> None:
    """What an older term asks for once a newer one has begun may not succeed."""
    newer = math.inf  # when a newer term was first seen
    newer_term = -1
    for term in reversed(terms):
        known = -1  # to confirm what this term has confirmed already changes nothing
        for event in term:
            late = event.began > newer
            if event.kind == "confirmed":
                if late and event.first > known:
                    text = (
                        f"{event.who} confirmed {event.first} in term {event.term}, asked for "
                        f"after term {newer_term} had begun"
                    )
                    findings.add(Wrong.STALE_CONFIRM, text, event)
                known = max(known, event.first)
            elif event.kind == "deliver" and late:
                text = (
                    f"{event.who} was given {event.first} in term {event.term}, asked for after "
                    f"term {newer_term} had begun"
                )
                findings.add(Wrong.STALE_DELIVERY, text, event)
        seen = min((event.t for event in term if event.kind in PROOFS), default=math.inf)
        if seen < newer:
            newer, newer_term = seen, term[0].term


def check_values(
    mine: Sequence[Event], log: dict[int, str], findings: Findings, *, whole: bool
) -> None:
    """What was delivered is what the log has at that offset."""
    for event in mine:
        if event.kind != "deliver":
            continue
        for offset, value in enumerate(event.values, event.first):
            there = log.get(offset)
            if there is None and whole:
                text = f"{value} was delivered at {offset}, which the log does not have"
                findings.add(Wrong.LOST, text, event)
            elif there is not None and there != value:
                text = f"{value} was delivered at {offset}, where {there} is"
                findings.add(Wrong.TWO_PAYLOADS, text, event)


def check_coverage(mine: Sequence[Event], findings: Findings) -> None:
    """Of all that was confirmed, every record was given to some member, or named as gone."""
    end = max(event.first for event in mine if event.kind == "confirmed")
    spans = sorted((e.first, end_of(e)) for e in mine if e.kind in SPANS)
    reached = 0
    for first, stop in [*spans, (end, end)]:
        if min(first, end) > reached:
            text = f"{reached} to {min(first, end) - 1} were confirmed and never delivered"
            findings.add(Wrong.SKIPPED, text, mine[-1])
        reached = max(reached, stop)
