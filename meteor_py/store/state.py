"""Stream state that a store keeps in addition to records, so that the stream can be resumed.

Records alone are not enough to resume a stream on another server. A writer that repeats its last
transaction must find that the transaction is done. Groups must continue where they were. And
readers need the epoch table to find out whether records that they have seen are lost.

A fence is correct only for the records below one specific offset. If it is newer than the records,
a transaction counts as written although its records are gone. If it is older, records are written
twice. So the archiver takes a *snapshot* of the state, which is correct for the end of the stream
at that moment, and ends a segment exactly there. It saves the snapshot before the segment, together
with the previous segment's snapshot, because it may die in between. ``restored`` picks the snapshot
that matches the records in the store.

If the archiver is far behind, it also writes segments that end between two snapshots. A writer
whose fence differs between the two is then in doubt. ``restored`` makes the writer's next commit
fail instead of guessing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from meteor_py.records.config import OFFSET_MAX
from meteor_py.store.base import TERMS

_log = logging.getLogger(__name__)

#: Stands for the total frame count of a version that may or may not be in the log.
IN_DOUBT = OFFSET_MAX

_VERSION = 1
_FENCE = re.compile(r"(\d+):(\d+):(\d+)")


@dataclass(frozen=True)
class GroupState:
    """A subscriber group's position; see ``group:<g>`` in redis/keys.py."""

    start: int
    confirmed: int | None
    floating: str
    term: int

    def clamped(self, end: int) -> GroupState:
        """Return the same position, limited to the stream's end."""
        confirmed = None if self.confirmed is None else min(self.confirmed, end)
        # A term number in ``floating`` means that the group has had an owner. Clear it, so that the
        # group does not skip records that the owner received.
        floating = self.floating if self.floating == "floating" else ""
        return replace(self, start=min(self.start, end), confirmed=confirmed, floating=floating)


@dataclass(frozen=True)
class StreamState:
    """A snapshot of a stream whose records end at ``end``."""

    end: int
    #: The epoch table, in the format of the meta hash.
    epochs: str
    #: Each transaction writer's fence; see ``fences`` in redis/keys.py.
    fences: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, GroupState] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether every transaction is in the log either completely or not at all."""
        return not any(_is_part(fence) for fence in self.fences.values())


def encode(states: Iterable[StreamState]) -> bytes:
    """Return snapshots as file content, with a checksum."""
    content = {"version": _VERSION, "states": [asdict(state) for state in states]}
    body = json.dumps(content, separators=(",", ":")).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def decode(data: bytes) -> list[StreamState]:
    """Return the snapshots in a file.

    Raises:
        ValueError: The file is damaged, or a later release wrote it.
    """
    digest, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError("its checksum is wrong")
    content = json.loads(body)
    if content["version"] != _VERSION:
        raise ValueError(f"it has version {content['version']}, but this release reads {_VERSION}")
    states = []
    for each in content["states"]:
        groups = {name: GroupState(**group) for name, group in each.pop("groups").items()}
        states.append(StreamState(**each, groups=groups))
    return states


def restored(
    stream: str, saved: Mapping[int, bytes], epochs: Mapping[int, int], end: int
) -> StreamState | None:
    """Return the state for resuming a stream at ``end``; None if no usable state was saved.

    Args:
        saved: The snapshot files, by the term of the archiver that wrote them.
        epochs: The first live offset of each epoch in the store.
        end: The end of the records in the store.
    """
    before, after = _around(stream, saved, epochs, end)
    if before is None:
        return None
    fences = _settled(before.fences)
    if before.end < end and after is not None:
        fences |= _doubtful(before.fences, after.fences)
    elif before.end < end:
        _log.warning(
            "The store for stream %r has no state for records %d to %d, perhaps because another "
            "release of meteor-py archived them. If a writer repeats one of their transactions, "
            "its records will be duplicated.",
            *(stream, before.end, end - 1),
        )
    groups = {name: group.clamped(end) for name, group in before.groups.items()}
    return replace(before, fences=fences, groups=groups)


def last_snapshot(
    stream: str, saved: Mapping[int, bytes], epochs: Mapping[int, int], end: int
) -> StreamState | None:
    """Return the last snapshot at or before ``end``, for an archiver that continues there."""
    return _around(stream, saved, epochs, end)[0]


def _around(
    stream: str, saved: Mapping[int, bytes], epochs: Mapping[int, int], end: int
) -> tuple[StreamState | None, StreamState | None]:
    """Return the last snapshot at or before ``end``, and the first snapshot after it."""
    usable: list[tuple[int, int, StreamState]] = []
    for term, data in saved.items():
        # An epoch's records are live only below the first offset of every later epoch.
        later = [first for epoch, first in epochs.items() if epoch > term // TERMS]
        limit = min(later, default=None)
        usable += [
            (state.end, term, state)
            for state in _decoded(stream, term, data)
            if limit is None or state.end <= limit
        ]
    usable.sort(key=lambda each: each[:2])
    before = [state for at, _, state in usable if at <= end]
    after = [state for at, _, state in usable if at > end]
    return before[-1] if before else None, after[0] if after else None


def _decoded(stream: str, term: int, data: bytes) -> Sequence[StreamState]:
    try:
        return decode(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("Ignoring the state of stream %r from term %d: %s.", stream, term, error)
        return ()


def _doubtful(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return fences for the writers whose fences changed between two snapshots.

    The store may or may not have their last versions. Each fence names an incomplete version that
    has no plan, so the writer's next commit fails.
    """
    changed = {writer: fence for writer, fence in after.items() if before.get(writer) != fence}
    return {
        writer: f"{fence.partition(':')[0]}:0:{IN_DOUBT}:0" for writer, fence in changed.items()
    }


def _settled(fences: Mapping[str, str]) -> dict[str, str]:
    """Undo the fences for versions that have no frame in the log: their plans are lost.

    Such a fence goes back to the writer's previous version, which is complete, or is removed if
    there was none.
    """
    settled: dict[str, str] = {}
    for writer, fence in fences.items():
        match = _FENCE.match(fence)
        if match is None or match[2] != "0" or match[3] == "0":
            settled[writer] = fence
        elif int(match[1]) > 0:
            settled[writer] = f"{int(match[1]) - 1}:0:0"
    return settled


def _is_part(fence: str) -> bool:
    match = _FENCE.match(fence)
    return match is not None and 0 < int(match[2]) < int(match[3])
