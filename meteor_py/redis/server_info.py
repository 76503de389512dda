"""A description of the server, from its INFO reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meteor_py.errors import ServerRefused
from meteor_py.redis.connection import Connection, parse_info


@dataclass(frozen=True)
class ServerDescription:
    """A server, at the time of the call; None is what the server does not disclose."""

    #: "valkey", "redis", or "fake".
    product: str | None = None
    version: str | None = None
    #: "replica": it can be read, but takes no records.
    role: Literal["primary", "replica"] | None = None
    #: Memory in use, in bytes.
    memory: int | None = None
    #: Bytes from which on it takes no new records; None also if it has no such limit.
    memory_max: int | None = None
    #: Connections, this one included.
    clients: int | None = None
    #: Seconds since it was started.
    uptime: int | None = None


def describe_server(connection: Connection) -> ServerDescription:
    """Ask the server; a user who may not (docs/acl.md) gets a description without facts."""
    if connection.address.scheme == "fake":
        return ServerDescription("fake")
    try:
        return parse_facts(parse_info(connection.call("INFO")))
    except ServerRefused:
        return ServerDescription()


def parse_facts(facts: dict[str, str]) -> ServerDescription:
    """What INFO says. Products that are not known by a name of their own say they are Redis.

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
