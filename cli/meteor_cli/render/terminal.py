"""Standard output and the terminal: bulk output, confirmation, progress bars."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from meteor_cli.render.text import say


class Sink:
    """Unbuffered standard output."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._fd = sys.stdout.fileno()

    def write(self, data: bytes) -> None:
        """Write all bytes; raise ``BrokenPipeError`` if the reader has closed the pipe."""
        left = memoryview(data)
        while left:
            left = left[os.write(self._fd, left) :]

    def check_reader(self) -> None:
        """Raise ``BrokenPipeError`` if the reader has closed the pipe."""
        if is_cut_off(self._fd):
            raise BrokenPipeError


def is_cut_off(fd: int) -> bool:
    """Return whether the other end of a pipe or terminal is closed."""
    poll = select.poll()
    poll.register(fd, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


class Refused(click.ClickException):
    """The command needs an explicit option before it does something risky."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        say(self.message)


def ask(question: str, *, yes: bool) -> None:
    """Ask the user to confirm something destructive.

    Raises:
        Refused: There is no terminal, and ``--yes`` was not given.
        click.exceptions.Exit: The user answered no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise Refused(f"{question} There is no terminal to ask on. Use --yes to confirm.")
    if not click.confirm(f"{question} Continue?", err=True):
        say("nothing was changed.")
        raise click.exceptions.Exit(1)


def confirm(subject: str, done: str, *, dry_run: bool, yes: bool) -> bool:
    """Ask for confirmation. With ``--dry-run``, report what would happen and return False.

    >>> confirm("stream 'a'", "deleted: 7 records", dry_run=False, yes=True)
    True
    """
    if dry_run:
        say(f"{subject} would be {done}.")
        return False
    ask(f"{subject[0].upper()}{subject[1:]} will be {done}.", yes=yes)
    return True


@contextmanager
def progress(
    what: str, total: int | None, *, quiet: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, unless ``quiet`` is set or stderr is not a terminal.

    Yields a function to call with the number of units done so far. Without a total, the bar pulses
    and shows the elapsed time instead of the remaining time.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich import progress as rich
    from rich.console import Console

    title = rich.TextColumn("{task.description}", markup=False)
    count = rich.TextColumn("{task.fields[count]}")
    clock = rich.TimeRemainingColumn() if total else rich.TimeElapsedColumn()
    columns = (title, rich.BarColumn(), rich.TaskProgressColumn(), count, clock)
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, count="")
        yield lambda done: bar.update(task, completed=done, count=f"{done:,}")
