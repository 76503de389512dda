"""Snapshots of all streams and their groups, and the rates between two snapshots."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meteor_py import Client, Description, Stream

#: Maximum number of streams in a snapshot, because each takes several round trips.
STREAMS_MAX = 500


@dataclass(frozen=True)
class StreamSnapshot:
    """The state of a stream at one point in time."""

    stream: Description
    at: float

    @property
    def unarchived(self) -> int:
        """Number of records waiting for the archiver; 0 without a store."""
        archived = self.stream.archived
        return 0 if archived is None else max(self.stream.next - archived, 0)

    @property
    def lag(self) -> int:
        """The largest lag of any group. The archiver counts as a group."""
        return max(self.unarchived, *(group.lag for group in self.stream.groups), 0)


@dataclass(frozen=True)
class Snapshot:
    """The state of all streams, by name."""

    streams: Mapping[str, StreamSnapshot] = field(default_factory=dict)
    #: Streams that could not be read, with the reason.
    unreadable: Mapping[str, str] = field(default_factory=dict)
    #: Number of streams beyond ``STREAMS_MAX``.
    left_off: int = 0


@dataclass(frozen=True)
class Rates:
    """Records per second; None if unknown."""

    published: float | None = None
    archived: float | None = None
    #: Records confirmed per second, by group. Groups whose rate is unknown are missing.
    confirmed: Mapping[str, float] = field(default_factory=dict)


class Observer:
    """Takes snapshots of all streams, or of the named ones."""

    def __init__(self, client: Client, names: tuple[str, ...] = ()) -> None:
        self._client = client
        self._names = tuple(dict.fromkeys(names))
        self._opened: dict[str, Stream] = {}
        self._has_succeeded = False

    def snapshot(self) -> Snapshot:
        """Take a snapshot.

        Raises:
            ConnectionFailed: The server cannot be reached.
            MeteorError, ValueError: In the first snapshot, no stream could be read.
        """
        from meteor_py import ConnectionFailed, MeteorError

        names = self._names or self._client.streams()
        # Known streams come first. Otherwise a new stream could displace a known one, which would
        # then seem to be deleted.
        chosen = sorted(names, key=lambda name: (name not in self._opened, name))[:STREAMS_MAX]
        streams: dict[str, StreamSnapshot] = {}
        unreadable: dict[str, str] = {}
        refusal: Exception | None = None
        for name in chosen:
            try:
                seen = self._see(name)
            except ConnectionFailed:
                raise
            except (MeteorError, ValueError) as error:  # for example, no permission
                unreadable[name] = str(error)
                refusal = error
            else:
                if seen is not None:
                    streams[name] = seen
        # In later snapshots, an unreadable stream is a change to report, not a reason to fail.
        if refusal is not None and not streams and not self._has_succeeded:
            raise refusal
        self._has_succeeded = True
        self._opened = {name: self._opened[name] for name in streams}
        return Snapshot(dict(sorted(streams.items())), unreadable, max(len(names) - STREAMS_MAX, 0))

    def _see(self, name: str) -> StreamSnapshot | None:
        """Return the state of a stream, or None if it does not exist."""
        from meteor_py import LogTruncated, StreamNotFound

        opened = self._opened.get(name)
        try:
            if opened is not None:
                try:
                    return StreamSnapshot(opened.describe(), time.monotonic())
                except LogTruncated:
                    pass  # the stream was deleted and recreated
            opened = self._opened[name] = self._client.stream(name, create=False)
            return StreamSnapshot(opened.describe(), time.monotonic())
        except (StreamNotFound, LogTruncated):
            return None


def rates_between(before: StreamSnapshot | None, after: StreamSnapshot) -> Rates:
    """Return the rates between two snapshots of a stream.

    If an offset has decreased, after a seek or a loss of records, its rate is unknown.
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
