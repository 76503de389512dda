"""Atomix's DistributedGroup API on top of peer groups. See docs/peer-group-words.md.

These classes only translate: a ``Delivery`` selects the target of a message, and an ``Execution``
selects the method that sends it (``send``, ``tell`` or ``ask``).

>>> group = DistributedGroup(m.peer_group("workers"))               # doctest: +SKIP
>>> local = group.join("worker-7")                             # doctest: +SKIP
>>> local.messaging().consumer("bar").on_message(lambda message: message.ack())  # doctest: +SKIP
>>> group.member("worker-7").messaging().producer("bar").send("baz").result()    # doctest: +SKIP
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meteor_py.peers.codec import PeerCodec
from meteor_py.peers.member import Member, Status
from meteor_py.peers.messaging.message import Message
from meteor_py.peers.messaging.target import PRIORITY, TIMEOUT_S, Target

if TYPE_CHECKING:
    from meteor_py.peers.group import PeerGroup
    from meteor_py.peers.membership import Membership


class Execution(enum.Enum):
    """The event that completes a message's future."""

    #: The message is acknowledged, as with ``send``.
    SYNC = "send"
    #: The message is stored, as with ``tell``.
    ASYNC = "tell"
    #: The reply arrives, as with ``ask``.
    REQUEST_REPLY = "ask"


class Delivery(enum.Enum):
    """The members that receive a message sent to the group."""

    #: A random live member, as with ``any``. If it leaves before it settles the message, another
    #: member gets the message.
    RANDOM = "any"
    #: All live members, as with ``all``.
    BROADCAST = "all"


class Producer:
    """Sends messages to one queue, all with the same delivery and execution."""

    def __init__(
        self, target: Target, queue: str, execution: Execution, include_dead: bool = False
    ) -> None:
        self._target = target
        self._queue = queue
        self._execution = execution
        self._options = {"include_dead": True} if include_dead else {}

    def send(
        self, value: Any = None, *, timeout: float = TIMEOUT_S, priority: int = PRIORITY
    ) -> Future[Any]:
        """Send a message, and return the future from ``tell``, ``send`` or ``ask``."""
        verb: Callable[..., Future[Any]] = getattr(self._target, self._execution.value)
        return verb(self._queue, value, timeout=timeout, priority=priority, **self._options)


class Consumer:
    """Receives messages from one queue. Settle each with ``ack``, ``reply`` or ``fail``."""

    def __init__(self, membership: Membership, queue: str) -> None:
        self._membership = membership
        self._queue = queue
        self._callback: Callable[[Message], object] | None = None

    def on_message(self, callback: Callable[[Message], object]) -> None:
        """Call a function with each message. It replaces the function registered before, if any."""
        first, self._callback = self._callback is None, callback
        if first:
            self._membership.on(self._queue, ack="manual")(self._call)

    def _call(self, message: Message) -> None:
        assert self._callback is not None, "a message arrived before on_message() was called"
        self._callback(message)


class Messaging:
    """Producers and consumers for a group, a member, or a local member."""

    def __init__(
        self,
        sender: PeerGroup | Membership | None = None,
        target: Target | None = None,
        membership: Membership | None = None,
    ) -> None:
        self._sender = sender
        self._target = target
        self._membership = membership

    def producer(
        self,
        queue: str,
        *,
        execution: Execution | None = None,
        delivery: Delivery | None = None,
        include_dead: bool = False,
    ) -> Producer:
        """Return a producer.

        By default, a producer for one member uses ``Execution.REQUEST_REPLY``. A producer for the
        group uses ``Execution.SYNC`` and ``Delivery.BROADCAST``.

        Args:
            include_dead: Whether a broadcast also goes to named members that are dead, as in
                Atomix.

        Raises:
            ValueError: ``delivery`` was passed for one member, or ``include_dead`` was passed for
                one member or with ``Delivery.RANDOM``.
        """
        if include_dead and (self._target is not None or delivery is Delivery.RANDOM):
            raise ValueError("Only a broadcast can include dead members. Omit include_dead.")
        if self._target is not None:
            if delivery is not None:
                raise ValueError("A producer for one member cannot have a delivery. Omit delivery.")
            return Producer(self._target, queue, execution or Execution.REQUEST_REPLY)
        assert self._sender is not None, "there is neither a target nor a sender"
        if delivery is Delivery.RANDOM:
            return Producer(self._sender.any, queue, execution or Execution.SYNC)
        return Producer(self._sender.all, queue, execution or Execution.SYNC, include_dead)

    def consumer(self, queue: str) -> Consumer:
        """Return a consumer for one of a local member's queues.

        Raises:
            ValueError: This object does not belong to a ``LocalMember``.
        """
        if self._membership is None:
            raise ValueError(
                "Only the process in which a member joined can receive that member's messages. "
                "Get the consumer from the LocalMember there."
            )
        return Consumer(self._membership, queue)


