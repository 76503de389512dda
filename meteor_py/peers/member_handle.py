"""A member that this process has joined, as the threads of its group handle see it."""

from __future__ import annotations

import enum
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meteor_py.errors import MembershipLost, MeteorError, PeerError
from meteor_py.peers.config import MEMBERS_MAX
from meteor_py.peers.leadership import Leadership
from meteor_py.peers.messaging.inbox import Inbox
from meteor_py.peers.voting.voter import Voter
from meteor_py.redis.scripts import PEERS_JOIN, PEERS_LEAVE, PEERS_UPDATE_MEMBER
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition, SignalSafeEvent
from meteor_py.subscribe.lease import BELIEF

if TYPE_CHECKING:
    from meteor_py.peers.group_handle import GroupHandle
    from meteor_py.peers.protocol import HeartbeatReply
    from meteor_py.redis.connection import Connection

_log = logging.getLogger(__name__)

#: Seconds at most that leaving waits for leader tasks and handlers to end.
LEAVE_S = 5.0
#: Seconds between two tries, doubled each time up to the second figure.
_BACKOFF_S = (0.01, 0.16)
#: Ids of a member without a name that are remembered after it got another.
_FORMER_MAX = 16


class MemberState(enum.Enum):
    """Where a member is between joining and its end. States only move downwards."""

    #: A member; or the server expelled it, and the heartbeat is joining again.
    ACTIVE = "active"
    #: It takes on nothing new. It stays a member until the server knows that it left.
    LEAVING = "leaving"
    #: It left on its own account.
    LEFT = "left"
    #: It was removed, replaced, or interrupted while it joined.
    LOST = "lost"


