"""The heartbeat: the thread that keeps a group handle's members alive on the server.

It also ends a term that was not renewed in time, and detects when the server has dropped a member
or lost state.
"""

from __future__ import annotations

import logging
import math
import random
import time
import weakref
from typing import TYPE_CHECKING

from meteor_py.errors import ConnectionFailed, PeerGroupNotFound
from meteor_py.peers.protocol import HeartbeatReply, Presence
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread

if TYPE_CHECKING:
    from meteor_py.peers.group_handle import GroupHandle
    from meteor_py.peers.member_handle import MemberHandle
    from meteor_py.peers.view import Moment

_log = logging.getLogger(__name__)

#: Shortest and longest pause between attempts, in seconds. The pause doubles each time.
_BACKOFF_S = (0.02, 0.64)
#: Handles spread their reports of an overdue member over at most this many seconds.
_SPREAD_S = 0.3
#: Maximum pause between two calls that move messages from dead or removed members, in seconds per
#: member of the group.
_ORPHANS_S = 0.002
#: Seconds without an event after which a handle that is behind the server reloads the group.
_STUCK_S = 5.0


class Heartbeat(JoinableThread):
    """A thread with its own connection. It sends a heartbeat for each member every ``ttl / 3``."""

    def __init__(self, group: GroupHandle) -> None:
        super().__init__(self._beat, f"meteor-heartbeat-{group.name}")
        self._group = group
        self._connection = group.protocol.open_connection()
        # Stop waiting for a reply when the next heartbeat is due.
        self._timeout_s = min(self._connection.timeout_s, max(group.config.ttl / 3, 0.1))
        self._state = SignalSafeCondition()
        self._stopped = False
        self._hurry = False
        #: Members whose last heartbeat failed. Only the first of consecutive failures is logged.
        self._failing: weakref.WeakSet[MemberHandle] = weakref.WeakSet()
        #: When the next member becomes overdue unless it sends a heartbeat.
        self._overdue_at = math.inf
        #: While the view is behind the server: the view's moment, and when the thread noticed it.
        self._behind: tuple[Moment, float] | None = None

    def hurry(self) -> None:
        """Send the next heartbeat at once."""
        with self._state:
            self._hurry = True
            self._state.notify_all()

    def stop(self) -> None:
        """Stop the thread. Repeat the call until the thread has ended.

        If the thread is reconnecting at that moment, a call finds no connection to interrupt.
        """
        with self._state:
            self._stopped = True
            self._state.notify_all()
        self._connection.interrupt()

    def _beat(self) -> None:
        failures = 0
        while not self._stopped:
            started = now()
            interval = self._group.config.ttl / 3
            try:
                self._send_all()
                failures = 0
                interval = self._group.config.ttl / 3
                pause = min(interval - (now() - started), self._overdue_at - now())
            except ConnectionFailed:
                failures += 1
                pause = min(pause_s(failures, *_BACKOFF_S), interval)
            except Exception:
                if not self._stopped:
                    _log.exception("A heartbeat for group %r failed.", self._group.name)
                failures += 1
                pause = interval
            self._wait(pause)
        self._connection.close()

    def _wait(self, pause: float) -> None:
        """Wait until the next heartbeat is due, and end terms that expire in the meantime."""
        deadline = now() + max(pause, 0.0)
        while not self._stopped:
            left = min(deadline - now(), self._first_term_ends() - now())
            with self._state:
                self._state.wait_for(lambda: self._stopped or self._hurry, max(left, 0.001))
                if self._hurry or deadline <= now():
                    self._hurry = False
                    return

    def _first_term_ends(self) -> float:
        """Drop expired terms; return when the next local member's term expires."""
        ends = math.inf
        for member in self._group.local_members():
            member.leadership.drop_expired()
            if member.leadership.term is not None:
                ends = min(ends, member.valid_until)
        return ends

    def _send_all(self) -> None:
        group = self._group
        self._overdue_at = math.inf
        members, ends = group.local_members(), self._first_term_ends()
        for member in members:
            # A slow reply must not keep this thread from ending a term on time.
            self._connection.timeout_s = max(min(self._timeout_s, ends - now()), 0.05)
            try:
                self._send_for(member)
            except ConnectionFailed:
                raise
            except Exception as error:  # the other members still need their heartbeats
                if not self._stopped and member not in self._failing:
                    _log.exception("The heartbeat for %r failed: %s", member, error)
                self._failing.add(member)
            else:
                self._failing.discard(member)
        if not members:
            self._connection.timeout_s = self._timeout_s
            try:
                self._send("", [])
            except PeerGroupNotFound:  # the next member to join creates the group again
                group.resync(connection=self._connection)

    def _send_for(self, member: MemberHandle) -> None:
        if member.recovering:
            if member.active:
                self._recover(member)
            return
        session = member.session
        sent, reply = self._send(session, [member.id])
        if session != member.session:
            return
        if reply.presence[0] is not Presence.MEMBER:
            self._dropped(member, reply.presence[0])
            return
        if member.renewed(sent, reply):  # the server has not received the resignation yet
            member.leadership.lay_down(reply.term, self._connection)
        member.declaration.send_if_due(self._connection)

    def _send(self, session: str, members: list[str]) -> tuple[float, HeartbeatReply]:
        """Send a heartbeat; return when it was sent, and the reply."""
        group = self._group
        seen = group.moment()
        sent = now()
        try:
            reply = group.protocol.heartbeat(self._connection, session, members)
        except PeerGroupNotFound:
            if not members:
                raise
            group.protocol.open(group.config, self._connection)
            reply = group.protocol.heartbeat(self._connection, session, members)
        group.clock.read(sent, now(), reply.time)
        if reply.ttl != group.config.ttl:
            group.read_settings(self._connection)
        # Report an overdue member on time, but not from all handles at once. Moving messages from
        # a dead or removed member takes many calls, of which all handles together make about 1,000
        # per second.
        spread = random.uniform(0.002, min(_SPREAD_S, group.config.ttl / 10))
        left_s = reply.overdue_s
        if reply.has_orphans:
            left_s, spread = 0.0, random.uniform(0.0, _ORPHANS_S * (len(group.view.members) + 1))
        self._overdue_at = math.inf if left_s is None else now() + left_s + spread
        self._compare(reply, seen)
        return sent, reply

    def _compare(self, reply: HeartbeatReply, seen: Moment) -> None:
        """Reload the group if the server has lost state or this process has missed events.

        ``seen`` is the last event that this process had when it sent the heartbeat. The server has
        lost state if its last event is older than ``seen``, if the two have the same number but
        different marks, or if the group has a new incarnation.
        """
        group = self._group
        same = reply.view == seen.view and reply.mark == seen.mark
        lost = reply.incarnation != seen.incarnation or reply.view < seen.view
        if lost or (reply.view == seen.view and not same):
            if group.moment() == seen:
                if seen.incarnation:
                    _log.warning("The server lost state of group %r. Reloading it.", group.name)
                group.resync(reset=True, connection=self._connection)
        elif same:
            self._behind = None
        elif self._behind is None or self._behind[0] != seen:
            self._behind = (seen, time.monotonic())
        elif time.monotonic() > self._behind[1] + _STUCK_S:
            _log.warning("Group %r changed, but no event arrived. Reloading it.", group.name)
            self._behind = None
            group.resync(connection=self._connection)

    def _dropped(self, member: MemberHandle, why: Presence) -> None:
        if why is Presence.REMOVED:
            member.lose("removed")
        elif why is Presence.REPLACED:
            member.lose("joined again elsewhere")
        elif member.active:
            member.restart()
            self._recover(member)

    def _recover(self, member: MemberHandle) -> None:
        """Rejoin, because the server presumed the member dead or lost the group."""
        try:
            joined = member.join("fail", connection=self._connection)
        except PeerGroupNotFound:
            self._group.protocol.open(self._group.config, self._connection)
            joined = member.join("fail", connection=self._connection)
        if not joined:
            member.lose("joined again elsewhere")
            return
        member.recovering = False
        if not member.active:  # the member has just left, perhaps under its previous session
            member.withdraw(self._connection)
            return
        _log.warning("The server dropped %r, and the member has rejoined.", member)
        member.rejoined()
