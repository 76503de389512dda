"""The lease of a group, which decides the member that reads for it: the calls to the server.

At most one member holds a group's lease. Each holding is a *term*: a number that only rises, and
a nonce that only its owner knows. The group's hash keeps the two until another member gets the
lease, and the server compares every confirm with them. That fences an owner that does not know yet
that it has lost the lease. The lease itself is a key that expires, by the server's clock.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from meteor_py.errors import LogTruncated, MeteorError
from meteor_py.log.epochs import begin_epoch
from meteor_py.records.position import Position, diverged_at
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.scripts import (
    ACQUIRE_LEASE,
    CONFIRM_OFFSET,
    RELEASE_LEASE,
    RENEW_LEASE,
    Script,
)
from meteor_py.runtime.clock import now

if TYPE_CHECKING:
    from meteor_py.redis.connection import Connection

#: The part of a lease's TTL during which its owner trusts it: less than the server does.
BELIEF = 0.9
#: After a lease has expired, a waiting member leaves it alone for a tenth of its TTL, and no more
#: seconds than this. An owner that was only cut off reclaims it in that time.
_GRACE_MAX_S = 0.8
#: Events after which the lease of a group may be free.
_FREEING = (b"released", b"sought", b"deleted")
#: Rounds of a confirm whose reply asks for another: more than anything but an error can cause.
_ROUNDS = 10


def member_name() -> str:
    """Return a name for the owner of a lease: host, process, and a random suffix."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


class Term(NamedTuple):
    """One holding of the lease."""

    number: int
    nonce: str
    #: Where it starts, and the end of the stream at that time.
    start: Position
    end_offset: int
    #: Whether the start means "the first record there is".
    floating: bool


class LeaseUnavailable(NamedTuple):
    """Another member has the lease, or had it until it expired a moment ago."""

    #: When to ask again if no event comes before, by ``now()``.
    retry_at: float
    #: The ID of the last event seen.
    event: bytes
    owner: str
    #: The term that expired without being given up, if it did.
    expired: int | None = None


