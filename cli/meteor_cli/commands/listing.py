"""What the ``ls`` commands share: some things may not be readable, and there may be none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from meteor_cli.render.json import print_json, to_fields
from meteor_cli.render.text import say

if TYPE_CHECKING:
    from meteor_py import Client, Stream

T = TypeVar("T")
#: What was found, and whether that is all.
Found = tuple[list[T], bool]


def look_at_streams(
    m: Client, look: Callable[[Stream], Iterable[T]], only: str | None = None
) -> Found[T]:
    """What ``look`` finds at each stream of a server, or at the only one that is asked for."""
    from meteor_py import LogTruncated, StreamNotFound

    if only is not None:
        return list(look(m.stream(only, create=False))), True

    def look_at(name: str) -> Iterable[T]:
        try:
            return look(m.stream(name, create=False))
        except (StreamNotFound, LogTruncated):
            return ()  # deleted a moment ago

    return look_at_all("stream", m.streams(), look_at)


def look_at_all(what: str, names: Iterable[str], look: Callable[[str], Iterable[T]]) -> Found[T]:
    """What ``look`` finds at each; one that cannot be read, because something else has written its
    keys, is named and does not hide the others."""
    from meteor_cli.errors import explain
    from meteor_py import ConnectionFailed, MeteorError

    found: list[T] = []
    is_all = True
    for name in names:
        try:
            found += look(name)
        except ConnectionFailed:
            raise
        except (MeteorError, ValueError) as error:
            say(f"{what} {name!r} is left out: {explain(error)}")
            is_all = False
    return found, is_all


def print_list(
    found: Found[T],
    as_json: bool,
    fields: Callable[[T], dict[str, Any]],
    print_for_people: Callable[[Sequence[T]], None],
    if_none: str,
) -> None:
    """Print what there is; the exit status is 1 if something was left out."""
    things, is_all = found
    if as_json:
        for thing in things:
            print_json(fields(thing))
    elif things:
        print_for_people(things)
    elif is_all:
        say(if_none)
    if not is_all:
        raise click.exceptions.Exit(1)


def stream_fields(found: tuple[str, Any]) -> dict[str, Any]:
    """The fields of something that belongs to a stream, whose name is first."""
    return to_fields(found[1], stream=found[0])
