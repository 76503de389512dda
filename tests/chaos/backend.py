"""The servers in a run (a single one or a cluster), and the proxies between them and a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from meteor_py import testing
from meteor_py.testing import Cluster, Node
from tests.chaos.worker_config import STREAM
from tests.support.proxy import Direction, Proxy
from tests.support.servers import HOST, Server, binaries

#: With these options, acknowledged writes survive if the server is killed.
PERSISTENT = ("--appendonly", "yes", "--appendfsync", "always")
#: Longer than any fault, so that no fault triggers an automatic failover, which could lose records.
NODE_TIMEOUT_S = 30.0


class Backend(Protocol):
    """How a run and its nemesis access the servers."""

    @property
    def url(self) -> str: ...

    @property
    def server(self) -> testing.Server:
        """The server that currently has the stream."""

    @property
    def directory(self) -> Path:
        """A directory that is removed with the servers."""

    @property
    def cluster(self) -> Cluster | None: ...

    def open_proxies(self, stack: ExitStack) -> Proxies: ...


class Proxies:
    """One worker's proxies, one for each server. All faults except ``isolate`` affect them all."""

    def __init__(self, by_port: dict[int, Proxy]) -> None:
        self._by_port = by_port

    @classmethod
    def to(cls, ports: Sequence[int], stack: ExitStack) -> Proxies:
        return cls({port: stack.enter_context(Proxy(HOST, port)) for port in ports})

    @property
    def url(self) -> str:
        """The proxy's address, if there is a single server."""
        (proxy,) = self._by_port.values()
        return proxy.url

    @property
    def remap(self) -> dict[int, int]:
        """Maps each server's port to the port of its proxy."""
        return {port: proxy.port for port, proxy in self._by_port.items()}

    def _each(self, action: Callable[[Proxy], None]) -> None:
        for proxy in self._by_port.values():
            action(proxy)

    def cut(self) -> None:
        self._each(lambda proxy: proxy.cut())

    def cut_after_request(self, n: int = 1, match: bytes = b"") -> None:
        self._each(lambda proxy: proxy.cut_after_request(n, match))

    def cut_mid_reply(self, after_bytes: int) -> None:
        self._each(lambda proxy: proxy.cut_mid_reply(after_bytes))

    def stall(self, direction: Direction = "both") -> None:
        self._each(lambda proxy: proxy.stall(direction))

    def delay(self, seconds: float) -> None:
        self._each(lambda proxy: proxy.delay(seconds))

    def chunk(self, n_bytes: int) -> None:
        self._each(lambda proxy: proxy.chunk(n_bytes))

    def refuse(self) -> None:
        self._each(lambda proxy: proxy.refuse())

    def heal(self) -> None:
        self._each(lambda proxy: proxy.heal())

    def isolate(self, port: int) -> None:
        """Cut the worker off from one server until ``heal()`` is called."""
        self._by_port[port].refuse()
        self._by_port[port].cut()


class SingleServer:
    def __init__(self, kind: str, stack: ExitStack) -> None:
        self.server = stack.enter_context(Server(binaries()[kind], *PERSISTENT))
        self.url = self.server.url
        self.directory = self.server.directory
        self.cluster = None

    def open_proxies(self, stack: ExitStack) -> Proxies:
        return Proxies.to([self.server.port], stack)


class ClusterOfServers:
    """Three primaries, each with a replica."""

    def __init__(self, kind: str, stack: ExitStack) -> None:
        self.cluster: Cluster = stack.enter_context(
            Cluster(
                replicas=1, args=PERSISTENT, program=binaries()[kind], node_timeout_s=NODE_TIMEOUT_S
            )
        )
        self.url = self.cluster.url
        self.directory = self.cluster.nodes[0].directory

    @property
    def server(self) -> Node:
        return self.cluster.owner(STREAM)

    def open_proxies(self, stack: ExitStack) -> Proxies:
        return Proxies.to([node.port for node in self.cluster.nodes], stack)