class Lease:
    """The lease of one group, as one member sees it. For one thread at a time.

    It does not remember its owner; that is the caller's part.

    Args:
        above: The next term gets a higher number than this.
    """

    def __init__(
        self,
        stream: str,
        incarnation: str,
        group: str,
        member: str,
        ttl_s: float,
        above: int = 0,
    ) -> None:
        self.stream = stream
        self.incarnation = incarnation
        self.group = group
        self.member = member
        self.ttl_s = ttl_s
        self._above = above
        self._ttl_ms = max(int(ttl_s * 1000), 1)
        self._renewal = 0  # its number in the lease: a lapse that arrives late finds another
        self._meta = keys.meta(stream)
        self._group = keys.group(stream, group)
        self._lease = keys.lease(stream, group)
        self._events = keys.events(stream)

    def __str__(self) -> str:
        return f"group {self.group!r} of stream {self.stream!r}"

    def acquire(
        self, connection: Connection, nonce: str, expired: int | None = None
    ) -> Term | LeaseUnavailable:
        """Take the lease if it is free.

        Args:
            nonce: The caller's secret. Asking again with it, after a lost reply, is safe.
            expired: The expired term whose grace period the caller has waited out.
        """
        waited_out = "" if expired is None else expired
        reply = self._run_owned(connection, ACQUIRE_LEASE, nonce, waited_out, self._above)
        if reply[0] == b"OK":
            self._renewal = 0
            number, offset, epoch, end, floating = reply[1:]
            position = Position(self.incarnation, epoch, offset)
            return Term(number, nonce, position, end, bool(floating))
        _, left_ms, event, owner = reply[:4]
        if reply[0] == b"HELD":
            # A key without an expiry is none of ours; ask again after the usual time.
            wait_s = left_ms / 1000 + 0.002 if left_ms >= 0 else self.ttl_s
            return LeaseUnavailable(now() + wait_s, event, owner.decode())
        grace_s = min(self.ttl_s / 10, _GRACE_MAX_S) * random.uniform(0.9, 1)
        return LeaseUnavailable(now() + grace_s, event, owner.decode(), reply[4])

    def renew(self, connection: Connection, term: Term) -> None:
        """Renew the lease; reclaim it if it has expired and no other member has taken it.

        Raises:
            LeaseLost: Another member has taken it.
        """
        self._renewal += 1
        reply = self._run_owned(connection, RENEW_LEASE, term.nonce, term.number, self._renewal)
        if reply[0] == b"FENCED":
            raise reply_errors.lease_lost(self.stream, self.group, reply[1])

    def release(self, connection: Connection, nonce: str) -> None:
        """Give it up."""
        connection.retry_idle(self._let_go, connection, nonce)

    def lapse(self, connection: Connection, term: Term) -> None:
        """Give it up so that ``renew`` gets it back, unless another member takes it."""
        self._let_go(connection, term.nonce, f"{self.member} {term.number} {self._renewal}")

    def _let_go(self, connection: Connection, nonce: str, lapsing: str = "") -> None:
        script_keys = [self._group, self._lease, self._events]
        connection.run(RELEASE_LEASE, script_keys, [self.group, self.member, nonce, lapsing])

    def confirm(self, connection: Connection, term: Term, epoch: int, offset: int) -> int:
        """Confirm all below ``offset``, which was read in ``epoch`` of the stream.

        Returns:
            The confirmed offset now.

        Raises:
            LeaseLost: Another term has begun.
            LogTruncated: The server has lost some of these records.
        """
        for _ in range(_ROUNDS):
            args = [self.incarnation, connection.history, term.nonce, term.number, epoch, offset]
            reply = self._run(connection, CONFIRM_OFFSET, [self._meta, self._group], args)
            code = reply[0]
            if code == b"OK":
                return int(reply[1])
            if code == b"FENCED":
                raise reply_errors.lease_lost(self.stream, self.group, reply[1])
            if code == b"HISTORY":
                begin_epoch(connection, self.stream, self.incarnation, reply[1].decode())
            elif code == b"BEYOND":
                raise self._truncated(reply[1], offset)
            else:  # EPOCH
                position = Position(self.incarnation, epoch, offset)
                first = diverged_at(position, reply[2].decode(), reply[3])
                if first is not None:
                    raise self._truncated(first, offset)
                epoch = reply[1]
        raise MeteorError(f"The history of stream {self.stream!r} changes without end.")

    def wait_event(
        self, connection: Connection, after: bytes, timeout_s: float
    ) -> tuple[bytes, bool]:
        """Wait for events of the stream; return the last, and whether the lease may be free."""
        block = ("BLOCK", max(int(timeout_s * 1000), 1)) if timeout_s > 0 else ()
        reply = connection.call(
            *("XREAD", "COUNT", 1000, *block, "STREAMS", self._events, after),
            timeout_s=timeout_s + connection.timeout_s,
        )
        if not reply:
            return after, False
        entries = reply[0][1]
        group = self.group.encode()
        freed = any(fields[1] in _FREEING and fields[3] == group for _, fields in entries if fields)
        return entries[-1][0], freed

    def _run_owned(
        self, connection: Connection, script: Script, nonce: str, term: int | str, *more: int
    ) -> Any:
        """Run ACQUIRE_LEASE or RENEW_LEASE, which take nearly the same arguments."""
        script_keys = [self._meta, self._group, self._lease, self._events]
        args = [self.incarnation, self.group, self.member, nonce, self._ttl_ms, term, *more]
        return self._run(connection, script, script_keys, args)

    def _run(
        self, connection: Connection, script: Script, script_keys: list[str], args: list[Any]
    ) -> Any:
        reply = connection.run(script, script_keys, args)
        if reply[0] in (b"NOSTREAM", b"INCARNATION"):
            raise reply_errors.stream_gone(self.stream, reply[0])
        if reply[0] == b"NOGROUP":
            raise reply_errors.group_not_found(self.stream, self.group)
        return reply

    def _truncated(self, first: int, offset: int) -> LogTruncated:
        return reply_errors.log_truncated(self.stream, first, offset - 1)
