"""The topology of a primary that sentinels monitor and replace.

After a failover, the former primary can accept writes for several seconds, until the sentinels
reach it. A client that asked the sentinels only after an error would lose everything it published
in that time. A thread therefore subscribes to ``+switch-master`` on all sentinels, and makes every
connection of the client leave the former primary at once.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import redis

from meteor_py.errors import AccessDenied, ConnectionFailed, MeteorError, ServerRefused
from meteor_py.redis.address import Address, Node
from meteor_py.redis.connection import Connection
from meteor_py.redis.topology import RefreshedTopology, Search, Watched
from meteor_py.redis.wire import NO_REPLY
from meteor_py.runtime.locks import LockBusy
from meteor_py.runtime.threads import JoinableThread

_log = logging.getLogger(__name__)

_CHANNEL = "+switch-master"
#: Minimum seconds to wait for one sentinel's reply before asking the next sentinel, if that much
#: time is left. Also the timeout for subscribing to a sentinel.
_ASK_S = 1.0
#: After a sentinel fails to reply, skip it for this many seconds if another sentinel replies.
_AVOID_S = 5.0
#: Seconds between the watcher's rounds. This is also the first pause before it reconnects to a
#: sentinel. The pause doubles after each failed attempt, up to the second value.
_RECONNECT_S, _RECONNECT_MAX_S = 1.0, 30.0
#: Seconds that ``close()`` waits for the watcher thread.
_JOIN_S = 3.0


class Sentinels(RefreshedTopology):
    """The primary that the sentinels name. Thread-safe, and usable after a fork.

    If the sentinels disagree, the reply with the highest configuration epoch wins, because a
    sentinel that is cut off from the others still names the former primary.
    """

    checks_role = True

    def __init__(self, address: Address, timeout_s: float) -> None:
        super().__init__()
        self._address = address
        self.timeout_s = timeout_s
        self._start_lock = threading.RLock()  # never held while asking a sentinel
        self.version = 0
        self._node: Node | None = None
        self._epoch = -1  # the configuration epoch in which ``_node`` became the primary
        self._sentinels = list(address.seeds)
        self._silent_until: dict[Node, float] = {}  # when to ask a silent sentinel again
        #: Weak references to the connections, keyed by the ``id()`` of the reference. Every access
        #: is a single atomic operation.
        self._connections: dict[int, weakref.ref[Watched]] = {}
        self._watcher: _Watcher | None = None
        self.is_closed = False

    def locate(self, tag: str | None, search: Search) -> Node:
        self._refresh_if_stale(search)
        self._start_watcher()
        if self._node is None:
            raise ConnectionFailed(f"The sentinels at {self._address} did not name a primary.")
        return self._node

    def primaries(self, search: Search) -> Sequence[Node]:
        return [self.locate(None, search)]

    def note_failed(self, node: Node | None) -> None:
        self._is_stale = True

    def watch(self, connection: Watched) -> None:
        reference = weakref.ref(connection, self._forget)
        self._connections[id(reference)] = reference

    def _forget(self, reference: weakref.ref[Watched]) -> None:
        self._connections.pop(id(reference), None)

    def close(self) -> None:
        self.is_closed = True
        watcher, self._watcher = self._watcher, None
        if watcher is not None and self._pid == os.getpid():
            watcher.stop()

    def check(self, search: Search) -> None:
        """Ask the sentinels now. If there is a new primary, make connections leave the old one."""
        try:
            search.run_locked(
                self._lock, search.timeout_s, lambda: self._refresh(search, force=True)
            )
        except (MeteorError, LockBusy) as error:
            self._is_stale = True  # makes the watcher ask again
            _log.debug("Cannot ask the sentinels at %s: %s", self._address, error)

    @property
    def is_stale(self) -> bool:
        """Whether the primary may have changed since the sentinels were last asked."""
        return self._is_stale

    @property
    def known(self) -> list[Node]:
        """The sentinels to listen to."""
        return list(self._sentinels)

    @property
    def _is_known(self) -> bool:
        return self._node is not None

    def _busy(self) -> str:
        return f"Another thread is still asking the sentinels at {self._address} for the primary."

    def _leave_parent(self) -> None:
        self._start_lock, self._watcher = threading.RLock(), None
        super()._leave_parent()

    def _refresh(self, search: Search, *, force: bool = False) -> None:
        """Ask the sentinels for the primary. If none replies, keep the known primary.

        With ``force``, include the sentinels that recently did not reply. One of them may have
        announced a new primary.
        """
        with self._asking():
            best, replied, failure = self._ask_all(search, force=force)
            # A minority may have missed a failover. If a majority reports a lower epoch, the
            # sentinels were set up again and their epochs restarted.
            is_majority = 2 * replied > len(self._sentinels)
            is_valid = best is not None and (best[0] >= self._epoch or is_majority)
            self._timer.note(found_news=is_valid and best != (self._epoch, self._node))
            if best is not None and is_valid:
                self._adopt(*best)
                return
        self._is_stale = True  # none replied, or only sentinels that may have missed a failover
        if self._node is None:
            raise self._unreachable(failure)

    def _ask_all(
        self, search: Search, *, force: bool
    ) -> tuple[tuple[int, Node] | None, int, MeteorError | None]:
        """Ask the sentinels until one names a new primary.

        Returns:
            The highest configuration epoch and its primary (None if no sentinel replied), the
            number of replies, and an error, if there was one.
        """
        best: tuple[int, Node] | None = None
        replied = 0
        failure: MeteorError | None = None
        now = time.monotonic()
        ordered = sorted(self._sentinels, key=lambda one: self._silent_until.get(one, 0.0))
        for number, sentinel in enumerate(ordered, 1):
            share_s = search.share_s(len(ordered) - number, _ASK_S)
            is_silent = not force and self._silent_until.get(sentinel, 0.0) > now
            if share_s <= 0 or (best is not None and is_silent):
                continue
            try:
                found, others = self._ask(sentinel, search, share_s)
            except MeteorError as error:
                search.check()
                self._silent_until[sentinel] = time.monotonic() + _AVOID_S
                if failure is None or isinstance(failure, ConnectionFailed):
                    failure = error
                continue
            self._silent_until.pop(sentinel, None)
            replied += 1
            best = max(best, found) if best is not None else found
            if best is found and others is not None:  # sentinels are added and removed over time
                self._sentinels = list(dict.fromkeys([*self._address.seeds, *others]))
                for gone in self._silent_until.keys() - self._sentinels:
                    self._silent_until.pop(gone, None)
            if found[0] > self._epoch >= 0:
                break  # there is a new primary: do not wait for sentinels that may not reply
        return best, replied, failure

    def _adopt(self, epoch: int, node: Node) -> None:
        before, self._node, self._epoch = self._node, node, epoch
        self._report_nodes([node])
        if before not in (None, node):
            self.version += 1
            for reference in list(self._connections.values()):
                connection = reference()
                if connection is not None:
                    connection.leave_node()

    def _ask(
        self, sentinel: Node, search: Search, timeout_s: float
    ) -> tuple[tuple[int, Node], list[Node] | None]:
        """Ask a sentinel; return its configuration epoch, the primary, and the other sentinels."""
        probe = Connection(self._address.sentinel_at(sentinel), timeout_s)
        flat, others = search.ask(
            probe,
            lambda connection: (
                connection.call("SENTINEL", "MASTER", self._address.service),
                self._peers_of(connection),
            ),
        )
        facts = dict(zip(flat[::2], flat[1::2], strict=True))
        node = facts[b"ip"].decode(), int(facts[b"port"])
        return (int(facts.get(b"config-epoch", 0)), node), others

    def _peers_of(self, connection: Connection) -> list[Node] | None:
        """Return the other sentinels that a sentinel knows.

        The client needs them because the seeds may be removed over time. Returns None if the user
        is not allowed to list them.
        """
        try:
            rows: list[Any] = connection.call("SENTINEL", "SENTINELS", self._address.service)
        except ServerRefused:
            return None
        peers = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in rows]
        return [(facts[b"ip"].decode(), int(facts[b"port"])) for facts in peers]

    def _unreachable(self, failure: MeteorError | None) -> MeteorError:
        if isinstance(failure, ServerRefused) and not isinstance(failure, AccessDenied):
            return ServerRefused(
                f"{failure}. Check that the sentinels monitor a primary named "
                f"{self._address.service!r}: run `redis-cli -p 26379 SENTINEL MASTERS`.",
                code=failure.code,
            )
        if failure is not None and not isinstance(failure, ConnectionFailed):
            return failure
        why = failure or "The timeout is too short."
        return ConnectionFailed(f"No sentinel at {self._address} replied. {why}")

    def _start_watcher(self) -> None:
        if self._watcher is None:
            with self._start_lock:
                if self._watcher is None and not self.is_closed:
                    watcher = _Watcher(self)
                    watcher.start()
                    self._watcher = watcher

    def open_subscription(self, sentinel: Node) -> Connection:
        """Return a connection subscribed to a sentinel's messages. The caller must close it."""
        connection = Connection(self._address.sentinel_at(sentinel), _ASK_S)
        try:
            connection.call("SUBSCRIBE", _CHANNEL)
        except BaseException:
            connection.close()
            raise
        return connection


