"""``meteor demo``: every step succeeds, and nothing is left behind however it ends."""

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


class Leftovers:
    """Files and processes that a command and its child processes leave behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        mark = secrets.token_hex(8)
        self._mark = f"{MARK}={mark}"
        #: Environment of the command. Its child processes inherit the mark, even in other sessions.
        self.environ = {MARK: mark, "TMPDIR": str(folder)}

    @property
    def processes(self) -> list[str]:
        found: list[str] = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_text())
            except OSError:
                continue  # it has ended or belongs to another user
        return found

    def are_gone(self) -> bool:
        return not self.processes and not os.listdir(self.folder)


@pytest.fixture
def leftovers() -> Iterator[Leftovers]:
    if not Path("/proc/self/environ").exists():
        pytest.skip("There is no /proc to find processes in.")
    with tempfile.TemporaryDirectory(prefix="meteor-", dir="/tmp") as folder:
        yield Leftovers(Path(folder))


def test_demo_shows_every_step_in_80_columns_and_leaves_nothing_behind(
    url: str, leftovers: Leftovers, tmp_path: Path
) -> None:
    environ = leftovers.environ | {"JAVA_HOME": str(tmp_path)}  # there is no Java in this folder
    with plain_client(url) as client:
        before = client.info("stats")["total_connections_received"]
        done = meteor(url, "demo", "--records", "20000", environ=environ, preloaded=False)
        connections = client.info("stats")["total_connections_received"] - before
    assert connections == 0, "the demo used $METEOR_URL"
    assert (done.code, done.err, done.text.count("✓")) == (0, "", STEPS), done
    assert "Published 20,000 records of 100 bytes" in done.text
    assert "It needs Java 17 or newer.)" in done.text
    assert done.text.count("lost 0 of 3,000 records") == 2
    assert "among 3 processes, each cart in order; killed one" in done.text
    assert "elected a new one after" in done.text
    assert done.text.rstrip().endswith("sub.confirm(record)")
    assert [line for line in done.lines if len(line) > 80] == []
    eventually(leftovers.are_gone, PATIENCE_S, "files or processes were left behind")


def only_warnings(text: str) -> bool:
    """Return whether the text consists only of warnings about servers, with no warning repeated."""
    lines = text.splitlines()
    warnings = [line for line in lines if line.startswith("meteor: warning: The server at ")]
    return bool(lines) and lines == list(dict.fromkeys(warnings))


def test_demo_leaves_the_given_server_unchanged(url: str) -> None:
    with plain_client(url) as neighbour:
        neighbour.set("mine", "1")
        connection = neighbour.client_id()
        before = neighbour.keys("*")
        done = meteor(None, "demo", "--no-spark", "--records", "1000", "--url", url)
        assert (done.code, done.text.count("✓")) == (0, STEPS), done
        assert neighbour.client_id() == connection
        assert neighbour.keys("*") == before
    assert only_warnings(done.err), "more than the warning was printed"


@pytest.mark.parametrize(
    "moment",
    [
        "Started a",
        "Read them all back",
        "three consumers",
        "leader of a peer",
        "embedded:///directory",
    ],
)
def test_ctrl_c_leaves_nothing_behind(moment: str, leftovers: Leftovers) -> None:
    # enough records to keep the last step busy
    command = (METEOR, "demo", "--no-spark", "--records", "200000")
    with Terminal(command, rows=60, environment=leftovers.environ, preloaded=False) as terminal:
        terminal.wait_for(moment)
        terminal.press("\x03")
        assert terminal.wait() == 130, terminal.text
        assert "Traceback" not in terminal.text
        assert "try these on your personal server" not in terminal.text
    eventually(leftovers.are_gone, PATIENCE_S, "files or processes were left behind")


def test_demo_shows_progress_bars_and_a_second_ctrl_c_does_not_stop_its_cleanup(
    leftovers: Leftovers,
) -> None:
    command = (METEOR, "demo", "--no-spark", "--records", "1000")
    with Terminal(command, rows=60, environment=leftovers.environ, preloaded=False) as terminal:
        terminal.wait_for("random offsets")
        assert b"\x1b[?25l" in terminal.output, "no bar has hidden the cursor"
        records = [line for line in terminal.lines if ": " in line and " table-" in line]
        assert [line.split()[0] for line in records] == ["1497", "1498", "1499"]
        assert "$ meteor tail orders -n 3" in terminal.text
        terminal.press("\x03")
        terminal.press("\x03")
        assert terminal.wait() == 130, terminal.text
        assert "Traceback" not in terminal.text
    eventually(leftovers.are_gone, PATIENCE_S, "files or processes were left behind")


def test_ctrl_c_in_a_finalizer_is_not_lost() -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)  # an exception here would be ignored
            finalized.append(True)

    def work() -> None:
        with cleaning_up():
            Finalized()
            assert finalized == [True]
            threading.Event().wait(PATIENCE_S)  # the repeated signal interrupts this wait

    finalized: list[bool] = []
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        signal.signal(signal.SIGINT, before)


def test_processes_end_when_the_demo_is_killed(leftovers: Leftovers) -> None:
    command = (METEOR, "demo", "--no-spark", "--records", "1000")
    with Terminal(command, rows=60, environment=leftovers.environ, preloaded=False) as terminal:
        terminal.wait_for("killing the reader")
        terminal.process.kill()
        eventually(lambda: not leftovers.processes, PATIENCE_S, "processes were left behind")


@pytest.mark.slow
@pytest.mark.timeout(330)  # a loaded machine starts Spark slowly
def test_demo_reads_the_stream_with_spark_and_hides_its_log(url: str, leftovers: Leftovers) -> None:
    require_java()
    arguments = ("demo", "--records", "20000", "--url", url)
    done = meteor(None, *arguments, environ=leftovers.environ, patience_s=240, preloaded=False)
    assert (done.code, done.text.count("✓")) == (0, STEPS + 1), done
    assert only_warnings(done.err), "more than the warning was printed"
    assert "20,500" in done.text
    assert 'spark.read.format("meteor").option("stream", "orders-' in done.text
    assert [line for line in done.lines if len(line) > 80 and url not in line] == []
    eventually(leftovers.are_gone, PATIENCE_S, "files or processes were left behind")


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["\x03", None])
def test_spark_is_stopped_if_the_demo_is_interrupted_or_killed(
    ending: str | None, leftovers: Leftovers
) -> None:
    require_java()
    command = (METEOR, "demo", "--records", "1000")
    with Terminal(command, rows=60, environment=leftovers.environ, preloaded=False) as terminal:
        terminal.wait_for("starting Spark")
        eventually(
            lambda: "java" in "".join(leftovers.processes), PATIENCE_S, "no Java was started"
        )
        if ending:
            terminal.press(ending)
            assert terminal.wait() == 130, terminal.text
            assert "Traceback" not in terminal.text
            eventually(leftovers.are_gone, PATIENCE_S, "files or processes were left behind")
        else:
            terminal.process.kill()
            eventually(lambda: not leftovers.processes, PATIENCE_S, "processes were left behind")


def test_outdated_java_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_402\"' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert spark.missing() == "Java 17 or newer"


def test_missing_or_outdated_pyspark_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(spark, "version", not_found)
    assert spark.missing() == "pip install 'meteor-py[spark]'"
    monkeypatch.setattr(spark, "version", lambda name: "4.1.3")
    assert spark.missing() == "pip install 'meteor-py[spark]'"


@pytest.mark.parametrize("line", SHELL)
def test_suggested_shell_line_names_an_existing_command(line: str) -> None:
    command = line.rpartition(" | ")[2]
    program, *arguments = shlex.split(command)
    assert program == "meteor"
    assert meteor(None, *arguments, "--help").code == 0


def test_suggested_python_code_prints_the_record(url: str) -> None:
    command = [sys.executable, "-u", "-W", "ignore", "-c", PYTHON]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(url)) as run:
        assert run.stdout is not None
        assert "b'hello'" in run.stdout.readline()
        run.send_signal(signal.SIGTERM)


def test_demo_refuses_a_fake_server() -> None:
    done = meteor(None, "demo", "--url", "fake://")
    assert (done.code, done.out) == (2, b"")
    assert "serves only one" in done.err
