"""``meteor demo``: it shows what it promises, and nothing is left of it, however it ends."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from meteor_cli.commands.demo import spark
from meteor_cli.commands.demo.tour import PYTHON, SHELL
from meteor_cli.signals import cleaning_up
from tests.support.commands import METEOR, PATIENCE_S, environment, meteor
from tests.support.java import require_java
from tests.support.servers import plain_client
from tests.support.terminal import Terminal
from tests.support.waiting import eventually

STEPS = 11
MARK = "METEOR_TEST_MARK"


class Traces:
    """What a command and all that it starts leave behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        mark = secrets.token_hex(8)
        self._mark = f"{MARK}={mark}"
        #: For the command; what it starts inherits the mark, in whatever session it is.
        self.environ = {MARK: mark, "TMPDIR": str(folder)}

    @property
    def processes(self) -> list[str]:
        found: list[str] = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_text())
            except OSError:
                continue  # gone, or somebody else's
        return found

    def are_gone(self) -> bool:
        return not self.processes and not os.listdir(self.folder)


@pytest.fixture
def traces() -> Iterator[Traces]:
    if not Path("/proc/self/environ").exists():
        pytest.skip("There is no /proc to find processes in.")
    with tempfile.TemporaryDirectory(prefix="meteor-", dir="/tmp") as folder:
        yield Traces(Path(folder))


def test_the_demo_shows_every_part_in_eighty_columns_and_leaves_nothing(traces: Traces) -> None:
    done = meteor(
        None, "demo", "--no-spark", "--records", "20000", environ=traces.environ, preloaded=False
    )
    assert (done.code, done.err, done.text.count("✓")) == (0, "", STEPS), done
    assert "Published 20,000 records of 100 bytes" in done.text
    assert done.text.count("of 3,000 records 0 lost") == 2
    assert "to 3 processes, each in order, and killed" in done.text
    assert "another led in a higher term" in done.text
    assert [line for line in done.lines if len(line) > 80] == []
    eventually(traces.are_gone, PATIENCE_S, "something is left")


def test_a_foreign_server_is_left_as_it_was_and_nobody_elses_connection_is_cut(url: str) -> None:
    with plain_client(url) as neighbour:
        neighbour.set("mine", "1")
        connection = neighbour.client_id()
        before = neighbour.keys("*")
        done = meteor(None, "demo", "--no-spark", "--records", "1000", "--url", url)
        assert (done.code, done.text.count("✓")) == (0, STEPS), done
        assert neighbour.client_id() == connection
        assert neighbour.keys("*") == before
    assert done.err.startswith("meteor: warning: The server at ")
    assert done.err.count("\n") == 1, "a sentence, without a line of source"


def test_only_a_url_that_was_given_is_used_not_that_of_the_environment(url: str) -> None:
    with plain_client(url) as neighbour:
        before = neighbour.info("stats")["total_connections_received"]
        done = meteor(url, "demo", "--no-spark", "--records", "1000")
        assert (done.code, done.err) == (0, "")
        assert neighbour.info("stats")["total_connections_received"] == before


def test_a_bar_is_shown_in_a_terminal_and_the_last_records_as_tail_prints_them() -> None:
    with Terminal([METEOR, "demo", "--no-spark", "--records", "1000"], rows=60) as terminal:
        assert terminal.wait() == 0
        assert b"\x1b[?25l" in terminal.output, "a bar hides the cursor"
        assert terminal.output.rstrip().endswith(b"sub.confirm(record)")
        shown = [line for line in terminal.lines if ": " in line and " table-" in line]
        assert [line.split()[0] for line in shown] == ["1497", "1498", "1499"]
        assert "$ meteor tail orders -n 3" in terminal.text


@pytest.mark.parametrize(
    "moment",
    [
        *("is up", "Read them all back", "Went to", "0 lost", "three consumers"),
        *("three members", "once, in order"),
    ],
)
def test_after_ctrl_c_nothing_is_left(moment: str, traces: Traces) -> None:
    command = (
        METEOR,
        "demo",
        "--no-spark",
        "--records",
        "1000000",
    )  # so that there is still much to do
    with Terminal(command, rows=60, environment=traces.environ, preloaded=False) as terminal:
        terminal.wait_for(moment)
        terminal.press("\x03")
        assert terminal.wait() == 130, terminal.text
        assert "Traceback" not in terminal.text
        assert "Try next" not in terminal.text
    eventually(traces.are_gone, PATIENCE_S, "something is left")


