"""Each row is in the target stream exactly once, even if drivers are killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from tests.support.java import require_java
from tests.support.spark_copy import TARGET, Copy, fill
from tests.support.transactions import contents, numbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: Enough rows to keep a query busy for seconds.
ROWS = 4000


@pytest.fixture
def m(url: str) -> Iterator[meteor.Client]:
    require_java()
    with meteor.connect(url) as m:
        yield m


def test_rows_are_written_once_if_the_driver_is_killed_during_a_commit_and_between_batches(
    url: str, m: meteor.Client, tmp_path: Path, rng: Random
) -> None:
    fill(m, ROWS)
    store = tmp_path / "store"
    # Frames have 100 records; there is room for two before the archiver runs.
    target = m.stream(TARGET, capacity=100, max_unarchived=250, store=store, archive=False)
    with Copy(url, tmp_path / "copy", rows_per_batch=1000) as copy:
        copy.wait_until(lambda: target.end().offset == 200, "the copy did not commit")
        copy.kill()
    (fence,) = m._connector.call("HVALS", keys.fences(TARGET))
    assert fence == b"1:2:10:1000"
    with target.archiver(segment_age=0.0).start():
        some = rng.randrange(1100, 1800)
        with Copy(url, tmp_path / "copy", rows_per_batch=200, follow=True) as copy:
            copy.wait_until(lambda: target.end().offset >= some, "the copy did not continue")
            copy.kill()
        assert target.end().offset < ROWS
        with Copy(url, tmp_path / "copy", rows_per_batch=ROWS // 2) as copy:
            copy.wait()
        assert target.store.flush() == ROWS
    assert contents(target) == numbers(ROWS)
