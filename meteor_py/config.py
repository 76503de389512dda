"""Settings: frozen, named as in ``Client.stream`` and ``Stream.publisher``, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

#: Records that a ring keeps if nobody says otherwise (as in Meteor).
DEFAULT_CAPACITY = 10_000
#: Limits of one frame, the unit of transport: an answer stays small, a script short.
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


@dataclass(frozen=True)
class StreamConfig:
    """Settings of a stream, kept in Redis: all its users have the same."""

    #: Records that the ring keeps at least; at most one frame more.
    capacity: int = DEFAULT_CAPACITY
    #: Compression of frames of several records; a publisher may choose another.
    compression: Compression = "none"
    #: Whether each frame carries a crc32, for those who fear flipped bits in memory.
    checksum: bool = False
    #: How values become bytes: "bytes", "text", "json" or "msgpack". Cannot be changed later.
    codec: str = "bytes"

    def __post_init__(self) -> None:
        check_int("capacity", self.capacity, 1, OFFSET_MAX)
        check_choice("compression", self.compression, COMPRESSIONS)
        if not isinstance(self.checksum, bool):
            raise TypeError(f"checksum must be True or False, not {self.checksum!r}.")
        check_choice("codec", self.codec, ("bytes", "text", "json", "msgpack"))

    def to_fields(self) -> dict[str, str]:
        """As fields of the hash ``meta``."""
        return {
            "capacity": str(self.capacity),
            "compression": self.compression,
            "checksum": "1" if self.checksum else "0",
            "codec": self.codec,
        }

    @classmethod
    def from_fields(cls, fields: dict[str, str]) -> StreamConfig:
        """From fields of the hash ``meta``."""
        return cls(
            capacity=int(fields["capacity"]),
            compression=fields["compression"],  # type: ignore[arg-type]  # checked right here
            checksum=fields["checksum"] == "1",
            codec=fields["codec"],
        )


@dataclass(frozen=True)
class PublisherConfig:
    """Settings of a publisher."""

    #: Seconds that the first record of a frame waits for company when the line is free.
    linger: float = 0.0
    #: Compression of frames of several records; None = as the stream says.
    compression: Compression | None = None
    #: Replicas that must have a record before it is acknowledged.
    acks: int = 0
    #: Seconds until a record that could not be delivered fails.
    delivery_timeout: float = 30.0
    #: Bytes of records not yet acknowledged; above, ``publish`` waits, then raises.
    max_pending_bytes: int = 64 * 1024 * 1024
    #: Bytes of the largest record, key and headers included. One over 1 MiB travels alone.
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


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")
