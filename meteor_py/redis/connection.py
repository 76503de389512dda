"""One connection to a server: commands out, replies in, errors translated once.

The only module that sends commands through redis-py. It leans on it for addresses, TLS,
authentication and parsing, and sets every option itself: the defaults of redis-py (a 5 s socket
timeout, ten retries) would publish records twice and break blocking reads. Nothing is retried here
unless the caller asks for it with ``retry_idle``.

A connection belongs to one thread at a time. It connects when first used, and again after an error
or in a forked child.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from meteor_py.errors import AccessDenied, ConnectionFailed, MeteorError, OutOfMemory, ServerRefused
from meteor_py.redis.address import Address, mask
from meteor_py.redis.scripts import Script

#: What an argument of a command may be. Buffers of Arrow are sent without a copy.
Argument = Any

_T = TypeVar("_T")
_P = ParamSpec("_P")

#: A peer that is gone without a word is noticed after 45 s, also on an idle connection.
_KEEPALIVE = {
    getattr(socket, name): seconds
    for name, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
}

#: Bytes that may wait in a unix socket, where the kernel allows it. With its 208 KiB a publisher
#: and the server would take turns: 2.0 million records/s in place of 2.7.
_UNIX_BUFFER = 4 * 1024 * 1024

#: Arguments above this many bytes are sent as they lie, not joined to the others.
_JOIN_MAX = 16_384

#: Replies that say "not now" or "not here" rather than "no". None of them ran the command.
_NOT_NOW = (
    redis.exceptions.AskError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.MovedError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.TryAgainError,
)
#: The same, where redis-py has no class for the code.
_NOT_NOW_CODES = ("BUSY", "MISCONF", "NOREPLICAS", "UNKILLABLE")
#: What XADD replies, with the code ERR of most errors, if its ID is not above all others.
_ID_TAKEN = "equal or smaller than the target stream top item"


class DataSafetyWarning(UserWarning):
    """The server is set up in a way that can lose data; the message names the remedy."""


class ScriptMissing(MeteorError):
    """The server does not know a script; it did not run."""

    retriable = True


class EntryIdTaken(ServerRefused):
    """The stream has an entry with this ID or a later one; nothing was added."""


class Connection:
    """One connection. ``timeout_s`` bounds connecting, sending and each reply, in seconds."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._connection: AbstractConnection | None = None
        self._history: str | None = None
        self._pid = os.getpid()

    # -- commands and replies ----------------------------------------------------------------

    def send(self, commands: Iterable[Sequence[Argument]]) -> None:
        """Send commands; the replies arrive in the same order, one ``read`` each."""
        chunks = encode(commands)
        connection = self.connect()
        try:
            connection.send_packed_command(chunks, check_health=False)
        except (redis.RedisError, OSError) as error:
            self._fail(error)

    def read(self, timeout_s: float | None = None) -> Any:
        """Return the next reply; an error reply is raised."""
        if self._connection is None:
            raise ConnectionFailed(f"The connection to {self.address} was closed.")
        try:
            return self._connection.read_response(
                disable_decoding=True,
                timeout=self.timeout_s if timeout_s is None else timeout_s,
            )
        except (redis.RedisError, OSError) as error:
            self._fail(error)

    def call(self, *command: Argument, timeout_s: float | None = None) -> Any:
        """Send one command and return its reply."""
        try:
            self.send([command])
            return self.read(timeout_s)
        except MeteorError:
            raise
        except BaseException:  # Ctrl-C: the next caller must not read the reply to this
            self.close()
            raise

    def pipeline(self, commands: Sequence[Sequence[Argument]], timeout_s: float) -> list[Any]:
        """Send commands together and return their replies; the first error is raised."""
        try:
            self.send(commands)
            return self.read_all(len(commands), timeout_s)
        except MeteorError:
            raise
        except BaseException:  # as in call()
            self.close()
            raise

    def read_all(self, count: int, timeout_s: float) -> list[Any]:
        """Return the next ``count`` replies; the first error among them is raised."""
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
        except (
            BaseException
        ):  # as in call(); a server that cannot do it now leaves replies behind too
            self.close()
            raise
        if failure is not None:
            raise failure
        return replies

    def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument] = ()) -> Any:
        """Run a script; one that the server does not know yet is sent whole."""
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
        """The command that runs ``script``: by its hash, or with its ``whole`` text."""
        fake = self.address.scheme == "fake"
        read_only = script.read_only and not fake
        verb = ("EVAL" if whole or fake else "EVALSHA") + ("_RO" if read_only else "")
        body = (script.plain_source if fake else script.source) if whole or fake else script.sha
        return (verb, body, len(keys), *keys, *args)

    def retry_idle(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call ``work``, and once more on a new connection if an idle one turns out to be dead.

        Only for commands that may be repeated.

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
        """The server's ``master_replid`` when this connection was made; '' where it is hidden.

        Raises:
            ConnectionFailed: The server is a replica: it takes no writes, and its history is
                not its own.
        """
        self.connect()
        if self._history is None:
            self.refresh_history()
        return self._history or ""

    def refresh_history(self) -> str:
        """Ask again; a server can be promoted under an open connection."""
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
                f"The server at {self.address} is a replica and takes no writes; "
                "connect to its primary."
            )
        self._history = facts.get("master_replid", "")
        return self._history

    # -- the connection ------------------------------------------------------------------------

    @property
    def block_max_s(self) -> float:
        """The longest wait to ask a server for: a connection that died is noticed soon after."""
        return 0.05 if self.address.scheme == "fake" else 2.0  # a fake's cannot be interrupted

    @property
    def connected(self) -> bool:
        return self._connection is not None and self._pid == os.getpid()

    def connect(self) -> AbstractConnection:
        """Return the connection, made anew if there is none or it belongs to our parent."""
        if self._pid != os.getpid():
            self._connection = None  # closed in the parent; here it is only forgotten
            self._pid = os.getpid()
        if self._connection is None:
            connection = self.address.connection_class(
                **self.address.options, **connection_options(self.address, self.timeout_s)
            )
            try:
                connection.connect()
            except (redis.RedisError, OSError) as error:
                self._fail(error)
            self._connection = connection
            self._history = None
            self._widen()
        return self._connection

    def close(self) -> None:
        """Close the connection; the next use makes another. Safe to call twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()

    def interrupt(self) -> None:
        """End a wait in another thread: its ``send`` or ``read`` raises ConnectionFailed."""
        # Not disconnect(): redis-py would quietly connect again, and replies get mixed up.
        sock = self._socket()
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended already

    def _widen(self) -> None:
        """Let several frames leave at once; over TCP the kernel sees to that by itself."""
        sock = self._socket()
        if sock is not None and sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)

    def _socket(self) -> socket.socket | None:
        sock = getattr(self._connection, "_sock", None)
        return sock if isinstance(sock, socket.socket) else None  # a fake one has another kind

    def _fail(self, error: Exception) -> NoReturn:
        translated = translate(error, self.address)
        if isinstance(translated, ConnectionFailed):
            self.close()
        error.__context__ = None  # its words are in ours: one cause is enough to read
        try:
            raise translated from error.with_traceback(None)
        finally:
            del translated, error  # else frame and exception hold each other, and all our callers


def connection_options(address: Address, timeout_s: float) -> dict[str, Any]:
    """Every option of a redis-py connection that matters, none left to its defaults."""
    keepalive = {"socket_keepalive": True, "socket_keepalive_options": _KEEPALIVE}
    return {
        **(keepalive if address.scheme in ("redis", "rediss") else {}),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_read_size": 262_144,
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
    """Write commands in the protocol, large arguments as views of their own memory."""
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
    """Return the error of this package for an error of redis-py.

    The only place that reads the text of an error: the first word of an error reply is its code.
    """
    words = mask(str(error)).strip()
    # redis-py cuts off the codes that it knows.
    code = getattr(error, "status_code", None) or words.partition(" ")[0]
    if isinstance(error, redis.exceptions.NoScriptError):
        return ScriptMissing(words)
    if isinstance(error, redis.exceptions.OutOfMemoryError) or code == "OOM":
        return OutOfMemory(
            f"The server at {address} has reached its maxmemory and takes no new record; raise "
            "maxmemory, or lower the capacity of its streams.",
            code=code,
        )
    if isinstance(error, (redis.AuthenticationError, redis.exceptions.NoPermissionError)):
        return AccessDenied(
            f"The server at {address} denied access: {words.rstrip('.')}. "
            "Check user, password and ACL (docs/acl.md).",
            code=code,
        )
    if isinstance(error, redis.BusyLoadingError):
        return _not_now(f"The server at {address} is still loading its data.")
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError, OSError)):
        return ConnectionFailed(
            f"The server at {address} cannot be reached: {words.rstrip('.')}. "
            "Is it running, and is the address right?"
        )
    if isinstance(error, _NOT_NOW) or code in _NOT_NOW_CODES:
        return _not_now(f"The server at {address} cannot do this now: {words}")
    refused = EntryIdTaken if _ID_TAKEN in words else ServerRefused
    return refused(f"The server at {address} refused: {words}", code=code)


def _not_now(message: str) -> ConnectionFailed:
    error = ConnectionFailed(message)
    error.answered = True
    return error
