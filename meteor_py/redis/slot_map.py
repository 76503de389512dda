"""The topology of a cluster: a map from slots to nodes.

meteor_py does not use redis-py's ``RedisCluster``, which resends commands after lost replies and
follows ASK redirects. Both would break exactly-once delivery.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from meteor_py.errors import AccessDenied, ConnectionFailed, MeteorError, ServerRefused
from meteor_py.redis.address import Address, Node
from meteor_py.redis.connection import Connection
from meteor_py.redis.topology import REFRESH_S, Topology, slot_of
from meteor_py.runtime.locks import LockBusy, run_locked

#: Seconds to wait for one node's reply before asking the next node.
_ASK_S = 1.0
#: Host values in a CLUSTER SLOTS reply that stand for the node that sent the reply.
_SAME_HOST = (b"", b"?", None)


class _Table(NamedTuple):
    """Slot ranges and their nodes, sorted by slot."""

    firsts: list[int]
    lasts: list[int]
    nodes: list[Node]

    def find(self, slot: int) -> Node | None:
        at = bisect_right(self.firsts, slot) - 1
        return self.nodes[at] if at >= 0 and slot <= self.lasts[at] else None


class SlotMap(Topology):
    """The slots of a cluster, as its nodes report them. Thread-safe, and usable after a fork.

    A MOVED reply corrects one slot at once, and marks the whole map for a refresh.
    """

    is_movable = True
    guards_slots = True

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._table = _Table([], [], [])
        self._moved: dict[int, Node] = {}  # from MOVED replies; newer than the table
        self._ask_first: list[Node] = []  # the most recently confirmed nodes, best first
        self._source: Node | None = None  # the node that sent the table
        #: Nodes that failed, or whose table led to a failure. A node that is cut off from the
        #: others still reports its former slots. These nodes are asked last until another replies.
        self._doubtful: set[Node | None] = set()
        self._is_stale = True
        self._refreshed_at = -REFRESH_S

    def locate(self, tag: str | None) -> Node:
        self._refresh_if_stale()
        if tag is None:
            return self._known_primaries()[0]
        slot = slot_of(tag)
        node = self._moved.get(slot) or self._table.find(slot)
        if node is None:
            self.note_failed(None)
            error = ConnectionFailed(
                f"No node of the cluster at {self._address} serves slot {slot}. Check the cluster "
                "with `redis-cli --cluster check`."
            )
            error.redirected = True
            raise error
        return node

    def locate_each(self, tags: Iterable[str | None]) -> dict[str | None, Node | None]:
        self._refresh_if_stale()
        moved, find = self._moved, self._table.find
        found: dict[str | None, Node | None] = {}
        for tag in tags:
            slot = None if tag is None else slot_of(tag)
            node = None if slot is None else moved.get(slot) or find(slot)
            found[tag] = node or self.locate(tag)
        return found

    def primaries(self) -> Sequence[Node]:
        self._refresh_if_stale()
        return sorted(set(self._known_primaries()))

    def note_moved(self, slot: int, node: Node) -> None:
        self._moved[slot] = node
        self._prefer(node)
        self._is_stale = True

    def note_failed(self, node: Node | None) -> None:
        self._is_stale = True
        self._doubtful = {*self._doubtful, node, self._source}
        self._ask_first = [known for known in self._ask_first if known not in self._doubtful]
        for slot, other in list(self._moved.items()):
            if other == node:
                self._moved.pop(slot, None)

    def _known_primaries(self) -> list[Node]:
        """Return the nodes in the map, starting with the preferred ones."""
        nodes = list(dict.fromkeys(self._table.nodes))
        return sorted(nodes, key=lambda node: node not in self._ask_first)

    def _prefer(self, node: Node) -> None:
        self._ask_first = [node, *(known for known in self._ask_first if known != node)][:3]

    def _refresh_if_stale(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.RLock()
        if self._is_usable():
            return
        try:
            run_locked(self._lock, self._timeout_s, self._refresh)
        except LockBusy:
            if not self._table.nodes:
                raise ConnectionFailed(
                    f"Another thread is still fetching the slots of the cluster at {self._address}."
                ) from None

    def _is_usable(self) -> bool:
        if not self._table.nodes:
            return False
        return not self._is_stale or time.monotonic() - self._refreshed_at < REFRESH_S

    def _refresh(self) -> None:
        """Ask one node after another for the map until one replies. If none does, keep the map."""
        if self._is_usable():
            return  # another thread has just refreshed the map
        deadline = time.monotonic() + self._timeout_s
        known = dict.fromkeys([*self._ask_first, *self._table.nodes, *self._address.seeds])
        nodes = sorted(known, key=lambda node: node in self._doubtful)
        share_s = max(_ASK_S, self._timeout_s / len(nodes))
        failure: MeteorError | None = None
        # Clear the flag first: another thread may set it again while this one asks.
        self._is_stale = False
        for node in nodes:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            try:
                table = self._ask(node, min(left_s, share_s))
            except MeteorError as error:
                if failure is None or isinstance(failure, ConnectionFailed):
                    failure = error
                continue
            self._table = table
            for slot, other in list(self._moved.items()):
                if table.find(slot) == other:
                    self._moved.pop(slot, None)
            self._source = node
            if node not in self._doubtful:
                self._doubtful = set()
                self._prefer(node)
            self._refreshed_at = time.monotonic()
            return
        self._is_stale = True
        self._refreshed_at = time.monotonic()
        if not self._table.nodes:
            raise self._unreachable(failure)

    def _ask(self, node: Node, timeout_s: float) -> _Table:
        connection = Connection(self._address.at(node), timeout_s)
        try:
            rows: list[Any] = connection.call("CLUSTER", "SLOTS")
        finally:
            connection.close()
        if not rows:
            raise ConnectionFailed(
                f"The cluster at {self._address} has no slots assigned. Create the cluster with "
                "`redis-cli --cluster create`."
            )
        rows.sort(key=lambda row: int(row[0]))
        nodes = [_node(row[2], node) for row in rows]
        return _Table([int(row[0]) for row in rows], [int(row[1]) for row in rows], nodes)

    def _unreachable(self, failure: MeteorError | None) -> MeteorError:
        if isinstance(failure, AccessDenied):
            return AccessDenied(
                f"{failure} On a cluster, every user needs the +cluster|slots permission.",
                code=failure.code,
            )
        if isinstance(failure, ServerRefused):
            return ServerRefused(
                f"{failure}. The server does not seem to be a cluster node. For a single server, "
                "use a redis:// or rediss:// address.",
                code=failure.code,
            )
        return ConnectionFailed(f"No node of the cluster at {self._address} replied. {failure}")


def _node(primary: list[Any], asked: Node) -> Node:
    host = asked[0] if primary[0] in _SAME_HOST else primary[0].decode()
    return host, int(primary[1])
