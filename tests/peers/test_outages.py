"""Peer groups recover from lost state and cut connections, and continue on a full server."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from meteor_py.errors import ConnectionFailed, OutOfMemory
from meteor_py.redis.scripts import PEERS_JOIN
from tests.conftest import ServerFactory
from tests.support.peering import LONG_S, Heard, Open, ids, on_key, watching
from tests.support.peering import open_group as open_group
from tests.support.proxy import Proxy
from tests.support.servers import HOST, Server, plain_client
from tests.support.waiting import eventually

# A server that loses state


def test_members_rejoin_after_flushall_and_listeners_see_it(url: str, open_group: Open) -> None:
    one, two, observer = open_group(ttl=0.9), open_group(), open_group()
    heard = Heard(observer)
    me, named = one.join(), two.join("a", metadata={"kept": True})
    eventually(lambda: heard.count("join", "a") == 1)
    before, term = me.id, observer.term
    with plain_client(url) as client:
        client.flushall()
    eventually(lambda: heard.count("reset") >= 1)
    eventually(lambda: {m.id for m in observer.members if m.alive} == {me.id, "a"} != {before, "a"})
    assert observer._handle.view.members["a"].metadata == {"kept": True}
    eventually(lambda: observer.leader is not None and observer.term > term)
    assert not me.lost.is_set()
    assert not named.lost.is_set()
    assert one.config.ttl == 0.9
    assert heard.count("leave", before, "resync") == 1
    eventually(lambda: (me.term is None) != (named.term is None))


@pytest.mark.parametrize("lost", ["config", "state", "members", "events"])
def test_group_recovers_if_one_of_its_main_keys_is_lost(open_group: Open, lost: str) -> None:
    one, two = open_group(ttl=0.6), open_group()
    me, named = one.join(), two.join("a")
    on_key(one, "DEL", lost)
    last = one.join("last")
    eventually(
        lambda: all(
            {m.id for m in group.members if m.alive} == {me.id, named.id, last.id}
            and group.leader is not None
            for group in (one, two)
        ),
        20,
    )


def test_forked_history_is_detected_even_if_numbers_match(open_group: Open) -> None:
    """Simulate a failover that loses events, after which new events reuse the lost numbers."""
    one = open_group(ttl=LONG_S)
    one.join("a")
    with watching(one) as events:
        with one._handle.lock:
            on_key(one, "HSET", "state", "mark", "of another history")
            # The next event has the expected number but a different predecessor.
            args = ["b", "s", "0", 0, b"null", "fail", 1000]
            one._handle.protocol.connector.run(PEERS_JOIN, [one._handle.protocol.prefix], args)
        eventually(lambda: [event.kind for event in events] == ["reset", "joined"])
    assert all(event.resync for event in events)
    assert ids(one) == ["a", "b"]


# The network


@pytest.fixture
def proxied(private_server: ServerFactory) -> Iterator[tuple[Proxy, Server]]:
    server = private_server()
    with Proxy(HOST, server.port) as proxy:
        yield proxy, server


def test_join_whose_reply_is_lost_counts_once(
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


def test_member_that_cannot_report_leaving_still_leaves(
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


def test_events_survive_cut_connections(
    proxied: tuple[Proxy, Server], open_group: Open, rng: random.Random
) -> None:
    proxy, server = proxied
    one, two = open_group(server.url, ttl=LONG_S), open_group(proxy.url)
    with watching(two) as events:
        for _ in range(30):
            one.join().leave()
            if rng.random() < 0.5:
                proxy.cut()
        last = one._handle.protocol.look().view
        eventually(lambda: len(events) >= last)
    assert [event.view for event in events] == list(range(1, last + 1))
    assert not any(event.resync for event in events)


def test_group_continues_on_a_full_server(private_server: ServerFactory, open_group: Open) -> None:
    server = private_server()
    one = open_group(server.url, ttl=0.9)
    me = one.join("a")
    with plain_client(server.url) as redis:
        redis.config_set("maxmemory", 1)
        two = open_group(server.url)
        other = two.join()
        sent = me._handle.valid_until
        eventually(lambda: me._handle.valid_until > sent)
        with me.leadership(timeout=10):
            pass
        eventually(lambda: other.term is not None)
        with pytest.raises(OutOfMemory):
            open_group(server.url, name="another")
        redis.config_set("maxmemory", 0)
