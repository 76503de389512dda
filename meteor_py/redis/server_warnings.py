"""Warnings about servers whose settings can lose data, each with the remedy."""

from __future__ import annotations

import sys
import warnings

from meteor_py.errors import ServerRefused
from meteor_py.redis.connection import Connection, DataSafetyWarning, parse_info

#: The oldest server that has what we use.
_OLDEST = (7, 0)


def warn_of_dangers(connection: Connection) -> None:
    """Warn of a server that is too old, evicts keys, or keeps nothing on disk."""
    if connection.address.scheme in ("fake", "embedded"):
        return  # set up by ourselves
    try:
        facts = parse_info(connection.call("INFO"))
    except ServerRefused:
        return  # this user may not look; publishers warn of what that means
    for danger in dangers(facts):
        text = f"The server at {connection.address} {danger}"
        warnings.warn(text, DataSafetyWarning, stacklevel=_frames_of_ours() + 1)


def _frames_of_ours() -> int:
    """How many frames of this package the caller is inside of: a warning shows the user's line."""
    frame, count = sys._getframe(1), 0
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("meteor_py."):
        frame, count = frame.f_back, count + 1
    return count


def warn_of_hidden_history(connection: Connection) -> None:
    """Warn of a server whose fail-overs cannot be noticed."""
    if not connection.history and connection.address.scheme != "fake":
        text = (
            f"The server at {connection.address} hides its replication id (INFO replication), so "
            "records that it loses in a fail-over or restart will not be noticed; allow INFO for "
            "this user."
        )
        warnings.warn(text, DataSafetyWarning, stacklevel=_frames_of_ours() + 1)


def dangers(facts: dict[str, str]) -> list[str]:
    """What the facts of INFO say, as predicates with a remedy."""
    found: list[str] = []
    version = facts.get("redis_version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers and numbers < _OLDEST:
        found.append(f"is version {version}; use Redis 7.0, Valkey 7.2 or newer.")
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        found.append(
            f"evicts keys when it is full (maxmemory-policy {policy}), streams included; set "
            "maxmemory-policy noeviction."
        )
    if facts.get("aof_enabled") == "0":
        found.append(
            "loses its last records when it crashes, because append-only persistence is off; "
            "set appendonly yes."
        )
    return found
