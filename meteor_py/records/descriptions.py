"""Snapshots of a stream and its groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meteor_py.errors import CorruptStream
from meteor_py.records.config import ADMIN_FIELDS, GUARDED_FIELDS, StreamConfig
from meteor_py.redis import keys

#: The version of the layout of keys and frames that this release reads and writes.
LAYOUT_VERSION = "1"


@dataclass(frozen=True)
class Meta:
    """A snapshot of a stream's ``meta`` and ``settings`` hashes."""

    config: StreamConfig
    incarnation: str
    epoch: int
    #: The stream's epochs; see records/position.py.
    epochs: str
    next: int
    appended: int
    #: The store's id. None without a store; ``archived`` and ``expired`` are then None too.
    store: str | None
    #: The id that the store had before the stream was resumed.
    store_before: str | None
    #: The store holds the offsets from ``expired`` up to but not including ``archived``.
    archived: int | None
    expired: int | None
    #: Whether the settings come from the ``settings`` hash, which only administrators may write. If
    #: not, the store's address and retention limits are unknown.
    verified: bool

    @property
    def epoch_first(self) -> int:
        """The stream's next offset when the current epoch began."""
        return int(self.epochs.rpartition(":")[2])

    @classmethod
    def parse(cls, name: str, flat: list[bytes], settings: list[bytes]) -> Meta:
        """Parse the replies to HGETALL for ``meta`` and ``settings``.

        ``settings`` is empty if its key does not exist, or if the ACL denies this client the key.

        Raises:
            CorruptStream: The hash is not a stream's meta, or a newer version wrote it.
        """
        fields, guarded = _fields(flat), _fields(settings)
        # Settings from another incarnation do not apply to this stream.
        verified = bool(guarded) and guarded.get("incarnation") == fields.get("incarnation")
        for field in ADMIN_FIELDS if verified else GUARDED_FIELDS:
            fields.pop(field, None)
        if verified:
            fields |= guarded
        version = fields.get("version", LAYOUT_VERSION)
        if version != LAYOUT_VERSION:
            raise CorruptStream(
                f"Stream {name!r} has layout version {version!r}, but this release reads version "
                f"{LAYOUT_VERSION}. To open it, upgrade meteor-py.",
                stream=name,
            )
        try:
            return cls(
                config=StreamConfig.from_fields(fields),
                incarnation=fields["incarnation"],
                epoch=int(fields["epoch"]),
                epochs=fields["epochs"],
                next=int(fields["next"]),
                appended=int(fields["appended"]),
                store=fields.get("store"),
                store_before=fields.get("store_before"),
                archived=int(fields["archived"]) if "store" in fields else None,
                expired=int(fields["expired"]) if "store" in fields else None,
                verified=verified,
            )
        except (KeyError, ValueError) as error:
            raise CorruptStream(
                f"The key {keys.meta(name)!r} is not a stream's meta: {error}.", stream=name
            ) from None


def _fields(flat: list[bytes]) -> dict[str, str]:
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {k.decode(errors="replace"): v.decode(errors="replace") for k, v in pairs}


@dataclass(frozen=True)
class GroupDescription:
    """A snapshot of a subscriber group."""

    name: str
    #: The next offset to process; all records below it are confirmed.
    confirmed: int
    #: Number of records from ``confirmed`` to the end of the stream.
    lag: int
    #: The member that holds the lease; None if no member does, or for a shared group.
    owner: str | None
    #: The number of the last term; 0 if there was none. Each acquisition of the lease starts a new
    #: term.
    term: int
    #: "exclusive": one member reads at a time; "shared": consumers work in parallel.
    kind: Literal["exclusive", "shared"] = "exclusive"
    #: The number of live consumers in a shared group; None for an exclusive group.
    consumers: int | None = None


@dataclass(frozen=True)
class Description:
    """A snapshot of a stream."""

    name: str
    #: Offset of the first readable record; ``next`` if there is none.
    first: int
    #: Offset of the next record to be published.
    next: int
    #: Number of records in the ring.
    length: int
    #: Number of frames in the ring.
    frames: int
    #: The ring's memory in bytes, as the server estimates it; None if the ACL forbids MEMORY USAGE.
    bytes: int | None
    #: Time of the last append in ms since 1970; 0 if there was none.
    appended: int
    #: All records below this offset are in the store; None without a store.
    archived: int | None
    #: The name of the active archiver; None if there is none.
    archiver: str | None
    config: StreamConfig
    incarnation: str
    #: Changes when the server fails over or restarts.
    epoch: int
    #: The stream's next offset when the epoch began. A reader that was already past it has read
    #: records that no longer exist.
    epoch_first: int
    #: The subscriber groups, ordered by name.
    groups: tuple[GroupDescription, ...]


@dataclass(frozen=True)
class RepairReport:
    """The result of ``Stream.repair``: the problems found, and whether they were repaired."""

    stream: str
    #: Number of frames in the ring. A repair keeps all of them.
    frames: int
    #: Number of entries that no publisher wrote, in the log and in the index of ordering keys.
    foreign: int
    #: The IDs of the first hundred foreign entries.
    entries: tuple[str, ...]
    #: Whether an entry beyond the end blocks publishing. The server remembers the ID of such an
    #: entry even after the entry has been deleted.
    blocked: bool
    #: Whether the repair was carried out.
    repaired: bool

    @property
    def healthy(self) -> bool:
        """Whether there was nothing to repair."""
        return not self.foreign and not self.blocked
