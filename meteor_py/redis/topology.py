"""Finds the server that holds a stream's keys: a single server, a cluster node, or a primary.

Whenever a connection connects, it asks its topology for a node. If that node turns out to be the
wrong one, the connection reports it to the topology. Callers therefore treat a "not here" reply
(MOVED, READONLY) like a lost connection: they retry, and the retry connects to another node.
"""

from __future__ import annotations

import time
from binascii import crc_hqx
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from meteor_py.redis.address import Node

_SLOTS = 16_384
#: Number of tags and slots to cache, for clients that repeatedly list many streams.
_CACHED = 8_192
#: Minimum number of seconds between two refreshes, even if many connections fail.
REFRESH_S = 0.1
#: First and longest pause, in seconds, between attempts while a slot moves or a primary changes.
#: The pause doubles after each attempt.
PAUSES_S = (0.005, 0.1)
#: Redirects more than this many seconds apart are unrelated.
_APART_S = 1.0
#: If a slot has been moving for this many seconds, the move was probably abandoned.
ABANDONED_S = 5.0


class Watched(Protocol):
    """A connection that a topology can tell to leave its node."""

    def leave_node(self) -> None: ...


class Topology:
    """The topology of a single server, whose keys never move."""

    #: Whether the keys may move to another server.
    is_movable = False
    #: Whether slots can move, so that scripts need a guard key (see redis/scripts.py).
    guards_slots = False
    #: Whether a new connection must check that its server is a primary.
    checks_role = False
    #: Increases whenever all connections must reconnect.
    version = 0

    def locate(self, tag: str | None) -> Node | None:
        """Return the node that holds the keys with a hash tag, or any node if there is no tag.

        Returns None for a single server, which is always at the address itself.
        """
        return None

    def locate_each(self, tags: Iterable[str | None]) -> dict[str | None, Node | None]:
        """Return the node for each tag, like ``locate``."""
        return {tag: self.locate(tag) for tag in tags}

    def primaries(self) -> Sequence[Node | None]:
        """Return all primary nodes. A single server is represented by None."""
        return [None]

    def note_moved(self, slot: int, node: Node) -> None:
        """Record that a server named ``node`` as the new owner of a slot."""

    def note_failed(self, node: Node | None) -> None:
        """Record that a node could not be reached, or is not a primary."""

    def watch(self, connection: Watched) -> None:
        """Make ``connection`` reconnect when its server is replaced."""

    def close(self) -> None:
        """Stop the topology's background thread, if it has one."""


@lru_cache(_CACHED)
def slot_of(tag: str) -> int:
    """Return the slot for all keys with a hash tag.

    >>> slot_of("orders")
    105
    """
    return crc_hqx(tag.encode(), 0) % _SLOTS  # the CRC16 that the cluster specification requires


def tag_of(arguments: Sequence[Any]) -> str | None:
    """Return the hash tag of a command's first key, which decides the command's slot.

    Every key starts with ``meteor:``. If a key has no hash tag, the whole key is the tag.

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
    """Return the shortest and longest pause after ``error``.

    They are ``PAUSES_S`` if the error is a redirect, and ``others_s`` otherwise.
    """
    return PAUSES_S if getattr(error, "redirected", False) else others_s


class Redirects:
    """Consecutive redirects on one connection, while a slot moves or a primary changes."""

    def __init__(self) -> None:
        self._first = self._last = -_APART_S

    def note(self) -> float:
        """Record a redirect; return the seconds since the first of the consecutive redirects."""
        now = time.monotonic()
        if now - self._last > _APART_S:
            self._first = now
        self._last = now
        return now - self._first
