"""A move of slots to another node of a test cluster, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from meteor_py.testing.cluster_node import Node, owner_of
from meteor_py.testing.server import HOST, plain_client
from meteor_py.testing.waiting import eventually

#: Timeout in seconds for one MIGRATE, and for one atomic move.
MIGRATE_S = 60.0

#: Seconds to wait until the target of a move knows the sources' epochs. Usually, it knows them.
_EPOCH_S = 20.0

#: Default number of keys per MIGRATE.
STEP_KEYS = 100

#: States of an atomic move that ended without moving anything.
_FAILED = (b"failed", b"cancelled")


class SlotMove:
    """A slot move that a test controls step by step, with the commands of a resharding tool.

    Call ``begin()``, then ``migrate()`` until it returns 0, then ``assign()``. A test that stops in
    between leaves the slots half-moved, like a resharding tool that dies. ``finish()`` repairs
    that, even after a failover of the source. A move cannot be undone, because the owner does not
    accept keys for a slot that it is migrating.
    """

    def __init__(self, nodes: Sequence[Node], slots: Iterable[int], target: Node) -> None:
        self._nodes = nodes
        self.slots = sorted(slots)
        self.target = target
        #: The slots that the target does not own yet, grouped by their owner.
        self._parts = self._by_owner()

    def begin(self) -> None:
        """Mark the slots as migrating on their owners, and as importing on the target."""
        for source, slots in self._parts:
            _setslot(self.target, slots, "IMPORTING", source.id)
            _setslot(source, slots, "MIGRATING", self.target.id)

    def migrate(self, keys: int = STEP_KEYS) -> int:
        """Move up to ``keys`` keys; return the number moved, which is 0 if none are left.

        Raises:
            redis.ResponseError: A node refused. BUSYKEY means that a key exists on both nodes.
        """
        for source, slots in self._parts:
            for slot in slots:
                moved = _migrate(source, self.target, slot, keys)
                if moved:
                    return moved
        return 0

    def finish(self) -> None:
        """Move the remaining keys, and tell all primaries that the target owns the slots.

        Works no matter at which point the move was abandoned.
        """
        self._parts = self._by_owner()
        for source, slots in self._parts:
            # After a failover of the source, a Redis 7.0 target may know no owner of the slot,
            # because it ignores the new owner's claim to a slot that it is importing.
            _setslot(self.target, slots, "NODE", source.id)
        self.begin()
        while self.migrate():
            pass
        self.assign()

    def assign(self) -> None:
        """Make the target the owner of the slots, whose keys must all have been moved."""
        self._wait_for_epochs()
        # Start with the target, so that every slot always has an owner.
        first = [self.target, *(source for source, _ in self._parts)]
        for node in first:
            _setslot(node, self.slots, "NODE", self.target.id)
        for node in self._nodes:
            if node not in first and node.running and not node.view()[node.id].primary:
                _setslot(node, self.slots, "NODE", self.target.id)

    def _wait_for_epochs(self) -> None:
        """Wait until the target knows the sources' epochs, because it takes a higher one.

        Otherwise, a message that a source has sent before it gives up the slots can take them back
        from the target. No node would own them then, for ever.
        """
        newest = max((source.epochs()[0] for source, _ in self._parts), default=0)
        eventually(
            lambda: self.target.epochs()[1] >= newest,
            _EPOCH_S,
            f"{self.target} does not know epoch {newest}",
        )

    def run_atomically(self) -> None:
        """Move the slots with ``CLUSTER MIGRATESLOTS``, and wait until they have moved.

        Raises:
            redis.ResponseError: The server refused the command, or does not support it (Redis, and
                Valkey before version 9).
            RuntimeError: The move failed or was cancelled.
        """
        for source, slots in self._parts:
            ranges = [bound for each in _ranges(slots) for bound in ("SLOTSRANGE", *each)]
            source.ask("CLUSTER", "MIGRATESLOTS", *ranges, "NODE", self.target.id)
            self._wait_for_atomic_move(source, frozenset(slots))

    def _wait_for_atomic_move(self, source: Node, slots: frozenset[int]) -> None:
        def moved() -> bool:
            if slots <= self.target.own_slots() and not slots & source.own_slots():
                return True
            newest: Any = source.ask("CLUSTER", "GETSLOTMIGRATIONS")[0]
            job = dict(zip(newest[::2], newest[1::2], strict=True))
            if job[b"state"] in _FAILED:
                raise RuntimeError(f"The move to {self.target} failed: {job[b'message'].decode()}")
            return False

        eventually(moved, MIGRATE_S, f"the slots did not move to {self.target}")

    def _by_owner(self) -> list[tuple[Node, list[int]]]:
        """Return the slots that the target does not own yet, grouped by their owner."""
        left = set(self.slots) - self.target.own_slots()
        found: list[tuple[Node, list[int]]] = []
        while left:
            owner = owner_of(min(left), self._nodes)
            slots = left & owner.own_slots()
            found.append((owner, sorted(slots)))
            left -= slots
        return found


def _setslot(node: Node, slots: Sequence[int], *state: str) -> None:
    with plain_client(node.url) as client:
        pipeline = client.pipeline(transaction=False)
        for slot in slots:
            pipeline.execute_command("CLUSTER", "SETSLOT", slot, *state)
        pipeline.execute()


def _migrate(source: Node, target: Node, slot: int, count: int) -> int:
    with plain_client(source.url, socket_timeout=MIGRATE_S + 1) as client:
        keys: list[bytes] = client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, count)
        if keys:
            limit_ms = round(MIGRATE_S * 1000)
            client.execute_command("MIGRATE", HOST, target.port, "", 0, limit_ms, "KEYS", *keys)
        return len(keys)


def _ranges(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Group sorted slots into ranges, each with its first and last slot.

    >>> _ranges([1, 2, 3, 7])
    [(1, 3), (7, 7)]
    """
    found: list[tuple[int, int]] = []
    for slot in slots:
        if found and found[-1][1] == slot - 1:
            found[-1] = (found[-1][0], slot)
        else:
            found.append((slot, slot))
    return found
