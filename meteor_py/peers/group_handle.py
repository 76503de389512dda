"""One open peer group in this process, with its view, members and threads."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING

from meteor_py.errors import ConnectionFailed, MeteorError, PeerError, PeerGroupNotFound
from meteor_py.peers.codec import PeerCodec
from meteor_py.peers.config import PeersConfig
from meteor_py.peers.event import Event
from meteor_py.peers.event_reader import EventReader
from meteor_py.peers.heartbeat import Heartbeat
from meteor_py.peers.listeners import Listeners
from meteor_py.peers.member import Member, Status
from meteor_py.peers.member_handle import MemberHandle
from meteor_py.peers.messaging.requests import Requests
from meteor_py.peers.protocol import UNKNOWN_GROUP, PeerProtocol
from meteor_py.peers.view import GroupView, Moment
from meteor_py.peers.voting.clock import GroupClock
from meteor_py.peers.voting.polls import Polls
from meteor_py.runtime.clock import now
from meteor_py.runtime.lifecycle import ClosingOrder, Registry, close_each
from meteor_py.runtime.weak_set import WeakSet

if TYPE_CHECKING:
    from meteor_py.redis.connection import Connection
    from meteor_py.redis.connector import Connector

_log = logging.getLogger(__name__)

#: Maximum seconds that ``close()`` waits for handlers and leader functions (``_LEAVE_S``), and then
#: for the group's threads (``_JOIN_S``, but at least ``_LAST_S`` for each). ``_JOIN_S`` also limits
#: waits for the server.
_LEAVE_S, _JOIN_S, _LAST_S = 5.0, 4.0, 1.0
#: Maximum attempts to reload a group that keeps changing.
_LOOKS = 10


class GroupHandle:
    """The state behind a ``PeerGroup``, shared by its threads and components."""

    def __init__(
        self, connector: Connector, name: str, config: PeersConfig, codec: PeerCodec
    ) -> None:
        self.name = name
        self.config = config
        self.protocol = PeerProtocol(connector, name)
        #: Identifies this handle in the name of the key that holds the replies to its messages.
        self.reply_session = secrets.token_hex(8)
        #: This process's estimate of the server's clock.
        self.clock = GroupClock()
        self.view = GroupView(self.protocol.look())
        #: Held while the view changes and events are passed to listeners.
        self.lock = threading.RLock()
        self._members: list[MemberHandle] = []
        self._threads = WeakSet[threading.Thread]()
        self.closed = False
        self._stopped = False
        #: Whether the server is unreachable, as noticed when the members started to leave.
        self._is_away = False
        self._pid = os.getpid()
        self.listeners = Listeners(name)
        self.requests = Requests(self, codec)
        self.polls = Polls(self)
        self.heartbeat = Heartbeat(self)
        self.event_reader = EventReader(self)
        try:
            for thread in (self.listeners.thread, self.heartbeat, self.event_reader):
                thread.start()
            _open_groups.add(self)
        except BaseException:  # such as Ctrl-C, or RuntimeError if no thread can be started
            self.close()
            raise

    def now(self) -> float:
        """See ``PeerGroup.now``."""
        if not self.clock.known:
            self.heartbeat.hurry()
            deadline = time.monotonic() + _JOIN_S
            while not self.clock.known:
                if time.monotonic() > deadline:
                    raise MeteorError(
                        f"The server for group {self.name!r} did not report its time within "
                        f"{_JOIN_S:g} seconds. Check the connection, and try again."
                    )
                time.sleep(0.005)
        return self.clock.now()

    def check_owned(self) -> None:
        """Raise an error in a forked child."""
        if self._pid != os.getpid():
            raise MeteorError(
                f"This handle for group {self.name!r} belongs to the parent process. Open another "
                "here with client.peer_group()."
            )

    def check_open(self) -> None:
        self.check_owned()
        if self.closed:
            raise MeteorError(
                f"This handle for group {self.name!r} is closed. Open another with "
                "client.peer_group()."
            )

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self.view.members)} members"
        return f"<PeerGroup {self.name!r} ({state})>"

    # -- members -----------------------------------------------------------------------------------

    def local_members(self) -> list[MemberHandle]:
        """Return the members that joined through this handle and have not been lost."""
        with self.lock:
            return list(self._members)

    def join(self, member: MemberHandle, on_conflict: str, metadata: bytes) -> bool:
        """Add a member; return False if another session already has its name."""
        try:
            if not self._join(member, on_conflict, metadata):
                return False
            self.check_open()
            self.catch_up()
        except MeteorError:
            raise
        except BaseException:  # Ctrl-C or SIGTERM: the caller never gets this member
            member.lose("interrupted")
            with suppress(MeteorError):
                member.withdraw()
            raise
        return True

    def _join(self, member: MemberHandle, on_conflict: str, metadata: bytes) -> bool:
        try:
            joined = member.join(on_conflict, metadata)
        except PeerGroupNotFound:
            if self.protocol.open(self.config) != self.config:  # recreated with other settings
                raise
            joined = member.join(on_conflict, metadata)
        if not joined:
            return False
        with self.lock:
            closed = self.closed
            if not closed:
                self._members.append(member)
                if self.view.leader == member.id:
                    self._tell_elected(member)
        if closed:
            member.leave()
        return True

    def forget(self, member: MemberHandle) -> None:
        with self.lock:
            if member in self._members:
                self._members.remove(member)

    def track(self, thread: threading.Thread) -> None:
        """Make ``close()`` wait for a member's thread."""
        self._threads.add(thread)

    # -- the view ----------------------------------------------------------------------------------

    def moment(self) -> Moment:
        """Return the view's moment, read under the lock."""
        with self.lock:
            return self.view.moment

    def read_settings(self, connection: Connection | None = None) -> None:
        """Reload the settings: another process may have recreated the group with different ones."""
        try:
            found = self.protocol.settings(connection)
        except PeerGroupNotFound:
            return
        if found != self.config:
            _log.warning("Group %r was recreated with different settings: %s.", self.name, found)
            self.config = found

    def resync(self, *, reset: bool = False, connection: Connection | None = None) -> None:
        """Reload the whole group, and report the differences to listeners.

        Args:
            reset: Whether the server is known to have lost state.
        """
        for _ in range(_LOOKS):
            before = self.moment()
            try:
                look = self.protocol.look(connection)
            except PeerGroupNotFound:
                look = UNKNOWN_GROUP
            if look.incarnation != before.incarnation:
                self.read_settings(connection)
            with self.lock:
                if self.moment() == before:
                    known = self.view.members
                    for event in self.view.resync(look, reset=reset):
                        self._react(event, known.get(event.member or ""))
                    self.polls.resync()
                    self.event_reader.read_again()
                    return

    def catch_up(self) -> None:
        """Wait until the view has caught up with the server, if the server can be reached."""
        try:
            reply = self.protocol.heartbeat(None, "", [])
            deadline = time.monotonic() + _JOIN_S
            while self.view.number < reply.view and self.view.incarnation == reply.incarnation:
                if self.closed:
                    return
                if time.monotonic() > deadline:
                    self.resync()
                    return
                time.sleep(0.001)
        except (ConnectionFailed, PeerError):
            return  # the heartbeat keeps trying
        if self.view.incarnation != reply.incarnation:
            self.resync(reset=True)

    def apply(self, event: Event) -> None:
        """Apply the next event, and pass it to listeners and members. The caller holds the lock."""
        known = self.view.members.get(event.member or "")
        self.view.apply(event)
        self._react(event, known)

    def _react(self, event: Event, known: Member | None) -> None:
        member = self.view.members.get(event.member or "")
        tell = self.listeners.tell
        match event.kind:
            case "reset":
                tell("reset")
            case "joined" if member is not None:
                tell("join", member)
            case "alive" if member is not None:
                self._lose_replaced(member)
                if known is not None and known.alive:  # another session has taken over the name
                    tell("leave", known, "replaced")
                tell("status", member, Status.ALIVE)
                tell("join", member)
            case "dead" if member is not None:
                tell("status", member, Status.DEAD)
                tell("leave", member, "dead")
            case "left":
                self._lose_removed(event)
                if known is not None and known.alive:
                    tell("leave", known, event.reason)
            case "property":
                tell("property", event.property, self.view.properties.get(event.property or ""))
            case "elected":
                for local in self._members:
                    if local.id == event.member:
                        self._tell_elected(local)
                if member is not None:
                    tell("elected", member, event.term)
            case "resigned":
                for local in self._members:
                    if local.id == event.member and event.term is not None:
                        local.leadership.deposed(event.term)
                tell("resigned", event.member, event.term, event.reason)
            case "proposed":
                self.polls.proposed(event)
            case "decided":
                self.polls.decided(event)
        self.listeners.spread(event)

    def _tell_elected(self, local: MemberHandle) -> None:
        found = self.view.members.get(local.id)
        if found is not None and found.session == local.session:
            local.leadership.elected(self.view.term)

    def _lose_removed(self, event: Event) -> None:
        session = event.fields.get("session", b"").decode()
        if event.reason == "removed":
            for local in list(self._members):
                if local.session == session:
                    local.lose("removed")

    def _lose_replaced(self, member: Member) -> None:
        for local in list(self._members):
            # An event older than the local member's session must not end that session.
            newer = member.index > local.index and member.session != local.session
            if local.id == member.id and newer:
                local.lose("joined again elsewhere")

    # -- closing -----------------------------------------------------------------------------------

    def start_closing(self) -> None:
        """Accept no new work, and announce to the server which members are about to leave.

        Does not wait for handlers and leader functions.
        """
        self.closed = True
        if self._stopped or self._pid != os.getpid():
            return
        patience = now() + self.protocol.connector.timeout_s
        leaving = [member for member in self.local_members() if member.start_leaving()]
        announced = all(member.announce_leaving() for member in leaving)
        self._is_away = not announced and now() > patience

    def close(self) -> None:
        """See ``PeerGroup.close``."""
        deadline = now() + _LEAVE_S
        self.start_closing()
        self.finish_closing(deadline)

    def finish_closing(self, deadline: float) -> None:
        """Wait for handlers and leader functions until ``deadline``, and leave.

        ``deadline`` is a time on the ``now()`` clock.
        """
        if self._stopped or self._pid != os.getpid():
            return
        self._leave_all(deadline)
        deadline = now() + _JOIN_S
        self.requests.close(deadline)
        self.polls.close(deadline)
        parts = (self.heartbeat, self.event_reader, self.listeners.thread)
        for part in parts:
            part.stop()
        self.listeners.end_queues()
        for part in parts:
            if not part.ends_within(max(deadline - now(), _LAST_S), part.stop):
                _log.warning("A thread for group %r did not end in time.", self.name)
        self._stopped = True
        _open_groups.discard(self)

    def _leave_all(self, deadline: float) -> None:
        """Make all members leave by one deadline. Idle members need not wait for busy ones."""
        patience = now() + self.protocol.connector.timeout_s
        for member in sorted(self.local_members(), key=attrgetter("busy")):
            if self._is_away:
                member.lose("left")  # the server will notice the missing heartbeats
            else:
                self._is_away = not member.finish_leaving(deadline) and now() > patience
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - now(), 0.0))
                if thread.is_alive():
                    _log.warning("A leader function of group %r did not return in time.", self.name)


def _start_closing(groups: Sequence[GroupHandle]) -> Callable[[GroupHandle], None]:
    """Start closing all groups, and return the function that closes each of them.

    The function waits for their handlers and leader functions under one deadline, so that these
    waits do not add up.
    """
    deadline = now() + _LEAVE_S
    for group in groups:
        group.start_closing()
    return lambda group: group.finish_closing(deadline)


def _close_together(groups: Sequence[GroupHandle]) -> None:
    close_each(groups, _start_closing(groups), MeteorError)


def _at_exit(groups: Sequence[GroupHandle]) -> None:
    """Close the groups, so that other processes need not wait until the members time out."""
    close = _start_closing(groups)
    for group in groups:
        try:
            close(group)
        except MeteorError as error:
            _log.error("Closing %r at exit failed: %s", group, error)


_open_groups: Registry[GroupHandle] = Registry(
    ClosingOrder.PEER_GROUPS,
    owner=lambda group: group.protocol.connector,
    close=_close_together,
    at_exit=_at_exit,
    after_fork=lambda groups: None,  # members, threads and connections belong to the parent
)
