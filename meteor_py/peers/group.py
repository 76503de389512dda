"""A peer group: its members, its leader, and the ways to reach them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from meteor_py.errors import MemberTaken, PeerError, PeerGroupActive
from meteor_py.peers.codec import PeerCodec
from meteor_py.peers.config import PeersConfig
from meteor_py.peers.event import Event, read_event
from meteor_py.peers.group_handle import GroupHandle
from meteor_py.peers.member import Member, dump_metadata
from meteor_py.peers.member_handle import MemberHandle
from meteor_py.peers.membership import Membership
from meteor_py.peers.messaging.dead_letter import PeerLetter, read_letter
from meteor_py.peers.messaging.target import Everybody, Target, Targets
from meteor_py.peers.protocol import PeerProtocol
from meteor_py.peers.view import View
from meteor_py.peers.voting.proposal import Kind, Outcome
from meteor_py.peers.voting.proposing import Proposer
from meteor_py.records.config import check_choice, check_function, check_int, check_seconds
from meteor_py.redis import keys
from meteor_py.redis.scripts import PEERS_LEAVE
from meteor_py.runtime.lifecycle import Closeable

if TYPE_CHECKING:
    from meteor_py.redis.connector import Connector

OnConflict = Literal["takeover", "fail", "wait"]
_F = TypeVar("_F", bound=Callable[..., object])

#: Seconds between two tries to join under a name that is taken.
_WAIT_S = 0.1
#: The largest number of an event: more cannot be counted.
_VIEW_MAX = 2**53


class PeerGroup(Closeable):
    """One group, watched by this process. Get it with ``client.peer_group(name)``.

    >>> with m.peer_group("workers") as group, group.join() as me:      # doctest: +SKIP
    ...     print(me.id, [member.id for member in group.members], group.leader)

    A process need not join to look on, or to send messages. Safe for several threads.
    """

    def __init__(self, handle: GroupHandle) -> None:
        self.name = handle.name
        self._handle = handle
        self._targets = Targets(handle.requests)
        self._proposer = Proposer(handle)

    # -- members -----------------------------------------------------------------------------------

    @property
    def config(self) -> PeersConfig:
        """The settings of the group."""
        return self._handle.config

    @property
    def members(self) -> list[Member]:
        """All members, in the order in which they joined; dead ones too, if they have a name."""
        return self._handle.view.in_order

    def find(self, member: str) -> Member | None:
        """One of them; None if there is no such member."""
        return self._handle.view.members.get(member)

    @property
    def view(self) -> int:
        """The number of the last event that is known here."""
        return self._handle.view.number

    @property
    def leader(self) -> Member | None:
        """The member that leads; None if there is no leader now."""
        view = self._handle.view
        return view.members.get(view.leader or "")

    @property
    def term(self) -> int:
        """The number of the last term; 0 if there was none."""
        return self._handle.view.term

    def snapshot(self) -> View:
        """All of these at one instant; ``watch(since=snapshot.number)`` continues from there."""
        with self._handle.lock:
            return View(self.view, self.members, self.leader, self.term)

    def guarded(self, name: str) -> bytes | None:
        """A value that a leader wrote with ``term.guard``; None if there is none."""
        self._handle.check_open()
        protocol = self._handle.protocol
        value: bytes | None = protocol.connector.call("HGET", protocol.key("guarded"), name)
        return value

    def dead_letters(self, limit: int = 1_000) -> list[PeerLetter]:
        """The last messages that no member could take, the oldest first: of a type that their
        receiver does not know, or whose receivers left again and again. About 1,000 are kept."""
        self._handle.check_open()
        check_int("limit", limit, 1, 1_000_000)
        protocol = self._handle.protocol
        command = ("XREVRANGE", protocol.key("dead"), "+", "-", "COUNT", limit)
        return [read_letter(*entry) for entry in reversed(protocol.connector.call(*command))]

    def now(self) -> float:
        """The time by the clock of the group, its server's, in seconds since 1970."""
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

        Args:
            name: A name makes it persistent: it stays a member when its process dies, messages to
                it wait, and it continues when it joins again, here or elsewhere.
            metadata: Whatever it wants to say of itself: JSON, up to 4 KiB.
            priority: Members with a higher one lead before others: -1,000 to 1,000.
            on_conflict: If a live member has the name: "takeover" replaces it, which is what a
                restart wants; "fail", or "wait" until it is free.
            timeout: Seconds to wait then; None for as long as it takes.

        The callbacks for it are called when it has joined, and others have to wait for that.

        Raises:
            MemberTaken: A live member has the name, or a member without a name has that id.
            PeerError: The group has as many members as it can.
            TimeoutError: It was not free in time.
            ValueError, TypeError: A name or a setting that is not valid.
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
                raise TimeoutError(f"The name {name!r} was not free within {timeout:g} seconds.")
            time.sleep(_WAIT_S)
            handle.check_open()

    def _taken(self, name: str | None, on_conflict: str) -> MemberTaken:
        if on_conflict == "takeover":
            why = "That is the id of a member that joined without a name; choose another."
        else:
            why = 'Choose another, or take it over with on_conflict="takeover".'
        text = f"A live member of group {self.name!r} has the name {name!r}. {why}"
        return MemberTaken(text, group=self.name)

    def remove(self, member: str) -> bool:
        """Remove a member, wherever it joined; it will not join again by itself.

        Returns:
            Whether there was such a member.
        """
        self._handle.check_open()
        return bool(self._handle.protocol.run(PEERS_LEAVE, [member, "", ""])[1])

    # -- messages and votes ------------------------------------------------------------------------

    def member(self, member: str) -> Target:
        """One member, alive or (if it has a name) dead: then the message waits."""
        return self._targets.member(member)

    @property
    def any(self) -> Target:
        """A random member that is alive; if that one leaves before it is done, another."""
        return self._targets.any

    @property
    def all(self) -> Everybody:
        """All members that are alive."""
        return self._targets.all

    @property
    def leader_proxy(self) -> Target:
        """The member that leads when the message is stored."""
        return self._targets.leader

    def propose(
        self,
        topic: Any,
        *,
        kind: Kind | int = "majority",
        timeout: float = 5.0,
        require_leader: bool = False,
    ) -> Future[Outcome]:
        """Ask all members that are alive now to vote (``@me.on_vote``).

        The server decides as soon as the outcome is certain, even if the proposer dies: others
        learn of it by ``on_decision``. A member that abstains, does not vote in time, or leaves
        before it has voted, has not said yes.

        >>> group.propose({"limit": 7}, kind="consensus").result().passed  # doctest: +SKIP

        Args:
            topic: What it is about, for the codec of the group: up to 64 KiB.
            kind: How many must say yes: a "majority" of those asked, all of them ("consensus"),
                or a number of them.
            timeout: Seconds to vote in.
            require_leader: Whether there must be a leader.

        Returns:
            A future that ends, with an outcome, at the latest a moment after the time is over; with
            a ``PeerError`` if it cannot be known, as the server is away or has lost the vote.

        Raises:
            NoLeader: There must be a leader, and is none.
            PeerError: No member is alive to vote, or a hundred votes are open.
            MembershipLost: The proposer is not a member any more.
            ConnectionFailed: The server was away for ``timeout``.
            ValueError, TypeError: A setting that is not valid.
        """
        self._handle.check_open()
        return self._proposer.propose(topic, kind, timeout, require_leader)

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

        Each member that was asked, and has a handler for it (``@me.on_action``), runs it then,
        however it voted. Members vote by their ``on_vote``, or else yes if they have that handler.

        >>> group.propose_action("open", {"relay": 3}, at=group.now() + 2)  # doctest: +SKIP

        Args:
            name: Of the action: 1 to 128 of A-Z a-z 0-9 . _ -
            params: As a topic.
            at: When, in seconds by ``group.now()``; whole milliseconds count.
            kind, timeout, require_leader: As of ``propose``. The vote ends 0.2 s before ``at`` at
                the latest, so the decision surprises no member.
            max_error: Seconds that the clocks may be wrong by: a member that knows the time less
                well says no.

        Raises:
            ActionRefused: It is too late to vote on that, or the same action is pending already.
            ClockTooUncertain: This process knows the time less well than ``max_error``.
            And what ``propose`` raises.
        """
        self._handle.check_open()
        return self._proposer.propose_action(
            name, params, at, kind, timeout, max_error, require_leader
        )

    # -- events ------------------------------------------------------------------------------------

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
        check_function("on_elected", function)
        with self._handle.lock:
            leader = self.leader
            if leader is not None:
                self._handle.listeners.thread.call(function, leader, self.term)
            return self._listen("elected", function)

    def on_resigned(self, function: _F) -> _F:
        """Call a function with the id, term, and reason of each leader that leads no more."""
        return self._listen("resigned", function)

    def on_decision(self, function: _F) -> _F:
        """Call a function with the ``Outcome`` of each vote, whichever member proposed it."""
        self._handle.polls.use()
        return self._listen("decision", function)

    def on_event(self, function: _F) -> _F:
        """Call a function with each ``Event``."""
        return self._listen("event", function)

    def on_reset(self, function: _F) -> _F:
        """Call a function, without arguments, when the whole group has to be looked at again.

        The server has lost what was known of the group: the changes are told after it, and members
        that joined here join again. Or callbacks took so long that 10,000 calls waited, and further
        ones were left out.
        """
        return self._listen("reset", function)

    def _listen(self, what: str, function: _F) -> _F:
        with self._handle.lock:
            return self._handle.listeners.add(what, function)

    def watch(self, timeout: float | None = None, *, since: int | None = None) -> Iterator[Event]:
        """Iterate over the events from now on; ends when none arrives for ``timeout`` seconds, or
        when the group is closed.

        All processes see the same events in the same order, their ``view`` rising by one.

        Args:
            timeout: Seconds; None waits for as long as it takes.
            since: Begin after the event of that number, as ``snapshot()`` or ``view`` told it.

        Raises:
            PeerError: The server does not have all events since then any more: it keeps 10,000.
        """
        handle = self._handle
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        if since is not None and check_int("since", since, 0, _VIEW_MAX) > self.view:
            handle.catch_up()  # another process may have learned of it first
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
                f"Group {self.name!r} has no longer all events since number {since}; take another "
                "snapshot.",
                group=self.name,
            )
        return found

    # -- the end -----------------------------------------------------------------------------------

    def delete(self, *, force: bool = False) -> None:
        """Delete the group, with its members, their messages, and guarded values; and close this.

        Live members that joined elsewhere join again, and so start it again.

        Args:
            force: Delete it even if there are live members.

        Raises:
            PeerGroupActive: There are.
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
            alive = handle.protocol.delete(force=force)  # some may have joined since
        if alive:
            raise PeerGroupActive(
                f"Group {self.name!r} has {alive} members that are alive; have them leave, or "
                "delete it with force=True.",
                group=self.name,
                alive=alive,
            )
        self.close()

    def close(self) -> None:
        """Leave with all members that joined here (named ones may come back), and look on no more.

        Waits for handlers and leader tasks, up to 10 seconds. If that is interrupted, closing
        again, or the end of the process, continues it.
        """
        self._handle.close()

    @property
    def closed(self) -> bool:
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
    """Open a group, and create it if it does not exist. Raises as ``Client.peer_group``."""
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
            f"{asked[setting]!r}; leave the setting out.",
            group=name,
        )
    return PeerGroup(GroupHandle(connector, name, present, codec))
