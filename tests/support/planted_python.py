"""Runs a module like ``python -m``, after planting bugs in meteor_py.

    python planted_python.py BUG,BUG MODULE [ARGUMENT...]

Spark starts its Python workers this way, which are processes that a test cannot reach.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    sys.path[0] = str(Path(__file__).parents[2])
    from tests.chaos.mutants import plant

    bugs, module = sys.argv[1:3]
    for bug in bugs.split(","):
        plant(bug)
    sys.argv[:3] = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
