"""One look at all streams and their groups, and what two looks tell of the time between them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meteor_py import Client, Description, Stream

#: Streams that are looked at: each takes some round trips, and nobody reads a longer table.
STREAMS_MAX = 500


@dataclass(frozen=True)
class StreamSnapshot:
    """A stream, and when it was looked at, in seconds by a clock that only goes forward."""

    stream: Description
    at: float

    @property
    def unarchived(self) -> int:
        """Records that wait for the archiver; 0 without a store."""
        archived = self.stream.archived
        return 0 if archived is None else max(self.stream.next - archived, 0)

    @property
    def lag(self) -> int:
        """That of the group that is farthest behind; the archiver counts as one."""
        return max(self.unarchived, *(group.lag for group in self.stream.groups), 0)


@dataclass(frozen=True)
class Snapshot:
    """What there was at one moment, by the names of the streams."""

    streams: Mapping[str, StreamSnapshot] = field(default_factory=dict)
    #: Streams that are there, but could not be looked at, and why.
    unreadable: Mapping[str, str] = field(default_factory=dict)
    #: Streams that were not looked at, because there are too many.
    left_off: int = 0


@dataclass(frozen=True)
class Rates:
    """Records in a second; None where two looks cannot tell."""

    published: float | None = None
    archived: float | None = None
    #: What groups have confirmed, by their names.
    confirmed: Mapping[str, float] = field(default_factory=dict)


class Observer:
    """Looks at all streams, or at those that were named, again and again."""

    def __init__(self, client: Client, names: tuple[str, ...] = ()) -> None:
        self._client = client
        self._names = tuple(dict.fromkeys(names))
        self._opened: dict[str, Stream] = {}
        self._has_looked = False

    def look(self) -> Snapshot:
        """Look now. Streams that were deleted meanwhile are left out.

        Raises:
            ConnectionFailed: The server does not answer.
            MeteorError, ValueError: Nothing could be looked at, from the beginning.
        """
        from meteor_py import ConnectionFailed, MeteorError

        names = self._names or self._client.streams()
        # Those that were looked at before come first: else a new name would push out another,
        # which would look as if that had been deleted.
        chosen = sorted(names, key=lambda name: (name not in self._opened, name))[:STREAMS_MAX]
        streams: dict[str, StreamSnapshot] = {}
        unreadable: dict[str, str] = {}
        refusal: Exception | None = None
        for name in chosen:
            try:
                seen = self._see(name)
            except ConnectionFailed:
                raise
            except (MeteorError, ValueError) as error:  # not ours, or not for this user
                unreadable[name] = str(error)
                refusal = error
            else:
                if seen is not None:
                    streams[name] = seen
        # Later it is something to tell of: the streams that could be looked at were deleted, or
        # somebody has come to have a name among ours.
        if refusal is not None and not streams and not self._has_looked:
            raise refusal
        self._has_looked = True
        self._opened = {name: self._opened[name] for name in streams}
        return Snapshot(dict(sorted(streams.items())), unreadable, max(len(names) - STREAMS_MAX, 0))

    def _see(self, name: str) -> StreamSnapshot | None:
        """One stream; None if there is none."""
        from meteor_py import LogTruncated, StreamNotFound

        opened = self._opened.get(name)
        try:
            if opened is not None:
                try:
                    return StreamSnapshot(opened.describe(), time.monotonic())
                except LogTruncated:
                    pass  # created anew
            opened = self._opened[name] = self._client.stream(name, create=False)
            return StreamSnapshot(opened.describe(), time.monotonic())
        except (StreamNotFound, LogTruncated):
            return None


def rates_between(before: StreamSnapshot | None, after: StreamSnapshot) -> Rates:
    """How fast things went between two looks at a stream.

    A number that went back was set back, by a seek or by a server that lost records: that is no
    rate.
    """
    if before is None or not _same_history(before.stream, after.stream):
        return Rates()
    seconds = after.at - before.at
    if seconds <= 0:
        return Rates()

    def rate(old: int | None, new: int | None) -> float | None:
        return None if old is None or new is None or new < old else (new - old) / seconds

    old_groups = {group.name: group.confirmed for group in before.stream.groups}
    confirmed = {
        group.name: rate(old_groups.get(group.name), group.confirmed)
        for group in after.stream.groups
    }
    return Rates(
        rate(before.stream.next, after.stream.next),
        rate(before.stream.archived, after.stream.archived),
        {name: number for name, number in confirmed.items() if number is not None},
    )


def _same_history(before: Description, after: Description) -> bool:
    return (before.incarnation, before.epoch) == (after.incarnation, after.epoch)
