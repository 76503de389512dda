"""The books of a peer group: its keys in Redis, and what may be done to them."""

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
from meteor_py.redis.scripts import PEERS_DESCRIBE, PEERS_HEARTBEAT, PEERS_OPEN, Script

if TYPE_CHECKING:
    from meteor_py.redis.connection import Connection
    from meteor_py.redis.connector import Connector


class Here(enum.IntEnum):
    """Whether somebody is a member, and if not, why."""

    EXPELLED = 0
    YES = 1
    REMOVED = 2
    REPLACED = 3


@dataclass(frozen=True)
class Beat:
    """How a group stands, in answer to a sign of life."""

    life: str
    view: int
    #: Which of the events with that number was the last: a fail-over can lose some.
    mark: str
    term: int
    leader: str
    #: The session of the leader.
    session: str
    #: Seconds since 1970 by the server's clock.
    time: float
    #: For each member that was named, whether it is one.
    here: list[Here]
    #: Seconds until the next is overdue; None if there is nobody.
    overdue_s: float | None
    #: Whether there are messages of members who are gone to be handed over: a part with each call.
    has_orphans: bool
    #: The setting, in seconds: whoever begins the group anew chooses it.
    ttl: float


@dataclass(frozen=True)
class Look:
    """A group at one instant."""

    life: str
    view: int
    mark: str
    term: int
    leader: str
    session: str
    members: dict[str, Member]


#: A group that the server does not know.
NOTHING = Look("", 0, "", 0, "", "", {})


#: The keys of a group that is begun, in the order that ``peers_open`` wants: what a part of may be
#: lost. What leaders wrote, who was removed, and dead letters outlive that.
PARTS = (
    *("config", "state", "members", "polls", "orphans", "limits", "pending", "agenda"),
    *("deadlines", "graced", "expirations", "candidates", "leaving", "events"),
)

#: Parts of a group of which there are many: those of a member or handle, which go by its name, and
#: those that are named at random.
_OF_MEMBERS = ("inbox", "movable", "awaited", "replies")
_PASSING = ("message", "poll", "votes")


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
        way = self.connector if connection is None else connection
        fields = [item for pair in config.to_fields().items() for item in pair]
        names = [self.key(part) for part in PARTS]
        try:
            way.call("SADD", keys.PEERS, self.name)
            flat = way.run(PEERS_OPEN, names, [secrets.token_hex(8), *fields])
            way.call("SADD", keys.PEERS, self.name)  # in between it may have been deleted
        except OutOfMemory:
            flat = way.call("HGETALL", self.key("config"))
            if not flat:
                raise  # one that exists goes on also where the server is full
        return _read_config(flat)

    def settings(self, connection: Connection | None = None) -> PeersConfig:
        """How a group that exists is set up.

        Raises:
            PeerGroupNotFound: It does not.
        """
        way = self.connector if connection is None else connection
        flat = way.call("HGETALL", self.key("config"))
        if not flat:
            raise PeerGroupNotFound(
                f"There is no peer group {self.name!r}; client.peer_group() begins one.",
                group=self.name,
            )
        return _read_config(flat)

    def passing(self) -> tuple[list[bytes], list[bytes]]:
        """The keys that members and handles have, and those of messages and votes. Most would
        expire by themselves, or go with a member."""
        found: set[bytes] = set()
        cursor = b"0"
        while True:
            cursor, page = self.connector.call(
                "SCAN", cursor, "MATCH", self.key("*"), "COUNT", 1000
            )
            found.update(page)
            if cursor == b"0":
                return self._among(found, _OF_MEMBERS), self._among(found, _PASSING)

    def _among(self, found: set[bytes], parts: tuple[str, ...]) -> list[bytes]:
        begin = tuple(self.key(f"{part}:").encode() for part in parts)
        return [key for key in found if key.startswith(begin)]

    def run(
        self, script: Script, args: Sequence[Any], connection: Connection | None = None
    ) -> list[Any]:
        """Run a script that may be repeated, and return its answer.

        Raises:
            PeerGroupNotFound: The group is gone from the server.
        """
        names = [self.prefix]
        answer: list[Any] = (
            self.connector.run(script, names, args)
            if connection is None
            else connection.run(script, names, args)
        )
        if answer[0] == b"NOGROUP":
            raise PeerGroupNotFound(
                f"The server has lost the group {self.name!r}, or it was deleted; open it again "
                "with client.peer_group().",
                group=self.name,
            )
        return answer

    def beat(self, connection: Connection | None, session: str, members: Sequence[str]) -> Beat:
        answer = self.run(PEERS_HEARTBEAT, [session, *members], connection)
        life, view, mark, term, leader, leader_session, time, here, next_ms, orphans, ttl_ms = (
            answer[1:]
        )
        return Beat(
            life=life.decode(),
            view=int(view),
            mark=mark.decode(),
            term=int(term),
            leader=leader.decode(),
            session=leader_session.decode(),
            time=float(time),
            here=[Here(one) for one in here],
            overdue_s=None if next_ms < 0 else next_ms / 1000,
            has_orphans=bool(orphans),
            ttl=ttl_ms / 1000,
        )

    def look(self, connection: Connection | None = None) -> Look:
        life, view, mark, term, leader, session, flat = self.run(PEERS_DESCRIBE, [], connection)[1:]
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return Look(
            life=life.decode(),
            view=int(view),
            mark=mark.decode(),
            term=int(term),
            leader=leader.decode(),
            session=session.decode(),
            members={name.decode(): read_member(name.decode(), value) for name, value in pairs},
        )


def _read_config(flat: list[bytes]) -> PeersConfig:
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return PeersConfig.from_fields({k.decode(): v.decode() for k, v in pairs})
