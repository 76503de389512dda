"""Fixtures for pytest. Name this module in the ``conftest.py`` at the top of the tests:

    pytest_plugins = ["meteor_py.testing.fixtures"]

``meteor_server``           a real server, empty: one process for all tests
``meteor_client``           a client of it
``meteor_private_server``   starts servers that a test may kill, pause and configure
``meteor_fake``             a client without any server
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import meteor_py
from meteor_py.testing.server import Server, ServerFactory

try:
    import pytest
except ImportError as error:
    raise ImportError(
        "meteor_py.testing.fixtures needs pytest; install it with: pip install pytest"
    ) from error


#: Servers for tests keep nothing on disk, on purpose, and in tests warnings may be errors.
IGNORED = r"ignore:The server at \S+ loses its last records:meteor_py.DataSafetyWarning"


def pytest_itemcollected(item: pytest.Item) -> None:
    # A mark, and only where our servers are used: it outranks `-W error`, a setting does not.
    used = set(getattr(item, "fixturenames", ()))
    if used & {"meteor_server", "meteor_private_server"}:
        item.add_marker(pytest.mark.filterwarnings(IGNORED))


@pytest.fixture(scope="session")
def _meteor_session_server() -> Iterator[Server]:
    """The one process; with pytest-xdist, one for each worker."""
    with Server() as server:
        yield server


@pytest.fixture
def meteor_server(_meteor_session_server: Server) -> Server:
    """A real server, emptied before the test; ``meteor_server.url`` is for the program under test.

    All tests share it, because emptying takes 1 ms and starting 40. A test that kills, pauses or
    configures its server should take ``meteor_private_server``.
    """
    server = _meteor_session_server
    # One test that has killed or paused it nevertheless shall not fail all that follow.
    if not server.running:
        server.restart()
    server.resume()
    server.flush()
    return server


@pytest.fixture
def meteor_client(meteor_server: Server) -> Iterator[meteor_py.Client]:
    """A client of ``meteor_server``, closed after the test, and its publishers with it."""
    with meteor_py.connect(meteor_server.url) as client:
        yield client


@pytest.fixture
def meteor_private_server() -> Iterator[ServerFactory]:
    """Starts servers for this test alone: ``meteor_private_server("--appendonly", "yes")``.

    Its arguments are those of ``meteor_py.testing.Server``. All are ended after the test.
    """
    with ExitStack() as servers:

        def start(*args: str, program: str | Path | None = None, port: int | None = None) -> Server:
            return servers.enter_context(Server(*args, program=program, port=port))

        yield start


@pytest.fixture
def meteor_fake() -> Iterator[meteor_py.Client]:
    """A client of ``fake://``: no process, nothing shared, gone after the test.

    Raises:
        ImportError: fakeredis is not installed; the message says how to get it.
    """
    with meteor_py.connect("fake://") as client:
        client._connector.resolve()  # a missing fakeredis is told here, not somewhere in the test
        yield client
