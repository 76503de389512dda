"""One connection to a server: sends commands, reads replies, translates errors.

redis-py opens the connection, including TLS and authentication. This module sets every redis-py
option itself, because the defaults (a 5 s socket timeout, ten retries) would publish records twice
and break blocking reads. Once connected, commands and replies bypass redis-py (wire.py), except on
a fake server, which has no socket. This module retries a command only if the caller uses
``retry_idle`` or ``retry_redirected``.

A connection belongs to one thread at a time. It connects when first used, and reconnects after an
error or in a forked child. On a cluster, it belongs to one hash tag and connects to the node that
has the tag's slot. It does not follow redirects by itself, because a script's arguments may depend
on the server that runs it.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, ParamSpec, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from meteor_py.errors import AccessDenied, ConnectionFailed, MeteorError, OutOfMemory, ServerRefused
from meteor_py.redis import keys as key_names
from meteor_py.redis.address import LOGIN_OPTIONS, Address, Node, mask, show_node
from meteor_py.redis.embedded_connection import EmbeddedConnection, NotRestarted
from meteor_py.redis.scripts import Script
from meteor_py.redis.topology import (
    ABANDONED_S,
    Outage,
    Redirects,
    Search,
    Topology,
    slot_of,
)
from meteor_py.redis.wire import Wire
from meteor_py.runtime.locks import SignalSafeEvent

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

#: Size of a unix socket's send buffer in bytes, if the kernel allows it. With the default of
#: 208 KiB, the publisher and the server wait for each other, and throughput drops from 2.7 to 2.0
#: million records/s.
_UNIX_BUFFER = 4 * 1024 * 1024

#: Minimum seconds for connecting to a node, even if finding it took the whole timeout.
_CONNECT_MIN_S = 0.05

#: Bytes that redis-py receives at a time. It reads only the replies to its login commands.
_HANDSHAKE_SIZE = 4096

#: Longest pause after a redirect, as a share of the timeout, so that a call is tried a few times.
PAUSE_SHARE = 0.25

#: Arguments larger than this many bytes are sent separately, without a copy.
_JOIN_MAX = 16_384

#: Error replies that mean "not now" or "not here". The server did not run the command.
_NOT_NOW = (
    redis.exceptions.ClusterDownError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.TryAgainError,
)
#: Error replies that only cluster nodes send. MovedError is a subclass of AskError.
_OF_CLUSTER = (redis.exceptions.AskError, redis.exceptions.ClusterCrossSlotError)
#: Codes of further "not now" replies, for which redis-py has no exception class.
_NOT_NOW_CODES = ("BUSY", "MISCONF", "NOREPLICAS", "UNKILLABLE")
#: Errors that suggest that another server has the keys, or soon will.
_AWAY = (
    redis.exceptions.ClusterDownError,
    redis.exceptions.MasterDownError,
    redis.exceptions.ReadOnlyError,
)
#: The error code that ends a blocking read when the server is demoted to a replica.
_DEMOTED = "UNBLOCKED"
#: Text of XADD's error reply if the ID is too low. The reply's code is the generic ERR.
_ID_TAKEN = "equal or smaller than the target stream top item"


class DataSafetyWarning(UserWarning):
    """The server's settings can lose data. The message says how to change them."""


class ScriptMissing(MeteorError):
    """The server does not know the script and did not run it."""

    retriable = True


class EntryIdTaken(ServerRefused):
    """The stream already has an entry with this ID or a higher one. Nothing was added."""