class GroupMember:
    """A member that joined in any process."""

    def __init__(self, group: PeerGroup, member: Member) -> None:
        self._group = group
        self._member = member

    def id(self) -> str:
        return self._member.id

    def metadata(self) -> Any:
        return self._member.metadata

    def status(self) -> Status:
        found = self._group.find(self._member.id)
        return Status.DEAD if found is None else found.status

    def messaging(self) -> Messaging:
        return Messaging(target=self._group.member(self._member.id))


class LocalMember:
    """A member that joined in this process."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def id(self) -> str:
        return self._membership.id

    def messaging(self) -> Messaging:
        """Return a ``Messaging`` that consumes this member's queues, and whose producers send to
        the group as this member."""
        return Messaging(sender=self._membership, membership=self._membership)

    def leave(self) -> None:
        self._membership.leave()


@dataclass(frozen=True)
class GroupTerm:
    """A term number and the leader in that term."""

    _number: int
    _leader: GroupMember | None

    def term(self) -> int:
        return self._number

    def leader(self) -> GroupMember | None:
        return self._leader


class GroupElection:
    """Leader election for a group."""

    def __init__(self, group: PeerGroup) -> None:
        self._group = group

    def term(self) -> GroupTerm:
        leader = self._group.leader
        found = None if leader is None else GroupMember(self._group, leader)
        return GroupTerm(self._group.term, found)

    def on_election(self, callback: Callable[[GroupTerm], object]) -> None:
        """Call a function with each new term, and with the current term if there is a leader."""

        def elected(leader: Member, number: int) -> None:
            callback(GroupTerm(number, GroupMember(self._group, leader)))

        self._group.on_elected(elected)


class DistributedGroup:
    """A peer group with Atomix's API."""

    def __init__(self, group: PeerGroup) -> None:
        #: The underlying peer group.
        self.group = group

    def join(self, member: str | None = None, metadata: Any = None) -> LocalMember:
        """Join the group. If you pass an id (``member``), the member is persistent."""
        return LocalMember(self.group.join(member, metadata=metadata))

    def remove(self, member: str) -> bool:
        return self.group.remove(member)

    def members(self) -> list[GroupMember]:
        return [GroupMember(self.group, member) for member in self.group.members]

    def member(self, member: str) -> GroupMember | None:
        found = self.group.find(member)
        return None if found is None else GroupMember(self.group, found)

    def on_join(self, callback: Callable[[GroupMember], object]) -> None:
        self.group.on_join(lambda member: callback(GroupMember(self.group, member)))

    def on_leave(self, callback: Callable[[GroupMember], object]) -> None:
        self.group.on_leave(lambda member, reason: callback(GroupMember(self.group, member)))

    def election(self) -> GroupElection:
        return GroupElection(self.group)

    def messaging(self) -> Messaging:
        return Messaging(sender=self.group)

    def serializer(self) -> PeerCodec:
        """Return the codec. Call its ``register`` method to register types."""
        return self.group._handle.requests.codec

    def close(self) -> None:
        self.group.close()
