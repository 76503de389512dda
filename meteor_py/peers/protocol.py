"""The peer group protocol: a group's keys in Redis, and the scripts that change them."""

from __future__ import annotations

import enum
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meteor_py.errors import OutOfMemory, PeerGroupNotFound
from meteor_py.peers.config import PeersConfig
from meteor_py.peers.member import Member, read_member
from meteor_py.redis import keys
from meteor_py.redis.scripts import (
    PEERS_DELETE,
    PEERS_DESCRIBE,
    PEERS_HEARTBEAT,
    PEERS_OPEN,
    Script,
)

if TYPE_CHECKING:
    from meteor_py.redis.connection import Connection
    from meteor_py.redis.connector import Connector


class Presence(enum.IntEnum):
    """Whether the server counts a session as a member, and if not, why not."""

    EXPELLED = 0
    MEMBER = 1
    REMOVED = 2
    REPLACED = 3


@dataclass(frozen=True)
class GroupStatus:
    """A group's state, as the server reports it."""

    incarnation: str
    view: int
    #: Identifies the last event: after a failover, another event can have the same number.
    mark: str
    term: int
    leader: str
    #: The leader's session.
    session: str


@dataclass(frozen=True)
class HeartbeatReply(GroupStatus):
    """The reply to a heartbeat."""

    #: Seconds since 1970 on the server's clock.
    time: float
    #: The presence of each member that the heartbeat named, in the same order.
    presence: list[Presence]
    #: Seconds until the next member becomes overdue; None if there is no live member.
    overdue_s: float | None
    #: Whether messages still have to be moved from dead or removed members; each call moves some.
    has_orphans: bool
    #: The ``ttl`` setting. Another process may have changed it by recreating the group.
    ttl: float


@dataclass(frozen=True)
class Look(GroupStatus):
    """A group's state, with its members."""

    members: dict[str, Member]
    #: The group's properties by name. Each value is JSON.
    properties: dict[str, bytes]


#: Represents a group that does not exist on the server.
UNKNOWN_GROUP = Look("", 0, "", 0, "", "", {}, {})


#: A group's keys, in the order that ``peers/open.lua`` expects. If the server has lost the settings
#: or the state, the script deletes all of these keys and creates the group again. It keeps the
#: guarded values, the list of removed members, and the dead letters.
PARTS = (
    *("config", "state", "members", "polls", "orphans", "limits", "pending", "agenda"),
    *("deadlines", "graced", "expirations", "candidates", "leaving", "events"),
    *("handlers", "properties"),
)

#: Prefixes of the keys for each member or handle, and of the keys for each message or poll.
_OF_MEMBERS = ("inbox", "movable", "awaited", "shared", "begun", "replies", "sender")
_TEMPORARY = ("message", "body", "poll", "votes")
#: Maximum number of keys that one call deletes.
_UNLINKED = 1_000


