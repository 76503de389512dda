"""Violations in a history, with the events around them."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.chaos.history import Event

#: Maximum number of violations of each kind to keep with their events; others are only counted.
KEPT = 5
BEFORE = 12
AFTER = 6


class ViolationKind(enum.StrEnum):
    """The kinds of violations."""

    LOST = "lost"  # acknowledged, delivered or archived, but not in the log or the store
    PHANTOM = "phantom"  # in the log or the store, but failed, unarchived or never published
    DUPLICATED = "duplicated"  # a payload at two offsets, or an offset twice for one reader or term
    REORDERED = "reordered"  # the log or a term is out of order
    TWO_PAYLOADS = "two payloads"  # two records at one offset
    SKIPPED = "skipped"  # a hole in the log, in a group's deliveries or in a reader's records
    WENT_BACK = "went back"  # a confirmed offset, `archived` or the end of the log has decreased
    TWO_OWNERS = "two owners"  # two members in one term
    STALE_CONFIRM = "stale confirm"  # an older term confirmed after a newer one had begun
    FALSE_REFUSAL = "false refusal"  # a confirm reported as having no effect had one
    STALE_DELIVERY = "stale delivery"  # a batch requested after a newer term had begun
    WRONG_GAP = "wrong gap"  # records were reported as gone, but exist or must exist
    OVERTRIMMED = "overtrimmed"  # the ring holds less than its capacity
    UNARCHIVED = "unarchived"  # the ring has dropped records that were not archived
    OVERGROWN = "overgrown"  # more records than allowed wait for an archiver
    STALE_COMMIT = "stale commit"  # `archived` is not the offset that the newest term committed
    DAMAGED = "damaged"  # the store has flaws
    NOT_DRAINED = "not drained"  # a group or the archivers do not reach the end after healing
    UNEXPECTED = "unexpected error"  # an error that no fault explains


@dataclass(frozen=True)
class Violation:
    kind: ViolationKind
    text: str
    group: str = ""
    t: int = 0
    around: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        where = f" (group {self.group})" if self.group else ""
        return f"{self.kind}{where}: {self.text}"


class Findings:
    """Collects violations, a few of each kind with the events around them."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self._found: list[Violation] = []
        self._counts: Counter[ViolationKind] = Counter()

    def add(self, kind: ViolationKind, text: str, at: Event | None = None) -> None:
        self._counts[kind] += 1
        if self._counts[kind] <= KEPT:
            group, t = (at.group, at.t) if at is not None else ("", self._end)
            self._found.append(Violation(kind, text, group, t, self._around(group, t)))

    def report(self) -> list[Violation]:
        """Return violations by time, then the counts of those that were not kept."""
        counted = [
            Violation(kind, f"{count - KEPT} more of this kind", t=self._end + 1)
            for kind, count in self._counts.items()
            if count > KEPT
        ]
        return sorted(self._found, key=lambda violation: violation.t) + counted

    @property
    def _end(self) -> int:
        return self._events[-1].t if self._events else 0

    def _around(self, group: str, t: int) -> tuple[str, ...]:
        """Return faults and events of the group shortly before and after a time."""
        place = bisect_left(self._events, t, key=lambda event: event.t)
        before = _related(reversed(self._events[:place]), group, BEFORE)
        after = _related(self._events[place:], group, AFTER)
        return tuple(str(event) for event in [*reversed(before), *after])


def _related(events: Iterable[Event], group: str, most: int) -> list[Event]:
    found: list[Event] = []
    for event in events:
        if len(found) == most:
            break
        if event.kind == "fault" or (event.group == group and event.kind != "sample"):
            found.append(event)
    return found
