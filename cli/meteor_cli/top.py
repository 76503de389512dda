"""``meteor top``: all streams and groups at a glance, as they change."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from types import FrameType
from typing import TYPE_CHECKING, cast

import click

from meteor_cli.board import Sort, View, draw, ranked
from meteor_cli.command import command
from meteor_cli.completion import complete_stream
from meteor_cli.output import print_json
from meteor_cli.session import Session
from meteor_cli.snapshot import Look, Observer, rates_between

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    import meteor_py

#: Seconds between the two looks of ``--once``, and before the first rates are shown.
_FIRST_S = 1.0
#: How many times as long as for an answer to wait for a server that has gone: 30 s.
_PATIENCE = 6


@command(
    example="""\
meteor top                           # all streams, until q or Ctrl-C
meteor top orders trades --sort lag  # two, the farthest behind first
meteor top --once --json | jq '{name, rate, unarchived}'"""
)
@click.argument("streams", nargs=-1, metavar="[STREAM]...", shell_complete=complete_stream)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1, max=3600),
    default=2.0,
    metavar="SECONDS",
    help="Time between two looks: 2.",
)
@click.option(
    "--sort",
    type=click.Choice(["name", "rate", "lag", "memory"]),
    default="name",
    help="What comes first; where there is no room for all, what is shown at all.",
)
@click.option(
    "-n", "--number", type=click.IntRange(min=1), metavar="N", help="Show at most N streams."
)
@click.option("--once", is_flag=True, help="Print one look, with rates over one second, and end.")
@click.option("--json", "as_json", is_flag=True, help="With --once: one JSON object per stream.")
def top(
    session: Session,
    streams: tuple[str, ...],
    interval: float,
    sort: str,
    number: int | None,
    once: bool,
    as_json: bool,
) -> None:
    """Show streams, their groups and their stores as they change.

    For each stream: records published per second, records in the ring and how many it holds,
    memory. Beneath it what reads it: records confirmed per second, how many wait (lag), and who
    has the lease; `(store)` is the archiver. "lost": dropped before the group had read them.
    """
    if as_json and not once:
        raise click.UsageError("--json is for one look: say --once, or use `meteor watch --json`.")
    console = None if once else _console()
    with session.connect() as m:
        for name in streams:
            m.stream(name, create=False)  # a name that is wrong is an error now, not an empty table
        gauge = Gauge(m, streams)
        view = gauge.measure()
        if console is not None:
            patience_s = _PATIENCE * session.timeout
            Display(console, gauge, view, cast(Sort, sort), number).run(interval, patience_s)
            return
        time.sleep(_FIRST_S)
        view = gauge.measure()
    if as_json:
        _print_json(view, cast(Sort, sort), number)
    else:
        _print_text(view, cast(Sort, sort), number)


class Gauge:
    """Looks at the server and the streams, and compares with the look before."""

    def __init__(self, client: meteor_py.Client, names: tuple[str, ...]) -> None:
        self._client = client
        self._observer = Observer(client, names)
        self._before = Look()

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
        with _ended_once() as hear, _keyboard() as keyboard, live:
            self._live = live
            with _resizing(self._draw):
                hear(True)
                pause_s = min(_FIRST_S, interval_s)
                self._draw()
                while not _wait_for_q(keyboard, pause_s):
                    self._look(patience_s)
                    self._draw()
                    is_silent = self._silent_since is not None
                    pause_s = min(_FIRST_S, interval_s) if is_silent else interval_s
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


def _console() -> Console:
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


@contextmanager
def _ended_once() -> Iterator[Callable[[bool], None]]:
    """Let a signal end what is done while the function was called with True last; and only one.

    Else one that came while the terminal is prepared or put back, such as the second of an
    impatient user, would leave it as it is then.
    """
    noted: list[int] = []
    is_heard = False

    def end() -> None:
        handler = before[signal.Signals(noted[0])]
        if callable(handler):
            handler(noted[0], None)

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        if is_heard and len(noted) == 1:
            end()

    def hear(wanted: bool) -> None:
        nonlocal is_heard
        is_heard = wanted
        if wanted and noted:
            end()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield hear
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _resizing(react: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGWINCH, lambda number, frame: react())
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)


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


# One look


def _print_text(view: View, sort: Sort, number: int | None) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    width = console.width if console.is_terminal else None
    lines = draw(view, sort, width=width, height=None, number=number)
    # By way of click, which tells when nobody reads; rich would end the program.
    with console.capture() as capture:
        for line in lines:
            console.print(line, soft_wrap=True)
    click.echo(capture.get(), nl=False)


def _print_json(view: View, sort: Sort, number: int | None) -> None:
    from meteor_cli.streams import to_fields

    for name, seen in ranked(view, sort)[:number]:
        rates = view.rates[name]
        fields = to_fields(seen.stream) | {
            "rate": rates.published,
            "unarchived": None if seen.stream.archived is None else seen.unarchived,
            "archive_rate": rates.archived,
        }
        for group in fields["groups"]:
            group["rate"] = rates.confirmed.get(group["name"])
        print_json(fields)
