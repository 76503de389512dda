"""Slots move while a Spark query copies a stream exactly once; part of ``make chaos``.

The slots of the source and of the target move in every way that ``SlotMover`` knows. The target's
slot also holds the staged rows and the fence by which the server recognises a repeated commit. The
query is killed twice: in the middle of a batch, and after a commit that Spark has not recorded and
therefore repeats. Both times, the slots move before the next query starts. The target must get each
row once and in order, and no query may fail. The test prints the longest pause between two commits.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_py.testing import Cluster
from tests.conftest import require_redis
from tests.support.java import require_java
from tests.support.servers import binaries
from tests.support.slot_mover import WAYS, SlotMover
from tests.support.spark import forget_last_commit
from tests.support.spark_copy import SOURCE, TARGET, Copy, fill
from tests.support.transactions import contents, numbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MOVES = 8
#: Number of the move before which the query is killed in the middle of a batch.
KILLED = 1
#: Number of the move after which the query is killed. The slots then move again before a restarted
#: query repeats the last commit.
REPEATED = 5
#: Rows to copy for each move, in several batches: the slots move before all of them are committed.
ROWS = 500
ROWS_PER_BATCH = 100
#: The program that runs Spark's workers with planted bugs in meteor_py.
PLANTED = Path(__file__).parents[1] / "support" / "planted_python.py"


class Commits:
    """The end of the target, and the longest time between two commits of one query."""

    def __init__(self, target: meteor.Stream) -> None:
        self._target = target
        self._end, self._at = 0, 0.0
        self.longest_pause_s = 0.0

    @property
    def end(self) -> int:
        found, now = self._target.end().offset, time.monotonic()
        if found > self._end:
            if self._at:
                self.longest_pause_s = max(self.longest_pause_s, now - self._at)
            self._end, self._at = found, now
        return found

    def exceed(self, offset: int) -> bool:
        return self.end > offset

    def restart(self) -> None:
        """Do not count the time until the next commit."""
        self._at = 0.0


class Run:
    """A query that copies rows to the stream ``target`` while slots move."""

    def __init__(self, cluster: Cluster, client: meteor.Client, folder: Path) -> None:
        self._cluster, self._client, self._folder = cluster, client, folder
        client.stream(SOURCE, capacity=100_000)
        self.target = client.stream(TARGET, capacity=100_000)
        self.commits = Commits(self.target)

    def copy(
        self,
        ways: Sequence[str],
        rng: random.Random,
        *,
        killed: int | None = None,
        repeated: int | None = None,
        python: Path | None = None,
    ) -> None:
        """Copy some rows during each move.

        Args:
            ways: How to move the slots, for each move.
            killed: Number of the move before which the query is killed.
            repeated: Number of the move after which the query is killed and its last commit is
                forgotten.
            python: The program that runs Spark's workers; None means the current Python.
        """
        mover = SlotMover(self._cluster, rng, (SOURCE, TARGET))
        copy = self._start(python)
        try:
            for number, how in enumerate(ways):
                end = number * ROWS
                fill(self._client, end + ROWS, end)
                copy.wait_until(partial(self.commits.exceed, end), "the query commits nothing")
                assert self.commits.end < end + ROWS, "the query copied all rows before the move"
                if number == killed:
                    copy.kill()
                mover.move(how)
                if number == killed:
                    copy = self._start(python)
                copy.wait_until(partial(self.commits.exceed, end + ROWS - 1), "the query is stuck")
                if number == repeated:
                    copy.wait_until(self._is_idle, "Spark does not record the last commit")
                    copy.kill()
                    forget_last_commit(self._folder)
                    mover.move(how)
                    copy = self._start(python)
        finally:
            copy.kill()

    def _start(self, python: Path | None) -> Copy:
        self.commits.restart()
        return Copy(
            *(self._cluster.url, self._folder),
            python=python,
            rows_per_batch=ROWS_PER_BATCH,
            follow=True,
        )

    def _is_idle(self) -> bool:
        """Return whether Spark has recorded a commit for each batch that it has begun."""
        begun, committed = (
            {path.name for path in (self._folder / "checkpoint" / name).glob("[0-9]*")}
            for name in ("offsets", "commits")
        )
        return begun == committed


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_query_copies_each_row_once_while_slots_move(
    kind: str, rng: random.Random, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_java()
    if kind == "redis":
        require_redis()
    ways = [WAYS[kind][number % len(WAYS[kind])] for number in range(MOVES)]
    with Cluster(program=binaries()[kind]) as cluster, meteor.connect(cluster.url) as m:
        run = Run(cluster, m, tmp_path)
        run.copy(ways, rng, killed=KILLED, repeated=REPEATED)
        assert contents(run.target) == numbers(MOVES * ROWS)
        assert m._connector.find_keys(f"meteor:{{{TARGET}}}:stage") == set()
    with capsys.disabled():
        print(
            f"\n{kind}: {MOVES + 1} moves of both slots, two queries killed, "
            f"{MOVES * ROWS:,} rows in batches of {ROWS_PER_BATCH}, each once; longest pause "
            f"between two commits {run.commits.longest_pause_s:.1f} s"
        )


def test_planted_bug_that_writes_rows_twice_is_found(rng: random.Random, tmp_path: Path) -> None:
    require_java()
    with Cluster() as cluster, meteor.connect(cluster.url) as m:
        run = Run(cluster, m, tmp_path)
        python = planted_python(tmp_path, "renamed-writer")
        run.copy(["fast", "fast"], rng, repeated=0, python=python)
        assert contents(run.target) != numbers(run.target.end().offset)


def planted_python(folder: Path, *bugs: str) -> Path:
    """Write a program that runs Python, and that plants bugs if it is called with ``-m MODULE``."""
    program = folder / "planted-python"
    bugged = f"{sys.executable} {PLANTED} {','.join(bugs)}"
    program.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = -m ]; then shift; exec {bugged} "$@"; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    program.chmod(0o755)
    return program
