"""A real server inside the program: found, started, shared and ended without anybody's care.

    with open_embedded() as server:                 # embedded://      private, gone at the end
        redis.Redis.from_url(server.url)
    with open_embedded("~/data") as server: ...     # embedded:///dir  kept, shared by who opens it

A small process, the watcher, runs the server; each user holds a shared lock in its directory, and
the watcher ends the server when the last one is gone, crashed or killed ones included. The locks
and what each of them means are described in ``watcher.py``; they are the only state.
"""

from meteor_py.server.binary import find_server
from meteor_py.server.datadir import default_directory
from meteor_py.server.embedded import EmbeddedServer, open_embedded

__all__ = ["EmbeddedServer", "default_directory", "find_server", "open_embedded"]
