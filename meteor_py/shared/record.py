"""A record of a shared group, which a consumer holds until it settles the record."""

from __future__ import annotations

import enum
import math
from datetime import datetime
from typing import TYPE_CHECKING, Any

from meteor_py.records.record import Headers, Record, decode_record

if TYPE_CHECKING:
    from meteor_py.records.codec import Codec
    from meteor_py.shared.ack_timeouts import TimeLimit
    from meteor_py.shared.deliveries import Deliveries


class Standing(enum.Enum):
    """Whether a consumer still holds a record, and if not, why."""

    HELD = "held"
    #: Acknowledged, released or rejected by the consumer.
    SETTLED = "settled"
    #: Returned with an earlier record of its ordering key. The group will deliver it again.
    REWOUND = "rewound"
    #: Returned as failed, because the application did not settle it in time.
    EXPIRED = "expired"
    #: Returned to the group, because the lease of this consumer expired or it left.
    TAKEN = "taken"


# Module-level names, because a record is created for every delivery.
_HELD, _NEVER = Standing.HELD, math.inf


class SharedRecord:
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

    __slots__ = (
        "_codec", "_deliveries", "deadline", "extended_until", "failures", "offset", "ordering_key",
        "record", "standing", "time_limit",
    )  # fmt: skip

    def __init__(
        self,
        deliveries: Deliveries,
        record: Record,
        ordering_key: bytes,
        failures: int,
        codec: Codec | None = None,
    ) -> None:
        self._deliveries = deliveries
        self._codec = codec
        #: The record as published; its value is not decoded.
        self.record = record
        self.offset = record.offset
        #: The value of the key or header that orders it (see ``ordering_key`` of the stream).
        self.ordering_key = ordering_key
        #: Number of earlier deliveries that failed.
        self.failures = failures
        self.standing = _HELD
        #: When its time limit expires, by ``clock.now()``, and that limit.
        self.deadline = _NEVER
        self.time_limit: TimeLimit | None = None
        #: Until when ``extend`` keeps the consumer's lease, by ``clock.now()``.
        self.extended_until = 0.0

    def ack(self) -> None:
        """Acknowledge the record: the group never delivers it again.

        Raises:
            Rewound: This consumer returned it with an earlier record of its ordering key.
            AckTimeout: It was not settled within ``ack_timeout``, so this consumer returned it.
            Fenced: This consumer no longer holds it, because its lease expired or the subscriber
                was closed. Also the base class of the two others.
            ValueError: The record was settled before.
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
        """Return the record: the group delivers it again, perhaps to another consumer.

        Args:
            delay: Seconds for which the group delivers no record of its ordering key.
            only_this: If false, later records of its ordering key that this consumer holds are
                returned with it, which preserves their order. If true, only this record is
                returned, and it may be processed after them.
            failed: Whether this delivery counts as a failure, of which the group allows
                ``max_deliveries``. Pass False if the record is not to blame, for example because
                a database was unreachable.
            reason: Why it failed. If this was its last try, the header ``meteor-reason`` of the
                dead letter contains it.

        Raises:
            Rewound, AckTimeout, Fenced: As for ``ack``.
            ValueError: The record was settled before, or ``only_this`` was combined with a delay,
                which applies to the whole ordering key.
        """
        self._deliveries.release(self, delay, only_this=only_this, failed=failed, reason=reason)

    def extend(self, seconds: float) -> None:
        """Keep the record for at least this many seconds from now, to process it for longer.

        Until then, neither ``ack_timeout`` nor ``max_poll_interval`` returns it to the group. Its
        time limit is never shortened.

        Raises:
            Rewound, AckTimeout, Fenced, ValueError: As for ``ack``.
        """
        self._deliveries.extend(self, seconds)

    def reject(self, reason: str = "") -> None:
        """Discard the record without another try.

        If the group has a dead-letter stream, the record is published there.

        Args:
            reason: Stored in the header ``meteor-reason`` of the dead letter.

        Raises:
            Rewound, AckTimeout, Fenced, ValueError: As for ``ack``.
        """
        self._deliveries.reject(self, reason)

    @property
    def value(self) -> Any:
        """The value, decoded if there is a codec.

        Raises:
            DecodeError: The codec cannot decode it.
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
        """Time at which the server appended it, in milliseconds since 1970."""
        return self.record.appended

    @property
    def time(self) -> datetime:
        """``timestamp`` as an aware datetime."""
        return self.record.time

    def __repr__(self) -> str:
        return f"<SharedRecord {self.offset} of key {self.ordering_key!r}, {self.standing.value}>"
