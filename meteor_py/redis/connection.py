"""One connection to a server: sends commands, reads replies, translates errors.

redis-py opens the connection: addresses, TLS, authentication. This module sets every option itself:
the defaults of redis-py (a 5 s socket timeout, ten retries) would publish records twice and break
blocking reads. Commands and replies then bypass redis-py (wire.py), except on a fake server, which
has no socket. This module retries a command only if the caller uses ``retry_idle``.

A connection belongs to one thread at a time. It connects when first used, and again after an error
or in a forked child.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, ParamSpec, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from meteor_py.errors import AccessDenied, ConnectionFailed, MeteorError, OutOfMemory, ServerRefused
from meteor_py.redis.address import LOGIN_OPTIONS, Address, mask
from meteor_py.redis.embedded_connection import EmbeddedConnection, NotRestarted
from meteor_py.redis.scripts import Script
from meteor_py.redis.wire import Wire

#: An argument of a command: str, int, bytes or a buffer. Arrow buffers are sent without a copy.
Argument = Any

_T = TypeVar("_T")
_P = ParamSpec("_P")

#: Keepalive options that detect a dead peer within 45 s, even on an idle connection.
_KEEPALIVE = {
    getattr(socket, name): seconds
    for name, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
}

#: Send buffer of a unix socket in bytes, if the kernel allows it. With the default of 208 KiB, the
#: publisher and the server wait for each other: 2.0 million records/s instead of 2.7.
_UNIX_BUFFER = 4 * 1024 * 1024

#: Bytes that redis-py receives at a time; only for the replies while it connects.
_HANDSHAKE_SIZE = 4096

#: Arguments with more bytes than this are sent separately, without a copy.
_JOIN_MAX = 16_384

#: Error replies that mean "not now" or "not here". The server did not run the command.
_NOT_NOW = (
    redis.exceptions.AskError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.MovedError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.TryAgainError,
)
#: Such error replies for which redis-py has no class, by their codes.
_NOT_NOW_CODES = ("BUSY", "MISCONF", "NOREPLICAS", "UNKILLABLE")
#: Text of XADD's error reply if the ID is too low. Its code is the generic ERR.
_ID_TAKEN = "equal or smaller than the target stream top item"


class DataSafetyWarning(UserWarning):
    """The server's settings can lose data. The message says how to change them."""


class ScriptMissing(MeteorError):
    """The server does not know the script and did not run it."""

    retriable = True


class EntryIdTaken(ServerRefused):
    """The stream already has an entry with this ID or a higher one. Nothing was added."""


