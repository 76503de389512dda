"""Sentences and figures for people."""

from __future__ import annotations

import click

from meteor_cli.render.sanitize import sanitize

_UNITS = "kMGTP"


def say(text: str) -> None:
    """Tell the user something that is no result; others may have named what is in it."""
    click.echo(f"meteor: {sanitize(text)}", err=True)


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


def show_count(count: int) -> str:
    """A number in few characters.

    >>> [show_count(n) for n in (9_999, 12_345, 999_999, 1_234_567, 12_345_678_901)]
    ['9,999', '12.3k', '999k', '1.23M', '12.3G']
    """
    if count < 10_000:
        return f"{count:,}"
    power = min((len(str(count)) - 1) // 3, len(_UNITS))
    size = count / 1000**power
    digits = 0 if size >= 100 else 1 if size >= 10 else 2
    step = 10**digits
    return f"{int(size * step) / step:.{digits}f}{_UNITS[power - 1]}"  # down: 999,999 is not 1M


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
