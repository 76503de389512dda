"""A proposal that a group votes on, and the outcome of the vote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from meteor_py.peers.codec import PeerCodec

Kind = Literal["majority", "consensus"]
#: Why a vote ended. "left": a voter whose vote was needed left before voting.
Reason = Literal["passed", "rejected", "left", "timeout", "no leader"]

#: Maximum size of a topic or of action parameters, in bytes. Every event about the poll carries
#: them.
TOPIC_MAX = 65_536


@dataclass(frozen=True)
class Proposal:
    """A proposal that a member votes on."""

    #: The id of the poll.
    id: str
    topic: Any
    #: The member that proposed it; None if it was proposed through a ``PeerGroup``.
    by: str | None
    #: The yes votes needed: a "majority" of the voters, all ("consensus"), or a number.
    kind: Kind | int
    #: When the vote ends, in seconds on the group's clock.
    deadline: float
    #: The name of the proposed action, or None for a plain vote. ``topic`` holds its parameters.
    action: str | None = None
    #: When the action is due, in seconds on the group's clock.
    at: float | None = None
    #: Maximum error of a voter's clock in seconds; None for no limit.
    max_error: float | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a vote. It is the same in every process."""

    #: The id of the poll.
    poll: str
    passed: bool
    #: "passed", "rejected" (it can no longer get enough yes votes), "left" (a needed voter left),
    #: "timeout", or "no leader" (the vote required a leader).
    reason: Reason
    #: The members that voted yes, voted no, abstained, and did not vote (or left before voting).
    yes: tuple[str, ...]
    no: tuple[str, ...]
    abstained: tuple[str, ...]
    missing: tuple[str, ...]
    topic: Any
    #: The member that proposed it; None if it was proposed through a ``PeerGroup``.
    by: str | None
    kind: Kind | int
    #: When it was decided, in seconds on the group's clock.
    decided: float
    #: The name of the action, or None for a plain vote. ``topic`` holds its parameters.
    action: str | None = None
    #: When the action is due, in seconds on the group's clock.
    at: float | None = None

    @property
    def voters(self) -> tuple[str, ...]:
        """All members that were asked."""
        return tuple(sorted((*self.yes, *self.no, *self.abstained, *self.missing)))


def dump_topic(topic: Any, codec: PeerCodec) -> bytes:
    """Encode a topic: its type and its bytes.

    Raises:
        TypeError, ValueError: The codec cannot encode the topic, or the topic is too large.
    """
    kind, data = codec.encode(topic)
    if len(data) > TOPIC_MAX:
        raise ValueError(
            f"The topic or parameters of a vote are limited to {TOPIC_MAX:,} bytes, but these have "
            f"{len(data):,}. Send the data first, and vote on a reference to it."
        )
    return kind.encode() + b":" + data


def load_topic(data: bytes, codec: PeerCodec) -> Any:
    """Decode a topic.

    Raises:
        UnknownType: The topic's type is not registered here, or the bytes do not match the type.
    """
    kind, _, body = data.partition(b":")
    return codec.decode(kind.decode(), body)


def read_proposal(fields: Mapping[str, bytes], codec: PeerCodec) -> Proposal:
    """Parse the fields of a "proposed" event."""
    return Proposal(
        id=fields["poll"].decode(),
        topic=load_topic(fields["topic"], codec),
        by=fields["by"].decode() or None,
        kind=_kind(fields),
        deadline=int(fields["until"]) / 1000,
        action=fields["name"].decode() or None,
        at=_seconds(fields["when"], 1e3),
        max_error=_seconds(fields["error"], 1e6),
    )


def read_outcome(fields: Mapping[str, bytes], codec: PeerCodec) -> Outcome:
    """Parse the fields of a "decided" event."""

    def members(name: str) -> tuple[str, ...]:
        return tuple(sorted(filter(None, fields[name].decode().split(","))))

    return Outcome(
        poll=fields["poll"].decode(),
        passed=fields["result"] == b"yes",
        reason=fields["reason"].decode(),  # type: ignore[arg-type]  # written by our scripts
        yes=members("yes"),
        no=members("no"),
        abstained=members("abstained"),
        missing=members("missing"),
        topic=load_topic(fields["topic"], codec),
        by=fields["by"].decode() or None,
        kind=_kind(fields),
        decided=int(fields["decided"]) / 1000,
        action=fields["name"].decode() or None,
        at=_seconds(fields["when"], 1e3),
    )


def _kind(fields: Mapping[str, bytes]) -> Kind | int:
    rule = fields["rule"].decode()
    # Our scripts write only numbers and the two kinds.
    return int(rule) if rule.isdigit() else rule  # type: ignore[return-value]


def _seconds(number: bytes, per_second: float) -> float | None:
    return int(number) / per_second if number else None
