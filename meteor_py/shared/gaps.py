"""Gaps: records that were to be delivered and cannot be read; each is reported once."""

from __future__ import annotations

from typing import NamedTuple

from meteor_py.errors import (
    CorruptFrame,
    CorruptSegment,
    MeteorError,
    RecordsLost,
    UnsupportedFrame,
)

#: What may be wrong with records that exist.
Unreadable = CorruptFrame | UnsupportedFrame | CorruptSegment


class Gap(NamedTuple):
    """Some records, both ends included."""

    first: int
    last: int
    #: What is wrong with them; None if they are in neither ring nor store.
    cause: Unreadable | None = None

    def error(self, stream: str, group: str) -> RecordsLost | Unreadable:
        """Return the error to raise. Later records are delivered without further ado."""
        first, last, cause = self
        if cause is None:
            return RecordsLost(
                f"Records {first} to {last} of stream {stream!r} were dropped by the ring before "
                f"shared group {group!r} had processed them, and no store has them; a larger "
                "capacity, or a store, gives more time. The next poll continues after them.",
                stream=stream,
                first=first,
                last=last,
            )
        why = (
            "the store has damaged ones"
            if isinstance(cause, CorruptSegment)
            else (
                "a newer version of meteor-py wrote them"
                if isinstance(cause, UnsupportedFrame)
                else "their bytes are not what a publisher wrote"
            )
        )
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
    """The gaps that were not reported yet."""

    def __init__(self) -> None:
        self._gaps: list[Gap] = []

    def add(self, first: int, last: int, cause: MeteorError | None = None) -> None:
        assert cause is None or isinstance(cause, Unreadable), "nothing else is settled so"
        self._gaps.append(Gap(first, last, cause))

    def take(self) -> Gap | None:
        """Return and remove the first, merged with what belongs to it."""
        if not self._gaps:
            return None
        (first, last, cause), *others = sorted(self._gaps, key=_first)
        self._gaps = []
        for gap in others:
            # Of a frame that cannot be read, some records in between may be another consumer's.
            if gap.cause is cause and (cause is not None or gap.first <= last + 1):
                last = max(last, gap.last)
            else:
                self._gaps.append(gap)
        return Gap(first, last, cause)


def _first(gap: Gap) -> int:
    return gap.first
