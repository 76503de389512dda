"""Descriptions of a server, or of a cluster and its primaries, based on INFO replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from meteor_py.errors import ServerRefused
from meteor_py.redis.address import Address, Node
from meteor_py.redis.connection import Connection, parse_info
from meteor_py.redis.connector import Connector

_T = TypeVar("_T", int, bool)


@dataclass(frozen=True)
class ServerDescription:
    """A snapshot of a server or cluster. Fields that the server does not disclose are None.

    For a cluster, ``memory``, ``memory_max`` and ``clients`` are sums over all primaries, and
    ``uptime`` is the shortest uptime of a primary. ``append_only`` is true if it is true for all
    primaries. Each of these five fields is None if one of the primaries does not disclose it or
    cannot be reached, and ``memory_max`` also if one of them has no limit. ``product``, ``version``
    and ``memory_policy`` list the different values of the primaries, separated by commas.
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
    #: The address. With sentinels it is the primary's address, and for a whole cluster it is None.
    address: str | None = None
    #: The server's ``maxmemory-policy``. Only "noeviction" is safe.
    memory_policy: str | None = None
    #: Whether the server keeps its data in an append-only file.
    append_only: bool | None = None
    #: For a node of a cluster, the slots that it owns: the first and the last of each range.
    slots: tuple[tuple[int, int], ...] = ()


def describe_all(connector: Connector) -> ServerDescription:
    """Describe the server, or the cluster and each of its primaries."""
    if connector.address.kind != "cluster":
        return connector.use(describe_server, None)
    nodes = tuple(connector.use_each(_describe_node, _unreachable))
    products = sorted({node.product for node in nodes if node.product})
    versions = sorted({node.version for node in nodes if node.version})
    policies = sorted({node.memory_policy for node in nodes if node.memory_policy})
    return ServerDescription(
        product=", ".join(products) or None,
        version=", ".join(versions) or None,
        role="primary",
        memory=_combined(sum, [node.memory for node in nodes]),
        memory_max=_combined(sum, [node.memory_max for node in nodes]),
        clients=_combined(sum, [node.clients for node in nodes]),
        uptime=_combined(min, [node.uptime for node in nodes]),
        nodes=nodes,
        memory_policy=", ".join(policies) or None,
        append_only=_combined(all, [node.append_only for node in nodes]),
    )


def _describe_node(connection: Connection) -> ServerDescription:
    rows: list[Any] = connection.call("CLUSTER", "SLOTS")
    slots = sorted((int(row[0]), int(row[1])) for row in rows if _is_at(row[2], connection.node))
    return replace(describe_server(connection), slots=tuple(slots))


def _is_at(primary: list[Any], node: Node | None) -> bool:
    """Return whether a primary in CLUSTER SLOTS is the node that was asked."""
    host, port = node or ("", 0)
    # A node that does not know its own address sends no host, or a question mark.
    return int(primary[1]) == port and primary[0] in (host.encode(), b"", b"?", None)


def _unreachable(address: Address) -> ServerDescription:
    return ServerDescription(address=str(address))


def _combined(function: Callable[[list[_T]], _T], values: list[_T | None]) -> _T | None:
    known = [value for value in values if value is not None]
    return function(known) if len(known) == len(values) else None


def describe_server(connection: Connection) -> ServerDescription:
    """Describe the server. If the user is not allowed to call INFO, only the address is set."""
    address = str(connection.target)
    if connection.address.scheme == "fake":
        return ServerDescription("fake", address=address)
    try:
        facts = parse_info(connection.call("INFO"))
    except ServerRefused:
        facts = {}
    return replace(parse_facts(facts), address=address)


def parse_facts(facts: dict[str, str]) -> ServerDescription:
    """Convert INFO fields to a description. A server with a version but no name is "redis".

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
        memory_policy=facts.get("maxmemory_policy"),
        append_only=None if "aof_enabled" not in facts else facts["aof_enabled"] == "1",
    )
