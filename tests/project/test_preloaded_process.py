"""A process forked from a preloaded one behaves like a newly started one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import PATIENCE_S
from tests.support.preloaded_process import PreloadedProcess, run

PROGRAMS = {
    "arguments": "import sys; print(sys.argv, sys.path[0], __name__)",
    "standard files": "import sys; print(sys.stdin.read() * 2); print('é', file=sys.stderr)",
    "bytes": "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read() * 100_000)",
    "environment": "import os; print(os.getcwd(), os.environ['HOME'], len(os.environ) < 9)",
    "exit code": "import sys, atexit; atexit.register(print, 'bye'); sys.exit(7)",
    "exit message": "import sys; sys.exit('no')",
    "late thread": "import threading; threading.Timer(0.1, print, ['late']).start()",
    "buffered output": "print('x', end='')",
    "a signal": "import os, signal; print('x'); os.kill(os.getpid(), signal.SIGKILL)",
    "signal handlers": "import signal as s; print(s.getsignal(s.SIGCHLD), s.getsignal(s.SIGINT))",
    "child processes": "import subprocess as s; print(s.run(['sh', '-c', 'exit 3']).returncode)",
    "warnings": "import warnings; warnings.warn('x')",
    "open files": "import os; print(sorted(os.listdir('/proc/self/fd')))",
}


def both(arguments: list[str], folder: Path, given: bytes = b"in") -> list[Any]:
    env = {"HOME": "/nowhere", "PATH": os.environ["PATH"]}
    options: dict[str, Any] = {"input": given, "cwd": folder, "env": env, "timeout": PATIENCE_S}
    forked = run(arguments, **options)
    started = subprocess.run([sys.executable, *arguments], capture_output=True, **options)
    return [(done.returncode, done.stdout, done.stderr) for done in (forked, started)]


@pytest.mark.parametrize("what", PROGRAMS)
def test_forked_program_behaves_like_a_started_one(what: str, tmp_path: Path) -> None:
    forked, started = both(["-W", "ignore", "-c", PROGRAMS[what], "1", "2"], tmp_path)
    assert forked == started


def test_forked_scripts_and_modules_behave_like_started_ones(tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(PROGRAMS["arguments"].replace("sys.path[0]", "__file__"))
    for arguments in (["-m", "told", "1"], [str(tmp_path / "told.py"), "1"]):
        forked, started = both(arguments, tmp_path)
        assert forked == started


def test_errors_and_ctrl_c_end_a_forked_process_like_a_started_one(tmp_path: Path) -> None:
    for code in ("raise ValueError('x')", "import os; os.kill(os.getpid(), 2)"):
        (code_forked, out, words), (code_started, _, _) = both(["-c", code], tmp_path)
        assert (code_forked, out) == (code_started, b"")
        assert words.startswith(b"Traceback")


def test_large_input_and_output_do_not_deadlock(tmp_path: Path) -> None:
    forked, started = both(
        ["-c", PROGRAMS["bytes"].replace("100_000", "3")], tmp_path, b"x" * 1_000_000
    )
    assert forked == started
    assert len(forked[1]) == 3_000_000


def test_process_can_be_stopped_killed_and_waited_for_with_a_timeout() -> None:
    with PreloadedProcess(
        ["-c", "import signal; signal.pause()"], stdin=subprocess.PIPE
    ) as process:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=0.01)
        process.pause(PATIENCE_S)
        process.kill()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        assert process.poll() == process.returncode == -signal.SIGKILL
        process.kill()  # kills no other process


def test_each_process_has_its_own_random_numbers() -> None:
    command = ["-c", "import random; print(random.random())"]
    assert len({run(command, input=b"", timeout=PATIENCE_S).stdout for _ in range(3)}) == 3


def test_process_that_cannot_start_fails_and_does_not_affect_other_processes(
    tmp_path: Path,
) -> None:
    assert run(["-c", "print()"], input=b"", timeout=PATIENCE_S, cwd=tmp_path / "no").returncode
    assert not run(["-c", "print()"], input=b"", timeout=PATIENCE_S).returncode
