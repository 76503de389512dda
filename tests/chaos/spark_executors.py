"""Spark executors in separate processes write each row exactly once.

    pytest tests/chaos/spark_executors.py

The test starts three Java processes, so it is part of ``make chaos``. ``make test`` covers failures
and retries within one process, in tests/spark/.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import meteor_py as meteor
from tests.support.java import require_java
from tests.support.spark_copy import TARGET, Copy, fill
from tests.support.transactions import contents, numbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_executors_in_separate_processes_write_each_row_once(url: str, tmp_path: Path) -> None:
    require_java()
    with meteor.connect(url) as m:
        fill(m, 4000)
        target = m.stream(TARGET, capacity=100_000)
        with Copy(url, tmp_path, rows_per_batch=2000, master="local-cluster[2,1,512]") as copy:
            copy.wait()
        assert contents(target) == numbers(4000)
        assert list(m.redis.scan_iter("*stage*")) == []
