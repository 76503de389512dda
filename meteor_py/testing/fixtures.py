"""Pytest fixtures. List this module in the ``conftest.py`` at the root of your tests:

    pytest_plugins = ["meteor_py.testing.fixtures"]

``meteor_server``           a real, empty server that all tests share
``meteor_client``           a client for ``meteor_server``
``meteor_private_server``   starts servers that a test may kill, pause and configure
``meteor_cluster``          a real, empty cluster of three primaries that all tests share
``meteor_private_cluster``  starts clusters whose nodes a test may kill, and whose slots it may move
``meteor_private_sentinels``  starts a primary with replicas and sentinels that a test may kill
``meteor_fake``             a client that needs no server process (``fake://``)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import meteor_py
from meteor_py.testing.cluster import Cluster, ClusterFactory
from meteor_py.testing.sentinels import Sentinels, SentinelsFactory
from meteor_py.testing.server import Server, ServerFactory

try:
    import pytest
except ImportError as error:
    raise ImportError(
        "meteor_py.testing.fixtures needs pytest. Install it with: pip install pytest"
    ) from error


#: Test servers deliberately keep nothing on disk. Ignore the warning about this, because users may
#: turn warnings into errors.
IGNORED = r"ignore:The server at \S+ loses its last records:meteor_py.DataSafetyWarning"

#: Fixtures that start test servers.
USE_SERVERS = {
    "meteor_server",
    "meteor_private_server",
    "meteor_cluster",
    "meteor_private_cluster",
    "meteor_private_sentinels",
}


def pytest_itemcollected(item: pytest.Item) -> None:
    # A filterwarnings mark overrides `-W error`; the filterwarnings setting does not. Mark only
    # tests that use our servers.
    used = set(getattr(item, "fixturenames", ()))
    if used & USE_SERVERS:
        item.add_marker(pytest.mark.filterwarnings(IGNORED))


@pytest.fixture(scope="session")
def _meteor_session_server() -> Iterator[Server]:
    """The shared server process. With pytest-xdist, each worker has its own."""
    with Server() as server:
        yield server


@pytest.fixture
def meteor_server(_meteor_session_server: Server) -> Server:
    """A real server, emptied before the test. Pass its ``url`` to the program under test.

    All tests share one server, because emptying it takes 1 ms and starting another takes 40 ms. A
    test that kills, pauses or configures its server should use ``meteor_private_server``.
    """
    server = _meteor_session_server
    # If a test has killed or paused the server anyway, later tests must not fail because of it.
    if not server.running:
        server.restart()
    server.resume()
    server.flush()
    return server


@pytest.fixture
def meteor_client(meteor_server: Server) -> Iterator[meteor_py.Client]:
    """A client for ``meteor_server``. It is closed after the test, with all its publishers."""
    with meteor_py.connect(meteor_server.url) as client:
        yield client


@pytest.fixture
def meteor_private_server() -> Iterator[ServerFactory]:
    """Start servers for this test only: ``meteor_private_server("--appendonly", "yes")``.

    Takes the same arguments as ``meteor_py.testing.Server``. The servers are closed after the test.
    """
    with ExitStack() as servers:

        def start(*args: str, **options: Any) -> Server:
            return servers.enter_context(Server(*args, **options))

        yield start


@pytest.fixture(scope="session")
def _meteor_session_cluster() -> Iterator[Cluster]:
    """The shared cluster. With pytest-xdist, each worker has its own."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def meteor_cluster(_meteor_session_cluster: Cluster) -> Cluster:
    """A real cluster of three primaries, emptied before the test.

    All tests share one cluster, because starting another takes 2.1 s. A test may move slots. A test
    that kills, pauses or configures nodes should use ``meteor_private_cluster``.
    """
    cluster = _meteor_session_cluster
    cluster.repair()  # an earlier test may have stopped a node or abandoned a slot move
    cluster.flush()
    return cluster


@pytest.fixture
def meteor_private_cluster() -> Iterator[ClusterFactory]:
    """Start clusters for this test only: ``meteor_private_cluster(replicas=1)``.

    Takes the arguments of ``meteor_py.testing.Cluster``. The clusters are closed after the test.
    """
    with ExitStack() as clusters:

        def start(primaries: int = 3, replicas: int = 0, **options: Any) -> Cluster:
            return clusters.enter_context(Cluster(primaries, replicas, **options))

        yield start


@pytest.fixture
def meteor_private_sentinels() -> Iterator[SentinelsFactory]:
    """Start a primary with replicas and sentinels for this test only.

    Takes the arguments of ``meteor_py.testing.Sentinels``. All servers are closed after the test.
    """
    with ExitStack() as services:

        def start(replicas: int = 2, sentinels: int = 3, **options: Any) -> Sentinels:
            return services.enter_context(Sentinels(replicas, sentinels, **options))

        yield start


@pytest.fixture
def meteor_fake() -> Iterator[meteor_py.Client]:
    """A client for a ``fake://`` server, which exists in memory for one test.

    Raises:
        ImportError: fakeredis is not installed. The message says how to install it.
    """
    with meteor_py.connect("fake://") as client:
        client._connector.resolve()  # if fakeredis is missing, raise here and not in the test
        yield client
