"""Slots move while a Spark query copies a stream exactly once; part of ``make chaos``.

The slots of the source and of the target move in every way: the target's has the staged rows and
the fence that makes a repeated commit harmless. The target must get each row once, in order, from
a query that never fails. The longest pause between two commits is printed.
"""

from __future__ import annotations

import random
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import redis

import meteor_py as meteor
from meteor_py.testing import Cluster
from tests.conftest import require_redis
from tests.support.java import require_java
from tests.support.servers import binaries
from tests.support.slot_mover import WAYS, SlotMover
from tests.support.spark_copy import SOURCE, TARGET, Copy, fill
from tests.support.transactions import contents, numbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MOVES = 8
#: Rows to copy for each move, in several batches: the slots move while some are to be committed.
ROWS = 500
ROWS_PER_BATCH = 100
#: The program that runs Spark's workers with bugs in meteor_py.
PLANTED = Path(__file__).parents[1] / "support" / "planted_python.py"


class Commits:
    """The end of the target, and the longest time between two commits."""

    def __init__(self, target: meteor.Stream) -> None:
        self._target = target
        self._end, self._at = 0, time.monotonic()
        self.longest_pause_s = 0.0

    @property
    def end(self) -> int:
        found, now = self._target.end().offset, time.monotonic()
        if found > self._end:
            if self._end:
                self.longest_pause_s = max(self.longest_pause_s, now - self._at)
            self._end, self._at = found, now
        return found

    def exceed(self, offset: int) -> bool:
        return self.end > offset


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_query_copies_each_row_once_while_slots_move(
    kind: str, rng: random.Random, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_java()
    if kind == "redis":
        require_redis()
    with Cluster(program=binaries()[kind]) as cluster, meteor.connect(cluster.url) as m:
        m.stream(SOURCE, capacity=100_000)
        target = m.stream(TARGET, capacity=100_000)
        mover, commits = SlotMover(cluster, rng, (SOURCE, TARGET)), Commits(target)
        with Copy(cluster.url, tmp_path, rows_per_batch=ROWS_PER_BATCH, follow=True) as copy:
            for number in range(MOVES):
                end = number * ROWS
                fill(m, end + ROWS, end)
                copy.wait_until(partial(commits.exceed, end), "the query commits nothing")
                assert commits.end < end + ROWS, "the query had ended before the move"
                mover.move(WAYS[kind][number % len(WAYS[kind])])
                copy.wait_until(partial(commits.exceed, end + ROWS - 1), "the query is stuck")
        assert contents(target) == numbers(MOVES * ROWS)
        assert m._connector.find_keys(f"meteor:{{{TARGET}}}:stage") == set()
    with capsys.disabled():
        print(
            f"\n{kind}: {MOVES} moves of both slots, {MOVES * ROWS:,} rows in batches of "
            f"{ROWS_PER_BATCH}, each row once; longest pause between two commits "
            f"{commits.longest_pause_s:.1f} s"
        )


def test_torn_commits_are_found(rng: random.Random, tmp_path: Path) -> None:
    """The moves reveal workers that follow ASK, and whose scripts have no guard key."""
    require_java()
    with Cluster() as cluster, meteor.connect(cluster.url) as m:
        fill(m, MOVES * ROWS)
        target = m.stream(TARGET, capacity=100_000)
        mover, commits = SlotMover(cluster, rng, (TARGET,)), Commits(target)
        python = planted_python(tmp_path, "unguarded-scripts", "followed-ask")
        with Copy(
            cluster.url, tmp_path, python=python, rows_per_batch=ROWS_PER_BATCH, follow=True
        ) as copy:
            copy.wait_until(partial(commits.exceed, 0), "the query commits nothing")
            # The server answers BUSYKEY, and the move fails, if both nodes have a key.
            with pytest.raises((AssertionError, redis.ResponseError)):
                move_and_check(copy, mover, target)


def move_and_check(copy: Copy, mover: SlotMover, target: meteor.Stream) -> None:
    for _ in range(MOVES):
        mover.move("slow")
        assert not copy.failed
    copy.kill()
    assert contents(target) == numbers(target.end().offset)


def planted_python(folder: Path, *bugs: str) -> Path:
    """Write a program that runs Python, with planted bugs in modules: ``-m MODULE``."""
    program = folder / "planted-python"
    bugged = f"{sys.executable} {PLANTED} {','.join(bugs)}"
    program.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = -m ]; then shift; exec {bugged} "$@"; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    program.chmod(0o755)
    return program
