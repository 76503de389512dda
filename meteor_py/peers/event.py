"""Events of a peer group: all processes see the same ones, in the same order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from meteor_py.peers.protocol import read_fields

Kind = Literal[
    "joined",
    "left",
    "dead",
    "alive",
    "updated",
    "elected",
    "resigned",
    "proposed",
    "decided",
    "reset",
]


@dataclass(frozen=True)
class Event:
    """One change of a group."""

    #: Its number: one above that of the event before it.
    view: int
    kind: Kind
    #: When, by the server's clock in ms since 1970.
    at: int
    #: Whom it is about, or who proposes.
    member: str | None = None
    #: The number of the term, of an election or its end.
    term: int | None = None
    #: Why it left, died or resigned, or how a vote ended.
    reason: str | None = None
    #: The poll that was proposed or decided.
    poll: str | None = None
    #: Found out afterwards, when the events themselves were gone: these have one ``view``.
    #: "reset" comes first of them if the server has lost state that was known here.
    resync: bool = False
    #: All fields as they are in Redis.
    fields: dict[str, bytes] = field(default_factory=dict, repr=False)


def read_event(entry_id: bytes, flat: list[bytes]) -> Event:
    """An event from its entry in the stream ``events``."""
    found = read_fields(flat)

    def text(name: str) -> str | None:
        return found[name].decode(errors="replace") if name in found else None

    return Event(
        view=int(entry_id.partition(b"-")[0]),
        kind=found["kind"].decode(),  # type: ignore[arg-type]  # written by our scripts
        at=int(found["at"]),
        member=text("member") or text("by"),
        term=int(found["term"]) if "term" in found else None,
        reason=text("reason"),
        poll=text("poll"),
        fields=found,
    )
