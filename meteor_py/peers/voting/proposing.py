"""Proposing: what group handles and members can put to the vote."""

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
    from meteor_py.peers.group import PeerGroup
    from meteor_py.peers.membership import Membership

#: Seconds ahead that an action may lie: farther ones are times in ms, or by another clock.
_AHEAD_MAX_S = 30 * 86_400.0


class Proposing:
    """What groups and members can propose; of what a member does, ``by`` tells who it was."""

    def _proposer(self) -> tuple[PeerGroup, Membership | None]:
        """The group, if it is open, and the member, if it is one."""
        raise NotImplementedError  # pragma: no cover

    def propose(
        self,
        topic: Any,
        *,
        kind: Kind | int = "majority",
        timeout: float = 5.0,
        require_leader: bool = False,
    ) -> Future[Outcome]:
        """Ask all members that are alive now, this one too, to vote (``@me.on_vote``).

        It is decided as soon as the outcome is certain, and goes on whoever dies meanwhile: others
        learn of it by ``group.on_decision``. Who abstains, says nothing, or leaves before it has
        voted, has not said yes.

        >>> group.propose({"limit": 7}, kind="consensus").result().passed  # doctest: +SKIP

        Args:
            topic: What it is about, for the codec of the group: up to 64 KiB.
            kind: Who must say yes: a "majority" of those who are asked, all of them ("consensus"),
                or a number of them.
            timeout: Seconds to vote in.
            require_leader: Whether there must be a leader.

        Returns:
            A future that ends, with an outcome, at the latest a moment after the time is over; with
            a ``PeerError`` if it cannot be known, as the server is away or has lost the vote.

        Raises:
            NoLeader: There must be a leader, and is none.
            PeerError: Nobody is alive to vote, or a hundred votes are open.
            MembershipLost: Whoever proposes is not a member any more.
            ConnectionFailed: The server was away for ``timeout``.
            ValueError, TypeError: A setting that cannot be.
        """
        group, member = self._proposer()
        motion = _motion(dump_topic(topic, group.ballots.codec), kind, timeout, require_leader)
        return group.ballots.propose(motion, member)

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
    ) -> Future[Outcome]:
        """Have all members vote on doing something together at a time; if it passes, they do.

        Whoever was asked, and has a handler for it (``@me.on_action``), runs it then, however it
        voted. Members vote by their ``on_vote``, or else yes if they have that handler.

        >>> group.propose_action("open", {"relay": 3}, at=group.now() + 2)  # doctest: +SKIP

        Args:
            name: Of the action: 1 to 128 of A-Z a-z 0-9 . _ -
            params: As a topic.
            at: When, in seconds by ``group.now()``; whole milliseconds count.
            kind, timeout, require_leader: As of ``propose``. The vote ends 0.2 s before ``at`` at
                the latest, so nobody is surprised by the decision.
            max_error: Seconds that the clocks may be wrong by: who knows the time less well says
                no.

        Raises:
            ActionRefused: It is too late to vote on that, or the same action is pending already.
            ClockTooUncertain: This process knows the time less well than ``max_error``.
            And what ``propose`` raises.
        """
        group, member = self._proposer()
        keys.check_name(name, "action")
        if max_error is not None and not group.ballots.actions.is_sure(
            check_seconds("max_error", max_error)
        ):
            raise ClockTooUncertain(
                f"The time of group {group.name!r} is known within {group.clock.error_bound:.6f} s "
                f"here, not {max_error:g} s; allow more, or move nearer to the server.",
                group=group.name,
            )
        motion = _motion(
            dump_topic(params, group.ballots.codec), kind, timeout, require_leader
        )._replace(
            action=name,
            at=_check_at(group, at),
            max_error=None if max_error is None else max(int(max_error * 1e6), 1),
        )
        return group.ballots.propose(motion, member)


def _motion(topic: bytes, kind: Kind | int, timeout: float, require_leader: bool) -> Motion:
    if isinstance(kind, str):
        check_choice("kind", kind, ("majority", "consensus"))
    else:
        check_int("kind", kind, 1, MEMBERS_MAX)
    return Motion(topic, kind, check_seconds("timeout", timeout), require_leader)


def _check_at(group: PeerGroup, at: float) -> int:
    if isinstance(at, bool) or not isinstance(at, (int, float)):
        raise TypeError(f"at must be a number of seconds, not {type(at).__name__}.")
    if not math.isfinite(at) or not 0 <= at <= group.now() + _AHEAD_MAX_S:
        raise ValueError(
            f"at must be a time in the next 30 days, in seconds by group.now(), not {at}."
        )
    return int(at * 1000)
