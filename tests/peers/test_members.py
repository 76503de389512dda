"""Peer group membership: joining, leaving, refusals, and the events that report them.

The tests use several handles in one process, each with its own client. The tests in this folder
also cover the test cases that Atomix and RIAPS have for their groups. A comment such as T1 or V7
identifies the case that a test covers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.errors import (
    MembershipLost,
    MemberTaken,
    MeteorError,
    PeerError,
)
from meteor_py.peers import member_handle
from meteor_py.redis.scripts import PEERS_JOIN, PEERS_LEAVE
from tests.support.forking import in_child
from tests.support.peering import GROUP, LONG_S, Heard, Open, ids, watching
from tests.support.peering import open_group as open_group
from tests.support.waiting import eventually

# Joining and leaving


def test_another_handle_sees_a_join(open_group: Open) -> None:  # T1
    one, two = open_group(ttl=LONG_S), open_group()
    heard = Heard(one)
    two.join("test")
    eventually(lambda: heard.count("join", "test") == 1)


def test_all_handles_see_joins_and_leaves_once(open_group: Open) -> None:  # T2, T20, T23
    one, two = open_group(ttl=LONG_S), open_group()
    heard = [Heard(one), Heard(two)]
    first = one.join()
    me = two.join()
    eventually(lambda: len(one.members) == len(two.members) == 2)
    me.leave()
    me.leave()
    assert ids(two) == [first.id]
    eventually(lambda: all(each.count("leave", me.id, "left") for each in heard))
    first.leave()  # later events would reveal a duplicate
    eventually(lambda: all(each.count("leave", first.id, "left") for each in heard))
    assert heard[0].calls == heard[1].calls
    assert [call[0] for call in heard[0].calls] == [
        *("join", "elected", "join", "leave", "leave", "resigned")
    ]


def test_closing_a_handle_makes_its_members_leave(open_group: Open) -> None:  # T3
    one, two = open_group(ttl=LONG_S), open_group()
    heard = Heard(one)
    first, second = two.join(), two.join()
    two.close()
    eventually(lambda: heard.count("leave", second.id, "left") == 1)
    assert heard.count("leave", first.id, "left") == 1
    assert [me.lost.is_set() for me in (first, second)] == [True, True]


def test_closing_a_client_closes_its_handles(url: str) -> None:
    with meteor.connect(url) as watcher, watcher.peer_group(GROUP, ttl=LONG_S) as group:
        client = meteor.connect(url)
        other = client.peer_group(GROUP)
        other.join()
        eventually(lambda: len(group.members) == 1)
        client.close()
        assert other.closed
        eventually(lambda: not group.members)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("meteor-")]


def test_member_is_listed_when_on_join_is_called(open_group: Open) -> None:  # T19
    one, two = open_group(ttl=LONG_S), open_group()
    heard = [Heard(one), Heard(two)]
    two.join("a")
    eventually(lambda: all(each.calls for each in heard))
    assert [each.members[0] for each in heard] == [["a"], ["a"]]


def test_member_is_gone_when_on_leave_is_called(open_group: Open) -> None:  # T6
    one, two = open_group(ttl=LONG_S), open_group()
    sizes: list[int] = []
    one.on_leave(lambda member, reason: sizes.append(len(one.members)))
    two.join("a")
    two.join("b").leave()
    eventually(lambda: sizes == [1])


def test_callbacks_see_a_handles_own_join_after_join_has_finished(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    told = threading.Event()
    group.on_join(lambda member: told.set())
    with group._handle.listeners.thread.held():  # as during a join()
        group.join()
        assert not told.is_set()
    assert told.wait(10)


def test_callback_can_join_and_leave(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    done: list[str] = []

    @group.on_join
    def also(member: Any) -> None:
        if member.id == "a":
            with group.join("b") as me:
                done.append(me.id)

    group.join("a")
    eventually(lambda: done == ["b"] and ids(group) == ["a"])


def test_metadata_arrives_with_the_join_and_changes_arrive_as_events(
    open_group: Open,
) -> None:  # T15
    one, two = open_group(ttl=LONG_S), open_group()
    found: list[Any] = []
    one.on_join(lambda member: found.append(member.metadata))
    me = two.join(metadata={"host": "n1", "tags": ["a:b", "ü"]})
    eventually(lambda: found == [{"host": "n1", "tags": ["a:b", "ü"]}])
    assert one.members[0].metadata == found[0]
    eventually(lambda: one.leader is not None)
    with watching(one) as events:
        me.update({"load": 3})
        eventually(lambda: [event.kind for event in events] == ["updated"])
    assert one.members[0].metadata == {"load": 3}


def test_metadata_must_be_short_json(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    with pytest.raises(TypeError):
        group.join(metadata=object())
    with pytest.raises(ValueError, match="limited to 4,096 bytes"):
        group.join(metadata="x" * 100_000)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        group.join(metadata=deep)
    me = group.join()
    with pytest.raises(ValueError, match="limited to 4,096 bytes"):
        me.update("x" * 100_000)
    assert group.members[0].metadata is None


def test_instances_of_a_group_are_independent(url: str) -> None:  # V1, V8
    with meteor.connect(url) as client:
        shared = [
            client.peer_group("type", instance="g1"),
            client.peer_group("type", instance="g1"),
        ]
        private = client.peer_group("type", instance="g2")
        for group in (*shared, private):
            group.join()
        eventually(lambda: [len(group.members) for group in (*shared, private)] == [2, 2, 1])
        assert client.peer_groups() == ["type/g1", "type/g2"]


def test_unnamed_member_that_rejoins_has_another_id(open_group: Open) -> None:  # V5
    one, two = open_group(ttl=LONG_S), open_group()
    one.join()
    seen = set()
    for _ in range(20):
        with two.join() as me:
            seen.add(me.id)
            eventually(lambda me=me: me.id in ids(one))  # type: ignore[misc]
        eventually(lambda: len(one.members) == 1 and one.leader is not None)
    assert len(seen) == 20


def test_any_process_can_remove_a_member_for_good(open_group: Open) -> None:
    one, two = open_group(ttl=0.9), open_group()
    heard = Heard(one)
    me = two.join("a")
    assert one.remove("a") is True
    assert one.remove("a") is False
    assert me.lost.wait(10)
    assert me.reason == "removed"
    with pytest.raises(MembershipLost, match="removed"):
        me.update(1)
    eventually(lambda: heard.count("leave", "a", "removed") == 1)
    again = two.join("a")  # an explicit join is allowed
    eventually(lambda: ids(one) == ["a"])
    assert not again.lost.is_set()


def test_removed_member_that_saw_no_event_does_not_rejoin(open_group: Open) -> None:
    one, two = open_group(ttl=0.6), open_group()
    one.join("b")
    me = two.join("a")
    protocol = one._handle.protocol
    leave = ("EVAL", PEERS_LEAVE.source, 1, protocol.prefix, "a", "", "")
    # In one transaction, so that no member sees the event.
    together = [("MULTI",), leave, ("DEL", protocol.key("events")), ("EXEC",)]
    protocol.connector.pipeline(together)
    assert me.lost.wait(10)
    assert me.reason == "removed"


def test_late_removal_event_does_not_affect_a_later_member(open_group: Open) -> None:
    one, two = open_group(ttl=LONG_S), open_group()
    for _ in range(20):
        me = two.join("a")
        with two._handle.lock:  # delays the event
            one.remove("a")
            one._handle.protocol.connector.run(
                PEERS_JOIN,
                [one._handle.protocol.prefix],
                ["a", "of-another", "1", 0, b"null", "takeover", 1000],
            )
        again = two.join("a")
        assert me.lost.wait(10)
        assert not again.lost.is_set()
        again.leave()


def test_creator_chooses_the_settings_for_all_handles(open_group: Open) -> None:
    open_group(ttl=1 / 3, min_size=2)
    assert open_group().config.min_size == 2
    open_group(ttl=1 / 3)
    with pytest.raises(PeerError, match=r"ttl=0\.333"):
        open_group(ttl=0.334)


@pytest.mark.parametrize(
    "settings",
    [
        {"ttl": 0.1},
        {"ttl": 1e9},
        {"min_size": 0},
        {"member_expiration": -1},
        {"election": "loudest"},
        {"max_inbox": 0},
    ],
)
def test_invalid_setting_is_refused(open_group: Open, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        open_group(**settings)


@pytest.mark.parametrize(
    "arguments",
    [{"name": "a b"}, {"name": ""}, {"priority": 1001}, {"on_conflict": "x"}, {"timeout": -1}],
)
def test_invalid_join_is_refused(open_group: Open, arguments: dict[str, Any]) -> None:
    group = open_group(ttl=LONG_S)
    with pytest.raises(ValueError, match=r"must be|cannot be"):
        group.join(**arguments)
    assert not group.members


def test_group_refuses_members_beyond_its_limit(
    open_group: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_handle, "MEMBERS_MAX", 2)
    group = open_group(ttl=LONG_S)
    group.join()
    group.join()
    with pytest.raises(PeerError, match="2 members"):
        group.join()


def test_closed_handle_raises(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    me = group.join()
    events = group.watch()
    group.close()
    group.close()
    assert [(event.kind, event.member) for event in events][:1] in ([], [("left", me.id)])
    for call in (group.join, group.watch, lambda: group.remove("a"), lambda: group.guarded("x")):
        with pytest.raises(MeteorError, match="closed"):
            call()
    with pytest.raises(MembershipLost, match="left"):
        me.update(1)


@pytest.mark.parametrize("method", [name for name in dir(meteor.PeerGroup) if name[:3] == "on_"])
def test_closed_handle_refuses_callbacks(open_group: Open, method: str) -> None:
    group = open_group(ttl=LONG_S)
    group.close()
    with pytest.raises(MeteorError, match="closed"):
        getattr(group, method)(print)


def test_forked_handle_refuses_callbacks_even_if_a_thread_held_its_lock(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with group._handle.lock:
            held.set()
            forked.wait(20)

    def register() -> None:
        for method in (group.on_join, group.on_elected, group.on_decision):
            with pytest.raises(MeteorError, match="belongs to the parent process"):
                method(print)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    code = in_child(register)
    forked.set()
    thread.join()
    assert code == 0


@pytest.mark.parametrize(
    "register",
    [
        lambda me: me.on_vote(print),
        lambda me: me.on_missed(print),
        lambda me: me.on_action("open")(print),
    ],
)
def test_lost_membership_refuses_functions_for_votes_and_actions(
    open_group: Open, register: Callable[[meteor.Membership], object]
) -> None:
    me = open_group(ttl=LONG_S).join()
    me.leave()
    with pytest.raises(MembershipLost, match="left"):
        register(me)


# On every kind of server, and while handles are closed


def test_handle_works_on_every_kind_of_server(any_url: str, open_group: Open) -> None:
    one, two = open_group(any_url, ttl=2.0), open_group(any_url)
    heard = Heard(two)
    me = one.join("a", metadata=[1])
    other = one.join()
    with me.leadership(timeout=10) as term:
        term.guard.set("x", "y")
        assert two.guarded("x") == b"y"
    eventually(lambda: two.leader is not None and two.leader.id == other.id)
    sent = me._handle.valid_until
    eventually(lambda: me._handle.valid_until > sent)
    me.leave()
    eventually(lambda: heard.count("leave", "a", "left") == 1)
    other.leave()
    eventually(lambda: heard.count("resigned", other.id, "left") == 1)
    assert two.leader is None
    assert heard.calls == [
        ("join", "a"),
        ("elected", "a"),
        ("join", other.id),
        ("resigned", "a", "resigned"),
        ("elected", other.id),
        ("leave", "a", "left"),
        ("leave", other.id, "left"),
        ("resigned", other.id, "left"),
    ]


def test_closing_during_a_join_leaves_no_member_behind(url: str) -> None:
    with meteor.connect(url) as watcher, watcher.peer_group(GROUP, ttl=LONG_S) as observer:
        for _ in range(20):
            with meteor.connect(url) as client:
                group = client.peer_group(GROUP)
                thread = threading.Thread(target=lambda group=group: swallow(group.join))
                thread.start()
                group.close()
                thread.join(30)
        last = observer._handle.protocol.look()
        assert last.members == {}


def swallow(call: Callable[[], object]) -> None:
    try:
        call()
    except MeteorError:
        pass


def test_callback_can_close_its_own_group(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    closed = threading.Event()

    @group.on_join
    def close(member: Any) -> None:
        group.close()
        closed.set()

    started = time.monotonic()
    group.join()
    assert closed.wait(20)
    assert time.monotonic() - started < 20


def test_id_of_an_unnamed_member_cannot_be_taken_over(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    me = group.join()
    with pytest.raises(MemberTaken, match=r"joined without a name\. Choose another name"):
        group.join(me.id)
    group.join("a")
    with pytest.raises(MemberTaken, match="take this one over"):
        group.join("a", on_conflict="fail")
