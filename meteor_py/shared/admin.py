"""Administration of shared groups: open, describe, purge, resume, check and delete them."""

from __future__ import annotations

import logging
import secrets
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from meteor_py.errors import GroupActive, GroupConfigMismatch, GroupNotFound, MeteorError
from meteor_py.log.handle import StreamHandle
from meteor_py.records.config import InitialOffset, check_int
from meteor_py.records.descriptions import GroupDescription
from meteor_py.records.ordering_index import ORDERING_KEY_BYTES_MAX
from meteor_py.redis import keys
from meteor_py.redis.scripts import (
    DELETE_STREAM,
    SHARED_DESCRIBE,
    SHARED_OPEN,
    SHARED_PURGE,
    SHARED_RESUME,
)
from meteor_py.shared.config import SharedConfig
from meteor_py.shared.frame_cache import FrameCache, entry_from_store
from meteor_py.shared.fsck import find_flaws
from meteor_py.shared.protocol import Entry, SharedProtocol, StepReply

if TYPE_CHECKING:
    from meteor_py.redis.connection import Connection
    from meteor_py.stream import Stream

_log = logging.getLogger(__name__)

#: Records that one step scans ahead.
_AHEAD = 4_096
#: Ordering keys that are read at a time.
_LIST = 500

_COUNTERS = ("acked", "dead", "lost", "purged", "returned", "reaped")

Condition = Literal["ready", "owned", "delayed", "parked"]


@dataclass(frozen=True)
class Consumer:
    """A consumer of a shared group at one instant."""

    id: str
    #: Host, process and a random part.
    name: str
    #: Ordering keys that it owns.
    keys: int
    #: Records that it holds.
    records: int
    #: Seconds until its lease expires, unless it is renewed. If negative, the lease has expired,
    #: and the next consumer that asks for records takes its records over.
    lease: float


@dataclass(frozen=True)
class KeyState:
    """An ordering key with unsettled records, at one instant."""

    #: The key or header that its records share.
    key: bytes
    #: Records that are held or waiting.
    count: int
    #: Records that its owner holds.
    acquired: int
    #: Records that are waiting.
    waiting: int
    #: The name of the consumer that holds records of it; None if it is free.
    owner: str | None
    #: The lowest unsettled offset.
    oldest: int
    #: "ready" for any consumer, "owned" by one, or stopped: "delayed" or "parked".
    state: Condition


@dataclass(frozen=True)
class SharedDescription:
    """A shared group at one instant."""

    name: str
    config: SharedConfig
    #: All records below this offset are settled.
    confirmed: int
    #: Records between ``confirmed`` and the end of the stream.
    lag: int
    #: All records below this offset were scanned: they are settled, held or waiting.
    looked: int
    #: Records that wait for their ordering key or for a consumer.
    waiting: int
    #: Ordering keys that are free and have waiting records.
    ready: int
    #: Ordering keys that are delayed or parked and have waiting records.
    blocked: int
    #: Dead letters that are not published yet.
    dying: int
    #: Records acknowledged since the group was created.
    acked: int
    #: Records that became dead letters.
    dead: int
    #: Records that were lost or unreadable.
    lost: int
    #: Records that ``purge()`` settled.
    purged: int
    #: Records that consumers returned, counted once for each time.
    returned: int
    #: Consumers whose leases expired.
    reaped: int
    #: First and last offset of the most recent loss; None if there was none.
    lost_last: tuple[int, int] | None
    consumers: tuple[Consumer, ...] = ()


