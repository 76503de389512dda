"""Settings of a shared group, which all its consumers share, and of a single consumer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from meteor_py.records.config import (
    OnGap,
    check_choice,
    check_int,
    check_lease_ttl,
    check_seconds,
)
from meteor_py.records.ordering_index import ORDERING_KEY_BYTES_MAX
from meteor_py.redis import keys
from meteor_py.shared.ack_timeouts import TimeLimit

OnPoison = Literal["skip", "park"]
Keyless = Literal["default", "free"]

#: The maximum number of records that a consumer can hold.
PREFETCH_MAX = 10_000
#: Default ``ack_timeout`` in seconds (the same as RabbitMQ's). It is a safety net for records that
#: the application has forgotten, so it is longer than almost any handler needs.
ACK_TIMEOUT_S = 1_800.0
#: The ordering key for records that have none.
DEFAULT_KEY = "meteor.no-group"
#: While at least this many records wait for their ordering keys, consumers scan no new records. The
#: server keeps the offsets of waiting records in memory: 7 to 10 bytes each, or about 130 if each
#: record has its own ordering key.
WAITING_MAX = 1_000_000


@dataclass(frozen=True)
class SharedConfig:
    """Settings of a shared group. They are stored in Redis and are the same for all consumers."""

    #: The maximum number of records of one ordering key that a consumer holds: 1 to 10,000. It
    #: leaves room for other keys if one key is busy. With 0, only ``prefetch`` limits the number.
    max_per_key: int = 32
    #: Seconds after which other consumers get the records of a consumer that has died.
    lease_ttl: float = 10.0
    #: Number of failures after which a record becomes a dead letter: 2 to 1,000; 0 = never.
    max_deliveries: int = 5
    #: The stream for dead letters. If it does not exist, a consumer creates it with room for many
    #: letters. None = consumers discard, log and count the records, unless ``on_poison`` is "park":
    #: the record then remains the first one of its parked key.
    dead_letter: str | None = None
    #: What happens to the ordering key of a dead letter: "skip" continues with the key's next
    #: record, "park" stops the key until ``resume()``.
    on_poison: OnPoison = "skip"
    #: The ordering key for records that have none, if ``keyless`` is "default".
    default_key: str = DEFAULT_KEY
    #: How to process records without an ordering key. With "free", consumers process them in
    #: parallel, in any order. With "default", all of them get ``default_key`` and are processed in
    #: order. Passing ``default_key`` to ``shared_subscriber()`` implies "default".
    keyless: Keyless = "free"

    def __post_init__(self) -> None:
        if check_int("max_per_key", self.max_per_key, 0, PREFETCH_MAX) == 0:
            object.__setattr__(self, "max_per_key", PREFETCH_MAX)
        check_lease_ttl(self.lease_ttl)
        if check_int("max_deliveries", self.max_deliveries, 0, 1_000) == 1:
            raise ValueError(
                "max_deliveries must be 0 (no limit) or at least 2. When a consumer dies, any of "
                "its records may be the cause, and only a second delivery shows which one."
            )
        if self.dead_letter is not None:
            keys.check_name(self.dead_letter, "dead-letter stream")
        check_choice("on_poison", self.on_poison, ("skip", "park"))
        check_choice("keyless", self.keyless, ("default", "free"))
        if not isinstance(self.default_key, str):
            raise TypeError("default_key must be a str.")
        if not 1 <= len(self.default_key.encode()) <= ORDERING_KEY_BYTES_MAX:
            raise ValueError(f"default_key must have 1 to {ORDERING_KEY_BYTES_MAX} bytes.")
        if self.keyless == "free" and self.default_key != DEFAULT_KEY:
            raise ValueError(
                'With keyless="free", no record gets the default key. Omit default_key.'
            )

    def to_fields(self) -> dict[str, str]:
        """Return the stored fields.

        ``group_cap``, ``default_group`` and ``ungrouped`` keep their names from version 0.1,
        because existing groups have these fields.
        """
        return {
            "group_cap": str(self.max_per_key),
            "lease_ms": str(round(self.lease_ttl * 1000)),
            "max_deliveries": str(self.max_deliveries),
            "dead_letter": self.dead_letter or "",
            "on_poison": self.on_poison,
            "default_group": self.default_key,
            "ungrouped": self.keyless,
            "max_waiting": str(WAITING_MAX),
        }

    @classmethod
    def from_fields(cls, fields: dict[str, str]) -> SharedConfig:
        """Create a configuration from the stored fields."""
        return cls(
            max_per_key=int(fields["group_cap"]),
            lease_ttl=int(fields["lease_ms"]) / 1000,
            max_deliveries=int(fields["max_deliveries"]),
            dead_letter=fields["dead_letter"] or None,
            on_poison=fields["on_poison"],  # type: ignore[arg-type]  # checked in __post_init__
            default_key=fields["default_group"],
            keyless=fields["ungrouped"],  # type: ignore[arg-type]  # checked in __post_init__
        )

    def differing(self, asked: dict[str, Any]) -> str | None:
        """Return the name of the first requested setting that differs from this configuration."""
        # Round the requested values as storing does, because a rounding difference does not count.
        wanted = SharedConfig.from_fields(SharedConfig(**asked).to_fields())
        return next((name for name in asked if getattr(self, name) != getattr(wanted, name)), None)


@dataclass(frozen=True)
class ConsumerConfig:
    """Settings of one consumer in a shared group."""

    #: The maximum number of unsettled records that the consumer holds, delivered or buffered: 1 to
    #: 10,000. ``run()`` holds fewer if its handlers are slow, so that other consumers get their
    #: share.
    prefetch: int = 256
    #: The size in bytes of buffered record values at which the consumer stops fetching: 1 to 2**40.
    #: The last record may exceed this size, so a record of any size can be fetched.
    prefetch_bytes: int = 64 * 1024 * 1024
    #: Seconds without a poll or a settlement after which the consumer stops renewing its lease, so
    #: that others get its records. Also limits the time of one handler call in ``run()``.
    max_poll_interval: float = 60.0
    #: Seconds for which the application may keep a record that ``poll()`` returned or ``run()``
    #: passed to the handler. After that, the consumer returns the record to the group as failed.
    #: None = no limit.
    ack_timeout: float | None = ACK_TIMEOUT_S
    #: What to do if records were dropped before they were delivered, or cannot be read: "raise" an
    #: error once per gap (see ``poll()``), or "skip" the gap. Does not apply to ``LogTruncated``.
    on_gap: OnGap = "raise"
    #: Called with the first and last offset of each skipped gap.
    on_gap_skipped: Callable[[int, int], object] | None = None

    def __post_init__(self) -> None:
        check_int("prefetch", self.prefetch, 1, PREFETCH_MAX)
        check_int("prefetch_bytes", self.prefetch_bytes, 1, 2**40)
        check_seconds("max_poll_interval", self.max_poll_interval)
        if self.ack_timeout is not None:
            check_seconds("ack_timeout", self.ack_timeout)
        check_choice("on_gap", self.on_gap, ("raise", "skip"))
        if self.on_gap_skipped is not None and not callable(self.on_gap_skipped):
            raise TypeError(
                "on_gap_skipped must be a function that takes the first and last skipped offsets."
            )

    @property
    def poll_limit(self) -> TimeLimit:
        """The time limit for records that ``poll()`` returns."""
        return TimeLimit("ack_timeout", math.inf if self.ack_timeout is None else self.ack_timeout)

    @property
    def handler_limit(self) -> TimeLimit:
        """The time limit for records that ``run()`` passes to the handler."""
        limits = (TimeLimit("max_poll_interval", self.max_poll_interval), self.poll_limit)
        return min(limits, key=lambda limit: limit.seconds)
