"""A real server process that tests can kill, pause and restart."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Protocol, Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from meteor_py.errors import ServerStartFailed
from meteor_py.server import find_server
from meteor_py.server.datadir import free_port
from meteor_py.testing.waiting import eventually
from meteor_py.testing.watchdog import Watchdog

HOST = "127.0.0.1"
SOCKET = "server.sock"

#: Seconds that a server has to load its data and reply.
START_S = 20.0

#: Seconds between stop signals, and the number of signals sent before SIGKILL.
STOP_WAIT_S = 0.5
STOP_TRIES = 40

#: Maximum length of the temporary directory's path in bytes, so that the path of our socket fits.
ROOT_MAX_BYTES = 64


class Server:
    """A server process whose address and directory survive restarts.

    It writes nothing to disk unless its options say so. It dies with the test process, even if that
    process is killed. Only ``client()`` is thread-safe.

    >>> with Server("--appendonly", "yes") as server:
    ...     server.client().set("a", 1)
    ...     server.kill()
    ...     server.restart().client().get("a")
    True
    b'1'
    """

    def __init__(
        self, *args: str, program: str | Path | None = None, port: int | None = None
    ) -> None:
        """Choose an address and create a directory. ``start()`` or ``with`` starts the server.

        Args:
            args: Server options, as on the command line.
            program: The server program. None means ``$METEOR_SERVER`` or the bundled Valkey (see
                ``meteor_py.server.find_server()``).
            port: A TCP port on 127.0.0.1. 0 chooses a free port, and None uses a unix socket.

        Raises:
            ServerNotFound: No server program was found.
        """
        self.program = Path(program) if program is not None else find_server()
        #: Server options. They are read at every start, so you can change them and restart.
        self.args = args
        # Do not use pytest's tmp_path: a socket path is limited to 103 bytes.
        root = tempfile.gettempdir()
        root = root if len(os.fsencode(root)) <= ROOT_MAX_BYTES else "/tmp"
        self.directory = Path(tempfile.mkdtemp(prefix="meteor-test-", dir=root))
        self.log = self.directory / "server.log"
        #: The TCP port; 0 if the server has only a unix socket.
        self.port = 0 if port is None else port or free_port()
        self.url = (
            f"redis://{HOST}:{self.port}/0"
            if self.port
            else f"unix://{quote(str(self.directory / SOCKET))}"
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False
        self._clients: list[redis.Redis] = []
        self._watchdog = Watchdog(self.directory)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.program.name} {self.url}>"

    # -- use -----------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether the process exists, even if it is paused."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id, which changes with each start.

        Raises:
            RuntimeError: The server is not running.
        """
        if self._process is None or not self.running:
            raise RuntimeError(f"{self} is not running. Call start() first.")
        return self._process.pid

    def client(self, **options: Any) -> redis.Redis:
        """Return a redis-py client that never retries a command. ``close()`` also closes it.

        Args:
            options: ``redis.Redis`` options that override ours, such as ``socket_timeout=0.2``
                (seconds).
        """
        client = plain_client(self.url, **options)
        self._clients.append(client)
        return client

    def info(self, section: str) -> dict[str, Any]:
        """Return one section of the server's ``INFO``."""
        with plain_client(self.url) as client:
            reply: dict[str, Any] = client.info(section)
            return reply

    def flush(self) -> None:
        """Delete all data, but keep settings and scripts."""
        with plain_client(self.url) as client:
            client.flushall()

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the server's log; empty if the server never started."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    # -- start and stop ------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the server and wait until it has loaded its data, which takes about 40 ms.

        Raises:
            RuntimeError: The server is already running, or was closed.
            ServerStartFailed: The server did not start. The message ends with the server's log.
        """
        if self.running:
            raise RuntimeError(f"{self} is already running. Use restart() to stop it first.")
        if not self.directory.exists():
            raise RuntimeError(f"{self} was closed and its directory removed. Create another.")
        try:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [str(self.program), *self._options()],
                    cwd=self.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C must reach only the tests, not the server
                )
        except OSError as error:
            raise ServerStartFailed(f"Cannot start {self}: {error}.") from error
        self._watchdog.guard(self._process.pid)
        self._paused = False
        try:
            self._wait_until_ready(self._process.pid)
        except BaseException:
            self.kill()
            raise
        return self

    def kill(self) -> None:
        """Send SIGKILL, and wait until the server has exited.

        Writes that have not reached the kernel are lost. Does nothing if the server is not running.
        """
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGTERM for an orderly shutdown, and wait until the server has exited.

        After 20 seconds, send SIGKILL. Does nothing if the server is not running.
        """
        self._end(signal.SIGTERM)

    def restart(self) -> Self:
        """Stop the server if it is running, and start it with the same address and directory.

        Raises:
            ServerStartFailed: The server did not start. The message ends with the server's log.
        """
        self.stop()
        return self.start()

    def pause(self) -> None:
        """Send SIGSTOP and wait until it takes effect. Connections stay open but get no replies.

        A second call does nothing.

        Raises:
            RuntimeError: The server is not running, or exited before it could be paused.
        """
        pid = self.pid
        if self._paused:
            return  # waitpid() reports only the first stop
        os.kill(pid, signal.SIGSTOP)
        status = eventually(
            lambda: os.waitpid(pid, os.WUNTRACED | os.WNOHANG)[1], START_S, f"{self} did not stop"
        )
        if not os.WIFSTOPPED(status):
            raise RuntimeError(f"{self} exited before it could be paused. See its log.")
        self._paused = True

    def resume(self) -> None:
        """Resume a paused server (SIGCONT). Does nothing if the server is not paused.

        Raises:
            RuntimeError: The server is not running.
        """
        os.kill(self.pid, signal.SIGCONT)
        self._paused = False

    def close(self) -> None:
        """Kill the server, close its clients, and remove its directory. Idempotent."""
        self.kill()
        for client in self._clients:
            client.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._watchdog.close()

    # -- internals -----------------------------------------------------------------------------

    def _options(self) -> list[str]:
        """Return all arguments for the server program, including our own."""
        address = (
            ["--port", str(self.port), "--bind", HOST]
            if self.port
            else ["--port", "0", "--unixsocket", SOCKET]
        )
        # Tests use DEBUG to make a server sleep, reload its data, or crash.
        return [*address, "--save", "", "--enable-debug-command", "local", *self.args]

    def _wait_until_ready(self, pid: int) -> None:
        with plain_client(self.url, socket_timeout=1) as probe:
            try:
                eventually(lambda: self._is_ready(probe, pid), START_S)
            except AssertionError:
                raise self._start_failed(f"did not reply within {START_S:g} s") from None

    def _is_ready(self, probe: redis.Redis, pid: int) -> bool:
        if not self.running:
            raise self._start_failed("exited while starting")
        try:
            info: dict[str, Any] = probe.info()
        except redis.AuthenticationError:
            raise self._start_failed(
                "requires a password; start it without one, and set one through client()"
            ) from None
        except (redis.ConnectionError, redis.TimeoutError):
            return False
        # Check the process id, because another server may have taken the port. A sentinel does not
        # report ``loading``.
        return bool(info["process_id"] == pid and info.get("loading", 0) == 0)

    def _start_failed(self, what: str) -> ServerStartFailed:
        return ServerStartFailed(f"{self} {what}. Its log ends with:\n{self.log_tail()}")

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        for _ in range(STOP_TRIES):
            # Repeat the signal: Redis ignores SIGTERM while it writes its first append-only file.
            if self._process.poll() is None:
                # Kill the process group: a child that rewrites the file must not keep writing.
                send = os.killpg if how == signal.SIGKILL else os.kill
                send(self._process.pid, how)
                self._process.send_signal(signal.SIGCONT)  # a paused server cannot handle SIGTERM
            try:
                self._process.wait(STOP_WAIT_S)
                break
            except subprocess.TimeoutExpired:
                continue
        else:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None
        self._watchdog.guard(None)


class ServerFactory(Protocol):
    """The type of the ``meteor_private_server`` fixture, which starts a server for one test."""

    def __call__(
        self, *args: str, program: str | Path | None = None, port: int | None = None
    ) -> Server: ...


def plain_client(url: str, **options: Any) -> redis.Redis:
    """Return a redis-py client that never retries a command and sends none of its own."""
    settings: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": 10,
        "socket_connect_timeout": 10,
        "health_check_interval": 0,
        "protocol": 2,
        "driver_info": None,  # otherwise each connection sends CLIENT SETINFO twice
    }
    return redis.Redis.from_url(url, **(settings | options))