class SharedGroup:
    """Administration of one shared group, opened with ``stream.shared_group(name)``.

    >>> billing = stream.shared_group("billing")    # doctest: +SKIP
    >>> billing.describe().lag    # doctest: +SKIP
    0
    """

    def __init__(self, stream: Stream, handle: StreamHandle, name: str) -> None:
        self.stream = stream
        self._handle = handle
        self.name = keys.check_name(name, "group")
        self._protocol = SharedProtocol(handle, name)

    # -- reading -------------------------------------------------------------------------------

    def describe(self) -> SharedDescription:
        """Return settings, counters and consumers.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: The group or the stream was deleted.
        """
        protocol = self._protocol
        names = [protocol.meta, *protocol.keys("state ready blocked leases consumers letters")]
        args = [protocol.incarnation, protocol.prefix]
        reply = protocol.check(self._handle.connector.run(SHARED_DESCRIBE, names, args))
        state = _fields(reply[1])
        confirmed, end = int(reply[2]), self.stream.end().offset
        flat = reply[6]
        first, _, last = state.get("lost_last", "").partition(":")
        return SharedDescription(
            name=self.name,
            config=SharedConfig.from_fields(state),
            confirmed=confirmed,
            lag=max(end - confirmed, 0),
            looked=int(state["next"]),
            waiting=int(state["waiting"]),
            ready=int(reply[3]),
            blocked=int(reply[4]),
            dying=int(reply[5]),
            **{counter: int(state.get(counter, 0)) for counter in _COUNTERS},
            lost_last=(int(first), int(last)) if last else None,
            consumers=tuple(
                Consumer(
                    *(flat[i].decode(), flat[i + 1].decode(), int(flat[i + 2]), int(flat[i + 3])),
                    lease=int(flat[i + 4]) / 1000,
                )
                for i in range(0, len(flat), 5)
            ),
        )

    def keys(self, *, look_ahead: bool = False) -> list[KeyState]:
        """Return the ordering keys that have unsettled records, sorted by their oldest record.

        Args:
            look_ahead: If true, first scan all records up to the end of the stream, as consumers
                would. If false, keys whose records no consumer has scanned yet are missing.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: The group or the stream was deleted.
            StoreUnavailable: Records to scan are in the store, which cannot be read.
        """
        if look_ahead and not self._scan_until(self.stream.end().offset):
            _log.warning(
                "Shared group %r of stream %r has as many waiting records as it may have, so later "
                "records were not scanned.",
                *(self.name, self.stream.name),
            )
        owners = {consumer.id.encode(): consumer.name for consumer in self.describe().consumers}
        found: list[KeyState] = []
        cursor = b"0"
        while True:
            cursor, flat = self._handle.connector.call(
                "HSCAN", self._protocol.key("groups"), cursor, "COUNT", _LIST
            )
            values = dict(zip(flat[::2], flat[1::2], strict=True))
            values.pop(b"", None)  # see shared/join.lua
            found += self._states(values, owners)
            if cursor == b"0":
                break
        unique = {state.key: state for state in found}  # HSCAN may return a field twice
        return sorted(unique.values(), key=lambda state: (state.oldest, state.key))

    def _states(self, values: dict[bytes, bytes], owners: dict[bytes, str]) -> list[KeyState]:
        protocol = self._protocol
        commands: list[tuple[Any, ...]] = []
        parsed = {key: _parse(value) for key, value in values.items()}
        for key, (owner, _, _) in parsed.items():
            commands.append(("LINDEX", protocol.whole(b"waiting:" + key), 0))
            commands.append(("HGET", protocol.whole(b"held:" + owner), key))
        replies = self._handle.connector.pipeline(commands) if commands else []
        states: list[KeyState] = []
        for number, (key, (owner, waiting, stopped)) in enumerate(parsed.items()):
            head, held = replies[2 * number : 2 * number + 2]
            offsets = [int(o) for o in held.split(b",")] if held else []
            if not offsets and head is None and not stopped:
                continue  # settled meanwhile
            condition: Condition = "owned" if owner else "ready"
            states.append(
                KeyState(
                    key=key,
                    count=len(offsets) + waiting,
                    acquired=len(offsets),
                    waiting=waiting,
                    owner=owners.get(owner) if owner else None,
                    oldest=min([*offsets, *([int(head)] if head is not None else [])], default=-1),
                    state={b"d": "delayed", b"p": "parked"}.get(stopped, condition),  # type: ignore[arg-type]
                )
            )
        return states

    @property
    def confirmed(self) -> int:
        """All records below this offset are settled."""
        return self.describe().confirmed

    def fsck(self) -> list[str]:
        """Check the state of the group, and return one sentence for each contradiction.

        Reads the whole state at one instant, which keeps the server busy for a moment if the group
        is large. Then reads the index wherever records are unsettled, to compare ordering keys.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: The group or the stream was deleted.
            MeteorError: The state changes too fast to be read at one instant.
        """
        return find_flaws(self._protocol)

    # -- changing ------------------------------------------------------------------------------

    def purge(self, key: bytes | str, limit: int | None = None) -> int:
        """Settle waiting records of one ordering key, the oldest first, without processing them.

        First scans the stream to its end. Records that a consumer holds are not purged.

        Args:
            key: The ordering key.
            limit: The most records to purge; None = all.

        Returns:
            The number of records purged.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: The group or the stream was deleted.
            StoreUnavailable: Records to scan are in the store, which cannot be read.
        """
        name = _check_key(key)
        if limit is not None:
            check_int("limit", limit, 1, 2**53)
        end, purged = self.stream.end().offset, 0
        while True:  # ends: a round that purges nothing makes no room to scan further
            scanned_all = self._scan_until(end)
            count = self._purge_waiting(name, None if limit is None else limit - purged)
            purged += count
            if scanned_all or not count or purged == limit:
                return purged

    def _purge_waiting(self, name: bytes, limit: int | None) -> int:
        protocol, client = self._protocol, self._handle.connector
        names: list[Any] = [protocol.meta]
        names += protocol.keys("state groups ready blocked delayed failures suspects")
        names += [waiting := protocol.whole(b"waiting:" + name), protocol.key("bell")]
        # The script takes an offset, not a count, so that repeating it after a lost reply is safe.
        last = client.call("LINDEX", waiting, -1 if limit is None else limit - 1)
        if last is None:
            last = client.call("LINDEX", waiting, -1)
        args = [protocol.incarnation, name, last, protocol.prefix]
        purged, more = 0, last is not None
        while more:
            _, count, more = protocol.check(client.run(SHARED_PURGE, names, args))
            purged += int(count)
        return purged

    def resume(self, key: bytes | str) -> bool:
        """Make a parked or delayed ordering key available again.

        Also resets the failure count of its first record.

        Returns:
            Whether the key was parked or delayed.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: The group or the stream was deleted.
        """
        name, protocol = _check_key(key), self._protocol
        names: list[Any] = [protocol.meta]
        names += protocol.keys("state groups ready blocked delayed failures")
        names += [protocol.whole(b"waiting:" + name), protocol.key("bell")]
        args = [protocol.incarnation, name, protocol.prefix]
        return bool(protocol.check(self._handle.connector.run(SHARED_RESUME, names, args))[1])

    def delete(self, *, force: bool = False) -> None:
        """Delete the group, and with it the knowledge of which records are settled.

        Args:
            force: Delete it even if it has consumers; their next calls raise ``GroupNotFound``.

        Raises:
            GroupActive: The group has consumers, and ``force`` is false.
            GroupNotFound, StreamNotFound, LogTruncated: The group or the stream was deleted.
        """
        consumers = [found for found in self.describe().consumers if found.lease > 0]
        if consumers and not force:
            raise GroupActive(
                f"Shared group {self.name!r} of stream {self.stream.name!r} is active: "
                f"{consumers[0].name} is one of {len(consumers)} consumers. Close them, or use "
                "force=True.",
                stream=self.stream.name,
                group=self.name,
                owner=consumers[0].name,
                shared=True,
            )
        client, state = self._handle.connector, self._protocol.key("state")
        others: list[Any] = sorted(self._protocol.find() - {b"state"})
        names: list[Any] = [state, *map(self._protocol.whole, others)]
        client.run(DELETE_STREAM, names, [client.call("HGET", state, "incarnation") or ""])
        # Keys that a consumer created in between. Without the state no consumer can create more.
        left = self._protocol.find()
        if left and b"state" not in left:
            client.call("UNLINK", *map(self._protocol.whole, sorted(left)))
        # Last: a crash before this leaves a harmless name, not a group that is not listed.
        client.call("SREM", keys.shared_groups(self.stream.name), self.name)
        if client.call("EXISTS", state):  # the group was recreated meanwhile
            client.call("SADD", keys.shared_groups(self.stream.name), self.name)

    def _scan_until(self, end: int) -> bool:
        """Scan all records below ``end``, as consumers would, into the waiting lists of their keys.

        Returns:
            Whether all were scanned; False if as many records are waiting as may.
        """
        ordering_rule = self.stream.config.ordering_rule
        assert ordering_rule is not None, "a shared group needs one"
        entry: Entry | None = None
        before = -1

        def scan(connection: Connection) -> StepReply:
            return self._protocol.step(connection, "", 0, want=0, acks={}, entry=entry, scan=_AHEAD)

        with ExitStack() as opened:
            frames: FrameCache | None = None
            while True:
                reply = self._handle.connector.use(scan)
                for first, last in reply.lost:
                    _log.warning(
                        "The ring dropped records %d to %d of stream %r before shared group %r had "
                        "processed them, and no store has them.",
                        *(first, last, self.stream.name, self.name),
                    )
                if reply.next >= end:
                    return True
                if reply.next == before and (entry is not None or not reply.stored_stop):
                    return False
                before = reply.next
                if not reply.stored_stop:
                    entry = None
                    continue
                frames = frames or opened.enter_context(closing(FrameCache(self._handle)))
                entry = entry_from_store(frames, ordering_rule, reply, entry)

    def __repr__(self) -> str:
        return f"<SharedGroup {self.name!r} of {self.stream.name!r}>"


