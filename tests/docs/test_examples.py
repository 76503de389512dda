"""Each example prints the expected output when it is started as a user would start it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.java import SPARK_ENVIRONMENT, require_java

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "two_terminals.py"
CARTS = EXAMPLES / "shopping_carts.py"
LEADERS = EXAMPLES / "two_leaders.py"
WORD_COUNT = EXAMPLES / "spark_word_count.py"
WINDOW = re.compile(r"(\d\d:\d\d:\d\d) to (\d\d:\d\d:\d\d): \w+ \d+(, \w+ \d+){2}")


def test_line_typed_in_one_terminal_appears_in_the_other(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METEOR_URL", url)
    command = [sys.executable, "-W", "ignore", str(EXAMPLE)]
    with subprocess.Popen([*command, "read"], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "waiting at offset 0\n"
        typed = subprocess.run(
            [*command, "publish"], input="hello\n", check=True, capture_output=True, text=True
        )
        assert typed.stdout == "offset 0\n"
        assert reader.stdout.readline().endswith(" 0: hello\n")
        reader.send_signal(2)  # Ctrl-C
        assert reader.wait(10) == 130


def test_shopping_carts_equal_those_of_a_single_consumer() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(CARTS)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    title, shared, *carts = done.stdout.splitlines()
    assert title.startswith("600 changes to 12 carts by 3 consumers")
    assert shared.endswith("; 0 changes failed")
    assert len(carts) == 3


def test_two_leaders_example_replaces_a_frozen_leader_and_refuses_its_write() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(LEADERS)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    lines = dict.fromkeys(done.stdout.splitlines())
    led = [re.fullmatch(r"(one|two): leads, term (\d+)", line) for line in lines]
    leaders, terms = zip(*(found.groups() for found in led if found), strict=True)
    first, second, third = leaders
    assert (first != second, first == third) == (True, True)
    assert sorted(set(terms), key=int) == list(terms), "a term is not higher than the last"
    refused = rf"{first}: valid is \w+; refused: Term {terms[0]} of group 'workers' is over"
    assert any(re.match(refused, line) for line in lines)
    counted = [
        int(line.split()[-1]) for line in lines if line.startswith("main: ") and line[-1:].isdigit()
    ]
    assert len(counted) == 3, done.stdout
    assert counted == sorted(counted)


@pytest.mark.timeout(330)  # a loaded machine starts Spark slowly
@pytest.mark.slow
def test_spark_word_count_prints_each_window_once_and_leaves_no_files(tmp_path: Path) -> None:
    require_java()
    done = subprocess.run(
        [sys.executable, "-W", "error", str(WORD_COUNT)],
        cwd=tmp_path,
        env=os.environ | SPARK_ENVIRONMENT | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    title, *windows = done.stdout.splitlines()
    assert title.startswith("Starting Spark")
    found = [WINDOW.fullmatch(line) for line in windows]
    assert found, done.stdout
    assert all(found), done.stdout
    spans = [match.groups()[:2] for match in found if match]
    assert spans == sorted(set(spans)), "a window is repeated or out of order"
    assert os.listdir(tmp_path) == []


def test_spark_word_count_without_java_prints_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(WORD_COUNT)],
        env=os.environ | {"JAVA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("Spark needs Java 17 or newer")


def test_spark_word_count_without_pyspark_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "pyspark.py").write_text("raise ImportError('not here')")
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.touch()
    done = subprocess.run(
        [sys.executable, str(WORD_COUNT)],
        env=os.environ | {"JAVA_HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("PySpark is missing or too old: pip install 'meteor-py[spark]'")
