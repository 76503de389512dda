"""The base class of peer groups and memberships, which send messages and make proposals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from meteor_py.errors import ClockTooUncertain
from meteor_py.peers.config import MEMBERS_MAX
from meteor_py.peers.messaging.target import Everybody, Target
from meteor_py.peers.voting.polls import Motion, VoteFuture
from meteor_py.peers.voting.proposal import Kind, dump_topic
from meteor_py.records.config import check_choice, check_int, check_seconds
from meteor_py.redis import keys
from meteor_py.runtime.lifecycle import Closeable

if TYPE_CHECKING:
    from meteor_py.peers.group_handle import GroupHandle
    from meteor_py.peers.member_handle import MemberHandle

#: Maximum seconds between a proposal and its action. A later time is probably in ms, or from
#: another clock.
_AHEAD_MAX_S = 30 * 86_400.0


class Sender(Closeable):
    """A ``PeerGroup`` or ``Membership`` in its role as the author of messages and proposals.

    Messages and proposals from a membership carry its id in ``message.sender`` and ``proposal.by``.
    Messages and proposals from a ``PeerGroup`` have no author.
    """

    def __init__(self, group: GroupHandle, member: MemberHandle | None = None) -> None:
        self._group_handle = group
        self._author = member

    def member(self, member: str) -> Target:
        """Return the member with this id as a target. Messages to a dead named member wait."""
        if not isinstance(member, str):
            raise TypeError(f"A member id must be a str, not {type(member).__name__}.")
        keys.check_name(member, "member")
        return Target(self._group_handle.requests, self._author, "member", member)

    @property
    def any(self) -> Target:
        """A random live member. If it leaves before settling the message, another gets it."""
        return Target(self._group_handle.requests, self._author, "any")

    @property
    def all(self) -> Everybody:
        """All live members."""
        return Everybody(self._group_handle.requests, self._author, "all")

    @property
    def leader_proxy(self) -> Target:
        """The member that leads when the message is stored."""
        return Target(self._group_handle.requests, self._author, "leader")

    def propose(
        self,
        topic: Any,
        *,
        kind: Kind | int = "majority",
        timeout: float = 5.0,
        require_leader: bool = False,
    ) -> VoteFuture:
        """Ask all members that are currently alive to vote (``@me.on_vote``).

        The server decides as soon as the outcome is certain, even if the proposer dies; other
        processes learn the outcome from ``on_decision``. A member that abstains, does not vote in
        time, or leaves before voting does not count as a yes.

        >>> group.propose({"limit": 7}, kind="consensus").result().passed  # doctest: +SKIP

        Args:
            topic: The subject, up to 64 KiB when encoded by the group's codec.
            kind: The yes votes needed: a "majority" of the members asked, all ("consensus"), or a
                number.
            timeout: Seconds that members have to vote.
            require_leader: Whether the group must have a leader. If it has none during the vote,
                the vote ends with the reason "no leader".

        Returns:
            A future for the outcome. It completes shortly after ``timeout`` at the latest, unless
            the server is unreachable at that time. The future raises ``PeerError`` if the server
            has lost the vote, or stays unreachable for 10 seconds after the vote should have ended.
            The future's ``poll`` attribute is the poll's id.

        Raises:
            NoLeader: ``require_leader`` is set, and the group has no leader.
            PeerError: No member is alive to vote, or 100 votes are open.
            MembershipLost: The proposer is no longer a member.
            ConnectionFailed: The server was unreachable for ``timeout`` seconds.
            ValueError, TypeError: An argument is out of range or of the wrong type.
        """
        self._check_open()
        motion = self._motion(topic, kind, timeout, require_leader)
        return self._group_handle.polls.propose(motion, self._author)

    def propose_action(
        self,
        name: str,
        params: Any = None,
        *,
        at: float,
        kind: Kind | int = "consensus",
        timeout: float = 1.0,
        max_error: float | None = None,
        require_leader: bool = False,
    ) -> VoteFuture:
        """Ask all live members to vote on an action. If the vote passes, they run the action at the
        same moment.

        Every member that was asked and has a handler (``@me.on_action``) runs the action, however
        the member voted. A member without an ``on_vote`` function votes yes if it has a handler for
        the action.

        >>> group.propose_action("open", {"relay": 3}, at=group.now() + 2)  # doctest: +SKIP

        Args:
            name: The action: 1 to 128 characters of A-Z a-z 0-9 . _ -, not starting with a dot.
            params: Passed to the handlers. The same limits apply as for a ``topic``.
            at: When to run the action, in seconds on the ``group.now()`` clock, truncated to
                milliseconds; at most 30 days ahead.
            kind: See ``propose``.
            timeout: See ``propose``. The vote ends 0.2 s before ``at`` at the latest, so that
                every member learns the decision in time.
            require_leader: See ``propose``.
            max_error: Maximum clock error in seconds. A member that knows the time less accurately
                votes no.

        Raises:
            ActionRefused: It is too late to vote, or the same action is already pending.
            ClockTooUncertain: This process knows the time less accurately than ``max_error``.

        Also raises the same errors as ``propose``.
        """
        self._check_open()
        group = self._group_handle
        keys.check_name(name, "action")
        if max_error is not None and not group.polls.actions.is_sure(
            check_seconds("max_error", max_error)
        ):
            raise ClockTooUncertain(
                f"This process knows the time of group {group.name!r} only to within "
                f"{group.clock.error_bound:.6f} s, but max_error is {max_error:g} s. Allow a "
                "larger max_error, or run closer to the server.",
                group=group.name,
            )
        motion = self._motion(params, kind, timeout, require_leader)._replace(
            action=name,
            at=self._check_at(at),
            max_error=None if max_error is None else max(int(max_error * 1e6), 1),
        )
        return group.polls.propose(motion, self._author)

    def _check_open(self) -> None:
        if self._author is None:
            self._group_handle.check_open()
        else:
            self._author.check_owned()

    def _motion(self, topic: Any, kind: Kind | int, timeout: float, require_leader: bool) -> Motion:
        data = dump_topic(topic, self._group_handle.requests.codec)
        if isinstance(kind, str):
            check_choice("kind", kind, ("majority", "consensus"))
        else:
            check_int("kind", kind, 1, MEMBERS_MAX)
        return Motion(data, kind, check_seconds("timeout", timeout), require_leader)

    def _check_at(self, at: float) -> int:
        """Check an action's time, and convert it to whole milliseconds."""
        if isinstance(at, bool) or not isinstance(at, (int, float)):
            raise TypeError(f"at must be a number of seconds, not {type(at).__name__}.")
        if not math.isfinite(at) or not 0 <= at <= self._group_handle.now() + _AHEAD_MAX_S:
            raise ValueError(
                "at must be a time within the next 30 days, in seconds on the group.now() clock, "
                f"not {at}."
            )
        return int(at * 1000)