def open_shared(
    stream: Stream,
    handle: StreamHandle,
    name: str,
    asked: dict[str, Any],
    start: InitialOffset | int | datetime,
) -> tuple[SharedGroup, SharedConfig]:
    """Create a shared group, or open the existing one if the requested settings match it.

    Raises:
        GroupConfigMismatch: It exists with other settings, or as a group with one active reader.
        GroupNotFound: It does not exist, and ``start`` is NONE.
        MeteorError: The stream has no ``ordering_key``.
        ValueError: ``start`` is an offset beyond the end.
    """
    shared = SharedGroup(stream, handle, name)
    if stream.config.ordering_key is None:
        raise MeteorError(
            f"Stream {stream.name!r} was created without ordering_key, so it cannot have shared "
            'groups. Create a stream with client.stream(name, ordering_key="key").'
        )
    config = SharedConfig(**asked)
    if config.dead_letter == stream.name:
        raise ValueError("The dead letters of a stream cannot go to the stream itself.")
    first = ""
    if not isinstance(start, InitialOffset):
        first = str(_check_end(stream, handle.resolve(start)[0]))
    elif start in (InitialOffset.EARLIEST, InitialOffset.AUTO):
        first = str(stream.bounds()[0])
    create = "" if start == InitialOffset.NONE else "create"
    args = [stream.incarnation, name, create, first, secrets.token_hex(8)]
    args += [item for pair in config.to_fields().items() for item in pair]
    names = [shared._protocol.meta, shared._protocol.key("state"), keys.shared_groups(stream.name)]
    reply = handle.connector.run(
        SHARED_OPEN, [*names, keys.group(stream.name, name), shared._protocol.key("groups")], args
    )
    if reply[0] == b"EXCLUSIVE":
        raise GroupConfigMismatch(
            f"Stream {stream.name!r} already has a group {name!r} for one reader at a time. Choose "
            "another name for the shared group.",
            stream=stream.name,
            group=name,
        )
    state = _fields(shared._protocol.check(reply)[1])
    shared._protocol.incarnation = state["incarnation"]
    present = SharedConfig.from_fields(state)
    setting = present.differing(asked)
    if setting is not None:
        raise GroupConfigMismatch(
            f"Shared group {name!r} of stream {stream.name!r} exists with "
            f"{setting}={getattr(present, setting)!r}, not {asked[setting]!r}. Omit {setting}, or "
            "delete the group first.",
            stream=stream.name,
            group=name,
        )
    return shared, present


