"""Offsets as Spark stores them: the next position to read in each stream.

    {"streams": {"orders": {"epoch": 1794836508123, "incarnation": "5f1d...", "offset": 17,
                            "path": "1:0,+1794836508123:10"}},
     "version": 1}

A query without a checkpoint starts from an offset that has no streams and the ``phase`` "new". The
first batch reads no records. It only stores the query's starting positions in the checkpoint, with
the phase "start". Otherwise, if the first batch failed, Spark would repeat it from positions that
are determined again and may have moved. If a first batch lacks this phase, a release before 0.2
planned it, and it reads records.

Spark compares offsets as text, so names are sorted. The incarnation distinguishes a recreated
stream from the original. The epoch and its path distinguish a server that has lost records from one
that merely has more. Offsets written before version 0.2 have no path.
"""

from __future__ import annotations

from typing import Any

from meteor_py import Position

Offsets = dict[str, Position]

_VERSION = 1
_NEW, _START = "new", "start"

#: The offset before a query's first batch.
INITIAL: dict[str, Any] = {"phase": _NEW, "streams": {}, "version": _VERSION}


def to_spark(offsets: Offsets) -> dict[str, Any]:
    """Convert offsets to the form that Spark writes to the checkpoint as JSON."""
    return {
        "streams": {
            name: {
                "epoch": position.epoch,
                "incarnation": position.incarnation,
                "offset": position.offset,
                "path": position.path,
            }
            for name, position in sorted(offsets.items())
        },
        "version": _VERSION,
    }


def start_to_spark(offsets: Offsets) -> dict[str, Any]:
    """Return the end of a query's first batch: the positions at which the query starts."""
    return {"phase": _START, **to_spark(offsets)}


def is_initial(stored: dict[str, Any]) -> bool:
    """Return whether this is the offset before the first batch."""
    return stored.get("phase") == _NEW


def is_start(stored: dict[str, Any]) -> bool:
    """Return whether this is the end of a first batch that reads no records."""
    return stored.get("phase") == _START


def from_spark(stored: dict[str, Any]) -> Offsets:
    """Return the offsets that Spark passes back, perhaps from an old checkpoint.

    Raises:
        ValueError: A different version of this package, or a different source, wrote them.
    """
    if stored.get("version") != _VERSION:
        raise ValueError(
            f"The checkpoint's offsets have format version {stored.get('version')!r}, but this "
            f"package reads version {_VERSION}. Use the release that wrote them, or a new "
            "checkpoint."
        )
    return {
        name: Position(found["incarnation"], found["epoch"], found["offset"], found.get("path", ""))
        for name, found in stored["streams"].items()
    }