class Connection:
    """One connection. ``timeout_s`` bounds connecting, sending and each reply, in seconds."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._connection: AbstractConnection | None = None
        #: The connection's bytes; None if there is no connection, or the server is a fake.
        self.wire: Wire | None = None
        self._opening: AbstractConnection | None = None
        self._server_pid = self._private_server_pid()
        self._history: str | None = None
        #: Whether the TLS handshake has succeeded but the server has not replied to a command yet.
        self._handshake_only = False
        self._pid = os.getpid()

    # -- commands and replies ----------------------------------------------------------------

    def send(self, commands: Iterable[Sequence[Argument]]) -> None:
        """Send commands. Call ``read`` once per command; replies arrive in the same order."""
        self.send_encoded(encode(commands))

    def send_encoded(
        self, chunks: Sequence[bytes | memoryview], timeout_s: float | None = None
    ) -> None:
        """Like ``send``, for commands that ``encode`` has encoded."""
        connection = self.connect()
        wire = self.wire
        try:
            if wire is not None:
                wire.send(chunks, self.timeout_s if timeout_s is None else timeout_s)
            else:
                connection.send_packed_command(chunks, check_health=False)
        except (redis.RedisError, OSError) as error:
            self._fail(error)

    def read(self, timeout_s: float | None = None) -> Any:
        """Return the next reply; raise if it is an error."""
        wire, connection = self.wire, self._connection
        if connection is None:
            raise ConnectionFailed(f"The connection to {self.address} was closed.")
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            if wire is None:
                reply = connection.read_response(disable_decoding=True, timeout=timeout_s)
            else:
                reply = wire.read(timeout_s)
                self._handshake_only = False
                if isinstance(reply, Exception):
                    raise reply
        except (redis.RedisError, OSError) as error:
            self._fail(error)
        return reply

    def call(self, *command: Argument, timeout_s: float | None = None) -> Any:
        """Send one command and return its reply."""
        try:
            self.send_encoded(encode([command]), timeout_s)
            return self.read(timeout_s)
        except MeteorError:
            raise
        except BaseException:  # such as Ctrl-C: the next caller must not read this reply
            self.close()
            raise

    def pipeline(self, commands: Sequence[Sequence[Argument]], timeout_s: float) -> list[Any]:
        """Send commands together and return their replies; raise the first error."""
        return self.pipeline_encoded(encode(commands), len(commands), timeout_s)

    def pipeline_encoded(
        self, chunks: Sequence[bytes | memoryview], count: int, timeout_s: float
    ) -> list[Any]:
        """Like ``pipeline``, for ``count`` commands that ``encode`` has encoded."""
        try:
            self.send_encoded(chunks, timeout_s)
            return self.read_all(count, timeout_s)
        except MeteorError:
            raise
        except BaseException:  # as in call()
            self.close()
            raise

    def read_all(self, count: int, timeout_s: float) -> list[Any]:
        """Return the next ``count`` replies; raise the first error among them."""
        replies: list[Any] = []
        failure: MeteorError | None = None
        try:
            for _ in range(count):
                try:
                    replies.append(self.read(timeout_s))
                except ConnectionFailed:
                    raise
                except MeteorError as error:
                    failure = failure or error
        except BaseException:  # as in call()
            self.close()
            raise
        if failure is not None:
            raise failure
        return replies

    def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument] = ()) -> Any:
        """Run a script. Send its text if the server does not have it yet."""
        try:
            return self.call(*self.script_call(script, keys, args))
        except ScriptMissing:
            return self.call(*self.script_call(script, keys, args, whole=True))

    def script_call(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        *,
        whole: bool = False,
    ) -> tuple[Argument, ...]:
        """Return the command that runs ``script`` by its hash or, if ``whole``, by its text."""
        fake = self.address.scheme == "fake"
        read_only = script.read_only and not fake
        verb = ("EVAL" if whole or fake else "EVALSHA") + ("_RO" if read_only else "")
        body = (script.plain_source if fake else script.source) if whole or fake else script.sha
        return (verb, body, len(keys), *keys, *args)

    def retry_idle(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call ``work``. If the idle connection turns out to be dead, reconnect and call it again.

        Use this only for commands that may run twice.

        Raises:
            ConnectionFailed: The server cannot be reached.
        """
        was_connected = self.connected
        try:
            return work(*args, **kwargs)
        except ConnectionFailed:
            if not was_connected:
                raise
            return work(*args, **kwargs)

    # -- the server's history ------------------------------------------------------------------

    @property
    def history(self) -> str:
        """The server's ``master_replid`` when this connection was made; '' if the server hides it.

        Raises:
            ConnectionFailed: The server is a replica, which accepts no writes and has its primary's
                history.
        """
        self.connect()
        if self._history is None:
            self.refresh_history()
        return self._history or ""

    @property
    def known_history(self) -> str | None:
        """The same without asking the server; None if the server was not asked yet."""
        return self._history if self.connected else None

    def refresh_history(self) -> str:
        """Read the history again, because a server can be promoted while a connection is open."""
        self._history = ""
        if self.address.scheme == "fake":
            return ""
        try:
            facts = parse_info(self.call("INFO", "replication"))
        except ServerRefused:
            facts = {}
        if facts.get("role") == "slave":
            self.close()
            raise ConnectionFailed(
                f"The server at {self.address} is a replica and accepts no writes. "
                "Connect to its primary."
            )
        self._history = facts.get("master_replid", "")
        return self._history

    @property
    def data_lost(self) -> bool:
        """Whether a private server has restarted empty since this object was created."""
        return self._server_pid != self._private_server_pid()

    def _private_server_pid(self) -> int | None:
        server = self.address.options.get("embedded")  # see EmbeddedConnection
        return None if server is None or server.keep else server.pid

    # -- the connection ------------------------------------------------------------------------

    @property
    def block_max_s(self) -> float:
        """Maximum seconds of a blocking read, so that a dead connection is noticed soon."""
        return 0.05 if self.address.scheme == "fake" else 2.0  # a fake server cannot be interrupted

    @property
    def connected(self) -> bool:
        return self._connection is not None and self._pid == os.getpid()

    @property
    def readable(self) -> bool:
        """Whether the socket has something to read. Does not block; any thread may ask.

        A server sends nothing on an idle connection, so then it means that the connection has
        ended. With TLS it may also be a message of the protocol itself.
        """
        sock = self._socket()
        if sock is None:
            return False
        poll = select.poll()
        try:
            poll.register(sock, select.POLLIN)
            found = poll.poll(0)
        except (OSError, ValueError):  # another thread has closed it
            return True
        return bool(found) or self._socket() is not sock

    def connect(self) -> AbstractConnection:
        """Return the connection. Open one if there is none, or after a fork."""
        if self._pid != os.getpid():
            self._connection = self.wire = None  # not closed: the parent still uses the socket
            self._pid = os.getpid()
        if self._connection is None:
            options = connection_options(self.address, self.timeout_s)
            self._handshake_only = False
            if self.address.scheme == "rediss":
                options["redis_connect_func"] = self._log_in
            connection = self.address.connection_class(
                **self.address.options, **options, socket_read_size=_HANDSHAKE_SIZE
            )
            self._opening = connection  # for interrupt()
            try:
                connection.connect()
            except (redis.RedisError, OSError) as error:
                self._fail(error)
            finally:
                self._opening = None
            self._connection = connection
            self._history = None
            sock = self._socket()
            if sock is not None:
                if sock.family == socket.AF_UNIX:  # the kernel tunes TCP buffers
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
                self.wire = Wire(sock)
        return self._connection

    def _log_in(self, connection: AbstractConnection) -> None:
        """Set up a connection whose TLS handshake has succeeded."""
        self._handshake_only = True
        connection.on_connect()
        if any(self.address.options.get(name) for name in LOGIN_OPTIONS):
            self._handshake_only = False  # the server has replied to AUTH, CLIENT or SELECT

    def close(self) -> None:
        """Close the connection. The next use opens another. Idempotent."""
        connection = self._connection
        self._connection = self.wire = None
        if connection is not None:
            connection.disconnect()

    def interrupt(self) -> None:
        """Make a ``send`` or ``read`` in another thread raise ``ConnectionFailed``."""
        opening = self._opening
        if isinstance(opening, EmbeddedConnection):
            opening.cancel()
        # Do not use disconnect(): redis-py would silently reconnect, and replies would be mixed up.
        sock = self._socket()
        if sock is not None:
            with suppress(OSError):  # already closed
                sock.shutdown(socket.SHUT_RDWR)

    def _socket(self) -> socket.socket | None:
        sock = getattr(self._connection, "_sock", None)
        return sock if isinstance(sock, socket.socket) else None  # a fake server has none

    def _fail(self, error: Exception) -> NoReturn:
        translated = translate(error, self.address)
        # The subclasses of redis.ConnectionError have other causes, such as a wrong password.
        is_closed = type(error) is redis.ConnectionError or isinstance(error, OSError)
        if self._handshake_only and is_closed:
            translated = self._rejected(error)
        if isinstance(translated, ConnectionFailed):
            self.close()
        error.__context__ = None  # the new message already includes its text
        try:
            raise translated from error.with_traceback(None)
        finally:
            del translated, error  # a reference cycle would keep all callers' frames alive

    def _rejected(self, error: Exception) -> ConnectionFailed:
        """Return the error for a server that closed the connection right after the handshake.

        In TLS 1.3 the handshake of the client ends before the server has checked the client's
        certificate. The server's alert, "certificate required", may arrive after the client has
        found the connection closed, so an EOF or a broken pipe can mean the same.
        """
        words = mask(str(error)).strip().rstrip(".")
        message = (
            f"The server at {self.address} closed the connection after the TLS handshake, before "
            f"its first reply: {words}."
        )
        if "ssl_certfile" in self.address.options:
            return ConnectionFailed(f"{message} It may not accept this client certificate.")
        return ConnectionFailed(
            f"{message} If it requires a client certificate, set ssl_certfile and ssl_keyfile "
            "(docs/production/tls.md)."
        )


