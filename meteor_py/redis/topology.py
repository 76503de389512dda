"""Where the keys of a stream are: on one server, on a node of a cluster, or on a primary.

A connection asks its topology for a node whenever it connects, and reports a node that was the
wrong one. A server that replies "not here" (MOVED, READONLY) is thus like a lost connection: the
caller tries again, as it does anyway, and connects elsewhere.
"""

from __future__ import annotations

import time
from binascii import crc_hqx
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from meteor_py.redis.address import Node

_SLOTS = 16_384
#: Number of tags and slots to remember, for clients that list many streams again and again.
_CACHED = 8_192
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
    """A connection that a topology can tell to leave its node."""

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

    def locate_each(self, tags: Iterable[str | None]) -> dict[str | None, Node | None]:
        """Return the node of each tag, as ``locate`` does."""
        return {tag: self.locate(tag) for tag in tags}

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


@lru_cache(_CACHED)
def slot_of(tag: str) -> int:
    """Return the slot of all keys with a hash tag.

    >>> slot_of("orders")
    105
    """
    return crc_hqx(tag.encode(), 0) % _SLOTS  # the CRC16 of the cluster specification


def tag_of(arguments: Sequence[Any]) -> str | None:
    """Return what decides the slot of a command: the hash tag of its first key.

    Every key starts with ``meteor:``. A key without a hash tag is its own tag.

    >>> tag_of(("HGET", "meteor:{orders}:meta", "next"))
    'orders'
    >>> tag_of(("SMEMBERS", "meteor:streams"))
    'meteor:streams'
    """
    for argument in arguments:
        key = argument.decode(errors="replace") if isinstance(argument, bytes) else argument
        if isinstance(key, str) and key.startswith("meteor:"):
            return _tag(key)
    return None


@lru_cache(_CACHED)
def _tag(key: str) -> str:
    start = key.find("{") + 1
    stop = key.find("}", start)
    return key[start:stop] if 0 < start < stop else key


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
