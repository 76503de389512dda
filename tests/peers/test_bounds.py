"""Listeners that fall behind a group's events: the group drops events or calls, and reports it."""

from __future__ import annotations

import logging
import threading

import pytest

import meteor_py as meteor
from meteor_py.peers import listeners
from tests.support.mailing import SOON_S
from tests.support.peering import LONG_S, Open
from tests.support.peering import open_group as open_group
from tests.support.waiting import eventually


def test_watch_that_falls_behind_raises(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_QUEUE_MAX", 3)
    with meteor.connect(url) as m, m.peer_group("g", election=None) as group:
        events = group.watch(timeout=20)
        for number in range(6):
            group.join(f"m{number}")
        eventually(lambda: len(group.members) == 6)
        assert [next(events).member for _ in range(3)] == ["m0", "m1", "m2"]
        with pytest.raises(meteor.PeerError, match="Take a new snapshot and watch from there"):
            next(events)


def test_log_counts_the_calls_dropped_while_a_callback_hangs(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listeners, "_CALLS_MAX", 2)
    hangs, goes_on, seen = threading.Event(), threading.Event(), []
    with meteor.connect(url) as m, m.peer_group("g", election=None) as group:

        @group.on_join
        def _(member: meteor.Member) -> None:
            seen.append(member.id)
            hangs.set()
            assert goes_on.wait(20)

        group.join("m0")
        assert hangs.wait(20)
        for number in range(1, 6):
            group.join(f"m{number}")
        with caplog.at_level(logging.ERROR):
            goes_on.set()
            eventually(lambda: seen == ["m0", "m1", "m2"])
            eventually(lambda: "3 calls were dropped" in caplog.text)


def test_on_reset_is_called_after_calls_were_dropped(
    open_group: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "_CALLS_MAX", 3)
    group = open_group(ttl=LONG_S, election=None)
    hangs, goes_on = threading.Event(), threading.Event()
    told: list[str] = []

    @group.on_join
    def _(member: meteor.Member) -> None:
        told.append(member.id)
        hangs.set()
        assert goes_on.wait(SOON_S)

    group.on_reset(lambda: told.append(f"{len(group.members)} members"))
    group.join("m0")
    assert hangs.wait(SOON_S)
    for number in range(1, 8):
        group.join(f"m{number}")
    goes_on.set()
    eventually(lambda: len(told) == 5, SOON_S)
    group.join("last")
    eventually(lambda: "last" in told, SOON_S)
    assert told == ["m0", "m1", "m2", "m3", "8 members", "last"]
