"""A cluster whose nodes clients can reach only through proxies, as behind NAT."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

from meteor_py.testing import Cluster
from tests.support.proxy import Proxy
from tests.support.servers import HOST


class ProxiedCluster:
    """A proxy in front of each primary of a cluster.

    with ProxiedCluster(cluster) as proxied, meteor.connect(proxied.url) as m:
        ...
    """

    def __init__(self, cluster: Cluster) -> None:
        self._stack = ExitStack()
        #: Maps the address that each node announces to the address at which clients reach it.
        self.remap: dict[tuple[str, int], tuple[str, int]] = {}
        self.proxies: list[Proxy] = []
        self._ports = [node.port for node in cluster.primaries]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for port in self._ports:
                proxy = stack.enter_context(Proxy(HOST, port))
                self.proxies.append(proxy)
                self.remap[HOST, port] = HOST, proxy.port
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def seed_url(self) -> str:
        """The address of the first proxy. Clients need ``remap`` as well."""
        return f"redis+cluster://{HOST}:{self.proxies[0].port}"

    @property
    def url(self) -> str:
        """The address of the first proxy, with ``remap`` as a parameter."""
        pairs = [f"{a}:{b}={c}:{d}" for (a, b), (c, d) in self.remap.items()]
        return f"{self.seed_url}?remap={','.join(pairs)}"

    @property
    def requests(self) -> list[int]:
        """Number of requests that passed through each proxy."""
        return [proxy.counters.requests for proxy in self.proxies]