def _check_end(stream: Stream, offset: int) -> int:
    end = stream.end().offset
    if offset > end:
        raise ValueError(
            f"Offset {offset} is beyond the end of stream {stream.name!r}, which is {end}."
        )
    return offset


def list_shared(stream: StreamHandle) -> list[str]:
    """Return the names of a stream's shared groups, sorted."""
    members = stream.connector.call("SMEMBERS", keys.shared_groups(stream.name))
    return sorted(name.decode(errors="backslashreplace") for name in members)


def summarize_shared(stream: Stream, handle: StreamHandle) -> list[GroupDescription]:
    """Describe a stream's shared groups in the form that all kinds of groups have."""
    summaries: list[GroupDescription] = []
    for name in list_shared(handle):
        try:
            found = SharedGroup(stream, handle, name).describe()
        except (GroupNotFound, ValueError):
            continue  # deleted meanwhile, or not a name that this library wrote
        live = sum(consumer.lease > 0 for consumer in found.consumers)
        summaries.append(
            GroupDescription(name, found.confirmed, found.lag, None, 0, "shared", live)
        )
    return summaries


def _check_key(key: bytes | str) -> bytes:
    if isinstance(key, str):
        key = key.encode()
    if not isinstance(key, bytes):
        raise TypeError(f"An ordering key must be bytes or str, not {type(key).__name__}.")
    if not 1 <= len(key) <= ORDERING_KEY_BYTES_MAX:
        raise ValueError(
            f"An ordering key must have 1 to {ORDERING_KEY_BYTES_MAX} bytes, not {len(key)}."
        )
    return key


def _parse(value: bytes) -> tuple[bytes, int, bytes]:
    """Return owner, records waiting, and state of an ordering key."""
    owner, waiting, stopped, _ = (*value.split(b":"), b"", b"", b"")[:4]
    return owner, int(waiting or 0), stopped


def _fields(flat: list[bytes]) -> dict[str, str]:
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {name.decode(): value.decode(errors="replace") for name, value in pairs}
