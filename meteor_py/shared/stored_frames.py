"""Entries for the index of what it has dropped: made from the records, which only the store has."""

from __future__ import annotations

from meteor_py.errors import RecordsLost
from meteor_py.records.ordering_index import OrderingRule
from meteor_py.shared.frame_cache import FrameCache
from meteor_py.shared.protocol import Answer, Entry

#: Records of the store that are put into the index at a time.
_COLD = 4_096


def cold_entry(
    payloads: FrameCache, grouping: OrderingRule, answer: Answer, before: Entry | None
) -> Entry:
    """What the next step needs to go on from where one met what only the store has.

    Args:
        answer: Of the step that met it.
        before: What that step was given; it may not be used up.

    Returns:
        The entry; without strings if nobody has the records.

    Raises:
        ConnectionFailed, StoreUnavailable: Not now.
        CorruptSegment: They are damaged.
    """
    if before is not None and before.covers(answer.next):
        return before
    try:
        chunk = payloads.cold(answer.next, answer.cold)[0]
    except RecordsLost as gap:
        return Entry(answer.next, (), min(gap.last + 1, answer.cold))
    size = min(len(chunk), answer.cold - answer.next, _COLD)
    rows = chunk.slice(0, size).to_arrow()
    return Entry(answer.next, grouping.index_rows(rows), answer.next + size)
