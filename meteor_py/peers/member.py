"""A peer group member, as of the last event about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import msgspec

from meteor_py.records.codec import encode_json

#: Maximum size of metadata in bytes. It is small because the server keeps about 10,000 events, and
#: each may carry metadata.
METADATA_MAX = 4_096


class Status(enum.StrEnum):
    """Whether a member is alive. Only named members stay in the group while they are dead."""

    ALIVE = "alive"
    DEAD = "dead"


@dataclass(frozen=True)
class Member:
    """A group member."""

    id: str
    #: The member's description of itself: any JSON value.
    metadata: Any
    status: Status
    #: Whether it has a name. A named member stays in the group when it dies, and can rejoin.
    persistent: bool
    #: Members with a higher priority are elected before others.
    priority: int
    #: Its position in the joining order, which determines the oldest member. Rejoining, or
    #: resigning as leader, moves it to the end.
    index: int
    #: When it first joined, in ms since 1970 on the server's clock.
    joined: int
    #: Identifies its current session; "" if it is dead.
    session: str

    @property
    def alive(self) -> bool:
        return self.status is Status.ALIVE


def dump_metadata(metadata: Any, what: str = "member metadata") -> bytes:
    """Encode metadata, or another value that every process in the group receives.

    Raises:
        TypeError: The metadata cannot be written as JSON.
        ValueError: The metadata is too long or nested too deeply, or contains NaN or infinity.
    """
    try:
        data = encode_json(metadata)
    except RecursionError as error:
        raise ValueError(f"The {what} is nested too deeply for JSON.") from error
    if len(data) > METADATA_MAX:
        raise ValueError(
            f"The {what} is limited to {METADATA_MAX:,} bytes as JSON, but this value has "
            f"{len(data):,}. Every process in the group receives it."
        )
    return data


def load_metadata(data: bytes) -> Any:
    return msgspec.json.decode(data) if data else None


def read_member(member: str, record: bytes) -> Member:
    """Parse a value from the ``members`` hash."""
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
