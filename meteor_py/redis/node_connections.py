"""Connections to the nodes of a cluster, or to the primary reported by the sentinels."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from meteor_py.redis.address import Node
from meteor_py.redis.connection import Connection

#: Maximum number of idle connections to keep for each node.
_IDLE_MAX = 32


class NodeConnections:
    """Idle connections by node. A caller takes a connection out, and puts it back after its call.

    No caller waits for another one. If a node does not reply, only calls to that node are delayed.
    A node never has more connections than there have been calls to it at the same time.

    Thread-safe without a lock, because each change of the state is one call into C. A signal
    handler may therefore use this object in the middle of another call. If the handler raises an
    exception, the connection that the interrupted call had taken out is dropped, which closes it.
    """

    def __init__(self, open_connection: Callable[[Node], Connection]) -> None:
        self._open_connection = open_connection
        self._idle: dict[Node, deque[Connection]] = {}
        self._nodes: Collection[Node] | None = None  # None means all nodes
        self._is_closed = False

    def take(self, node: Node) -> Connection:
        """Return a connection to ``node``, connected or not."""
        try:
            return self._idle[node].pop()
        except (KeyError, IndexError):
            return self._open_connection(node)

    def put_back(self, node: Node, connection: Connection) -> None:
        """Keep a connection for the next caller, or close it."""
        idle = self._idle.setdefault(node, deque())
        if len(idle) < _IDLE_MAX:
            idle.append(connection)  # even if unconnected: it remembers its redirects
        else:
            connection.close()
        # Check only now: either keep_only() finds the connection, or this check finds that the node
        # has left.
        if self._is_closed or (self._nodes is not None and node not in self._nodes):
            self._close(node)

    def keep_only(self, nodes: Collection[Node]) -> None:
        """Close the connections to all other nodes, including those that are put back later."""
        self._nodes = nodes
        for node in list(self._idle):
            if node not in nodes:
                self._close(node)

    def close(self) -> None:
        """Close all connections, including those that are put back later."""
        self._is_closed = True
        for node in list(self._idle):
            self._close(node)

    def _close(self, node: Node) -> None:
        idle = self._idle.pop(node, None)
        while idle:
            try:
                idle.pop().close()
            except IndexError:
                return  # another thread has taken the last one
