"""Reading for a group: the driver of a query holds the group's lease, and confirms for it.

The checkpoint of the query decides where it continues. The group shows its progress to others,
keeps the archiver from expiring what it has not read, and gives a new query its start.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from meteor_py import GroupActive, GroupNotFound, LeaseLost, Position, Stream
from meteor_py.runtime.clock import now
from meteor_py.subscribe.group_session import GroupSession
from meteor_py.subscribe.lease import Term

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
        self._session: GroupSession | None = None
        self._term: Term | None = None

    def start(self, resolve: Callable[[], int]) -> int:
        """Return the group's position; a new group starts at what ``resolve`` returns.

        So the start of a query stays the same, also after a crash.
        """
        try:
            return self._stream.group(self._group).confirmed
        except GroupNotFound:
            self._stream.seek_group(self._group, resolve())
            return self._stream.group(self._group).confirmed

    def hold(self) -> None:
        """Hold the lease, waiting for it if need be.

        Raises:
            GroupActive: Another member has held it for twice its TTL.
        """
        if self._session is None:
            self._session = GroupSession.join(
                *(self._stream._handle, self._group, f"spark:{self._group}:{os.getpid()}"),
                confirmed=self._stream.group(self._group).confirmed,
                lease_ttl_s=LEASE_S,
                max_poll_interval_s=_BUSY_S,
            )
        self._term = self._session.hold(2 * LEASE_S)
        if self._term is None:
            owner = self._stream.group(self._group).owner or "another member"
            raise GroupActive(
                f"The query reads for group {self._group!r} of stream {self._stream.name!r}, and "
                f"{owner} has its lease; stop that one, or read for another group.",
                stream=self._stream.name,
                group=self._group,
                owner=owner,
            )

    def confirm(self, position: Position) -> None:
        """Confirm all records before this position. The confirmed offset never goes back.

        Raises:
            LeaseLost: Another member has taken over.
        """
        session = self._session
        assert session is not None, "held before"
        session.alive_at = now()  # else the lease would lapse, after a week
        session.raise_refusal()
        if position.offset > session.confirmed:
            if session.term is not self._term:
                raise LeaseLost(
                    f"Another member reads for group {self._group!r} of stream "
                    f"{self._stream.name!r} now.",
                    stream=self._stream.name,
                    group=self._group,
                )
            session.epoch = position.epoch
            session.confirm(position.offset, self._term)

    def close(self) -> None:
        """Send the last confirm, and give up the lease."""
        if self._session is not None:
            self._session.close(_CLOSE_S)
