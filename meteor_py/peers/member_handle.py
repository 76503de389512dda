"""A member that joined in this process, as seen by its group handle's threads."""

from __future__ import annotations

import logging
import os
import secrets
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meteor_py.errors import MembershipLost, MeteorError, PeerError
from meteor_py.peers.config import MEMBERS_MAX
from meteor_py.peers.leadership import Leadership
from meteor_py.peers.messaging.declaration import Declaration
from meteor_py.peers.messaging.inbox import Inbox
from meteor_py.peers.messaging.message import LAST, Place, read_place
from meteor_py.peers.voting.voter import Voter
from meteor_py.redis.scripts import PEERS_JOIN, PEERS_LEAVE, PEERS_UPDATE_MEMBER
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition, SignalSafeEvent
from meteor_py.subscribe.lease import TRUSTED_FRACTION

if TYPE_CHECKING:
    from meteor_py.peers.group_handle import GroupHandle
    from meteor_py.peers.protocol import HeartbeatReply
    from meteor_py.redis.connection import Connection

_log = logging.getLogger(__name__)

#: Maximum seconds to wait for leader functions and handlers to end when leaving.
LEAVE_S = 5.0
#: Shortest and longest pause between attempts, in seconds. The pause doubles each time.
_BACKOFF_S = (0.01, 0.16)
#: Maximum number of former ids that an unnamed member remembers.
_FORMER_MAX = 16


