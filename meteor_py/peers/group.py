"""A distributed group: who is in it, who leads it, and the way to all of them."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from meteor_py import keys
from meteor_py.closing import Closing
from meteor_py.config import check_choice, check_int, check_seconds
from meteor_py.errors import MemberTaken, MeteorError, PeerError
from meteor_py.peers.books import Beat, Books
from meteor_py.peers.clock import GroupClock
from meteor_py.peers.config import PeersConfig
from meteor_py.peers.event import Event
from meteor_py.peers.heart import Heart
from meteor_py.peers.mail import Mail
from meteor_py.peers.member import Member, Status, dump_metadata
from meteor_py.peers.membership import Membership, new_id
from meteor_py.peers.picture import Picture
from meteor_py.peers.watch import Caller, Watch
from meteor_py.scripts import PEERS_LEAVE

if TYPE_CHECKING:
    from meteor_py.client import Client

_log = logging.getLogger(__name__)

OnConflict = Literal["takeover", "fail", "wait"]
_F = TypeVar("_F", bound=Callable[..., object])

#: Seconds that closing waits for each thread.
_JOIN_S = 5.0
#: Seconds between two tries to join under a name that somebody has.
_WAIT_S = 0.1
#: Those who were removed on purpose, and must not join again by themselves.
_REMOVED_MAX = 1_000


class PeerGroup(Closing):
    """One group, watched by this process. Get it with ``client.group(name)``.

    >>> with m.group("workers") as group, group.join() as me:      # doctest: +SKIP
    ...     print(me.id, [member.id for member in group.members], group.leader)

    Nobody has to join to look on, or to send messages. Safe for several threads.
    """

    def __init__(self, client: Client, name: str, config: PeersConfig) -> None:
        self.name = name
        #: The settings of the group.
        self.config = config
        self.books = Books(client, name)
        #: Under which answers to messages of this handle come back.
        self.session = secrets.token_hex(8)
        #: The server's clock, as it is known here.
        self.clock = GroupClock()
        self.picture = Picture(self.books.look())
        #: Held while the picture is changed, and what follows from it is said.
        self.lock = threading.RLock()
        self._memberships: list[Membership] = []
        self._removed: dict[str, None] = {}
        self._listeners: dict[str, list[Callable[..., object]]] = {}
        self._queues: weakref.WeakSet[_Queue] = weakref.WeakSet()
        self._closed = False
        self._pid = os.getpid()
        self.caller = Caller(name)
        self.mail = Mail(self)
        self._heart = Heart(self)
        self._watch = Watch(self)
        for thread in (self.caller, self._heart, self._watch):
            thread.start()
        _register(self)

    # -- who is there --------------------------------------------------------------------------

    @property
    def members(self) -> list[Member]:
        """All members, in the order in which they joined; dead ones too, if they have a name."""
        return sorted(self.picture.members.values(), key=lambda member: member.index)

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

    # -- joining and leaving -------------------------------------------------------------------

    def join(
        self,
        name: str | None = None,
        *,
        metadata: Any = None,
        priority: int = 0,
        on_conflict: OnConflict = "takeover",
        timeout: float | None = None,
    ) -> Membership:
        """Become a member.

        Args:
            name: A name makes it persistent: it stays a member when its process dies, what is sent
                to it waits, and it goes on when it joins again, here or elsewhere.
            metadata: Whatever it wants to say of itself: JSON.
            priority: Who has a higher one leads before others: -1,000 to 1,000.
            on_conflict: If somebody alive has the name: "takeover" replaces it, which is what a
                restart wants; "fail", or "wait" until it is free.
            timeout: Seconds to wait then; None for as long as it takes.

        Raises:
            MemberTaken: Somebody alive has the name.
            TimeoutError: It was not free in time.
            ValueError, TypeError: A name or a setting that cannot be.
        """
        self._check_open()
        check_choice("on_conflict", on_conflict, ("takeover", "fail", "wait"))
        check_int("priority", priority, -1_000, 1_000)
        if name is not None:
            keys.check_name(name, "member")
        data = dump_metadata(metadata)
        membership = Membership(
            self, name or new_id(), persistent=name is not None, priority=priority
        )
        self._removed.pop(membership.id, None)
        deadline = None if timeout is None else time.monotonic() + check_seconds("timeout", timeout)
        while not membership.join("takeover" if on_conflict == "takeover" else "fail", data):
            if on_conflict != "wait":
                raise MemberTaken(
                    f"Somebody in group {self.name!r} has the name {name!r}, and is alive; choose "
                    'another, or take it over with on_conflict="takeover".',
                    group=self.name,
                )
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"The name {name!r} was not free within {timeout:g} seconds.")
            time.sleep(_WAIT_S)
        with self.lock:
            self._memberships.append(membership)
            if self.picture.leader == membership.id:
                self._tell_elected(membership)
        self._catch_up()
        return membership

    def remove(self, member: str) -> bool:
        """Take a member out, whosever it is; it will not join again by itself.

        Returns:
            Whether there was such a member.
        """
        self._check_open()
        return bool(self.books.run(PEERS_LEAVE, [member, "", ""])[1])

    # -- being told ----------------------------------------------------------------------------

    def on_join(self, function: _F) -> _F:
        """Call a function with each ``Member`` that joins, also one that comes back from the dead.

        Like all of these it is called in the order of the events, in one thread of the group; the
        members are as they were after the event, or later.
        """
        return self._listen("join", function)

    def on_leave(self, function: _F) -> _F:
        """Call a function with each ``Member`` that leaves, and "left", "expired" or "removed"."""
        return self._listen("leave", function)

    def on_status(self, function: _F) -> _F:
        """Call a function with a named ``Member`` that dies or comes back, and its ``Status``."""
        return self._listen("status", function)

    def on_elected(self, function: _F) -> _F:
        """Call a function with the leader and the number of its term; at once if there is one."""
        with self.lock:
            leader = self.leader
            if leader is not None:
                self.caller.call(function, leader, self.picture.term)
            return self._listen("elected", function)

    def on_resigned(self, function: _F) -> _F:
        """Call a function with the id, term, and reason of each leader that leads no more."""
        return self._listen("resigned", function)

    def on_event(self, function: _F) -> _F:
        """Call a function with each ``Event``."""
        return self._listen("event", function)

    def watch(self, timeout: float | None = None) -> Iterator[Event]:
        """Iterate over the events from now on; ends when none comes for ``timeout`` seconds, or
        when the group is closed.

        Everybody sees the same events in the same order, their ``view`` rising by one.
        """
        events = _Queue()
        with self.lock:
            self._check_open()
            self._queues.add(events)
        return self._iterate(events, timeout)

    def _iterate(self, events: _Queue, timeout: float | None) -> Iterator[Event]:
        while True:
            try:
                event = events.get(timeout=timeout)
            except queue.Empty:
                return
            if event is None:
                return
            yield event

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave with all who joined here (named ones may come back), and look on no more."""
        if self._closed or self._pid != os.getpid():
            self._closed = True
            return
        self._closed = True
        _open_groups.discard(self)
        for membership in self.memberships():
            membership.close()
        self.mail.close()
        for part in (self._heart, self._watch, self.caller):
            part.end()
        for events in list(self._queues):
            events.put(None)
        for part in (self._heart, self._watch, self.caller):
            if not part.join(_JOIN_S):
                _log.warning("A thread of group %r does not end.", self.name)

    @property
    def closed(self) -> bool:
        return self._closed

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.picture.members)} members"
        return f"<PeerGroup {self.name!r} ({state})>"

    # -- for its threads and parts -------------------------------------------------------------

    def memberships(self) -> list[Membership]:
        """The members that this handle has joined, and not lost."""
        with self.lock:
            return list(self._memberships)

    def forget(self, membership: Membership) -> None:
        with self.lock:
            if membership in self._memberships:
                self._memberships.remove(membership)

    def was_removed(self, member: str) -> bool:
        """Whether somebody has taken it out on purpose."""
        self._catch_up()
        return member in self._removed

    def recovered(self, membership: Membership) -> None:
        """A member has joined again by itself."""
        self.mail.rejoined(membership)

    def compare(self, beat: Beat) -> None:
        """If the server knows less than we, it has lost something: look at all anew."""
        with self.lock:
            if beat.life != self.picture.life or beat.view < self.picture.view:
                _log.warning("The server has lost state of group %r: looking anew.", self.name)
                self.resync()

    def resync(self) -> None:
        """Look at the group as it is; tell what has changed."""
        with self.lock:
            known = self.picture.members
            for event in self.picture.resync(self.books.look()):
                self._take_in(event, known.get(event.member or ""))

    def apply(self, event: Event) -> None:
        """Take in the next event, and tell everybody here of it."""
        known = self.picture.members.get(event.member or "")
        self.picture.apply(event)
        self._take_in(event, known)

    def _take_in(self, event: Event, known: Member | None) -> None:
        member = self.picture.members.get(event.member or "")
        match event.kind:
            case "joined" if member is not None:
                self._tell("join", member)
            case "alive" if member is not None:
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
                    term = membership.term
                    if membership.id == event.member and term and term.number == event.term:
                        membership.lose_term(term)
                self._tell("resigned", event.member, event.term, event.reason)
        self._tell("event", event)
        for events in list(self._queues):
            events.put(event)

    def _note_left(self, event: Event) -> None:
        assert event.member is not None, "somebody left"
        if event.reason == "removed":
            self._removed[event.member] = None
            while len(self._removed) > _REMOVED_MAX:
                del self._removed[next(iter(self._removed))]
            for membership in list(self._memberships):
                if membership.id == event.member:
                    membership.lose("removed")

    def _tell_elected(self, membership: Membership) -> None:
        found = self.picture.members.get(membership.id)
        if found is not None and found.session == membership.session:
            membership.elected(self.picture.term)

    def _tell(self, what: str, *arguments: Any) -> None:
        for function in self._listeners.get(what, ()):
            self.caller.call(function, *arguments)

    def _listen(self, what: str, function: _F) -> _F:
        with self.lock:
            self._listeners.setdefault(what, []).append(function)
        return function

    def _catch_up(self) -> None:
        """Have everything in the picture that has happened by now."""
        look = self.books.look()
        deadline = time.monotonic() + _JOIN_S
        while self.picture.view < look.view and self.picture.life == look.life:
            if time.monotonic() > deadline:
                self.resync()
                break
            time.sleep(0.001)

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise MeteorError(
                f"This handle of group {self.name!r} belongs to the parent process; open another "
                "here with client.group()."
            )
        if self._closed:
            raise MeteorError(f"This handle of group {self.name!r} is closed; open another.")


