"""The start of a new stream epoch after a server's replication id has changed."""

from __future__ import annotations

import secrets

from meteor_py.redis import keys
from meteor_py.redis.connection import Connection
from meteor_py.redis.scripts import NEW_EPOCH


def begin_epoch(connection: Connection, stream: str, incarnation: str, found: str) -> None:
    """Begin a new epoch if the server's replication id differs from ``found``, the id in meta.

    The call may change nothing, for example because another client has begun the epoch, the id has
    changed again, or the stream is gone. The reply to the caller's next command shows which.
    """
    seen = connection.refresh_history()
    if seen != found:
        number = 1 + secrets.randbelow(65_536)
        connection.run(NEW_EPOCH, [keys.meta(stream)], [incarnation, found, seen, number])
