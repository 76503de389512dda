"""Peer group events. All processes see the same events in the same order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from meteor_py.peers.protocol import read_fields

Kind = (
    Literal["joined", "left", "dead", "alive", "updated", "property"]
    | Literal["elected", "resigned", "proposed", "decided", "reset"]
)


@dataclass(frozen=True)
class Event:
    """One change in a group."""

    #: The event number: one higher than the previous event's, except after a resync.
    view: int
    kind: Kind
    #: When it happened, in ms since 1970 on the server's clock; 0 if ``resync`` is true.
    at: int
    #: The id of the affected member or of the proposer.
    member: str | None = None
    #: The term number, if a term began or ended.
    term: int | None = None
    #: Why the member left, died or resigned, or how a vote ended.
    reason: str | None = None
    #: The id of the poll that began or was decided.
    poll: str | None = None
    #: The name of the property that was set or deleted.
    property: str | None = None
    #: Whether the event was derived by comparing states, because the original events were lost.
    #: Such events share one ``view``. If the server lost state, the first of them is "reset".
    resync: bool = False
    #: All fields as stored in Redis; empty if ``resync`` is true.
    fields: dict[str, bytes] = field(default_factory=dict, repr=False)


def read_event(entry_id: bytes, flat: list[bytes]) -> Event:
    """Parse an entry from the ``events`` stream."""
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
        property=text("name") if found["kind"] == b"property" else None,
        fields=found,
    )
