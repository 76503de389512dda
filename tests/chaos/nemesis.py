"""Faults in workers, connections and the server, in an order fixed by a seed.

The kinds of faults are drawn from a bag that is refilled when it is empty, so all kinds are about
equally frequent. Faults overlap, but each worker, each proxy and the server has at most one at a
time.
"""

from __future__ import annotations

import heapq
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import redis

from meteor_py.redis import keys
from meteor_py.testing import SlotMove
from tests.chaos.backend import Backend
from tests.chaos.history import Writer
from tests.chaos.slot import Slot
from tests.chaos.worker_config import STREAM, RunSignals
from tests.support.proxy import Direction
from tests.support.servers import plain_client

REPLY_S = 2.0
#: Minimum and maximum duration of an archiver's stop at a commit, in lease TTLs. Most stops last
#: long enough for a takeover.
STOPS = (0.8, 2.5)
#: Minimum and maximum duration of an owner's pause after a lost reply, in lease TTLs.
LAPSES = (1.3, 3.0)
#: Minimum and maximum seconds from arming the proxy, which loses the reply, to pausing the owner.
LOSE_S = (0.02, 0.2)
#: Fraction of slot moves that run without a stop, and the maximum number of keys that the other
#: moves transfer before they stop.
FAST_MOVES = 0.3
MOVED_KEYS = 10
SIDES: tuple[Direction, ...] = ("requests", "replies", "both")


class Fault(Protocol):
    def __call__(self) -> bool:
        """Cause the fault; return False if there is currently no target for it."""


