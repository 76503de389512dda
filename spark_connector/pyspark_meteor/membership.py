"""Reading for a group: the driver of a query holds the group's lease, and confirms for it.

The checkpoint of the query is what counts for where it goes on; the group shows others how far it
is, keeps the archiver from expiring what it has not read, and gives a new query its start.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from meteor_py import GroupActive, GroupNotFound, LeaseLost, Position, Stream
from meteor_py.runtime.clock import now
from meteor_py.subscribe.group_session import GroupSession
from meteor_py.subscribe.lease import Lease, Term

if TYPE_CHECKING:
    from collections.abc import Callable

LEASE_S = 10.0
#: Seconds for which a driver may be busy with one batch: it is alive as long as its process is.
_BUSY_S = 7 * 86_400.0
#: Seconds to wait for the last confirm when a query ends.
_CLOSE_S = 2.0


class Membership:
    """One stream's group; for one thread."""

    def __init__(self, stream: Stream, group: str) -> None:
        self._stream = stream
        self._group = group
        self._keeper: GroupSession | None = None
        self._term: Term | None = None

    def start(self, resolve: Callable[[], int]) -> int:
        """Where the group is, and begin it at what ``resolve`` says if it is new.

        So the start of a query is the same when it is asked for again, after a crash, too.
        """
        try:
            return self._stream.group(self._group).confirmed
        except GroupNotFound:
            self._stream.seek_group(self._group, resolve())
            return self._stream.group(self._group).confirmed

    def hold(self) -> None:
        """Have the lease.

        Raises:
            GroupActive: Somebody else has it, and has not given it up in twice its life.
        """
        if self._keeper is None:
            name, life = self._stream.name, self._stream.incarnation
            member = f"spark:{self._group}:{os.getpid()}"
            lease = Lease(name, life, self._group, member, LEASE_S)
            confirmed = self._stream.group(self._group).confirmed
            self._keeper = GroupSession(self._stream.client._connector, lease, confirmed, _BUSY_S)
        self._term = self._keeper.hold(2 * LEASE_S)
        if self._term is None:
            owner = self._stream.group(self._group).owner or "somebody"
            raise GroupActive(
                f"The query reads for group {self._group!r} of stream {self._stream.name!r}, and "
                f"{owner} has its lease; stop that one, or read for another group.",
                stream=self._stream.name,
                group=self._group,
                owner=owner,
            )

    def confirm(self, position: Position) -> None:
        """Tell the group that all before this is done. It never goes back.

        Raises:
            LeaseLost: Another member has taken over.
        """
        keeper = self._keeper
        assert keeper is not None, "held before"
        keeper.alive_at = now()  # else the lease would lapse, after a week
        keeper.raise_refusal()
        if position.offset > keeper.confirmed:
            if keeper.term is not self._term:
                raise LeaseLost(
                    f"Another member reads for group {self._group!r} of stream "
                    f"{self._stream.name!r} now.",
                    stream=self._stream.name,
                    group=self._group,
                )
            keeper.epoch = position.epoch
            keeper.confirm(position.offset, self._term)

    def close(self) -> None:
        """Send the last confirm, and give up the lease."""
        if self._keeper is not None:
            self._keeper.close(_CLOSE_S)
