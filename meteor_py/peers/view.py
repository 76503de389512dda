"""A group as one process sees it: the members, the leader, and the last event seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from meteor_py.peers.event import Event
from meteor_py.peers.member import Member, Status, load_metadata
from meteor_py.peers.protocol import Look


class View(NamedTuple):
    """A group's state after one event. Get it with ``group.snapshot()``."""

    #: The number of the last event that this view includes.
    number: int
    #: The members, in the same order as ``PeerGroup.members``.
    members: list[Member]
    #: The leader; None if there is none.
    leader: Member | None
    #: The number of the last term; 0 before the first election.
    term: int


class Moment(NamedTuple):
    """Identifies the last event that a view shows, and the history that the event belongs to."""

    incarnation: str
    view: int
    mark: str


class GroupView:
    """One group handle's view. The handle changes it under its lock. Any thread may read it,
    because each attribute is replaced as a whole."""

    def __init__(self, look: Look) -> None:
        self._load(look)

    def _load(self, look: Look) -> None:
        #: Empty if the group does not exist on the server.
        self.incarnation = look.incarnation
        #: Identifies the last event: after a failover, another event can have the same number.
        self.mark = look.mark
        self.members: dict[str, Member] = dict(look.members)
        self.properties = _load_properties(look)
        self.term = look.term
        #: The leader's id; None if there is none.
        self.leader: str | None = look.leader or None
        #: The number of the last event. It is assigned last, because other threads wait for it.
        self.number = look.view

    @property
    def moment(self) -> Moment:
        return Moment(self.incarnation, self.number, self.mark)

    @property
    def in_order(self) -> list[Member]:
        return sorted(self.members.values(), key=lambda member: member.index)

    def continues(self, event: Event) -> bool:
        """Return whether ``event`` follows the last event in the same history."""
        return event.fields.get("after") == self.mark.encode()

    def apply(self, event: Event) -> None:
        """Apply the next event."""
        members = dict(self.members)
        known = members.get(event.member or "")
        fields = event.fields
        match event.kind:
            case "joined" | "alive":
                assert event.member is not None, "the event names no member"
                members[event.member] = Member(
                    id=event.member,
                    metadata=load_metadata(fields["metadata"]),
                    status=Status.ALIVE,
                    persistent=fields["persistent"] == b"1",
                    priority=int(fields["priority"]),
                    index=int(fields["index"]),
                    joined=int(fields["joined"]),
                    session=fields["session"].decode(),
                )
            case "left":
                members.pop(event.member or "", None)
            case "dead" if known is not None:
                members[known.id] = replace(known, status=Status.DEAD, session="")
            case "updated" if known is not None:
                members[known.id] = replace(known, metadata=load_metadata(fields["metadata"]))
            case "property":
                assert event.property is not None, "the event names no property"
                properties = dict(self.properties)
                if "deleted" in fields:
                    properties.pop(event.property, None)
                else:
                    properties[event.property] = load_metadata(fields["value"])
                self.properties = properties
            case "elected":
                self.term, self.leader = event.term or 0, event.member
            case "resigned":
                self.leader = None
                if known is not None and "index" in fields:  # it moved to the end of the order
                    members[known.id] = replace(known, index=int(fields["index"]))
        self.members = members
        self.mark = fields["mark"].decode()
        self.number = event.view

    def resync(self, look: Look, *, reset: bool = False) -> list[Event]:
        """Replace the whole view; return the differences as events.

        Args:
            reset: Whether the server is known to have lost state.
        """
        lost = reset or look.incarnation != self.incarnation or look.view < self.number
        changes = list(self._changes(look))
        if lost and self.incarnation:
            changes.insert(0, Event(look.view, "reset", 0, resync=True))
        self._load(look)
        return changes

    def _changes(self, look: Look) -> Iterator[Event]:
        def event(kind: str, **facts: object) -> Event:
            return Event(look.view, kind, 0, resync=True, **facts)  # type: ignore[arg-type]

        for member in self.members.values():
            if member.id not in look.members:
                yield event("left", member=member.id, reason="resync")
        if self.leader is not None and (self.leader, self.term) != (look.leader, look.term):
            yield event("resigned", member=self.leader, term=self.term, reason="resync")
        for found in look.members.values():
            known = self.members.get(found.id)
            if known is None:
                yield event("joined", member=found.id)
            elif known.status is not found.status:
                yield event(found.status.value, member=found.id)
            elif known.session != found.session:
                yield event("alive", member=found.id)
            elif known.metadata != found.metadata:
                yield event("updated", member=found.id)
        properties = _load_properties(look)
        for name in sorted({*self.properties, *properties}):
            if self.properties.get(name) != properties.get(name):
                yield event("property", property=name)
        if look.leader and (self.leader, self.term) != (look.leader, look.term):
            yield event("elected", member=look.leader, term=look.term)


def _load_properties(look: Look) -> dict[str, Any]:
    return {name: load_metadata(value) for name, value in look.properties.items()}