class Nemesis:
    """Causes faults, and repairs them when they are due."""

    def __init__(
        self,
        rng: random.Random,
        backend: Backend,
        members: Sequence[Slot],
        publishers: Sequence[Slot],
        writer: Writer,
        *,
        groups: Sequence[str],
        kinds: Sequence[str],
        lease_ttl_s: float,
        pauses: Sequence[float],
        every_s: tuple[float, float],
        archivers: Sequence[Slot] = (),
        store: Path | None = None,
        signals: RunSignals | None = None,
    ) -> None:
        self.happened: Counter[str] = Counter()
        self._rng = rng
        self._backend = backend
        self._members = members
        self._publishers = publishers
        self._archivers = archivers
        self._everybody = [*members, *publishers, *archivers]
        self._store = store
        self._signals = signals
        self._writer = writer
        self._groups = groups
        self._lease_ttl_s = lease_ttl_s
        self._pauses = pauses
        self._every_s = every_s
        self._kinds = kinds
        self._bag: list[str] = []
        self._next_at = 0.0
        self._busy: set[str] = set()
        self._repairs: list[tuple[float, int, str, Callable[[], object]]] = []
        self._numbers = count()
        self._replaced: set[int] = set()  # ports of primaries that a failover has replaced

    def step(self) -> None:
        """Repair the faults that are over, and cause another if it is time."""
        self._repair(time.monotonic())
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + self._rng.uniform(*self._every_s)
        for _ in self._kinds:
            if not self._bag:
                self._bag = self._rng.sample(self._kinds, len(self._kinds))
            kind = self._bag.pop()
            fault: Fault = getattr(self, kind)
            if fault():
                self.happened[kind] += 1
                return
            self._bag.insert(0, kind)  # try this kind later

    @property
    def has_done_everything(self) -> bool:
        return all(self.happened[kind] for kind in self._kinds)

    def heal(self) -> None:
        """Repair all faults at once."""
        self._repair(float("inf"))
        for slot in self._everybody:
            slot.proxies.heal()
            slot.resume()
        self._writer.add("healed", who="nemesis")

    def _repair(self, until: float) -> None:
        while self._repairs and self._repairs[0][0] <= until:
            _, _, target, repair = heapq.heappop(self._repairs)
            repair()
            self._busy.discard(target)

    # Worker faults

    def kill_member(self) -> bool:
        return self._kill(self._members, "kill_member")

    def kill_publisher(self) -> bool:
        return self._kill(self._publishers, "kill_publisher")

    def _kill(self, slots: Sequence[Slot], kind: str) -> bool:
        slot = self._idle_slot(slots)
        if slot is None:
            return False
        self._begin(kind, slot.name, self._rng.uniform(0.0, 1.0), slot.replace)
        slot.kill()
        return True

    def pause_member(self) -> bool:
        return self._pause("pause_member", self._members)

    def pause_owner(self) -> bool:
        """Pause a worker whose member holds a group's lease."""
        return self._pause("pause_owner", self._owners(self._members, self._groups))

    def _owners(self, slots: Sequence[Slot], groups: Sequence[str]) -> list[Slot]:
        """Return the slots whose worker holds a lease. A member's name contains its process id."""
        if "server" in self._busy:
            return []
        with plain_client(self._backend.server.url, socket_timeout=REPLY_S) as client:
            try:
                leases: Any = client.mget([keys.lease(STREAM, group) for group in groups])
            except redis.exceptions.ClusterDownError:
                return []  # a cluster node refuses commands for two seconds after it starts
        names = [lease.decode().partition(" ")[0] for lease in leases if lease is not None]
        pids = {int(name.split(":")[1]) for name in names}
        return [slot for slot in slots if slot.pid in pids]

    def _pause(self, kind: str, slots: Sequence[Slot]) -> bool:
        slot = self._idle_slot(slots)
        if slot is None:
            return False
        seconds = self._rng.choice(self._pauses) * self._lease_ttl_s
        self._begin(kind, slot.name, seconds, slot.resume)
        slot.pause()
        return True

    def pause_publisher(self) -> bool:
        slot = self._idle_slot(self._publishers)
        if slot is None:
            return False
        self._begin("pause_publisher", slot.name, self._rng.uniform(0.2, 2.0), slot.resume)
        slot.pause()
        return True

    # Archiver and store faults

    def kill_archiver(self) -> bool:
        return self._kill(self._archivers, "kill_archiver")

    def pause_archiver(self) -> bool:
        return self._pause("pause_archiver", self._archivers)

    def pause_archiving(self) -> bool:
        """Pause the archiver that holds the lease."""
        return self._pause("pause_archiving", self._owners(self._archivers, [keys.ARCHIVERS]))

    def stop_at_commit(self) -> bool:
        """Stop the archiver that holds the lease between its next append and its commit."""
        slot = self._idle_slot(self._owners(self._archivers, [keys.ARCHIVERS]))
        if slot is None or self._signals is None:
            return False
        seconds = self._rng.uniform(*STOPS) * self._lease_ttl_s
        self._begin("stop_at_commit", slot.name, seconds, lambda: self._resume_archiver(slot))
        self._signals.make_stop(slot.name)
        return True

    def _resume_archiver(self, slot: Slot) -> None:
        assert self._signals is not None, "stop_at_commit needs signals"
        self._signals.stop(slot.name)  # clear the signal if the archiver has not reached a commit
        slot.resume()

    def hide_store(self) -> bool:
        """Hide the store for a while, like an unmounted disk."""
        if self._store is None or "store" in self._busy:
            return False
        self._begin("hide_store", "store", self._rng.uniform(0.1, 1.5), self._show_store)
        self._writer.add("hidden", who="nemesis")
        os.rename(self._store, self._hidden(self._store))
        return True

    def _show_store(self) -> None:
        assert self._store is not None, "the run has no store"
        os.rename(self._hidden(self._store), self._store)
        self._writer.add("shown", who="nemesis")

    def _hidden(self, store: Path) -> Path:
        return store.with_suffix(".hidden")

    # Connection faults

    def cut(self) -> bool:
        """Cut all of a worker's connections; it can reconnect."""
        return self._on_proxy("cut", 0.0, lambda slot: slot.proxies.cut())

    def lose_reply(self) -> bool:
        """Let the server execute one of a worker's next scripts, but lose the reply."""
        nth = self._rng.randint(1, 4)
        return self._on_proxy(
            "lose_reply", 0.5, lambda slot: slot.proxies.cut_after_request(nth, match=b"EVAL")
        )

    def lose_reply_and_lease(self) -> bool:
        """Lose the reply to an owner's next script, then pause the owner until its lease expires.

        The owner must then find out whether its confirm took effect, although another member has
        taken over.
        """
        slot = self._idle_slot(
            [
                slot
                for slot in self._owners(self._members, self._groups)
                if f"proxy of {slot.name}" not in self._busy
            ]
        )
        if slot is None:
            return False
        seconds = self._rng.uniform(*LAPSES) * self._lease_ttl_s
        self._begin("lose_reply_and_lease", slot.name, seconds, slot.resume)
        self._begin("lose_reply", f"proxy of {slot.name}", seconds, slot.proxies.heal)
        self._later(self._rng.uniform(*LOSE_S), slot.pause)
        slot.proxies.cut_after_request(1, match=b"EVAL")
        return True

    def tear_reply(self) -> bool:
        after = self._rng.randint(1, 200)
        return self._on_proxy("tear_reply", 0.5, lambda slot: slot.proxies.cut_mid_reply(after))

    def stall(self) -> bool:
        side = self._rng.choice(SIDES)
        seconds = self._rng.uniform(0.2, 2.5)
        return self._on_proxy("stall", seconds, lambda slot: slot.proxies.stall(side))

    def delay(self) -> bool:
        late_s = self._rng.uniform(0.005, 0.5)
        seconds = self._rng.uniform(0.5, 2.0)
        return self._on_proxy("delay", seconds, lambda slot: slot.proxies.delay(late_s))

    def trickle(self) -> bool:
        """Forward a worker's traffic in single bytes."""
        seconds = self._rng.uniform(0.1, 0.6)
        return self._on_proxy("trickle", seconds, lambda slot: slot.proxies.chunk(1))

    def refuse(self) -> bool:
        """Cut all of a worker's connections, and refuse new ones."""

        def begin(slot: Slot) -> None:
            slot.proxies.refuse()
            slot.proxies.cut()

        return self._on_proxy("refuse", self._rng.uniform(0.1, 2.0), begin)

    def _on_proxy(self, kind: str, seconds: float, begin: Callable[[Slot], None]) -> bool:
        slots = [slot for slot in self._everybody if f"proxy of {slot.name}" not in self._busy]
        if not slots:
            return False
        slot = self._rng.choice(slots)
        self._begin(kind, f"proxy of {slot.name}", seconds, slot.proxies.heal)
        begin(slot)
        return True

    # Server faults

    def pause_server(self) -> bool:
        if "server" in self._busy:
            return False
        server = self._backend.server
        self._begin("pause_server", "server", self._rng.uniform(0.5, 3.0), server.resume)
        server.pause()
        return True

    def kill_server(self) -> bool:
        """Kill the server. Acknowledged writes are on disk and must survive."""
        if "server" in self._busy:
            return False
        server = self._backend.server
        self._begin("kill_server", "server", self._rng.uniform(0.0, 1.0), server.start)
        server.kill()
        return True

    def kill_clients(self) -> bool:
        return self._send_command("kill_clients", "CLIENT", "KILL", "TYPE", "NORMAL")

    def flush_scripts(self) -> bool:
        return self._send_command("flush_scripts", "SCRIPT", "FLUSH")

    def _send_command(self, kind: str, *command: str) -> bool:
        if "server" in self._busy:
            return False
        self._writer.add("fault", who="nemesis", text=kind)
        try:
            with plain_client(self._backend.server.url, socket_timeout=REPLY_S) as client:
                client.execute_command(*command)
        except redis.ConnectionError:
            pass  # CLIENT KILL ended this connection too
        return True

    # Cluster faults

    def move(self) -> bool:
        """Move the stream's slot, either at once or with a stop in the middle."""
        cluster = self._backend.cluster
        if cluster is None or "server" in self._busy or not cluster.stable:
            return False
        owner = cluster.owner(STREAM)
        target = self._rng.choice(cluster.others(owner))
        slot = cluster.slot(STREAM)
        if self._rng.random() < FAST_MOVES:
            self._writer.add("fault", who="nemesis", text="move at once")
            cluster.move_slot(slot, target)
            return True
        move = cluster.begin_move(slot, target)
        move.migrate(self._rng.randint(1, MOVED_KEYS))
        self._begin("move", "server", self._rng.uniform(0.1, 2.0), lambda: self._finish(move))
        return True

    def _finish(self, move: SlotMove) -> None:
        try:
            move.finish()
        except redis.ResponseError as error:  # such as BUSYKEY, if a client wrote to the target
            self._writer.add("error", who="nemesis", text=f"The slot cannot be moved: {error}")

    def failover(self) -> bool:
        """Promote a replica of the stream's primary. This planned failover loses no records."""
        cluster = self._backend.cluster
        if cluster is None or "server" in self._busy:
            return False
        owner = cluster.owner(STREAM)
        # Fail each primary over only once. The other primaries vote for another failover of the
        # same primary only after two node timeouts.
        if owner.port in self._replaced or not cluster.stable:
            return False
        self._replaced.add(owner.port)
        self._writer.add("fault", who="nemesis", text="failover")
        cluster.failover(owner)
        return True

    def partition(self) -> bool:
        """Cut some workers off from the node that has the stream, but not from other nodes."""
        cluster = self._backend.cluster
        if cluster is None or "server" in self._busy:
            return False
        port = cluster.owner(STREAM).port
        free = [slot for slot in self._everybody if f"proxy of {slot.name}" not in self._busy]
        seconds = self._rng.uniform(0.5, 3.0)
        cut_off = self._rng.sample(free, len(free) // 2)
        for slot in cut_off:
            self._begin("partition", f"proxy of {slot.name}", seconds, slot.proxies.heal)
            slot.proxies.isolate(port)
        return bool(cut_off)

    # State

    def _idle_slot(self, slots: Sequence[Slot]) -> Slot | None:
        idle = [slot for slot in slots if slot.name not in self._busy and slot.running]
        return self._rng.choice(idle) if idle else None

    def _begin(self, kind: str, target: str, seconds: float, repair: Callable[[], object]) -> None:
        self._busy.add(target)
        due = time.monotonic() + seconds
        heapq.heappush(self._repairs, (due, next(self._numbers), target, repair))
        self._writer.add("fault", who="nemesis", text=f"{kind} on {target} for {seconds:.2f} s")

    def _later(self, seconds: float, work: Callable[[], object]) -> None:
        """Schedule a later part of a fault, which is due before the repair."""
        due = time.monotonic() + seconds
        heapq.heappush(self._repairs, (due, next(self._numbers), "", work))

    def is_busy(self, slot: Slot) -> bool:
        return slot.name in self._busy


#: The kinds of faults that need neither a cluster nor a store.
KINDS = (
    "kill_member",
    "pause_member",
    "pause_owner",
    "kill_publisher",
    "pause_publisher",
    "cut",
    "lose_reply",
    "lose_reply_and_lease",
    "tear_reply",
    "stall",
    "delay",
    "trickle",
    "refuse",
    "pause_server",
    "kill_server",
    "kill_clients",
    "flush_scripts",
)
#: The kinds that need a cluster.
CLUSTER_KINDS = ("move", "failover", "partition")
#: The kinds that need a store.
STORE_KINDS = (
    "kill_archiver",
    "pause_archiver",
    "pause_archiving",
    "stop_at_commit",
    "hide_store",
)
