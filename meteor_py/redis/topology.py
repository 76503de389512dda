"""Topologies, which find the server that holds a stream's keys.

The server is a single server, a cluster node, or the primary that sentinels name. Whenever a
connection connects, it asks its topology for a node. If that node turns out to be the wrong one,
the connection reports it to the topology. Callers therefore treat a "not here" reply (MOVED,
READONLY) like a lost connection: they retry, and the retry connects to another node.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from binascii import crc_hqx
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from meteor_py.errors import ConnectionFailed
from meteor_py.redis.address import Node
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.locks import LockBusy, run_locked

_T = TypeVar("_T")

_SLOTS = 16_384
#: Maximum number of entries in each cache of tags and slots. It is large, because some clients list
#: many streams again and again.
_CACHED = 8_192
#: Minimum number of seconds between two refreshes, even if many connections fail: at first, and
#: in a long outage.
_REFRESH_S, _REFRESH_MAX_S = 0.1, 1.0
#: Pauses between attempts in seconds while a slot moves or a primary changes. They start at the
#: first value, double up to the second, and then grow slowly up to the third.
_FIRST_S, _STEADY_S, _LONGEST_S = 0.005, 0.1, 1.0
#: Factor by which pauses grow in a long outage. A pause is then about a sixth of the time that the
#: outage has lasted, so clients notice its end soon, but do not flood the servers meanwhile.
_GROWTH = 1.2
#: Redirects, or refreshes of the topology, more than this many seconds apart are unrelated.
_APART_S = 3.0
#: Seconds without a failed call after which an outage counts as over.
_FORGET_S = 10.0
#: Seconds between checks for an interrupt while a search waits for another thread.
_SLICE_S = 0.05
#: If a slot has been moving for this many seconds, the move was probably abandoned.
ABANDONED_S = 5.0


class Watched(Protocol):
    """A connection that a topology can tell to leave its node."""

    def leave_node(self) -> None: ...


class Probe(Protocol):
    """A connection that asks a server where the keys are."""

    def connect(self) -> object: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


_P = TypeVar("_P", bound=Probe)


class Search:
    """The search for a node on behalf of one caller, for at most ``timeout_s`` seconds.

    Any thread may interrupt the search.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._is_interrupted = False
        self._probe: Probe | None = None

    @property
    def left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def share_s(self, others: int, least_s: float) -> float:
        """Return the seconds to wait for one server, if ``others`` more can be asked after it.

        The result is at least ``least_s``, but at most half of the time left, so that the others
        can still be asked. If there are no others, it is all of the time left.
        """
        left_s = self.left_s
        return min(max(least_s, left_s / (others + 1)), left_s / 2) if others else left_s

    def ask(self, probe: _P, work: Callable[[_P], _T]) -> _T:
        """Call ``work`` with a connection to one server, and close the connection."""
        self._probe = probe
        try:
            probe.connect()
            self.check()  # from here on, interrupt() finds a socket
            return work(probe)
        finally:
            self._probe = None
            probe.close()

    def run_locked(self, lock: threading.RLock, timeout_s: float, work: Callable[[], _T]) -> _T:
        """Call ``work`` with a lock held.

        Raises:
            LockBusy: Another thread did not release the lock within ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + min(timeout_s, self.left_s)
        while True:
            self.check()
            left_s = max(deadline - time.monotonic(), 0.0)
            try:
                return run_locked(lock, min(left_s, _SLICE_S), work)
            except LockBusy:
                if left_s <= _SLICE_S:
                    raise

    def check(self) -> None:
        """Raise ``ConnectionFailed`` if the search was interrupted."""
        if self._is_interrupted:
            raise ConnectionFailed("The search for the server that has the keys was interrupted.")

    def interrupt(self) -> None:
        """Make the search fail."""
        self._is_interrupted = True
        probe = self._probe
        if probe is not None:
            probe.interrupt()


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

    _departure: weakref.WeakMethod[Callable[[Collection[Node]], None]] | None = None

    def locate(self, tag: str | None, search: Search) -> Node | None:
        """Return the node that holds the keys with a hash tag, or any node if there is no tag.

        Returns None for a single server, which is always at the address itself.
        """
        return None

    def locate_each(
        self, tags: Iterable[str | None], search: Search
    ) -> dict[str | None, Node | None]:
        """Return the node for each tag, like ``locate``."""
        return {tag: self.locate(tag, search) for tag in tags}

    def primaries(self, search: Search) -> Sequence[Node]:
        """Return all primary nodes; for a single server, an empty sequence."""
        return ()

    def on_departure(self, keep_only: Callable[[Collection[Node]], None]) -> None:
        """Whenever a node may have left, call a method with the remaining nodes.

        The topology does not keep the method's object alive.
        """
        self._departure = weakref.WeakMethod(keep_only)

    def _report_nodes(self, nodes: Collection[Node]) -> None:
        keep_only = self._departure and self._departure()
        if keep_only:
            keep_only(nodes)

    def note_moved(self, slot: int, node: Node) -> None:
        """Record that, according to a server, ``node`` is the new owner of a slot."""

    def note_failed(self, node: Node | None) -> None:
        """Record that a node could not be reached, or is not a primary."""

    def watch(self, connection: Watched) -> None:
        """Make ``connection`` reconnect when its server is replaced."""

    def close(self) -> None:
        """Stop the topology's background thread, if it has one."""


