"""A record that a consumer of a shared group holds until it settles it."""

from __future__ import annotations

import enum
from datetime import datetime
from typing import TYPE_CHECKING, Any

from meteor_py.records.record import Headers, Record, decode_record

if TYPE_CHECKING:
    from meteor_py.records.codec import Codec
    from meteor_py.shared.deliveries import Deliveries


class Standing(enum.Enum):
    """How a record stands with its consumer."""

    HELD = "held"
    #: Acknowledged, returned or rejected by the consumer.
    SETTLED = "settled"
    #: Returned with an earlier record of its ordering key: it will be delivered again.
    REWOUND = "rewound"
    #: Given to another consumer, because the lease of this one expired.
    TAKEN = "taken"


class SharedRecord:
    """One record, and what is to become of it: ``ack``, ``release`` or ``reject`` it.

    It has what a ``Record`` has. Settling returns at once; it is sent with the next poll, or a
    moment later.
    """

    __slots__ = ("_codec", "_deliveries", "failures", "ordering_key", "record", "standing")

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
        #: The record as it was published, its value not decoded.
        self.record = record
        #: The key, or header, that orders it (``ordering_key`` of the stream).
        self.ordering_key = ordering_key
        #: Deliveries before this one that failed.
        self.failures = failures
        self.standing = Standing.HELD

    def ack(self) -> None:
        """It is done, and will not be delivered again.

        Raises:
            Fenced: It was given to another consumer, or returned with an earlier record of its key.
            ValueError: It was settled before.
        """
        self._deliveries.ack(self)

    def release(self, delay: float = 0.0, *, only_this: bool = False) -> None:
        """Return it, as a failure; it will be delivered again, perhaps to another consumer.

        Args:
            delay: Seconds for which its ordering key is not delivered.
            only_this: Later records of its ordering key that this consumer holds are returned with
                it, so that order survives; True returns this one alone, and it may then be
                processed after them.

        Raises:
            Fenced: It was given to another consumer, or returned with an earlier record of its key.
            ValueError: It was settled before, or ``only_this`` has a delay.
        """
        self._deliveries.release(self, delay, only_this=only_this)

    def reject(self, reason: str = "") -> None:
        """Give it up: it goes to the dead letters, if the group has a stream for them.

        Raises:
            Fenced: It was given to another consumer, or returned with an earlier record of its key.
            ValueError: It was settled before.
        """
        self._deliveries.reject(self, reason)

    @property
    def offset(self) -> int:
        return self.record.offset

    @property
    def value(self) -> Any:
        """Bytes, or what the codec makes of them.

        Raises:
            DecodeError: The codec cannot read it.
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
        """Creation time in ms since 1970."""
        return self.record.timestamp

    @property
    def appended(self) -> int:
        """Time in ms since 1970 at which the server appended it."""
        return self.record.appended

    @property
    def time(self) -> datetime:
        """``timestamp`` as an aware datetime."""
        return self.record.time

    def __repr__(self) -> str:
        return f"<SharedRecord {self.offset} of key {self.ordering_key!r}, {self.standing.value}>"
