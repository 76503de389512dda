"""Settings for streams, publishers and subscribers, and functions that check their values."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

from meteor_py.errors import MeteorError
from meteor_py.records.codec import CODECS, CodecName
from meteor_py.records.ordering_index import OrderingRule
from meteor_py.records.position import Position
from meteor_py.records.times import to_ms
from meteor_py.redis import keys

#: Default ring capacity in records (the same as Meteor's).
DEFAULT_CAPACITY = 10_000
#: Default limit on unarchived records, as a multiple of the capacity.
UNARCHIVED_CAPACITIES = 10
#: Maximum size of a frame, in records and in bytes. It keeps replies small and script calls short.
#: A larger record gets its own frame.
FRAME_RECORDS_MAX = 4_096
FRAME_BYTES_MAX = 1_048_576
#: Maximum number of headers in a record.
HEADERS_MAX = 10_000
#: Maximum record size in bytes, including key and headers: the default, and the upper limit.
RECORD_BYTES_MAX = 1_048_576
RECORD_BYTES_LIMIT = 32 * 1_048_576
#: The largest offset. Numbers in Lua are doubles, which are exact only up to this value.
OFFSET_MAX = 2**53 - 1
#: The longest delivery timeout in seconds: half the time that a server remembers an idle publisher.
DELIVERY_TIMEOUT_MAX_S = 12 * 3600
#: Bounds for a lease's TTL in seconds; the owner renews the lease every third of its TTL.
LEASE_TTL_S = (0.1, 86_400.0)

Compression = Literal["none", "lz4", "zstd"]
COMPRESSIONS: tuple[Compression, ...] = ("none", "lz4", "zstd")
OnGap = Literal["raise", "skip"]


#: Fields in the ``settings`` hash, the same as in lua/log/_settings.lua. ``meta`` has copies of
#: them.
ADMIN_FIELDS = (
    "codec", "compression", "checksum", "group_by", "store", "store_before", "store_uri", "retain",
    "retain_bytes",
)  # fmt: skip
#: Fields that a client trusts only in ``settings``: the store's address, and the rules for deleting
#: records from the store.
GUARDED_FIELDS = ("store_uri", "retain", "retain_bytes")
#: Stream settings that need a store.
STORE_SETTINGS = ("max_unarchived", "retain", "retain_bytes")


class InitialOffset(enum.StrEnum):
    """Where a subscriber starts.

    An existing group continues at its confirmed offset or, if it has none yet, begins at the start
    that was chosen when the group was created.
    """

    #: At the first readable record.
    EARLIEST = "earliest"
    #: After the last record that exists when ``subscriber()`` returns.
    LATEST = "latest"
    #: At the group's confirmed offset. Raises an error if there is none.
    NONE = "none"
    #: EARLIEST in a group, LATEST without one.
    AUTO = "auto"


#: Where a subscriber starts: a word, an offset, or an aware datetime, which means the first record
#: appended at that time or later.
Start = InitialOffset | Literal["earliest", "latest", "none", "auto"] | int | datetime


@dataclass(frozen=True)
class StreamConfig:
    """A stream's settings, stored on the server and shared by all clients."""

    #: Number of records that the ring keeps, by default the newest 10,000. The ring may hold up to
    #: one frame more. With a store, it also keeps records until they are archived. Without a store,
    #: records are lost when the ring drops them.
    capacity: int = DEFAULT_CAPACITY
    #: Compression for frames of 512 bytes or more. A publisher can override it.
    compression: Compression = "none"
    #: Whether each frame carries a crc32, which detects bits that flipped in memory.
    checksum: bool = False
    #: Name of the codec for values: "bytes", "text", "json" or "msgpack". Cannot be changed later.
    codec: CodecName = "bytes"
    #: Ordering key for shared groups: "key" or "header:NAME". With None, the stream cannot have
    #: shared groups. Can be added later, but not changed.
    ordering_key: str | None = None
    #: The store's address, without secrets. None if there is no store or it has no address.
    store: str | None = None
    #: With a store: number of unarchived records at which publishers start to wait for the
    #: archiver.
    max_unarchived: int | None = None
    #: Seconds for which the ring keeps a record. None means no limit. Each publish drops older
    #: records, so an idle stream keeps its records. With a store, the ring never drops unarchived
    #: records.
    max_age: float | None = None
    #: Maximum total size of the ring's frames in bytes, counting 32 extra bytes per frame. None
    #: means no limit. The ring may hold up to one frame more. With a store, it never drops
    #: unarchived records.
    max_bytes: int | None = None
    #: Seconds for which the store keeps a record. Then archivers delete the record, but only with
    #: its whole file, and only once every group has confirmed it. None keeps records until
    #: ``stream.store.expire()`` is called.
    retain: float | None = None
    #: Maximum total size of the store's files in bytes. Above it, archivers delete the oldest
    #: files, under the same conditions as for ``retain``.
    retain_bytes: int | None = None

    def __post_init__(self) -> None:
        check_int("capacity", self.capacity, 1, OFFSET_MAX)
        for name in ("max_unarchived", "max_bytes", "retain_bytes"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, OFFSET_MAX)
        for name in ("max_age", "retain"):
            if getattr(self, name) is not None:  # round to whole ms, which the server stores
                seconds = max(round(check_seconds(name, getattr(self, name)), 3), 0.001)
                object.__setattr__(self, name, seconds)
        check_choice("compression", self.compression, COMPRESSIONS)
        if not isinstance(self.checksum, bool):
            raise TypeError(f"checksum must be True or False, not {self.checksum!r}.")
        check_choice("codec", self.codec, CODECS)
        if self.ordering_key is not None:
            OrderingRule(self.ordering_key)  # raises if the key is invalid

    def check_room(self) -> StreamConfig:
        """Raise ``ValueError`` if ``max_unarchived`` is below the capacity; return self.

        Settings read from the server are not checked, because two clients that change them at the
        same time may store such a combination.
        """
        if self.max_unarchived is not None and self.max_unarchived < self.capacity:
            raise ValueError(
                f"max_unarchived must be at least the capacity, {self.capacity}, not "
                f"{self.max_unarchived}. Pass a larger max_unarchived, or a smaller capacity."
            )
        return self

    @cached_property
    def ordering_rule(self) -> OrderingRule | None:
        """The rule that finds a record's ordering key; None without an ordering key."""
        return None if self.ordering_key is None else OrderingRule(self.ordering_key)

    def to_fields(self) -> dict[str, str]:
        """Return the fields for the ``meta`` and ``settings`` hashes."""
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
        if self.max_age is not None or self.max_bytes is not None:
            age = "" if self.max_age is None else round(self.max_age * 1000)
            fields["keep"] = f"{age}:{self.max_bytes or ''}"
        if self.retain is not None:
            fields["retain"] = str(round(self.retain * 1000))
        if self.retain_bytes is not None:
            fields["retain_bytes"] = str(self.retain_bytes)
        return fields

    @classmethod
    def from_fields(cls, fields: dict[str, str]) -> StreamConfig:
        """Parse fields from the ``meta`` and ``settings`` hashes."""
        age, _, size = fields.get("keep", ":").partition(":")
        return cls(
            capacity=int(fields["capacity"]),
            compression=fields["compression"],  # type: ignore[arg-type]  # checked by __post_init__
            checksum=fields["checksum"] == "1",
            codec=fields["codec"],  # type: ignore[arg-type]  # checked by __post_init__
            ordering_key=fields.get("group_by"),
            store=fields.get("store_uri"),
            max_unarchived=int(fields["max_unarchived"]) if "store" in fields else None,
            max_age=int(age) / 1000 if age else None,
            max_bytes=int(size) if size else None,
            retain=int(fields["retain"]) / 1000 if "retain" in fields else None,
            retain_bytes=int(fields["retain_bytes"]) if "retain_bytes" in fields else None,
        )