class MemberHandle:
    """The state behind a ``Membership``, owned by its group handle."""

    def __init__(self, group: GroupHandle, name: str | None, priority: int) -> None:
        self.group = group
        self.persistent = name is not None
        self.id = name or secrets.token_hex(8)
        self.priority = priority
        self.session = secrets.token_hex(8)
        #: The time until which the server certainly does not presume the member dead, even without
        #: another heartbeat (``now()`` clock).
        self.valid_until = 0.0
        #: Set once the membership has ended and the member will not rejoin automatically.
        self.lost = SignalSafeEvent()
        #: Why the membership was lost.
        self.reason: str | None = None
        #: Its position in the joining order.
        self.index = 0
        #: The last entry in its inbox that an earlier session may have begun to handle.
        self.replayed_until: Place = LAST
        #: Whether the server has expelled it and it has not rejoined yet.
        self.recovering = False
        #: Former ids of an unnamed member: it gets a new id each time it is expelled and rejoins.
        self.former_ids: deque[str] = deque(maxlen=_FORMER_MAX)
        #: Its lock, held while ``active`` or its term changes.
        self.state = SignalSafeCondition()
        #: False once the member starts leaving or is lost. If it was expelled but will rejoin, it
        #: is active.
        self.active = True
        #: Whether the server has been notified that the member is about to leave.
        self.announced = False
        #: How it leaves: "stay" keeps a named member in the group, as dead; "" removes it.
        self._departure = "stay" if self.persistent else ""
        self._metadata: bytes = b""
        self._pid = os.getpid()
        self._inbox: Inbox | None = None
        self.leadership = Leadership(self)
        self.declaration = Declaration(self)
        self.voter = Voter(self)

    @property
    def foreign(self) -> bool:
        """Whether this process is a forked child. The member then belongs to the parent process."""
        return self._pid != os.getpid()

    @property
    def handling(self) -> bool:
        """Whether a handler is running in another thread."""
        return self._inbox is not None and self._inbox.busy

    @property
    def busy(self) -> bool:
        """Whether leaving would have to wait for a running leader function or handler."""
        return self.handling or self.leadership.busy

    def inbox(self) -> Inbox:
        """Return the member's inbox. The first call opens it."""
        self.check_owned()
        with self.state:
            if not self.active:  # under the lock: leaving would not stop an inbox opened later
                raise self.lost_error()
            if self._inbox is None:
                self._inbox = Inbox(self)
            return self._inbox

    # -- joining -----------------------------------------------------------------------------------

    def join(
        self, on_conflict: str, metadata: bytes | None = None, connection: Connection | None = None
    ) -> bool:
        """Become a member; return False if another session has the name."""
        if metadata is not None:
            self._metadata = metadata
        sent = now()
        args: list[Any] = [self.id, self.session, "1" if self.persistent else "0", self.priority]
        args += [self._metadata, on_conflict, MEMBERS_MAX]
        reply = self.group.protocol.run(PEERS_JOIN, args, connection)
        if reply[0] == b"FULL":
            raise PeerError(
                f"Group {self.group.name!r} is full: {reply[1]:,} members is the maximum. "
                "Remove dead members, or open another instance.",
                group=self.group.name,
            )
        if reply[0] == b"TAKEN":
            return False
        with self.state:
            self.index = reply[1]
            self.replayed_until = read_place(reply[3])
            self._renew(sent, reply[2] / 1000)
        return True

    def restart(self) -> None:
        """Prepare to rejoin after a timeout: with a new session, and with a new id if the member
        has no name."""
        with self.state:
            self.leadership.reset(expelled=True)
            self.replayed_until = LAST  # until the server has replied
            self.session = secrets.token_hex(8)
            self.recovering = True
            self.valid_until = 0.0
            if not self.persistent:
                self.former_ids.append(self.id)
                self.id = secrets.token_hex(8)

    def rejoined(self) -> None:
        """Notify the inbox that the member has rejoined: messages that the inbox holds may now
        belong to another member."""
        if self._inbox is not None:
            self._inbox.rejoined()

    def renewed(self, sent: float, reply: HeartbeatReply) -> bool:
        """Process a heartbeat reply; return whether the server still regards the member as leader
        although it has resigned."""
        with self.state:
            self._renew(sent, reply.ttl)
            return self.leadership.observe(reply)

    def _renew(self, sent: float, ttl: float) -> None:
        # A term that has expired stays lost even if the member is renewed late.
        self.leadership.drop_expired()
        self.valid_until = max(self.valid_until, sent + ttl * TRUSTED_FRACTION)

    # -- leaving -----------------------------------------------------------------------------------

    def leave(self, departure: str | None = None) -> bool:
        """Leave, waiting for handlers and tasks; return whether the server was notified."""
        if self.start_leaving(departure):
            return self.finish_leaving(now() + LEAVE_S)
        if not self.foreign:
            self._join_inbox(LEAVE_S)
        return False

    def start_leaving(self, departure: str | None = None) -> bool:
        """Accept no new work; return whether ``finish_leaving`` must follow. The order matters:
        first the term stops being valid, then its tasks end, and only then can the server elect
        another member.

        Args:
            departure: "stay" keeps a named member in the group, as dead; "" removes the member;
                None means "stay" for a named member and "" for any other.
        """
        if self.foreign or self.lost.is_set():
            return False
        with self.state:
            if self.active:  # otherwise an earlier attempt to leave was interrupted
                if departure is not None:
                    self._departure = departure
                self.active = False  # set first, in case Ctrl-C arrives in between
                self.leadership.stop()
            self.state.notify_all()
        self.voter.stop()
        self.stop_inbox()
        return True

    def announce_leaving(self) -> bool:
        """If the member is busy, announce that it is leaving, so that it gets no new work.

        The server then sends it no messages addressed to any or all members, asks it for no votes
        and does not elect it. Return False if the server did not accept the announcement.
        """
        if self.announced or not self.busy:
            return True
        try:
            args = [self.id, self.session, "leave", ""]
            self.group.protocol.run(PEERS_UPDATE_MEMBER, args)
            self.announced = True
        except MeteorError as error:
            _log.warning("%r could not announce to the server that it will leave: %s", self, error)
        return self.announced

    def finish_leaving(self, deadline: float) -> bool:
        """Wait for handlers and tasks, then tell the server that the member has left.

        Waits at most until ``deadline``, on the ``now()`` clock. In the meantime, the member stays
        in the group and sends heartbeats. Return whether the server was notified.
        """
        self.announce_leaving()
        self.leadership.await_tasks(deadline)
        try:
            if self.handling:
                self.leadership.lay_down_last()  # others can lead while the handlers finish
            self._join_inbox(max(deadline - now(), 0.0))
            self.group.requests.flush(self, deadline)
            self.withdraw()
            notified = True
        except MeteorError as error:
            _log.warning("%r could not notify the server that it is leaving: %s", self, error)
            notified = False
        # A signal that interrupts the wait skips this line, so that closing the group still finds
        # the member and notifies the server.
        self.lose("left")
        return notified

    def withdraw(self, connection: Connection | None = None) -> None:
        """Tell the server to remove the member, or to keep it as dead."""
        args = [self.id, self.session, self._departure]
        self.group.protocol.run(PEERS_LEAVE, args, connection)

    def lose(self, reason: str) -> None:
        """End the membership permanently."""
        with self.state:
            self.reason = self.reason or reason
            self.leadership.reset()
            self.valid_until = 0.0
            self.active = False
            self.lost.set()
            self.state.notify_all()
        self.voter.stop()
        self.stop_inbox(close=True)
        self.group.forget(self)

    def stop_inbox(self, *, close: bool = False) -> None:
        """Stop accepting messages, without waiting. If ``close``, also stop settling messages."""
        if self._inbox is not None:
            self._inbox.stop(close=close)

    def _join_inbox(self, timeout_s: float) -> None:
        if self._inbox is not None and not self._inbox.join(timeout_s):
            _log.warning("A handler in %r did not end in time.", self)

    # -- calls from the application ----------------------------------------------------------------

    def update(self, metadata: bytes, deadline: float) -> None:
        """Change the member's metadata. See ``retry_fenced`` for errors."""
        self.retry_fenced(
            lambda: self.group.protocol.run(
                PEERS_UPDATE_MEMBER, [self.id, self.session, "metadata", metadata]
            ),
            deadline,
        )
        self._metadata = metadata

    def retry_fenced(self, call: Callable[[], list[Any]], deadline: float) -> list[Any]:
        """Run a script for this member. If the server has expelled the member, wait until the
        heartbeat has made it rejoin, and run the script again.

        Raises:
            MembershipLost: The member has not rejoined by ``deadline`` (``now()`` clock), or is
                lost permanently.
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
        """Raise an error in a forked child, or if the membership is lost."""
        if self.foreign:
            raise MeteorError(
                f"Member {self.id!r} of group {self.group.name!r} belongs to the parent process. "
                "Open the group here with client.peer_group(), and join."
            )
        if self.lost.is_set():
            raise self.lost_error()

    def lost_error(self) -> MeteorError:
        default = "expelled, or joined again elsewhere" if self.active else "left"
        return MembershipLost(
            f"Member {self.id!r} is no longer in group {self.group.name!r} "
            f"({self.reason or default}). Join again if it should still be a member.",
            group=self.group.name,
        )

    def __repr__(self) -> str:
        state = f"lost: {self.reason}" if self.lost.is_set() else "alive"
        return f"<Membership {self.id!r} in {self.group.name!r} ({state})>"
