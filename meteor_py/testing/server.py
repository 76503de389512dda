"""A real server process that belongs to a test: started, killed, paused, restarted."""

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

#: Seconds in which a server has to answer, its data loaded.
START_S = 20.0

#: Seconds between two requests to end, and how many there are before it is killed.
STOP_WAIT_S = 0.5
STOP_TRIES = 40

#: Bytes of the longest directory for temporary files that leaves room for a socket in ours.
ROOT_MAX_BYTES = 64


class Server:
    """One server process with its own directory; the same address and directory over restarts.

    It keeps nothing on disk unless told to, and ends with the test process at the latest, even if
    that is killed. Not for use by several threads at once, besides ``client()``.

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
        """Choose an address and make a directory; ``start()``, or ``with``, starts the server.

        Args:
            args: Options of the server, as on its command line.
            program: Which server; None: ``meteor_py.server.find_server()``, so the one in
                ``$METEOR_SERVER`` or the bundled Valkey.
            port: None: a unix socket; 0: a free port of 127.0.0.1; else that port.

        Raises:
            ServerNotFound: There is no server program.
        """
        self.program = Path(program) if program is not None else find_server()
        #: Read at each start: change them in between to restart with others.
        self.args = args
        self.directory = Path(tempfile.mkdtemp(prefix="meteor-test-", dir=_root()))
        self.log = self.directory / "server.log"
        #: The TCP port; 0: a unix socket only.
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

    # -- using it ------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether its process is there; a paused one is."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id; another one after each start.

        Raises:
            RuntimeError: It is not running.
        """
        if self._process is None or not self.running:
            raise RuntimeError(f"{self} is not running; start() it first.")
        return self._process.pid

    def client(self, **options: Any) -> redis.Redis:
        """A redis-py client that sends each command once; ``close()`` of the server closes it too.

        Args:
            options: Of ``redis.Redis``, in place of ours: ``socket_timeout=0.2`` (seconds).
        """
        client = plain_client(self.url, **options)
        self._clients.append(client)
        return client

    def info(self, section: str) -> dict[str, Any]:
        """What ``INFO section`` answers."""
        with plain_client(self.url) as client:
            answer: dict[str, Any] = client.info(section)
            return answer

    def flush(self) -> None:
        """Delete all data. Its settings stay, and so do scripts."""
        with plain_client(self.url) as client:
            client.flushall()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of what the server has logged; empty if it never started."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    # -- its life ------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start, and return when the server answers and has loaded its data: some 40 ms.

        Raises:
            RuntimeError: It runs already, or was closed.
            ServerStartFailed: It did not come up; the message ends with its log.
        """
        if self.running:
            raise RuntimeError(f"{self} runs already; restart() ends it first.")
        if not self.directory.exists():
            raise RuntimeError(f"{self} was closed, and its directory removed; make a new one.")
        try:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [str(self.program), *self._place(), *self.args],
                    cwd=self.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C is for the tests, which then end the server
                )
        except OSError as error:
            raise ServerStartFailed(f"{self} cannot be started: {error}.") from error
        self._watchdog.guard(self._process.pid)
        self._paused = False
        try:
            self._wait_until_ready(self._process.pid)
        except BaseException:
            self.kill()
            raise
        return self

    def kill(self) -> None:
        """SIGKILL: what had not reached the kernel is lost. Twice is fine."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM: an orderly shutdown. Twice is fine."""
        self._end(signal.SIGTERM)

    def restart(self) -> Self:
        """Start again on the same address and directory, after a ``stop()`` if it still runs.

        Raises:
            ServerStartFailed: It did not come up; the message ends with its log.
        """
        self.stop()
        return self.start()

    def pause(self) -> None:
        """SIGSTOP, in force when this returns; connections stay open and are not answered.

        Twice is fine.

        Raises:
            RuntimeError: It is not running.
        """
        pid = self.pid
        if self._paused:
            return  # the kernel tells of the first stop only
        os.kill(pid, signal.SIGSTOP)
        status = eventually(
            lambda: os.waitpid(pid, os.WUNTRACED | os.WNOHANG)[1], START_S, f"{self} did not stop"
        )
        if not os.WIFSTOPPED(status):
            raise RuntimeError(f"{self} has ended, and cannot be paused.")
        self._paused = True

    def resume(self) -> None:
        """SIGCONT: go on after a ``pause()``. Twice is fine.

        Raises:
            RuntimeError: It is not running.
        """
        os.kill(self.pid, signal.SIGCONT)
        self._paused = False

    def close(self) -> None:
        """Kill the server, close its clients, remove its directory. Twice is fine."""
        self.kill()
        for client in self._clients:
            client.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._watchdog.close()

    # -- inside --------------------------------------------------------------------------------

    def _place(self) -> list[str]:
        """The options that say where it listens, and what it does not do."""
        address = (
            ["--port", str(self.port), "--bind", HOST]
            if self.port
            else ["--port", "0", "--unixsocket", SOCKET]
        )
        # Tests like DEBUG: it makes a server sleep, reload its data, crash.
        return [*address, "--save", "", "--enable-debug-command", "local"]

    def _wait_until_ready(self, pid: int) -> None:
        """Return when it answers.

        Of the 38 ms of Valkey 9, it sleeps 30 to measure its clock; Redis 7.0 takes 13 in all.
        """
        with plain_client(self.url, socket_timeout=1) as probe:
            try:
                eventually(lambda: self._answers(probe, pid), START_S)
            except AssertionError:
                raise self._start_failed(f"did not answer within {START_S:g} s") from None

    def _answers(self, probe: redis.Redis, pid: int) -> bool:
        if not self.running:
            raise self._start_failed("ended while starting")
        try:
            info: dict[str, Any] = probe.info()
        except redis.AuthenticationError:
            raise self._start_failed(
                "asks for a password; start it without one, and set one through client()"
            ) from None
        except (redis.ConnectionError, redis.TimeoutError):
            return False
        # Somebody else's server on our port must not be taken for ours.
        return bool(info["process_id"] == pid and info["loading"] == 0)

    def _start_failed(self, what: str) -> ServerStartFailed:
        return ServerStartFailed(f"{self} {what}. Its log ends with:\n{self.log_tail()}")

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        for _ in range(STOP_TRIES):
            # Again and again: Redis refuses a SIGTERM while it writes its first append-only file.
            if self._process.poll() is None:
                # What the server has forked to rewrite its file is not to write on after a kill.
                reach = os.killpg if how == signal.SIGKILL else os.kill
                reach(self._process.pid, how)
                self._process.send_signal(signal.SIGCONT)  # a paused one would not see a SIGTERM
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
    """What the fixture ``meteor_private_server`` is: it starts a server for one test."""

    def __call__(
        self, *args: str, program: str | Path | None = None, port: int | None = None
    ) -> Server: ...


def plain_client(url: str, **options: Any) -> redis.Redis:
    """A redis-py client that sends what it is told, once: no retries, no hidden commands."""
    settings: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": 10,
        "socket_connect_timeout": 10,
        "health_check_interval": 0,
        "protocol": 2,
        "driver_info": None,  # else each connection begins with two CLIENT SETINFO
    }
    return redis.Redis.from_url(url, **(settings | options))


def _root() -> str:
    """Where to make directories: not pytest's, for the path of a socket is at most 103 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= ROOT_MAX_BYTES else "/tmp"