class RefreshTimer:
    """Decides when to refresh a topology: soon at first, less often in a long outage."""

    def __init__(self) -> None:
        self._refreshed_at = -_APART_S
        #: Consecutive refreshes that found nothing new.
        self.fruitless = 0

    @property
    def is_due(self) -> bool:
        interval_s = min(_REFRESH_S * _GROWTH**self.fruitless, _REFRESH_MAX_S)
        return time.monotonic() - self._refreshed_at >= interval_s

    def note(self, *, found_news: bool) -> None:
        """Note that a refresh has ended."""
        now = time.monotonic()
        is_first = found_news or now - self._refreshed_at > _APART_S
        self.fruitless = 0 if is_first else min(self.fruitless + 1, 100)
        self._refreshed_at = now


class RefreshedTopology(Topology):
    """A topology that asks servers where the keys are, and asks again if they may have moved.

    Only one thread asks at a time.
    """

    is_movable = True

    def __init__(self) -> None:
        self._is_stale = True
        self._timer = RefreshTimer()
        self._lock = threading.RLock()
        self._pid = os.getpid()

    @property
    def _is_known(self) -> bool:
        """Whether the topology was found at least once."""
        raise NotImplementedError

    def _refresh(self, search: Search) -> None:
        """Ask the servers. If none replies, keep the previous answer."""
        raise NotImplementedError

    def _busy(self) -> str:
        """Return the error message for a caller that waited too long for another thread."""
        raise NotImplementedError

    def _leave_parent(self) -> None:
        """After a fork, replace the objects that belong to the parent process."""
        self._lock, self._pid = threading.RLock(), os.getpid()

    def _refresh_if_stale(self, search: Search) -> None:
        if self._pid != os.getpid():
            self._leave_parent()
        if self._is_usable():
            return
        # If an older answer is known, wait only briefly for a thread that is already asking: the
        # server that it asks may be silent.
        patience_s = _REFRESH_S if self._is_known else search.timeout_s
        try:
            search.run_locked(self._lock, patience_s, lambda: self._refresh_once(search))
        except LockBusy:
            if not self._is_known:
                raise ConnectionFailed(self._busy()) from None

    def _refresh_once(self, search: Search) -> None:
        if not self._is_usable():  # else another thread has just refreshed
            self._refresh(search)

    def _is_usable(self) -> bool:
        return self._is_known and not (self._is_stale and self._timer.is_due)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Clear the stale flag, and set it again if the refresh fails or is interrupted."""
        # Clear it first: another thread may set it again while this one asks.
        self._is_stale = False
        try:
            yield
        except BaseException:
            self._is_stale = True  # the next caller asks at once
            raise


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


def redirect_pause_s(failures: int) -> float:
    """Return the seconds to wait after consecutive redirects, with jitter.

    >>> redirect_pause_s(1) <= 0.005 and 0.5 <= redirect_pause_s(1000) <= 1
    True
    """
    doubled_s = _FIRST_S * 2.0 ** min(failures - 1, 30)
    if doubled_s <= _STEADY_S:
        return pause_s(failures, _FIRST_S, _STEADY_S)
    steps = failures - 6  # doubling reaches _STEADY_S at the sixth failure
    return min(_STEADY_S * _GROWTH ** min(steps, 100), _LONGEST_S) * random.uniform(0.5, 1)


def pause_after_s(error: Exception | None, failures: int, others_s: tuple[float, float]) -> float:
    """Return the seconds to wait after consecutive failures, of which ``error`` was the last.

    ``others_s`` are the first and the longest pause after errors other than redirects.
    """
    if getattr(error, "redirected", False):
        return redirect_pause_s(failures)
    return pause_s(failures, *others_s)


class Outage:
    """The time for which all calls have failed. Calls that begin later start with longer pauses."""

    __slots__ = ("_last", "since")

    def __init__(self) -> None:
        #: When the first of these calls failed; None after a successful call.
        self.since: float | None = None
        self._last = 0.0  # when the last of these calls failed

    def pause_s(self, failures: int) -> float:
        """Return the seconds to wait after a call has failed for the nth time, with jitter."""
        now = time.monotonic()
        since = self.since
        if since is None or now - self._last > _FORGET_S:  # the client was idle meanwhile
            self.since = since = now
        self._last = now
        lasting_s = min((now - since) * (1 - 1 / _GROWTH), _LONGEST_S)
        return max(redirect_pause_s(failures), lasting_s * random.uniform(0.5, 1))


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
