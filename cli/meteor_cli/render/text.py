"""Human-readable messages, numbers and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import click

from meteor_cli.render.sanitize import sanitize

if TYPE_CHECKING:
    from meteor_py import ServerDescription

_UNITS = "kMGTP"
#: Spaces between table columns, and the width below which a name column is not shrunk.
_GAP, _NARROW = 2, 6


def say(text: str) -> None:
    """Print a sanitized message on stderr."""
    click.echo(f"meteor: {sanitize(text)}", err=True)


def counted(number: int, noun: str, verb: str = "", verbs: str = "") -> str:
    """Return a count with its noun and an optional verb, in the singular or plural.

    >>> counted(1, "record"), counted(2_000, "record", "waits", "wait")
    ('1 record', '2,000 records wait')
    """
    text = f"{number:,} {noun} {verb}" if number == 1 else f"{number:,} {noun}s {verbs}"
    return text.rstrip()


def show_bytes(count: int | None) -> str:
    """Format a number of bytes; "-" for None.

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


def show_count(count: int) -> str:
    """Format a number in at most five characters, rounded down. Supports numbers below 10^18.

    >>> [show_count(n) for n in (9_999, 12_345, 999_999, 1_234_567, 12_345_678_901)]
    ['9,999', '12.3k', '999k', '1.23M', '12.3G']
    """
    if count < 10_000:
        return f"{count:,}"
    power = min((len(str(count)) - 1) // 3, len(_UNITS))
    size = count / 1000**power
    digits = 0 if size >= 100 else 1 if size >= 10 else 2
    step = 10**digits
    # Round down: otherwise, 999,999 would become 1000k.
    return f"{int(size * step) / step:.{digits}f}{_UNITS[power - 1]}"


def show_age(ms: int, now_ms: int) -> str:
    """Format the time since ``ms``; "-" for 0, which means never.

    >>> show_age(1_000, 91_000)
    '2 min'
    """
    return show_span(max(now_ms - ms, 0) / 1000) if ms else "-"


def show_span(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def show_exactly(seconds: float) -> str:
    """Format a duration without rounding it.

    >>> show_exactly(86_400), show_exactly(129_600), show_exactly(0.5)
    ('1 d', '36 h', '0.5 s')
    """
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds % size == 0:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:,.10g} s"


def product_name(server: ServerDescription) -> str:
    """Return the product and version of a server, such as "Valkey 9.1.0"."""
    words = ((server.product or "server").capitalize(), server.version)
    return " ".join(sanitize(word) for word in words if word)


def print_table(headings: str, rows: Sequence[Sequence[object]], *, whole: bool = False) -> None:
    """Print a table on stdout, unless it has no rows.

    Args:
        headings: Titles separated by " | ". A final ``#`` marks a right-aligned column of numbers.
        rows: The cells.
        whole: Whether to print full names even if they do not fit the terminal. Numbers are never
            shortened.
    """
    if not rows:
        return
    from rich.console import Console
    from rich.table import Table

    # In a pipe or a file, lines may have any length.
    console = Console(markup=False, highlight=False)
    if whole or not console.is_terminal:
        console = Console(markup=False, highlight=False, width=100_000)
    cells = [[_cell(value) for value in row] for row in rows]
    titles = headings.split(" | ")
    names = [i for i, title in enumerate(titles) if not title.endswith("#")]
    titles = [title.removesuffix("#") for title in titles]
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
    """Return the column widths, shrinking the widest name columns to fit ``room``."""
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
    """Print a name and its value on each line."""
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name:<{width}}  {_cell(value)}".rstrip())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else sanitize(str(value))
