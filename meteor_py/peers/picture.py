"""The picture that one process has of a group: who is in it, who leads, and up to which event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meteor_py.peers.books import Look
from meteor_py.peers.event import Event
from meteor_py.peers.member import Member, Status, load_metadata


class Picture:
    """Changed by one thread, looked at by any: each attribute is replaced as a whole."""

    def __init__(self, look: Look) -> None:
        self.life = look.life
        #: The number of the last event that is in it.
        self.view = look.view
        self.members: dict[str, Member] = dict(look.members)
        self.term = look.term
        #: The id of the leader; None if there is none.
        self.leader: str | None = look.leader or None

    def apply(self, event: Event) -> None:
        """Take in the next event."""
        members = dict(self.members)
        known = members.get(event.member or "")
        fields = event.fields
        match event.kind:
            case "joined" | "alive":
                assert event.member is not None, "it is about somebody"
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
            case "elected":
                self.term, self.leader = event.term or 0, event.member
            case "resigned":
                self.leader = None
        self.members = members
        self.view = event.view

    def resync(self, look: Look) -> list[Event]:
        """Take in all at once; return what has changed, as events."""
        changes = list(self._changes(look))
        self.__init__(look)  # type: ignore[misc]  # as a new one
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
        if look.leader and (self.leader, self.term) != (look.leader, look.term):
            yield event("elected", member=look.leader, term=look.term)