class _Queue(queue.Queue["Event | None"]):
    """The events of one who watches; hashable, to be kept by a weak reference."""

    __hash__ = object.__hash__


def open_group(client: Client, name: str, instance: str | None, asked: dict[str, Any]) -> PeerGroup:
    """Open a group, and begin it if it does not exist.

    Raises:
        PeerError: It exists with other settings.
    """
    keys.check_name(name, "group")
    if instance is not None:
        name = f"{name}/{keys.check_name(instance, 'group')}"
    config = replace(PeersConfig(), **asked)
    present = Books(client, name).open(config)
    setting = present.differing(asked)
    if setting is not None:
        raise PeerError(
            f"Group {name!r} exists with {setting}={getattr(present, setting)!r}, not "
            f"{asked[setting]!r}; leave the setting out.",
            group=name,
        )
    return PeerGroup(client, name, present)


# Those with threads and members, which somebody has to end.
_open_groups: weakref.WeakSet[PeerGroup] = weakref.WeakSet()


def _register(group: PeerGroup) -> None:
    _open_groups.add(group)
    # Again each time, for the same reason as with publishers.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def close_groups(client: Client) -> None:
    """Close the group handles of a client."""
    for group in list(_open_groups):
        if group.books.client is client:
            group.close()


def _close_all() -> None:
    """At the interpreter's end: let others know at once."""
    for group in list(_open_groups):
        try:
            group.close()
        except MeteorError as error:
            _log.error("At the end of %r: %s", group, error)


def _disown_all() -> None:
    """In a forked child: the members, threads and connections are the parent's."""
    _open_groups.clear()


os.register_at_fork(after_in_child=_disown_all)
