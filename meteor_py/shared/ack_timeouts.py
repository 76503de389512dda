"""Time limits for delivered records. A record that is not settled in time returns to the group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from meteor_py.runtime.clock import now

if TYPE_CHECKING:
    from meteor_py.shared.record import SharedRecord


class TimeLimit(NamedTuple):
    """The longest time that the application may keep a record."""

    #: The name of the setting that defines the limit, for messages.
    setting: str
    seconds: float


class AckTimeouts:
    """Finds records whose time limit has expired. ``Deliveries`` guards it with its lock.

    It keeps no list, because each record stores its own deadline. Once a time limit has started,
    its deadline can only move to a later time. There is therefore nothing to check before the
    earliest deadline that this object has noted.
    """

    def __init__(self) -> None:
        self._look_at = math.inf  # no held record has an earlier deadline

    def start(self, records: Iterable[SharedRecord], limit: TimeLimit) -> bool:
        """Start the time limit for records now; return whether ``due_s`` has decreased."""
        deadline = now() + limit.seconds
        for record in records:
            record.time_limit, record.deadline = limit, deadline
        earlier = deadline < self._look_at
        self._look_at = min(self._look_at, deadline)
        return earlier

    def due_s(self) -> float:
        """Return the number of seconds until a time limit may expire."""
        return self._look_at - now()

    def expired(self, held: Iterable[SharedRecord]) -> list[SharedRecord]:
        """Return the held records whose time limit has expired."""
        time = now()
        if time < self._look_at:
            return []
        late: list[SharedRecord] = []
        self._look_at = math.inf
        for record in held:
            if record.deadline <= time:
                late.append(record)
            else:
                self._look_at = min(self._look_at, record.deadline)
        return late
