"""Nodes can join and leave a cluster: clients lose nothing, and keep no unused connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_py.testing import Cluster, Node
from tests.support.client_load import PEERS, STREAM, Load
from tests.support.servers import HOST
from tests.support.waiting import eventually

#: The connection name of the clients in these tests.
CLIENT = "member-test"


@pytest.fixture
def growing(program: Path) -> Iterator[Cluster]:
    with Cluster(program=program) as cluster:
        yield cluster


def connections(node: Node) -> list[str]:
    """Return the addresses from which the test's client is connected to a node."""
    with node.client() as plain:
        return [each["addr"] for each in plain.client_list() if each["name"] == CLIENT]


def test_nothing_is_lost_while_a_node_joins_and_leaves_under_load(growing: Cluster) -> None:
    with meteor.connect(growing.url) as m:
        with Load(m) as load:
            assert load.publishing.continues()
            node = growing.add_node()
            growing.move_slots({growing.slot(STREAM), growing.slot(PEERS)}, node)
            assert load.publishing.continues()
            assert growing.owner(STREAM) is node
            growing.remove_node(node)
            assert load.publishing.continues()
        load.check_nothing_lost()


def test_client_keeps_no_connection_to_a_node_without_slots(growing: Cluster) -> None:
    with meteor.connect(f"{growing.url}?client_name={CLIENT}") as m:
        stream = m.stream(STREAM, create=True)
        home = growing.owner(STREAM)
        for _ in range(2):
            node = growing.add_node()
            growing.move_slot(growing.slot(STREAM), node)
            assert stream.describe().next == 0
            assert connections(node)
            growing.move_slot(growing.slot(STREAM), home)
            assert stream.describe().next == 0
            eventually(lambda: not connections(node), 10, "the client is still connected")  # noqa: B023
            growing.remove_node(node)
        remaining = {(HOST, each.port) for each in growing.nodes}

        def kept() -> set[tuple[str, int]]:
            stream.describe()  # a call refreshes an outdated slot map
            return set(m._connector._nodes._idle)

        eventually(lambda: kept() <= remaining)
