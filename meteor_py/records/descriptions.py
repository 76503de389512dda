"""Snapshots of a stream and its groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meteor_py.errors import CorruptStream
from meteor_py.records.config import StreamConfig
from meteor_py.redis import keys

#: The layout of keys and frames that this version writes.
LAYOUT_VERSION = "1"


@dataclass(frozen=True)
class Meta:
    """The hash ``meta`` of a stream, as it was at one moment."""

    config: StreamConfig
    incarnation: str
    epoch: int
    #: The next offset when the epoch began.
    epoch_first: int
    next: int
    appended: int
    #: With a store: its id, what is archived in it, and what of that has expired; else None.
    store: str | None
    #: The id that the store had before the stream was resumed.
    store_before: str | None
    archived: int | None
    expired: int | None

    @classmethod
    def parse(cls, name: str, flat: list[bytes]) -> Meta:
        """From the reply of HGETALL.

        Raises:
            CorruptStream: It is not the meta of a stream, or of a newer version.
        """
        pairs = zip(flat[::2], flat[1::2], strict=True)
        fields = {k.decode(errors="replace"): v.decode(errors="replace") for k, v in pairs}
        version = fields.get("version", LAYOUT_VERSION)
        if version != LAYOUT_VERSION:
            raise CorruptStream(
                f"Stream {name!r} has layout version {version!r}, and this is version "
                f"{LAYOUT_VERSION}; upgrade meteor-py.",
                stream=name,
            )
        try:
            return cls(
                config=StreamConfig.from_fields(fields),
                incarnation=fields["incarnation"],
                epoch=int(fields["epoch"]),
                epoch_first=int(fields.get("epochs", "0").rpartition(":")[2]),
                next=int(fields["next"]),
                appended=int(fields["appended"]),
                store=fields.get("store"),
                store_before=fields.get("store_before"),
                archived=int(fields["archived"]) if "store" in fields else None,
                expired=int(fields["expired"]) if "store" in fields else None,
            )
        except (KeyError, ValueError) as error:
            raise CorruptStream(
                f"The key {keys.meta(name)!r} is not the meta of a stream: {error}.", stream=name
            ) from None


@dataclass(frozen=True)
class GroupDescription:
    """A group, as it was when it was looked at."""

    name: str
    #: The next offset to process; all below are done.
    confirmed: int
    #: Records between that and the end of the stream.
    lag: int
    #: The member that holds the lease; None if no member does, and of a shared group.
    owner: str | None
    #: The number of the last term; 0 if there was none.
    term: int
    #: "exclusive": one member reads at a time; "shared": several share out the records.
    kind: Literal["exclusive", "shared"] = "exclusive"
    #: How many share it, the dead not counted; None if it is not a shared one.
    consumers: int | None = None


@dataclass(frozen=True)
class Description:
    """What a stream is like at one moment."""

    name: str
    #: Offset of the first record that can be read; ``next`` if there is none.
    first: int
    #: Offset that the next record will get.
    next: int
    #: Records in the ring.
    length: int
    #: Frames in the ring.
    frames: int
    #: Memory of the ring in bytes, estimated by the server; None if it will not say.
    bytes: int | None
    #: Time of the last append in ms since 1970, 0 if there was none.
    appended: int
    #: All records below are in the store; None without a store.
    archived: int | None
    #: The member that archives it now; None if no member does, or without a store.
    archiver: str | None
    config: StreamConfig
    incarnation: str
    #: Changes when the server fails over or is restarted.
    epoch: int
    #: Where the epoch began: a reader that was beyond it then has seen records that were lost.
    epoch_first: int
    #: The subscriber groups, by name.
    groups: tuple[GroupDescription, ...]
