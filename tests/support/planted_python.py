"""A program that plants bugs in meteor_py and then runs a module, like ``python -m``.

    python planted_python.py BUG,BUG MODULE [ARGUMENT...]

Spark starts its Python workers with it, because a test cannot plant bugs in those processes.
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
