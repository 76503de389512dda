"""The testing kit: for programs that use streams, and want to be tested against a real server.

    from meteor_py.testing import Server, eventually

    with Server("--appendonly", "yes") as server:
        with meteor_py.connect(server.url) as m: ...
        server.kill()
        server.restart()        # the same address, and the data that was on disk

The fixtures for pytest are in ``meteor_py.testing.fixtures``; all else here does without pytest.
Nothing here talks to the server by way of the library itself, so the library's own tests use the
kit too. ``docs/testing.md`` shows it at work.
"""

from meteor_py.testing.server import Server, ServerFactory
from meteor_py.testing.waiting import eventually

__all__ = ["Server", "ServerFactory", "eventually"]
