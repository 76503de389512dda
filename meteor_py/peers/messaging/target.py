"""Targets: the receivers of a message, and the verbs that say what the sender waits for."""

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
#: The priority of a message: 1 to 256, lower ones first.
PRIORITY = 128
PRIORITY_MAX = 256


class Target:
    """One member, any member, or the leader. Get it from a group or from a membership.

    All three verbs return when the message is stored, in the order of the calls, and give a
    ``concurrent.futures.Future``. Its callbacks are called in the one thread that takes in all
    replies: they must not wait. It ends after ``timeout`` seconds, whatever happens, and raises:

    - ``MemberUnknown``: there is no such member, or none at all;  ``NoLeader``;
    - ``InboxFull``: it has ``max_inbox`` messages already;
    - ``MemberLeft``: it left before it had replied;  ``HandlerFailed``: its handler raised;
    - ``MessageExpired``: no reply arrived in time. It may still be handled, or have been.
    - ``MembershipLost``: the sender is not a member any more.

    An argument that is not valid raises ``ValueError`` or ``TypeError`` at once; so does a body
    that the codec cannot write. In a callback of another reply, a message does not wait for room
    among the 10,000 that a handle may have open: it fails at once.
    """

    def __init__(
        self, requests: Requests, sender: MemberHandle | None, to: To, member: str = ""
    ) -> None:
        self._requests = requests
        self._sender = sender
        self._to = to
        self._member = member

    def tell(
        self, queue: str, body: Any = None, *, timeout: float = TIMEOUT_S, priority: int = PRIORITY
    ) -> Future[str]:
        """Leave a message: done when it is stored; the result is its id.

        It stays in the inbox until it is handled, for as long as there is that member.

        Args:
            queue: Which of the receiver's handlers it is for: 1 to 128 of A-Z a-z 0-9 . _ -
            body: Whatever the codec of the group can write.
            timeout: Seconds to try to store it for.
            priority: 1 to 256: of those that wait, lower ones come first.
        """
        return self._post("tell", queue, body, timeout, priority)

    def send(
        self, queue: str, body: Any = None, *, timeout: float = TIMEOUT_S, priority: int = PRIORITY
    ) -> Future[None]:
        """Send a message: done when it was handled, and acknowledged."""
        return self._post("send", queue, body, timeout, priority)

    def ask(
        self, queue: str, body: Any = None, *, timeout: float = TIMEOUT_S, priority: int = PRIORITY
    ) -> Future[Any]:
        """Ask: the result is the reply."""
        return self._post("ask", queue, body, timeout, priority)

    def _post(
        self,
        verb: Verb,
        queue: str,
        body: Any,
        timeout: float,
        priority: int,
        include_dead: bool = False,
    ) -> Future[Any]:
        keys.check_name(queue, "queue")
        check_int("priority", priority, 1, PRIORITY_MAX)
        if check_seconds("timeout", timeout) > TIMEOUT_MAX_S:
            raise ValueError(f"timeout must be at most {TIMEOUT_MAX_S:g} seconds, not {timeout}.")
        request = Request(
            *(self._sender, verb, self._to, self._member, queue),
            *(timeout, priority, include_dead),
        )
        return self._requests.post(request, body)

    def __repr__(self) -> str:
        whom = f"member {self._member!r}" if self._member else self._to
        return f"<Target {whom} of {self._requests.group.name!r}>"


class Everybody(Target):
    """All members that are alive when the message is stored; members that join later do not get it.

    Either all get it or none does: ``InboxFull`` if one of them has too many.
    """

    def tell(
        self,
        queue: str,
        body: Any = None,
        *,
        timeout: float = TIMEOUT_S,
        priority: int = PRIORITY,
        include_dead: bool = False,
    ) -> Future[str]:
        """Leave a message for all: done when it is stored.

        Args:
            include_dead: Also for named members that are dead: it waits for them.
        """
        return self._post("tell", queue, body, timeout, priority, include_dead)

    def send(
        self,
        queue: str,
        body: Any = None,
        *,
        timeout: float = TIMEOUT_S,
        priority: int = PRIORITY,
        include_dead: bool = False,
    ) -> Future[None]:
        """Send to all: done when all have acknowledged it, else ``PartialFailure``, with both."""
        return self._post("send", queue, body, timeout, priority, include_dead)

    def ask(
        self,
        queue: str,
        body: Any = None,
        *,
        timeout: float = TIMEOUT_S,
        priority: int = PRIORITY,
        include_dead: bool = False,
    ) -> Future[Replies]:
        """Ask all: the result has the replies, and the errors, by member.

        It is there when all have replied or left, or after ``timeout`` seconds.
        """
        return self._post("ask", queue, body, timeout, priority, include_dead)


class Targets:
    """The targets of a group handle, or of a member, whose id the receiver then sees."""

    def __init__(self, requests: Requests, sender: MemberHandle | None = None) -> None:
        self._requests = requests
        self._sender = sender

    def member(self, member: str) -> Target:
        if not isinstance(member, str):
            raise TypeError(f"The id of a member is a str, not {type(member).__name__}.")
        return Target(self._requests, self._sender, "member", keys.check_name(member, "member"))

    @property
    def any(self) -> Target:
        return Target(self._requests, self._sender, "any")

    @property
    def all(self) -> Everybody:
        return Everybody(self._requests, self._sender, "all")

    @property
    def leader(self) -> Target:
        return Target(self._requests, self._sender, "leader")
