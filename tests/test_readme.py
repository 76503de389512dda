"""Every code block of the README and of the pages in docs/ named here runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.java import SPARK_ENVIRONMENT, require_java

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {"README": README} | {
    page: (ROOT / "docs" / f"{page}.md").read_text() for page in ("groups", "history", "spark")
}
BLOCKS = {
    f"{page}-{number}": block
    for page, text in PAGES.items()
    for number, block in enumerate(
        re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    )
}


@pytest.mark.timeout(330)  # a loaded machine takes its time to start Spark
@pytest.mark.parametrize("block", BLOCKS)
def test_code_block_runs(block: str, tmp_path: Path) -> None:
    language, code = BLOCKS[block]
    assert language in ("python", "sh"), "a block that no test can run"
    if "pyspark" in code:
        require_java()
    command = [sys.executable, "-W", "error", "-c", code]
    if language == "sh":
        command = ["bash", "-euc", code]
    # The commands are those beside the interpreter that runs the tests.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **SPARK_ENVIRONMENT, "PATH": path, "HOME": str(tmp_path)}
    environment.pop("METEOR_URL", None)
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "it shows something"


def test_readme_is_short() -> None:
    assert len(README.splitlines()) < 150


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    assert [t for t in targets if "://" not in t and not (ROOT / t).exists()] == []


def table_rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_figures_are_those_of_the_benchmarks() -> None:
    results: dict[str, list[str]] = {}
    for row in table_rows((ROOT / "benchmarks/RESULTS.md").read_text()):
        results.setdefault(row[0], row)  # some are compared with a second peer too
    speed = README.partition("## Speed")[2].partition("\n## ")[0]
    rows = table_rows(speed)[1:]
    assert len(rows) >= 6
    for what, ours, ratio in rows:
        assert [ours, ratio] == [results[what][1], results[what][3]], what
