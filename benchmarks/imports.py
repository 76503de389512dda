"""Measure ``import meteor_py`` in a new interpreter, and check that it loads no unneeded module."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.common import Bench, Row, within

_PROGRAM = """
import sys, time
start = time.perf_counter()
import meteor_py
print(time.perf_counter() - start)
print(*{"pyspark", "pyarrow.parquet", "rich"} & set(sys.modules))
"""


def run(bench: Bench) -> list[Row]:
    seconds: list[float] = []
    for _ in range(bench.pick(7, 4)):
        bench.step("import meteor_py")
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
        )
        took, unwanted = done.stdout.split("\n")[:2]
        if unwanted:
            raise RuntimeError(f"import meteor_py loads {unwanted}.")
        seconds.append(float(took))
    return [within("import meteor_py", "s", min(seconds), 0.5)]
