"""Warnings about server settings that can lose data, each with its remedy."""

from __future__ import annotations

import sys
import warnings

from meteor_py.errors import ServerRefused
from meteor_py.redis.connection import (
    Connection,
    DataSafetyWarning,
    node_of_cluster,
    parse_info,
)

#: The oldest version that supports every command and option that meteor_py uses.
_OLDEST = (7, 0)


def check_server(connection: Connection, *, warn: bool) -> None:
    """Check a server before its first use.

    Args:
        warn: Whether to warn if the server is too old, evicts keys, or has append-only persistence
            turned off.

    Raises:
        ServerRefused: The server is a node of a cluster, but the address names a single server.
            On a cluster, scripts without a guard key could stop in the middle (redis/scripts.py).
    """
    if connection.address.scheme in ("fake", "embedded"):
        return  # meteor_py has configured this server
    try:
        facts = parse_info(connection.call("INFO"))
    except ServerRefused:
        return  # the user is not allowed to call INFO; see warn_of_hidden_history
    if facts.get("cluster_enabled") == "1" and not connection.topology.guards_slots:
        raise node_of_cluster(connection.address)
    for danger in dangers(facts) if warn else ():
        text = f"The server at {connection.target} {danger}"
        warnings.warn(text, DataSafetyWarning, stacklevel=_frames_of_ours() + 1)


def find_dangers(connection: Connection) -> list[str]:
    """Return warnings about server settings that endanger data, each with its remedy."""
    facts = _ask(connection)
    return [f"The server at {connection.target} {danger}" for danger in dangers(facts)]


def eviction_policy(connection: Connection) -> str | None:
    """Return the server's eviction policy if it can delete meteor_py's keys, else None.

    Also return None if the user is not allowed to call INFO.
    """
    facts = _ask(connection)
    policy = facts.get("maxmemory_policy", "noeviction")
    return None if policy == "noeviction" or facts.get("maxmemory") == "0" else policy


def _ask(connection: Connection) -> dict[str, str]:
    if connection.address.scheme in ("fake", "embedded"):
        return {}
    try:
        return parse_info(connection.call("INFO"))
    except ServerRefused:
        return {}


def _frames_of_ours() -> int:
    """Count meteor_py's frames on the stack, so that a warning points to the user's code."""
    frame, count = sys._getframe(1), 0
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("meteor_py."):
        frame, count = frame.f_back, count + 1
    return count


def warn_of_hidden_history(connection: Connection) -> None:
    """Warn if failovers of this server cannot be detected."""
    if not connection.history and connection.address.scheme != "fake":
        text = (
            f"The server at {connection.target} hides its replication id (INFO replication), so "
            "records that it loses in a failover or restart cannot be detected. Allow INFO for "
            "this user."
        )
        warnings.warn(text, DataSafetyWarning, stacklevel=_frames_of_ours() + 1)


def dangers(facts: dict[str, str]) -> list[str]:
    """Return a clause for each danger in the INFO fields, to follow "The server at ..."."""
    found: list[str] = []
    version = facts.get("redis_version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers and numbers < _OLDEST:
        found.append(f"is version {version}; use Redis 7.0, Valkey 7.2 or newer.")
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        found.append(
            f"evicts keys, streams included, when it is full (maxmemory-policy {policy}). Set "
            "maxmemory-policy noeviction."
        )
    if facts.get("aof_enabled") == "0":
        found.append(
            "loses its last records when it crashes, because append-only persistence is off. "
            "Set appendonly yes."
        )
    return found
