"""Slot moves in a cluster: fast, slow, atomic, or abandoned halfway and then repaired."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from meteor_py.testing import Cluster, Node

#: The ways to move a slot that each server supports.
WAYS = {
    "redis": ("fast", "slow", "abandoned"),
    "valkey": ("fast", "slow", "abandoned", "atomic"),
}
#: Seconds for which a slow move pauses at its beginning, and then after each key.
SLOW_S = (0.3, 0.02)
#: Seconds after which an abandoned move is repaired.
ABANDONED_S = 1.0


class SlotMover:
    """Moves the slots of streams or peer groups, in various ways."""

    def __init__(self, cluster: Cluster, rng: random.Random, names: Sequence[str]) -> None:
        self._cluster, self._rng, self._names = cluster, rng, names
        #: Durations in seconds of the first slot's moves, for each way of moving.
        self.took_s: dict[str, list[float]] = {}

    def move(self, how: str) -> None:
        for name in self._names:
            slot = self._cluster.slot(name)
            target = self._rng.choice(self._cluster.others(self._cluster.owner(slot)))
            began = time.monotonic()
            getattr(self, how)(slot, target)
            if name == self._names[0]:
                self.took_s.setdefault(how, []).append(time.monotonic() - began)

    def fast(self, slot: int, target: Node) -> None:
        self._cluster.move_slot(slot, target)

    def slow(self, slot: int, target: Node) -> None:
        pauses = iter(SLOW_S)
        last = SLOW_S[-1]
        self._cluster.move_slot(
            slot, target, keys_per_step=1, on_step=lambda: time.sleep(next(pauses, last))
        )

    def abandoned(self, slot: int, target: Node) -> None:
        self._cluster.begin_move(slot, target).migrate(keys=self._rng.randint(0, 4))
        time.sleep(ABANDONED_S)
        self._cluster.repair()

    def atomic(self, slot: int, target: Node) -> None:
        self._cluster.move_slot(slot, target, atomic=True)
