"""Describes a server, or a cluster's primaries, based on their INFO replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from meteor_py.errors import ServerRefused
from meteor_py.redis.address import Address
from meteor_py.redis.connection import Connection, parse_info
from meteor_py.redis.connector import Connector


@dataclass(frozen=True)
class ServerDescription:
    """A snapshot of a server or cluster. Fields that the server does not disclose are None.

    For a cluster, ``memory``, ``memory_max`` and ``clients`` are sums over all primaries, and
    ``uptime`` is the shortest uptime of a primary. Each of these four fields is None if one of the
    primaries does not disclose it or cannot be reached.
    """

    #: "valkey", "redis", or "fake".
    product: str | None = None
    version: str | None = None
    #: A "replica" serves reads but accepts no records.
    role: Literal["primary", "replica"] | None = None
    #: Memory in use, in bytes.
    memory: int | None = None
    #: Memory limit in bytes, above which the server accepts no records. None if there is no limit.
    memory_max: int | None = None
    #: Number of open connections, including the one that reads this number.
    clients: int | None = None
    #: Seconds since the server was started.
    uptime: int | None = None
    #: The primaries of a cluster. For an unreachable primary, only the address is set.
    nodes: tuple[ServerDescription, ...] = ()
    #: The address of a cluster node. None for any other server.
    address: str | None = None


def describe_all(connector: Connector) -> ServerDescription:
    """Describe the server, or the cluster and each of its primaries."""
    if connector.address.kind != "cluster":
        return connector.use(describe_server, None)
    nodes = tuple(connector.use_each(_describe_node, _unreachable))
    products = sorted({node.product for node in nodes if node.product})
    versions = sorted({node.version for node in nodes if node.version})
    return ServerDescription(
        product=", ".join(products) or None,
        version=", ".join(versions) or None,
        role="primary",
        memory=_combined(sum, [node.memory for node in nodes]),
        memory_max=_combined(sum, [node.memory_max for node in nodes]),
        clients=_combined(sum, [node.clients for node in nodes]),
        uptime=_combined(min, [node.uptime for node in nodes]),
        nodes=nodes,
    )


def _describe_node(connection: Connection) -> ServerDescription:
    return replace(describe_server(connection), address=str(connection.target))


def _unreachable(address: Address) -> ServerDescription:
    return ServerDescription(address=str(address))


def _combined(function: Callable[[list[int]], int], values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return function(known) if len(known) == len(values) else None


def describe_server(connection: Connection) -> ServerDescription:
    """Describe the server. If the user is not allowed to call INFO, all fields are None."""
    if connection.address.scheme == "fake":
        return ServerDescription("fake")
    try:
        return parse_facts(parse_info(connection.call("INFO")))
    except ServerRefused:
        return ServerDescription()


def parse_facts(facts: dict[str, str]) -> ServerDescription:
    """Convert INFO fields to a description. A server that reports no name is called "redis".

    >>> parse_facts({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "9.1.0"})
    ... # doctest: +ELLIPSIS
    ServerDescription(product='valkey', version='9.1.0', ...)
    """

    def number(name: str) -> int | None:
        text = facts.get(name, "")
        return int(text) if text.isdecimal() else None

    compatible = facts.get("redis_version")
    product = facts.get("server_name") or ("redis" if compatible else None)
    role = facts.get("role")
    return ServerDescription(
        product=product,
        version=facts.get(f"{product}_version", compatible),
        role="primary" if role == "master" else "replica" if role == "slave" else None,
        memory=number("used_memory"),
        memory_max=number("maxmemory") or None,
        clients=number("connected_clients"),
        uptime=number("uptime_in_seconds"),
    )
