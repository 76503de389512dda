"""The way to one server: resolves its address, opens connections, runs commands on a shared one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from redis.connection import UnixDomainSocketConnection

from meteor_py.errors import ConnectionFailed, MeteorError
from meteor_py.redis.address import Address
from meteor_py.redis.connection import Argument, Connection, connection_options
from meteor_py.redis.scripts import Script
from meteor_py.redis.server_warnings import warn_of_dangers, warn_of_hidden_history
from meteor_py.redis.shared_connection import use_temporary

if TYPE_CHECKING:
    import redis

    from meteor_py.server import EmbeddedServer

_T = TypeVar("_T")


class Connector:
    """Connects to one server. Safe for several threads, and usable after a fork.

    Commands given to ``call``, ``pipeline``, ``run`` and ``use`` share one connection and may be
    sent twice: an idle connection may have died unnoticed, so a failure on it is retried once on a
    new one. Code that must not repeat a command opens a connection of its own.
    """

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._server: EmbeddedServer | None = None
        self._resolved: Address | None = None
        self._commands: Connection | None = None
        self._redis: redis.Redis | None = None
        self._checked = False
        self._in_use = False
        self._closed = False
        self._lock = threading.RLock()
        self._pid = os.getpid()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def is_private(self) -> bool:
        """Whether the server and its memory end with this connector, or with this process."""
        return self.address.scheme == "fake" or (
            self.address.scheme == "embedded" and not self.address.place
        )

    @property
    def redis(self) -> redis.Redis:
        """A plain redis-py client of the same server, closed with this connector."""
        with self._exclusive():
            if self._redis is None:
                from redis import ConnectionPool, Redis

                address = self.resolve()
                pool = ConnectionPool(
                    connection_class=address.connection_class,
                    **address.options,
                    **connection_options(address, self.timeout_s),
                )
                self._redis = Redis.from_pool(pool)
            self.resolve()  # refuses if closed
            return self._redis

    def open_connection(self) -> Connection:
        """Return a new connection, which the caller owns and closes."""
        return Connection(self.resolve(), self.timeout_s)

    def warn_of_hidden_history(self) -> None:
        """Warn, in the calling thread, if the server hides what reveals lost records."""
        try:
            self.use(warn_of_hidden_history)
        except ConnectionFailed:
            pass  # a publisher may be opened before its server is up

    def call(self, *command: Argument) -> Any:
        """Send one command and return its reply."""
        return self.use(lambda connection: connection.call(*command))

    def pipeline(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Send commands in one round trip and return their replies."""
        return self.use(lambda connection: connection.pipeline(commands, self.timeout_s))

    def run(self, script: Script, script_keys: Sequence[str], args: Sequence[Argument] = ()) -> Any:
        """Run a script and return its reply."""
        return self.use(lambda connection: connection.run(script, script_keys, args))

    def use(self, work: Callable[[Connection], _T]) -> _T:
        """Call ``work`` with the shared connection; it may be called twice."""
        with self._exclusive():
            self._check_open()
            if self._commands is None:
                self._commands = self.open_connection()
            if self._in_use:  # a signal handler, in the middle of another call
                return use_temporary(self.open_connection, work)
            connection = self._commands
            self._in_use = True
            try:
                return connection.retry_idle(self._checked_use, connection, work)
            finally:
                self._in_use = False

    def _checked_use(self, connection: Connection, work: Callable[[Connection], _T]) -> _T:
        if not self._checked:
            warn_of_dangers(connection)
            self._checked = True
        return work(connection)

    def resolve(self) -> Address:
        """Return the address to connect to. Starts the embedded server if the address means one."""
        with self._exclusive():
            self._check_open()
            if self._resolved is None:
                self._resolved = self._resolve()
            return self._resolved

    def close(self) -> None:
        """Close the shared connections. An embedded server stops with its last user."""
        with self._exclusive():
            self._closed = True
            for resource in (self._commands, self._redis, self._server):
                if resource is not None:
                    resource.close()

    def _resolve(self) -> Address:
        if self.address.scheme == "fake":
            from meteor_py.redis.fake import fake_address

            return fake_address(self.address)
        if self.address.scheme == "embedded":
            from meteor_py.server import open_embedded

            self._server = open_embedded(self.address.place)
            options = {"path": self._server.socket_path, "password": self._server.password}
            return replace(
                self.address, options=options, connection_class=UnixDomainSocketConnection
            )
        return self.address

    def _check_open(self) -> None:
        if self._closed:
            raise MeteorError(f"The client of {self.address} is closed; connect again.")

    def _exclusive(self) -> threading.RLock:
        """Return the lock; a new one in a forked child, where its holder may not exist."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._lock = threading.RLock()
        return self._lock
