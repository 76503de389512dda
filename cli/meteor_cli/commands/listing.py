"""Helpers for the ``ls`` commands, which skip items that they cannot read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from meteor_cli.render.json import print_json, to_fields
from meteor_cli.render.text import say

if TYPE_CHECKING:
    from meteor_py import Client, Stream

T = TypeVar("T")
#: The results, and whether they are complete.
Found = tuple[list[T], bool]


def read_streams(
    m: Client, read: Callable[[Stream], Iterable[T]], only: str | None = None
) -> Found[T]:
    """Call ``read`` for each stream on a server, and return all results.

    If ``only`` is the name of a stream, call ``read`` for this stream alone.
    """
    from meteor_py import LogTruncated, StreamNotFound

    if only is not None:
        return list(read(m.stream(only, create=False))), True

    def read_one(name: str) -> Iterable[T]:
        try:
            return read(m.stream(name, create=False))
        except (StreamNotFound, LogTruncated):
            return ()  # deleted in the meantime

    return read_all("stream", m.streams(), read_one)


def read_all(what: str, names: Iterable[str], read: Callable[[str], Iterable[T]]) -> Found[T]:
    """Call ``read`` for each name, and return all results.

    If an item cannot be read, for example because another program wrote its keys, report it and
    continue with the next one.

    Raises:
        ConnectionFailed: The server cannot be reached.
    """
    from meteor_cli.errors import explain
    from meteor_py import ConnectionFailed, MeteorError

    found: list[T] = []
    is_complete = True
    for name in names:
        try:
            found += read(name)
        except ConnectionFailed:
            raise
        except (MeteorError, ValueError) as error:
            say(f"skipping {what} {name!r}: {explain(error)}")
            is_complete = False
    return found, is_complete


def print_list(
    found: Found[T],
    as_json: bool,
    fields: Callable[[T], dict[str, Any]],
    print_for_people: Callable[[Sequence[T]], None],
    if_none: str,
) -> None:
    """Print the results. Exit with 1 if they are incomplete."""
    things, is_complete = found
    if as_json:
        for thing in things:
            print_json(fields(thing))
    elif things:
        print_for_people(things)
    elif is_complete:
        say(if_none)
    if not is_complete:
        raise click.exceptions.Exit(1)


def stream_fields(found: tuple[str, Any]) -> dict[str, Any]:
    """Return the JSON fields of a (stream name, description) pair."""
    return to_fields(found[1], stream=found[0])
