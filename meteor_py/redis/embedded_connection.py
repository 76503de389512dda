"""A redis-py connection to an embedded server. Connecting restarts a stopped server."""

from __future__ import annotations

from socket import socket
from typing import TYPE_CHECKING, Any

import redis
from redis.connection import UnixDomainSocketConnection

from meteor_py.errors import ServerNotFound, ServerStartFailed

if TYPE_CHECKING:
    from meteor_py.server import EmbeddedServer


class NotRestarted(redis.ConnectionError):
    """The embedded server has stopped, and could not be restarted in time."""


class EmbeddedConnection(UnixDomainSocketConnection):
    """A connection to an embedded server. Connecting waits until the server has loaded its data."""

    def __init__(self, embedded: EmbeddedServer, **options: Any) -> None:
        options.update(path=embedded.socket_path, password=embedded.password)
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._server = embedded
        self._cancelled = False

    def cancel(self) -> None:
        """Make a ``connect()`` call in another thread fail."""
        self._cancelled = True

    def _connect(self) -> socket:
        try:
            self._server.reach(self.socket_connect_timeout or 0.0, lambda: self._cancelled)
        except (ServerNotFound, ServerStartFailed) as error:
            raise NotRestarted(str(error)) from error.with_traceback(None)
        # A restart may have changed the path and the password.
        self.path, self.password = self._server.socket_path, self._server.password
        connected: socket = super()._connect()  # type: ignore[no-untyped-call]
        return connected
