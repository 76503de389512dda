"""Twenty slot moves under load; part of ``make chaos``.

A publisher, a group, two shared consumers and a peer group work while the slots of the stream and
of the peer group move: at once, slowly, by a resharding tool that dies and is repaired later, and
on Valkey also atomically. The log must equal what was acknowledged, and every consumer must get
every record once and in order. The longest pause of the publisher is printed.
"""

from __future__ import annotations

import random
import time

import pytest

import meteor_py as meteor
from meteor_py.testing import Cluster, Node
from tests.conftest import require_redis
from tests.support.cluster_load import PEERS, STREAM, Load
from tests.support.servers import binaries

MOVES = 20
#: A slow move rests this long in seconds at its beginning, and then between keys.
SLOW_S = (0.3, 0.02)
#: Seconds after which an abandoned move is repaired.
ABANDONED_S = 1.0


class Mover:
    """Moves the slots of the stream and of the peer group, each time in another way."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster, self._rng = cluster, rng
        self.took_s: dict[str, list[float]] = {}

    def move(self, how: str) -> None:
        for name in (STREAM, PEERS):
            slot = self._cluster.slot(name)
            target = self._rng.choice(self._cluster.others(self._cluster.owner(slot)))
            began = time.monotonic()
            getattr(self, how)(slot, target)
            if name == STREAM:
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


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_twenty_slot_moves_lose_duplicate_and_reorder_nothing(
    kind: str, rng: random.Random, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "redis":
        require_redis()
    ways = ["fast", "slow", "abandoned", *(["atomic"] if kind == "valkey" else [])]
    with (
        Cluster(program=binaries()[kind]) as cluster,
        meteor.connect(cluster.url) as client,
    ):
        load, mover = Load(client), Mover(cluster, rng)
        with load:
            for number in range(MOVES):
                mover.move(ways[number % len(ways)])
                assert load.goes_on(), f"nothing was acknowledged after move {number}"
        load.check_nothing_lost()
    with capsys.disabled():
        moves = ", ".join(
            f"{how} {min(took) * 1000:.0f} to {max(took) * 1000:.0f} ms"
            for how, took in mover.took_s.items()
        )
        print(
            f"\n{kind}: {MOVES} moves ({moves}), {len(load.publishing.acked):,} records, longest "
            f"pause of the publisher {load.publishing.longest_pause_s * 1000:.0f} ms, "
            f"{load.peer.sent} messages"
        )
