"""A peer group: its members, its leader, and how to reach them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from meteor_py.errors import MemberTaken, PeerError, PeerGroupActive
from meteor_py.peers.codec import PeerCodec
from meteor_py.peers.config import PROPERTIES_MAX, PeersConfig
from meteor_py.peers.event import Event, read_event
from meteor_py.peers.group_handle import GroupHandle
from meteor_py.peers.member import Member, dump_metadata
from meteor_py.peers.member_handle import MemberHandle
from meteor_py.peers.membership import Membership
from meteor_py.peers.messaging.dead_letter import PeerLetter, read_letter
from meteor_py.peers.protocol import PeerProtocol
from meteor_py.peers.sender import Sender
from meteor_py.peers.view import View
from meteor_py.records.config import check_choice, check_int, check_seconds
from meteor_py.redis import keys
from meteor_py.redis.scripts import PEERS_LEAVE, PEERS_SET_PROPERTY

if TYPE_CHECKING:
    from meteor_py.redis.connector import Connector

OnConflict = Literal["takeover", "fail", "wait"]
_F = TypeVar("_F", bound=Callable[..., object])

#: Seconds between two attempts to join under a name that is taken.
_WAIT_S = 0.1
#: The largest event number that Lua can represent exactly.
_VIEW_MAX = 2**53


class PeerGroup(Sender):
    """A peer group as this process sees it. Get it with ``client.peer_group(name)``.

    >>> with m.peer_group("workers") as group, group.join() as me:      # doctest: +SKIP
    ...     print(me.id, [member.id for member in group.members], group.leader)

    A process can watch the group and send messages without joining. Thread-safe.
    """

    def __init__(self, handle: GroupHandle) -> None:
        super().__init__(handle)
        self.name = handle.name
        self._handle = handle

    # -- members -----------------------------------------------------------------------------------

    @property
    def config(self) -> PeersConfig:
        """The group's settings."""
        return self._handle.config

    @property
    def members(self) -> list[Member]:
        """All members in joining order, including named members that are dead.

        A member that rejoins, or resigns as leader, moves to the end.
        """
        return self._handle.view.in_order

    def find(self, member: str) -> Member | None:
        """Return the member with this id; None if there is no such member."""
        return self._handle.view.members.get(member)

    @property
    def view(self) -> int:
        """The number of the last event that this process has seen."""
        return self._handle.view.number

    @property
    def leader(self) -> Member | None:
        """The current leader; None if there is none."""
        view = self._handle.view
        return view.members.get(view.leader or "")

    @property
    def term(self) -> int:
        """The number of the last term; 0 before the first election."""
        return self._handle.view.term

    def snapshot(self) -> View:
        """Return the view number, members, leader and term, all from the same moment.

        ``watch(since=snapshot.number)`` continues from there.
        """
        with self._handle.lock:
            return View(self.view, self.members, self.leader, self.term)

    def guarded(self, name: str) -> bytes | None:
        """Return the value that a leader wrote with ``term.guard``; None if there is none."""
        self._check_open()
        protocol = self._handle.protocol
        value: bytes | None = protocol.connector.call("HGET", protocol.key("guarded"), name)
        return value

    @property
    def properties(self) -> dict[str, Any]:
        """The group's properties by name, as of the last event that this process has seen."""
        return dict(self._handle.view.properties)

    def set_property(self, name: str, value: Any) -> None:
        """Set a group property, which all processes can read. ``on_property`` reports the change.

        Any client can set it, and the last writer wins. For values that only the leader may write,
        use ``term.guard``.

        Args:
            name: 1 to 128 characters of A-Z a-z 0-9 . _ -, not starting with a dot.
            value: Any JSON value, up to 4 KiB. None deletes the property.

        Raises:
            PeerError: The group has reached its maximum of 100 properties.
            TypeError, ValueError: The name is invalid, or the value cannot be written as JSON or is
                too long.
        """
        self._check_open()
        keys.check_name(name, "property")
        data = b"" if value is None else dump_metadata(value, "property value")
        args = [name, "delete" if value is None else "set", data, PROPERTIES_MAX]
        reply = self._handle.protocol.run(PEERS_SET_PROPERTY, args)
        if reply[0] == b"FULL":
            raise PeerError(
                f"Group {self.name!r} already has {reply[1]} properties, which is the maximum. "
                "Delete some, or store several values in one property.",
                group=self.name,
            )
        self._handle.catch_up()

    def dead_letters(self, limit: int = 1_000) -> list[PeerLetter]:
        """Return up to ``limit`` of the newest messages that could not be delivered, oldest first.

        A message becomes a dead letter if its receiver cannot decode it, if it was delivered
        ``max_deliveries`` times and never settled, if it moved to other members too often (1,000
        times), or if no member was left to receive it. The group keeps about 1,000 dead letters.
        """
        self._check_open()
        check_int("limit", limit, 1, 1_000_000)
        protocol = self._handle.protocol
        command = ("XREVRANGE", protocol.key("dead"), "+", "-", "COUNT", limit)
        return [read_letter(*entry) for entry in reversed(protocol.connector.call(*command))]

    def now(self) -> float:
        """Return the time on the group's clock, which is the server's, in seconds since 1970.

        Raises:
            MeteorError: The first reading of the clock did not arrive within 4 seconds.
        """
        return self._handle.now()

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

        This handle's callbacks wait until the member has joined.

        Args:
            name: Makes the member persistent. If its process dies, the member stays in the group,
                messages to it wait, and it continues when any process joins under the name again.
            metadata: Any JSON value, up to 4 KiB, that describes the member to others.
            priority: -1,000 to 1,000. Members with a higher priority are elected before others.
            on_conflict: What to do if a live member has the name. "takeover" replaces that member,
                which suits a restarted process; "fail" raises; "wait" waits until the name is free.
            timeout: Seconds to wait for the name if ``on_conflict`` is "wait"; None waits
                indefinitely.

        Raises:
            MemberTaken: A live member has the name, or the name is the id of an unnamed member.
            PeerError: The group has reached its maximum of 1,000 members.
            TimeoutError: The name did not become free in time.
            ValueError, TypeError: An argument is out of range or of the wrong type.
        """
        handle = self._handle
        handle.check_open()
        check_choice("on_conflict", on_conflict, ("takeover", "fail", "wait"))
        check_int("priority", priority, -1_000, 1_000)
        if name is not None:
            keys.check_name(name, "member")
        data = dump_metadata(metadata)
        membership = Membership(self, MemberHandle(handle, name, priority))
        deadline = None if timeout is None else time.monotonic() + check_seconds("timeout", timeout)
        while True:
            with handle.listeners.thread.held():
                how = "takeover" if on_conflict == "takeover" else "fail"
                if handle.join(membership._handle, how, data):
                    return membership
            if on_conflict != "wait":
                raise self._taken(name, on_conflict)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"The name {name!r} did not become free within {timeout:g} seconds. Wait "
                    'longer, or take it over with on_conflict="takeover".'
                )
            time.sleep(_WAIT_S)
            handle.check_open()

    def _taken(self, name: str | None, on_conflict: str) -> MemberTaken:
        if on_conflict == "takeover":
            hint = "It is the id of a member that joined without a name. Choose another name."
        else:
            hint = 'Choose another name, or take this one over with on_conflict="takeover".'
        text = f"A live member of group {self.name!r} has the name {name!r}. {hint}"
        return MemberTaken(text, group=self.name)

    def remove(self, member: str) -> bool:
        """Remove a member, wherever it joined. It does not rejoin automatically.

        Returns:
            Whether the member existed.
        """
        self._check_open()
        return bool(self._handle.protocol.run(PEERS_LEAVE, [member, "", ""])[1])

    # -- events ------------------------------------------------------------------------------------

    def on_join(self, function: _F) -> _F:
        """Call a function with each ``Member`` that joins, or that rejoins after it died or was
        replaced.

        One thread runs all of the group's callbacks, in event order. While a callback runs,
        ``members`` may already show later events.
        """
        return self._listen("join", function)

    def on_leave(self, function: _F) -> _F:
        """Call a function with each ``Member`` that leaves and the reason.

        The reason is "left"; "removed"; "expired" for an unnamed member that died; "dead" for a
        named member that died or was closed; "replaced" if another session took over its name,
        which ``on_join`` reports next; or "resync" if the original event was lost. A dead member
        has already left, so its removal is not reported here. ``on_event`` reports the removal, as
        "left".
        """
        return self._listen("leave", function)

    def on_status(self, function: _F) -> _F:
        """Call a function with each named ``Member`` that dies or returns, and its ``Status``."""
        return self._listen("status", function)

    def on_property(self, function: _F) -> _F:
        """Call a function with the name and value of each property that is set or deleted. For a
        deleted property, the value is None."""
        return self._listen("property", function)

    def on_elected(self, function: _F) -> _F:
        """Call a function with the leader and its term number: at once if there is already a
        leader, and whenever one is elected."""
        self._check_open()  # before the lock: another thread may have held it at a fork
        with self._handle.lock:
            self._listen("elected", function)
            leader = self.leader
            if leader is not None:
                self._handle.listeners.thread.call(function, leader, self.term)
        return function

    def on_resigned(self, function: _F) -> _F:
        """Call a function with the id, term number and reason of each leader that stops leading."""
        return self._listen("resigned", function)

    def on_decision(self, function: _F) -> _F:
        """Call a function with the ``Outcome`` of each vote, whichever process called the vote."""
        self._check_open()
        self._handle.polls.use()
        return self._listen("decision", function)

    def on_event(self, function: _F) -> _F:
        """Call a function with each ``Event``."""
        return self._listen("event", function)

    def on_reset(self, function: _F) -> _F:
        """Call a function, without arguments, when the application must read the group's state
        again.

        There are two possible causes. Either the server has lost group state: callbacks for the
        differences follow, and this process's members rejoin. Or callbacks were so slow that
        10,000 calls were waiting, and the group dropped later calls.
        """
        return self._listen("reset", function)

    def _listen(self, what: str, function: _F) -> _F:
        self._check_open()
        with self._handle.lock:
            return self._handle.listeners.add(what, function)

    def watch(self, timeout: float | None = None, *, since: int | None = None) -> Iterator[Event]:
        """Iterate over events, starting with the next one.

        Ends when no event arrives for ``timeout`` seconds, or when the group is closed. All
        processes see the same events in the same order; ``view`` increases by one per event.

        Args:
            timeout: Seconds to wait for each event; None waits indefinitely.
            since: Start after the event with this number, from ``snapshot()`` or ``view``.

        Raises:
            PeerError: The server, which keeps about 10,000 events, no longer has all events after
                ``since``. The iterator also raises this error if it falls 10,000 events behind.
            ValueError: ``since`` is higher than the last event's number.
        """
        handle = self._handle
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        if since is not None and check_int("since", since, 0, _VIEW_MAX) > self.view:
            handle.catch_up()  # the number may come from a process that is ahead of this one
        with handle.lock:
            handle.check_open()
            last = self.view
            events = handle.listeners.open_queue()
        if since is not None and since > last:
            raise ValueError(f"Group {self.name!r} has no event {since} yet; the last is {last}.")
        past = self._read_events(last if since is None else since, last)
        return handle.listeners.iterate(past, events, timeout)

    def _read_events(self, since: int, until: int) -> list[Event]:
        if since >= until:
            return []
        protocol = self._handle.protocol
        command = ("XRANGE", protocol.key("events"), f"{since + 1}-0", f"{until}-0")
        found = [read_event(*entry) for entry in protocol.connector.call(*command)]
        if [event.view for event in found] != list(range(since + 1, until + 1)):
            raise PeerError(
                f"Group {self.name!r} no longer has all events since number {since}. Take a new "
                "snapshot.",
                group=self.name,
            )
        return found

    # -- the end -----------------------------------------------------------------------------------

    def delete(self, *, force: bool = False) -> None:
        """Delete the group with its members, messages and guarded values, and close this handle.

        Args:
            force: Delete the group even if it has live members that joined elsewhere, in another
                process or through another handle. These members rejoin, which creates the group
                again.

        Raises:
            PeerGroupActive: The group has such members, and ``force`` is false.
        """
        handle = self._handle
        handle.check_open()
        mine = {member.session for member in handle.local_members()}
        members = handle.protocol.look().members.values()
        alive = sum(member.alive and member.session not in mine for member in members)
        if not alive or force:
            for member in handle.local_members():
                if member.leave(""):
                    handle.catch_up()
            alive = handle.protocol.delete(force=force)  # members may have joined since the check
        if alive:
            raise PeerGroupActive(
                f"Group {self.name!r} has live members that joined elsewhere: {alive}. Close them "
                "first, or delete the group with force=True.",
                group=self.name,
                alive=alive,
            )
        self.close()

    def close(self) -> None:
        """Make this handle's members leave, and stop watching. Named members can rejoin later.

        Waits up to 5 seconds for handlers and leader functions, and then about 5 seconds for the
        group's threads. If a signal interrupts the call, the next ``close()``, or the end of the
        process, finishes closing.
        """
        self._handle.close()

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._handle.closed

    def __repr__(self) -> str:
        return repr(self._handle)


def open_group(
    connector: Connector,
    name: str,
    instance: str | None,
    asked: dict[str, Any],
    codec: PeerCodec,
    create: bool = True,
) -> PeerGroup:
    """Open a group, creating it if needed. See ``Client.peer_group``."""
    if instance is None and "/" in name:
        name, _, instance = name.partition("/")
    keys.check_name(name, "group")
    if instance is not None:
        name = f"{name}/{keys.check_name(instance, 'group')}"
    config = replace(PeersConfig(), **asked)
    present = PeerProtocol(connector, name).open(config, create=create)
    setting = present.differing(asked)
    if setting is not None:
        raise PeerError(
            f"Group {name!r} exists with {setting}={getattr(present, setting)!r}, not "
            f"{asked[setting]!r}. Omit the setting, or delete the group first.",
            group=name,
        )
    return PeerGroup(GroupHandle(connector, name, present, codec))
