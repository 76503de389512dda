"""Aliases: a group in the words of Atomix's DistributedGroup. What they mean here is in docs.

Nothing is done here but to translate: delivery and execution are a target and a verb.

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
    """When a message is done."""

    #: When it is acknowledged: ``send``.
    SYNC = "send"
    #: When it is stored: ``tell``.
    ASYNC = "tell"
    #: When it is answered: ``ask``.
    REQUEST_REPLY = "ask"


class Delivery(enum.Enum):
    """Who gets a message to the group."""

    #: A random member, and another if that one leaves: ``any``.
    RANDOM = "any"
    #: All that are alive: ``all``.
    BROADCAST = "all"


class Producer:
    """Sends messages to one queue, always in the same way."""

    def __init__(self, target: Target, queue: str, execution: Execution) -> None:
        self._target = target
        self._queue = queue
        self._execution = execution

    def send(
        self, value: Any = None, *, timeout: float = TIMEOUT_S, priority: int = PRIORITY
    ) -> Future[Any]:
        """Send one; what comes of it is what ``tell``, ``send`` or ``ask`` give."""
        verb: Callable[..., Future[Any]] = getattr(self._target, self._execution.value)
        return verb(self._queue, value, timeout=timeout, priority=priority)


class Consumer:
    """Gets the messages of one queue; each must be settled by ``ack``, ``reply`` or ``fail``."""

    def __init__(self, membership: Membership, queue: str) -> None:
        self._membership = membership
        self._queue = queue
        self._callback: Callable[[Message], object] | None = None

    def on_message(self, callback: Callable[[Message], object]) -> None:
        """Call a function with each message, in place of the one before."""
        first, self._callback = self._callback is None, callback
        if first:
            self._membership.on(self._queue, ack="manual")(self._call)

    def _call(self, message: Message) -> None:
        assert self._callback is not None, "it was given before"
        self._callback(message)


class Messaging:
    """The messages of a group, of a member, or of one that joined here."""

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
    ) -> Producer:
        """Who sends to a queue: to a member, by default with an answer; to a group, to all."""
        if self._target is not None:
            if delivery is not None:
                raise ValueError("A message to one member has no delivery; leave it out.")
            return Producer(self._target, queue, execution or Execution.REQUEST_REPLY)
        assert self._sender is not None, "it is of a group"
        which = delivery or Delivery.BROADCAST
        target = self._sender.any if which is Delivery.RANDOM else self._sender.all
        return Producer(target, queue, execution or Execution.SYNC)

    def consumer(self, queue: str) -> Consumer:
        """Who gets what is sent to a queue of a member that joined here."""
        if self._membership is None:
            raise ValueError("Only the process in which a member joined gets its messages.")
        return Consumer(self._membership, queue)


class GroupMember:
    """A member, wherever it joined."""

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
    """A member that joined here."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def id(self) -> str:
        return self._membership.id

    def messaging(self) -> Messaging:
        """Its own queues, and producers to the group whose messages name it as the sender."""
        return Messaging(sender=self._membership, membership=self._membership)

    def leave(self) -> None:
        self._membership.leave()


@dataclass(frozen=True)
class GroupTerm:
    """Who leads, and the number of the term."""

    _number: int
    _leader: GroupMember | None

    def term(self) -> int:
        return self._number

    def leader(self) -> GroupMember | None:
        return self._leader


class GroupElection:
    """Who leads a group."""

    def __init__(self, group: PeerGroup) -> None:
        self._group = group

    def term(self) -> GroupTerm:
        leader = self._group.leader
        found = None if leader is None else GroupMember(self._group, leader)
        return GroupTerm(self._group.term, found)

    def on_election(self, callback: Callable[[GroupTerm], object]) -> None:
        """Call a function with each term that begins; at once if there is a leader."""

        def elected(leader: Member, number: int) -> None:
            callback(GroupTerm(number, GroupMember(self._group, leader)))

        self._group.on_elected(elected)


class DistributedGroup:
    """A group, in Atomix's words."""

    def __init__(self, group: PeerGroup) -> None:
        #: The same in ours.
        self.group = group

    def join(self, member: str | None = None, metadata: Any = None) -> LocalMember:
        """Become a member; with an id, a persistent one."""
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
        """Where types get their numbers: ``register(User, id=1)``."""
        return self.group._handle.requests.codec

    def close(self) -> None:
        self.group.close()
