"""Cluster fixtures. Each pytest worker starts a cluster when a test first needs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_py.testing import Cluster
from tests.conftest import require_redis
from tests.support.servers import binaries


@pytest.fixture(scope="session", params=["valkey", "redis"])
def program(request: pytest.FixtureRequest) -> Path:
    if request.param == "redis":
        require_redis()
    return binaries()[request.param]


@pytest.fixture(scope="session")
def _shared_cluster(program: Path) -> Iterator[Cluster]:
    with Cluster(program=program) as cluster:
        yield cluster


@pytest.fixture
def cluster(_shared_cluster: Cluster) -> Cluster:
    """An empty cluster of three primaries. Tests may move slots, but not kill nodes."""
    _shared_cluster.repair()
    _shared_cluster.flush()
    return _shared_cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[meteor.Client]:
    with meteor.connect(cluster.url) as m:
        yield m
