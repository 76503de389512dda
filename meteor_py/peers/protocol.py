"""The protocol of a peer group: its keys in Redis, and the scripts that change them."""

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
    """Whether the server counts a session as a member, and if not, why."""

    EXPELLED = 0
    MEMBER = 1
    REMOVED = 2
    REPLACED = 3


@dataclass(frozen=True)
class GroupStatus:
    """The state of a group, as the server reports it."""

    incarnation: str
    view: int
    #: Which of the events with that number was the last: a fail-over can lose some.
    mark: str
    term: int
    leader: str
    #: The session of the leader.
    session: str


@dataclass(frozen=True)
class HeartbeatReply(GroupStatus):
    """The reply to a heartbeat."""

    #: Seconds since 1970 by the server's clock.
    time: float
    #: One for each member that the heartbeat named.
    presence: list[Presence]
    #: Seconds until the next member is overdue; None if there is no member.
    overdue_s: float | None
    #: Whether messages of members that are gone wait to be handed over: a part with each call.
    has_orphans: bool
    #: The setting, in seconds: the process that starts the group again chooses it.
    ttl: float


@dataclass(frozen=True)
class Look(GroupStatus):
    """A group at one instant."""

    members: dict[str, Member]


#: A group that the server does not know.
UNKNOWN_GROUP = Look("", 0, "", 0, "", "", {})


#: The keys of a group, in the order that ``peers/open.lua`` expects. The script resets all of them
#: if the server has lost a part. Guarded values, removed members and dead letters survive that.
PARTS = (
    *("config", "state", "members", "polls", "orphans", "limits", "pending", "agenda"),
    *("deadlines", "graced", "expirations", "candidates", "leaving", "events"),
)

#: Parts of which a group has many: those named after a member or handle, and those with random
#: names.
_OF_MEMBERS = ("inbox", "movable", "awaited", "replies")
_TEMPORARY = ("message", "poll", "votes")
#: Keys that one call deletes.
_UNLINKED = 1_000


class PeerProtocol:
    """One peer group."""

    def __init__(self, connector: Connector, name: str) -> None:
        self.connector = connector
        self.name = name
        self.prefix = keys.peers(name)

    def key(self, part: str) -> str:
        return self.prefix + part

    def open(
        self, config: PeersConfig, connection: Connection | None = None, *, create: bool = True
    ) -> PeersConfig:
        """Begin the group if it does not exist; return how it is set up."""
        if not create:
            return self.settings()
        target = self.connector if connection is None else connection
        fields = [item for pair in config.to_fields().items() for item in pair]
        names = [self.key(part) for part in PARTS]
        try:
            target.call("SADD", keys.PEERS, self.name)
            flat = target.run(PEERS_OPEN, names, [secrets.token_hex(8), *fields])
            target.call("SADD", keys.PEERS, self.name)  # in between it may have been deleted
        except OutOfMemory:
            flat = target.call("HGETALL", self.key("config"))
            if not flat:
                raise  # one that exists goes on also where the server is full
        return _read_config(flat)

    def settings(self, connection: Connection | None = None) -> PeersConfig:
        """How a group that exists is set up.

        Raises:
            PeerGroupNotFound: It does not.
        """
        target = self.connector if connection is None else connection
        flat = target.call("HGETALL", self.key("config"))
        if not flat:
            raise PeerGroupNotFound(
                f"There is no peer group {self.name!r}; client.peer_group() begins one.",
                group=self.name,
            )
        return _read_config(flat)

    def delete(self, *, force: bool) -> int:
        """Delete the group with all its keys.

        Returns:
            0 if it is deleted. Without ``force``, the number of live members that prevent it.
        """
        # Live members join again at once, under their names: keys that are named after members are
        # deleted in the same step as the group.
        of_members, temporary = self._scan()
        reply = self.run(PEERS_DELETE, ["force" if force else "", *of_members])
        if reply[0] == b"ALIVE":
            return int(reply[1])
        self.connector.call("SREM", keys.PEERS, self.name)
        if self.connector.call(
            "EXISTS", self.key("config")
        ):  # another process has started it again
            self.connector.call("SADD", keys.PEERS, self.name)
        for start in range(0, len(temporary), _UNLINKED):
            self.connector.call("UNLINK", *temporary[start : start + _UNLINKED])
        return 0

    def _scan(self) -> tuple[list[bytes], list[bytes]]:
        """The keys of members and handles, and those of messages and votes. Most would expire by
        themselves, or disappear with a member."""
        found: set[bytes] = set()
        cursor = b"0"
        while True:
            cursor, page = self.connector.call(
                "SCAN", cursor, "MATCH", self.key("*"), "COUNT", 1000
            )
            found.update(page)
            if cursor == b"0":
                return self._among(found, _OF_MEMBERS), self._among(found, _TEMPORARY)

    def _among(self, found: set[bytes], parts: tuple[str, ...]) -> list[bytes]:
        begin = tuple(self.key(f"{part}:").encode() for part in parts)
        return [key for key in found if key.startswith(begin)]

    def run(
        self, script: Script, args: Sequence[Any], connection: Connection | None = None
    ) -> list[Any]:
        """Run a script that may be repeated, and return its reply.

        Raises:
            PeerGroupNotFound: The group is gone from the server.
        """
        target = self.connector if connection is None else connection
        reply: list[Any] = target.run(script, [self.prefix], args)
        if reply[0] == b"NOGROUP":
            raise PeerGroupNotFound(
                f"The server has lost the group {self.name!r}, or it was deleted; open it again "
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
        """The group as it is now.

        Raises:
            PeerGroupNotFound: The server does not know it.
        """
        reply = self.run(PEERS_DESCRIBE, [], connection)
        members = {name: read_member(name, value) for name, value in read_fields(reply[7]).items()}
        return Look(*_status(reply), members=members)


def read_fields(flat: Sequence[bytes]) -> dict[str, bytes]:
    """Fields and values that Redis lists in turn."""
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def _status(reply: list[Any]) -> tuple[str, int, str, int, str, str]:
    incarnation, view, mark, term, leader, session = reply[1:7]
    return (
        *(incarnation.decode(), int(view), mark.decode()),
        *(int(term), leader.decode(), session.decode()),
    )


def _read_config(flat: list[bytes]) -> PeersConfig:
    return PeersConfig.from_fields({k: v.decode() for k, v in read_fields(flat).items()})
