"""A description of the server, from its INFO reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meteor_py.errors import ServerRefused
from meteor_py.redis.connection import Connection, parse_info


@dataclass(frozen=True)
class ServerDescription:
    """A snapshot of a server. Fields that the server does not disclose are None."""

    #: "valkey", "redis", or "fake".
    product: str | None = None
    version: str | None = None
    #: A "replica" serves reads but accepts no records.
    role: Literal["primary", "replica"] | None = None
    #: Memory in use, in bytes.
    memory: int | None = None
    #: Memory limit in bytes, above which the server accepts no records. Also None without a limit.
    memory_max: int | None = None
    #: Open connections, this one included.
    clients: int | None = None
    #: Seconds since the server was started.
    uptime: int | None = None


def describe_server(connection: Connection) -> ServerDescription:
    """Describe the server. All fields are None if the user may not call INFO (docs/acl.md)."""
    if connection.address.scheme == "fake":
        return ServerDescription("fake")
    try:
        return parse_facts(parse_info(connection.call("INFO")))
    except ServerRefused:
        return ServerDescription()


def parse_facts(facts: dict[str, str]) -> ServerDescription:
    """Convert the fields of INFO to a description. A server that reports no name is "redis".

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
