"""A record that a consumer in a shared group holds until it settles the record."""

from __future__ import annotations

import enum
import math
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from meteor_py.records.record import Headers, Record, decode_record

if TYPE_CHECKING:
    from meteor_py.records.codec import Codec
    from meteor_py.shared.ack_timeouts import TimeLimit
    from meteor_py.shared.deliveries import Deliveries


class Standing(enum.Enum):
    """Whether a consumer still holds a record, and if not, why not."""

    HELD = "held"
    #: Acknowledged, released or rejected by the consumer.
    SETTLED = "settled"
    #: Returned because the consumer returned an earlier record with the same ordering key. The
    #: group will deliver it again.
    REWOUND = "rewound"
    #: Returned as failed, because the application did not settle it in time.
    EXPIRED = "expired"
    #: Returned to the group, because this consumer's lease expired, the consumer left, or a
    #: failover lost the delivery.
    TAKEN = "taken"


class SharedRecord(msgspec.Struct, eq=False):
    """A ``Record`` that this consumer must settle with ``ack``, ``release`` or ``reject``.

    >>> for record in sub.poll():    # doctest: +SKIP
    ...     try:
    ...         handle(record.value)
    ...         record.ack()
    ...     except OSError:
    ...         record.release(delay=1.0)

    Settling only queues the settlement and returns at once. The consumer sends it with the next
    poll or within 50 ms.
    """

    _deliveries: Deliveries
    _codec: Codec | None
    #: The record as published; its value is not decoded.
    record: Record
    offset: int
    #: Number of earlier deliveries that failed.
    failures: int
    standing: Standing = Standing.HELD
    #: The time at which ``time_limit`` expires, on the ``clock.now()`` clock. Both fields are set
    #: when the record is delivered.
    deadline: float = math.inf
    time_limit: TimeLimit | None = None
    #: The time until which ``extend()`` keeps the consumer's lease, on the same clock.
    extended_until: float = 0.0

    def ack(self) -> None:
        """Acknowledge the record, so that the group never delivers it again.

        Raises:
            Rewound: This consumer returned the record with an earlier record of its ordering key.
            AckTimeout: The record was not settled within ``ack_timeout``, or within
                ``max_poll_interval`` in a ``run()`` handler, so this consumer returned it.
            Fenced: This consumer no longer holds the record, because the lease expired, the
                subscriber was closed, or a failover lost the delivery. Also the base class of the
                other two errors.
            ValueError: The record was already settled.
        """
        self._deliveries.ack(self)

    def release(
        self,
        delay: float = 0.0,
        *,
        only_this: bool = False,
        failed: bool = True,
        reason: str = "",
    ) -> None:
        """Return the record to the group, which delivers it again, perhaps to another consumer.

        Args:
            delay: Seconds for which the group delivers no records of this ordering key.
            only_this: If false, this consumer also returns the later records of the same ordering
                key that it holds, which preserves their order. If true, it returns only this
                record, which may then be processed after them.
            failed: Whether this delivery counts as a failure towards ``max_deliveries``. Pass False
                if the record is not to blame, for example because a database was unreachable.
            reason: Why the delivery failed. If this was the last try, the dead letter contains the
                reason in its ``meteor-reason`` header.

        Raises:
            Rewound, AckTimeout, Fenced: As for ``ack``.
            ValueError: The record was already settled, or ``only_this`` was combined with a delay,
                which applies to the whole ordering key.
        """
        self._deliveries.release(self, delay, only_this=only_this, failed=failed, reason=reason)

    def extend(self, seconds: float) -> None:
        """Keep the record for at least this many seconds from now, to allow more processing time.

        Until then, neither ``ack_timeout`` nor ``max_poll_interval`` returns it to the group. This
        method never shortens a record's time limit.

        Raises:
            Rewound, AckTimeout, Fenced, ValueError: As for ``ack``.
        """
        self._deliveries.extend(self, seconds)

    def reject(self, reason: str = "") -> None:
        """Give up on the record without another try.

        If the group has a dead-letter stream, the record is published there. Otherwise it is
        discarded, or, with ``on_poison="park"``, it remains the first record of its parked key.

        Args:
            reason: Stored in the dead letter's ``meteor-reason`` header.

        Raises:
            Rewound, AckTimeout, Fenced, ValueError: As for ``ack``.
        """
        self._deliveries.reject(self, reason)

    @property
    def ordering_key(self) -> bytes:
        """The key or header value that orders the record (see the stream's ``ordering_key``).

        For a record without one, the group's ``default_key``, or with ``keyless="free"``, a zero
        byte and the offset.
        """
        return self._deliveries.ordering_key(self.record)

    @property
    def value(self) -> Any:
        """The value, decoded if there is a codec.

        Raises:
            DecodeError: The codec cannot decode the value.
        """
        if self._codec is None:
            return self.record.value
        return decode_record(self._deliveries.protocol.stream.name, self._codec, self.record).value

    @property
    def key(self) -> bytes | None:
        return self.record.key

    @property
    def headers(self) -> Headers | None:
        return self.record.headers

    @property
    def timestamp(self) -> int:
        """Creation time in milliseconds since 1970."""
        return self.record.timestamp

    @property
    def appended(self) -> int:
        """The time at which the server appended the record, in milliseconds since 1970."""
        return self.record.appended

    @property
    def time(self) -> datetime:
        """``timestamp`` as an aware datetime."""
        return self.record.time

    def __repr__(self) -> str:
        return f"<SharedRecord {self.offset} of key {self.ordering_key!r}, {self.standing.value}>"
