"""A client's watcher thread learns of every new primary, even if sentinels fail or restart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis import sentinels as module
from meteor_py.testing import Sentinels, Server
from meteor_py.testing.server import HOST
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

#: Seconds within which the client must find the new primary, even on a busy machine.
FOUND_S = 30.0


@pytest.fixture
def sentinels(program: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sentinels]:
    monkeypatch.setattr(module, "_RECONNECT_MAX_S", 1.0)
    with Sentinels(program=program) as running:
        yield running


@contextmanager
def proxied(sentinels: Sentinels) -> Iterator[tuple[meteor.Client, list[Proxy]]]:
    """Yield a client that reaches the sentinels only through proxies, and the proxies."""
    with ExitStack() as stack:
        ports = [sentinel.port for sentinel in sentinels.sentinels]
        proxies = [stack.enter_context(Proxy(HOST, port)) for port in ports]
        remap = {
            (HOST, port): (HOST, proxy.port) for port, proxy in zip(ports, proxies, strict=True)
        }
        yield stack.enter_context(meteor.connect(sentinels.url, remap=remap)), proxies


def listened_to(client: meteor.Client) -> set[int]:
    """Return the ports of the sentinels that the watcher listens to."""
    watcher: Any = client._connector._topology
    return {port for _, port in watcher._watcher._connections}


def known_primary(client: meteor.Client) -> int:
    """Return the port of the primary that the watcher has found. Does not ask the sentinels."""
    topology: Any = client._connector._topology
    return int(topology._node[1])


def found(client: meteor.Client, primary: Server) -> bool:
    eventually(lambda: known_primary(client) == primary.port, FOUND_S)
    return bool(client.redis.info("server")["tcp_port"] == primary.port)


@pytest.fixture
def alone(program: Path) -> Iterator[Sentinels]:
    """A single sentinel, so that each failover is announced only once."""
    with Sentinels(sentinels=1, program=program) as running:
        yield running


def has_settled(proxy: Proxy) -> bool:
    """Return whether the proxy has accepted three connections.

    The client asks for the primary, and its watcher subscribes and then asks again.
    """
    return proxy.counters.connections >= 3


def test_announcement_is_not_dropped_if_no_sentinel_can_be_asked_meanwhile(
    alone: Sentinels,
) -> None:
    with proxied(alone) as (m, (proxy,)):
        assert m.streams() == []
        eventually(lambda: has_settled(proxy))
        before = known_primary(m)
        proxy.refuse()  # new connections only: the watcher still hears the announcement
        new = alone.failover()
        eventually(lambda: proxy.counters.refused > 0, FOUND_S)
        assert known_primary(m) == before
        proxy.accept()
        assert found(m, new)


def test_announcement_is_not_dropped_if_a_check_fails_unexpectedly(
    alone: Sentinels, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxied(alone) as (m, (proxy,)):
        assert m.streams() == []
        eventually(lambda: has_settled(proxy))
        failed: list[object] = []
        check = module.Sentinels.check

        def fail_once(*args: Any) -> None:
            if not failed:
                failed.append(args)
                raise RuntimeError("planted")
            check(*args)

        monkeypatch.setattr(module.Sentinels, "check", fail_once)
        assert found(m, alone.failover())
        assert failed


def test_watcher_listens_again_to_a_sentinel_that_comes_back(sentinels: Sentinels) -> None:
    with meteor.connect(sentinels.url) as m:
        assert m.streams() == []
        everyone = {sentinel.port for sentinel in sentinels.sentinels}
        eventually(lambda: listened_to(m) == everyone)
        gone = sentinels.sentinels[0]
        for _ in range(2):
            gone.kill()
            eventually(lambda: listened_to(m) == everyone - {gone.port}, FOUND_S)
            gone.start()
            eventually(lambda: listened_to(m) == everyone, FOUND_S)
        sentinels.wait_until_stable()
        assert found(m, sentinels.failover())


def test_client_works_without_sentinels_and_follows_them_when_they_are_back(
    sentinels: Sentinels,
) -> None:
    with meteor.connect(sentinels.url) as m, m.stream("orders", create=True).publisher() as pub:
        assert pub.publish(b"before").result(10) == 0
        for sentinel in sentinels.sentinels:
            sentinel.kill()
        eventually(lambda: not listened_to(m), FOUND_S)
        assert pub.publish(b"meanwhile").result(10) == 1
        with m.stream("orders").publisher() as another:  # on a new connection
            assert another.publish(b"another").result(10) == 2
        for sentinel in sentinels.sentinels:
            sentinel.start()
        eventually(lambda: len(listened_to(m)) == 3, FOUND_S)
        sentinels.wait_until_stable()
        assert found(m, sentinels.failover())
