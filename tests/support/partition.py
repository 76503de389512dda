"""A cluster whose nodes can be cut off from each other, while clients still reach all of them.

Every node announces the ports of two proxies: one for its bus port, and one for its client port,
which its replicas use. Each node connects from its own address (127.0.0.2 and so on), so that the
proxies know which node connects. Clients use the nodes' real ports, which they learn from `remap`.
"""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress
from pathlib import Path

from meteor_py.testing import Cluster, Node
from tests.support.servers import HOST, free_port

_READ_BYTES = 1 << 16
_STEP_S = 0.05


class Door:
    """A proxy for one port of a node. It closes connections from nodes that are cut off from it."""

    def __init__(self, network: Network, owner: str, target_port: int) -> None:
        self._network, self._owner, self._target_port = network, owner, target_port
        self.port = free_port()
        self._listener = socket.create_server((HOST, self.port), backlog=128)
        self._pairs: list[tuple[socket.socket, socket.socket, str]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"door-{self.port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(10)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._stopped.is_set():
                for key, _ in selector.select(_STEP_S):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    else:
                        self._forward(selector, key.fileobj, key.data)
                self._close_cut(selector)
            for one, other, _ in self._pairs:
                one.close()
                other.close()
            self._listener.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        inner, (source, _) = self._listener.accept()
        if self._network.separates(source, self._owner):
            inner.close()
            return
        try:
            outer = socket.create_connection((HOST, self._target_port), timeout=1)
        except OSError:
            inner.close()
            return
        for one, other in ((inner, outer), (outer, inner)):
            one.settimeout(5)
            selector.register(one, selectors.EVENT_READ, other)
        self._pairs.append((inner, outer, source))

    def _forward(self, selector: selectors.BaseSelector, one: object, other: object) -> None:
        assert isinstance(one, socket.socket)
        assert isinstance(other, socket.socket)
        data = b""
        with suppress(OSError):
            data = one.recv(_READ_BYTES)
            other.sendall(data)
        if not data:
            self._drop(selector, next(pair for pair in self._pairs if one in pair))

    def _close_cut(self, selector: selectors.BaseSelector) -> None:
        for pair in list(self._pairs):
            if self._network.separates(pair[2], self._owner):
                self._drop(selector, pair)

    def _drop(
        self, selector: selectors.BaseSelector, pair: tuple[socket.socket, socket.socket, str]
    ) -> None:
        self._pairs.remove(pair)
        for each in pair[:2]:
            with suppress(KeyError, ValueError):
                selector.unregister(each)
            each.close()


class Network:
    """Knows which nodes are cut off from the others. A node is identified by its source address."""

    def __init__(self) -> None:
        self._cut: frozenset[str] = frozenset()

    def separates(self, source: str, target: str) -> bool:
        return (source in self._cut) != (target in self._cut)

    def cut_off(self, addresses: set[str]) -> None:
        """Let these nodes reach only each other."""
        self._cut = frozenset(addresses)

    def heal(self) -> None:
        self._cut = frozenset()


class PartitionedNode(Node):
    """A node that other nodes reach only through two `Door` proxies."""

    def __init__(
        self, network: Network, number: int, program: str | Path | None, timeout_s: float
    ) -> None:
        self.source = f"127.0.0.{number + 2}"
        super().__init__(("--bind-source-addr", self.source), program, timeout_s)
        self.front = Door(network, self.source, self.port)
        self.bus = Door(network, self.source, self.bus_port)
        self.args = (
            *self.args,
            *("--cluster-announce-port", str(self.front.port)),
            *("--cluster-announce-bus-port", str(self.bus.port)),
        )

    @property
    def announced(self) -> str:
        return f"{HOST}:{self.front.port}@{self.bus.port}"

    def close(self) -> None:
        super().close()
        self.front.close()
        self.bus.close()


class PartitionedCluster(Cluster):
    """Three primaries, each with a replica, in a network that can be divided."""

    def __init__(self, program: str | Path | None, node_timeout_s: float) -> None:
        super().__init__(replicas=1, program=program, node_timeout_s=node_timeout_s)
        self.network = Network()

    @property
    def remap(self) -> dict[tuple[str, int], tuple[str, int]]:
        """Maps the addresses that the nodes announce to those at which clients reach them."""
        doors = {node.front.port: node.port for node in self._doors()}
        return {(HOST, door): (HOST, port) for door, port in doors.items()}

    def cut_off(self, node: Node) -> None:
        """Separate a node from all others. Clients still reach it."""
        self.network.cut_off({each.source for each in self._doors() if each is node})

    def _doors(self) -> list[PartitionedNode]:
        return [node for node in self.nodes if isinstance(node, PartitionedNode)]

    def _new_node(self) -> Node:
        return PartitionedNode(self.network, len(self.nodes), self._program, self._node_timeout_s)