@dataclass(frozen=True)
class PublisherConfig:
    """A publisher's settings."""

    #: Seconds that the first record in a frame waits for more records when nothing is in flight.
    linger: float = 0.0
    #: Compression for frames of 512 bytes or more: "none", "lz4" or "zstd". None means the stream's
    #: setting.
    compression: Compression | None = None
    #: Number of replicas that must confirm a record before it is acknowledged.
    acks: int = 0
    #: Seconds after which a record that could not be delivered fails.
    delivery_timeout: float = 30.0
    #: Maximum unacknowledged bytes. Above this limit, ``publish`` waits up to ``delivery_timeout``,
    #: then raises ``PublisherFull``.
    max_pending_bytes: int = 64 * 1024 * 1024
    #: Maximum record size in bytes, including key and headers; up to 32 MiB. A record over 1 MiB
    #: gets its own frame.
    max_record_bytes: int = RECORD_BYTES_MAX
    #: Called with the error whenever records fail, or acknowledged records turn out to be lost. It
    #: usually runs in the sender's thread, so it must not block. ``flush`` and ``close`` do not
    #: raise a failure that this function has received. Without this function, the publisher logs a
    #: failure as a warning if no thread waits for the ``Ack``, and only once until records succeed
    #: again.
    on_error: Callable[[MeteorError], object] | None = None

    def __post_init__(self) -> None:
        check_seconds("linger", self.linger, zero=True)
        if self.compression is not None:
            check_choice("compression", self.compression, COMPRESSIONS)
        check_int("acks", self.acks, 0, 1_000)
        check_seconds("delivery_timeout", self.delivery_timeout)
        if self.delivery_timeout > DELIVERY_TIMEOUT_MAX_S:
            raise ValueError(
                f"delivery_timeout must be at most {DELIVERY_TIMEOUT_MAX_S} seconds, not "
                f"{self.delivery_timeout:g}, because the server remembers a publisher for only one "
                "day."
            )
        check_int("max_pending_bytes", self.max_pending_bytes, 1, 2**40)
        check_int("max_record_bytes", self.max_record_bytes, 1, RECORD_BYTES_LIMIT)
        if self.on_error is not None:
            check_function("on_error", self.on_error)