def test_ctrl_c_pressed_again_does_not_stop_the_cleaning_up(traces: Traces) -> None:
    command = (METEOR, "demo", "--no-spark", "--records", "1000")
    with Terminal(command, rows=60, environment=traces.environ, preloaded=False) as terminal:
        terminal.wait_for("Went to")
        terminal.press("\x03")
        terminal.press("\x03")
        assert terminal.wait() == 130, terminal.text
        assert "Traceback" not in terminal.text
    eventually(traces.are_gone, PATIENCE_S, "something is left")


def test_ctrl_c_in_a_finalizer_is_not_lost() -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)  # an exception here would be ignored
            finalized.append(True)

    def work() -> None:
        with cleaning_up():
            Finalized()
            assert finalized == [True]
            threading.Event().wait(PATIENCE_S)  # it comes again

    finalized: list[bool] = []
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        signal.signal(signal.SIGINT, before)


def test_when_the_demo_is_killed_its_processes_end(traces: Traces) -> None:
    command = (METEOR, "demo", "--no-spark", "--records", "1000")
    with Terminal(command, rows=60, environment=traces.environ, preloaded=False) as terminal:
        terminal.wait_for("one is killed")
        terminal.process.kill()
        eventually(lambda: not traces.processes, PATIENCE_S, "processes are left")


@pytest.mark.slow
@pytest.mark.timeout(330)  # a loaded machine takes its time to start Spark
def test_spark_reads_the_stream_and_none_of_its_noise_is_seen(url: str, traces: Traces) -> None:
    require_java()
    arguments = ("demo", "--records", "20000", "--url", url)
    done = meteor(None, *arguments, environ=traces.environ, patience_s=240, preloaded=False)
    assert (done.code, done.text.count("✓")) == (0, STEPS + 1), done
    assert done.err.count("\n") == 1, "the warning of that server"
    assert "20,500" in done.text
    assert 'spark.read.format("meteor").option("stream", "orders-' in done.text
    assert [line for line in done.lines if len(line) > 80] == []
    eventually(traces.are_gone, PATIENCE_S, "something is left")


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["\x03", None])
def test_when_it_ends_while_spark_is_at_work_spark_ends_too(
    ending: str | None, traces: Traces
) -> None:
    require_java()
    command = (METEOR, "demo", "--records", "1000")
    with Terminal(command, rows=60, environment=traces.environ, preloaded=False) as terminal:
        terminal.wait_for("Spark starts")
        eventually(lambda: "java" in "".join(traces.processes), PATIENCE_S, "no Java was started")
        if ending:
            terminal.press(ending)
            assert terminal.wait() == 130, terminal.text
            assert "Traceback" not in terminal.text
            eventually(traces.are_gone, PATIENCE_S, "something is left")
        else:
            terminal.process.kill()
            eventually(lambda: not traces.processes, PATIENCE_S, "processes are left")


@pytest.mark.parametrize(
    ("java", "needed"), [(None, "Java 17 or newer"), ("1.8.0_402", "Java 17 or newer")]
)
def test_without_a_recent_java_a_line_says_what_is_needed(
    java: str | None, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if java:
        (tmp_path / "bin").mkdir()
        program = tmp_path / "bin" / "java"
        program.write_text(f"#!/bin/sh\necho 'openjdk version \"{java}\"' >&2\n")
        program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    done = meteor(None, "demo", "--records", "1000")
    assert (done.code, done.err, done.text.count("✓")) == (0, "", STEPS), done
    assert f"(Spark reads streams, too: {needed}.)" in done.text


def test_without_pyspark_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(spark, "version", not_found)
    assert spark.missing() == "pip install 'meteor-py[spark]'"
    monkeypatch.setattr(spark, "version", lambda name: "4.1.3")
    assert spark.missing() == "pip install 'meteor-py[spark]'"


@pytest.mark.parametrize("line", SHELL)
def test_what_it_says_to_try_next_in_a_shell_is_a_command(line: str) -> None:
    command = line.rpartition(" | ")[2]
    program, *arguments = shlex.split(command)
    assert program == "meteor"
    assert meteor(None, *arguments, "--help").code == 0


def test_what_it_says_to_try_next_in_python_prints_the_record(url: str) -> None:
    command = [sys.executable, "-u", "-W", "ignore", "-c", PYTHON]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(url)) as run:
        assert run.stdout is not None
        assert "b'hello'" in run.stdout.readline()
        run.send_signal(signal.SIGTERM)


def test_a_server_inside_one_process_is_refused() -> None:
    done = meteor(None, "demo", "--url", "fake://")
    assert (done.code, done.out) == (2, b"")
    assert "one process only" in done.err
