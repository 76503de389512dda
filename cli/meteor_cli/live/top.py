"""The screen of ``meteor top``, which is drawn again and again, until q."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

import click

from meteor_cli.live.screen import Sort, View, draw
from meteor_cli.live.snapshot import Observer, Snapshot, rates_between
from meteor_cli.signals import ended_once, resizing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    import meteor_py

#: Seconds before the first rates are shown, and between two looks at a server that is silent.
FIRST_S = 1.0


class Gauge:
    """Looks at the server and the streams, and compares with the look before."""

    def __init__(self, client: meteor_py.Client, names: tuple[str, ...]) -> None:
        self._client = client
        self._observer = Observer(client, names)
        self._before = Snapshot()

    def measure(self) -> View:
        """Look now.

        Raises:
            ConnectionFailed: The server does not answer.
        """
        server = self._client.describe()
        look = self._observer.look()
        before, self._before = self._before.streams, look
        rates = {name: rates_between(before.get(name), seen) for name, seen in look.streams.items()}
        return View(server, str(self._client.address), datetime.now(), look, rates)


class Display:
    """The table on a screen of its own, drawn again when there is something new or a new size.

    All happens in one thread. The signal of a new size is answered where it comes, so that the
    table fits at once, even while a server lets us wait.
    """

    def __init__(
        self, console: Console, gauge: Gauge, view: View, sort: Sort, number: int | None
    ) -> None:
        self._console = console
        self._gauge = gauge
        self._view = view
        self._sort: Sort = sort
        self._number = number
        self._live: Live | None = None
        self._drawing = False
        self._outdated = False
        self._silent_since: float | None = None

    def run(self, interval_s: float, patience_s: float) -> None:
        """Show it until q is pressed.

        Raises:
            ConnectionFailed: The server has not answered for so long.
        """
        from rich.live import Live

        live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with ended_once() as hear, _keyboard() as keyboard, live:
            self._live = live
            with resizing(self._draw):
                hear(True)
                pause_s = min(FIRST_S, interval_s)
                self._draw()
                while not _wait_for_q(keyboard, pause_s):
                    self._look(patience_s)
                    self._draw()
                    is_silent = self._silent_since is not None
                    pause_s = min(FIRST_S, interval_s) if is_silent else interval_s
                hear(False)

    def _look(self, patience_s: float) -> None:
        from meteor_py import ConnectionFailed

        started = time.monotonic()
        try:
            self._view = self._gauge.measure()
            self._silent_since = None
        except ConnectionFailed:
            if self._silent_since is None:
                self._silent_since = started
            silent_s = time.monotonic() - self._silent_since
            if silent_s >= patience_s:
                raise
            trouble = f"No answer for {silent_s:.0f} s; this is what there was before."
            self._view = replace(self._view, trouble=trouble)

    def _draw(self) -> None:
        """Draw for the size that the screen has now; called by the signal of a new size, too."""
        if self._drawing:
            self._outdated = True  # we are in the middle of it, further up
            return
        self._outdated = True
        while self._outdated:
            self._outdated, self._drawing = False, True
            try:
                self._draw_once()
            finally:
                self._drawing = False

    def _draw_once(self) -> None:
        from rich.console import ConsoleDimensions
        from rich.text import Text

        assert self._live is not None
        # Not as rich does: $COLUMNS and $LINES say what the size was at the beginning.
        width, height = os.get_terminal_size(sys.stdout.fileno())
        self._console.size = ConsoleDimensions(width or 80, height or 24)
        width, height = self._console.size
        lines = draw(self._view, self._sort, width=width, height=height, number=self._number)
        self._live.update(Text("\n", no_wrap=True, end="").join(lines), refresh=True)


# The terminal


def open_console() -> Console:
    """One that can be drawn on.

    Raises:
        click.UsageError: There is none.
    """
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console(markup=False, highlight=False)
        if not console.is_dumb_terminal:
            return console
    raise click.UsageError("There is no terminal to draw on: say --once for one look.")


@contextmanager
def _keyboard() -> Iterator[int | None]:
    """Let single keys be read, unseen; None if there is no keyboard."""
    if not sys.stdin.isatty():
        yield None
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSAFLUSH, before)  # what was typed is not for the shell


def _wait_for_q(keyboard: int | None, seconds: float) -> bool:
    """Whether q was pressed in this time."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([] if keyboard is None else [keyboard], [], [], left)
        if ready and keyboard is not None:
            typed = os.read(keyboard, 1024)
            if b"q" in typed:
                return True
            if not typed:
                keyboard = None  # hung up
    return False
