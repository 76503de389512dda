"""The topology of a cluster: a map from slots to nodes.

meteor_py does not use redis-py's ``RedisCluster``, which resends commands after lost replies and
follows ASK redirects. Both would break exactly-once delivery.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from meteor_py.errors import AccessDenied, ConnectionFailed, MeteorError, ServerRefused
from meteor_py.redis.address import Address, Node
from meteor_py.redis.connection import Connection
from meteor_py.redis.topology import RefreshedTopology, Search, slot_of

#: Maximum number of times to ask again while the map contradicts a MOVED reply.
_CONTRADICTIONS = 10
#: Seconds to wait for one node's reply before asking the next node: at most this long if a map is
#: known, otherwise at least this long if that much time is left.
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


class SlotMap(RefreshedTopology):
    """The slots of a cluster, as its nodes report them. Thread-safe, and usable after a fork.

    A MOVED reply corrects one slot at once, and marks the whole map for a refresh.
    """

    guards_slots = True

    def __init__(self, address: Address) -> None:
        super().__init__()
        self._address = address
        self._table = _Table([], [], [])
        self._moved: dict[int, Node] = {}  # from MOVED replies; newer than the table
        self._ask_first: list[Node] = []  # the most recently confirmed nodes, best first
        self._source: Node | None = None  # the node that sent the table
        #: Nodes that failed, or whose table led to a failure. A node that is cut off from the
        #: others still reports its former slots. These nodes are asked last until another node
        #: replies.
        self._doubtful: set[Node | None] = set()

    def locate(self, tag: str | None, search: Search) -> Node:
        self._refresh_if_stale(search)
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

    def locate_each(
        self, tags: Iterable[str | None], search: Search
    ) -> dict[str | None, Node | None]:
        self._refresh_if_stale(search)
        moved, find = self._moved, self._table.find
        found: dict[str | None, Node | None] = {}
        for tag in tags:
            slot = None if tag is None else slot_of(tag)
            node = None if slot is None else moved.get(slot) or find(slot)
            found[tag] = node or self.locate(tag, search)
        return found

    def primaries(self, search: Search) -> Sequence[Node]:
        self._refresh_if_stale(search)
        return sorted(set(self._known_primaries()))

    def note_moved(self, slot: int, node: Node) -> None:
        self._moved[slot] = node
        self._prefer(node)
        self._is_stale = True
        self._report_all_nodes()

    def note_failed(self, node: Node | None) -> None:
        self._is_stale = True
        self._doubtful = {*self._doubtful, node, self._source}
        self._ask_first = [known for known in self._ask_first if known not in self._doubtful]
        for slot, other in list(self._moved.items()):
            if other == node:
                self._moved.pop(slot, None)

    def _report_all_nodes(self) -> None:
        """Tell the callback of ``on_departure`` which nodes remain.

        If another thread changes them in the meantime, tell it again.
        """
        reported: set[Node] | None = None
        while reported != (nodes := self._all_nodes()):
            self._report_nodes(nodes)
            reported = nodes

    def _all_nodes(self) -> set[Node]:
        # Copy the values with list(), because other threads may change the dict meanwhile.
        return {*self._table.nodes, *list(self._moved.values())}

    def _known_primaries(self) -> list[Node]:
        """Return the nodes in the map, starting with the preferred ones."""
        nodes = list(dict.fromkeys(self._table.nodes))
        return sorted(nodes, key=lambda node: node not in self._ask_first)

    def _prefer(self, node: Node) -> None:
        self._ask_first = [node, *(known for known in self._ask_first if known != node)][:3]

    @property
    def _is_known(self) -> bool:
        return bool(self._table.nodes)

    def _busy(self) -> str:
        return f"Another thread is still fetching the slots of the cluster at {self._address}."

    def _refresh(self, search: Search) -> None:
        known = dict.fromkeys([*self._ask_first, *self._table.nodes, *self._address.seeds])
        nodes = sorted(known, key=lambda node: node in self._doubtful)
        with self._asking():
            found, failure = self._ask_each(nodes, search)
            if found is not None:
                self._adopt(*found)
                return
        self._is_stale = True
        if failure is not None:  # else the caller had no time to ask
            self._timer.note(found_news=False)
        if not self._is_known:
            raise self._unreachable(failure)

    def _ask_each(
        self, nodes: Sequence[Node], search: Search
    ) -> tuple[tuple[_Table, Node] | None, MeteorError | None]:
        """Ask one node after another; return the first map with its sender, or an error."""
        failure: MeteorError | None = None
        for number, node in enumerate(nodes, 1):
            share_s = search.share_s(len(nodes) - number, _ASK_S)
            if self._is_known:  # the caller can do without a new map
                share_s = min(share_s, _ASK_S)
            if share_s <= 0:
                break
            try:
                return (self._ask(node, search, share_s), node), None
            except MeteorError as error:
                search.check()
                self._doubtful = {*self._doubtful, node}
                if failure is None or isinstance(failure, ConnectionFailed):
                    failure = error
        return None, failure

    def _adopt(self, table: _Table, source: Node) -> None:
        self._timer.note(found_news=table != self._table)
        self._table = table
        for slot, other in list(self._moved.items()):
            if table.find(slot) == other:
                self._moved.pop(slot, None)
        if self._moved and self._timer.fruitless < _CONTRADICTIONS:
            self._is_stale = True  # the node that was asked has not heard of the move yet
        self._source = source
        if source not in self._doubtful:
            self._doubtful = set()
            self._prefer(source)
        self._report_all_nodes()

    def _ask(self, node: Node, search: Search, timeout_s: float) -> _Table:
        probe = Connection(self._address.at(node), timeout_s)
        rows: list[Any] = search.ask(probe, lambda connection: connection.call("CLUSTER", "SLOTS"))
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
        why = failure or "The timeout is too short."
        return ConnectionFailed(f"No node of the cluster at {self._address} replied. {why}")


def _node(primary: list[Any], asked: Node) -> Node:
    host = asked[0] if primary[0] in _SAME_HOST else primary[0].decode()
    return host, int(primary[1])
