"""A client's access to its server or cluster: the address, and the shared connections."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from meteor_py.errors import ConnectionFailed, MeteorError
from meteor_py.redis import keys
from meteor_py.redis.address import Address, Node
from meteor_py.redis.connection import Argument, Connection
from meteor_py.redis.embedded_connection import EmbeddedConnection
from meteor_py.redis.plain_client import open_plain
from meteor_py.redis.scripts import Script
from meteor_py.redis.sentinels import Sentinels
from meteor_py.redis.server_warnings import check_server, warn_of_hidden_history
from meteor_py.redis.shared_connection import ConnectionBusy, SharedConnection
from meteor_py.redis.slot_map import SlotMap
from meteor_py.redis.topology import PAUSES_S, Topology, slot_of, tag_of
from meteor_py.runtime.backoff import pause_s

if TYPE_CHECKING:
    import redis

    from meteor_py.server import EmbeddedServer

_T = TypeVar("_T")

#: COUNT argument of SCAN: the number of keys that the server examines per call.
_SCANNED = 1000
#: Maximum number of keys to list with one GETKEYSINSLOT command.
_SLOT_KEYS = 100_000
#: Maximum number of nodes to contact in parallel.
_NODES = 32


class Connector:
    """A client's access to its server or cluster. Thread-safe, and usable after a fork.

    ``call``, ``pipeline``, ``run`` and ``use`` share one connection per server. They may send a
    command more than once. An idle connection may have died unnoticed, so they retry once on a new
    one. On a cluster, and with sentinels, they retry for up to ``timeout_s`` seconds, because keys
    can move to other servers. Code that must not repeat a command must open its own connection.

    The *tag* of a command is the hash tag of its keys: the name of the stream or peer group.
    """

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._server: EmbeddedServer | None = None
        self._resolved: Address | None = None
        self._topology = _topology(address, timeout_s)
        self._shared: dict[Node | None, SharedConnection] = {}
        self._redis: redis.Redis | None = None
        self._checked: set[Node | None] = set()
        self._closed = False
        self._lock = threading.RLock()
        self._pid = os.getpid()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def is_private(self) -> bool:
        """Whether the server and its data disappear with this connector or this process."""
        return self.address.scheme == "fake" or (
            self.address.scheme == "embedded" and not self.address.place
        )

    @property
    def redis(self) -> redis.Redis:
        """See ``Client.redis``. Closing the connector also closes this client."""
        with self._exclusive():
            if self._redis is None:
                self._redis = open_plain(self.resolve(), self.timeout_s, self._topology)
            self.resolve()  # raises an error if the connector is closed
            return self._redis

    def open_connection(self, tag: str | None) -> Connection:
        """Return a new connection for the keys with a hash tag. The caller must close it."""
        return Connection(self.resolve(), self.timeout_s, self._topology, tag)

    def warn_of_hidden_history(self, tag: str) -> None:
        """Warn if the server that holds these keys could lose records undetected."""
        try:
            self.use(warn_of_hidden_history, tag)
        except ConnectionFailed:
            pass  # an application may open a publisher before its server is up

    # -- commands on shared connections --------------------------------------------------------

    def call(self, *command: Argument) -> Any:
        """Send one command and return its reply."""
        tag = tag_of(command) if self._topology.guards_slots else None
        return self.use(lambda connection: connection.call(*command), tag)

    def pipeline(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Send commands in one round trip and return their replies."""
        if not self._topology.guards_slots:
            return self.use(lambda found: found.pipeline(commands, self.timeout_s), None)
        return self._again(partial(self._scatter, commands))

    def run(self, script: Script, script_keys: Sequence[str], args: Sequence[Argument] = ()) -> Any:
        """Run a script and return its reply."""
        tag = tag_of(script_keys) if self._topology.guards_slots else None
        return self.use(lambda connection: connection.run(script, script_keys, args), tag)

    def use(self, work: Callable[[Connection], _T], tag: str | None) -> _T:
        """Call ``work`` with the shared connection to the server that holds the keys of a tag.

        ``work`` may be called several times. It must not use the connector.
        """
        if not self._topology.is_movable:
            return self._shared_connection(None).use(partial(self._checked_use, work))
        return self._again(lambda: self._use_at(self._topology.locate(tag), tag, work))

    def use_each(
        self,
        work: Callable[[Connection], _T],
        unreachable: Callable[[Address], _T] | None = None,
    ) -> list[_T]:
        """Call ``work`` with a connection to each primary, and return the results.

        Args:
            work: May be called several times for the same primary.
            unreachable: Returns the result for a primary that cannot be reached.

        Raises:
            ConnectionFailed: A primary cannot be reached, and ``unreachable`` is None.
        """
        if not self._topology.is_movable:
            return [self.use(work, None)]
        results: dict[Node | None, _T] = {}

        def use_rest() -> None:
            nodes = self._topology.primaries()
            for node in [*results]:
                if node not in nodes:
                    del results[node]  # it is no longer a primary
            for node in nodes:
                if node in results:
                    continue
                try:
                    results[node] = self._use_at(node, None, work)
                except ConnectionFailed:
                    if unreachable is None:
                        raise
                    results[node] = unreachable(self.address.at(node) if node else self.address)

        self._again(use_rest)
        return list(results.values())

    @property
    def is_cluster(self) -> bool:
        """Whether keys with different hash tags may be on different servers."""
        return self._topology.guards_slots

    def is_same_server(self, tag: str, other: str) -> bool:
        """Return whether two tags' keys are on the same server, as far as the client knows."""
        return self._topology.locate(tag) == self._topology.locate(other)

    def find_keys(self, prefix: str) -> set[bytes]:
        """Return all keys that start with ``prefix``. The prefix must include the hash tag."""
        tag = tag_of([prefix])
        if not self._topology.guards_slots or tag is None:
            return _scan(self.call, prefix)
        return self.use(partial(_list_slot, slot=slot_of(tag), prefix=prefix), tag)

    def resolve(self) -> Address:
        """Return the address to connect to. Starts an embedded server if the address names one."""
        with self._exclusive():
            self._check_open()
            if self._resolved is None:
                self._resolved = self._resolve()
            return self._resolved

    def close(self) -> None:
        """Close the shared connections. An embedded server stops with its last user."""
        with self._exclusive():
            self._closed = True
            shared = list(self._shared.values())
        self._topology.close()
        for connection in shared:
            connection.close_after_use()
        for resource in (self._redis, self._server):
            if resource is not None:
                resource.close()

    # -- helpers -------------------------------------------------------------------------------

    def _again(self, work: Callable[[], _T]) -> _T:
        """Call ``work``. If the connection fails, try again for up to ``timeout_s`` seconds."""
        deadline = time.monotonic() + self.timeout_s
        failures = 0
        while True:
            self._check_open()
            try:
                return work()
            except ConnectionFailed:
                failures += 1
                pause = pause_s(failures, *PAUSES_S)
                if time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)

    def _use_at(self, node: Node | None, tag: str | None, work: Callable[[Connection], _T]) -> _T:
        """Call ``work`` once, with the shared connection to a node."""

        def use(connection: Connection) -> _T:
            connection.tag = tag  # for error messages
            return self._checked_use(work, connection)

        try:
            # Without a timeout, a signal handler that holds one node's connection and waits for
            # another's could deadlock.
            return self._shared_connection(node).use(use, timeout_s=self.timeout_s)
        except ConnectionBusy:
            raise ConnectionFailed(
                f"Other threads kept the connection to {self.address} busy until the deadline."
            ) from None

    def _scatter(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Send each command to the node that holds its keys; return the replies in order.

        Commands without a key, such as MULTI, are allowed if all other commands have the same tag.
        """
        tags = [tag_of(command) for command in commands]
        first = next((tag for tag in tags if tag is not None), None)
        places = self._topology.locate_each([first, *tags])
        if None in places:
            places[None] = places[first]
        parts: dict[Any, list[int]] = {}
        for at, tag in enumerate(tags):
            parts.setdefault(places[tag], []).append(at)
        replies: list[Any] = [None] * len(commands)
        ordered = sorted(parts.items())  # a fixed order, so that two threads cannot deadlock
        for start in range(0, len(ordered), _NODES):
            self._exchange(commands, replies, ordered[start : start + _NODES], [])
        return replies

    def _exchange(
        self,
        commands: Sequence[Sequence[Argument]],
        replies: list[Any],
        parts: list[tuple[Node, list[int]]],
        opened: list[tuple[Connection, list[int]]],
    ) -> None:
        """Reserve connections to all nodes, send all commands, then read all replies."""
        if parts:
            node, places = parts[0]

            def reserve(connection: Connection) -> None:
                self._exchange(commands, replies, parts[1:], [*opened, (connection, places)])

            self._use_at(node, None, reserve)
            return
        try:
            for connection, places in opened:
                connection.send(commands[at] for at in places)
            for connection, places in opened:
                found = connection.read_all(len(places), self.timeout_s)
                for at, reply in zip(places, found, strict=True):
                    replies[at] = reply
        except BaseException:  # The next caller must not read this call's unread replies.
            for connection, _ in opened:
                connection.close()
            raise

    def _shared_connection(self, node: Node | None) -> SharedConnection:
        with self._exclusive():
            self._check_open()
            shared = self._shared.get(node)
            if shared is None:
                address = self.resolve()
                # Drop lost connections. Otherwise this dict would grow with every replaced node.
                self._shared = {at: one for at, one in self._shared.items() if one.connected}
                opener = partial(Connection, address, self.timeout_s, self._topology, None, node)
                shared = self._shared[node] = SharedConnection(opener)
            return shared

    def _checked_use(self, work: Callable[[Connection], _T], connection: Connection) -> _T:
        self._check_open()  # another thread may have closed the client in the meantime
        if connection.node not in self._checked:
            check_server(connection)
            self._checked.add(connection.node)
        if self._topology.is_movable:  # the caller retries, possibly on another connection
            return work(connection)
        return connection.retry_idle(work, connection)

    def _resolve(self) -> Address:
        if self.address.scheme == "fake":
            from meteor_py.redis.fake import fake_address

            return fake_address(self.address)
        if self.address.scheme == "embedded":
            from meteor_py.server import open_embedded

            self._server = open_embedded(self.address.place)
            return replace(
                self.address,
                options={"embedded": self._server},
                connection_class=EmbeddedConnection,
            )
        return self.address

    def _check_open(self) -> None:
        if self._closed:
            raise MeteorError(f"The client for {self.address} is closed. Connect again.")

    def _exclusive(self) -> threading.RLock:
        """Return the lock. A forked child replaces it: its holder may exist only in the parent."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._lock = threading.RLock()
            self._shared = {}  # at the fork, another thread may have been in the middle of a call
        return self._lock


def _topology(address: Address, timeout_s: float) -> Topology:
    if address.kind == "cluster":
        return SlotMap(address, timeout_s)
    return Sentinels(address, timeout_s) if address.kind == "sentinel" else Topology()


def _scan(call: Callable[..., Any], prefix: str) -> set[bytes]:
    cursor, found = None, set[bytes]()
    while cursor != b"0":
        cursor, page = call("SCAN", cursor or b"0", "MATCH", f"{prefix}*", "COUNT", _SCANNED)
        found.update(page)
    return found


def _list_slot(connection: Connection, slot: int, prefix: str) -> set[bytes]:
    """Return the keys in a slot that start with ``prefix``.

    While a slot moves, each node holds only some of its keys. The server then redirects the EXISTS
    command at the end, and the caller repeats everything.
    """
    count = int(connection.call("CLUSTER", "COUNTKEYSINSLOT", slot))
    if count > _SLOT_KEYS:  # SCAN takes longer, but does not block the server
        found = _scan(connection.call, prefix)
    else:
        listed = connection.call("CLUSTER", "GETKEYSINSLOT", slot, count + _SCANNED)
        found = {key for key in listed if key.startswith(prefix.encode())}
    connection.call("EXISTS", keys.guard(prefix))
    return found
