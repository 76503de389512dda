"""A client's access to its server or cluster: the address, and the shared connections."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from meteor_py.errors import ConnectionFailed, MeteorError
from meteor_py.redis import keys
from meteor_py.redis.address import Address, Node
from meteor_py.redis.connection import PAUSE_SHARE, Argument, Connection
from meteor_py.redis.embedded_connection import EmbeddedConnection
from meteor_py.redis.node_connections import NodeConnections
from meteor_py.redis.plain_client import open_plain
from meteor_py.redis.scripts import Script
from meteor_py.redis.sentinels import Sentinels
from meteor_py.redis.server_warnings import check_server, warn_of_hidden_history
from meteor_py.redis.shared_connection import SharedConnection
from meteor_py.redis.slot_map import SlotMap
from meteor_py.redis.topology import Outage, Search, Topology, slot_of, tag_of

if TYPE_CHECKING:
    import redis

    from meteor_py.server import EmbeddedServer

_T = TypeVar("_T")

#: COUNT argument of SCAN: the number of keys that the server examines per call.
_SCANNED = 1000
#: Maximum number of keys to list with one GETKEYSINSLOT command.
_SLOT_KEYS = 100_000
#: Minimum seconds for an attempt, even if it begins just before the deadline.
_ATTEMPT_MIN_S = 0.05
#: Minimum number of seconds to wait for each of several primaries, if that much time is left.
_NODE_S = 1.0

#: A fork increases this number in the child. Comparing it is cheaper than calling ``getpid()``.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Connector:
    """A client's access to its server or cluster. Thread-safe, and usable after a fork.

    ``call``, ``pipeline``, ``run`` and ``use`` may send a command more than once. An idle
    connection may have died unnoticed, so they retry once on a new one. On a cluster, and with
    sentinels, they retry for up to ``timeout_s`` seconds, because keys can move to other servers.
    Code that must not repeat a command must open its own connection.

    Threads take turns on one connection to a single server. On a cluster, and with sentinels, each
    call uses a separate connection, because a node that does not reply must not delay calls for
    other nodes.

    The *tag* of a command is the hash tag of its keys: the name of the stream or peer group.
    """

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        #: Whether to warn about server settings that can lose data.
        self.warns = True
        self._server: EmbeddedServer | None = None
        self._resolved: Address | None = None
        self._topology = _topology(address, timeout_s)
        self._topology.on_departure(self._keep_only)
        self._single: SharedConnection | None = None  # only for a single server
        # The factory holds no reference to this object, so that a dropped client is freed at once.
        self._nodes = NodeConnections(partial(Connection, address, timeout_s, self._topology, None))
        self._redis: redis.Redis | None = None
        self._checked: set[Node | None] = set()
        self._outage = Outage()
        self._closed = False
        self._lock = threading.RLock()
        self._forks = _forks

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
        """The redis-py client that ``Client.redis`` returns. ``close`` also closes this client."""
        address = self.resolve()  # raises if closed
        if self._redis is None:
            # Without the lock: redis-py may wait for nodes that do not reply.
            opened = open_plain(address, self.timeout_s, self._topology)
            with self._exclusive():
                if self._redis is None and not self._closed:
                    self._redis = opened
            if self._redis is not opened:  # another thread was faster, or closed this object
                opened.close()
        self._check_open()
        assert self._redis is not None, "opened above"
        return self._redis

    def open_connection(self, tag: str | None) -> Connection:
        """Return a new connection for keys with the hash tag ``tag``. The caller must close it."""
        return Connection(self.resolve(), self.timeout_s, self._topology, tag)

    def warn_of_hidden_history(self, tag: str) -> None:
        """Warn if the server that holds a tag's keys could lose records undetected."""
        if not self.warns:
            return
        try:
            self.use(warn_of_hidden_history, tag)
        except ConnectionFailed:
            pass  # an application may open a publisher before its server is up

    # -- commands on shared connections --------------------------------------------------------

    def call(self, *command: Argument) -> Any:
        """Send one command and return its reply."""
        if not self._topology.is_movable:
            return self._single_connection().use(self._use_checked, Connection.call, command)
        tag = tag_of(command) if self._topology.guards_slots else None
        return self.use(lambda connection: connection.call(*command), tag)

    def pipeline(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Send commands in one round trip and return their replies."""
        if not self._topology.guards_slots:
            return self.use(lambda found: found.pipeline(commands, found.timeout_s), None)
        return self._again(partial(self._scatter, commands))

    def run(self, script: Script, script_keys: Sequence[str], args: Sequence[Argument] = ()) -> Any:
        """Run a script and return its reply."""
        tag = tag_of(script_keys) if self._topology.guards_slots else None
        return self.use(lambda connection: connection.run(script, script_keys, args), tag)

    def use(self, work: Callable[[Connection], _T], tag: str | None) -> _T:
        """Call ``work`` with a shared connection to the server that holds a tag's keys.

        ``work`` may be called several times. It must not use the connector.
        """
        if not self._topology.is_movable:
            reply: _T = self._single_connection().use(self._use_checked, work)
            return reply

        def use_once(search: Search) -> _T:
            return self._use_at(self._locate(tag, search), search, work, tag)

        return self._again(use_once)

    def use_each(
        self,
        work: Callable[[Connection], _T],
        unreachable: Callable[[Address], _T] | None = None,
    ) -> list[_T]:
        """Call ``work`` with a connection to each primary, and return the results.

        Args:
            work: May be called several times for the same primary.
            unreachable: Returns the result for a primary that cannot be reached. Not called for a
                single server.

        Raises:
            ConnectionFailed: The primaries cannot be determined, or one of them cannot be reached
                and ``unreachable`` is None, or a single server cannot be reached.
        """
        if not self._topology.is_movable:
            return [self.use(work, None)]
        results: dict[Node, _T] = {}

        def use_rest(search: Search) -> None:
            nodes = self._topology.primaries(search)
            for node in [*results]:
                if node not in nodes:
                    del results[node]  # it is no longer a primary
            rest = [node for node in nodes if node not in results]
            for number, node in enumerate(rest, 1):
                share_s = self.timeout_s
                if unreachable is not None:  # all silent primaries share one timeout
                    share_s = search.share_s(len(rest) - number, _NODE_S)
                try:
                    results[node] = self._use_at(node, Search(share_s), work)
                except ConnectionFailed:
                    if unreachable is None:
                        raise
                    results[node] = unreachable(self.address.at(node))

        self._again(use_rest)
        return list(results.values())

    @property
    def is_cluster(self) -> bool:
        """Whether keys with different hash tags may be on different servers."""
        return self._topology.guards_slots

    def is_same_server(self, tag: str, other: str) -> bool:
        """Return whether two tags' keys are on the same server, as far as the client knows."""
        search = Search(self.timeout_s)
        return self._topology.locate(tag, search) == self._topology.locate(other, search)

    def find_keys(self, prefix: str) -> set[bytes]:
        """Return all keys that start with ``prefix``. The prefix must include the hash tag."""
        tag = tag_of([prefix])
        if not self._topology.guards_slots or tag is None:
            return _scan(self.call, prefix)
        return self.use(partial(_list_slot, slot=slot_of(tag), prefix=prefix), tag)

    def resolve(self) -> Address:
        """Return the server's address. Start the embedded server if the client uses one."""
        with self._exclusive():
            self._check_open()
            if self._resolved is None:
                self._resolved = self._resolve()
            return self._resolved

    def close(self) -> None:
        """Close the shared connections. An embedded server stops if this was its last user."""
        with self._exclusive():
            self._closed = True
            single = self._single
        self._topology.close()
        self._nodes.close()
        if single is not None:
            single.close_after_use()
        for resource in (self._redis, self._server):
            if resource is not None:
                resource.close()

    # -- helpers -------------------------------------------------------------------------------

    def _again(self, work: Callable[[Search], _T]) -> _T:
        """Call ``work``. If the connection fails, try again for up to ``timeout_s`` seconds."""
        search = Search(self.timeout_s)
        failures = 0
        while True:
            self._check_open()
            try:
                result = work(search)
            except ConnectionFailed:
                failures += 1
                pause = min(self._outage.pause_s(failures), self.timeout_s * PAUSE_SHARE)
                if pause > search.left_s:
                    raise
            else:
                self._outage.since = None
                return result
            time.sleep(pause)

    def _use_at(
        self, node: Node, search: Search, work: Callable[[Connection], _T], tag: str | None = None
    ) -> _T:
        """Call ``work`` once, with a connection to a node."""
        connection = self._take(node, search)
        connection.tag = tag  # for error messages
        try:
            return work(connection)
        finally:
            self._nodes.put_back(node, connection)

    def _scatter(self, commands: Sequence[Sequence[Argument]], search: Search) -> list[Any]:
        """Send each command to the node that holds its keys; return the replies in order.

        Commands without a key, such as MULTI, are allowed if all other commands have the same tag.
        """
        tags = [tag_of(command) for command in commands]
        first = next((tag for tag in tags if tag is not None), None)
        places = self._topology.locate_each([first, *tags], search)
        if None in places:
            places[None] = places[first]
        parts: dict[Any, list[int]] = {}
        for at, tag in enumerate(tags):
            parts.setdefault(places[tag], []).append(at)
        replies: list[Any] = [None] * len(commands)
        opened: list[tuple[Node, Connection, list[int]]] = []
        try:
            for node, numbers in parts.items():
                connection = self._take(node, search)
                opened.append((node, connection, numbers))
                connection.send(commands[at] for at in numbers)
            while opened:
                node, connection, numbers = opened[-1]
                found = connection.read_all(len(numbers), _left_s(search))
                for at, reply in zip(numbers, found, strict=True):
                    replies[at] = reply
                opened.pop()
                self._nodes.put_back(node, connection)
        finally:  # after an error, the next caller must not read these replies
            for _, connection, _ in opened:
                connection.close()
        return replies

    def _take(self, node: Node, search: Search) -> Connection:
        """Take out a connection to a node. Its timeout is the time that the search has left."""
        connection = self._nodes.take(node)
        connection.timeout_s = _left_s(search)
        try:
            if node not in self._checked:
                check_server(connection, warn=self.warns)
                self._checked.add(node)
        except BaseException:
            connection.close()
            raise
        return connection

    def _locate(self, tag: str | None, search: Search) -> Node:
        node = self._topology.locate(tag, search)
        assert node is not None, "only a single server has no nodes"
        return node

    def _keep_only(self, nodes: Collection[Node]) -> None:
        """Close the connections to nodes that have left."""
        self._nodes.keep_only(nodes)
        self._checked = {node for node in list(self._checked) if node in nodes}

    def _single_connection(self) -> SharedConnection:
        single = self._single
        if single is not None and self._forks == _forks and not self._closed:
            return single
        with self._exclusive():
            address = self.resolve()
            if self._single is None:
                self._single = SharedConnection(partial(Connection, address, self.timeout_s))
            return self._single

    def _use_checked(
        self, connection: Connection, work: Callable[..., _T], args: Sequence[Any] = ()
    ) -> _T:
        if self._closed:  # another thread may have closed the client in the meantime
            self._check_open()
        if connection.node not in self._checked:
            check_server(connection, warn=self.warns)
            self._checked.add(connection.node)
        return connection.retry_idle(work, connection, *args)

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
        """Return the lock.

        A forked child replaces the lock, because another thread of the parent may have held it.
        """
        forks = _forks
        if self._forks != forks:
            self._single = None  # at the fork, another thread may have been in a call
            self._lock = threading.RLock()
            self._forks = forks  # last: a thread that sees this value uses the new lock
        return self._lock


def _topology(address: Address, timeout_s: float) -> Topology:
    if address.kind == "cluster":
        return SlotMap(address)
    return Sentinels(address, timeout_s) if address.kind == "sentinel" else Topology()


def _left_s(search: Search) -> float:
    return max(search.left_s, _ATTEMPT_MIN_S)


def _scan(call: Callable[..., Any], prefix: str) -> set[bytes]:
    cursor, found = None, set[bytes]()
    while cursor != b"0":
        cursor, page = call("SCAN", cursor or b"0", "MATCH", f"{prefix}*", "COUNT", _SCANNED)
        found.update(page)
    return found


def _list_slot(connection: Connection, slot: int, prefix: str) -> set[bytes]:
    """Return the keys in a slot that start with ``prefix``.

    While a slot is being moved, each node holds only some of its keys. The server then redirects
    the final EXISTS, and the caller starts over.
    """
    count = int(connection.call("CLUSTER", "COUNTKEYSINSLOT", slot))
    if count > _SLOT_KEYS:  # SCAN takes longer, but does not block the server
        found = _scan(connection.call, prefix)
    else:
        listed = connection.call("CLUSTER", "GETKEYSINSLOT", slot, count + _SCANNED)
        found = {key for key in listed if key.startswith(prefix.encode())}
    connection.call("EXISTS", keys.guard(prefix))
    return found
