"""A node of a test cluster, and its view of the cluster."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import redis

from meteor_py.server.datadir import free_port
from meteor_py.testing.server import HOST, Server, plain_client

_NODES_FILE = "nodes.conf"


class View(NamedTuple):
    """One node, as it sees itself or as another node sees it."""

    id: str
    primary: str  # the id of the node's primary; empty for a primary
    failed: bool  # whether the cluster agrees that the node is down
    slots: frozenset[int]
    #: Slots that are moving away from this node, with the target's id. A node knows only its own
    #: moves.
    migrating: dict[int, str]
    importing: dict[int, str]  # slots that are moving to this node, with the source's id


class Node(Server):
    """A cluster node: a server that keeps its node id across restarts."""

    def __init__(self, args: Sequence[str], program: str | Path | None, timeout_s: float) -> None:
        super().__init__(program=program, port=0)
        self.bus_port = free_port()
        #: The node id, which ``CLUSTER MYID`` returns.
        self.id = secrets.token_hex(20)
        self.args = (
            *("--cluster-enabled", "yes"),
            *("--cluster-config-file", _NODES_FILE),
            # The default, port + 10000, may be taken, or may be in the range for outgoing
            # connections.
            *("--cluster-port", str(self.bus_port)),
            *("--cluster-node-timeout", str(round(timeout_s * 1000))),
            *("--cluster-allow-replica-migration", "no"),
            # Let replicas synchronize within milliseconds instead of five seconds.
            *("--repl-diskless-sync-delay", "0"),
            *args,
        )

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def announced(self) -> str:
        """The address where other nodes reach this one: host, port and bus port."""
        return f"{self.address}@{self.bus_port}"

    def ask(self, *command: str | int, timeout_s: float = 10) -> Any:
        """Send one command to this node and return its reply without parsing it.

        Raises:
            redis.RedisError: The node refused the command, or is not running.
        """
        with plain_client(self.url, socket_timeout=timeout_s) as client:
            return client.execute_command(*command)

    def view(self) -> dict[str, View]:
        """Return all nodes of the cluster as this node sees them, by node id."""
        lines = self.ask("CLUSTER", "NODES", timeout_s=2).decode().splitlines()
        return {each.id: each for each in map(_parse, lines)}

    def own_slots(self) -> frozenset[int]:
        """Return the slots that this node owns in its own view, or none if it does not reply."""
        try:
            return self.view()[self.id].slots if self.running else frozenset()
        except redis.RedisError:
            return frozenset()  # paused or dying

    def epochs(self) -> tuple[int, int]:
        """Return this node's config epoch, and the highest epoch that it knows of."""
        lines = self.ask("CLUSTER", "INFO", timeout_s=2).decode().splitlines()
        found = dict(line.split(":", 1) for line in lines if ":" in line)
        return int(found["cluster_my_epoch"]), int(found["cluster_current_epoch"])

    def write_view(self, lines: Iterable[str], epoch: int) -> None:
        """Write the nodes file, so that the node is a cluster member from its first start."""
        text = "\n".join([*lines, f"vars currentEpoch {epoch} lastVoteEpoch 0", ""])
        (self.directory / _NODES_FILE).write_text(text)


def owner_of(slot: int, nodes: Iterable[Node]) -> Node:
    """Return the node that owns a slot.

    Raises:
        LookupError: No running node owns the slot.
    """
    for node in nodes:
        # Ask each node about its own slots: its knowledge of other nodes may be outdated.
        if slot in node.own_slots():
            return node
    raise LookupError(f"No running node owns slot {slot}.")


def _parse(line: str) -> View:
    """Parse one line of a ``CLUSTER NODES`` reply."""
    identity, _, flags, primary, _, _, _, _, *fields = line.split()
    slots: set[int] = set()
    migrating: dict[int, str] = {}
    importing: dict[int, str] = {}
    for field in fields:
        if "->-" in field:  # [slot->-target]
            slot, _, target = field.strip("[]").partition("->-")
            migrating[int(slot)] = target
        elif "-<-" in field:  # [slot-<-source]
            slot, _, source = field.strip("[]").partition("-<-")
            importing[int(slot)] = source
        else:
            first, _, last = field.partition("-")
            slots.update(range(int(first), int(last or first) + 1))
    # "fail?" means that one node suspects a failure. "fail" means that the primaries agree.
    failed = "fail" in flags.split(",")
    return View(identity, primary.strip("-"), failed, frozenset(slots), migrating, importing)
