"""A worker process that is killed when the run that started it ends."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support.preloaded_process import PreloadedProcess

ROOT = Path(__file__).resolve().parents[2]
#: Exit code of a worker that decided to die during its work.
DIED = 77

# A shell script that kills the worker when the script's standard input closes, which also happens
# if the run dies. The worker cannot do this itself, because it may be paused.
_WATCHDOG = 'read -r _; kill -s KILL "$1"'


class Process:
    """One worker. Its output goes to `log`."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = PreloadedProcess(
                ["-m", "tests.chaos.worker", *arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches only the run, which then ends the workers
            )
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "watchdog", str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def wait(self, timeout_s: float) -> bool:
        """Return whether the process ended by itself within this time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._dismiss()
        return True

    def kill(self) -> None:
        """Kill the process. Idempotent."""
        self._dismiss()
        self._process.kill()
        self._process.wait()

    def _dismiss(self) -> None:
        # End the watchdog first: once the worker is gone, its pid may belong to another process.
        self._watchdog.kill()
        self._watchdog.communicate()

    def log_tail(self, lines: int = 12) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
