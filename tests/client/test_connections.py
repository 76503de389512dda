"""Closing an object closes its connections at once, even if it is still referenced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis.address import show_node
from tests.support.servers import each_primary, plain_client
from tests.support.waiting import eventually


@pytest.fixture
def client(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as client:
        yield client


@pytest.fixture
def connections(client: meteor.Client, url: str) -> Iterator[Callable[[], set[Any]]]:
    """Return a function that finds the connections opened by the test, except idle ones."""
    with plain_client(url) as plain:
        client.describe()  # opens the client's own connection to each primary
        servers = each_primary(plain)

        def ids() -> set[Any]:
            return {
                (number, each["id"])
                for number, server in enumerate(servers)
                for each in server.client_list()
                if each["addr"] not in idle_connections(client)
            }

        own = ids()
        yield lambda: ids() - own


def idle_connections(client: meteor.Client) -> set[str]:
    """Return the local addresses of the connections that the client keeps for its next calls."""
    pools = list(client._connector._nodes._idle.values())  # empty for a single server
    sockets = [connection._socket() for pool in pools for connection in list(pool)]
    return {show_node(sock.getsockname()) for sock in sockets if sock is not None}


def test_closing_a_shared_subscriber_closes_its_connections(
    client: meteor.Client, connections: Callable[[], set[Any]]
) -> None:
    stream = client.stream("s", ordering_key="key")
    with stream.publisher() as pub:
        pub.publish(b"x", key=b"k").result()
    sub = stream.shared_subscriber("g")
    for record in eventually(lambda: sub.poll(1)):
        record.ack()
    assert connections()
    sub.close()
    eventually(lambda: not connections(), 3, f"{sub!r} keeps a connection")


def test_closing_an_archiver_closes_its_terms_connections(
    client: meteor.Client, connections: Callable[[], set[Any]], tmp_path: Path
) -> None:
    stream = client.stream("s", store=tmp_path, archive=False)
    with stream.publisher() as pub:
        pub.publish(b"x").result()
    with stream.archiver().start() as archiver:
        stream.store.flush(20)
        term = eventually(lambda: archiver._archive_term)
        assert connections()
    eventually(lambda: not connections(), 3, f"{term!r} keeps a connection")
