"""Mail: messages to members of a group, and their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meteor_py.peers.group import PeerGroup
    from meteor_py.peers.membership import Membership


class Mail:
    def __init__(self, group: PeerGroup) -> None:
        self._group = group

    def answered(self, message: str) -> None:
        pass

    def rejoined(self, membership: Membership) -> None:
        pass

    def close(self) -> None:
        pass
