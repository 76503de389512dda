"""Which process of `make test` runs what.

A Spark takes seconds to start, and all processors. So one process runs all tests that share one,
another those that start their own, one at a time; both begin at once, and end before the rest does.
(The marks of pytest-xdist for that, with ``--dist loadgroup``, have no effect on pytest 9.)
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def workers(config: pytest.Config, log: Any) -> Any:
    """The scheduler of pytest-xdist. It takes the largest groups first."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
        """Goes on when a process has died, as one does whose test hangs.

        That of pytest-xdist 3.8 runs the test again that it died of, and waits for ever for groups
        that have none left.
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
                return  # it took the place of one that died, and does not know the tests yet
            super()._reschedule(node)
            super()._reschedule(node)  # it begins with a test when it knows the next, or the end

    return Scheduling(config, log)


def group_of(nodeid: str, root: Path) -> str:
    """What has to be run by one process; most tests are a group by themselves."""
    if "spark" not in nodeid:
        return nodeid
    return "shared" if shares(root / nodeid.partition("::")[0]) else "own"


@cache
def shares(path: Path) -> bool:
    """Whether the tests of a file use the fixture ``spark``."""
    return path.exists() and "spark: SparkSession" in path.read_text()
