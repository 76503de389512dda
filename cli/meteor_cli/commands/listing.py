"""What the ``ls`` commands share: some things may not be readable, and there may be none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from meteor_cli.render.json import print_json
from meteor_cli.render.text import say

if TYPE_CHECKING:
    from meteor_py import Client, MeteorError, Stream

T = TypeVar("T")
#: What was found, and whether that is all.
Found = tuple[list[T], bool]


def look_at_streams(m: Client, look: Callable[[Stream], T]) -> Found[T]:
    """What ``look`` finds at each stream of a server."""
    from meteor_py import LogTruncated, StreamNotFound

    deleted = (StreamNotFound, LogTruncated)  # a moment ago
    return look_at_all(
        m.streams(),
        lambda name: look(m.stream(name, create=False)),
        what="stream",
        is_gone=lambda name, error: isinstance(error, deleted),
    )


def look_at_all(
    names: Iterable[str],
    look: Callable[[str], T],
    *,
    what: str,
    is_gone: Callable[[str, MeteorError | ValueError], bool],
) -> Found[T]:
    """What ``look`` finds; one that cannot be read, because something else has written its keys,
    is named and does not hide the others.

    Args:
        names: Of the things to look at.
        look: Called with each.
        what: They are.
        is_gone: Whether an error only means that it has been deleted meanwhile.
    """
    from meteor_cli.errors import explain
    from meteor_py import ConnectionFailed, MeteorError

    found: list[T] = []
    is_all = True
    for name in names:
        try:
            found.append(look(name))
        except ConnectionFailed:
            raise
        except (MeteorError, ValueError) as error:
            if not is_gone(name, error):
                say(f"{what} {name!r} is left out: {explain(error)}")
                is_all = False
    return found, is_all


def print_list(
    found: Sequence[T],
    is_all: bool,
    *,
    as_json: bool,
    fields: Callable[[T], dict[str, Any]],
    table: Callable[[Sequence[T]], None],
    empty: str,
) -> None:
    """Print what there is, as JSON or as a table.

    Args:
        found: The things.
        is_all: Whether nothing was left out; else the exit status is 1.
        as_json: An object for each.
        fields: Those of the object.
        table: Prints them for people.
        empty: Said to people if there is none.
    """
    if as_json:
        for one in found:
            print_json(fields(one))
    elif found:
        table(found)
    elif is_all:
        say(empty)
    if not is_all:
        raise click.exceptions.Exit(1)
