"""A peer group on the command line: how it is opened, and how a member is shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import Client, Member, PeerGroup


@contextmanager
def opened_group(session: Session, name: str) -> Iterator[PeerGroup]:
    """A group that exists; nothing is begun."""
    with session.connect() as m, open_existing(m, name) as group:
        yield group


def open_existing(m: Client, name: str) -> PeerGroup:
    """The group NAME or NAME/INSTANCE.

    Raises:
        ValueError: No group can be named so.
    """
    from meteor_py.redis.keys import check_name

    parts = name.split("/")
    try:
        for part in parts:
            check_name(part)
        is_name = len(parts) <= 2
    except ValueError:
        is_name = False
    if not is_name:
        raise ValueError(
            f"{name[:200]!r} cannot be the name of a group: GROUP is NAME or NAME/INSTANCE, each 1 "
            "to 128 of the characters A-Z a-z 0-9 . _ - and not starting with a dot."
        )
    return m.peer_group(name, create=False)


def member_fields(member: Member, leader: str | None) -> dict[str, Any]:
    """A member as ``--json`` shows it."""
    return {
        "id": member.id,
        "status": member.status.value,
        "leads": member.id == leader,
        "persistent": member.persistent,
        "priority": member.priority,
        "joined": member.joined,
        "metadata": member.metadata,
    }
