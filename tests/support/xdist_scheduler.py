"""A scheduler that assigns tests to the processes of `make test`.

A Spark session takes seconds to start and uses all processors. One process runs all tests that
share a session; another runs those that start their own, one at a time. Both groups start first, so
that no process waits for them at the end. (pytest-xdist's marks for ``--dist loadgroup`` have no
effect in pytest 9.)
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def workers(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler for pytest-xdist, which starts with the largest groups."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # untyped
        """A scheduler that continues after a process has died, for example because its test hung.

        The scheduler of pytest-xdist 3.8 repeats the test that killed the process, and waits
        forever for groups that have no tests left.
        """

        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid, config.rootpath)

        def remove_node(self, node: Any) -> str | None:
            left = [
                (group, [test for test, done in tests.items() if not done])
                for group, tests in self.assigned_work.pop(node).items()
            ]
            crashed = next((tests.pop(0) for _, tests in left if tests), None)
            left = [(group, tests) for group, tests in left if tests]
            self.workqueue.update(
                {group: dict.fromkeys(tests, False) for group, tests in left if tests}
            )
            for other in self.nodes:
                self._reschedule(other)
            return crashed

        def _reschedule(self, node: Any) -> None:
            if node not in self.registered_collections:
                return  # a replacement process that has not collected the tests yet
            # A process starts a test only once it knows the next test, or that there is none.
            for _ in range(2):
                super()._reschedule(node)

    return Scheduling(config, log)


def group_of(nodeid: str, root: Path) -> str:
    """Return a test's group, which one process runs. Most groups have only one test."""
    if "spark" not in nodeid:
        return nodeid
    return "shared" if shares(root / nodeid.partition("::")[0]) else "own"


@cache
def shares(path: Path) -> bool:
    """Return whether a file's tests use the ``spark`` fixture."""
    return path.exists() and "spark: SparkSession" in path.read_text()
