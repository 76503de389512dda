"""Administration of shared groups: open, describe, purge, resume, check and delete them."""

from __future__ import annotations

import logging
import secrets
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
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

#: Records that are looked at in one step ahead.
_AHEAD = 4_096
#: Ordering keys that are read at a time.
_LIST = 500

_COUNTERS = ("acked", "dead", "lost", "purged", "returned", "reaped")

Condition = Literal["ready", "owned", "delayed", "parked"]


@dataclass(frozen=True)
class Consumer:
    """A consumer of a shared group, as it was when it was looked at."""

    id: str
    #: Host, process, and something of its own.
    name: str
    #: Ordering keys, and records of them, that it holds.
    keys: int
    records: int
    #: Seconds until its lease expires, unless it is renewed. Below 0 it has expired, and the next
    #: consumer that asks for records gets what it holds.
    lease: float


@dataclass(frozen=True)
class KeyState:
    """An ordering key with records that are not settled, as it was when it was looked at."""

    #: The key, or the header, of its records.
    key: bytes
    #: Records that are held or wait.
    count: int
    #: Records that its owner holds.
    acquired: int
    #: Records that wait.
    waiting: int
    #: The name of the consumer that holds records of it; None if it is free.
    owner: str | None
    #: The lowest offset that is not settled.
    oldest: int
    #: "ready" for any consumer, "owned", or stopped: "delayed" or "parked".
    state: Condition


@dataclass(frozen=True)
class SharedDescription:
    """A shared group, as it was when it was looked at."""

    name: str
    config: SharedConfig
    #: All records below are settled.
    confirmed: int
    #: Records between that and the end of the stream.
    lag: int
    #: All records below were looked at: they are settled, held, or wait for their ordering key.
    looked: int
    #: Records that wait for their ordering key, or for a consumer.
    waiting: int
    #: Ordering keys that are free and have records, and those that are delayed or parked.
    ready: int
    blocked: int
    #: Dead letters that are being published.
    dying: int
    #: Records acknowledged, given up, lost, purged and returned since it began.
    acked: int
    dead: int
    lost: int
    purged: int
    returned: int
    #: Consumers that died.
    reaped: int
    #: The last that was lost: first and last offset; None if nothing was.
    lost_last: tuple[int, int] | None
    consumers: tuple[Consumer, ...] = field(default=())


