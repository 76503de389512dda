"""Settings of a shared group, which all its consumers have, and of a consumer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from meteor_py.records.config import LEASE_TTL_S, OnGap, check_choice, check_int, check_seconds
from meteor_py.records.ordering_index import ORDERING_KEY_BYTES_MAX
from meteor_py.redis import keys

OnPoison = Literal["skip", "park"]
Keyless = Literal["default", "free"]

#: Records that a consumer may hold.
PREFETCH_MAX = 10_000
#: The ordering key of records that have none.
DEFAULT_KEY = "meteor.no-group"
#: Records that may wait for their ordering keys: their offsets are kept in memory, about 10 bytes
#: each.
WAITING_MAX = 1_000_000


@dataclass(frozen=True)
class SharedConfig:
    """Settings of a shared group, kept in Redis: all its consumers have the same."""

    #: Records of one ordering key that a consumer holds at most, so that a busy key leaves room for
    #: others; 1 to 10,000.
    max_per_key: int = 32
    #: Seconds after which the records of a consumer that has died go to others.
    lease_ttl: float = 10.0
    #: Failures after which a record is given up: 2 to 1,000; 0 = never.
    max_deliveries: int = 5
    #: The stream that takes records which were given up; None = they are counted and logged.
    dead_letter: str | None = None
    #: What becomes of the ordering key of a record that was given up: "skip" continues with its
    #: next record, "park" stops the key until ``resume()``.
    on_poison: OnPoison = "skip"
    #: The ordering key of records that have none, unless ``keyless`` is "free".
    default_key: str = DEFAULT_KEY
    #: Records without an ordering key: "default" gives all of them ``default_key``, so that they
    #: are processed one after the other; "free" keeps them in no order.
    keyless: Keyless = "default"

    def __post_init__(self) -> None:
        check_int("max_per_key", self.max_per_key, 1, PREFETCH_MAX)
        low, high = LEASE_TTL_S
        if not low <= check_seconds("lease_ttl", self.lease_ttl) <= high:
            raise ValueError(
                f"lease_ttl must be from {low:g} to {high:g} seconds, not {self.lease_ttl}."
            )
        if check_int("max_deliveries", self.max_deliveries, 0, 1_000) == 1:
            raise ValueError(
                "max_deliveries must be 0 (no limit) or at least 2: a consumer that dies leaves "
                "several records in suspicion, and only a second delivery tells which it was."
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
                'With keyless="free" no record gets the default key; leave default_key out.'
            )

    def to_fields(self) -> dict[str, str]:
        """Return the fields of the hash ``state``, three of which keep the names of version 0.1."""
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
    def from_fields(cls, found: dict[str, str]) -> SharedConfig:
        """Read the fields of the hash ``state``."""
        return cls(
            max_per_key=int(found["group_cap"]),
            lease_ttl=int(found["lease_ms"]) / 1000,
            max_deliveries=int(found["max_deliveries"]),
            dead_letter=found["dead_letter"] or None,
            on_poison=found["on_poison"],  # type: ignore[arg-type]  # checked right here
            default_key=found["default_group"],
            keyless=found["ungrouped"],  # type: ignore[arg-type]  # checked right here
        )

    def differing(self, asked: dict[str, Any]) -> str | None:
        """The name of the first setting that is not as it was asked for."""
        present, wanted = self._kept(), replace(SharedConfig(), **asked)._kept()
        return next((name for name in asked if present[name] != wanted[name]), None)

    def _kept(self) -> dict[str, Any]:
        """All settings, as exact as they are kept."""
        return asdict(SharedConfig.from_fields(self.to_fields()))


@dataclass(frozen=True)
class ConsumerConfig:
    """Settings of one consumer of a shared group."""

    #: Unsettled records that it holds at most, handed out or not; 1 to 10,000.
    prefetch: int = 256
    #: Seconds without a poll or a settled record after which its lease is no longer renewed, so
    #: that others get what it holds; also the limit for one call of a handler of ``run()``.
    max_poll_interval: float = 60.0
    #: What to do when records are gone before they were delivered, or cannot be read: "raise" the
    #: error once (``RecordsLost``, or as ``poll()`` says), or "skip" them.
    on_gap: OnGap = "raise"
    #: Called with the first and last offset of each gap that was skipped.
    on_gap_skipped: Callable[[int, int], object] | None = None

    def __post_init__(self) -> None:
        check_int("prefetch", self.prefetch, 1, PREFETCH_MAX)
        check_seconds("max_poll_interval", self.max_poll_interval)
        check_choice("on_gap", self.on_gap, ("raise", "skip"))
        if self.on_gap_skipped is not None and not callable(self.on_gap_skipped):
            raise TypeError("on_gap_skipped must be a function of the first and the last offset.")
