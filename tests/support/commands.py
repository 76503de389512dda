"""Helpers that run the ``meteor`` command in a separate process, with its modules preloaded."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from tests.support.preloaded_process import PreloadedProcess, run

METEOR = Path(sys.executable).parent / "meteor"
#: Seconds after which a command counts as hung. Long enough for loaded machines.
PATIENCE_S = 60.0


class CommandResult(NamedTuple):
    """A finished command's exit code and output."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def objects(self) -> list[Any]:
        """The parsed output of ``--json``."""
        return [msgspec.json.decode(line) for line in self.out.splitlines()]


def environment(url: str | None, others: Mapping[str, str] | None = None) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name != "METEOR_URL"}
    return clean | ({"METEOR_URL": url} if url else {}) | dict(others or {})


def meteor(
    url: str | None,
    *arguments: str,
    given: bytes = b"",
    environ: Mapping[str, str] | None = None,
    patience_s: float = PATIENCE_S,
    preloaded: bool = True,
) -> CommandResult:
    """Run a command until it exits. $METEOR_URL is ``url``, or is not set if ``url`` is None."""
    command = [str(METEOR), *arguments]
    env = environment(url, environ)
    if preloaded:
        done = run(command, input=given, timeout=patience_s, env=env)
    else:
        done = subprocess.run(
            command, input=given, timeout=patience_s, env=env, capture_output=True, check=False
        )
    return CommandResult(done.returncode, done.stdout, done.stderr.decode())


def succeed(url: str | None, *arguments: str, given: bytes = b"") -> CommandResult:
    """Run a command that must succeed."""
    done = meteor(url, *arguments, given=given)
    assert done.code == 0, done
    return done


class RunningCommand:
    """A running command, with pipes for its input and output."""

    def __init__(self, url: str | None, *arguments: str) -> None:
        self.process = PreloadedProcess(
            [METEOR, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(url),
        )
        self._seen = {"stdout": b"", "stderr": b""}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def line(self, source: str = "stdout") -> str:
        """Return the next output line."""
        pipe = getattr(self.process, source)
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self._seen[source]:
            ready, _, _ = select.select([pipe], [], [], max(deadline - time.monotonic(), 0.0))
            assert ready, f"no output on {source}: {self._seen}"
            data = os.read(pipe.fileno(), 65536)
            assert data, f"{source} was closed: {self._seen}"
            self._seen[source] += data
        line, _, self._seen[source] = self._seen[source].partition(b"\n")
        return line.decode()

    def end(self, how: signal.Signals | None = None) -> CommandResult:
        """Send a signal, if one is given; close the input; wait until the command exits."""
        if how is not None:
            self.process.send_signal(how)
        out, err = self.process.communicate(timeout=PATIENCE_S)
        err = self._seen["stderr"] + err
        return CommandResult(self.process.wait(), self._seen["stdout"] + out, err.decode())
