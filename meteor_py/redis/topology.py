"""Where the keys of a stream are: on one server, on a node of a cluster, or on a primary.

A connection asks its topology for a node whenever it connects, and reports a node that was the
wrong one. A server that replies "not here" (MOVED, READONLY) is thus like a lost connection: the
caller tries again, as it does anyway, and connects elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from redis.crc import key_slot

from meteor_py.redis.address import Node

#: Seconds between two looks at the topology, however many connections have failed.
REFRESH_S = 0.1
#: Pauses between attempts in seconds while a slot moves or a primary changes: the first, which
#: doubles each time, and the longest.
PAUSES_S = (0.005, 0.1)
#: Redirects that are further apart than this, in seconds, have nothing to do with each other.
_APART_S = 1.0
#: Seconds after which a slot that still moves has probably been abandoned.
ABANDONED_S = 5.0


class Watched(Protocol):
    """A connection that a topology can make reconnect."""

    def leave_node(self) -> None: ...


class Topology:
    """The topology of a single server: it never moves."""

    #: Whether the keys may move to another server.
    is_movable = False
    #: Whether the scripts need a guard key, because slots move (see redis/scripts.py).
    guards_slots = False
    #: Whether a new connection must check that its server is a primary.
    checks_role = False
    #: Changes when connections must be made again.
    version = 0

    def locate(self, tag: str | None) -> Node | None:
        """Return the node with the keys of a hash tag, or any node if there is no tag.

        Returns None for a single server. It is at its address.
        """
        return None

    def primaries(self) -> Sequence[Node | None]:
        """Return all nodes that hold keys."""
        return [None]

    def note_moved(self, slot: int, node: Node) -> None:
        """Note that a server has named the node that has a slot now."""

    def note_failed(self, node: Node | None) -> None:
        """Note that a node was not reached, or is not a primary."""

    def watch(self, connection: Watched) -> None:
        """Let ``connection`` reconnect when its server is replaced."""

    def close(self) -> None:
        """Stop the thread of the topology, if any."""


def slot_of(tag: str) -> int:
    """Return the slot of all keys with a hash tag.

    >>> slot_of("orders")
    105
    """
    return int(key_slot(tag.encode()))


def tag_of(arguments: Sequence[Any]) -> str | None:
    """Return what decides the slot of a command: the hash tag of its first key.

    Every key starts with ``meteor:``. A key without a hash tag is its own tag.

    >>> tag_of(("HGET", "meteor:{orders}:meta", "next"))
    'orders'
    >>> tag_of(("SMEMBERS", "meteor:streams"))
    'meteor:streams'
    """
    for argument in arguments:
        text = argument.decode(errors="replace") if isinstance(argument, bytes) else argument
        if isinstance(text, str) and text.startswith("meteor:"):
            tag = text.partition("{")[2].partition("}")
            return tag[0] if tag[0] and tag[1] else text
    return None


def pauses_s(error: Exception | None, others_s: tuple[float, float]) -> tuple[float, float]:
    """Return the shortest and longest pause after ``error``: ``PAUSES_S`` after a redirect."""
    return PAUSES_S if getattr(error, "redirected", False) else others_s


class Redirects:
    """The redirects that one connection got in a row, while a slot moves or a primary changes."""

    def __init__(self) -> None:
        self._first = self._last = -_APART_S

    def note(self) -> float:
        """Note a redirect; return the seconds since the first one in a row."""
        now = time.monotonic()
        if now - self._last > _APART_S:
            self._first = now
        self._last = now
        return now - self._first
