"""An embedded server: found, started, shared and stopped automatically.

    with open_embedded() as server:                 # embedded://      private, gone at the end
        redis.Redis.from_url(server.url)
    with open_embedded("~/data") as server: ...     # embedded:///dir  kept, shared by all users

A small process, the supervisor, runs the server. Each user holds a shared lock in its directory,
and the supervisor stops the server when the last user is gone, even if it crashed or was killed.
``supervisor.py`` describes the locks; they are the only state.
"""

from meteor_py.server.binary import find_server
from meteor_py.server.datadir import default_directory
from meteor_py.server.embedded import EmbeddedServer, open_embedded

__all__ = ["EmbeddedServer", "default_directory", "find_server", "open_embedded"]
