"""Membership of distributed groups: joining, leaving, dying, coming back, and who is told of it.

Several handles in one process, each with a client of its own. What Atomix tested of its groups is
here under T1 to T23, RIAPS under V1 to V8 (../shared/notes/groups.md, 2.1 and 2.2).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py import keys
from meteor_py.errors import (
    ConnectionFailed,
    MembershipLost,
    MemberTaken,
    MeteorError,
    OutOfMemory,
    PeerError,
)
from meteor_py.peers import membership as membership_module
from meteor_py.peers.event import Event
from meteor_py.peers.group import PeerGroup
from meteor_py.peers.member import Status
from meteor_py.scripts import PEERS_JOIN, PEERS_LEAVE
from tests.conftest import ServerFactory
from tests.peering import GROUP, Heard, watching
from tests.proxy import Proxy
from tests.servers import HOST, Server, plain_client
from tests.waiting import eventually

Open = Callable[..., PeerGroup]

#: A ttl that a test waits out, and one that it cannot have waited out.
SHORT_S = 0.5
LONG_S = 60.0


@pytest.fixture
def open_group(url: str) -> Iterator[Open]:
    """Handles of one group, each of a client of its own; the first chooses the settings."""
    with ExitStack() as stack:

        def opened(at: str = "", name: str = GROUP, **settings: Any) -> PeerGroup:
            client = stack.enter_context(meteor.connect(at or url))
            return stack.enter_context(client.group(name, **settings))

        yield opened


def ids(group: PeerGroup) -> list[str]:
    return [member.id for member in group.members]


def expel(group: PeerGroup, *members: str) -> None:
    """Have the server drop members, as if they had been silent for too long."""
    client = group.books.client
    for member in members:
        client.call("ZADD", group.books.key("deadlines"), 1, member)
    group.books.look()


# Joining and leaving


def test_another_handle_is_told_of_a_join(open_group: Open) -> None:  # T1
    one, two = open_group(ttl=LONG_S), open_group()
    heard = Heard(one)
    two.join("test")
    eventually(lambda: heard.count("join", "test") == 1)


def test_all_are_told_once_of_a_join_and_of_its_end(open_group: Open) -> None:  # T2, T20, T23
    one, two = open_group(ttl=LONG_S), open_group()
    heard = [Heard(one), Heard(two)]
    first = one.join()
    me = two.join()
    eventually(lambda: len(one.members) == len(two.members) == 2)
    me.leave()
    me.leave()
    assert ids(two) == [first.id]
    eventually(lambda: all(each.count("leave", me.id, "left") for each in heard))
    first.leave()  # what comes after it shows that nothing came twice
    eventually(lambda: all(each.count("leave", first.id, "left") for each in heard))
    assert heard[0].calls == heard[1].calls
    assert [call[0] for call in heard[0].calls] == [
        *("join", "elected", "join", "leave", "leave", "resigned")
    ]


def test_closing_a_handle_lets_its_members_leave(open_group: Open) -> None:  # T3
    one, two = open_group(ttl=LONG_S), open_group()
    heard = Heard(one)
    first, second = two.join(), two.join()
    two.close()
    eventually(lambda: heard.count("leave", second.id, "left") == 1)
    assert heard.count("leave", first.id, "left") == 1
    assert [me.lost.is_set() for me in (first, second)] == [True, True]


def test_closing_a_client_closes_its_handles(url: str) -> None:
    with meteor.connect(url) as watcher, watcher.group(GROUP, ttl=LONG_S) as group:
        client = meteor.connect(url)
        other = client.group(GROUP)
        other.join()
        eventually(lambda: len(group.members) == 1)
        client.close()
        assert other.closed
        eventually(lambda: not group.members)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("meteor-")]


def test_the_member_is_there_when_its_join_is_told(open_group: Open) -> None:  # T19
    one, two = open_group(ttl=LONG_S), open_group()
    heard = [Heard(one), Heard(two)]
    two.join("a")
    eventually(lambda: all(each.calls for each in heard))
    assert [each.members[0] for each in heard] == [["a"], ["a"]]


def test_the_member_is_gone_when_its_leaving_is_told(open_group: Open) -> None:  # T6
    one, two = open_group(ttl=LONG_S), open_group()
    sizes: list[int] = []
    one.on_leave(lambda member, reason: sizes.append(len(one.members)))
    two.join("a")
    two.join("b").leave()
    eventually(lambda: sizes == [1])


def test_the_own_join_is_told_when_it_is_done(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    told = threading.Event()
    group.on_join(lambda member: told.set())
    with group.caller.held():  # as join() does
        group.join()
        assert not told.is_set()
    assert told.wait(10)


def test_a_callback_may_join_and_leave(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    done: list[str] = []

    @group.on_join
    def also(member: Any) -> None:
        if member.id == "a":
            with group.join("b") as me:
                done.append(me.id)

    group.join("a")
    eventually(lambda: done == ["b"] and ids(group) == ["a"])


def test_metadata_comes_with_the_join_and_its_changes_with_events(open_group: Open) -> None:  # T15
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


def test_metadata_is_json_and_not_too_long(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    with pytest.raises(TypeError):
        group.join(metadata=object())
    with pytest.raises(ValueError, match="at most"):
        group.join(metadata="x" * 100_000)
    me = group.join()
    with pytest.raises(ValueError, match="at most"):
        me.update("x" * 100_000)
    assert group.members[0].metadata is None


def test_instances_of_a_group_are_apart_and_count_their_own(url: str) -> None:  # V1, V8
    with meteor.connect(url) as client:
        shared = [client.group("type", instance="g1"), client.group("type", instance="g1")]
        private = client.group("type", instance="g2")
        for group in (*shared, private):
            group.join()
        eventually(lambda: [len(group.members) for group in (*shared, private)] == [2, 2, 1])
        assert client.groups() == ["type/g1", "type/g2"]


def test_who_leaves_and_joins_again_without_a_name_is_somebody_else(open_group: Open) -> None:  # V5
    one, two = open_group(ttl=LONG_S), open_group()
    one.join()
    seen = set()
    for _ in range(20):
        with two.join() as me:
            seen.add(me.id)
            eventually(lambda me=me: me.id in ids(one))  # type: ignore[misc]
        eventually(lambda: len(one.members) == 1 and one.leader is not None)
    assert len(seen) == 20


def test_a_member_can_be_removed_by_anybody_and_does_not_come_back(open_group: Open) -> None:
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
    again = two.join("a")  # by hand it may
    eventually(lambda: ids(one) == ["a"])
    assert not again.lost.is_set()


def test_who_was_removed_while_it_saw_no_events_does_not_come_back(
    url: str, open_group: Open
) -> None:
    one, two = open_group(ttl=0.6), open_group()
    one.join("b")
    me = two.join("a")
    with plain_client(url) as redis:
        both = redis.pipeline(transaction=True)  # nobody sees the event
        both.eval(PEERS_LEAVE.source, 1, one.books.prefix, "a", "", "")
        both.delete(one.books.key("events"))
        both.execute()
    assert me.lost.wait(10)
    assert me.reason == "removed"


def test_news_of_a_removal_does_not_hit_who_joins_after_it(open_group: Open) -> None:
    one, two = open_group(ttl=LONG_S), open_group()
    for _ in range(20):
        me = two.join("a")
        with two.lock:  # the news waits
            one.remove("a")
            one.books.client.run(
                PEERS_JOIN,
                [one.books.prefix],
                ["a", "of-another", "1", 0, b"null", "takeover", 1000],
            )
        again = two.join("a")
        assert me.lost.wait(10)
        assert not again.lost.is_set()
        again.leave()


def test_settings_are_those_of_who_began_the_group(open_group: Open) -> None:
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
def test_a_setting_that_cannot_be_is_refused(open_group: Open, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        open_group(**settings)


@pytest.mark.parametrize(
    "arguments",
    [{"name": "a b"}, {"name": ""}, {"priority": 1001}, {"on_conflict": "x"}, {"timeout": -1}],
)
def test_a_join_that_cannot_be_is_refused(open_group: Open, arguments: dict[str, Any]) -> None:
    group = open_group(ttl=LONG_S)
    with pytest.raises(ValueError, match=r"must be|cannot be"):
        group.join(**arguments)
    assert not group.members


def test_a_group_does_not_take_more_members_than_it_may(
    open_group: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "MEMBERS_MAX", 2)
    group = open_group(ttl=LONG_S)
    group.join()
    group.join()
    with pytest.raises(PeerError, match="2 members"):
        group.join()


def test_a_closed_handle_says_so(open_group: Open) -> None:
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


# Names


def test_a_name_that_is_taken_is_refused_waited_for_or_taken_over(open_group: Open) -> None:
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
    assert one.members[0].session == waiting[0].session


def test_taking_over_a_name_of_the_same_handle_ends_the_older_membership(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    first, second = group.join("a"), group.join("a")
    assert first.lost.is_set()
    assert not second.lost.is_set()
    assert group.memberships() == [second]


def test_who_waits_for_a_name_is_released_when_the_handle_is_closed(open_group: Open) -> None:
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
    assert [str(error).endswith("open another.") for error in errors] == [True]


def test_a_named_member_dies_and_comes_back_elsewhere(open_group: Open) -> None:  # T22
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
    assert not any(call[0] == "leave" for call in heard.calls)


def test_leaving_is_for_good_closing_is_not(open_group: Open) -> None:
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
def test_a_dead_member_is_removed_in_time_and_can_join_again(
    open_group: Open, expiration: float
) -> None:  # T4
    one = open_group(ttl=SHORT_S, member_expiration=expiration)
    two, three = open_group(), open_group()
    heard = Heard(one)
    two.join("2")
    two.close()
    eventually(lambda: heard.count("leave", "2", "expired") == 1)
    assert heard.calls.index(("status", "2", "dead")) < heard.calls.index(("leave", "2", "expired"))
    three.join("2")
    eventually(lambda: heard.count("join", "2") == 2)


# Dying


def test_who_only_looks_on_notices_a_death_alone(open_group: Open, url: str) -> None:
    group = open_group(ttl=SHORT_S)
    heard = Heard(group)
    with meteor.connect(url) as client:  # a member that is never heard of again
        args = ["a", "of-nobody", "0", 0, b"null", "fail", 1000]
        client.run(PEERS_JOIN, [group.books.prefix], args)
    eventually(lambda: heard.count("leave", "a", "expired") == 1)
    assert heard.count("resigned", "a", "expired") == 1
    assert group.leader is None


def test_a_death_is_noticed_on_time_and_not_with_the_next_beat(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)  # a beat every 20 s
    heard = Heard(group)
    args = ["a", "of-nobody", "0", 0, b"null", "fail", 1000]
    group.books.run(PEERS_JOIN, args)
    deadline = int((time.time() + 0.5) * 1000)
    group.books.client.call("ZADD", group.books.key("deadlines"), deadline, "a")
    group.hurry()
    eventually(lambda: heard.count("leave", "a", "expired") == 1, 10)


def test_who_was_taken_for_dead_joins_again(open_group: Open) -> None:  # T21
    one, two = open_group(ttl=0.9), open_group()
    heard = Heard(two)
    me, other = one.join(), two.join()
    named = one.join("a")
    before, sessions = me.id, (me.session, named.session)
    expel(two, me.id, "a")
    eventually(lambda: me.id != before and (me.session, named.session) != sessions)
    eventually(lambda: {m.id for m in two.members if m.alive} == {me.id, other.id, "a"})
    eventually(lambda: {m.id for m in one.members if m.alive} == {me.id, other.id, "a"})
    eventually(lambda: heard.count("join", me.id) == 1)
    assert heard.count("leave", before, "expired") == 1
    assert (heard.count("status", "a", "dead"), heard.count("status", "a", "alive")) == (1, 1)
    assert not me.lost.is_set()
    me.leave()
    named.leave()
    eventually(lambda: ids(two) == [other.id])  # no ghosts


def test_who_was_replaced_behind_its_back_does_not_come_back(open_group: Open) -> None:
    one, two = open_group(ttl=0.6), open_group()
    me = one.join("a")
    with one.lock:  # it sees no events; its heart is told
        two.books.client.run(
            PEERS_JOIN, [two.books.prefix], ["a", "another", "1", 0, b"null", "takeover", 1000]
        )
        two.books.client.call("ZADD", two.books.key("deadlines"), "+inf", "a")
    assert me.lost.wait(10)
    assert me.reason == "joined again elsewhere"
    assert two.find("a") is not None


def test_a_callback_that_raises_or_hangs_stops_neither_heart_nor_events(open_group: Open) -> None:
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
            sent = me.valid_until
            eventually(
                lambda: me.valid_until > sent + 2 * 0.9
            )  # two ttls later it is still heard of
            two.join("b")
            eventually(lambda: "b" in ids(one))
            assert not [event for event in events if event.member == me.id]
    finally:
        release.set()


# The order of events


def test_watching_goes_on_where_a_snapshot_was_taken(open_group: Open) -> None:
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
    one.books.client.call("XTRIM", one.books.key("events"), "MAXLEN", 2)
    with pytest.raises(PeerError, match="no longer all events"):
        two.watch(since=snapshot.number)


def test_all_see_the_same_events_while_fifty_members_join_and_leave_a_thousand_times(
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
        """Five members that come and go, of a handle that another thread uses too."""
        mine, group = random.Random(seeds[number]), handles[number % 5]
        here: list[Any] = [None] * 5
        try:
            for turn in range(200):
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
    last = observers[0].books.look()
    assert last.view >= 2000
    eventually(lambda: all(len(events) >= last.view for events in seen), 30)
    assert [event.view for event in seen[0]] == list(range(1, last.view + 1))
    assert seen[0] == seen[1] == seen[2]
    assert not any(event.resync for event in seen[0])
    for observer in (*observers, *handles):
        eventually(lambda o=observer: o.view == last.view)  # type: ignore[misc]
        assert observer.picture.members == last.members
    terms = [event.term for event in seen[0] if event.kind == "elected"]
    assert terms == sorted(set(terms))  # type: ignore[type-var]


def test_who_missed_events_that_are_gone_misses_no_member(open_group: Open) -> None:
    one, two = open_group(ttl=LONG_S), open_group()
    heard = Heard(two)
    with watching(two) as events:
        gone = one.join("gone")
        stays = one.join("stays")
        eventually(lambda: len(events) == 3)
        with two.lock:  # its watch stands still
            gone.leave()
            stays.update("changed")
            one.join("new")
            one.join("newest")
            client = one.books.client
            client.call("XTRIM", one.books.key("events"), "MAXLEN", 1)
        eventually(lambda: ids(two) == ["stays", "new", "newest"])
        eventually(lambda: heard.count("join", "newest") == 1)
    assert two.picture.members == one.picture.members
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


# A server that forgets


def test_after_flushall_all_members_join_again_and_all_are_told(url: str, open_group: Open) -> None:
    one, two, observer = open_group(ttl=0.9), open_group(), open_group()
    heard = Heard(observer)
    me, named = one.join(), two.join("a", metadata={"kept": True})
    eventually(lambda: heard.count("join", "a") == 1)
    before, term = me.id, observer.term
    with plain_client(url) as client:
        client.flushall()
    eventually(lambda: heard.count("reset") >= 1)
    eventually(lambda: {m.id for m in observer.members if m.alive} == {me.id, "a"} != {before, "a"})
    assert observer.picture.members["a"].metadata == {"kept": True}
    eventually(lambda: observer.leader is not None and observer.term > term)
    assert not me.lost.is_set()
    assert not named.lost.is_set()
    assert one.config.ttl == 0.9
    assert heard.count("leave", before, "resync") == 1
    eventually(lambda: (me.term is None) != (named.term is None))


@pytest.mark.parametrize("lost", ["config", "state", "members", "events"])
def test_a_group_recovers_from_the_loss_of_any_of_its_keys(open_group: Open, lost: str) -> None:
    one, two = open_group(ttl=0.6), open_group()
    me, named = one.join(), two.join("a")
    one.books.client.call("DEL", one.books.key(lost))
    last = one.join("last")
    eventually(
        lambda: all(
            {m.id for m in group.members if m.alive} == {me.id, named.id, last.id}
            and group.leader is not None
            for group in (one, two)
        ),
        20,
    )


def test_a_fork_of_the_history_is_noticed_though_the_numbers_fit(open_group: Open) -> None:
    """As after a fail-over that lost events, when as many others came before we looked."""
    one = open_group(ttl=LONG_S)
    one.join("a")
    with watching(one) as events:
        with one.lock:
            one.books.client.call("HSET", one.books.key("state"), "mark", "of another history")
            # The next event has the number that is expected, and another past.
            args = ["b", "s", "0", 0, b"null", "fail", 1000]
            one.books.client.run(PEERS_JOIN, [one.books.prefix], args)
        eventually(lambda: [event.kind for event in events] == ["reset", "joined"])
    assert all(event.resync for event in events)
    assert ids(one) == ["a", "b"]


def test_a_group_is_deleted_by_who_may_and_listed_no_more(url: str, open_group: Open) -> None:
    one, two, observer = open_group(ttl=0.6), open_group(), open_group()
    client = one.books.client
    with plain_client(url) as redis:
        redis.sadd(keys.PEERS, "left-over")
    assert client.groups() == [GROUP]
    me = two.join("a")
    one.join("b")
    with pytest.raises(PeerError, match="1 members that are alive"):
        one.delete()
    me.leave()
    assert ids(two) == ["b"]
    one.delete()
    assert one.closed
    assert client.groups() == []
    eventually(lambda: observer.picture.life == "" and not observer.members)
    with plain_client(url) as redis:  # who looks on does not begin it anew
        assert redis.keys("meteor:group:*") == []
    two.join("c")  # who joins does
    eventually(lambda: ids(observer) == ["c"])


def test_who_is_alive_when_its_group_is_deleted_begins_it_anew(open_group: Open) -> None:
    one, two = open_group(ttl=0.6), open_group()
    me = two.join()
    one.delete(force=True)
    before = me.id
    eventually(lambda: me.id != before and ids(two) == [me.id])


# The network


@pytest.fixture
def proxied(private_server: ServerFactory) -> Iterator[tuple[Proxy, Server]]:
    server = private_server()
    with Proxy(HOST, server.port) as proxy:
        yield proxy, server


def test_a_join_whose_answer_is_lost_is_one_join(
    proxied: tuple[Proxy, Server], open_group: Open
) -> None:
    proxy, server = proxied
    group, observer = open_group(proxy.url, ttl=LONG_S), open_group(server.url)
    with watching(observer) as events:
        group.join("warm").leave()
        proxy.cut_after_request(match=PEERS_JOIN.sha.encode())
        me = group.join()
        eventually(lambda: me.id in ids(observer))
        me.leave()
        eventually(lambda: events and events[-1].kind == "resigned")
    assert [event.kind for event in events if event.member == me.id] == [
        *("joined", "elected", "left", "resigned")
    ]


def test_who_cannot_say_that_it_leaves_is_gone_all_the_same(
    proxied: tuple[Proxy, Server], open_group: Open
) -> None:
    proxy, server = proxied
    group, observer = open_group(proxy.url, ttl=0.6), open_group(server.url)
    me = group.join()
    eventually(lambda: ids(observer) == [me.id])
    proxy.refuse()
    proxy.cut()
    me.leave()
    assert me.lost.is_set()
    heard = Heard(observer)
    eventually(lambda: heard.count("leave", me.id, "expired") == 1)
    with pytest.raises(ConnectionFailed):
        group.join()
    proxy.heal()


def test_events_are_not_lost_over_cuts_of_the_connection(
    proxied: tuple[Proxy, Server], open_group: Open, rng: random.Random
) -> None:
    proxy, server = proxied
    one, two = open_group(server.url, ttl=LONG_S), open_group(proxy.url)
    with watching(two) as events:
        for _ in range(30):
            one.join().leave()
            if rng.random() < 0.5:
                proxy.cut()
        last = one.books.look().view
        eventually(lambda: len(events) >= last)
    assert [event.view for event in events] == list(range(1, last + 1))
    assert not any(event.resync for event in events)


def test_a_group_goes_on_where_the_server_is_full(
    private_server: ServerFactory, open_group: Open
) -> None:
    server = private_server()
    one = open_group(server.url, ttl=0.9)
    me = one.join("a")
    with plain_client(server.url) as redis:
        redis.config_set("maxmemory", 1)
        two = open_group(server.url)
        other = two.join()
        sent = me.valid_until
        eventually(lambda: me.valid_until > sent)
        with me.leadership(timeout=10):
            pass
        eventually(lambda: other.term is not None)
        with pytest.raises(OutOfMemory):
            open_group(server.url, name="another")
        redis.config_set("maxmemory", 0)


def test_a_handle_works_on_every_kind_of_server(any_url: str, open_group: Open) -> None:
    one, two = open_group(any_url, ttl=2.0), open_group(any_url)
    heard = Heard(two)
    me = one.join("a", metadata=[1])
    other = one.join()
    with me.leadership(timeout=10) as term:
        term.guard.set("x", "y")
        assert two.guarded("x") == b"y"
    eventually(lambda: two.leader is not None and two.leader.id == other.id)
    sent = me.valid_until
    eventually(lambda: me.valid_until > sent)
    me.leave()
    eventually(lambda: heard.count("leave", "a", "left") == 1)
    other.leave()
    eventually(lambda: two.leader is None)
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


def test_closing_and_joining_at_once_leaves_no_member_behind(url: str) -> None:
    with meteor.connect(url) as watcher, watcher.group(GROUP, ttl=LONG_S) as observer:
        for _ in range(20):
            with meteor.connect(url) as client:
                group = client.group(GROUP)
                thread = threading.Thread(target=lambda group=group: swallow(group.join))
                thread.start()
                group.close()
                thread.join(30)
        last = observer.books.look()
        assert last.members == {}


def swallow(call: Callable[[], object]) -> None:
    try:
        call()
    except MeteorError:
        pass


def test_nothing_waits_for_a_thread_that_hangs_for_ever(open_group: Open) -> None:
    """A callback that closes its group, and one after it that is not called any more."""
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
