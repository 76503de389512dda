"""Peer group events: all handles see the same events, and recover from missed ones."""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

import pytest

from meteor_py.errors import PeerError
from meteor_py.peers.event import Event
from tests.support.mailing import SOON_S
from tests.support.peering import LONG_S, Heard, Open, ids, on_key, watching
from tests.support.peering import open_group as open_group
from tests.support.waiting import eventually


def test_watch_continues_from_a_snapshot(open_group: Open) -> None:
    one, two = open_group(ttl=LONG_S), open_group()
    one.join("a")
    eventually(lambda: two.leader is not None)
    snapshot = two.snapshot()
    assert [member.id for member in snapshot.members] == ["a"]
    assert snapshot.leader is not None
    assert (snapshot.leader.id, snapshot.term) == ("a", one.term)
    one.join("b")
    one.join("c")
    eventually(lambda: ids(two) == ["a", "b", "c"])
    events = two.watch(timeout=0.01, since=snapshot.number)
    one.join("d")
    eventually(lambda: len(ids(two)) == 4)
    assert [(e.view, e.kind, e.member) for e in events] == [
        (snapshot.number + 1, "joined", "b"),
        (snapshot.number + 2, "joined", "c"),
        (snapshot.number + 3, "joined", "d"),
    ]
    on_key(one, "XTRIM", "events", "MAXLEN", 2)
    with pytest.raises(PeerError, match="no longer has all events"):
        two.watch(since=snapshot.number)


def test_all_handles_see_the_same_events_while_members_join_and_leave(
    open_group: Open, rng: random.Random
) -> None:
    observers = [open_group(ttl=LONG_S), open_group(), open_group()]
    seen: list[list[Event]] = [[] for _ in observers]
    for observer, events in zip(observers, seen, strict=True):
        observer.on_event(events.append)
    handles = [open_group() for _ in range(5)]
    seeds = [rng.random() for _ in range(10)]
    errors: list[BaseException] = []

    def storm(number: int) -> None:
        """Make five members join and leave, on a handle that another thread also uses."""
        mine, group = random.Random(seeds[number]), handles[number % 5]
        here: list[Any] = [None] * 5
        try:
            for turn in range(80):
                place = mine.randrange(5)
                me = here[place]
                if me is None:
                    name = f"m{number}-{place}" if mine.random() < 0.5 else None
                    here[place] = group.join(name)
                else:
                    mine.choice([me.leave, me.close, me.leave])()
                    here[place] = None
                if turn % 20 == 0:
                    observers[number % 3].members[-1:]
            for me in here:
                if me is not None:
                    me.leave()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=storm, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not errors
    last = observers[0]._handle.protocol.look()
    assert last.view >= 800
    eventually(lambda: all(len(events) >= last.view for events in seen), 30)
    assert [event.view for event in seen[0]] == list(range(1, last.view + 1))
    assert seen[0] == seen[1] == seen[2]
    assert not any(event.resync for event in seen[0])
    for observer in (*observers, *handles):
        eventually(lambda o=observer: o.view == last.view)  # type: ignore[misc]
        assert observer._handle.view.members == last.members
    terms = [event.term for event in seen[0] if event.kind == "elected"]
    assert terms == sorted(set(terms))  # type: ignore[type-var]


def test_observer_that_missed_trimmed_events_still_learns_of_all_members(open_group: Open) -> None:
    one, two = open_group(ttl=LONG_S), open_group()
    heard = Heard(two)
    with watching(two) as events:
        gone = one.join("gone")
        stays = one.join("stays")
        eventually(lambda: len(events) == 3)
        with two._handle.lock:  # keeps the observer's event reader from processing events
            gone.leave()
            stays.update("changed")
            one.join("new")
            one.join("newest")
            client = one._handle.protocol.connector
            client.call("XTRIM", one._handle.protocol.key("events"), "MAXLEN", 1)
        eventually(lambda: ids(two) == ["stays", "new", "newest"])
        eventually(lambda: heard.count("join", "newest") == 1)
    assert two._handle.view.members == one._handle.view.members
    late = [event for event in events if event.resync]
    assert late
    assert {(event.kind, event.member) for event in events} >= {
        ("left", "gone"),
        ("joined", "new"),
        ("updated", "stays"),
    }
    assert {event.view for event in late} == {one.view}
    assert "reset" not in {event.kind for event in events}
    eventually(lambda: [call[:2] for call in heard.calls].count(("leave", "gone")) == 1)
    assert two.leader is not None
    assert two.leader.id == "stays"
    one.join("after")
    eventually(lambda: heard.count("join", "after") == 1)


def test_callback_that_raises_system_exit_is_logged_and_the_next_is_called(
    open_group: Open, caplog: pytest.LogCaptureFixture
) -> None:
    group = open_group(ttl=LONG_S, election=None)
    told: list[str] = []
    group.on_join(lambda member: sys.exit(1))
    group.on_join(lambda member: told.append(member.id))
    group.join("a")
    group.join("b")
    eventually(lambda: told == ["a", "b"], SOON_S)
    assert "A peer group callback raised an exception" in caplog.text
