"""The group handles of this process that are open: they have threads and members to be ended."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from typing import TYPE_CHECKING

from meteor_py.errors import MeteorError

if TYPE_CHECKING:
    from meteor_py.client import Client
    from meteor_py.peers.group import PeerGroup

_log = logging.getLogger(__name__)

_open_groups: weakref.WeakSet[PeerGroup] = weakref.WeakSet()


def register(group: PeerGroup) -> None:
    _open_groups.add(group)
    # Again each time, for the same reason as with publishers.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def forget(group: PeerGroup) -> None:
    _open_groups.discard(group)


def close_groups(client: Client) -> None:
    """Close the group handles of a client, all of them; raise the first error."""
    errors: list[MeteorError] = []
    for group in list(_open_groups):
        if group.books.client is client:
            try:
                group.close()
            except MeteorError as error:
                errors.append(error)
    if errors:
        raise errors[0]


def _close_all() -> None:
    """At the interpreter's end: let others know at once."""
    for group in list(_open_groups):
        try:
            group.close()
        except MeteorError as error:
            _log.error("At the end of %r: %s", group, error)


def _disown_all() -> None:
    """In a forked child: the members, threads and connections are the parent's."""
    _open_groups.clear()


os.register_at_fork(after_in_child=_disown_all)
