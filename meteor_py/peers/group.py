"""A peer group: who is in it, who leads it, and the way to all of them."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from meteor_py.errors import ConnectionFailed, MeteorError, PeerError, PeerGroupNotFound
from meteor_py.peers.codec import PeerCodec
from meteor_py.peers.config import PeersConfig
from meteor_py.peers.event import Event
from meteor_py.peers.event_reader import CallbackThread, EventReader
from meteor_py.peers.heartbeat import Heartbeat
from meteor_py.peers.joining import Joining
from meteor_py.peers.listening import Listening
from meteor_py.peers.member import Member, Status
from meteor_py.peers.membership import Membership
from meteor_py.peers.messaging.dead_letter import PeerLetter, read_letter
from meteor_py.peers.messaging.requests import Requests
from meteor_py.peers.messaging.target import Sending
from meteor_py.peers.opening import delete_group
from meteor_py.peers.protocol import NOTHING, Beat, PeerProtocol
from meteor_py.peers.view import GroupView, Moment, View
from meteor_py.peers.voting.clock import GroupClock
from meteor_py.peers.voting.polls import Polls
from meteor_py.peers.voting.proposal import Outcome
from meteor_py.peers.voting.proposing import Proposing
from meteor_py.records.config import check_int
from meteor_py.redis.scripts import PEERS_LEAVE
from meteor_py.runtime.clock import now
from meteor_py.runtime.lifecycle import Closeable, ClosingOrder, Registry, close_each

if TYPE_CHECKING:
    from meteor_py.redis.connection import Connection
    from meteor_py.redis.connector import Connector

_log = logging.getLogger(__name__)

#: Seconds that closing waits for what is at work, then for its threads, and at least for the last.
_LEAVE_S, _JOIN_S, _LAST_S = 5.0, 4.0, 1.0
#: Seconds after which somebody who gets no events looks for himself.
_STUCK_S = 5.0
#: Looks at a group that changes meanwhile, at most.
_LOOKS = 10


class PeerGroup(Closeable, Proposing, Sending, Listening, Joining):
    """One group, watched by this process. Get it with ``client.peer_group(name)``.

    >>> with m.peer_group("workers") as group, group.join() as me:      # doctest: +SKIP
    ...     print(me.id, [member.id for member in group.members], group.leader)

    Nobody has to join to look on, or to send messages. Safe for several threads.
    """

    def __init__(
        self, connector: Connector, name: str, config: PeersConfig, codec: PeerCodec | None = None
    ) -> None:
        super().__init__()
        self.name = name
        #: The settings of the group.
        self.config = config
        self.books = PeerProtocol(connector, name)
        #: Under which answers to messages of this handle come back.
        self.session = secrets.token_hex(8)
        #: The server's clock, as it is known here.
        self.clock = GroupClock()
        self.picture = GroupView(self.books.look())
        #: Held while the picture is changed, and what follows from it is said.
        self.lock = threading.RLock()
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        #: Where the picture was, and since when, if the server was ahead of it.
        self._behind: tuple[Moment, float] | None = None
        self._closed = False
        self._ended = False
        self._pid = os.getpid()
        self.caller = CallbackThread(name, self._look_anew)
        self.mail = Requests(self, codec or PeerCodec())
        self.ballots = Polls(self)
        self._heart = Heartbeat(self)
        self._watch = EventReader(self)
        for thread in (self.caller, self._heart, self._watch):
            thread.start()
        _open_groups.add(self)

    # -- who is there --------------------------------------------------------------------------

    @property
    def members(self) -> list[Member]:
        """All members, in the order in which they joined; dead ones too, if they have a name."""
        return self.picture.in_order

    def find(self, member: str) -> Member | None:
        """One of them; None if there is no such member."""
        return self.picture.members.get(member)

    @property
    def view(self) -> int:
        """The number of the last event that is known here."""
        return self.picture.view

    @property
    def leader(self) -> Member | None:
        """The member that leads; None if nobody does now."""
        return self.picture.members.get(self.picture.leader or "")

    @property
    def term(self) -> int:
        """The number of the last term; 0 if there was none."""
        return self.picture.term

    def snapshot(self) -> View:
        """All of these at one instant; ``watch(since=snapshot.number)`` goes on from there."""
        with self.lock:
            return View(self.view, self.members, self.leader, self.term)

    def guarded(self, name: str) -> bytes | None:
        """A value that a leader wrote with ``term.guard``; None if there is none."""
        self._check_open()
        value: bytes | None = self.books.connector.call("HGET", self.books.key("guarded"), name)
        return value

    def dead_letters(self, limit: int = 1_000) -> list[PeerLetter]:
        """The last messages that nobody could take, the oldest first: of a type that their receiver
        does not know, or whose receivers left again and again. A thousand or so are kept."""
        self._check_open()
        check_int("limit", limit, 1, 1_000_000)
        command = ("XREVRANGE", self.books.key("dead"), "+", "-", "COUNT", limit)
        return [read_letter(*entry) for entry in reversed(self.books.connector.call(*command))]

    def now(self) -> float:
        """The time by the clock of the group, its server's, in seconds since 1970."""
        if not self.clock.known:
            self._heart.hurry()
            deadline = time.monotonic() + _JOIN_S
            while not self.clock.known:
                if time.monotonic() > deadline:
                    raise MeteorError(f"The server of group {self.name!r} has not told its time.")
                time.sleep(0.005)
        return self.clock.now()

    # -- leaving -------------------------------------------------------------------------------

    def remove(self, member: str) -> bool:
        """Take a member out, whosever it is; it will not join again by itself.

        Returns:
            Whether there was such a member.
        """
        self._check_open()
        return bool(self.books.run(PEERS_LEAVE, [member, "", ""])[1])

    # -- the end -------------------------------------------------------------------------------

    def delete(self, *, force: bool = False) -> None:
        """Delete the group, with its members, their messages, and what is guarded; and close this.

        Whoever has joined elsewhere, and is alive, joins again, and so begins it anew.

        Args:
            force: Also if there are members alive.

        Raises:
            PeerError: Some are.
        """
        self._check_open()
        delete_group(self, force=force)

    def close(self) -> None:
        """Leave with all who joined here (named ones may come back), and look on no more.

        What is at work is waited for, up to 10 seconds. If that is interrupted, closing again, or
        the end of the process, goes on with it.
        """
        self._closed = True
        if self._ended or self._pid != os.getpid():
            return
        self._leave_all(now() + _LEAVE_S)
        deadline = now() + _JOIN_S
        self.mail.close(deadline)
        self.ballots.close(deadline)
        parts = (self._heart, self._watch, self.caller)
        for part in parts:
            part.end()
        self._end_watching()
        for part in parts:
            if not part.join(max(deadline - now(), _LAST_S)):
                _log.warning("A thread of group %r does not end.", self.name)
        self._ended = True
        _open_groups.discard(self)

    def _leave_all(self, deadline: float) -> None:
        """All at once: nobody stays a member because another one's handler takes its time."""
        going = [
            membership
            for membership in self.memberships()
            if membership.begin_to_go("stay" if membership.persistent else "")
        ]
        patience = now() + self.books.connector.timeout_s
        is_away = not all(membership.announce() for membership in going) and now() > patience
        for membership in sorted(going, key=attrgetter("busy")):
            if is_away:
                membership.lose("left")  # it is missed in time
            else:
                is_away = not membership.finish_going(deadline) and now() > patience
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(deadline - now(), 0.0))
                if thread.is_alive():
                    _log.warning("What leads group %r does not end.", self.name)

    @property
    def closed(self) -> bool:
        return self._closed

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.picture.members)} members"
        return f"<PeerGroup {self.name!r} ({state})>"

    # -- for its threads and parts -------------------------------------------------------------

    def own(self, thread: threading.Thread) -> None:
        """A thread of one of its members, to be joined at the end."""
        self._threads.add(thread)

    def recovered(self, membership: Membership) -> None:
        """A member has joined again by itself."""
        membership.receiver_rejoined()

    def read_settings(self, connection: Connection | None = None) -> None:
        """It may have been begun anew, with other settings."""
        try:
            found = self.books.settings(connection)
        except PeerGroupNotFound:
            return
        if found != self.config:
            _log.warning("Group %r was begun anew with other settings: %s.", self.name, found)
            self.config = found

    def moment(self) -> Moment:
        """Which event the picture shows."""
        with self.lock:
            return self.picture.moment

    def compare(self, beat: Beat, seen: Moment, connection: Connection) -> None:
        """If the server knows less than we did when it was asked, it has lost something."""
        same = beat.view == seen.view and beat.mark == seen.mark
        lost = beat.life != seen.life or beat.view < seen.view
        if lost or (beat.view == seen.view and not same):
            if self.moment() == seen:
                if seen.life:
                    _log.warning("The server has lost state of group %r: looking anew.", self.name)
                self.resync(reset=True, connection=connection)
        elif same:
            self._behind = None
        elif self._behind is None or self._behind[0] != seen:
            self._behind = (seen, time.monotonic())
        elif time.monotonic() > self._behind[1] + _STUCK_S:
            _log.warning("Group %r goes on, but no event comes: looking anew.", self.name)
            self._behind = None
            self.resync(connection=connection)

    def resync(self, *, reset: bool = False, connection: Connection | None = None) -> None:
        """Look at the group as it is; tell what has changed.

        Args:
            reset: The server is known to have lost something.
        """
        for _ in range(_LOOKS):
            before = self.moment()
            try:
                look = self.books.look(connection)
            except PeerGroupNotFound:
                look = NOTHING
            if look.life != before.life:
                self.read_settings(connection)
            with self.lock:
                if self.moment() == before:
                    known = self.picture.members
                    for event in self.picture.resync(look, reset=reset):
                        self._take_in(event, known.get(event.member or ""))
                    self.ballots.resync()
                    self._watch.read_anew()
                    return

    def apply(self, event: Event) -> None:
        """Take in the next event, and tell everybody here of it."""
        known = self.picture.members.get(event.member or "")
        self.picture.apply(event)
        self._take_in(event, known)

    def _take_in(self, event: Event, known: Member | None) -> None:
        member = self.picture.members.get(event.member or "")
        match event.kind:
            case "reset":
                self._tell("reset")
            case "joined" if member is not None:
                self._tell("join", member)
            case "alive" if member is not None:
                self._note_replaced(member)
                self._tell("status", member, Status.ALIVE)
                self._tell("join", member)
            case "dead" if member is not None:
                self._tell("status", member, Status.DEAD)
            case "left":
                self._note_left(event)
                if known is not None:
                    self._tell("leave", known, event.reason)
            case "elected":
                for membership in self._memberships:
                    if membership.id == event.member:
                        self._tell_elected(membership)
                if member is not None:
                    self._tell("elected", member, event.term)
            case "resigned":
                for membership in self._memberships:
                    if membership.id == event.member and event.term is not None:
                        membership.deposed(event.term)
                self._tell("resigned", event.member, event.term, event.reason)
            case "proposed":
                self.ballots.proposed(event)
            case "decided":
                self.ballots.decided(event)
        self._spread(event)

    def hurry(self) -> None:
        """Ask the server now how things are, and what time it is."""
        self._heart.hurry()

    def tell_decision(self, outcome: Outcome) -> None:
        self._tell("decision", outcome)

    def _this(self) -> PeerGroup:
        return self

    def _proposer(self) -> tuple[PeerGroup, None]:
        self._check_open()
        return self, None

    def _note_left(self, event: Event) -> None:
        session = event.fields.get("session", b"").decode()
        if event.reason == "removed":
            for membership in list(self._memberships):
                if membership.session == session:
                    membership.lose("removed")

    def _note_replaced(self, member: Member) -> None:
        for membership in list(self._memberships):
            # Unless the news is older than the membership.
            newer = member.index > membership.index and member.session != membership.session
            if membership.id == member.id and newer:
                membership.lose("joined again elsewhere")

    def catch_up(self) -> None:
        """Have everything in the picture that has happened by now, if the server can be reached."""
        try:
            beat = self.books.beat(None, "", [])
            deadline = time.monotonic() + _JOIN_S
            while self.picture.view < beat.view and self.picture.life == beat.life:
                if self._closed:
                    return
                if time.monotonic() > deadline:
                    self.resync()
                    return
                time.sleep(0.001)
        except (ConnectionFailed, PeerError):
            return  # the heart goes on trying
        if self.picture.life != beat.life:
            self.resync(reset=True)

    def _mail_of(self) -> tuple[Requests, None]:
        return self.mail, None

    def check_owned(self) -> None:
        """Raise in a forked child."""
        if self._pid != os.getpid():
            raise MeteorError(
                f"This handle of group {self.name!r} belongs to the parent process; open another "
                "here with client.peer_group()."
            )

    def _check_open(self) -> None:
        self.check_owned()
        if self._closed:
            raise MeteorError(f"This handle of group {self.name!r} is closed; open another.")


def _at_exit(groups: Sequence[PeerGroup]) -> None:
    """Let the other members know at once."""
    for group in groups:
        try:
            group.close()
        except MeteorError as error:
            _log.error("At the end of %r: %s", group, error)


_open_groups: Registry[PeerGroup] = Registry(
    ClosingOrder.PEER_GROUPS,
    owner=lambda group: group.books.connector,
    close=lambda groups: close_each(groups, PeerGroup.close, MeteorError),
    at_exit=_at_exit,
    after_fork=lambda groups: None,  # members, threads and connections are the parent's
)
