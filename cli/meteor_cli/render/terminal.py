"""Standard output and the terminal: much data, progress, questions."""

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
    """Standard output for much data."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._fd = sys.stdout.fileno()

    def write(self, data: bytes) -> None:
        """Write, and have it seen at once.

        Raises:
            BrokenPipeError: Nobody reads it.
        """
        left = memoryview(data)
        while left:
            left = left[os.write(self._fd, left) :]

    def check_reader(self) -> None:
        """Raise ``BrokenPipeError`` if nobody will read what is written next."""
        if is_cut_off(self._fd):
            raise BrokenPipeError


def is_cut_off(fd: int) -> bool:
    """Whether the other end of a pipe or terminal is closed."""
    poll = select.poll()
    poll.register(fd, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


class Refused(click.ClickException):
    """What was asked for is not done unless it is asked for with more words."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        say(self.message)


def ask(question: str, *, yes: bool) -> None:
    """Have something destructive confirmed.

    Raises:
        Refused: There is nobody to ask, and ``--yes`` was not given.
        click.exceptions.Exit: The answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise Refused(f"{question} There is no terminal to ask at: say --yes to do it.")
    if not click.confirm(f"{question} Go on?", err=True):
        say("nothing was done.")
        raise click.exceptions.Exit(1)


def confirm(subject: str, done: str, *, dry_run: bool, yes: bool) -> bool:
    """Whether to do it: False for ``--dry-run``, which only says so; else ``ask``.

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
    """A bar on stderr, if that is a terminal; call the function with how much is done in all."""
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as RestColumn

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.completed:,.0f}"), RestColumn())
    title = TextColumn("{task.description}", markup=False)
    with Progress(title, *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