class MemberHandle:
    """Owned by its group handle; ``Membership`` is its public face."""

    def __init__(self, group: GroupHandle, name: str | None, priority: int) -> None:
        self.group = group
        self.persistent = name is not None
        self.id = name or secrets.token_hex(8)
        self.priority = priority
        self.session = secrets.token_hex(8)
        #: Until then, by ``now()``, the server keeps it even without another heartbeat.
        self.valid_until = 0.0
        #: Set when it is not a member any more, and will not be by itself.
        self.lost = SignalSafeEvent()
        #: Why.
        self.reason: str | None = None
        #: Its place in the order of joining when it joined.
        self.index = 0
        #: Expelled, and not back yet.
        self.recovering = False
        #: Its ids before this one: each time that it was expelled, it got another.
        self.former_ids: deque[str] = deque(maxlen=_FORMER_MAX)
        #: Its lock: held while its lifecycle or its term changes.
        self.state = SignalSafeCondition()
        self.lifecycle = MemberState.ACTIVE
        #: Whether the server knows that it is leaving.
        self.announced = False
        #: What the server does with it when it leaves: "stay" keeps it, dead; "" removes it.
        self._departure = "stay" if self.persistent else ""
        self._metadata: bytes = b""
        self._pid = os.getpid()
        self._inbox: Inbox | None = None
        self.leadership = Leadership(self)
        self.voter = Voter(self)

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child: the member is its parent's."""
        return self._pid != os.getpid()

    @property
    def going(self) -> bool:
        """Whether it is not a member any more, or is about to leave."""
        return self.lifecycle is not MemberState.ACTIVE

    @property
    def handling(self) -> bool:
        """Whether a handler is at work, in another thread."""
        return self._inbox is not None and self._inbox.busy

    @property
    def busy(self) -> bool:
        """Whether a leader task or a handler runs that leaving would wait for."""
        return self.handling or self.leadership.busy

    def inbox(self) -> Inbox:
        """Its inbox, opened with the first call."""
        self.check_owned()
        with self.state:
            if self.going:  # under the lock: nothing would stop it
                raise self.lost_error()
            if self._inbox is None:
                self._inbox = Inbox(self)
            return self._inbox

    # -- joining -----------------------------------------------------------------------------------

    def join(
        self, on_conflict: str, metadata: bytes | None = None, connection: Connection | None = None
    ) -> bool:
        """Become a member; False if another session has the name."""
        if metadata is not None:
            self._metadata = metadata
        sent = now()
        args: list[Any] = [self.id, self.session, "1" if self.persistent else "0", self.priority]
        args += [self._metadata, on_conflict, MEMBERS_MAX]
        reply = self.group.protocol.run(PEERS_JOIN, args, connection)
        if reply[0] == b"FULL":
            raise PeerError(
                f"Group {self.group.name!r} has {reply[1]:,} members, and may not have more; "
                "remove dead ones, or open another instance.",
                group=self.group.name,
            )
        if reply[0] == b"TAKEN":
            return False
        with self.state:
            self.index = reply[1]
            self._renew(sent, reply[2] / 1000)
        return True

    def restart(self) -> None:
        """The server expelled it, but not on purpose: it gets another session, and another id if
        it has no name."""
        with self.state:
            self.leadership.reset(expelled=True)
            self.session = secrets.token_hex(8)
            self.recovering = True
            self.valid_until = 0.0
            if not self.persistent:
                self.former_ids.append(self.id)
                self.id = secrets.token_hex(8)

    def rejoined(self) -> None:
        """It has joined again by itself: messages it holds may belong to another member now."""
        if self._inbox is not None:
            self._inbox.rejoined()

    def renewed(self, sent: float, reply: HeartbeatReply) -> bool:
        """Take in a heartbeat's reply; return whether the server takes it for the leader though it
        resigned."""
        with self.state:
            self._renew(sent, reply.ttl)
            return self.leadership.observe(reply)

    def _renew(self, sent: float, ttl: float) -> None:
        # If the term was in doubt for a moment, another one must begin.
        self.leadership.drop_expired()
        self.valid_until = max(self.valid_until, sent + ttl * BELIEF)

    # -- leaving: active -> leaving -> left, or at any time lost -----------------------------------

    def leave(self, departure: str) -> bool:
        """Leave, waiting for what is at work; return whether the server knows."""
        if self.start_leaving(departure):
            return self.finish_leaving(now() + LEAVE_S)
        if not self.foreign:
            self._join_inbox(LEAVE_S)
        return False

    def start_leaving(self, departure: str | None = None) -> bool:
        """Take on nothing new; return whether ``finish_leaving`` is to follow. The order matters:
        the term stops being valid, its tasks end, and only then another member is elected.

        Args:
            departure: "stay" keeps a named member, dead; "" removes it; None is as ``close()``.
        """
        if self.foreign or self.lost.is_set():
            return False
        with self.state:
            if self.lifecycle is MemberState.ACTIVE:  # else leaving was interrupted
                if departure is not None:
                    self._departure = departure
                self.lifecycle = MemberState.LEAVING  # first, in case a Ctrl-C comes in between
                self.leadership.stop()
            self.state.notify_all()
        self.voter.stop()
        self.stop_inbox()
        return True

    def announce_leaving(self) -> bool:
        """If it is busy, have the server choose it for nothing new: no messages for any or all
        members, no votes, no term. Return whether the server replied, if it was asked."""
        if self.announced or not self.busy:
            return True
        try:
            args = [self.id, self.session, "leave", ""]
            self.group.protocol.run(PEERS_UPDATE_MEMBER, args)
            self.announced = True
        except MeteorError as error:
            _log.warning("%r could not tell the server that it will leave: %s", self, error)
        return self.announced

    def finish_leaving(self, deadline: float) -> bool:
        """When all work here has ended, or at ``deadline`` by ``now()``, tell the server; return
        whether it knows. Until then this is a member, with heartbeats."""
        self.announce_leaving()
        self.leadership.await_tasks(deadline)
        try:
            if self.handling:
                self.leadership.lay_down_last()  # others lead while the handlers finish
            self._join_inbox(max(deadline - now(), 0.0))
            self.withdraw()
            told = True
        except MeteorError as error:
            _log.warning("%r could not tell the server that it leaves: %s", self, error)
            told = False
        self.lose("left")  # not if it was interrupted: then the group tells the server at its end
        return told

    def withdraw(self, connection: Connection | None = None) -> None:
        """Have the server take it out."""
        args = [self.id, self.session, self._departure]
        self.group.protocol.run(PEERS_LEAVE, args, connection)

    def lose(self, reason: str) -> None:
        """It is not a member any more, for good."""
        with self.state:
            self.reason = self.reason or reason
            self.leadership.reset()
            self.valid_until = 0.0
            if not self.lost.is_set():
                self.lifecycle = MemberState.LEFT if reason == "left" else MemberState.LOST
            self.lost.set()
            self.state.notify_all()
        self.voter.stop()
        self.stop_inbox(close=True)
        self.group.forget(self)

    def stop_inbox(self, *, close: bool = False) -> None:
        """Take no more messages; does not wait. Closed, it does not settle any either."""
        if self._inbox is not None:
            self._inbox.stop(close=close)

    def _join_inbox(self, timeout_s: float) -> None:
        if self._inbox is not None and not self._inbox.join(timeout_s):
            _log.warning("A handler of %r does not end.", self)

    # -- calls of the application ------------------------------------------------------------------

    def update(self, metadata: bytes, deadline: float) -> None:
        """Change its metadata. Raises as ``retry_fenced``."""
        self.retry_fenced(
            lambda: self.group.protocol.run(
                PEERS_UPDATE_MEMBER, [self.id, self.session, "metadata", metadata]
            ),
            deadline,
        )
        self._metadata = metadata

    def retry_fenced(self, call: Callable[[], list[Any]], deadline: float) -> list[Any]:
        """Run a script for it; again, until a time by ``now()``, if the server says that it is not
        a member: a member that was expelled joins again by itself.

        Raises:
            MembershipLost: It has not until then, or it is not a member any more for good.
        """
        failures = 0
        while not self.lost.is_set():
            reply = call()
            if reply[0] != b"FENCED":
                return reply
            failures += 1
            pause = pause_s(failures, *_BACKOFF_S)
            if now() + pause >= deadline:
                break
            self.group.heartbeat.hurry()
            self.lost.wait(pause)
        raise self.lost_error()

    def check_owned(self) -> None:
        """Raise in a forked child, and if it is not a member any more."""
        if self.foreign:
            raise MeteorError(
                f"Member {self.id!r} of group {self.group.name!r} belongs to the parent process; "
                "open the group here with client.peer_group(), and join."
            )
        if self.lost.is_set():
            raise self.lost_error()

    def lost_error(self) -> MeteorError:
        default = "left" if self.going else "expelled, or joined again elsewhere"
        return MembershipLost(
            f"Member {self.id!r} is not in group {self.group.name!r} any more "
            f"({self.reason or default}); join again if it should be.",
            group=self.group.name,
        )

    def __repr__(self) -> str:
        state = f"lost: {self.reason}" if self.lost.is_set() else "alive"
        return f"<Membership {self.id!r} in {self.group.name!r} ({state})>"
