"""Tasks that Spark runs twice at once, on two hosts, write each row exactly once.

    pytest tests/chaos/spark_speculation.py

The test starts six Java processes and takes up to a minute, so it is part of ``make chaos``.
``make test`` runs only files named ``test_...``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import meteor_py as meteor
from tests.support.java import require_java
from tests.support.spark_cluster import ROW_BYTES, SOURCE, TARGET, TASK_ROWS, TASKS, Cluster, Driver
from tests.support.transactions import contents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_tasks_that_run_twice_at_once_write_each_row_once(url: str, tmp_path: Path) -> None:
    require_java()
    rows = 3 * TASKS * TASK_ROWS
    with meteor.connect(url) as m:
        target = m.stream(TARGET, capacity=100_000)
        with m.stream(SOURCE, capacity=100_000).publisher() as pub:
            for first in range(0, rows * 2 // 3, 500):
                pub.publish_many([b"%0*d" % (ROW_BYTES, n) for n in range(first, first + 500)])
        with Cluster(tmp_path) as cluster, Driver(cluster, url, tmp_path) as driver:
            driver.wait()
            # Both attempts of the first task of each job have reached their last rows.
            assert driver.marks == {f"{job}.0.{attempt}" for job in range(3) for attempt in (0, 1)}
            attempts = driver.attempts
        # Ignore the stage of batch 0, which only saves the starting positions, with one empty task.
        stages = {attempt.stage for attempt in attempts if attempt.partition == TASKS - 1}
        slow = [one for one in attempts if one.partition == 0 and one.stage in stages]
        assert [attempt.speculative for attempt in slow] == [False, True] * 3
        for one, other in zip(slow[::2], slow[1::2], strict=True):
            assert one.host != other.host
        assert list(map(int, contents(target).split())) == list(range(rows))
        # Attempts that Spark killed could not delete their stages, but these expire.
        assert all(m.redis.pttl(key) > 0 for key in m.redis.scan_iter("*stage*"))
