"""In a long outage, clients retry rarely; afterwards, they continue by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.redis.topology import RefreshTimer, redirect_pause_s
from meteor_py.testing import Cluster, Node
from tests.support.client_load import STREAM
from tests.support.waiting import eventually

SLOT = Cluster.slot(STREAM)
#: Length of the outage in seconds.
OUTAGE_S = 5.0
#: Maximum number of connections that a publisher, a subscriber and a caller may open during the
#: outage, including those that refresh the slot map.
CONNECTIONS_MAX = 130


@contextmanager
def down(node: Node) -> Iterator[None]:
    """Make a node reply CLUSTERDOWN to every command, by deleting one of its other slots."""
    missing = next(slot for slot in sorted(node.own_slots()) if slot != SLOT)
    node.ask("CLUSTER", "DELSLOTS", missing)
    try:
        yield
    finally:
        node.ask("CLUSTER", "ADDSLOTS", missing)


def accepted(cluster: Cluster) -> int:
    """Return the number of connections that all nodes together have accepted so far."""
    return sum(node.info("stats")["total_connections_received"] for node in cluster.nodes)


def test_clients_connect_rarely_in_a_long_outage_and_continue_after_it(cluster: Cluster) -> None:
    node = cluster.owner(SLOT)
    with meteor.connect(cluster.url, timeout=2) as m:
        stream = m.stream(STREAM, create=True)
        got: list[bytes] = []
        ended = threading.Event()

        def read() -> None:
            while not ended.is_set():
                try:
                    got.extend(sub.poll(1).values())
                except meteor.ConnectionFailed:
                    pass

        def call() -> None:
            while not ended.is_set():
                try:
                    stream.describe()
                    ended.wait(0.1)
                except meteor.ConnectionFailed:
                    pass

        threads = [threading.Thread(target=work, daemon=True) for work in (read, call)]
        with stream.publisher() as pub, stream.subscriber(initial_offset="earliest") as sub:
            pub.publish(b"before").result()
            with down(node):
                for thread in threads:
                    thread.start()
                ack = pub.publish(b"during")
                before = accepted(cluster)
                time.sleep(OUTAGE_S)  # the clients retry in the meantime
                opened = accepted(cluster) - before
                assert not ack.done()
            assert ack.result(20) == 1
            eventually(lambda: got == [b"before", b"during"])
            ended.set()
            for thread in threads:
                thread.join(10)
    print(f"{opened} connections in {OUTAGE_S:g} s")
    assert opened <= CONNECTIONS_MAX


def test_loading_error_counts_as_an_outage_and_not_as_a_redirect(cluster: Cluster) -> None:
    node = cluster.owner(SLOT)
    with node.client() as plain:
        for number in range(300):
            plain.set(f"{{{STREAM}}}{number}", b"x" * 2000)
        plain.config_set("key-load-delay", 20_000)
        plain.config_set("loading-process-events-interval-bytes", 1024)
        reload = threading.Thread(target=lambda: node.ask("DEBUG", "RELOAD", timeout_s=60))
        with meteor.connect(cluster.url) as m:
            connection = m._connector.open_connection(STREAM)
            connection.call("HGET", keys.meta(STREAM), "next")
            reload.start()

            def refused() -> meteor.ConnectionFailed | None:
                try:
                    connection.call("HGET", keys.meta(STREAM), "next")
                except meteor.ConnectionFailed as error:
                    return error
                return None

            error = eventually(refused)
            connection.close()
        plain.config_set("key-load-delay", 0)
        reload.join(60)
    assert error is not None
    assert "loading" in str(error)
    assert error.answered
    assert not error.redirected


def test_pauses_start_small_and_stay_in_proportion_to_the_outage() -> None:
    elapsed_s = 0.0
    for failures in range(1, 40):
        pause_s = max(redirect_pause_s(failures) for _ in range(50))
        assert pause_s <= 0.1 + elapsed_s / 3
        assert pause_s <= 1.0
        elapsed_s += 0.75 * pause_s
    assert min(redirect_pause_s(1000) for _ in range(50)) >= 0.5


def test_refreshes_of_the_topology_become_rarer_until_one_finds_something_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr("meteor_py.redis.topology.time.monotonic", lambda: now[0])

    def interval_s(timer: RefreshTimer) -> float:
        start = now[0]
        while not timer.is_due:
            now[0] += 0.01
        return now[0] - start

    timer = RefreshTimer()
    assert timer.is_due
    waits = []
    for _ in range(30):
        timer.note(found_news=False)
        waits.append(interval_s(timer))
    assert waits == sorted(waits)
    assert waits[0] < 0.15
    assert 0.9 < waits[-1] < 1.1
    timer.note(found_news=True)
    assert interval_s(timer) < 0.15
    timer.note(found_news=False)
    now[0] += 60  # the outage ended long ago
    timer.note(found_news=False)
    assert interval_s(timer) < 0.15
