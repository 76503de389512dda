"""Group membership: a query's driver holds the group's lease and confirms records.

The checkpoint decides where the query continues. The group shows the query's progress to other
programs, keeps the archiver from expiring records that the query has not read, and determines where
a new query starts.
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
#: Maximum seconds for a batch before the lease lapses. It is long, so that the driver keeps the
#: lease as long as its process runs.
_BUSY_S = 7 * 86_400.0
#: Seconds to wait for the last confirm when a query ends.
_CLOSE_S = 2.0


def group_start(stream: Stream, group: str, resolve: Callable[[], int]) -> int:
    """Return the group's position. Create a missing group at the offset from ``resolve()``.

    As a result, a query keeps its start even if it crashes before its first batch.
    """
    try:
        return stream.group(group).confirmed
    except GroupNotFound:
        stream.seek_group(group, resolve())
        return stream.group(group).confirmed


class Membership:
    """The driver's membership in one stream's group. Holds the lease. Not thread-safe.

    Args:
        start: The offset at which to create the group if it does not exist.

    Raises:
        GroupActive: The lease did not become free within twice its TTL.
    """

    def __init__(self, stream: Stream, group: str, start: int) -> None:
        self._stream = stream
        self._group = group
        self._session = GroupSession.join(
            *(stream._handle, group, f"spark:{group}:{os.getpid()}"),
            confirmed=group_start(stream, group, lambda: start),
            lease_ttl_s=LEASE_S,
            max_poll_interval_s=_BUSY_S,
        )
        try:
            self._term = self._hold(2 * LEASE_S)
        except BaseException:
            self._session.close(_CLOSE_S)
            raise

    def _hold(self, timeout_s: float) -> Term:
        stream, group = self._stream, self._group
        term = self._session.hold(timeout_s)
        if term is None:
            owner = stream.group(group).owner or "another member"
            raise GroupActive(
                f"The query cannot read for group {group!r} of stream {stream.name!r}, because "
                f"{owner} holds the lease. Stop that member, or read for another group. Each "
                "load() is a separate member, even within one query. Load a stream once and use "
                "the DataFrame twice, or give each load() its own group.",
                stream=stream.name,
                group=group,
                owner=owner,
            )
        return term

    def confirm(self, position: Position) -> None:
        """Confirm all records before this position. The confirmed offset never moves backwards.

        Raises:
            LeaseLost: Another member has taken over.
        """
        session = self._session
        session.alive_at = now()  # without this, the lease would lapse after a week
        session.raise_refusal()
        if position.offset > session.confirmed:
            if session.term is not self._term:
                raise LeaseLost(
                    f"Another member has taken over group {self._group!r} of stream "
                    f"{self._stream.name!r}.",
                    stream=self._stream.name,
                    group=self._group,
                )
            session.read_in = position
            session.confirm(position.offset, self._term)

    def close(self) -> None:
        """Send the last confirm and release the lease."""
        self._session.close(_CLOSE_S)
