"""A real cluster for tests. Tests can move its slots and make its nodes fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from meteor_py.testing.cluster_node import Node, View, owner_of
from meteor_py.testing.server import HOST
from meteor_py.testing.server_group import STABLE_S, ServerGroup
from meteor_py.testing.slot_move import SlotMove
from meteor_py.testing.waiting import eventually


class Cluster(ServerGroup):
    """A cluster on 127.0.0.1 whose primaries share the slots equally.

    The nodes write nothing to disk unless ``args`` says so, and die with the test process. Starting
    takes 2.1 s, because a primary accepts no writes in its first two seconds. A cluster counts as
    ``stable`` even while a slot is being moved; see ``repair()``. Not thread-safe, except for
    ``url``, ``slot()``, ``owner()`` and the nodes' ``client()``.

    >>> with Cluster(primaries=3) as cluster:
    ...     slot = cluster.slot("orders")
    ...     source = cluster.owner(slot)
    ...     target = next(node for node in cluster.primaries if node is not source)
    ...     cluster.move_slot(slot, target)
    ...     cluster.owner(slot) is target
    True
    """

    def __init__(
        self,
        primaries: int = 3,
        replicas: int = 0,
        *,
        args: Sequence[str] = (),
        program: str | Path | None = None,
        node_timeout_s: float = 2.0,
    ) -> None:
        """Configure the cluster. ``start()`` or ``with`` starts it.

        Args:
            primaries: Number of primaries. A failover needs three, because the primaries vote.
            replicas: Number of replicas per primary.
            args: Options for every server, as on the command line.
            program: The server program, such as "redis-server". None means ``$METEOR_SERVER`` or
                the bundled Valkey.
            node_timeout_s: Seconds of silence after which the nodes declare another node dead. If
                it is less than 1, a busy machine can cause failovers.
        """
        if primaries < 1 or replicas < 0:
            raise ValueError("primaries must be at least 1, and replicas must be at least 0.")
        self._shape = (primaries, replicas)
        self._args = tuple(args)
        self._program = program
        self._node_timeout_s = node_timeout_s
        #: All nodes that were not removed: the initial primaries, their replicas, then added nodes.
        self.nodes: list[Node] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.nodes)} nodes {self.url}>"

    # -- use -----------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The address for ``meteor_py.connect()``. It lists up to three nodes."""
        return "redis+cluster://" + ",".join(node.address for node in self.nodes[:3])

    @property
    def primaries(self) -> list[Node]:
        """The nodes that own slots, sorted by their first slot.

        This includes a dead primary until a replica has taken over its slots.
        """
        view = self._view()
        owners = [node for node in self.nodes if node.id in view and view[node.id].slots]
        return sorted(owners, key=lambda node: min(view[node.id].slots))

    def replicas_of(self, primary: Node) -> list[Node]:
        """Return the running replicas of a primary."""
        view = self._view()
        return [
            node
            for node in self.nodes
            if node.running and node.id in view and view[node.id].primary == primary.id
        ]

    @staticmethod
    def slot(key: str | bytes) -> int:
        """Return the hash slot of a key. For a stream's keys, pass the stream's name."""
        return int(key_slot(key.encode() if isinstance(key, str) else key))

    def owner(self, slot: int | str | bytes) -> Node:
        """Return the primary that owns a slot. Also accepts a key or a stream's name.

        Raises:
            LookupError: No running node owns the slot.
        """
        number = slot if isinstance(slot, int) else self.slot(slot)
        return owner_of(number, self.nodes)

    def others(self, node: Node) -> list[Node]:
        """Return all primaries except ``node``. Its slots can move to any of them."""
        return [each for each in self.primaries if each is not node]

    def flush(self) -> None:
        """Delete all data from the primaries, and thereby from their replicas."""
        for node in self.primaries:
            node.flush()

    def repair(self) -> None:
        """Resume paused nodes, restart stopped ones, finish slot moves, and wait for stability.

        A node that was killed comes back empty, unless its options make it write to disk or it
        becomes a replica.
        """
        stopped = [node for node in self.nodes if not node.running]
        for node in self.nodes:
            if node not in stopped:
                node.resume()
        for node in stopped:
            node.restart()
        if stopped:  # the restarted nodes must know their roles before slots can move
            self.wait_until_stable()
        for slot, target in self._moving_slots().items():
            SlotMove(self.nodes, [slot], target).finish()
        self.wait_until_stable()

    # -- changes -------------------------------------------------------------------------------

    def move_slot(
        self,
        slot: int,
        to: Node,
        *,
        atomic: bool = False,
        keys_per_step: int = 100,
        on_step: Callable[[], object] | None = None,
    ) -> None:
        """Move a slot and its keys to another primary, like ``redis-cli --cluster reshard``.

        Args:
            slot: The slot. Moving a slot to its owner does nothing.
            to: The new owner.
            atomic: Use ``CLUSTER MIGRATESLOTS``, which needs Valkey 9 or later. The other options
                then have no effect.
            keys_per_step: Maximum number of keys per ``MIGRATE``.
            on_step: Called when the move begins and after each ``MIGRATE``. A test can sleep here
                to slow the move down, or publish records.

        Raises:
            redis.ResponseError: A node refused a command, for example with BUSYKEY. The slot stays
                half-moved.
            RuntimeError: An atomic move failed or was cancelled.
        """
        self.move_slots([slot], to, atomic=atomic, keys_per_step=keys_per_step, on_step=on_step)

    def move_slots(
        self,
        slots: Iterable[int],
        to: Node,
        *,
        atomic: bool = False,
        keys_per_step: int = 100,
        on_step: Callable[[], object] | None = None,
    ) -> None:
        """Move slots to another primary. See ``move_slot()``."""
        own = to.own_slots()
        move = SlotMove(self.nodes, [slot for slot in slots if slot not in own], to)
        if not move.slots:
            return
        if atomic:
            move.run_atomically()
            return
        move.begin()
        while True:
            if on_step is not None:
                on_step()
            if not move.migrate(keys_per_step):
                break
        move.assign()

    def begin_move(self, slot: int, to: Node) -> SlotMove:
        """Begin to move a slot. Call ``SlotMove.finish()`` to complete the move.

        A test that never calls ``finish()`` leaves the slot half-moved, like a resharding tool that
        dies.
        """
        move = SlotMove(self.nodes, [slot], to)
        move.begin()
        return move

    def failover(
        self, node: Node, how: Literal["planned", "force", "takeover"] = "planned"
    ) -> Node:
        """Promote a replica, and wait until all running nodes know the new primary.

        For replicas of the same primary, the primaries vote only once every two node timeouts. A
        second failover within that time takes up to five seconds longer, and writes are paused
        meanwhile.

        Args:
            node: The replica to promote, or a primary whose first replica is to be promoted.
            how: "planned" waits until the replica has all data, so nothing is lost. "force" and
                "takeover" are the options of ``CLUSTER FAILOVER`` for a primary that is down.

        Returns:
            The new primary.

        Raises:
            LookupError: The primary has no running replica.
            AssertionError: The failover took too long.
        """
        replica = node
        if not self._view()[node.id].primary:
            replica = next(iter(self.replicas_of(node)), node)
            if replica is node:
                raise LookupError(f"{node} has no running replica.")
        option = [] if how == "planned" else [how.upper()]

        def known() -> bool:
            views = [each.view() for each in self.nodes if each.running]
            return all(not view[replica.id].primary for view in views)

        replica.ask("CLUSTER", "FAILOVER", *option)
        # Send cheap commands one at a time, because tests measure how long clients have to wait.
        eventually(
            lambda: replica.ask("ROLE")[0] == b"master",
            STABLE_S,
            f"{replica} did not become a primary",
        )
        eventually(known, STABLE_S, f"{replica} is a primary, but some nodes do not know it yet")
        return replica

    def wait_for_failover(self, dead: Node, timeout_s: float = STABLE_S) -> Node:
        """Wait until a replica has taken over the slots of a dead primary; return the replica.

        Raises:
            AssertionError: The timeout expired.
        """
        successors = [
            node for node in self.nodes if node is not dead and self._primary_of(node) == dead.id
        ]

        def successor() -> Node | None:
            return next((node for node in successors if node.own_slots()), None)

        found = eventually(successor, timeout_s, f"no replica replaced {dead}")
        assert found is not None
        return found

    def add_node(self, replica_of: Node | None = None) -> Node:
        """Start a node and add it to the cluster, as a primary without slots or as a replica."""
        node = self._add_node().start()
        node.id = node.ask("CLUSTER", "MYID").decode()
        known = next(each for each in self.nodes if each.running)
        node.ask("CLUSTER", "MEET", HOST, known.port, known.bus_port)
        members = {each.id for each in self.nodes}

        def met() -> bool:
            return all(members <= each.view().keys() for each in self.nodes if each.running)

        eventually(met, STABLE_S, f"{node} did not join {self}")
        if replica_of is not None:
            node.ask("CLUSTER", "REPLICATE", replica_of.id)
        self.wait_until_stable()
        return node

    def remove_node(self, node: Node) -> None:
        """Move a node's slots to the other primaries, stop it, and remove it from the cluster."""
        others = self.others(node)
        slots = sorted(node.own_slots())
        share = -(-len(slots) // len(others))
        for number, other in enumerate(others):
            self.move_slots(slots[number * share : (number + 1) * share], other)
        self.nodes.remove(node)
        node.close()
        for each in self.nodes:
            if each.running and node.id in each.view():
                each.ask("CLUSTER", "FORGET", node.id)
        self.wait_until_stable()

    # -- internals -----------------------------------------------------------------------------

    def _all_servers(self) -> list[Node]:
        return self.nodes

    def _forget_servers(self) -> None:
        self.nodes.clear()

    def _add_node(self) -> Node:
        self.nodes.append(self._new_node())
        return self.nodes[-1]

    def _new_node(self) -> Node:
        return Node(self._args, self._program, self._node_timeout_s)

    def _start_servers(self) -> None:
        primaries, replicas = self._shape
        for _ in range(primaries * (1 + replicas)):
            self._add_node()
        for node in self.nodes:
            # Nodes that know each other from the start skip the handshake, which takes seconds.
            lines = [self._line(number, node) for number in range(len(self.nodes))]
            node.write_view(lines, epoch=primaries)
        for node in self.nodes:
            node.start()

    def _line(self, number: int, reader: Node) -> str:
        """Return the line that describes a node in ``reader``'s nodes file."""
        primaries = self._shape[0]
        node, primary = self.nodes[number], number % primaries
        myself = "myself," if node is reader else ""
        place = f"{node.id} {node.announced} {myself}"
        if number >= primaries:
            return f"{place}slave {self.nodes[primary].id} 0 0 {primary + 1} connected"
        first, end = (REDIS_CLUSTER_HASH_SLOTS * n // primaries for n in (number, number + 1))
        return f"{place}master - 0 0 {primary + 1} connected {first}-{end - 1}"

    def _view(self) -> dict[str, View]:
        """Return the first available node's view of the cluster.

        Raises:
            LookupError: No node replies.
        """
        for node in self.nodes:
            if node.running:
                try:
                    return node.view()
                except redis.RedisError:
                    continue  # paused or dying
        raise LookupError(f"No node of {self} replies.")

    def _primary_of(self, node: Node) -> str:
        known = self._view().get(node.id)
        return known.primary if known is not None else ""

    def _moving_slots(self) -> dict[int, Node]:
        """Return the slots that are being moved, each with its target node."""
        found: dict[int, Node] = {}
        by_id = {node.id: node for node in self.nodes}
        for node in self.nodes:
            own = node.view()[node.id]
            if own.primary:
                continue  # in Valkey, a replica also lists its primary's slot moves
            found.update(dict.fromkeys(own.importing, node))
            for slot, target in own.migrating.items():
                found.setdefault(slot, by_id[target])
        return found

    def _obstacle(self) -> str:
        views: dict[str, dict[str, View]] = {}
        for node in self.nodes:
            if not node.running:
                return f"{node} is not running"
            try:
                state = node.ask("CLUSTER", "INFO", timeout_s=2).decode().splitlines()[0]
                if state != "cluster_state:ok":
                    return f"{node} reports {state}"
                views[node.id] = node.view()
                replication = node.info("replication")
            except redis.RedisError as error:
                return f"{node} does not reply: {error}"
            if replication["role"] == "slave" and replication["master_link_status"] != "up":
                return f"{node} is not connected to its primary"
        members = {node.id for node in self.nodes}
        for node in self.nodes:
            mine = views[node.id]
            if mine.keys() != members:
                return f"{node} knows {len(mine)} nodes, not {len(members)}"
            for other in self.nodes:
                seen, actual = mine[other.id], views[other.id][other.id]
                if seen.failed or seen[:2] != actual[:2] or seen.slots != actual.slots:
                    return f"{node} has an outdated view of {other}"
        return ""


class ClusterFactory(Protocol):
    """The type of the ``meteor_private_cluster`` fixture, which starts a cluster for one test."""

    def __call__(
        self,
        primaries: int = 3,
        replicas: int = 0,
        *,
        args: Sequence[str] = (),
        program: str | Path | None = None,
        node_timeout_s: float = 2.0,
    ) -> Cluster: ...
