"""Starting a new epoch of a stream on a server whose replication history has changed."""

from __future__ import annotations

from meteor_py.redis import keys
from meteor_py.redis.connection import Connection
from meteor_py.redis.scripts import NEW_EPOCH


def begin_epoch(connection: Connection, stream: str, incarnation: str, found: str) -> None:
    """Begin a new epoch, if the server's history is not ``found``, the one recorded in meta.

    If this changes nothing, the history has changed again or the stream is gone; the reply to the
    caller's next command shows which.
    """
    seen = connection.refresh_history()
    if seen != found:
        connection.run(NEW_EPOCH, [keys.meta(stream)], [incarnation, found, seen])
