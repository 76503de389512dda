"""Script calls for a group's lease. The member that holds the lease reads for the group.

At most one member holds a group's lease. Acquiring it starts a *term*: a number that only increases
and a nonce that only its owner knows. The group's hash keeps both, even after the lease has
expired, until the owner releases the lease or another member acquires it. The server compares every
confirm with them. This fences off an owner that has not noticed yet that it lost the lease. The
lease itself is a key that expires by the server's clock.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from meteor_py.errors import LogTruncated, MeteorError
from meteor_py.log.epochs import begin_epoch
from meteor_py.records.position import Position, diverged_at, path_of
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import Connection
from meteor_py.redis.scripts import (
    ACQUIRE_LEASE,
    CONFIRM_OFFSET,
    RELEASE_LEASE,
    RENEW_LEASE,
    Script,
)
from meteor_py.runtime.clock import now

#: The fraction of a lease's TTL for which its owner trusts it. Below 1, so that the owner stops
#: before the server gives the lease to another member.
TRUSTED_FRACTION = 0.9
#: After a lease has expired, competitors wait a tenth of its TTL, at most this many seconds, so
#: that an owner with a brief network problem can reclaim it.
_GRACE_MAX_S = 0.8
#: Events after which a group's lease may be free.
_FREEING = (b"released", b"sought", b"deleted")
#: Maximum number of requests for one confirm. The epoch may change before each request.
_ROUNDS = 10


def member_name() -> str:
    """Return a new name for a member: host, process, and a random suffix."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


class Term(NamedTuple):
    """One term of the lease, from acquisition to loss or release."""

    number: int
    nonce: str
    #: The position at which the term starts, and the stream's end offset at that time.
    start: Position
    end_offset: int
    #: Whether the start means "the first record that exists".
    floating: bool


class LeaseUnavailable(NamedTuple):
    """The reply if the lease cannot be taken yet.

    Another member holds it, or held it and let it expire without a release. In the second case, the
    caller must first wait for a grace period.
    """

    #: When to ask again if no event arrives earlier, on the ``now()`` clock.
    retry_at: float
    #: The ID of the last event seen.
    event: bytes
    owner: str
    #: The term whose lease expired without a release, if the caller must wait for that reason.
    expired: int | None = None


