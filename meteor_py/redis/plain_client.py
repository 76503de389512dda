"""Plain redis-py clients, for applications that also use the server for other purposes."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from redis.connection import AbstractConnection
from redis.exceptions import ConnectionError, ResponseError

from meteor_py.redis.address import Address
from meteor_py.redis.connection import connection_options
from meteor_py.redis.topology import Search, Topology
from meteor_py.redis.wire import READ_SIZE

if TYPE_CHECKING:
    import redis


def open_plain(address: Address, timeout_s: float, topology: Topology) -> redis.Redis:
    """Return a redis-py client that does not retry after a connection error.

    For a cluster, return a ``RedisCluster``, which still follows redirects.
    """
    options = {**address.options, **connection_options(address, timeout_s)}
    options["socket_read_size"] = READ_SIZE
    if address.uses_tls:
        options["redis_connect_func"] = _take_tickets
    if address.kind == "cluster":
        return cast("redis.Redis", _open_cluster(address, options))
    from redis import ConnectionPool, Redis

    connection_class = address.connection_class
    if address.kind == "sentinel":
        connection_class = _following(connection_class, address, topology)
    return Redis.from_pool(ConnectionPool(connection_class=connection_class, **options))


def _open_cluster(address: Address, options: dict[str, Any]) -> redis.RedisCluster:
    from redis.cluster import ClusterNode, RedisCluster

    for name in ("db", "retry_on_timeout", "retry_on_error"):
        options.pop(name, None)
    return RedisCluster(
        startup_nodes=[ClusterNode(*node) for node in address.seeds],
        address_remap=lambda node: address.remap.get(node, node),
        ssl=address.uses_tls,
        **options,
    )


def _following(base: Any, address: Address, topology: Topology) -> Any:
    """Return a connection class that always connects to the primary that the sentinels name.

    When the primary is replaced, the topology shuts down the sockets of these connections. Commands
    in progress then raise ``redis.ConnectionError``, and the pool opens new connections.
    """

    class FollowingConnection(base):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            topology.watch(self)

        def _connect(self) -> socket.socket:
            version = topology.version
            node = topology.locate(None, Search(self.socket_connect_timeout))
            assert node is not None, "Sentinels.locate() returned no node"
            where = address.at(node).options
            self.host, self.port = where["host"], where["port"]
            connected: socket.socket = super()._connect()
            self._sock = connected  # set before the check, so that leave_node() finds the socket
            if topology.version != version:
                connected.close()
                raise ConnectionError(f"The primary of {address} has changed.")
            return connected

        def leave_node(self) -> None:
            sock = self._sock
            if sock is not None and self.pid == os.getpid():  # else the parent owns it
                with suppress(OSError):  # already closed
                    sock.shutdown(socket.SHUT_RDWR)

    return FollowingConnection


def _take_tickets(connection: AbstractConnection) -> None:
    """Prepare a TLS connection for a redis-py pool.

    After the handshake, a TLS 1.3 server sends session tickets. If they stay unread, the pool
    mistakes them for the reply to an earlier command and rejects the connection. Reading the reply
    to a PING also reads the tickets.
    """
    connection.on_connect()
    connection.send_command("PING", check_health=False)
    try:
        connection.read_response()
    except ResponseError:  # the user is not allowed to send PING, but the tickets were read
        pass
