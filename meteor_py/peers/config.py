"""Peer group settings, shared by all processes that open the group."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from meteor_py.records.config import check_choice, check_int, check_seconds

Election = Literal["oldest", "random", "none"]


class Unset:
    """The type of an omitted argument, for parameters where None has a meaning."""


UNSET = Unset()

#: Smallest and largest ``ttl`` in seconds.
TTL_S = (0.3, 86_400.0)
#: Maximum number of members in a group: some scripts read all of them.
MEMBERS_MAX = 1_000
#: Maximum number of group properties: every process reads all of them.
PROPERTIES_MAX = 100


@dataclass(frozen=True)
class PeersConfig:
    """Peer group settings, stored in Redis. The client that creates the group chooses them."""

    #: Seconds without a heartbeat after which a member counts as dead: 0.3 to 86,400.
    ttl: float = 10.0
    #: Seconds after which a dead named member is removed; None = never.
    member_expiration: float | None = None
    #: Which member leads: the "oldest", a "random" one, or "none" (no election).
    election: Election = "oldest"
    #: Minimum number of live members for an election: 1 to 1,000.
    min_size: int = 1
    #: Maximum number of unsettled messages per member: 1 to 1,000,000.
    max_inbox: int = 10_000
    #: Maximum number of deliveries of a message (see ``Message.deliveries``) that end without
    #: settling it. After that, the message becomes a dead letter. 2 to 1,000; 0 = no limit.
    max_deliveries: int = 5

    def __post_init__(self) -> None:
        low, high = TTL_S
        if not low <= check_seconds("ttl", self.ttl) <= high:
            raise ValueError(f"ttl must be from {low:g} to {high:g} seconds, not {self.ttl}.")
        if self.member_expiration is not None:
            check_seconds("member_expiration", self.member_expiration, zero=True)
        check_choice("election", self.election, ("oldest", "random", "none"))
        check_int("min_size", self.min_size, 1, MEMBERS_MAX)
        check_int("max_inbox", self.max_inbox, 1, 1_000_000)
        if check_int("max_deliveries", self.max_deliveries, 0, 1_000) == 1:
            raise ValueError(
                "max_deliveries must be 0 (no limit) or at least 2. With 1, every message that a "
                "member held when it died would become a dead letter."
            )

    def to_fields(self) -> dict[str, str]:
        """Convert to fields for the ``config`` hash."""
        expiration = -1 if self.member_expiration is None else round(self.member_expiration * 1000)
        return {
            "ttl": str(round(self.ttl * 1000)),
            "expiration": str(expiration),
            "election": self.election,
            "min_size": str(self.min_size),
            "max_inbox": str(self.max_inbox),
            "max_deliveries": str(self.max_deliveries),
        }

    @classmethod
    def from_fields(cls, found: dict[str, str]) -> PeersConfig:
        """Parse the fields of the ``config`` hash."""
        expiration = int(found["expiration"])
        return cls(
            ttl=int(found["ttl"]) / 1000,
            member_expiration=None if expiration < 0 else expiration / 1000,
            election=found["election"],  # type: ignore[arg-type]  # __post_init__ checks it
            min_size=int(found["min_size"]),
            max_inbox=int(found["max_inbox"]),
            max_deliveries=int(found.get("max_deliveries", cls.max_deliveries)),
        )

    def differing(self, asked: dict[str, Any]) -> str | None:
        """Return the name of the first setting that differs from ``asked``; None if all agree."""
        present, wanted = self._rounded(), replace(self, **asked)._rounded()
        return next((name for name, value in wanted.items() if present[name] != value), None)

    def _rounded(self) -> dict[str, Any]:
        """Return all settings, rounded in the same way as in Redis."""
        return asdict(PeersConfig.from_fields(self.to_fields()))
