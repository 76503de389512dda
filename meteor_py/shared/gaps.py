"""Gaps: records that cannot be delivered, because they are lost or unreadable."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from meteor_py.errors import (
    CorruptFrame,
    CorruptSegment,
    MeteorError,
    RecordsLost,
    UnsupportedFrame,
)

#: Errors about records that exist but cannot be read.
Unreadable = CorruptFrame | UnsupportedFrame | CorruptSegment


class Gap(NamedTuple):
    """A range of records that cannot be delivered. Both ends are included."""

    first: int
    last: int
    #: Why the records are unreadable; None if they are in neither the ring nor the store.
    cause: Unreadable | None = None

    def error(self, stream: str, group: str) -> RecordsLost | Unreadable:
        """Return the error to raise."""
        first, last, cause = self
        if cause is None:
            return RecordsLost(
                f"The ring dropped records {first} to {last} of stream {stream!r} before shared "
                f"group {group!r} had processed them, and no store has them. The next poll "
                "continues after them. To prevent such losses, raise the capacity or add a store.",
                stream=stream,
                first=first,
                last=last,
            )
        if isinstance(cause, CorruptSegment):
            why = "they are damaged in the store"
        elif isinstance(cause, UnsupportedFrame):
            why = "a newer version of meteor-py wrote them"
        else:
            why = "they are damaged in the ring"
        error = type(cause)(
            f"Records {first} to {last} of stream {stream!r} cannot be read: {why}. Shared group "
            f"{group!r} counts them as lost, and the next poll continues after them.",
            stream=stream,
            first=first,
            last=last,
        )
        error.__cause__ = cause
        return error


class Gaps:
    """Gaps that have not been reported to the application yet."""

    def __init__(self) -> None:
        self._gaps: list[Gap] = []

    def add(self, first: int, last: int, cause: MeteorError | None = None) -> None:
        assert cause is None or isinstance(cause, Unreadable), "other errors are raised at once"
        self._gaps.append(Gap(first, last, cause))

    def take(self) -> Gap | None:
        """Remove and return the first gap, merged with later gaps that belong to it."""
        if not self._gaps:
            return None
        (first, last, cause), *others = sorted(self._gaps, key=attrgetter("first"))
        self._gaps = []
        for gap in others:
            # Merge unreadable gaps that have the same cause even if they are not adjacent: another
            # consumer may hold records in the middle of the same frame.
            if gap.cause is cause and (cause is not None or gap.first <= last + 1):
                last = max(last, gap.last)
            else:
                self._gaps.append(gap)
        return Gap(first, last, cause)
