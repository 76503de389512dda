"""Settings of a shared group, which all its consumers have, and of a consumer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from meteor_py.records.config import LEASE_TTL_S, OnGap, check_choice, check_int, check_seconds
from meteor_py.records.ordering_index import ORDERING_KEY_BYTES_MAX
from meteor_py.redis import keys

OnPoison = Literal["skip", "park"]
Ungrouped = Literal["default", "free"]

#: Records that a consumer may hold.
PREFETCH_MAX = 10_000
#: The group of records that have none.
DEFAULT_GROUP = "meteor.no-group"
#: Records that may wait for their groups: their offsets are kept in memory, about 10 bytes each.
WAITING_MAX = 1_000_000


@dataclass(frozen=True)
class SharedConfig:
    """Settings of a shared group, kept in Redis: all its consumers have the same."""

    #: Records of one group that a consumer may hold, so that one busy group leaves room for others.
    group_cap: int = 32
    #: Seconds after which the records of a consumer that has died go to others.
    lease_ttl: float = 10.0
    #: Failures after which a record is given up: 2 to 1,000; 0 = never.
    max_deliveries: int = 5
    #: The stream that takes records which were given up; None = they are counted and logged.
    dead_letter: str | None = None
    #: What becomes of the group of a record that was given up: "skip" goes on with the next record,
    #: "park" lets the group wait until somebody resumes it.
    on_poison: OnPoison = "skip"
    #: The group of records that have none, unless ``ungrouped`` is "free".
    default_group: str = DEFAULT_GROUP
    #: Records without a group: all in the "default" group, one after the other, or "free".
    ungrouped: Ungrouped = "default"

    def __post_init__(self) -> None:
        check_int("group_cap", self.group_cap, 1, PREFETCH_MAX)
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
        check_choice("ungrouped", self.ungrouped, ("default", "free"))
        if not isinstance(self.default_group, str):
            raise TypeError("default_group must be a str.")
        if not 1 <= len(self.default_group.encode()) <= ORDERING_KEY_BYTES_MAX:
            raise ValueError(f"default_group must have 1 to {ORDERING_KEY_BYTES_MAX} bytes.")
        if self.ungrouped == "free" and self.default_group != DEFAULT_GROUP:
            raise ValueError(
                'With ungrouped="free" no record is in a default group; leave default_group out.'
            )

    def to_fields(self) -> dict[str, str]:
        """As fields of the hash ``state``."""
        return {
            "group_cap": str(self.group_cap),
            "lease_ms": str(round(self.lease_ttl * 1000)),
            "max_deliveries": str(self.max_deliveries),
            "dead_letter": self.dead_letter or "",
            "on_poison": self.on_poison,
            "default_group": self.default_group,
            "ungrouped": self.ungrouped,
            "max_waiting": str(WAITING_MAX),
        }

    @classmethod
    def from_fields(cls, found: dict[str, str]) -> SharedConfig:
        """From fields of the hash ``state``."""
        return cls(
            group_cap=int(found["group_cap"]),
            lease_ttl=int(found["lease_ms"]) / 1000,
            max_deliveries=int(found["max_deliveries"]),
            dead_letter=found["dead_letter"] or None,
            on_poison=found["on_poison"],  # type: ignore[arg-type]  # checked right here
            default_group=found["default_group"],
            ungrouped=found["ungrouped"],  # type: ignore[arg-type]  # checked right here
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

    #: Records that it holds at most, handed out or not.
    prefetch: int = 256
    #: Seconds without a sign of the application after which its lease is not renewed any more.
    max_poll_interval: float = 60.0
    #: What to do about records that are gone: "raise" ``RecordsLost`` once, or "skip" them.
    on_gap: OnGap = "raise"
    #: Called with the first and last offset of what was lost.
    on_gap_skipped: Callable[[int, int], object] | None = None

    def __post_init__(self) -> None:
        check_int("prefetch", self.prefetch, 1, PREFETCH_MAX)
        check_seconds("max_poll_interval", self.max_poll_interval)
        check_choice("on_gap", self.on_gap, ("raise", "skip"))
        if self.on_gap_skipped is not None and not callable(self.on_gap_skipped):
            raise TypeError("on_gap_skipped must be a function of the first and the last offset.")