@dataclass(eq=False)
class Lease:
    """One member's access to a group's lease. Not thread-safe.

    The caller keeps track of whether the member holds the lease.
    """

    stream: str
    incarnation: str
    group: str
    member: str
    ttl_s: float
    #: The next term's number will be higher than this.
    above: int = 0

    def __post_init__(self) -> None:
        self._ttl_ms = max(int(self.ttl_s * 1000), 1)
        self._renewal = 0  # stored in the lease key, so that the server refuses a delayed lapse
        self._meta = keys.meta(self.stream)
        self._group = keys.group(self.stream, self.group)
        self._lease = keys.lease(self.stream, self.group)
        self._events = keys.events(self.stream)

    def __str__(self) -> str:
        return f"group {self.group!r} of stream {self.stream!r}"

    def acquire(
        self, connection: Connection, nonce: str, expired: int | None = None
    ) -> Term | LeaseUnavailable:
        """Take the lease if it is free.

        Args:
            nonce: The caller's secret. After a lost reply, repeat the call with the same nonce.
            expired: The expired term whose grace period the caller has waited out, if any.
        """
        waited_out = "" if expired is None else expired
        reply = self._run_owned(connection, ACQUIRE_LEASE, nonce, waited_out, self.above)
        if reply[0] == b"OK":
            self._renewal = 0
            number, offset, epoch, end, floating = reply[1:]
            position = Position(self.incarnation, epoch, offset)
            return Term(number, nonce, position, end, bool(floating))
        _, left_ms, event, owner = reply[:4]
        if reply[0] == b"HELD":
            # Our scripts always set an expiry. If another program has removed it, ask again after
            # one TTL.
            wait_s = left_ms / 1000 + 0.002 if left_ms >= 0 else self.ttl_s
            return LeaseUnavailable(now() + wait_s, event, owner.decode())
        grace_s = min(self.ttl_s / 10, _GRACE_MAX_S) * random.uniform(0.9, 1)
        return LeaseUnavailable(now() + grace_s, event, owner.decode(), reply[4])

    def renew(self, connection: Connection, term: Term) -> None:
        """Renew the lease. Reclaim it if it has expired and no other member has taken it.

        Raises:
            LeaseLost: Another member has taken the lease, or it was revoked.
        """
        self._renewal += 1
        reply = self._run_owned(connection, RENEW_LEASE, term.nonce, term.number, self._renewal)
        if reply[0] == b"FENCED":
            raise reply_errors.lease_lost(self.stream, self.group, reply[1])

    def release(self, connection: Connection, nonce: str) -> None:
        """Release the lease."""
        connection.retry_idle(self._release, connection, nonce)

    def lapse(self, connection: Connection, term: Term) -> None:
        """Release the lease without ending the term: ``renew`` can reclaim it while it is free."""
        self._release(connection, term.nonce, f"{self.member} {term.number} {self._renewal}")

    def _release(self, connection: Connection, nonce: str, lapsing: str = "") -> None:
        script_keys = [self._group, self._lease, self._events]
        connection.run(RELEASE_LEASE, script_keys, [self.group, self.member, nonce, lapsing])

    def confirm(
        self,
        connection: Connection,
        term: Term,
        position: Position,
        check: Callable[[], object] = lambda: None,
    ) -> int:
        """Confirm all records below ``position``, which were read in the position's epoch.

        Args:
            check: Called before each request.

        Returns:
            The group's confirmed offset.

        Raises:
            LeaseLost: Another term has begun.
            LogTruncated: The server has lost some of these records.
        """
        offset = position.offset
        for _ in range(_ROUNDS):
            check()
            lease = (term.nonce, term.number, position.epoch, offset)
            args = [self.incarnation, connection.history, *lease]
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
                epochs = reply[2].decode()
                first = diverged_at(position, epochs, reply[3])
                if first is not None:
                    raise self._truncated(first, offset)
                position = position._replace(epoch=reply[1], path=path_of(epochs))
        raise MeteorError(
            f"The epoch of stream {self.stream!r} changed {_ROUNDS} times during one confirm. "
            "Check its server for repeated failovers."
        )

    def position(self, connection: Connection) -> int:
        """Return the group's next offset to process."""
        fields = ("confirmed", "start")
        reply = connection.retry_idle(connection.call, "HMGET", self._group, *fields)
        found = next((field for field in reply if field is not None), None)
        if found is None:
            raise reply_errors.group_not_found(self.stream, self.group)
        return int(found)

    def confirmed_in(self, connection: Connection, term: Term) -> int | None:
        """Return the group's position at the moment when another member ended ``term``.

        Return None if the server does not remember it: many terms have begun since, or the term
        ended in another way.
        """
        ended = connection.retry_idle(connection.call, "HGET", self._group, "ended")
        entries = (ended or b"").decode(errors="replace").split(",")[:-1]
        positions = dict(entry.split(":", 1) for entry in reversed(entries) if ":" in entry)
        found = positions.get(term.nonce)
        return int(found) if found is not None and found.isdecimal() else None

    def wait_event(
        self, connection: Connection, after: bytes, timeout_s: float
    ) -> tuple[bytes, bool]:
        """Wait for stream events; return the last event ID, and whether the lease may be free.

        With a timeout of 0, only read the events that already exist.
        """
        streams = ("STREAMS", self._events, after)
        if timeout_s > 0:
            block = ("BLOCK", max(int(timeout_s * 1000), 1))
            reply = connection.call(
                *("XREAD", "COUNT", 1000, *block, *streams),
                timeout_s=timeout_s + connection.timeout_s,
            )
        else:
            reply = connection.retry_idle(connection.call, "XREAD", "COUNT", 1000, *streams)
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
            raise reply_errors.stream_gone(self.stream, reply[0], data_lost=connection.data_lost)
        if reply[0] == b"NOGROUP":
            raise reply_errors.group_not_found(self.stream, self.group)
        return reply

    def _truncated(self, first: int, offset: int) -> LogTruncated:
        return reply_errors.log_truncated(self.stream, first, offset - 1)
