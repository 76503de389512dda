"""Python processes that start in milliseconds, forked from one that has done the imports.

    with PreloadedProcess(["-m", "tests.support.group_members"], stdout=subprocess.PIPE) as process:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=10)

The tests start a thousand processes, and each would spend half a second of CPU time on the same
imports. A `PreloadedProcess` has its own standard files, signals, exit handlers and exit code, like
any other process. But its imports are already done, and /proc shows the command line and the
environment of its parent, the fork server (tests/support/fork_server.py). Tests that depend on a
fresh interpreter, such as those that set PYTHON... variables, use `subprocess`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, Self

from tests.support.waiting import eventually

_ROOT = Path(__file__).resolve().parents[2]
#: Timeout in seconds: for the fork server to start, fork or end, and for a process to end.
_PATIENCE_S = 60.0


class PreloadedProcess:
    """A process that runs ``python ARGUMENTS``, or a script.

    Takes some of the options of `subprocess.Popen`. With ``terminal``, standard input is the
    controlling terminal of the process. Not thread-safe.
    """

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        terminal: bool = False,
    ) -> None:
        self.args = [str(argument) for argument in arguments]
        self.returncode: int | None = None
        self.stdin, for_stdin = _pipe(stdin, 0)
        self.stdout, for_stdout = _pipe(stdout, 1)
        self.stderr, for_stderr = _pipe(stderr, 2)
        request = {
            "arguments": self.args,
            "folder": os.fspath(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "session": start_new_session,
            "terminal": terminal,
        }
        self._codes = _fork_server().start(json.dumps(request), [for_stdin, for_stdout, for_stderr])
        for own, file in ((stdin, for_stdin), (stdout, for_stdout), (stderr, for_stderr)):
            if own in (subprocess.PIPE, subprocess.DEVNULL):
                os.close(file)
        self.pid = int(_line(self._codes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait(_PATIENCE_S)

    def poll(self) -> int | None:
        """Return the exit code, negative if a signal ended the process; None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait up to `timeout` seconds for the exit, and return the exit code."""
        if self.returncode is None:
            self._codes.settimeout(timeout)
            try:
                self.returncode = int(_line(self._codes))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self._codes.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is not None:
            return
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass  # it has just ended, and the fork server reaped it before we learned of it

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def pause(self, timeout: float) -> None:
        """Send SIGSTOP and wait until it takes effect."""
        self.send_signal(signal.SIGSTOP)
        self.wait_stopped(timeout)

    def wait_stopped(self, timeout: float) -> None:
        """Wait until a signal has stopped all threads of the process."""
        threads = Path("/proc", str(self.pid), "task")
        eventually(
            lambda: all(") T " in (each / "stat").read_text() for each in threads.iterdir()),
            timeout,
            "the process did not stop",
        )

    def communicate(self, input: bytes = b"", timeout: float | None = None) -> tuple[bytes, bytes]:
        """Write the input, read all output, and wait for the exit."""
        deadline = None if timeout is None else time.monotonic() + timeout
        read = {"stdout": bytearray(), "stderr": bytearray()}
        left = memoryview(input)
        with selectors.DefaultSelector() as selector:
            for name in read:
                if (pipe := getattr(self, name)) is not None and not pipe.closed:
                    selector.register(pipe, selectors.EVENT_READ, name)
            if self.stdin is not None and not self.stdin.closed:
                if left:
                    selector.register(self.stdin, selectors.EVENT_WRITE)
                else:
                    self.stdin.close()
            while selector.get_map():
                for key, _ in selector.select(self._left(deadline)):
                    if key.data:
                        part = os.read(key.fd, 65_536)
                        read[key.data] += part
                        done = not part
                    else:
                        left = left[_write(key.fd, left) :]
                        done = not left
                    if done:
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
        self.wait(self._left(deadline))
        return bytes(read["stdout"]), bytes(read["stderr"])

    def _left(self, deadline: float | None) -> float | None:
        if deadline is None:
            return None
        left = deadline - time.monotonic()
        if left <= 0:
            raise subprocess.TimeoutExpired(self.args, 0.0)
        return left


def run(
    arguments: Sequence[str | Path], *, input: bytes, timeout: float, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run a process until it ends, like `subprocess.run` with captured output."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with PreloadedProcess(arguments, **pipes, **options) as process:
        try:
            out, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.wait(), out, errors)


def _write(file: int, data: memoryview) -> int:
    try:
        return os.write(file, data[: select.PIPE_BUF])  # a write of this size does not block
    except BrokenPipeError:
        return len(data)  # the process has closed its input


def _pipe(wanted: int | IO[Any] | None, number: int) -> tuple[IO[bytes] | None, int]:
    """Return our end of a new pipe, or None, and the file descriptor for the child."""
    if wanted is None:
        return None, number
    if wanted == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_RDWR)
    if wanted != subprocess.PIPE:
        return None, wanted if isinstance(wanted, int) else wanted.fileno()
    reading, writing = os.pipe()
    if number == 0:
        return open(writing, "wb", 0), reading
    return open(reading, "rb", 0), writing


def _line(connection: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\n"):
        part = connection.recv(1)  # reading more would consume a part of the next line
        assert part, "the fork server has ended"
        received += part
    return received


class _ForkServer:
    """This process's fork server, and the connection for requests to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests, inside = socket.socketpair()
        with inside:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(inside.fileno())],
                cwd=_ROOT,
                pass_fds=[inside.fileno()],
                start_new_session=True,  # Ctrl-C must interrupt only the tests
            )

    def start(self, request: str, files: list[int]) -> socket.socket:
        """Start a process. Read its pid, and later its exit code, from the returned socket."""
        ours, theirs = socket.socketpair()
        ours.settimeout(_PATIENCE_S)
        with theirs, self._lock:
            socket.send_fds(self._requests, [b"x"], [theirs.fileno(), *files])
            ours.sendall(request.encode())
            ours.shutdown(socket.SHUT_WR)
        return ours

    def close(self) -> None:
        """Stop the server; processes that it forked continue."""
        self._requests.close()
        self._process.wait(_PATIENCE_S)


@cache
def _fork_server() -> _ForkServer:
    """Return the fork server of this test process."""
    server = _ForkServer()
    atexit.register(server.close)
    return server
