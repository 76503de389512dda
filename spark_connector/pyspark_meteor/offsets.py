"""Offsets as Spark keeps them: where each stream is to be read from next.

    {"streams": {"orders": {"epoch": 1794836508123, "incarnation": "5f1d...", "offset": 17}},
     "version": 1}

Spark compares them as text, so the order of names is fixed. The incarnation and the epoch tell a
stream that was created anew, and a server that lost records, from one that only has more.
"""

from __future__ import annotations

from typing import Any

from meteor_py import Position

Offsets = dict[str, Position]

_VERSION = 1


def to_spark(offsets: Offsets) -> dict[str, Any]:
    """For the engine, which makes JSON of it."""
    return {
        "streams": {
            name: {
                "epoch": position.epoch,
                "incarnation": position.incarnation,
                "offset": position.offset,
            }
            for name, position in sorted(offsets.items())
        },
        "version": _VERSION,
    }


def from_spark(kept: dict[str, Any]) -> Offsets:
    """What the engine hands back, perhaps from a checkpoint of long ago.

    Raises:
        ValueError: It is of a newer version, or not of ours.
    """
    if kept.get("version") != _VERSION:
        raise ValueError(
            f"The checkpoint has offsets of version {kept.get('version')!r}, and this is version "
            f"{_VERSION}; use the release that wrote it, or a new checkpoint."
        )
    return {
        name: Position(place["incarnation"], place["epoch"], place["offset"])
        for name, place in kept["streams"].items()
    }