def connection_options(address: Address, timeout_s: float) -> dict[str, Any]:
    """Return all relevant options of a redis-py connection, so that no default applies."""
    keepalive = {"socket_keepalive": True, "socket_keepalive_options": _KEEPALIVE}
    return {
        **(keepalive if address.scheme in ("redis", "rediss") else {}),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "retry_on_error": [],
        "health_check_interval": 0,
        "protocol": 2,
        "decode_responses": False,
        "driver_info": None,
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }


def encode(commands: Iterable[Sequence[Argument]]) -> list[bytes | memoryview]:
    """Encode commands for the wire, without copying large arguments."""
    chunks: list[bytes | memoryview] = []
    small: list[bytes] = []
    for command in commands:
        small.append(b"*%d\r\n" % len(command))
        for argument in command:
            if isinstance(argument, str):
                data: bytes | memoryview = argument.encode()
            elif isinstance(argument, int):
                data = b"%d" % argument
            elif isinstance(argument, bytes):
                data = argument
            else:
                data = memoryview(argument)
            small.append(b"$%d\r\n" % len(data))
            if len(data) > _JOIN_MAX:
                chunks.append(b"".join(small))
                chunks.append(data)
                small = [b"\r\n"]
            else:
                small.append(bytes(data))
                small.append(b"\r\n")
    chunks.append(b"".join(small))
    return chunks


