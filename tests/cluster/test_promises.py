"""The promises in tests/fundamentals also hold on a cluster: four of its files run again here.

With METEOR_TEST_CLUSTER=redis or valkey, all tests that need only an address run on a cluster.
"""

from __future__ import annotations

import pytest

from meteor_py.testing import Cluster
from tests.fundamentals.conftest import m as m
from tests.fundamentals.test_exclusive_groups import *  # noqa: F403
from tests.fundamentals.test_fenced_confirms import *  # noqa: F403
from tests.fundamentals.test_one_log import *  # noqa: F403
from tests.fundamentals.test_ordering import *  # noqa: F403


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.url
