"""A look at each stream of a server, of which some may not be readable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from meteor_cli.output import say

if TYPE_CHECKING:
    from meteor_py import Client, Stream

_T = TypeVar("_T")


def look_at_all(m: Client, look: Callable[[Stream], _T]) -> tuple[list[_T], bool]:
    """What ``look`` finds, and whether that is all: one stream that cannot be read, because
    something else has written its keys, is named and does not hide the others."""
    from meteor_cli.hints import explain
    from meteor_py import ConnectionFailed, LogTruncated, MeteorError, StreamNotFound

    found: list[_T] = []
    is_all = True
    for name in m.streams():
        try:
            found.append(look(m.stream(name, create=False)))
        except (StreamNotFound, LogTruncated):
            continue  # deleted a moment ago
        except ConnectionFailed:
            raise
        except (MeteorError, ValueError) as error:
            say(f"stream {name!r} is left out: {explain(error)}")
            is_all = False
    return found, is_all
