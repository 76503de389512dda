"""After a cluster failover, every acknowledged record is in the log or is reported as lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_py.testing import Cluster
from tests.support.client_load import (
    CAPACITY,
    STREAM,
    Load,
    Publishing,
    duplicates,
    lost,
    read_log,
    unreported,
)
from tests.support.waiting import eventually

SLOT = Cluster.slot(STREAM)


@pytest.fixture
def replicated(program: Path) -> Iterator[Cluster]:
    with Cluster(3, 2, program=program, node_timeout_s=1.0) as cluster:
        yield cluster


def test_planned_failover_loses_nothing(replicated: Cluster) -> None:
    with meteor.connect(replicated.url) as m:
        with Load(m) as load:
            assert load.publishing.continues()
            replicated.failover(replicated.owner(SLOT))
            assert load.publishing.continues()
        load.check_nothing_lost()


@pytest.mark.parametrize("acks", [0, 1])
def test_killed_primary_loses_no_replicated_record_and_every_loss_is_reported(
    replicated: Cluster, acks: int
) -> None:
    with meteor.connect(replicated.url) as m:
        stream = m.stream(STREAM, capacity=CAPACITY)
        publishing = Publishing(stream, window=5, acks=acks)
        publishing.start()
        assert publishing.continues()
        primary = replicated.owner(SLOT)
        replicas = replicated.replicas_of(primary)
        for replica in [] if acks else replicas:
            replica.pause()  # from here on, it lags
        assert publishing.continues()
        primary.kill()
        for replica in replicas:
            replica.resume()
        replicated.wait_for_failover(primary)
        assert publishing.continues()
        publishing.stop()
        assert publishing.problems == []
        log = read_log(stream)
    assert duplicates(log.values()) == []
    assert unreported(publishing.acked, log, publishing.reported) == []
    assert not acks or lost(publishing.acked, log) == []


def test_stream_is_unavailable_until_its_primary_is_back(cluster: Cluster) -> None:
    with meteor.connect(cluster.url, timeout=1) as m:
        m.stream(STREAM, create=True)
        node = cluster.owner(SLOT)
        node.pause()
        try:
            with pytest.raises(meteor.ConnectionFailed):
                m.stream(STREAM, create=False)
        finally:
            node.resume()
        eventually(lambda: streams(m) == [STREAM])


def streams(client: meteor.Client) -> list[str]:
    try:
        return client.streams()
    except meteor.ConnectionFailed:
        return []
