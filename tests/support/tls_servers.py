"""Clusters and sentinels that use TLS among themselves and with clients.

Each server also has a port without TLS, through which the testing kit controls it (``url``).
``port`` is the TLS port, which the servers announce.
"""

from __future__ import annotations

from pathlib import Path

from meteor_py.testing import Cluster, Node, Sentinel, Sentinels, Server
from tests.support.certificates import tls_options
from tests.support.servers import binaries, free_port


class TlsCluster(Cluster):
    """A cluster of three primaries."""

    def __init__(self, folder: Path) -> None:
        super().__init__(program=binaries()["redis"])
        self._folder = folder

    @property
    def url(self) -> str:
        return super().url.replace("redis+", "rediss+")

    def _new_node(self) -> Node:
        node = super()._new_node()
        node.args += (*_listen_with_tls(node, self._folder), "--tls-cluster", "yes")
        return node


class TlsSentinels(Sentinels):
    """A primary with a replica, and three sentinels."""

    def __init__(self, folder: Path) -> None:
        super().__init__(replicas=1, program=binaries()["redis"])
        self._folder = folder

    @property
    def url(self) -> str:
        return super().url.replace("redis+", "rediss+")

    def _new_server(self) -> Server:
        server = super()._new_server()
        server.args += _listen_with_tls(server, self._folder)
        return server

    def _new_sentinel(self) -> Sentinel:
        return _TlsSentinel(self._folder)


class _TlsSentinel(Sentinel):
    def __init__(self, folder: Path) -> None:
        super().__init__(binaries()["redis"])
        self.args = _listen_with_tls(self, folder)

    def _options(self) -> list[str]:
        return [*super()._options(), *self.args]


def _listen_with_tls(server: Server, folder: Path) -> tuple[str, ...]:
    """Choose a port for TLS; return the options that make the server use it."""
    plain = server.port
    server.port = free_port()
    return (
        *("--port", str(plain)),  # overrides the option that the kit derives from server.port
        *tls_options(folder, server.port),
        *("--tls-auth-clients", "no", "--tls-replication", "yes"),
    )
