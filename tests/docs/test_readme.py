"""Code blocks in the README and the docs run as printed; links and figures are correct."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import meteor_py as meteor
from tests.support.java import SPARK_ENVIRONMENT, SPARK_PYTHON, require_java
from tests.support.terminal import Terminal

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {"README": README} | {
    page: (ROOT / "docs" / f"{page}.md").read_text()
    for page in (
        "exceptions",
        "groups",
        "history",
        "index",
        "peer-groups",
        "publish-subscribe",
        "shared",
        "spark",
    )
}
PAGES |= {f"{p.parent.name}/{p.stem}": p.read_text() for p in sorted(ROOT.glob("docs/*/*.md"))}
BLOCKS = {
    f"{page}-{number}": block
    for page, text in PAGES.items()
    for number, block in enumerate(
        re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    )
}


#: Code blocks that use Spark. They run in one process, to start Java only once.
WITH_SPARK = {
    name: code for name, (what, code) in BLOCKS.items() if what == "python" and "pyspark" in code
}

#: A program that runs files one after another, isolated from each other's names and streams.
IN_TURN = """
import os, sys
import meteor_py as meteor
sys.executable = os.environ["PYSPARK_PYTHON"]
for path in sys.argv[1:]:
    with open(path) as file:
        code = compile(file.read(), path, "exec")
    print(chr(30) + path)
    exec(code, {"__name__": "__main__"})
    with meteor.connect() as m:
        for name in m.streams():
            m.stream(name, create=True).delete()
"""


@pytest.mark.parametrize("block", [name for name in BLOCKS if name not in WITH_SPARK])
def test_code_block_runs(block: str, tmp_path: Path) -> None:
    language, code = BLOCKS[block]
    assert language in ("python", "sh"), "no test can run this block"
    command = [sys.executable, "-W", "error", "-c", code]
    if language == "sh":
        command = ["bash", "-euc", code]
    assert output(command, tmp_path).strip(), "the block prints nothing"


@pytest.mark.parametrize(
    "error",
    [
        meteor.LeaseLost("Lost.", stream="s", group="billing"),
        meteor.OutcomeUnknown("Unknown.", stream="s"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_loop_for_production_continues_after_a_lost_lease_or_an_unknown_outcome(
    url: str, error: meteor.MeteorError, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = (code for _, code in BLOCKS.values() if "def consume(" in code)
    names: dict[str, Any] = {}
    exec(code.partition("\nwith meteor.connect(")[0], names)
    poll, polls = meteor.Subscriber.poll, 0

    def poll_after_error(sub: meteor.Subscriber, **options: Any) -> meteor.RecordBatch:
        nonlocal polls
        polls += 1
        if polls == 1:
            raise error
        return poll(sub, **options)

    monkeypatch.setattr(meteor.Subscriber, "poll", poll_after_error)
    with meteor.connect(url) as m:
        stream, stop = m.stream("s", create=True), threading.Event()
        with stream.publisher() as pub:
            pub.publish(b"x").result()
        found: list[bytes] = []

        def handle(record: meteor.Record) -> None:
            found.append(record.value)
            stop.set()

        names["consume"](stream, handle, stop)
        assert (found, stream.group("billing").confirmed) == ([b"x"], 1)


def test_second_peer_leads_only_after_the_first_has_exited(url: str) -> None:
    _, code = BLOCKS["peer-groups-0"]
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = {"METEOR_URL": url}
    with Terminal(command, environment=environment) as first:
        first.wait_for("This member leads. Press Enter")
        with Terminal(command, environment=environment) as second:
            second.wait_for("has joined: [{'host': 'n1'}, {'host': 'n1'}]")
            with meteor.connect(url) as m, m.peer_group("workers", create=False) as group:
                assert group.leader is not None
                assert first.text.startswith(group.leader.id)
            assert "This member leads" not in second.text
            first.press("\n")
            assert first.wait() == 0
            second.wait_for("This member leads. Press Enter")
            second.press("\n")
            assert second.wait() == 0


@pytest.mark.slow
@pytest.mark.timeout(330)  # a loaded machine starts Spark slowly
def test_code_blocks_with_spark_run(tmp_path: Path) -> None:
    require_java()
    for name, code in WITH_SPARK.items():
        (tmp_path / name).write_text(code)
    command = [sys.executable, "-W", "error", "-c", IN_TURN, *WITH_SPARK]
    _, *shown = output(command, tmp_path).split(chr(30))
    found = {name: text.strip() for name, _, text in (each.partition("\n") for each in shown)}
    assert list(found) == list(WITH_SPARK)
    assert all(found.values()), "a block prints nothing"


def output(command: list[str], folder: Path) -> str:
    """Run a command with ``folder`` as home directory; return its output. It must exit with 0."""
    # The `meteor` command must be the one next to the interpreter that runs the tests.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        **SPARK_ENVIRONMENT,
        **SPARK_PYTHON,
        "PATH": path,
        "HOME": str(folder),
    }
    environment.pop("METEOR_URL", None)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        input="\n",  # for blocks that wait for Enter
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_readme_has_at_most_200_lines() -> None:
    assert len(README.splitlines()) <= 200


def test_readme_links_lead_to_existing_files() -> None:
    targets = relative_links(README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_readme_on_pypi_has_no_relative_links() -> None:
    readme = ProjectMetadata(str(ROOT), PluginManager()).core.readme
    assert readme.startswith("# meteor_py\n")
    assert relative_links(readme) == []


def relative_links(text: str) -> list[str]:
    return [t for t in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in t]


def table_rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_readme_figures_equal_the_benchmark_results() -> None:
    results: dict[str, list[str]] = {}
    for row in table_rows((ROOT / "benchmarks/RESULTS.md").read_text()):
        results.setdefault(row[0], row)  # of several rows with the same name, keep the first
    speed = README.partition("## Speed")[2].partition("\n## ")[0]
    rows = table_rows(speed)[1:]
    assert len(rows) >= 6
    for what, ours, theirs, ratio in rows:
        _, best, peer, best_ratio, *_ = results[what]
        rate, _, name = peer.partition(" (")
        assert name.startswith("redis-py"), what
        assert [ours, theirs, ratio] == [best, rate, best_ratio], what
