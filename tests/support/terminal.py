"""A terminal that runs a command, and its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pyte

from tests.support.commands import METEOR, PATIENCE_S
from tests.support.preloaded_process import PreloadedProcess


class Terminal:
    """A command that runs in its own terminal.

    >>> with Terminal(["meteor", "tail", "orders"]) as terminal:  # doctest: +SKIP
    ...     terminal.wait_for("hello")
    ...     terminal.press("\\x03")
    ...     assert terminal.wait() == 130
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        columns: int = 80,
        rows: int = 24,
        environment: Mapping[str, str] | None = None,
        preloaded: bool = True,
    ) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        #: The raw output.
        self.output = b""
        self._fd, inside = pty.openpty()
        self.resize(columns, rows)
        options: dict[str, Any] = {
            **dict.fromkeys(("stdin", "stdout", "stderr"), inside),
            "env": os.environ | {"TERM": "xterm-256color"} | dict(environment or {}),
            "start_new_session": True,
        }
        # A controlling terminal, so that Ctrl-C and a new size reach the command as signals.
        self.process: PreloadedProcess | subprocess.Popen[bytes] = (
            PreloadedProcess(command, terminal=True, **options)
            if preloaded and command[0] == METEOR
            else subprocess.Popen(command, preexec_fn=_own_terminal, **options)
        )
        os.close(inside)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._fd)

    @property
    def lines(self) -> list[str]:
        """The lines of the screen."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def press(self, keys: str) -> None:
        """Type something; ``\\x03`` is Ctrl-C, ``\\x04`` Ctrl-D."""
        os.write(self._fd, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Resize the window."""
        self._screen.resize(rows, columns)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, what: str | Callable[[Terminal], bool]) -> None:
        """Wait until the screen shows a text, or a condition on the terminal is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not (what in self.text if isinstance(what, str) else what(self)):
            if time.monotonic() > deadline or not self._read(deadline):
                raise AssertionError(f"{what!r} is not on the screen:\n{self.text}")

    def wait(self) -> int:
        """Wait until the command has ended, and return its exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(deadline):
            assert time.monotonic() < deadline, f"The command did not end:\n{self.text}"
        return self.process.wait(PATIENCE_S)

    def _read(self, deadline: float) -> bool:
        """Read more output; return False at its end."""
        if not select.select([self._fd], [], [], max(deadline - time.monotonic(), 0.0))[0]:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # EIO: the other side is closed
            data = b""
        self.output += data
        self._stream.feed(data)
        return bool(data)


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
