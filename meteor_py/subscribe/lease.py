"""The lease of a group: who may read for it. What is said to the server, and what it answers.

At most one member holds a group's lease. Each holding is a *term*: a number that only rises, and
a nonce that only its owner knows. The two stand in the group's hash until somebody else gets the
lease, and every confirm is compared with them: that fences an owner who does not know yet that he
is none any more. The lease itself is a key that expires, by the server's clock.
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

#: The part of a lease's life during which its owner believes in it: less than the server does.
BELIEF = 0.9
#: What a waiter lets pass when a lease ran out without being given up: a tenth of its life, and
#: no more seconds than this. An owner who was only cut off takes it up again in that time.
PATIENCE_MAX_S = 0.8
#: Events after which the lease of a group may be free.
_FREEING = (b"released", b"sought", b"deleted")
#: Answers that send a confirm round again: more of them than anything but an error can give.
_ROUNDS = 10


def member_name() -> str:
    """A name that tells people who holds a lease: host, process, and something of its own."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


class Term(NamedTuple):
    """One holding of the lease."""

    number: int
    nonce: str
    #: Where it starts, and the end of the stream at that time.
    position: Position
    end: int
    #: Whether the position means "the first there is".
    floating: bool


class Standing(NamedTuple):
    """The lease is not to be had now."""

    #: When to ask again if no event comes before, by ``now()``.
    retry_at: float
    #: The last event seen.
    event: bytes
    owner: str
    #: The term that ran out without being given up, if it is that.
    expired: int | None = None


class Lease:
    """The lease of one group, as one member sees it. For one thread at a time.

    Raises what refuses it; whose it is, is for the caller to remember.
    """

    def __init__(
        self, stream: str, incarnation: str, group: str, member: str, ttl_s: float
    ) -> None:
        self.stream = stream
        self.incarnation = incarnation
        self.group = group
        self.member = member
        self.ttl_s = ttl_s
        #: The next term gets a higher number than this.
        self.above = 0
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
    ) -> Term | Standing:
        """Take the lease if it is free.

        Args:
            nonce: The caller's secret. Asking again with it, after a lost answer, is safe.
            expired: The term whose end was waited out.
        """
        waited_out = "" if expired is None else expired
        answer = self._run_owned(connection, ACQUIRE_LEASE, nonce, waited_out, self.above)
        if answer[0] == b"OK":
            self._renewal = 0
            number, offset, epoch, end, floating = answer[1:]
            position = Position(self.incarnation, epoch, offset)
            return Term(number, nonce, position, end, bool(floating))
        _, left_ms, event, owner = answer[:4]
        if answer[0] == b"HELD":
            # A key without an expiry is none of ours; ask again after the usual time.
            wait_s = left_ms / 1000 + 0.002 if left_ms >= 0 else self.ttl_s
            return Standing(now() + wait_s, event, owner.decode())
        patience = min(self.ttl_s / 10, PATIENCE_MAX_S) * random.uniform(0.9, 1)
        return Standing(now() + patience, event, owner.decode(), answer[4])

    def touch(self, connection: Connection, term: Term) -> None:
        """Renew the lease; take it up again if it ran out and nobody else has taken it.

        Raises:
            LeaseLost: Somebody has.
        """
        self._renewal += 1
        answer = self._run_owned(connection, RENEW_LEASE, term.nonce, term.number, self._renewal)
        if answer[0] == b"FENCED":
            raise reply_errors.lease_lost(self.stream, self.group, answer[1])

    def release(self, connection: Connection, nonce: str) -> None:
        """Give it up."""
        connection.retry_idle(lambda: self._let_go(connection, nonce))

    def lapse(self, connection: Connection, term: Term) -> None:
        """Give it up so that ``touch`` gets it back, if nobody wanted it."""
        self._let_go(connection, term.nonce, f"{self.member} {term.number} {self._renewal}")

    def _let_go(self, connection: Connection, nonce: str, lapsing: str = "") -> None:
        script_keys = [self._group, self._lease, self._events]
        connection.run(RELEASE_LEASE, script_keys, [self.group, self.member, nonce, lapsing])

    def confirm(self, connection: Connection, term: Term, epoch: int, offset: int) -> int:
        """Confirm all below ``offset``, which was read in ``epoch`` of the stream.

        Returns:
            What is confirmed now.

        Raises:
            LeaseLost: Another term has begun.
            LogTruncated: The server has lost some of these records.
        """
        for _ in range(_ROUNDS):
            args = [self.incarnation, connection.history, term.nonce, term.number, epoch, offset]
            answer = self._run(connection, CONFIRM_OFFSET, [self._meta, self._group], args)
            code = answer[0]
            if code == b"OK":
                return int(answer[1])
            if code == b"FENCED":
                raise reply_errors.lease_lost(self.stream, self.group, answer[1])
            if code == b"HISTORY":
                begin_epoch(connection, self.stream, self.incarnation, answer[1].decode())
            elif code == b"BEYOND":
                raise self._truncated(answer[1], offset)
            else:  # EPOCH
                position = Position(self.incarnation, epoch, offset)
                first = diverged_at(position, answer[2].decode(), answer[3])
                if first is not None:
                    raise self._truncated(first, offset)
                epoch = answer[1]
        raise MeteorError(f"The history of stream {self.stream!r} changes without end.")

    def watch(self, connection: Connection, after: bytes, timeout_s: float) -> tuple[bytes, bool]:
        """Wait for events of the stream; tell the last one, and whether the lease may be free."""
        block = ("BLOCK", max(int(timeout_s * 1000), 1)) if timeout_s > 0 else ()
        answer = connection.call(
            *("XREAD", "COUNT", 1000, *block, "STREAMS", self._events, after),
            timeout_s=timeout_s + connection.timeout_s,
        )
        if not answer:
            return after, False
        entries = answer[0][1]
        group = self.group.encode()
        freed = any(fields[1] in _FREEING and fields[3] == group for _, fields in entries if fields)
        return entries[-1][0], freed

    def _run_owned(
        self, connection: Connection, script: Script, nonce: str, term: int | str, *more: int
    ) -> Any:
        """Run ACQUIRE or TOUCH, which take the same, or nearly."""
        script_keys = [self._meta, self._group, self._lease, self._events]
        args = [self.incarnation, self.group, self.member, nonce, self._ttl_ms, term, *more]
        return self._run(connection, script, script_keys, args)

    def _run(
        self, connection: Connection, script: Script, script_keys: list[str], args: list[Any]
    ) -> Any:
        answer = connection.run(script, script_keys, args)
        if answer[0] in (b"NOSTREAM", b"INCARNATION"):
            raise reply_errors.stream_gone(self.stream, answer[0])
        if answer[0] == b"NOGROUP":
            raise reply_errors.group_not_found(self.stream, self.group)
        return answer

    def _truncated(self, first: int, offset: int) -> LogTruncated:
        return reply_errors.log_truncated(self.stream, first, offset - 1)
