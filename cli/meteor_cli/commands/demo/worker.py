"""The processes of the tour: each does one thing, and tells by lines what it has done."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

import meteor_py as meteor

#: Seconds after which the tour gives up on its processes.
PATIENCE_S = 30.0


class Worker:
    """A process that runs a module of the tour.

    Args:
        module: Calls ``run_worker``.
        url: The server.
        arguments: For its work.
    """

    def __init__(self, module: str, url: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, *arguments],
            stdin=subprocess.PIPE,  # which is closed when we end, in whatever way
            stdout=subprocess.PIPE,
            text=True,
            # Not on the command line, where everybody could read a password.
            env=os.environ | {"METEOR_URL": url},
            start_new_session=True,  # Ctrl-C is for us: we see to the rest
        )
        #: What it has told so far.
        self.lines: list[list[str]] = []
        self._thread = threading.Thread(target=self._listen, name="meteor-cli-worker")
        self._thread.start()

    @classmethod
    def start(
        cls, count: int, stack: ExitStack, module: str, url: str, *arguments: str
    ) -> list[Self]:
        """Start several, which end with the stack."""
        workers: list[Self] = []
        for _ in range(count):
            workers.append(cls(module, url, *arguments))
            stack.callback(workers[-1].end)
        return workers

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # else it was killed in the middle of it
                self.lines.append(line.split())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something.

    Raises:
        TimeoutError: It has not come about; ``what`` says who has not done what.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} after {PATIENCE_S:g} seconds.")
        time.sleep(0.002)


def run_worker(work: Callable[..., None]) -> None:
    """Do what a worker does, for as long as the process that has started it lives."""
    end_with_parent()
    try:
        work(*sys.argv[1:])
    except meteor.MeteorError:
        sys.exit(1)  # the tour was ended, and its server with it; else it misses us, and says so


def end_with_parent() -> None:
    """End this process when the one that has started it ends, in whatever way."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=wait, name="meteor-cli-parent", daemon=True).start()
