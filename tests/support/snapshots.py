"""Stream snapshots built by hand, for testing `top` and `watch`."""

from __future__ import annotations

from typing import Any

import meteor_py as meteor
from meteor_cli.live.snapshot import Snapshot, StreamSnapshot


def group(
    name: str = "g", confirmed: int = 0, owner: str | None = None, term: int = 1, lag: int = 0
) -> meteor.GroupDescription:
    return meteor.GroupDescription(name, confirmed, lag, owner, term)


def seen(name: str = "s", at: float = 0.0, **fields: Any) -> StreamSnapshot:
    defaults: dict[str, Any] = {
        "first": 0, "next": 10, "length": 10, "frames": 1, "bytes": 100, "appended": 0,
        "archived": None, "archiver": None, "config": meteor.StreamConfig(), "incarnation": "i",
        "epoch": 1, "epoch_first": 0, "groups": (),
    }  # fmt: skip
    return StreamSnapshot(meteor.Description(name=name, **(defaults | fields)), at)


def look(*streams: StreamSnapshot, **fields: Any) -> Snapshot:
    return Snapshot({each.stream.name: each for each in streams}, **fields)
