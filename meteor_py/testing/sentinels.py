"""A real primary with replicas and sentinels for tests. Tests can make any of them fail."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import redis

from meteor_py.testing.server import HOST, Server, plain_client
from meteor_py.testing.server_group import STABLE_S, ServerGroup
from meteor_py.testing.waiting import eventually

_CONFIG_FILE = "sentinel.conf"


class Sentinel(Server):
    """A sentinel process, whose state survives restarts in its configuration file."""

    def __init__(self, program: str | Path | None) -> None:
        super().__init__(program=program, port=0)
        #: The sentinel's id, which ``SENTINEL MYID`` returns.
        self.id = secrets.token_hex(20)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def configure(self, lines: Sequence[str]) -> None:
        """Write the configuration for the first start."""
        (self.directory / _CONFIG_FILE).write_text("\n".join([f"sentinel myid {self.id}", *lines]))

    def primary_port(self, service: str) -> int:
        """Return the port of the server that this sentinel considers the primary.

        Raises:
            redis.RedisError: The sentinel does not reply, or does not know the service.
        """
        return int(self.ask("GET-MASTER-ADDR-BY-NAME", service)[1])

    def ask(self, *command: str) -> Any:
        """Send a ``SENTINEL`` command and return its reply without parsing it.

        Raises:
            redis.RedisError: The sentinel refused the command, or does not reply.
        """
        with plain_client(self.url, socket_timeout=2) as client:
            return client.execute_command("SENTINEL", *command)

    def _options(self) -> list[str]:
        return [_CONFIG_FILE, "--sentinel", "--port", str(self.port), "--bind", HOST]


class Sentinels(ServerGroup):
    """A primary, its replicas, and the sentinels that monitor them, on 127.0.0.1.

    The servers write nothing to disk unless ``args`` says so, and die with the test process.
    Starting takes about a second. After a failover, the servers are ``stable`` again once a
    sentinel has made the old primary a replica of the new one. That takes up to about ten seconds.
    Not thread-safe, except for ``url`` and the servers' ``client()``.

    >>> with Sentinels() as sentinels:
    ...     old = sentinels.kill_primary()
    ...     sentinels.wait_for_failover(old) is sentinels.primary
    True
    """

    def __init__(
        self,
        replicas: int = 2,
        sentinels: int = 3,
        *,
        args: Sequence[str] = (),
        program: str | Path | None = None,
        service: str = "mymaster",
        down_after_s: float = 1.0,
    ) -> None:
        """Configure the servers. ``start()`` or ``with`` starts them.

        Args:
            replicas: Number of replicas.
            sentinels: Number of sentinels. More than half of them must agree on a failover.
            args: Options for the primary and its replicas, as on the command line.
            program: The server program, such as "redis-server". None means ``$METEOR_SERVER`` or
                the bundled Valkey.
            service: The name by which clients ask the sentinels for the primary.
            down_after_s: Seconds of silence after which a sentinel considers a server dead. If it
                is less than 1, a busy machine can cause failovers.
        """
        if replicas < 1 or sentinels < 1:
            raise ValueError("A failover needs at least one replica and one sentinel.")
        self._shape = (replicas, sentinels)
        self._program = program
        self._down_after_s = down_after_s
        # Let replicas synchronize within milliseconds instead of five seconds.
        self._args = ("--repl-diskless-sync-delay", "0", *args)
        self.service = service
        #: The primary and its replicas in start order. The initial primary comes first.
        self.servers: list[Server] = []
        self.sentinels: list[Sentinel] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    # -- use -----------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The address for ``meteor_py.connect()``."""
        seeds = ",".join(sentinel.address for sentinel in self.sentinels)
        return f"redis+sentinel://{seeds}/{self.service}"

    @property
    def primary(self) -> Server:
        """The server that most running sentinels name as the primary. It may be dead.

        Raises:
            LookupError: No sentinel replies.
        """
        ports: list[int] = []
        for sentinel in self.sentinels:
            try:
                ports.append(sentinel.primary_port(self.service))
            except redis.RedisError:
                continue  # killed or paused
        if not ports:
            raise LookupError(f"No sentinel of {self} replies.")
        port = max(ports, key=ports.count)
        return next(server for server in self.servers if server.port == port)

    @property
    def replicas(self) -> list[Server]:
        """All servers except the primary, whether or not they are running."""
        primary = self.primary
        return [server for server in self.servers if server is not primary]

    # -- changes -------------------------------------------------------------------------------

    def failover(self) -> Server:
        """Ask a sentinel for a planned failover, and wait for the new primary.

        The call returns when all running sentinels name the new primary. They demote the old
        primary some seconds later. To wait for that as well, call ``wait_until_stable()``.

        Returns:
            The new primary.

        Raises:
            redis.ResponseError: The sentinel refused, for example because no replica is suitable.
            AssertionError: The failover took too long.
        """
        old = self.primary
        sentinel = next(each for each in self.sentinels if each.running)
        sentinel.ask("FAILOVER", self.service)
        return self.wait_for_failover(old)

    def kill_primary(self) -> Server:
        """Kill the primary and return it. See ``wait_for_failover()``."""
        primary = self.primary
        primary.kill()
        return primary

    def wait_for_failover(self, old: Server, timeout_s: float = STABLE_S) -> Server:
        """Wait until all running sentinels have replaced ``old`` as the primary.

        Returns:
            The new primary.

        Raises:
            AssertionError: The timeout expired.
        """

        def switched() -> int:
            ports = set()
            for sentinel in self.sentinels:
                if sentinel.running:
                    try:
                        ports.add(sentinel.primary_port(self.service))
                    except redis.RedisError:
                        return 0  # paused or busy
            return 0 if old.port in ports or len(ports) != 1 else ports.pop()

        port = eventually(switched, timeout_s, f"the sentinels did not replace {old}")
        return next(server for server in self.servers if server.port == port)

    # -- internals -----------------------------------------------------------------------------

    def _all_servers(self) -> list[Server]:
        return [*self.sentinels, *self.servers]

    def _forget_servers(self) -> None:
        self.servers.clear()
        self.sentinels.clear()

    def _new_server(self) -> Server:
        return Server(*self._args, program=self._program, port=0)

    def _new_sentinel(self) -> Sentinel:
        return Sentinel(self._program)

    def _start_servers(self) -> None:
        replicas, sentinels = self._shape
        primary = self._new_server()
        self.servers.append(primary)
        primary.start()
        for _ in range(replicas):
            replica = self._new_server()
            self.servers.append(replica)
            replica.start()
            # Do not set this as a server option: after a promotion and a restart, the server would
            # be a replica again.
            with plain_client(replica.url) as client:
                client.replicaof(HOST, primary.port)
        for _ in range(sentinels):
            self.sentinels.append(self._new_sentinel())
        for sentinel in self.sentinels:
            sentinel.configure(self._configuration(sentinel))
            sentinel.start()

    def _configuration(self, sentinel: Sentinel) -> list[str]:
        """Return a sentinel's configuration.

        It lists the replicas and the other sentinels, because discovery would take two seconds.
        """
        name, primary = self.service, self.servers[0]
        return [
            f"sentinel monitor {name} {HOST} {primary.port} {len(self.sentinels) // 2 + 1}",
            f"sentinel down-after-milliseconds {name} {round(self._down_after_s * 1000)}",
            f"sentinel failover-timeout {name} 5000",
            f"sentinel parallel-syncs {name} {len(self.servers)}",
            *(f"sentinel known-replica {name} {HOST} {each.port}" for each in self.servers[1:]),
            *(
                f"sentinel known-sentinel {name} {HOST} {each.port} {each.id}"
                for each in self.sentinels
                if each is not sentinel
            ),
            "",
        ]

    def _obstacle(self) -> str:
        for server in self._all_servers():
            if not server.running:
                return f"{server} is not running"
        ports = set()
        for sentinel in self.sentinels:
            try:
                reply = sentinel.ask("MASTER", self.service)
            except redis.RedisError as error:
                return f"{sentinel} does not reply: {error}"
            state = dict(zip(reply[::2], reply[1::2], strict=True))
            ports.add(int(state[b"port"]))
            if state[b"flags"] != b"master":
                return f"{sentinel} reports {state[b'flags'].decode()}"
            found = (int(state[b"num-slaves"]), int(state[b"num-other-sentinels"]) + 1)
            if found != (len(self.servers) - 1, len(self.sentinels)):
                return f"{sentinel} knows {found[0]} replicas and {found[1]} sentinels"
        if len(ports) > 1:
            return f"the sentinels name different primaries, at ports {sorted(ports)}"
        return next(filter(None, (_wrong_role(each, *ports) for each in self.servers)), "")


class SentinelsFactory(Protocol):
    """The type of the ``meteor_private_sentinels`` fixture, which starts servers for one test."""

    def __call__(
        self,
        replicas: int = 2,
        sentinels: int = 3,
        *,
        args: Sequence[str] = (),
        program: str | Path | None = None,
        service: str = "mymaster",
        down_after_s: float = 1.0,
    ) -> Sentinels: ...


def _wrong_role(server: Server, primary_port: int) -> str:
    try:
        info = server.info("replication")
    except redis.RedisError as error:
        return f"{server} does not reply: {error}"
    if server.port == primary_port:
        return "" if info["role"] == "master" else f"{server} is not a primary yet"
    follows = info["role"] == "slave" and info["master_port"] == primary_port
    if follows and info["master_link_status"] == "up":
        return ""
    return f"{server} is not connected to the primary"
