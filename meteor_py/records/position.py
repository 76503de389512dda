"""A position in a stream, and how to tell that the server has lost records below it.

A server that fails over to a lagging replica, or restarts without its last second, gives out
offsets a second time. So a position kept outside the server is not an offset alone, but
(incarnation, epoch, offset): the incarnation changes when a stream is created anew, the epoch
when the server's history does (a new ``master_replid``: each restart, each fail-over). The table
``epochs`` in meta has the first offset of each epoch: a reader above the first offset of a later
epoch than its own has seen records that are gone.
"""

from __future__ import annotations

from typing import NamedTuple


class Position(NamedTuple):
    """The next offset to process, in one incarnation and one epoch of a stream."""

    incarnation: str
    epoch: int
    offset: int


def diverged_at(position: Position, epochs: str, end: int) -> int | None:
    """Return the first offset of what ``position`` knows and the server lost, or None.

    Args:
        position: The position of a reader or publisher.
        epochs: The table of the stream's epochs, as in meta.
        end: The stream's next offset.

    >>> diverged_at(Position("i", 1, 200), "1:0,2:100", 300)
    100
    >>> diverged_at(Position("i", 1, 100), "1:0,2:100", 300) is None
    True
    >>> diverged_at(Position("i", 1, 200), "1:0", 150)
    150
    """
    table = [
        (int(number), int(first))
        for number, _, first in (entry.partition(":") for entry in epochs.split(","))
    ]
    known = [first for number, first in table if number > position.epoch]
    newest, begun = table[-1]
    if not known and end < position.offset:
        known = [end]  # no client has begun a new epoch yet
    elif not known and newest < position.epoch:
        known = [begun]  # ours was lost as a whole, and the server's clock had gone back
    lowest = max(min(known, default=position.offset), 0)
    return lowest if lowest < position.offset else None
