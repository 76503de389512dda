"""What is printed: results to stdout, the rest to stderr."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Literal

import click

from meteor_cli.harmless import harmless, harmless_json

if TYPE_CHECKING:
    from rich.progress import Progress


#: Columns between two columns of a table, and what is left of a name at least.
_GAP, _NARROW = 2, 6


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


def say(text: str) -> None:
    """Tell the user something that is no result; others may have named what is in it."""
    click.echo(f"meteor: {harmless(text)}", err=True)


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[object]], *, whole: bool = False
) -> None:
    """A table on stdout; numbers to the right. A heading says which by ending with ``#``.

    ``whole``: nothing is cut to fit a terminal. Else names are, and numbers are not.
    """
    if not rows:
        return
    from rich.console import Console
    from rich.table import Table

    # Into a pipe or a file, lines are as long as they have to be.
    console = Console(markup=False, highlight=False)
    if whole or not console.is_terminal:
        console = Console(markup=False, highlight=False, width=100_000)
    cells = [[harmless(_cell(value)) for value in row] for row in rows]
    titles = [heading.removesuffix("#") for heading in headings]
    names = [i for i, heading in enumerate(headings) if not heading.endswith("#")]
    widths = _widths([titles, *cells], names, console.width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for i, title in enumerate(titles):
        justify: Literal["left", "right"] = "left" if i in names else "right"
        table.add_column(title, justify=justify, no_wrap=True, width=widths[i])
    for row_cells in cells:
        table.add_row(*row_cells)
    with console.capture() as capture:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _widths(cells: Sequence[Sequence[str]], names: Sequence[int], room: int) -> list[int]:
    """What columns need; if that is too much, the widest of the names get less."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    excess = sum(widths) + _GAP * (len(widths) - 1) - room
    for _ in range(excess):
        widest = max(names, key=lambda i: widths[i], default=None)
        if widest is None or widths[widest] <= _NARROW:
            break
        widths[widest] -= 1
    return widths


def print_facts(facts: dict[str, object]) -> None:
    """Names and values, one on each line."""
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name:<{width}}  {harmless(_cell(value))}".rstrip())


def print_json(fields: object) -> None:
    """One object on a line of its own, harmless for a terminal."""
    import msgspec

    click.echo(harmless_json(msgspec.json.encode(fields).decode()))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def counted(number: int, noun: str) -> str:
    """So many of something.

    >>> counted(1, "record"), counted(2_000, "record")
    ('1 record', '2,000 records')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def show_bytes(count: int | None) -> str:
    """A size that can be grasped.

    >>> show_bytes(12_345_678)
    '12.3 MB'
    """
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def show_age(ms: int, now_ms: int) -> str:
    """How long ago a time was; "-" for 0, which means never.

    >>> show_age(1_000, 91_000)
    '2 min'
    """
    if not ms:
        return "-"
    seconds = max(now_ms - ms, 0) / 1000
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


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


@contextmanager
def progress(
    what: str, total: int | None, *, quiet: bool = False
) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal; call the function with how much is done in all."""
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    with make_progress() as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def make_progress() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.completed:,.0f}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
