"""Drivers are killed, and tasks fail, somewhere: each row is in the target exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from tests.support.java import require_java
from tests.support.spark_copy import TARGET, TASK_ROWS, Copy, fill
from tests.support.transactions import contents, numbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: So many that a query that follows takes seconds for them.
ROWS = 6000


@pytest.fixture
def m(url: str) -> Iterator[meteor.Client]:
    require_java()
    with meteor.connect(url) as m:
        yield m


def test_a_driver_that_is_killed_in_a_commit_and_between_batches_writes_each_row_once(
    url: str, m: meteor.Client, tmp_path: Path, rng: Random
) -> None:
    fill(m, ROWS)
    store = tmp_path / "store"
    # Frames of 100, of which the first two have room.
    target = m.stream(TARGET, capacity=100, max_unarchived=250, store=store, archive=False)
    with Copy(url, tmp_path / "copy", rows_per_batch=1000) as copy:
        copy.wait_until(lambda: target.end().offset == 200, "it did not commit")
        copy.kill()
    (fence,) = m._connector.call("HVALS", keys.fences(TARGET))
    assert fence == b"0:2:10:1000"
    with target.archiver(segment_age=0.0).start():
        some = rng.randrange(1100, 2500)
        with Copy(url, tmp_path / "copy", rows_per_batch=200, follow=True) as copy:
            copy.wait_until(lambda: target.end().offset >= some, "it did not go on")
            copy.kill()
        assert target.end().offset < ROWS
        with Copy(url, tmp_path / "copy", rows_per_batch=ROWS // 3) as copy:
            copy.wait()
        assert target.store.flush() == ROWS
    assert contents(target) == numbers(ROWS)


def test_a_task_that_fails_after_it_has_staged_rows_writes_them_once(
    url: str, m: meteor.Client, tmp_path: Path
) -> None:
    fill(m, 2 * TASK_ROWS, width=2000)  # so wide that a task sends some before it has all
    target = m.stream(TARGET, capacity=100_000)
    four_tries = "local[2,4]"
    with Copy(url, tmp_path, rows_per_batch=2 * TASK_ROWS, failing=True, master=four_tries) as copy:
        copy.wait()
        assert copy.marks == {"0.0", "0.1", "1.0", "1.1"}
    assert list(map(int, contents(target).split())) == list(range(2 * TASK_ROWS))
    left = list(m.redis.scan_iter("*stage*"))
    assert len(left) == 2  # of the tries that failed: nobody knows of them
    assert all(m.redis.pttl(key) > 0 for key in left)
