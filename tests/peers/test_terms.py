"""Peer group terms: guarded writes, and how a leader learns that its term has ended.

A term must report its validity correctly without the network. To simulate late events, the tests
call internal methods directly, in an order that threads rarely produce.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from meteor_py.errors import (
    StaleTerm,
)
from meteor_py.peers import leadership
from meteor_py.peers.leadership import Term
from meteor_py.peers.membership import Membership
from meteor_py.peers.protocol import HeartbeatReply, Presence
from meteor_py.redis.scripts import PEERS_GUARDED_WRITE, PEERS_UPDATE_MEMBER
from meteor_py.runtime.clock import now
from tests.conftest import ServerFactory
from tests.support.mailing import SOON_S
from tests.support.peering import LONG_S, Heard, Open, await_heartbeat, expel, ids, watching
from tests.support.peering import open_group as open_group
from tests.support.proxied_stream import ReplicatedStream
from tests.support.proxy import Proxy
from tests.support.servers import HOST, Server
from tests.support.waiting import eventually

# Guarded writes


def test_all_processes_can_read_guarded_values_and_leaders_can_remove_them(
    open_group: Open,
) -> None:
    one, two = open_group(ttl=LONG_S), open_group()
    term = one.join().term
    assert term is not None
    assert two.guarded("config") is None
    term.guard.set("config", b"\x00\xff")
    assert two.guarded("config") == b"\x00\xff"
    term.guard.set("config", "text")
    assert two.guarded("config") == b"text"
    term.guard.delete("config")
    assert two.guarded("config") is None


@pytest.mark.parametrize("how", ["resign", "removed", "taken over", "expelled"])
def test_former_leader_cannot_write(open_group: Open, how: str) -> None:
    one, two = open_group(ttl=LONG_S), open_group()
    me = one.join("a")
    other = two.join("b")
    term, session = me.term, me._handle.session
    assert term is not None
    with one._handle.lock:  # keeps events from being processed
        match how:
            case "resign":
                args = ["a", session, "resign", term.number, 0]
                two._handle.protocol.run(PEERS_UPDATE_MEMBER, args)
            case "removed":
                two.remove("a")
            case "taken over":
                open_group().join("a")
            case _:
                expel(two, "a")
        eventually(lambda: other.term is not None)
        assert other.term is not None
        other.term.guard.set("x", "new")
        assert term.remaining > 0  # the leader cannot know yet
        with pytest.raises(StaleTerm, match="Nothing was written"):
            term.guard.set("x", "old")
        assert not term.valid
        assert term.lost.is_set()
    assert two.guarded("x") == b"new"
    with pytest.raises(StaleTerm, match="this member has lost it"):
        term.guard.delete("x")
    args = [term.number, session, "set", "x", "old"]
    assert two._handle.protocol.run(PEERS_GUARDED_WRITE, args)[0] == b"STALE"


# Term validity


@pytest.fixture
def proxied(private_server: ServerFactory) -> Iterator[tuple[Proxy, Server]]:
    server = private_server()
    with Proxy(HOST, server.port) as proxy:
        yield proxy, server


def test_cut_off_leader_stops_trusting_its_term_before_another_is_elected(
    proxied: tuple[Proxy, Server], open_group: Open
) -> None:
    proxy, server = proxied
    one, two = open_group(proxy.url, ttl=1.2), open_group(server.url)
    me, other = one.join(), two.join()
    term = me.term
    assert term is not None
    valid_then: list[bool] = []
    two.on_elected(lambda leader, number: valid_then.append(term.valid))
    proxy.stall()
    assert term.lost.wait(20)  # without a reply from the server
    assert (term.valid, term.remaining, me.term) == (False, 0, None)
    eventually(lambda: other.term is not None)
    eventually(lambda: len(valid_then) >= 2)
    assert valid_then[-1] is False
    proxy.heal()
    proxy.cut()
    eventually(lambda: len(ids(two)) == 2 and me.id in ids(two))  # the member has rejoined
    assert not term.valid
    assert other.term is not None


def test_leader_cut_off_together_with_all_members_keeps_its_term_number(
    proxied: tuple[Proxy, Server], open_group: Open
) -> None:
    proxy, server = proxied
    one, two = open_group(proxy.url, ttl=1.0), open_group(proxy.url)
    me, other = one.join(), two.join()
    term = me.term
    assert term is not None
    eventually(lambda: len(ids(one)) == 2)
    proxy.stall()
    assert term.lost.wait(20)
    ended = now()
    eventually(lambda: now() > ended + 1.2)  # more than the ttl
    proxy.resume()
    eventually(lambda: me.term is not None)
    assert me.term is not None
    assert me.term is not term
    assert (me.term.number, term.valid) == (term.number, False)
    assert other.term is None
    with watching(two) as events:
        last = open_group(server.url).join()
        eventually(lambda: last.id in [event.member for event in events])
    assert [event.kind for event in events] == ["joined"]  # no member was expelled


def reply_of(me: Membership, leader: Membership | None, term: int) -> HeartbeatReply:
    return HeartbeatReply(
        incarnation=me.group._handle.view.incarnation,
        view=me.group.view,
        mark=me.group._handle.view.mark,
        term=term,
        leader=leader.id if leader else "",
        session=leader._handle.session if leader else "",
        time=0.0,
        presence=[Presence.MEMBER],
        overdue_s=LONG_S,
        has_orphans=False,
        ttl=me.group.config.ttl,
    )


@pytest.fixture
def two_members(open_group: Open) -> tuple[Membership, Membership]:
    group = open_group(ttl=LONG_S)
    return group.join("a"), group.join("b")


def test_late_election_event_does_not_revive_a_resigned_term(
    two_members: tuple[Membership, Membership],
) -> None:
    me, other = two_members
    term = me.term
    assert term is not None
    me.resign()
    me._handle.leadership.elected(term.number)  # the event arrives late
    assert me.term is None
    assert me._handle.renewed(now(), reply_of(me, me, term.number))  # a late heartbeat reply
    assert me.term is None
    eventually(lambda: other.term is not None)
    me._handle.leadership.deposed(term.number)
    me._handle.leadership.elected(term.number)
    assert me.term is None


def test_outdated_heartbeat_reply_does_not_end_the_term(
    two_members: tuple[Membership, Membership],
) -> None:
    me, other = two_members
    before = me.term
    assert before is not None
    me.resign()
    eventually(lambda: other.term is not None)
    assert other.term is not None
    term = other.term
    other._handle.renewed(now(), reply_of(other, me, before.number))
    other._handle.renewed(now(), reply_of(other, None, before.number))
    assert other.term is term
    assert term.valid
    other._handle.renewed(now(), reply_of(other, None, term.number))
    assert not term.valid


def test_heartbeat_reply_ends_a_term_before_its_event_arrives(
    two_members: tuple[Membership, Membership],
) -> None:
    me, other = two_members
    term = me.term
    assert term is not None
    me._handle.renewed(now(), reply_of(me, other, term.number + 1))
    assert (me.term, term.lost.is_set()) == (None, True)
    me._handle.leadership.elected(term.number)
    assert me.term is None


def test_term_that_was_invalid_for_a_moment_stays_invalid(
    two_members: tuple[Membership, Membership],
) -> None:
    me, _ = two_members
    term = me.term
    assert term is not None
    me._handle.valid_until = now() - 1  # expired, but not checked yet
    me._handle.renewed(now(), reply_of(me, me, term.number))
    assert not term.valid
    assert term.lost.is_set()
    assert me.term is not None
    assert (me.term.number, me.term is term) == (term.number, False)


def test_term_is_lost_on_time_even_if_no_code_checks_it(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    me = group.join()
    term = me.term
    assert term is not None
    me._handle.valid_until = now() + 0.05
    eventually(lambda: term.remaining == 0)
    assert not term.valid
    assert term.lost.is_set()


def test_resignation_that_did_not_reach_the_server_is_repeated(
    proxied: tuple[Proxy, Server], open_group: Open
) -> None:
    proxy, server = proxied
    one, two = open_group(proxy.url, ttl=1.5), open_group(server.url)
    me, other = one.join(), two.join()
    term = me.term
    assert term is not None
    one._handle.protocol.connector.call("PING")
    proxy.refuse()
    proxy.cut()
    assert me.resign()
    assert not term.valid
    proxy.heal()
    eventually(lambda: other.term is not None)
    assert me.term is None
    assert me.id in ids(two)


# A server that lost state


def test_terms_continue_after_a_failover_to_a_lagging_replica(
    replicated: ReplicatedStream, open_group: Open
) -> None:
    proxied = replicated.proxied
    one, two = open_group(proxied.proxy.url, ttl=2.0), open_group(proxied.proxy.url)
    first, second = one.join("a"), two.join("b")
    eventually(lambda: ids(one) == ["a", "b"])
    heard = Heard(two)
    replicated.lag()
    lost_on_the_way = one.join("c")  # the replica never gets this member or the next terms
    first.resign()
    eventually(lambda: second.term is not None)
    second.resign()
    eventually(lambda: lost_on_the_way.term is not None)
    known = max(one.term, two.term)
    replicated.fail_over()
    eventually(lambda: heard.count("reset") >= 1, 20)
    eventually(lambda: set(ids(one)) == set(ids(two)) == {"a", "b", "c"}, 20)
    eventually(
        lambda: [m.term is not None for m in (first, second, lost_on_the_way)].count(True), 20
    )
    leaders = [m for m in (first, second, lost_on_the_way) if m.term is not None]
    assert len(leaders) == 1
    leaders[0].resign()
    eventually(lambda: one.term > known and two.term == one.term, 20)


def test_term_below_a_known_one_is_not_trusted(open_group: Open) -> None:
    """New terms are above every term that a member knows.

    This holds even if the server has lost the term number and its clock is behind.
    """
    one, two = open_group(ttl=0.9), open_group()
    me, other = one.join("a"), two.join("b")
    seen = 10**15
    me._handle.leadership.deposed(seen)  # the member knows of a term far ahead
    eventually(lambda: one.term > seen and two.term > seen)
    assert (me.term is None) != (other.term is None)


def test_heartbeat_reply_is_decoded(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    me = group.join("a")
    with ExitStack() as stack:
        link = group._handle.protocol.open_connection()
        stack.callback(link.close)
        reply = group._handle.protocol.heartbeat(link, me._handle.session, ["a", "nobody"])
    assert reply.presence == [Presence.MEMBER, Presence.EXPELLED]
    expected = replace(
        reply_of(me, me, group.term),
        time=reply.time,
        presence=reply.presence,
        overdue_s=reply.overdue_s,
    )
    assert reply == expected


def leader_threads() -> int:
    return sum(thread.name.startswith("meteor-leader") for thread in threading.enumerate())


def lead_for_a_moment(me: Membership) -> None:
    with me.leadership(SOON_S):
        pass


@pytest.mark.parametrize("way", [Membership.resign, lead_for_a_moment])
def test_no_other_member_is_elected_before_a_resigning_leaders_task_ends(
    open_group: Open, monkeypatch: pytest.MonkeyPatch, way: Callable[[Membership], object]
) -> None:
    monkeypatch.setattr(leadership, "TASKS_S", LONG_S)
    one, two = open_group(ttl=LONG_S), open_group()
    me, other = one.join(), two.join()
    begun, ending, finish = threading.Event(), threading.Event(), threading.Event()

    @me.as_leader
    def lead(term: Term) -> None:
        begun.set()
        term.lost.wait(SOON_S)
        ending.set()
        finish.wait(SOON_S)

    assert begun.wait(SOON_S)
    resigning = threading.Thread(target=way, args=(me,))
    resigning.start()
    assert ending.wait(SOON_S)
    await_heartbeat(one, me)
    assert two._handle.protocol.look().leader == me.id
    assert other.term is None
    finish.set()
    resigning.join(SOON_S)
    eventually(lambda: other.term is not None, SOON_S)


def test_leader_task_that_outlives_several_terms_next_gets_the_latest(
    open_group: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leadership, "TASKS_S", 0.01)
    me = open_group(ttl=LONG_S).join()
    finish = threading.Event()
    terms: list[Term] = []

    @me.as_leader
    def lead(term: Term) -> None:
        terms.append(term)
        finish.wait(SOON_S)

    eventually(lambda: terms, SOON_S)
    numbers = []
    for _ in range(5):
        eventually(lambda: me.term is not None, SOON_S)
        assert me.term is not None
        numbers.append(me.term.number)
        me.resign()
    eventually(lambda: me.term is not None, SOON_S)
    assert leader_threads() == 1
    finish.set()
    eventually(lambda: len(terms) == 2, SOON_S)
    assert terms[0].number == numbers[0]
    assert terms[1] is me.term
    eventually(lambda: leader_threads() == 0, SOON_S)


def test_function_registered_twice_as_leader_task_runs_once_per_term(open_group: Open) -> None:
    me = open_group(ttl=LONG_S).join()
    terms: list[Term] = []
    me.as_leader(terms.append)
    me.as_leader(terms.append)
    eventually(lambda: len(terms) == 1 and leader_threads() == 0, SOON_S)
    me.resign()
    eventually(lambda: len(terms) == 2 and leader_threads() == 0, SOON_S)


def test_leader_task_that_exits_lets_others_lead(open_group: Open) -> None:
    group = open_group(ttl=1.5)
    first, second = group.join(), group.join()
    first.as_leader(lambda term: sys.exit("fatal"))
    eventually(lambda: second.term is not None, SOON_S)
