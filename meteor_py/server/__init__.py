"""Embedded servers: found, started, shared and stopped automatically.

    with open_embedded() as server:                 # embedded://      private, deleted at the end
        redis.Redis.from_url(server.url)
    with open_embedded("~/data") as server: ...     # embedded:///dir  data kept, shared by users

A small process, the supervisor, runs the server. A *user* is a process that has opened the server.
Each user holds a shared lock in the server's directory. The supervisor stops the server when the
last user is gone, even if that user crashed or was killed. If the server ends earlier, its users
restart it. ``supervisor.py`` describes the locks, which are the only shared state.
"""

from meteor_py.server.binary import find_server
from meteor_py.server.datadir import default_directory
from meteor_py.server.embedded import EmbeddedServer, open_embedded

__all__ = ["EmbeddedServer", "default_directory", "find_server", "open_embedded"]