class _Watcher:
    """A thread that listens to all sentinels of a topology until the topology is closed."""

    def __init__(self, topology: Sentinels) -> None:
        self._topology = weakref.ref(topology)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._stopped = False
        self._connections: dict[Node, Connection] = {}
        self._retry_at: dict[Node, float] = {}
        self._failures: dict[Node, int] = {}
        self._search: Search | None = None
        self._thread = JoinableThread(self._run, "meteor-sentinels")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait for it."""
        self._stopped = True
        try:
            self._wake.send(b".")
        except OSError:
            pass  # the thread has ended
        search = self._search
        if search is not None:
            search.interrupt()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            has_message = False
            while not self._stopped:
                topology = self._topology()
                if topology is None or topology.is_closed:  # None: dropped without being closed
                    return
                must_repeat = False
                try:
                    # A new subscription needs a check: an earlier message may have been missed.
                    is_new = self._connect(topology)
                    if has_message or is_new or topology.is_stale:
                        self._check(topology)
                except Exception:  # whatever happens, the thread must keep listening
                    must_repeat = True
                    _log.exception("The sentinel watcher failed. It will retry.")
                del topology
                has_message = self._wait() or must_repeat
        finally:
            self._disconnect(list(self._connections))
            self._woken.close()
            self._wake.close()

    def _check(self, topology: Sentinels) -> None:
        self._search = Search(topology.timeout_s)
        # Check only now: either stop() finds the search and interrupts it, or this check sees that
        # stop() was called.
        if not self._stopped:
            topology.check(self._search)

    def _disconnect(self, sentinels: Sequence[Node]) -> None:
        for sentinel in sentinels:
            self._connections.pop(sentinel).close()

    def _connect(self, topology: Sentinels) -> bool:
        """Subscribe to each sentinel that has no connection yet; return whether any succeeded."""
        found, known = False, topology.known
        self._disconnect([sentinel for sentinel in self._connections if sentinel not in known])
        for gone in self._failures.keys() - known:
            self._failures.pop(gone), self._retry_at.pop(gone, None)
        for sentinel in known:
            is_due = time.monotonic() >= self._retry_at.get(sentinel, 0.0)
            if sentinel in self._connections or not is_due or self._stopped:
                continue
            try:
                self._connections[sentinel] = topology.open_subscription(sentinel)
                self._failures.pop(sentinel, None)
                found = True
            except MeteorError as error:
                _log.debug("Cannot listen to the sentinel at %s: %s", sentinel, error)
                failures = self._failures[sentinel] = self._failures.get(sentinel, 0) + 1
                pause = min(_RECONNECT_S * 2 ** min(failures - 1, 5), _RECONNECT_MAX_S)
                self._retry_at[sentinel] = time.monotonic() + pause
        return found

    def _wait(self) -> bool:
        """Wait for messages; return whether one arrived or a connection ended."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        self._disconnect([node for node, c in self._connections.items() if c.fileno() < 0])
        for connection in self._connections.values():
            poll.register(connection.fileno(), select.POLLIN)
        poll.poll(_RECONNECT_S * 1000)
        found = False
        for sentinel, connection in list(self._connections.items()):
            try:
                while connection.wire is not None and connection.wire.read_now() is not NO_REPLY:
                    found = True
            except (OSError, redis.RedisError):
                self._disconnect([sentinel])
                found = True
        return found