def parse_info(reply: bytes) -> dict[str, str]:
    """Parse the reply to INFO."""
    lines = (line.partition(":") for line in reply.decode().splitlines() if ":" in line)
    return {name: value for name, _, value in lines}


def translate(error: Exception, address: Address) -> MeteorError:
    """Translate an error from redis-py into a ``MeteorError``.

    No other function parses the text of an error. The first word of an error reply is its code.
    """
    words = mask(str(error)).strip()
    # redis-py removes the codes that it knows.
    code = getattr(error, "status_code", None) or words.partition(" ")[0]
    if isinstance(error, redis.exceptions.NoScriptError):
        return ScriptMissing(words)
    if isinstance(error, redis.exceptions.OutOfMemoryError) or code == "OOM":
        return OutOfMemory(
            f"The server at {address} has reached its maxmemory and accepts no new records. Raise "
            "maxmemory, or lower the capacity of its streams.",
            code=code,
        )
    if isinstance(error, (redis.AuthenticationError, redis.exceptions.NoPermissionError)):
        return AccessDenied(
            f"The server at {address} denied access: {words.rstrip('.')}. "
            "Check user, password and ACL (docs/acl.md).",
            code=code,
        )
    if isinstance(error, NotRestarted):
        return ConnectionFailed(words)
    if isinstance(error, redis.BusyLoadingError):
        return _not_now(f"The server at {address} is still loading its data.")
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError, OSError)):
        return ConnectionFailed(
            f"The server at {address} cannot be reached: {words.rstrip('.')}. "
            "Is it running, and is the address correct?"
        )
    if code == "UNBLOCKED":  # the server was demoted during a blocking read
        return ConnectionFailed(f"The server at {address} is no longer the primary: {words}")
    if isinstance(error, _NOT_NOW) or code in _NOT_NOW_CODES:
        return _not_now(f"The server at {address} cannot do this now: {words}")
    refused = EntryIdTaken if _ID_TAKEN in words else ServerRefused
    return refused(f"The server at {address} refused a command: {words}", code=code)


def _not_now(message: str) -> ConnectionFailed:
    error = ConnectionFailed(message)
    error.answered = True
    return error
