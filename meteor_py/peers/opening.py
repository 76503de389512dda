"""Opening a peer group, beginning it if need be; and deleting one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meteor_py.errors import PeerError
from meteor_py.peers.codec import PeerCodec
from meteor_py.peers.config import PeersConfig
from meteor_py.peers.protocol import PeerProtocol
from meteor_py.redis import keys
from meteor_py.redis.scripts import PEERS_DELETE

if TYPE_CHECKING:
    from meteor_py.peers.group import PeerGroup
    from meteor_py.redis.connector import Connector

#: Keys that one call deletes.
_UNLINKED = 1_000


def open_group(
    connector: Connector,
    name: str,
    instance: str | None,
    asked: dict[str, Any],
    codec: PeerCodec | None = None,
    create: bool = True,
) -> PeerGroup:
    """Open a group, and begin it if it does not exist. For what it raises see ``Client.group``."""
    from meteor_py.peers.group import PeerGroup

    if instance is None and "/" in name:
        name, _, instance = name.partition("/")
    keys.check_name(name, "group")
    if instance is not None:
        name = f"{name}/{keys.check_name(instance, 'group')}"
    config = replace(PeersConfig(), **asked)
    present = PeerProtocol(connector, name).open(config, create=create)
    setting = present.differing(asked)
    if setting is not None:
        raise PeerError(
            f"Group {name!r} exists with {setting}={getattr(present, setting)!r}, not "
            f"{asked[setting]!r}; leave the setting out.",
            group=name,
        )
    return PeerGroup(connector, name, present, codec)


def delete_group(group: PeerGroup, *, force: bool) -> None:
    """Delete a group, and close the handle. For what it raises see ``PeerGroup.delete``."""
    books = group.books
    mine = {membership.session for membership in group.memberships()}
    alive = [m for m in books.look().members.values() if m.alive and m.session not in mine]
    if alive and not force:
        raise _has_members(group, len(alive))
    for membership in group.memberships():
        membership.leave()
    # Who is alive joins again at once, under its name: what goes by names is deleted in one step.
    of_members, passing = books.passing()
    answer = books.run(PEERS_DELETE, ["force" if force else "", *of_members])
    if answer[0] == b"ALIVE":  # somebody has joined since
        raise _has_members(group, answer[1])
    books.connector.call("SREM", keys.PEERS, group.name)
    if books.connector.call("EXISTS", books.key("config")):  # begun anew meanwhile
        books.connector.call("SADD", keys.PEERS, group.name)
    for start in range(0, len(passing), _UNLINKED):
        books.connector.call("UNLINK", *passing[start : start + _UNLINKED])
    group.close()


def _has_members(group: PeerGroup, number: int) -> PeerError:
    return PeerError(
        f"Group {group.name!r} has {number} members that are alive; have them leave, or delete it "
        "with force=True.",
        group=group.name,
    )
