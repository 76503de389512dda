"""A proposal that a group votes on, and the outcome of the vote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from meteor_py.peers.codec import PeerCodec

Kind = Literal["majority", "consensus"]
#: Why a vote ended as it did; "left" is a voter that had not voted, and was needed.
Reason = Literal["passed", "rejected", "left", "timeout"]

#: Bytes that a topic, or the parameters of an action, may have: every event about it carries them.
TOPIC_MAX = 65_536


@dataclass(frozen=True)
class Proposal:
    """What a member is asked to vote on."""

    #: The id of the poll.
    id: str
    topic: Any
    #: The member that proposes; None if the proposer is no member.
    by: str | None
    #: Who must say yes: "majority" and "consensus" of those who are asked, or so many.
    kind: Kind | int
    #: When the vote ends, in seconds by the clock of the group.
    deadline: float
    #: The name of the action that is proposed, if it is one; then the topic is its parameters.
    action: str | None = None
    #: When that is to be done, in seconds by the clock of the group.
    at: float | None = None
    #: Seconds that the clock of a voter may be wrong by; None if that does not matter.
    max_error: float | None = None


@dataclass(frozen=True)
class Outcome:
    """How a vote ended. The same for all who learn of it."""

    #: The id of the poll.
    poll: str
    passed: bool
    #: "passed", "rejected" (enough did not say yes), "left" (a voter left that was needed), or
    #: "timeout".
    reason: Reason
    #: The members that said yes; no; neither; and those who said nothing, or left before.
    yes: tuple[str, ...]
    no: tuple[str, ...]
    abstained: tuple[str, ...]
    missing: tuple[str, ...]
    topic: Any
    #: The member that proposed it; None if the proposer is no member.
    by: str | None
    kind: Kind | int
    #: When it was decided, in seconds by the clock of the group.
    decided: float
    #: The name of the action that was voted on, if it was one; then the topic is its parameters.
    action: str | None = None
    #: When that is to be done, in seconds by the clock of the group.
    at: float | None = None

    @property
    def voters(self) -> tuple[str, ...]:
        """All who were asked."""
        return tuple(sorted((*self.yes, *self.no, *self.abstained, *self.missing)))


def dump_topic(topic: Any, codec: PeerCodec) -> bytes:
    """A topic as it is kept: its type, and its bytes.

    Raises:
        TypeError, ValueError: The codec cannot write it, or it is too large.
    """
    kind, data = codec.encode(topic)
    if len(data) > TOPIC_MAX:
        raise ValueError(
            f"What is voted on takes {len(data):,} bytes, more than {TOPIC_MAX:,}; send it before, "
            "and vote on its name."
        )
    return kind.encode() + b":" + data


def load_topic(data: bytes, codec: PeerCodec) -> Any:
    """The topic.

    Raises:
        UnknownType: Its type is not known here.
    """
    kind, _, body = data.partition(b":")
    return codec.decode(kind.decode(), body)


def read_proposal(fields: Mapping[str, bytes], codec: PeerCodec) -> Proposal:
    """A proposal from the fields of its event."""
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
    """An outcome from the fields of its event."""

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
    return int(rule) if rule.isdigit() else rule  # type: ignore[return-value]  # ours


def _seconds(number: bytes, per_second: float) -> float | None:
    return int(number) / per_second if number else None
