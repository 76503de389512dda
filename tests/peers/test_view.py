"""A group's view applies events one by one, and reports the differences after a reload."""

from __future__ import annotations

from dataclasses import replace

from meteor_py.peers.event import Event
from meteor_py.peers.member import Member, Status
from meteor_py.peers.protocol import UNKNOWN_GROUP, Look
from meteor_py.peers.view import GroupView, Moment


def member(name: str, index: int, session: str = "s") -> Member:
    return Member(name, None, Status.ALIVE, True, 0, index, 0, session)


A, B = member("a", 1), member("b", 2)
LOOK = Look("i", 7, "m7", 3, "a", "s", {"b": B, "a": A}, {})


def event(number: int, kind: str, who: str | None = None, **fields: str) -> Event:
    coded = {name: value.encode() for name, value in fields.items()} | {"mark": b"m%d" % number}
    term = int(fields["term"]) if "term" in fields else None
    return Event(number, kind, 0, who, term, fields=coded)  # type: ignore[arg-type]


def changes(view: GroupView, look: Look, *, reset: bool = False) -> list[tuple[str, str | None]]:
    return [(event.kind, event.member) for event in view.resync(look, reset=reset)]


def test_view_lists_members_in_joining_order() -> None:
    view = GroupView(LOOK)
    assert view.in_order == [A, B]
    assert view.moment == Moment("i", 7, "m7")


def test_view_accepts_an_event_only_if_it_follows_the_last_one() -> None:
    view = GroupView(LOOK)
    assert view.continues(event(8, "dead", "b", after="m7"))
    assert not view.continues(event(8, "dead", "b", after="m7 of another history"))


def test_events_change_members_leader_and_term() -> None:
    view = GroupView(LOOK)
    view.apply(event(8, "dead", "b"))
    assert view.members["b"] == replace(B, status=Status.DEAD, session="")
    view.apply(event(9, "updated", "a", metadata='{"x":1}'))
    assert view.members["a"].metadata == {"x": 1}
    view.apply(event(10, "resigned", "a", index="5"))
    assert (view.leader, view.members["a"].index) == (None, 5)
    view.apply(event(11, "elected", "a", term="4"))
    assert (view.leader, view.term) == ("a", 4)
    view.apply(event(12, "left", "b"))
    assert list(view.members) == ["a"]
    assert view.moment == Moment("i", 12, "m12")


def test_change_replaces_dicts_that_other_threads_may_be_reading() -> None:
    view = GroupView(LOOK)
    before = view.members
    view.apply(event(8, "left", "b"))
    assert list(before) == ["b", "a"]


def test_resync_reports_differences_as_events() -> None:
    view = GroupView(LOOK)
    joined = member("c", 3)
    look = Look("i", 9, "m9", 4, "c", "s", {"a": replace(A, session="t"), "c": joined}, {})
    assert changes(view, look) == [
        ("left", "b"),
        ("resigned", "a"),
        ("alive", "a"),
        ("joined", "c"),
        ("elected", "c"),
    ]
    assert view.moment == Moment("i", 9, "m9")
    assert changes(view, look) == []


def test_resync_reports_a_reset_first_if_the_server_has_lost_state() -> None:
    assert changes(GroupView(LOOK), replace(LOOK, view=6, mark="m6")) == [("reset", None)]
    assert changes(GroupView(LOOK), replace(LOOK, incarnation="j")) == [("reset", None)]
    assert changes(GroupView(LOOK), LOOK, reset=True) == [("reset", None)]
    assert changes(GroupView(UNKNOWN_GROUP), LOOK)[0] == ("joined", "b")
