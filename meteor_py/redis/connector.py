"""Access to one server: its address, its connections, and commands on a shared connection."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from redis.connection import AbstractConnection
from redis.exceptions import ResponseError

from meteor_py.errors import ConnectionFailed, MeteorError
from meteor_py.redis.address import Address
from meteor_py.redis.connection import Argument, Connection, connection_options
from meteor_py.redis.embedded_connection import EmbeddedConnection
from meteor_py.redis.scripts import Script
from meteor_py.redis.server_warnings import warn_of_dangers, warn_of_hidden_history
from meteor_py.redis.shared_connection import use_temporary
from meteor_py.redis.wire import READ_SIZE

if TYPE_CHECKING:
    import redis

    from meteor_py.server import EmbeddedServer

_T = TypeVar("_T")


class Connector:
    """A client's access to one server. Thread-safe, and usable after a fork.

    ``call``, ``pipeline``, ``run`` and ``use`` share one connection. They may send commands twice:
    an idle connection may have died unnoticed, so they retry once on a new one. Code that must not
    repeat a command must open its own connection.
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
        """Whether the server and its data disappear with this connector or this process."""
        return self.address.scheme == "fake" or (
            self.address.scheme == "embedded" and not self.address.place
        )

    @property
    def redis(self) -> redis.Redis:
        """A plain redis-py client of the same server. Closing the connector closes it, too."""
        with self._exclusive():
            if self._redis is None:
                from redis import ConnectionPool, Redis

                address = self.resolve()
                options = {**address.options, **connection_options(address, self.timeout_s)}
                options["socket_read_size"] = READ_SIZE
                if address.scheme == "rediss":
                    options["redis_connect_func"] = _take_tickets
                pool = ConnectionPool(connection_class=address.connection_class, **options)
                self._redis = Redis.from_pool(pool)
            self.resolve()  # raises if closed
            return self._redis

    def open_connection(self) -> Connection:
        """Return a new connection. The caller must close it."""
        return Connection(self.resolve(), self.timeout_s)

    def warn_of_hidden_history(self) -> None:
        """Warn the caller if this server could lose records unnoticed."""
        try:
            self.use(warn_of_hidden_history)
        except ConnectionFailed:
            pass  # an application may open a publisher before its server is up

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
        """Call ``work`` with the shared connection, possibly twice."""
        with self._exclusive():
            self._check_open()
            if self._commands is None:
                self._commands = self.open_connection()
            if self._in_use:  # in a signal handler that interrupted another call
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
        """Return the address to connect to. If it is an embedded server, start the server."""
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
            return replace(
                self.address,
                options={"embedded": self._server},
                connection_class=EmbeddedConnection,
            )
        return self.address

    def _check_open(self) -> None:
        if self._closed:
            raise MeteorError(f"The client of {self.address} is closed. Connect again.")

    def _exclusive(self) -> threading.RLock:
        """Return the lock. In a forked child, replace it: its holder may not exist there."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._lock = threading.RLock()
            self._in_use = False  # a thread of the parent may have been in the middle of a call
        return self._lock


def _take_tickets(connection: AbstractConnection) -> None:
    """Prepare a TLS connection of a redis-py pool.

    A TLS 1.3 server first sends session tickets. The pool would mistake these unread bytes for the
    reply to an earlier command, and reject the connection.
    """
    connection.on_connect()
    connection.send_command("PING", check_health=False)
    try:
        connection.read_response()
    except ResponseError:  # this user may not use PING, but the tickets were read
        pass
