"""Peer group members that die, are replaced, and rejoin.

The tests use several handles in one process, and check the members' ids and the events that each
handle sees.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.errors import (
    MemberTaken,
    MeteorError,
)
from meteor_py.peers import member_handle
from meteor_py.peers.member import Status
from meteor_py.redis.scripts import PEERS_JOIN
from tests.support.mailing import SOON_S, result
from tests.support.peering import LONG_S, Heard, Open, await_heartbeat, expel, ids, on_key, watching
from tests.support.peering import open_group as open_group
from tests.support.waiting import eventually

#: A ttl in seconds, short enough for members to expire during a test.
SHORT_S = 0.5


# Names


def test_join_with_a_taken_name_fails_waits_or_takes_over(open_group: Open) -> None:
    one, two = open_group(ttl=LONG_S), open_group()
    first = one.join("a")
    with pytest.raises(MemberTaken):
        two.join("a", on_conflict="fail")
    with pytest.raises(TimeoutError):
        two.join("a", on_conflict="wait", timeout=0.2)
    second = two.join("a")
    assert first.lost.wait(10)
    assert first.reason == "joined again elsewhere"
    assert ids(two) == ["a"]
    waiting: list[Any] = []
    thread = threading.Thread(
        target=lambda: waiting.append(one.join("a", on_conflict="wait", timeout=30))
    )
    thread.start()
    second.close()
    thread.join(30)
    assert not waiting[0].lost.is_set()
    assert one.members[0].session == waiting[0]._handle.session


def test_takeover_within_a_handle_ends_the_older_membership(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    first, second = group.join("a"), group.join("a")
    assert first.lost.is_set()
    assert not second.lost.is_set()
    assert group._handle.local_members() == [second._handle]


def test_takeover_of_a_live_member_is_reported_as_a_departure_and_a_join(open_group: Open) -> None:
    one, two, watcher = open_group(ttl=LONG_S), open_group(), open_group()
    heard: list[tuple[str, str]] = []
    watcher.on_join(lambda member: heard.append(("joined", member.session)))
    watcher.on_leave(lambda member, reason: heard.append((reason, member.session)))
    first = one.join("a")._handle.session
    second = two.join("a")._handle.session
    expected = [("joined", first), ("replaced", first), ("joined", second)]
    eventually(lambda: heard == expected, 10, "the takeover was reported differently")


def test_waiting_for_a_name_ends_when_the_handle_is_closed(open_group: Open) -> None:
    one, two = open_group(ttl=LONG_S), open_group()
    one.join("a")
    errors: list[MeteorError] = []

    def wait() -> None:
        try:
            two.join("a", on_conflict="wait")
        except MeteorError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    two.close()
    thread.join(30)
    assert [str(error).endswith("client.peer_group().") for error in errors] == [True]


def test_named_member_dies_and_rejoins_elsewhere(open_group: Open) -> None:  # T22
    one, two, three = open_group(ttl=LONG_S), open_group(), open_group()
    heard = Heard(one)
    two.join("a", metadata=1)
    two.close()
    eventually(lambda: heard.count("status", "a", "dead") == 1)
    assert [(m.id, m.status, m.session) for m in one.members] == [("a", Status.DEAD, "")]
    three.join("a", metadata=2)
    eventually(lambda: heard.count("status", "a", "alive") == 1)
    eventually(lambda: heard.count("join", "a") == 2)
    assert (one.members[0].metadata, one.members[0].alive) == (2, True)
    calls = [call for call in heard.calls if call[0] in ("join", "leave")]
    assert calls == [("join", "a"), ("leave", "a", "dead"), ("join", "a")]


def test_leaving_is_permanent_but_closing_is_not(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    group.join("a").leave()
    assert ids(group) == []
    group.join("b").close()
    eventually(lambda: [member.alive for member in group.members] == [False])
    with group.join("c"):
        pass
    assert ids(group) == ["b"]
    assert group.remove("b")
    eventually(lambda: not group.members)


@pytest.mark.parametrize("expiration", [0.0, 0.3])
def test_dead_member_is_removed_on_expiration_and_can_rejoin(
    open_group: Open, expiration: float
) -> None:  # T4
    one = open_group(ttl=SHORT_S, member_expiration=expiration)
    two, three = open_group(), open_group()
    heard = Heard(one)
    two.join("2")
    two.close()
    eventually(lambda: heard.count("leave", "2", "dead") == 1)
    assert heard.calls.index(("status", "2", "dead")) < heard.calls.index(("leave", "2", "dead"))
    eventually(lambda: not one.members)
    # The removal of the dead member is not reported as a second departure.
    assert sum(call[0] == "leave" for call in heard.calls) == 1
    three.join("2")
    eventually(lambda: heard.count("join", "2") == 2)


# Dying


def test_observer_alone_detects_a_death(open_group: Open, url: str) -> None:
    group = open_group(ttl=SHORT_S)
    heard = Heard(group)
    with meteor.connect(url) as client:  # joins, but sends no heartbeats
        args = ["a", "of-nobody", "0", 0, b"null", "fail", 1000]
        client._connector.run(PEERS_JOIN, [group._handle.protocol.prefix], args)
    eventually(lambda: heard.count("leave", "a", "expired") == 1)
    assert heard.count("resigned", "a", "expired") == 1
    assert group.leader is None


def test_death_is_detected_on_time_not_at_the_next_heartbeat(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)  # a heartbeat every 20 s
    heard = Heard(group)
    args = ["a", "of-nobody", "0", 0, b"null", "fail", 1000]
    group._handle.protocol.run(PEERS_JOIN, args)
    deadline = int((time.time() + 0.5) * 1000)
    on_key(group, "ZADD", "deadlines", deadline, "a")
    on_key(group, "HSET", "state", "due", deadline)
    group._handle.heartbeat.hurry()
    eventually(lambda: heard.count("leave", "a", "expired") == 1, 10)


def test_expelled_member_rejoins(open_group: Open) -> None:  # T21
    one, two = open_group(ttl=0.9), open_group()
    heard = Heard(two)
    me, other = one.join(), two.join()
    named = one.join("a")
    before, sessions = me.id, (me._handle.session, named._handle.session)
    expel(two, me.id, "a")
    eventually(lambda: me.id != before and (me._handle.session, named._handle.session) != sessions)
    eventually(lambda: {m.id for m in two.members if m.alive} == {me.id, other.id, "a"})
    eventually(lambda: {m.id for m in one.members if m.alive} == {me.id, other.id, "a"})
    eventually(lambda: heard.count("join", me.id) == heard.count("status", "a", "alive") == 1)
    assert heard.count("leave", before, "expired") == 1
    assert heard.count("status", "a", "dead") == 1
    assert not me.lost.is_set()
    me.leave()
    named.leave()
    eventually(lambda: ids(two) == [other.id])  # the former ids are gone too


def test_replaced_member_that_saw_no_event_does_not_rejoin(open_group: Open) -> None:
    one, two = open_group(ttl=0.6), open_group()
    me = one.join("a")
    # Without events, only the reply to a heartbeat can report the replacement.
    reader = one._handle.event_reader
    assert reader.ends_within(10, reader.stop)
    two._handle.protocol.connector.run(
        PEERS_JOIN,
        [two._handle.protocol.prefix],
        ["a", "another", "1", 0, b"null", "takeover", 1000],
    )
    on_key(two, "ZADD", "deadlines", "+inf", "a")
    assert me.lost.wait(10)
    assert me.reason == "joined again elsewhere"
    eventually(lambda: two.find("a"))


def test_callback_that_raises_or_hangs_stops_neither_heartbeats_nor_events(
    open_group: Open,
) -> None:
    one, two = open_group(ttl=0.9), open_group()
    release = threading.Event()

    @one.on_join
    def fail(member: Any) -> None:
        raise ValueError("no")

    one.on_join(lambda member: release.wait(30))
    try:
        me = one.join()
        eventually(lambda: two.leader is not None)
        with watching(two) as events:
            sent = me._handle.valid_until
            eventually(lambda: me._handle.valid_until > sent + 2 * 0.9)  # two ttls later
            two.join("b")
            eventually(lambda: "b" in ids(one))
            assert not [event for event in events if event.member == me.id]
            assert me.term is not None
    finally:
        release.set()


def test_member_that_cannot_rejoin_does_not_stop_others_heartbeats(
    open_group: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = open_group(ttl=LONG_S)
    first, second = group.join(), group.join()
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(member_handle, "MEMBERS_MAX", 1)
        expel(group, first.id)
        group._handle.heartbeat.hurry()
        eventually(lambda: first._handle.recovering, SOON_S)
        await_heartbeat(group, second)
        await_heartbeat(group, second)
        assert first._handle.recovering
        assert caplog.text.count("is full: ") >= 1
        assert sum("The heartbeat for" in record.message for record in caplog.records) == 1
    group._handle.heartbeat.hurry()
    eventually(lambda: not first._handle.recovering, SOON_S)
    assert not first.lost.is_set()


def test_expelled_member_updates_and_proposes_while_it_rejoins(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    me = group.join()
    me.on_vote(lambda proposal: True)
    expel(group, me.id)
    me.update({"x": 1})
    eventually(lambda: [member.metadata for member in group.members] == [{"x": 1}], SOON_S)
    expel(group, me.id)
    assert result(me.propose("lunch", timeout=SOON_S)).passed
    assert me.reason is None
    group.remove(me.id)
    with pytest.raises(meteor.MembershipLost, match="removed"):
        me.update({"x": 2})
