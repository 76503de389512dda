"""A member of a peer group, as it was when it was last heard of."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import msgspec

from meteor_py.peers.codec import encode_json

#: Bytes of metadata at most: ten thousand events may carry them.
METADATA_MAX = 4_096


class Status(enum.StrEnum):
    """Whether a member is there. Only named ones stay members while they are dead."""

    ALIVE = "alive"
    DEAD = "dead"


@dataclass(frozen=True)
class Member:
    """Who is in a group."""

    id: str
    #: Whatever it says of itself.
    metadata: Any
    status: Status
    #: Whether it was given a name: then it stays a member when it dies, and can come back.
    persistent: bool
    #: Who has a higher one leads before others.
    priority: int
    #: Its place in the order of joining, by which the oldest is found.
    index: int
    #: When it joined first, by the server's clock in ms since 1970.
    joined: int
    #: Of its present stay; "" if it is dead.
    session: str

    @property
    def alive(self) -> bool:
        return self.status is Status.ALIVE


def dump_metadata(metadata: Any) -> bytes:
    """Metadata as it is kept.

    Raises:
        TypeError: It cannot be written as JSON.
        ValueError: It is too long, or too deep, or has a number that JSON has not (NaN, infinity).
    """
    try:
        data = encode_json(metadata)
    except RecursionError as error:
        raise ValueError("The metadata of a member is nested too deeply for JSON.") from error
    if len(data) > METADATA_MAX:
        raise ValueError(
            f"The metadata of a member has at most {METADATA_MAX:,} bytes as JSON, not "
            f"{len(data):,}: everybody in the group gets it."
        )
    return data


def load_metadata(data: bytes) -> Any:
    return msgspec.json.decode(data) if data else None


def read_member(member: str, record: bytes) -> Member:
    """A member from its record in the hash ``members``."""
    index, session, persistent, alive, priority, joined, metadata = record.split(b":", 6)
    return Member(
        id=member,
        metadata=load_metadata(metadata),
        status=Status.ALIVE if alive == b"1" else Status.DEAD,
        persistent=persistent == b"1",
        priority=int(priority),
        index=int(index),
        joined=int(joined),
        session=session.decode() if alive == b"1" else "",
    )
