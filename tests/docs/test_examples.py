"""The examples, as somebody at a terminal meets them."""

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


def test_what_is_typed_in_one_terminal_is_read_in_the_other(
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


def test_carts_are_as_if_one_consumer_had_done_it_all() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(CARTS)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    title, shared, *carts = done.stdout.splitlines()
    assert title.startswith("600 changes of 12 carts by 3 consumers")
    assert shared.endswith("; 0 changes failed")
    assert len(carts) == 3


def test_a_frozen_leader_is_replaced_in_a_higher_term_and_its_write_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(LEADERS)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    said = dict.fromkeys(done.stdout.splitlines())
    led = [re.fullmatch(r"(one|two): leads, term (\d+)", line) for line in said]
    who, terms = zip(*(found.groups() for found in led if found), strict=True)
    first, second, third = who
    assert (first != second, first == third) == (True, True)
    assert sorted(set(terms), key=int) == list(terms), "each term is higher"
    refused = rf"{first}: valid is \w+; refused: Term {terms[0]} of group 'workers' is over"
    assert any(re.match(refused, line) for line in said)
    counted = [
        int(line.split()[-1]) for line in said if line.startswith("main: ") and line[-1:].isdigit()
    ]
    assert len(counted) == 3, done.stdout
    assert counted == sorted(counted)


@pytest.mark.timeout(330)  # a loaded machine takes its time to start Spark
@pytest.mark.slow
def test_spark_counts_words_per_window_and_nothing_is_left(tmp_path: Path) -> None:
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
    assert title.startswith("Spark starts")
    found = [WINDOW.fullmatch(line) for line in windows]
    assert found, done.stdout
    assert all(found), done.stdout
    spans = [match.groups()[:2] for match in found if match]
    assert spans == sorted(set(spans)), "each window once, in order"
    assert os.listdir(tmp_path) == []


def test_without_java_one_sentence_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(WORD_COUNT)],
        env=os.environ | {"JAVA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("Spark needs Java 17 or newer")


def test_without_pyspark_one_sentence_says_so(tmp_path: Path) -> None:
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