class SharedGroup:
    """One shared group of a stream. Get it with ``stream.shared_group(name)``."""

    def __init__(self, stream: Stream, handle: StreamHandle, name: str) -> None:
        self.stream = stream
        self._handle = handle
        self.name = keys.check_name(name, "group")
        self._protocol = SharedProtocol(handle, name)

    # -- looking -------------------------------------------------------------------------------

    def describe(self) -> SharedDescription:
        """Look at it.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
        """
        protocol = self._protocol
        names = [protocol.meta, *protocol.keys("state ready blocked leases consumers letters")]
        args = [protocol.incarnation, protocol.prefix]
        reply = protocol.check(self._handle.connector.run(SHARED_DESCRIBE, names, args))
        state = _fields(reply[1])
        confirmed, looked, end = int(reply[2]), int(state["next"]), self.stream.end().offset
        flat = reply[6]
        first, _, last = state.get("lost_last", "").partition(":")
        return SharedDescription(
            name=self.name,
            config=SharedConfig.from_fields(state),
            confirmed=confirmed,
            lag=max(end - confirmed, 0),
            looked=looked,
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
        """Return the ordering keys with records that are not settled, by their oldest record.

        Args:
            look_ahead: Look at all records up to the end first, as consumers would. Otherwise keys
                whose records no consumer has looked at yet are not among them.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
            StoreUnavailable: Some of what is to be looked at is only there.
        """
        if look_ahead and not self._look_ahead(self.stream.end().offset):
            _log.warning(
                "As many records wait in shared group %r of stream %r as may, so not all of those "
                "behind them were looked at.",
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
                continue  # settled since
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

    def _summarize(self) -> GroupDescription:
        """Describe it as any group of the stream."""
        found = self.describe()
        consumers = sum(consumer.lease > 0 for consumer in found.consumers)
        return GroupDescription(self.name, found.confirmed, found.lag, None, 0, "shared", consumers)

    @property
    def confirmed(self) -> int:
        """All records below this offset are settled."""
        return self.describe().confirmed

    def fsck(self) -> list[str]:
        """Check the state of the group, and return a sentence for each contradiction.

        Reads all of it at one instant: for a large group the server is busy for a moment. Then
        compares open records with the index, which takes as long as reading that.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
            MeteorError: It changes too fast to be read at one instant.
        """
        return find_flaws(self._protocol)

    # -- changing ------------------------------------------------------------------------------

    def purge(self, key: bytes | str, limit: int | None = None) -> int:
        """Settle waiting records of one ordering key, the oldest first, without processing them.

        What a consumer holds stays with it. Looks ahead up to the end of the stream first.

        Args:
            key: The ordering key.
            limit: At most so many; None for all.

        Returns:
            How many.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
            StoreUnavailable: Some of what is to be looked at is only there.
        """
        name = check_key(key)
        if limit is not None:
            check_int("limit", limit, 1, 2**53)
        end, purged = self.stream.end().offset, 0
        while True:  # ends: with nothing purged there is no more room for what comes behind it
            is_all = self._look_ahead(end)
            count = self._purge_waiting(name, None if limit is None else limit - purged)
            purged += count
            if is_all or not count or purged == limit:
                return purged

    def _purge_waiting(self, name: bytes, limit: int | None) -> int:
        protocol, client = self._protocol, self._handle.connector
        names: list[Any] = [protocol.meta]
        names += protocol.keys("state groups ready blocked delayed failures suspects")
        names += [waiting := protocol.whole(b"waiting:" + name), protocol.key("bell")]
        # Up to an offset, and not so many: that may be repeated when an reply is lost.
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
        """Deliver an ordering key again that is parked or delayed.

        The failures of its first record are forgotten.

        Returns:
            Whether it was stopped.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
        """
        name, protocol = check_key(key), self._protocol
        names: list[Any] = [protocol.meta]
        names += protocol.keys("state groups ready blocked delayed failures")
        names += [protocol.whole(b"waiting:" + name), protocol.key("bell")]
        args = [protocol.incarnation, name, protocol.prefix]
        return bool(protocol.check(self._handle.connector.run(SHARED_RESUME, names, args))[1])

    def delete(self, *, force: bool = False) -> None:
        """Delete it, with what it has settled.

        Args:
            force: Even if it has consumers; their next call raises.

        Raises:
            GroupActive: It has consumers, and ``force`` is False.
            GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
        """
        consumers = [found for found in self.describe().consumers if found.lease > 0]
        if consumers and not force:
            raise GroupActive(
                f"Shared group {self.name!r} of stream {self.stream.name!r} is active: "
                f"{consumers[0].name} is one of {len(consumers)} consumers. Close them first, or "
                "use force=True.",
                stream=self.stream.name,
                group=self.name,
                owner=consumers[0].name,
                shared=True,
            )
        client, state = self._handle.connector, self._protocol.key("state")
        others: list[Any] = sorted(self._protocol.find() - {b"state"})
        names: list[Any] = [state, *map(self._protocol.whole, others)]
        client.run(DELETE_STREAM, names, [client.call("HGET", state, "incarnation") or ""])
        # What a consumer has made in between: now that there is no state, none can make more.
        left = self._protocol.find()
        if left and b"state" not in left:
            client.call("UNLINK", *map(self._protocol.whole, sorted(left)))
        # Last: a crash before this leaves a harmless name, not a group that is not listed.
        client.call("SREM", keys.shared_groups(self.stream.name), self.name)
        if client.call("EXISTS", state):  # it was recreated meanwhile
            client.call("SADD", keys.shared_groups(self.stream.name), self.name)

    def _look_ahead(self, end: int) -> bool:
        """Look at all records below ``end``, as consumers would: then each is known to wait.

        Returns:
            Whether all were looked at; if not, as many wait as may.
        """
        ordering_rule = self.stream.config.ordering_rule
        assert ordering_rule is not None, "else there is no shared group"
        entry: Entry | None = None
        before = -1
        with ExitStack() as opened:
            frames: FrameCache | None = None
            while True:
                reply = self._handle.connector.use(partial(self._look, entry))
                for first, last in reply.lost:
                    _log.warning(
                        "Records %d to %d of stream %r were dropped by the ring before shared "
                        "group %r had processed them, and no store has them.",
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

    def _look(self, entry: Entry | None, connection: Connection) -> StepReply:
        return self._protocol.step(connection, "", 0, want=0, acks={}, entry=entry, scan=_AHEAD)

    def __repr__(self) -> str:
        return f"<SharedGroup {self.name!r} of {self.stream.name!r}>"


def open_shared(
    stream: Stream,
    handle: StreamHandle,
    name: str,
    asked: dict[str, Any],
    start: InitialOffset,
) -> tuple[SharedGroup, SharedConfig]:
    """Create a shared group if it does not exist; compare settings that were given if it does.

    Raises:
        GroupConfigMismatch: It exists with others, or as a group of one reader.
        GroupNotFound: ``start`` is NONE, and it does not exist.
        MeteorError: The stream has no ``ordering_key``.
    """
    shared = SharedGroup(stream, handle, name)
    if stream.config.ordering_key is None:
        raise MeteorError(
            f"Stream {stream.name!r} was created without ordering_key, so it has no shared "
            'groups; create one with client.stream(name, ordering_key="key").'
        )
    config = replace(SharedConfig(), **asked)
    if config.dead_letter == stream.name:
        raise ValueError("The dead letters of a stream cannot go to the stream itself.")
    from_start = start in (InitialOffset.EARLIEST, InitialOffset.AUTO)
    first = str(stream.bounds()[0]) if from_start else ""
    create = "" if start == InitialOffset.NONE else "create"
    args = [stream.incarnation, name, create, first, secrets.token_hex(8)]
    args += [item for pair in config.to_fields().items() for item in pair]
    names = [shared._protocol.meta, shared._protocol.key("state"), keys.shared_groups(stream.name)]
    reply = handle.connector.run(
        SHARED_OPEN, [*names, keys.group(stream.name, name), shared._protocol.key("groups")], args
    )
    if reply[0] == b"EXCLUSIVE":
        raise GroupConfigMismatch(
            f"Stream {stream.name!r} has a group {name!r} for one reader at a time; choose another "
            "name for a shared one.",
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
            f"{setting}={getattr(present, setting)!r}, not {asked[setting]!r}; leave the setting "
            "out, or delete the group first.",
            stream=stream.name,
            group=name,
        )
    return shared, present


def list_shared(stream: StreamHandle) -> list[str]:
    """The names of the shared groups of a stream."""
    members = stream.connector.call("SMEMBERS", keys.shared_groups(stream.name))
    return sorted(name.decode(errors="backslashreplace") for name in members)


def summarize_shared(stream: Stream, handle: StreamHandle) -> list[GroupDescription]:
    """Describe the shared groups of a stream as any groups of it."""
    found: list[GroupDescription] = []
    for name in list_shared(handle):
        try:
            found.append(SharedGroup(stream, handle, name)._summarize())
        except (GroupNotFound, ValueError):
            continue  # deleted since, or a name that is not ours
    return found


def check_key(key: bytes | str) -> bytes:
    """Return an ordering key as bytes."""
    if isinstance(key, str):
        key = key.encode()
    if not isinstance(key, bytes):
        raise TypeError(f"An ordering key must be bytes or str, not {type(key).__name__}.")
    if not 1 <= len(key) <= ORDERING_KEY_BYTES_MAX:
        raise ValueError(
            f"An ordering key has 1 to {ORDERING_KEY_BYTES_MAX} bytes, not {len(key)}."
        )
    return key


def _parse(value: bytes) -> tuple[bytes, int, bytes]:
    """Return owner, records waiting, and state of an ordering key."""
    owner, waiting, stopped, _ = (*value.split(b":"), b"", b"", b"")[:4]
    return owner, int(waiting or 0), stopped


def _fields(flat: list[bytes]) -> dict[str, str]:
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {name.decode(): value.decode(errors="replace") for name, value in pairs}
