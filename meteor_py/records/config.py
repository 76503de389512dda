"""Settings: frozen, named as the arguments that set them, checked once."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from meteor_py.records.ordering_index import OrderingRule
from meteor_py.records.position import Position
from meteor_py.redis import keys

#: Default ring capacity in records (the same as Meteor's).
DEFAULT_CAPACITY = 10_000
#: Records that may wait for the archiver, in multiples of the capacity.
UNARCHIVED_CAPACITIES = 10
#: Limits of one frame, the unit of transport: a reply stays small, a script short.
FRAME_RECORDS_MAX = 4_096
FRAME_BYTES_MAX = 1_048_576
#: The largest record by default, key and headers included, and what may be asked for.
RECORD_BYTES_MAX = 1_048_576
RECORD_BYTES_LIMIT = 32 * 1_048_576
#: The largest offset: Lua counts in doubles.
OFFSET_MAX = 2**53 - 1

#: The longest delivery timeout, in seconds: half of what a server remembers an idle publisher for.
DELIVERY_TIMEOUT_MAX_S = 12 * 3600

Compression = Literal["none", "lz4", "zstd"]
COMPRESSIONS: tuple[Compression, ...] = ("none", "lz4", "zstd")


OnGap = Literal["raise", "skip"]

#: Bounds of a lease's TTL in seconds; its owner renews it every third of that.
LEASE_TTL_S = (0.1, 86_400.0)


class InitialOffset(enum.StrEnum):
    """Where a subscriber starts; an existing group continues where it is."""

    #: At the first record that can be read.
    EARLIEST = "earliest"
    #: After the last record that exists when ``subscriber()`` returns.
    LATEST = "latest"
    #: Nowhere: only for a group that has confirmed something.
    NONE = "none"
    #: EARLIEST in a group, else LATEST.
    AUTO = "auto"


@dataclass(frozen=True)
class StreamConfig:
    """Settings of a stream, kept in Redis: all its users have the same."""

    #: Records that the ring keeps at least; at most one frame more.
    capacity: int = DEFAULT_CAPACITY
    #: Compression of frames of several records; a publisher may choose another.
    compression: Compression = "none"
    #: Whether each frame carries a crc32, which detects bits that flipped in memory.
    checksum: bool = False
    #: How values become bytes: "bytes", "text", "json" or "msgpack". Cannot be changed later.
    codec: str = "bytes"
    #: What shared subscribers order its records by: "key" or "header:NAME"; None: the stream has no
    #: shared subscribers. Cannot be changed later.
    ordering_key: str | None = None
    #: The address of the store, without secrets; None: no store, or one that has no address.
    store: str | None = None
    #: With a store: records that may wait for the archiver before publishers have to.
    max_unarchived: int | None = None

    def __post_init__(self) -> None:
        check_int("capacity", self.capacity, 1, OFFSET_MAX)
        if self.max_unarchived is not None:
            check_int("max_unarchived", self.max_unarchived, 1, OFFSET_MAX)
        check_choice("compression", self.compression, COMPRESSIONS)
        if not isinstance(self.checksum, bool):
            raise TypeError(f"checksum must be True or False, not {self.checksum!r}.")
        check_choice("codec", self.codec, ("bytes", "text", "json", "msgpack"))
        if self.ordering_key is not None:
            OrderingRule(self.ordering_key)  # raises

    def check_room(self) -> StreamConfig:
        """Return it, if publishers will find room.

        Not checked when it is read: two clients that change settings at once may cause this.
        """
        if self.max_unarchived is not None and self.max_unarchived < self.capacity:
            raise ValueError(
                f"max_unarchived must be at least the capacity, {self.capacity}, not "
                f"{self.max_unarchived}: the ring holds that many anyway. Give max_unarchived= too."
            )
        return self

    @property
    def ordering_rule(self) -> OrderingRule | None:
        """The rule that ``ordering_key`` names."""
        return None if self.ordering_key is None else OrderingRule(self.ordering_key)

    def to_fields(self) -> dict[str, str]:
        """As fields of the hash ``meta``."""
        fields = {
            "capacity": str(self.capacity),
            "compression": self.compression,
            "checksum": "1" if self.checksum else "0",
            "codec": self.codec,
        }
        if self.ordering_key is not None:
            fields["group_by"] = self.ordering_key
        if self.store is not None:
            fields["store_uri"] = self.store
        if self.max_unarchived is not None:
            fields["max_unarchived"] = str(self.max_unarchived)
        return fields

    @classmethod
    def from_fields(cls, fields: dict[str, str]) -> StreamConfig:
        """From fields of the hash ``meta``."""
        return cls(
            capacity=int(fields["capacity"]),
            compression=fields["compression"],  # type: ignore[arg-type]  # checked right here
            checksum=fields["checksum"] == "1",
            codec=fields["codec"],
            ordering_key=fields.get("group_by"),
            store=fields.get("store_uri"),
            max_unarchived=int(fields["max_unarchived"]) if "store" in fields else None,
        )


@dataclass(frozen=True)
class PublisherConfig:
    """Settings of a publisher."""

    #: Seconds that the first record of a frame waits for more when nothing is in flight.
    linger: float = 0.0
    #: "none", "lz4" or "zstd", for frames of several records; None means the stream's setting.
    compression: Compression | None = None
    #: Replicas that must have a record before it is acknowledged.
    acks: int = 0
    #: Seconds until a record that could not be delivered fails.
    delivery_timeout: float = 30.0
    #: Bytes of records not yet acknowledged; above, ``publish`` waits, then raises.
    max_pending_bytes: int = 64 * 1024 * 1024
    #: Bytes of the largest record, key and headers included; up to 32 MiB. A record over 1 MiB
    #: travels alone.
    max_record_bytes: int = RECORD_BYTES_MAX

    def __post_init__(self) -> None:
        check_seconds("linger", self.linger, zero=True)
        if self.compression is not None:
            check_choice("compression", self.compression, COMPRESSIONS)
        check_int("acks", self.acks, 0, 1_000)
        check_seconds("delivery_timeout", self.delivery_timeout)
        if self.delivery_timeout > DELIVERY_TIMEOUT_MAX_S:
            raise ValueError(
                f"delivery_timeout must be at most {DELIVERY_TIMEOUT_MAX_S} seconds: a server "
                "remembers a publisher for a day, and no record may be in doubt for longer."
            )
        check_int("max_pending_bytes", self.max_pending_bytes, 1, 2**40)
        check_int("max_record_bytes", self.max_record_bytes, 1, RECORD_BYTES_LIMIT)


@dataclass(frozen=True)
class SubscriberConfig:
    """Settings of a subscriber."""

    #: The group to read for, which its first subscriber creates; None: it reads on its own.
    group: str | None = None
    #: Where to start without a group, or if the group is new.
    initial_offset: InitialOffset = InitialOffset.AUTO
    #: Seconds after which the group continues without a member that has died.
    lease_ttl: float = 10.0
    #: Seconds between two polls after which this member counts as hung and loses the lease.
    max_poll_interval: float = 60.0
    #: What to do when the ring has dropped the next record: "raise" ``RecordsLost``, or "skip".
    on_gap: OnGap = "raise"
    #: Called with the first and last offset of each gap skipped.
    on_gap_skipped: Callable[[int, int], object] | None = None
    #: Called with the subscriber when it gets the lease, in the thread that polls. It may return
    #: where to start: an offset, or better a ``checkpoint``. A program that keeps the checkpoint
    #: together with its results processes each record exactly once.
    on_assigned: Callable[[Any], Position | int | None] | None = None
    #: Whether asking for more records confirms those that were handed out before.
    auto_confirm: bool = False

    def __post_init__(self) -> None:
        if self.group is not None:
            keys.check_name(self.group, "group")
        check_choice("initial_offset", self.initial_offset, tuple(InitialOffset))
        low, high = LEASE_TTL_S
        if not low <= check_seconds("lease_ttl", self.lease_ttl) <= high:
            raise ValueError(
                f"lease_ttl must be from {low:g} to {high:g} seconds, not {self.lease_ttl}."
            )
        check_seconds("max_poll_interval", self.max_poll_interval)
        check_choice("on_gap", self.on_gap, ("raise", "skip"))
        if self.on_gap_skipped is not None and not callable(self.on_gap_skipped):
            raise TypeError("on_gap_skipped must be a function of the first and the last offset.")
        if self.on_assigned is not None and not callable(self.on_assigned):
            raise TypeError("on_assigned must be a function of the subscriber.")
        if not isinstance(self.auto_confirm, bool):
            raise TypeError(f"auto_confirm must be True or False, not {self.auto_confirm!r}.")
        if self.group is None and (self.auto_confirm or self.on_assigned is not None):
            raise ValueError("auto_confirm and on_assigned need a group; give one with group=.")

    @property
    def starts_at(self) -> InitialOffset:
        """``initial_offset`` with AUTO resolved."""
        if self.initial_offset != InitialOffset.AUTO:
            return InitialOffset(self.initial_offset)
        return InitialOffset.LATEST if self.group is None else InitialOffset.EARLIEST


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """Return ``value`` if it is an integer from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}.")
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, not {value}.")
    return value


def check_seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """Return ``value`` if it is a finite, positive number of seconds (or zero)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}.")
    if not 0 <= value < 1e9 or (value == 0 and not zero):
        bound = "zero or more" if zero else "more than zero"
        raise ValueError(f"{name} must be {bound} seconds, and finite, not {value}.")
    return float(value)


def check_function(name: str, value: Any) -> None:
    """Raise ``TypeError`` unless ``value`` can be called."""
    if not callable(value):
        raise TypeError(f"{name} needs a function, not {value!r}.")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")
