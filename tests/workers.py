"""Which process of `make test` runs what.

A Spark takes seconds to start, and all processors. So one process runs all tests that share one,
another those that start their own, one at a time; both begin at once, and end before the rest does.
(The marks of pytest-xdist for that, with ``--dist loadgroup``, have no effect on pytest 9.)
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def workers(config: pytest.Config, log: Any) -> Any:
    """The scheduler of pytest-xdist. It takes the largest groups first."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = partial(group_of, root=config.rootpath)
    return scheduler


def group_of(nodeid: str, root: Path) -> str:
    """What has to be run by one process; most tests are a group by themselves."""
    if "spark" not in nodeid:
        return nodeid
    return "shared" if shares(root / nodeid.partition("::")[0]) else "own"


@cache
def shares(path: Path) -> bool:
    """Whether the tests of a file use the fixture ``spark``."""
    return path.exists() and "spark: SparkSession" in path.read_text()
