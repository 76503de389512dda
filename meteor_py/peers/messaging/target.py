"""Targets: the receivers of a message. The verbs ``tell``, ``send`` and ``ask`` differ in the
result that the sender awaits."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from meteor_py.peers.messaging.replies import Replies
from meteor_py.peers.messaging.requests import Request, Requests, To, Verb
from meteor_py.records.config import check_int, check_seconds
from meteor_py.redis import keys

if TYPE_CHECKING:
    from meteor_py.peers.member_handle import MemberHandle

#: Default seconds after which a sender stops waiting for a reply.
TIMEOUT_S = 10.0
TIMEOUT_MAX_S = 86_400.0
#: Default message priority: 1 to 256, lower numbers first.
PRIORITY = 128
PRIORITY_MAX = 256


class Target:
    """A receiver of messages: one member, any member, or the leader.

    Get it from a group or a membership. All three verbs store the message, in the order of the
    calls, and return a ``concurrent.futures.Future`` that completes within ``timeout`` seconds. A
    verb may return before the message is stored; the future reports the outcome. One thread
    runs the callbacks on all futures, so callbacks must not block. The future can raise:

    - ``MemberUnknown``: the group has no such member, or no live member;
    - ``NoLeader``: the group has no leader;
    - ``NoHandler``: the receiver does not handle the queue (see ``wait_for_handler``);
    - ``InboxFull``: the receiver has ``max_inbox`` unsettled messages;
    - ``MemberLeft``: the receiver left before it replied;
    - ``HandlerFailed``: the receiver's handler raised an exception or called ``fail()``, the
      message became a dead letter, or the message or its reply could not be decoded;
    - ``MessageExpired``: no reply arrived in time. The message may still be handled;
    - ``MembershipLost``: the sender is no longer a member;
    - ``MessageFailed``: this handle was closed before a reply arrived;
    - ``PeerGroupNotFound`` or ``OutOfMemory``: the server could not store the message.

    An invalid argument, or a body that the codec cannot encode, raises ``ValueError`` or
    ``TypeError`` at once. A handle can have at most 10,000 unfinished messages. Further calls wait
    for room, except in a future's callback, where they fail at once.

    >>> group.member("worker-7").ask("price", "book", timeout=5).result()  # doctest: +SKIP
    """

    def __init__(
        self, requests: Requests, sender: MemberHandle | None, to: To, member: str = ""
    ) -> None:
        self._requests = requests
        self._sender = sender
        self._to = to
        self._member = member

    def tell(
        self,
        queue: str,
        body: Any = None,
        *,
        timeout: float = TIMEOUT_S,
        priority: int = PRIORITY,
        wait_for_handler: bool = True,
    ) -> Future[str]:
        """Store a message; the result is the message id.

        The message stays in the inbox until it is settled or its receiver leaves.

        Args:
            queue: The receiver's queue: 1 to 128 characters of A-Z a-z 0-9 . _ -, not starting with
                a dot.
            body: Any value that the group's codec can encode, up to 1 MiB.
            timeout: Seconds to keep trying to store the message, up to a day.
            priority: 1 to 256. Among waiting messages, lower numbers are delivered first.
            wait_for_handler: If false, the future raises ``NoHandler`` if no receiver handles the
                queue. A member that has not registered any handler may still do so, and a dead
                member may rejoin, so messages to such members wait even then.
        """
        return self._post("tell", queue, body, timeout, priority, wait_for_handler)

    def send(
        self,
        queue: str,
        body: Any = None,
        *,
        timeout: float = TIMEOUT_S,
        priority: int = PRIORITY,
        wait_for_handler: bool = False,
    ) -> Future[None]:
        """Send a message; the result is None, available once the receiver has acknowledged it."""
        return self._post("send", queue, body, timeout, priority, wait_for_handler)

    def ask(
        self,
        queue: str,
        body: Any = None,
        *,
        timeout: float = TIMEOUT_S,
        priority: int = PRIORITY,
        wait_for_handler: bool = False,
    ) -> Future[Any]:
        """Send a request; the result is the reply."""
        return self._post("ask", queue, body, timeout, priority, wait_for_handler)

    def _post(
        self,
        verb: Verb,
        queue: str,
        body: Any,
        timeout: float,
        priority: int,
        wait_for_handler: bool,
        options: str = "",
    ) -> Future[Any]:
        keys.check_name(queue, "queue")
        check_int("priority", priority, 1, PRIORITY_MAX)
        if check_seconds("timeout", timeout) > TIMEOUT_MAX_S:
            raise ValueError(f"timeout must be at most {TIMEOUT_MAX_S:g} seconds, not {timeout}.")
        if not wait_for_handler:
            options += "h"
        request = Request(
            self._sender, verb, self._to, self._member, queue, timeout, priority, options
        )
        return self._requests.post(request, body)

    def __repr__(self) -> str:
        receiver = f"member {self._member!r}" if self._member else self._to
        return f"<Target {receiver} of {self._requests.group.name!r}>"


class Everybody(Target):
    """All members that are alive when a message is stored; members that join later do not get it.

    The message is stored for all of them or for none: if one inbox is full, the future raises
    ``InboxFull``.
    """

    def tell(
        self,
        queue: str,
        body: Any = None,
        *,
        timeout: float = TIMEOUT_S,
        priority: int = PRIORITY,
        wait_for_handler: bool = True,
        include_dead: bool = False,
        include_self: bool = True,
    ) -> Future[str]:
        """Store a message for all members.

        Args:
            include_dead: Also store it for named members that are dead. They receive it if they
                rejoin.
            include_self: If false, the member that sends it does not get it.
        """
        options = _options(include_dead, include_self)
        return self._post("tell", queue, body, timeout, priority, wait_for_handler, options)

    def send(
        self,
        queue: str,
        body: Any = None,
        *,
        timeout: float = TIMEOUT_S,
        priority: int = PRIORITY,
        wait_for_handler: bool = False,
        include_dead: bool = False,
        include_self: bool = True,
    ) -> Future[None]:
        """Send to all members; the future raises ``PartialFailure`` unless all acknowledge."""
        options = _options(include_dead, include_self)
        return self._post("send", queue, body, timeout, priority, wait_for_handler, options)

    def ask(
        self,
        queue: str,
        body: Any = None,
        *,
        timeout: float = TIMEOUT_S,
        priority: int = PRIORITY,
        wait_for_handler: bool = False,
        include_dead: bool = False,
        include_self: bool = True,
    ) -> Future[Replies]:
        """Ask all members; the result contains the replies and the errors by member.

        The result is complete when all members have replied or left, or after ``timeout`` seconds.
        Unless ``wait_for_handler`` is true, a member that does not handle the queue fails at once,
        with ``NoHandler``.
        """
        options = _options(include_dead, include_self)
        return self._post("ask", queue, body, timeout, priority, wait_for_handler, options)


def _options(include_dead: bool, include_self: bool) -> str:
    """Encode the options for a message to all members, as ``peers/send.lua`` expects them."""
    return ("d" if include_dead else "") + ("" if include_self else "s")