class Connection:
    """One connection to a server.

    Args:
        address: The client's address.
        timeout_s: Maximum seconds for connecting, for sending, and for each part of a reply.
        topology: Finds the server to connect to. By default, this is the server at ``address``.
        tag: The hash tag of the keys that the connection is used for, or None if there are none.
        node: If set, the connection always connects to this node and ignores ``tag``.
    """

    def __init__(
        self,
        address: Address,
        timeout_s: float,
        topology: Topology | None = None,
        tag: str | None = None,
        node: Node | None = None,
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.topology = _SINGLE if topology is None else topology
        self.tag = tag
        self._pinned = node
        #: The node of the current or last connection; None for a single server.
        self.node: Node | None = node
        self._redirects = Redirects()
        self._outage = Outage()
        self._interrupts = 0
        #: The pause and the search in progress, so that ``interrupt`` can end them.
        self._pause: SignalSafeEvent | None = None
        self._search: Search | None = None
        self._connection: AbstractConnection | None = None
        #: Sends commands and reads replies; None if not connected, or if the server is a fake.
        self.wire: Wire | None = None
        self._opening: AbstractConnection | None = None
        self._server_pid = self._private_server_pid()
        self._history: str | None = None
        #: Whether the TLS handshake has succeeded but the server has not replied to a command yet.
        self._handshake_only = False
        self._pid = os.getpid()
        self.topology.watch(self)

    # -- commands and replies ----------------------------------------------------------------

    def send(self, commands: Iterable[Sequence[Argument]]) -> None:
        """Send commands. Call ``read`` once per command; replies arrive in the same order."""
        self.send_encoded(encode(commands))

    def send_encoded(
        self, chunks: Sequence[bytes | memoryview], timeout_s: float | None = None
    ) -> None:
        """Like ``send``, but for commands that ``encode`` has already encoded."""
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
        """Return the next reply; raise an exception if it is an error."""
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
        except BaseException:  # such as Ctrl-C; the next caller must not read this reply
            self.close()
            raise

    def pipeline(self, commands: Sequence[Sequence[Argument]], timeout_s: float) -> list[Any]:
        """Send commands together and return their replies; raise the first error."""
        return self.pipeline_encoded(encode(commands), len(commands), timeout_s)

    def pipeline_encoded(
        self, chunks: Sequence[bytes | memoryview], count: int, timeout_s: float
    ) -> list[Any]:
        """Like ``pipeline``, but for ``count`` commands that ``encode`` has already encoded."""
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
        if self.topology.guards_slots:
            verb = ("EVAL" if whole else "EVALSHA") + ("_RO" if script.read_only else "")
            body = script.guarded.text if whole else script.guarded.sha
            return (verb, body, len(keys) + 1, *keys, key_names.guard(keys[0]), *args)
        fake = self.address.scheme == "fake"
        read_only = script.read_only and not fake
        verb = ("EVAL" if whole or fake else "EVALSHA") + ("_RO" if read_only else "")
        body = (script.plain_source if fake else script.source) if whole or fake else script.sha
        return (verb, body, len(keys), *keys, *args)

    def load(self, script: Script) -> None:
        """Load a script into the server, with the guard key if the server is part of a cluster."""
        source = script.guarded.text if self.topology.guards_slots else script.source
        self.call("SCRIPT", "LOAD", source)

    def retry_idle(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call ``work``. If the idle connection turns out to be dead, reconnect and call it again.

        Use this only for commands that may run twice. It also retries like ``retry_redirected``.

        Raises:
            ConnectionFailed: The server cannot be reached, or its keys are still being moved.
        """
        was_connected, interrupts = self._connection is not None, self._interrupts
        try:
            result = work(*args, **kwargs)
        except ConnectionFailed as error:
            if not (was_connected or error.redirected) or self._interrupts != interrupts:
                raise
        else:
            self._outage.since = None
            return result
        return self.retry_redirected(work, *args, **kwargs)

    def retry_redirected(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call ``work``. While it is redirected, call it again for up to ``timeout_s`` seconds.

        A redirected command had no effect. ``work`` must be a single command, or several that may
        run twice. Their arguments must not depend on the server's history, because after a redirect
        another server with a different history may run them.

        Raises:
            ConnectionFailed: The server cannot be reached, or its keys are still being moved.
        """
        deadline = time.monotonic() + self.timeout_s
        interrupts, failures = self._interrupts, 0
        while True:
            try:
                result = work(*args, **kwargs)
            except ConnectionFailed as error:
                if not error.redirected:
                    raise
                failures += 1
                pause_s = min(self._outage.pause_s(failures), self.timeout_s * PAUSE_SHARE)
                if time.monotonic() + pause_s > deadline:
                    raise
                self._pause = pause = SignalSafeEvent()
                if self._interrupts != interrupts or pause.wait(pause_s):
                    raise
            else:
                self._outage.since = None
                return result

    # -- the server's history ------------------------------------------------------------------

    @property
    def history(self) -> str:
        """The server's ``master_replid``, or '' if it is hidden.

        It is read once per connection; ``refresh_history`` reads it again.

        Raises:
            ConnectionFailed: The server cannot be reached, or it is a replica, which accepts no
                writes and has its primary's history.
        """
        self.connect()
        if self._history is None:
            self.refresh_history()
        return self._history or ""

    @property
    def known_history(self) -> str | None:
        """Like ``history``, but never asks the server.

        None if there is no connection, or if the server has not been asked yet.
        """
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
            raise self._is_replica()
        self._history = facts.get("master_replid", "")
        return self._history

    @property
    def data_lost(self) -> bool:
        """Whether a private server has restarted empty since this object was created."""
        return self._server_pid != self._private_server_pid()

    def _private_server_pid(self) -> int | None:
        server = self.address.options.get("embedded")  # an EmbeddedServer, if any
        return None if server is None or server.keep else server.pid

    # -- the connection ------------------------------------------------------------------------

    @property
    def block_max_s(self) -> float:
        """Maximum seconds for one blocking read. It is short, so that the client soon notices a
        dead connection."""
        # A blocking read on a fake server cannot be interrupted.
        return 0.05 if self.address.scheme == "fake" else 2.0

    @property
    def connected(self) -> bool:
        return self._connection is not None and self._pid == os.getpid()

    @property
    def readable(self) -> bool:
        """Whether the socket has data to read. Does not block; safe to call from any thread.

        The server sends nothing on an idle connection, so an idle connection that is readable has
        been closed. With TLS, the data may also be a protocol message.
        """
        sock = self._socket()
        if sock is None:
            return False
        poll = select.poll()
        try:
            poll.register(sock, select.POLLIN)
            found = poll.poll(0)
        except (OSError, ValueError):  # another thread has closed the socket
            return True
        return bool(found) or self._socket() is not sock

    def connect(self) -> AbstractConnection:
        """Return the redis-py connection. Connect if there is none, or after a fork."""
        if self._pid != os.getpid():
            # Do not close the connection: the parent still uses the socket.
            self._connection = self.wire = None
            self._pid = os.getpid()
        if self._connection is None:
            version = self.topology.version
            self._opening = connection = self._prepare()  # so that interrupt() can cancel it
            try:
                connection.connect()
            except (redis.RedisError, OSError) as error:
                self._fail(error)
            finally:
                self._opening = None
            self._history = None
            self._connection = connection
            sock = self._socket()
            if sock is not None:
                if sock.family == socket.AF_UNIX:  # the kernel tunes TCP buffers by itself
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
                self.wire = Wire(sock)
            if self.topology.checks_role:
                self._check_role(version)
            return connection
        return self._connection

    def _prepare(self) -> AbstractConnection:
        """Return an unconnected redis-py connection for the node that the topology names."""
        timeout_s = self.timeout_s
        if self.topology.is_movable and self._pinned is None:
            self.node, timeout_s = self._find_node()
        target = self.target
        options = connection_options(target, timeout_s)
        self._handshake_only = False
        if target.uses_tls:
            options["redis_connect_func"] = self._log_in
        return target.connection_class(
            **target.options, **options, socket_read_size=_HANDSHAKE_SIZE
        )

    def _find_node(self) -> tuple[Node | None, float]:
        """Return the node that has the keys, and the seconds that are left for connecting to it."""
        self._search = search = Search(self.timeout_s)
        try:
            return self.topology.locate(self.tag, search), max(search.left_s, _CONNECT_MIN_S)
        finally:
            self._search = None

    @property
    def target(self) -> Address:
        """The address of the server that this object is, or was last, connected to."""
        return self.address if self.node is None else self.address.at(self.node)

    def _check_role(self, version: int) -> None:
        """Check that the server is the primary, and was not replaced since connecting began."""
        self.refresh_history()
        if self.topology.version != version:
            self.close()
            raise _not_now(f"The primary for {self.address} has changed.", redirected=True)

    def _log_in(self, connection: AbstractConnection) -> None:
        """Set up a connection whose TLS handshake has succeeded."""
        self._handshake_only = True
        connection.on_connect()
        if any(self.address.options.get(name) for name in LOGIN_OPTIONS):
            self._handshake_only = False  # the server has replied to AUTH, CLIENT or SELECT

    def close(self) -> None:
        """Close the connection. The next use reconnects. Idempotent."""
        connection = self._connection
        self._connection = self.wire = None
        if connection is not None:
            connection.disconnect()

    def interrupt(self) -> None:
        """Make another thread's ``connect``, ``send`` or ``read`` raise ``ConnectionFailed``."""
        self._interrupts += 1
        search, pause = self._search, self._pause
        if search is not None:
            search.interrupt()
        if pause is not None:
            pause.set()
        self.leave_node()

    def leave_node(self) -> None:
        """Like ``interrupt``, but the call may be retried: another server is now the primary."""
        if self._pid != os.getpid():
            return  # the socket still belongs to the parent
        opening = self._opening
        if isinstance(opening, EmbeddedConnection):
            opening.cancel()
        # Do not use disconnect(): redis-py would silently reconnect, and replies would be mixed up.
        for sock in (self._socket(), _socket_of(opening)):  # the login may also take long
            if sock is not None:
                with suppress(OSError):  # already closed
                    sock.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        """Return the file descriptor to wait for, or -1 if there is no connection."""
        sock = self._socket()
        return -1 if sock is None else sock.fileno()

    def _socket(self) -> socket.socket | None:
        return _socket_of(self._connection)

    def _fail(self, error: Exception) -> NoReturn:
        if self.topology.is_movable:
            translated = self._note_failure(error)
        else:
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

    def _note_failure(self, error: Exception) -> MeteorError:
        """Translate an error, and report it to the topology."""
        if isinstance(error, (redis.exceptions.AskError, redis.exceptions.TryAgainError)):
            return self._note_redirect(error)
        translated = translate(error, self.target)
        if isinstance(translated, ConnectionFailed):
            self.topology.note_failed(self.node)
            if isinstance(error, _AWAY) or _code(error) == _DEMOTED:
                self._redirects.note()
                translated.redirected = True
        return translated

    def _note_redirect(self, error: Exception) -> ConnectionFailed:
        waited_s = self._redirects.note()
        slot = getattr(error, "slot_id", None)
        if isinstance(error, redis.exceptions.MovedError):
            is_same = error.host in ("", "?") and self.node is not None
            host = self.node[0] if is_same and self.node else error.host
            self.topology.note_moved(error.slot_id, (host, int(error.port)))
            text = f"Slot {slot} is no longer on the node at {self.target}."
            return _not_now(text, redirected=True)
        # Never follow ASK: on the node that imports a slot, a script finds only the keys that have
        # already arrived.
        if slot is None and self.tag is not None:
            slot = slot_of(self.tag)
        name = "A slot" if slot is None else f"Slot {slot}"
        text = f"{name} of the cluster is being moved from the node at {self.target}."
        if waited_s >= ABANDONED_S:
            text += (
                f" This client has waited for {waited_s:.0f} seconds. If no resharding is running, "
                "the move was abandoned: run `redis-cli --cluster fix` for a node of the cluster."
            )
        return _not_now(text, redirected=True)

    def _is_replica(self) -> ConnectionFailed:
        error = ConnectionFailed(
            f"The server at {self.target} is a replica and accepts no writes. Connect to its "
            "primary."
        )
        if self.topology.is_movable:
            self.topology.note_failed(self.node)
            self._redirects.note()
            error.redirected = True
        return error

    def _rejected(self, error: Exception) -> ConnectionFailed:
        """Return the error for a server that closed the connection right after the handshake.

        In TLS 1.3, the client completes its handshake before the server has checked the client's
        certificate. The connection may be closed before the client reads the server's "certificate
        required" alert. An EOF or a broken pipe can therefore mean the same as the alert.
        """
        words = mask(str(error)).strip().rstrip(".")
        message = (
            f"The server at {self.address} closed the connection after the TLS handshake, before "
            f"its first reply: {words}."
        )
        if "ssl_certfile" in self.address.options:
            return ConnectionFailed(f"{message} The server may not accept this client certificate.")
        return ConnectionFailed(
            f"{message} If the server requires a client certificate, set ssl_certfile and "
            "ssl_keyfile (docs/production/tls.md)."
        )


def _socket_of(connection: AbstractConnection | None) -> socket.socket | None:
    sock = getattr(connection, "_sock", None)
    return sock if isinstance(sock, socket.socket) else None  # a fake server has no socket


def connection_options(address: Address, timeout_s: float) -> dict[str, Any]:
    """Return the options for a redis-py connection that replace redis-py's own defaults."""
    keepalive = {"socket_keepalive": True, "socket_keepalive_options": _KEEPALIVE}
    return {
        **(keepalive if address.scheme.startswith("redis") else {}),
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
    """Encode commands in the Redis protocol, without copying large arguments."""
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

    No other function parses error texts. The first word of an error reply is its code.
    """
    words = mask(str(error)).strip()
    code = _code(error)
    if isinstance(error, redis.exceptions.NoScriptError):
        return ScriptMissing(words)
    if isinstance(error, redis.exceptions.OutOfMemoryError) or code == "OOM":
        return OutOfMemory(
            f"The server at {address} has reached its maxmemory and stores no more data. Raise "
            "maxmemory, or lower the capacity of its streams.",
            code=code,
        )
    if isinstance(error, (redis.AuthenticationError, redis.exceptions.NoPermissionError)):
        return AccessDenied(
            f"The server at {address} denied access: {words.rstrip('.')}. "
            "Check the user, password and ACL (docs/acl.md).",
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
    if code == _DEMOTED:
        return ConnectionFailed(f"The server at {address} is no longer the primary: {words}")
    if isinstance(error, _OF_CLUSTER):
        return node_of_cluster(address, words, code)
    if isinstance(error, _NOT_NOW) or code in _NOT_NOW_CODES:
        return _not_now(f"The server at {address} cannot do this now: {words}")
    refused = EntryIdTaken if _ID_TAKEN in words else ServerRefused
    return refused(f"The server at {address} refused a command: {words}", code=code)


def _code(error: Exception) -> str:
    """Return the code of an error reply. redis-py removes the codes that it knows from the text."""
    return getattr(error, "status_code", None) or mask(str(error)).strip().partition(" ")[0]


def node_of_cluster(address: Address, words: str = "", code: str = "") -> ServerRefused:
    """Return the error for a single-server address whose server is a cluster node."""
    scheme = "rediss" if address.uses_tls else "redis"
    host, port = address.options.get("host", "localhost"), address.options.get("port", 6379)
    reply = f" (it replied {code} {words})" if words else ""
    return ServerRefused(
        f"The server at {address} is a node of a cluster{reply}. Connect to the whole cluster: "
        f"{scheme}+cluster://{show_node((host, port))}",
        code=code,
    )


def _not_now(message: str, *, redirected: bool = False) -> ConnectionFailed:
    error = ConnectionFailed(message)
    error.answered = True
    error.redirected = redirected
    return error


#: The topology that all connections to single servers share.
_SINGLE = Topology()
