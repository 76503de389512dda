"""A connection's search for its server ends within its timeout, or when it is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_py.redis.connection import Connection
from meteor_py.testing import Cluster, Sentinels, Server
from tests.support.waiting import eventually

#: The client's timeout in seconds: far longer than the tests wait.
LONG_S = 120.0
SHORT_S = 0.3


@pytest.fixture(scope="module", params=["cluster", "sentinels"])
def servers(request: pytest.FixtureRequest, program: Path) -> Iterator[Cluster | Sentinels]:
    kind = Cluster if request.param == "cluster" else Sentinels
    with kind(program=program) as running:
        yield running


@pytest.fixture
def client(servers: Cluster | Sentinels) -> Iterator[meteor.Client]:
    servers.wait_until_stable()
    with meteor.connect(servers.url, timeout=LONG_S) as m:
        yield m


@contextmanager
def frozen(servers: Cluster | Sentinels) -> Iterator[None]:
    """Freeze all servers that know where the keys are."""
    knowing: Sequence[Server] = servers.nodes if isinstance(servers, Cluster) else servers.sentinels
    for server in knowing:
        server.pause()
    try:
        yield
    finally:
        for server in knowing:
            server.resume()


class Call(threading.Thread):
    """A call that runs in its own thread, and the error that ended it."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(daemon=True)
        self.connection = connection
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.connection.call("HGET", "meteor:{orders}:meta", "next")
        except Exception as error:
            self.error = error

    def has_failed(self) -> bool:
        self.join(10)
        return isinstance(self.error, meteor.ConnectionFailed)


def test_search_lasts_no_longer_than_its_connections_timeout(
    servers: Cluster | Sentinels, client: meteor.Client
) -> None:
    with frozen(servers):
        slow = Call(client._connector.open_connection("orders"))
        eventually(lambda: slow.connection._search is not None)
        quick = client._connector.open_connection("orders")
        quick.timeout_s = SHORT_S
        assert Call(quick).has_failed(), "the call waited for another thread's search"
        slow.connection.interrupt()
        assert slow.has_failed()
        assert Call(quick).has_failed(), "the call waited for a server that does not reply"


def test_interrupt_ends_a_search_and_a_wait_for_another_threads_search(
    servers: Cluster | Sentinels, client: meteor.Client
) -> None:
    with frozen(servers):
        calls = [Call(client._connector.open_connection("orders")) for _ in range(3)]
        eventually(lambda: all(call.connection._search is not None for call in calls))
        for call in reversed(calls):
            call.connection.interrupt()
        assert all(call.has_failed() for call in calls)


def test_connection_can_search_again_after_an_interrupt(
    servers: Cluster | Sentinels, client: meteor.Client
) -> None:
    connection = client._connector.open_connection("orders")
    with frozen(servers):
        call = Call(connection)
        eventually(lambda: connection._search is not None)
        connection.interrupt()
        assert call.has_failed()
    servers.wait_until_stable()
    assert connection.call("HGET", "meteor:{orders}:meta", "next") is None
    connection.close()
