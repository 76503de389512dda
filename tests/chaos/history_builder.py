"""A builder of hand-made histories, for tests of the checker."""

from __future__ import annotations

from typing import Any

from tests.chaos.checker import check
from tests.chaos.history import Event, Kind
from tests.chaos.violation import Violation, ViolationKind

GROUP = "g"


class HistoryBuilder:
    """Builds a history event by event. Events are one millisecond apart."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    @property
    def now(self) -> int:
        return len(self.events) * 1_000_000

    def add(self, kind: Kind, **fields: Any) -> Event:
        event = Event(self.now, kind, **fields)
        self.events.append(event)
        return event

    def publish(self, *values: str, at: int) -> None:
        self.add("publish", who="p", values=list(values))
        offsets = list(range(at, at + len(values)))
        self.add("acked", who="p", values=list(values), offsets=offsets)

    def assigned(self, who: str, term: int, first: int) -> None:
        self.add("assigned", group=GROUP, who=who, term=term, first=first)

    def deliver(self, who: str, term: int, first: int, *values: str, began: int = -1) -> None:
        self.add(
            "deliver", group=GROUP, who=who, term=term, first=first, values=list(values),
            began=self.now if began < 0 else began,
        )  # fmt: skip

    def confirm(self, who: str, term: int, offset: int, result: int | None = None) -> None:
        """Add a confirm and its reply, which confirms up to `result` (by default, `offset`)."""
        number = len(self.events)
        asked = self.ask(who, term, offset, number)
        done = offset if result is None else result
        self.done(who, term, done, number, asked.t)

    def ask(self, who: str, term: int, offset: int, number: int) -> Event:
        return self.add("confirm", group=GROUP, who=who, term=term, first=offset, number=number)

    def done(self, who: str, term: int, offset: int, number: int, began: int) -> None:
        self.add(
            "confirmed", group=GROUP, who=who, term=term, first=offset, number=number, began=began
        )

    def gap(self, who: str, term: int, first: int, last: int) -> None:
        self.add("gap", group=GROUP, who=who, term=term, first=first, last=last)

    def sample(self, confirmed: int, end: int, first: int = 0, archived: int = -1) -> None:
        self.add(
            "sample", began=self.now, first=first, last=end, archived=archived,
            confirmed={GROUP: confirmed},
        )  # fmt: skip

    def log(self, *values: str, first: int = 0) -> None:
        self.add("log", first=first, values=list(values))

    def found(
        self, capacity: int | None = None, max_unarchived: int | None = None
    ) -> list[Violation]:
        return check(self.events, [GROUP], capacity, max_unarchived)

    def kinds(
        self, capacity: int | None = None, max_unarchived: int | None = None
    ) -> set[ViolationKind]:
        return {violation.kind for violation in self.found(capacity, max_unarchived)}
