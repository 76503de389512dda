"""The screen of ``meteor top``, redrawn until the user presses q."""

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

#: Seconds before the first rates are shown, and between attempts to reach a silent server. If
#: ``--interval`` is shorter, it applies instead.
FIRST_S = 1.0


class Gauge:
    """Measures the server and its streams, and computes rates since the previous measurement."""

    def __init__(self, client: meteor_py.Client, names: tuple[str, ...]) -> None:
        self._client = client
        self._observer = Observer(client, names)
        self._before = Snapshot()

    def measure(self) -> View:
        """Take a measurement; raise ``ConnectionFailed`` if the server does not reply."""
        server = self._client.describe()
        found = self._observer.snapshot()
        before, self._before = self._before.streams, found
        rates = {
            name: rates_between(before.get(name), seen) for name, seen in found.streams.items()
        }
        return View(server, str(self._client.address), datetime.now(), found, rates)


class Display:
    """The table on the alternate screen, redrawn after each measurement and resize.

    There is only one thread. The handler for the resize signal redraws at once, even while the main
    program waits for the server.
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
        """Show the table until the user presses q.

        Raises:
            ConnectionFailed: The server has not replied for ``patience_s`` seconds.
        """
        from rich.live import Live

        live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with ended_once() as enable_signals, _keyboard() as keyboard, live:
            self._live = live
            with resizing(self._draw):
                enable_signals(True)
                pause_s = min(FIRST_S, interval_s)
                self._draw()
                while not _wait_for_q(keyboard, pause_s):
                    self._measure(patience_s)
                    self._draw()
                    is_silent = self._silent_since is not None
                    pause_s = min(FIRST_S, interval_s) if is_silent else interval_s
                enable_signals(False)

    def _measure(self, patience_s: float) -> None:
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
            problem = f"No reply for {silent_s:.0f} s; showing the last known state."
            self._view = replace(self._view, problem=problem)

    def _draw(self) -> None:
        """Draw the table at the current screen size. Also called by the resize signal's handler."""
        if self._drawing:
            self._outdated = True  # the interrupted call draws again
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
        # rich would trust $COLUMNS and $LINES, which hold the initial size.
        width, height = os.get_terminal_size(sys.stdout.fileno())
        self._console.size = ConsoleDimensions(width or 80, height or 24)
        width, height = self._console.size
        lines = draw(self._view, self._sort, width=width, height=height, number=self._number)
        self._live.update(Text("\n", no_wrap=True, end="").join(lines), refresh=True)


def open_console() -> Console:
    """Return a console to draw on; raise ``click.UsageError`` if there is none."""
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console(markup=False, highlight=False)
        if not console.is_dumb_terminal:
            return console
    raise click.UsageError("There is no terminal to draw on. Use --once to print the table once.")


@contextmanager
def _keyboard() -> Iterator[int | None]:
    """Yield a descriptor from which to read single keys, or None if stdin is not a terminal."""
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
        termios.tcsetattr(fd, termios.TCSAFLUSH, before)  # discards unread keys


def _wait_for_q(keyboard: int | None, seconds: float) -> bool:
    """Wait until the user presses q or the time is up; return whether the user pressed q."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([] if keyboard is None else [keyboard], [], [], left)
        if ready and keyboard is not None:
            typed = os.read(keyboard, 1024)
            if b"q" in typed:
                return True
            if not typed:
                keyboard = None  # the terminal is gone
    return False