@dataclass(frozen=True)
class SubscriberConfig:
    """A subscriber's settings."""

    #: Name of the group to join. Its first subscriber creates it. None reads without a group.
    group: str | None = None
    #: Where to start without a group, or in a new group: EARLIEST, LATEST, an offset, or an aware
    #: datetime. With NONE, the group must have confirmed an offset.
    initial_offset: Start = InitialOffset.AUTO
    #: Lease duration in seconds. After this time, another member can replace an owner that died.
    lease_ttl: float = 10.0
    #: Seconds without a poll after which this member counts as hung and loses the lease.
    max_poll_interval: float = 60.0
    #: If the next records were lost, "raise" raises ``RecordsLost``, and "skip" skips them.
    on_gap: OnGap = "raise"
    #: Called with the first and last offset of each skipped gap.
    on_gap_skipped: Callable[[int, int], object] | None = None
    #: Called in the polling thread, with the subscriber, each time the subscriber gets the lease.
    #: May return the position to start from: an offset or, better, a ``checkpoint``. A program that
    #: stores the checkpoint together with its results processes each record exactly once.
    on_assigned: Callable[[Any], Position | int | None] | None = None
    #: Whether each poll confirms the records that the previous poll returned.
    auto_confirm: bool = False

    def __post_init__(self) -> None:
        if self.group is not None:
            keys.check_name(self.group, "group")
        parse_start("initial_offset", self.initial_offset)
        check_lease_ttl(self.lease_ttl)
        check_seconds("max_poll_interval", self.max_poll_interval)
        check_choice("on_gap", self.on_gap, ("raise", "skip"))
        if self.on_gap_skipped is not None and not callable(self.on_gap_skipped):
            raise TypeError("on_gap_skipped must be a function that takes two offsets.")
        if self.on_assigned is not None and not callable(self.on_assigned):
            raise TypeError("on_assigned must be a function that takes the subscriber.")
        if not isinstance(self.auto_confirm, bool):
            raise TypeError(f"auto_confirm must be True or False, not {self.auto_confirm!r}.")
        if self.group is None and (self.auto_confirm or self.on_assigned is not None):
            raise ValueError("auto_confirm and on_assigned need a group. Pass one with group=.")

    @property
    def starts_at(self) -> InitialOffset | int | datetime:
        """``initial_offset``, with AUTO replaced by EARLIEST or LATEST."""
        start = parse_start("initial_offset", self.initial_offset)
        if start is not InitialOffset.AUTO:
            return start
        return InitialOffset.LATEST if self.group is None else InitialOffset.EARLIEST


def parse_start(name: str, start: Start) -> InitialOffset | int | datetime:
    """Return ``start``. Convert a word to an ``InitialOffset``.

    Raises:
        ValueError: The word is unknown, the offset is out of range, or the datetime has no time
            zone or is outside the years 1970 to 9999.
        TypeError: ``start`` is a bool.
    """
    if isinstance(start, datetime):
        to_ms(start)
        return start
    if isinstance(start, int):
        return check_int(name, start, 0, OFFSET_MAX)
    check_choice(name, start, tuple(InitialOffset))
    return InitialOffset(start)


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """Return ``value`` if it is an integer from ``low`` to ``high``.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}.")
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, not {value}.")
    return value


def check_seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """Return ``value`` if it is a number of seconds below 1e9.

    It must be positive; if ``zero`` is true, it may also be 0.

    Raises:
        TypeError: It is not a number.
        ValueError: It is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}.")
    if not 0 <= value < 1e9 or (value == 0 and not zero):
        bound = "at least 0" if zero else "more than 0"
        raise ValueError(f"{name} must be {bound} and less than 1e9 seconds, not {value}.")
    return float(value)


def check_lease_ttl(value: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``value`` is a permitted ``lease_ttl``."""
    low, high = LEASE_TTL_S
    if not low <= check_seconds("lease_ttl", value) <= high:
        raise ValueError(f"lease_ttl must be from {low:g} to {high:g} seconds, not {value}.")


def check_function(name: str, value: Any) -> None:
    """Raise ``TypeError`` unless ``value`` is callable."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, not {value!r}.")


def without_none(**settings: Any) -> dict[str, Any]:
    """Return the settings that are not None: those that the caller passed."""
    return {name: value for name, value in settings.items() if value is not None}


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")
