"""A client finds the primary through sentinels, and switches when another server is promoted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis import sentinels as sentinels_module
from meteor_py.redis.address import parse
from meteor_py.redis.topology import Search
from meteor_py.testing import Sentinels
from meteor_py.testing.sentinels import Sentinel
from meteor_py.testing.server import HOST
from tests.support.client_load import (
    CAPACITY,
    STREAM,
    GroupReading,
    Publishing,
    duplicates,
    read_log,
    unreported,
)
from tests.support.forking import in_child
from tests.support.waiting import eventually


@pytest.fixture
def sentinels(program: Path) -> Iterator[Sentinels]:
    with Sentinels(program=program) as running:
        yield running


def wait_for_replicas(sentinels: Sentinels) -> None:
    """Wait until both replicas have everything that was written so far."""
    with sentinels.primary.client() as plain:
        plain.set("a", 1)
        assert plain.execute_command("WAIT", 2, 10_000) == 2


@pytest.mark.parametrize("how", ["planned", "killed"])
def test_every_record_lost_in_a_failover_is_reported(sentinels: Sentinels, how: str) -> None:
    with meteor.connect(sentinels.url) as m:
        stream = m.stream(STREAM, capacity=CAPACITY)
        publishing, group = Publishing(stream, window=5), GroupReading(stream)
        for each in (publishing, group):
            each.start()
        assert publishing.continues()
        wait_for_replicas(sentinels)  # the replicas must at least have the stream
        if how == "planned":
            sentinels.failover()
        else:
            sentinels.wait_for_failover(sentinels.kill_primary())
        assert publishing.continues()
        publishing.stop()
        log = read_log(stream)
        assert group.reach(max(log) + 1)
        group.stop()
    assert publishing.problems == group.problems == []
    assert duplicates(log.values()) == []
    assert unreported(publishing.acked, log, publishing.reported) == []
    assert unreported(group.seen, log, group.reported) == []


def test_every_connection_leaves_the_former_primary_at_once(sentinels: Sentinels) -> None:
    # The former primary keeps running and accepts writes for a few seconds.
    with meteor.connect(sentinels.url) as m, m.stream(STREAM, create=True).publisher() as pub:
        pub.publish(b"x").result()
        wait_for_replicas(sentinels)  # otherwise the failover may lose the record
        before = pub._sender._connection.node
        sentinels.failover()
        after = (HOST, sentinels.primary.port)
        assert after != before
        eventually(lambda: m._connector._topology.locate(None, Search(5.0)) == after)
        pub.publish(b"y").result()
        assert pub._sender._connection.node == after


def test_sentinel_with_outdated_information_is_overruled(sentinels: Sentinels) -> None:
    old = sentinels.kill_primary()
    new = sentinels.wait_for_failover(old)
    stale = Sentinel(sentinels.servers[0].program)
    # This sentinel monitors the killed primary, so it never learns of the other servers.
    try:
        stale.configure([f"sentinel monitor {sentinels.service} {HOST} {old.port} 2", ""])
        stale.start()
        assert stale.primary_port(sentinels.service) == old.port
        url = sentinels.url.replace("://", f"://{stale.address},")
        with meteor.connect(url) as m:
            assert m.streams() == []
            assert m._connector._topology.locate(None, Search(5.0)) == (HOST, new.port)
    finally:
        stale.close()


def test_announcement_makes_the_client_also_ask_unresponsive_sentinels(
    sentinels: Sentinels, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = sentinels_module.Sentinels(parse(sentinels.url), 5.0)
    try:
        topology.locate(None, Search(5.0))
        asked: list[object] = []
        ask = sentinels_module.Sentinels._ask

        def note(
            asking: sentinels_module.Sentinels, node: Any, search: Search, timeout_s: float
        ) -> Any:
            asked.append(node)
            return ask(asking, node, search, timeout_s)

        monkeypatch.setattr(sentinels_module.Sentinels, "_ask", note)
        silent = topology.known[0]
        topology._silent_until[silent] = float("inf")
        topology.check(Search(5.0))
        assert silent in asked
    finally:
        topology.close()


def test_watcher_thread_ends_with_its_client_and_a_forked_child_starts_its_own(
    sentinels: Sentinels,
) -> None:
    def watchers() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if name == "meteor-sentinels"]

    with meteor.connect(sentinels.url) as m:
        assert m.streams() == []
        assert len(watchers()) == 1

        def use() -> None:
            assert m.streams() == []
            assert len(watchers()) == 1

        assert in_child(use) == 0
        assert m.streams() == []
    assert watchers() == []


def test_error_for_an_unknown_primary_contains_its_name(sentinels: Sentinels) -> None:
    url = sentinels.url.rpartition("/")[0] + "/nobody"
    with meteor.connect(url) as m, pytest.raises(meteor.ServerRefused, match="'nobody'"):
        m.streams()


def test_plain_redis_client_leaves_the_former_primary(sentinels: Sentinels) -> None:
    with meteor.connect(sentinels.url) as m:
        m.redis.set("a", 1)
        assert m.redis.execute_command("WAIT", 2, 10_000) == 2
        before = m.redis.connection_pool.get_connection()
        before.connect()
        m.redis.connection_pool.release(before)
        new = sentinels.failover()  # the former primary still runs and accepts writes
        eventually(lambda: m.redis.info("server")["tcp_port"] == new.port)
        assert m.redis.get("a") == b"1"
        assert before.port == new.port, "the pool still has a connection to the former primary"
