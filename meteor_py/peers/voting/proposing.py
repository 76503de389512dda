"""Proposing: what a group handle or a member puts to the vote."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from meteor_py.errors import ClockTooUncertain
from meteor_py.peers.config import MEMBERS_MAX
from meteor_py.peers.voting.polls import Motion
from meteor_py.peers.voting.proposal import Kind, Outcome, dump_topic
from meteor_py.records.config import check_choice, check_int, check_seconds
from meteor_py.redis import keys

if TYPE_CHECKING:
    from meteor_py.peers.group_handle import GroupHandle
    from meteor_py.peers.member_handle import MemberHandle

#: Seconds ahead that an action may lie: farther ones are times in ms, or by another clock.
_AHEAD_MAX_S = 30 * 86_400.0


class Proposer:
    """A group handle, or one of its members, as the author of proposals.

    For arguments and errors see ``PeerGroup.propose`` and ``propose_action``.
    """

    def __init__(self, group: GroupHandle, member: MemberHandle | None = None) -> None:
        self._group = group
        self._member = member

    def propose(
        self, topic: Any, kind: Kind | int, timeout: float, require_leader: bool
    ) -> Future[Outcome]:
        motion = self._motion(topic, kind, timeout, require_leader)
        return self._group.polls.propose(motion, self._member)

    def propose_action(
        self,
        name: str,
        params: Any,
        at: float,
        kind: Kind | int,
        timeout: float,
        max_error: float | None,
        require_leader: bool,
    ) -> Future[Outcome]:
        group = self._group
        keys.check_name(name, "action")
        if max_error is not None and not group.polls.actions.is_sure(
            check_seconds("max_error", max_error)
        ):
            raise ClockTooUncertain(
                f"The time of group {group.name!r} is known within {group.clock.error_bound:.6f} s "
                f"here, not {max_error:g} s; allow more, or move nearer to the server.",
                group=group.name,
            )
        motion = self._motion(params, kind, timeout, require_leader)._replace(
            action=name,
            at=self._check_at(at),
            max_error=None if max_error is None else max(int(max_error * 1e6), 1),
        )
        return group.polls.propose(motion, self._member)

    def _motion(self, topic: Any, kind: Kind | int, timeout: float, require_leader: bool) -> Motion:
        data = dump_topic(topic, self._group.requests.codec)
        if isinstance(kind, str):
            check_choice("kind", kind, ("majority", "consensus"))
        else:
            check_int("kind", kind, 1, MEMBERS_MAX)
        return Motion(data, kind, check_seconds("timeout", timeout), require_leader)

    def _check_at(self, at: float) -> int:
        """The time of an action in whole ms."""
        if isinstance(at, bool) or not isinstance(at, (int, float)):
            raise TypeError(f"at must be a number of seconds, not {type(at).__name__}.")
        if not math.isfinite(at) or not 0 <= at <= self._group.now() + _AHEAD_MAX_S:
            raise ValueError(
                f"at must be a time in the next 30 days, in seconds by group.now(), not {at}."
            )
        return int(at * 1000)
