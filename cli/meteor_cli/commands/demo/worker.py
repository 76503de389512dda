"""The tour's worker processes, which report to it by printing lines."""

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

#: Seconds to wait for a step of the tour.
PATIENCE_S = 30.0


class Worker:
    """A process that runs a module of the tour.

    Args:
        module: A module that calls ``run_worker``.
        url: The server.
        arguments: Arguments for the function that ``run_worker`` calls.
    """

    def __init__(self, module: str, url: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, *arguments],
            stdin=subprocess.PIPE,  # closes when this process ends, even if it is killed
            stdout=subprocess.PIPE,
            text=True,
            # Do not pass the URL as an argument, which every user of the machine can read: it may
            # contain a password.
            env=os.environ | {"METEOR_URL": url},
            start_new_session=True,  # Ctrl-C must reach only this process, which ends the worker
        )
        #: The lines that the worker has printed so far, split into words.
        self.lines: list[list[str]] = []
        self._thread = threading.Thread(target=self._listen, name="meteor-cli-worker")
        self._thread.start()

    @classmethod
    def start(
        cls, count: int, stack: ExitStack, module: str, url: str, *arguments: str
    ) -> list[Self]:
        """Start several workers. The exit stack stops them."""
        workers: list[Self] = []
        for _ in range(count):
            workers.append(cls(module, url, *arguments))
            stack.callback(workers[-1].end)
        return workers

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # a killed worker may leave an incomplete line
                self.lines.append(line.split())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition. Raise ``TimeoutError`` if it does not become true in time.

    Args:
        what: The beginning of the error message, which says what has not happened.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} after {PATIENCE_S:g} seconds.")
        time.sleep(0.002)


def run_worker(work: Callable[..., None]) -> None:
    """Run ``work`` with the process's arguments until the tour ends."""
    end_with_parent()
    try:
        work(*sys.argv[1:])
    except meteor.MeteorError:
        sys.exit(1)  # usually the tour has stopped its server; if not, the tour times out


def end_with_parent() -> None:
    """End this process when its parent ends or is killed."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=wait, name="meteor-cli-parent", daemon=True).start()
