"""Failovers of a cluster: no acknowledged record is lost, or its loss is reported."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_py.testing import Cluster
from tests.support.cluster_load import STREAM, ClusterLoad
from tests.support.waiting import eventually

SLOT = Cluster.slot(STREAM)


@pytest.fixture
def replicated(program: Path) -> Iterator[Cluster]:
    with Cluster(3, 2, program=program, node_timeout_s=1.0) as cluster:
        yield cluster


def test_planned_failovers_lose_nothing(replicated: Cluster, rng: random.Random) -> None:
    with ClusterLoad(replicated.url, rng) as load:
        for _ in range(3):
            load.run_until(200)
            replicated.failover(replicated.owner(SLOT))
        load.run_until(200)
    load.check()


def test_killed_primary_loses_only_records_that_are_reported(
    replicated: Cluster, rng: random.Random
) -> None:
    with ClusterLoad(replicated.url, rng) as load:
        load.run_until(500)
        primary = replicated.owner(SLOT)
        for replica in replicated.replicas_of(primary):
            replica.pause()  # it lags behind
        load.run_until(500)
        primary.kill()
        for replica in replicated.nodes:
            if replica.running:
                replica.resume()
        replicated.wait_for_failover(primary)
        load.run_until(200)
    load.check(losing=True)


def test_killed_primary_loses_nothing_that_a_replica_acknowledged(
    replicated: Cluster, rng: random.Random
) -> None:
    with ClusterLoad(replicated.url, rng, acks=1) as load:
        load.run_until(500)
        primary = replicated.owner(SLOT)
        primary.kill()
        replicated.wait_for_failover(primary)
        load.run_until(200)
    assert not load.losses.ranges
    found = dict(load.log())
    assert not {value for value, offset in load.acknowledged.items() if found.get(offset) != value}


def test_a_slot_without_a_primary_is_an_error_until_it_is_back(cluster: Cluster) -> None:
    with meteor.connect(cluster.url, timeout=1) as m:
        m.stream(STREAM, create=True)
        node = cluster.owner(SLOT)
        node.pause()
        try:
            with pytest.raises(meteor.ConnectionFailed):
                m.stream(STREAM, create=False)
        finally:
            node.resume()
        eventually(lambda: m.streams() == [STREAM] if _reachable(m) else False)


def _reachable(client: meteor.Client) -> bool:
    try:
        client.streams()
    except meteor.ConnectionFailed:
        return False
    return True