class PeerProtocol:
    """The keys and scripts of one peer group."""

    def __init__(self, connector: Connector, name: str) -> None:
        self.connector = connector
        self.name = name
        self.prefix = keys.peers(name)

    def key(self, part: str) -> str:
        return self.prefix + part

    def open_connection(self) -> Connection:
        """Return a new connection to the group's server. The caller must close it."""
        return self.connector.open_connection(self.name)

    def open(
        self, config: PeersConfig, connection: Connection | None = None, *, create: bool = True
    ) -> PeersConfig:
        """Create the group if it does not exist; return its settings.

        Raises:
            PeerGroupNotFound: The group does not exist, and ``create`` is false.
        """
        if not create:
            return self.settings()
        target = connection or self.connector
        # On a cluster, the list of groups is in a different slot from the group.
        registry = self.connector if self.connector.is_cluster else target
        fields = [item for pair in config.to_fields().items() for item in pair]
        names = [self.key(part) for part in PARTS]
        try:
            registry.call("SADD", keys.PEERS, self.name)
            flat = target.run(PEERS_OPEN, names, [secrets.token_hex(8), *fields])
            registry.call("SADD", keys.PEERS, self.name)  # another client may have removed the name
        except OutOfMemory:
            flat = target.call("HGETALL", self.key("config"))
            if not flat:
                raise  # the group does not exist, and creating it needs memory
        return _read_config(flat)

    def settings(self, connection: Connection | None = None) -> PeersConfig:
        """Return the settings of an existing group.

        Raises:
            PeerGroupNotFound: The group does not exist.
        """
        flat = (connection or self.connector).call("HGETALL", self.key("config"))
        if not flat:
            raise PeerGroupNotFound(
                f"There is no peer group {self.name!r}. client.peer_group() creates one.",
                group=self.name,
            )
        return _read_config(flat)

    def delete(self, *, force: bool) -> int:
        """Delete the group with all its keys.

        Returns:
            0 if the group was deleted; otherwise the number of live members that prevent it.
        """
        # Live members rejoin at once under their names, so the script that deletes the group must
        # also delete the keys that are named after members.
        of_members, temporary = self._scan()
        reply = self.run(PEERS_DELETE, ["force" if force else "", *of_members])
        if reply[0] == b"ALIVE":
            return int(reply[1])
        self.connector.call("SREM", keys.PEERS, self.name)
        if self.connector.call("EXISTS", self.key("config")):  # a client has recreated the group
            self.connector.call("SADD", keys.PEERS, self.name)
        for start in range(0, len(temporary), _UNLINKED):
            self.connector.call("UNLINK", *temporary[start : start + _UNLINKED])
        return 0

    def _scan(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys named after members and sessions, and the keys of messages and votes."""
        found = self.connector.find_keys(self.prefix)

        def named(parts: tuple[str, ...]) -> list[bytes]:
            prefixes = tuple(self.key(f"{part}:").encode() for part in parts)
            return [key for key in found if key.startswith(prefixes)]

        return named(_OF_MEMBERS), named(_TEMPORARY)

    def run(
        self, script: Script, args: Sequence[Any], connection: Connection | None = None
    ) -> list[Any]:
        """Run a script that is safe to repeat, and return its reply.

        Raises:
            PeerGroupNotFound: The server no longer has the group.
        """
        reply: list[Any] = (connection or self.connector).run(script, [self.prefix], args)
        if reply[0] == b"NOGROUP":
            raise PeerGroupNotFound(
                f"The server lost group {self.name!r}, or the group was deleted. Open it again "
                "with client.peer_group().",
                group=self.name,
            )
        return reply

    def heartbeat(
        self, connection: Connection | None, session: str, members: Sequence[str]
    ) -> HeartbeatReply:
        reply = self.run(PEERS_HEARTBEAT, [session, *members], connection)
        time, presence, next_ms, orphans, ttl_ms = reply[7:]
        return HeartbeatReply(
            *_status(reply),
            time=float(time),
            presence=[Presence(one) for one in presence],
            overdue_s=None if next_ms < 0 else next_ms / 1000,
            has_orphans=bool(orphans),
            ttl=ttl_ms / 1000,
        )

    def look(self, connection: Connection | None = None) -> Look:
        """Return the group's current state.

        Raises:
            PeerGroupNotFound: The group does not exist.
        """
        reply = self.run(PEERS_DESCRIBE, [], connection)
        members = {name: read_member(name, value) for name, value in read_fields(reply[7]).items()}
        return Look(*_status(reply), members=members, properties=read_fields(reply[8]))


def read_fields(flat: Sequence[bytes]) -> dict[str, bytes]:
    """Convert the alternating fields and values of a Redis reply to a dict."""
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def _status(reply: list[Any]) -> tuple[str, int, str, int, str, str]:
    incarnation, view, mark, term, leader, session = reply[1:7]
    return (
        *(incarnation.decode(), int(view), mark.decode()),
        *(int(term), leader.decode(), session.decode()),
    )


def _read_config(flat: list[bytes]) -> PeersConfig:
    return PeersConfig.from_fields({k: v.decode() for k, v in read_fields(flat).items()})
