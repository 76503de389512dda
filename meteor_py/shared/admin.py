"""Administration of shared groups: open, describe, purge, resume, check and delete them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from meteor_py.errors import (
    GroupActive,
    GroupConfigMismatch,
    GroupNotFound,
    MeteorError,
    RecordsLost,
)
from meteor_py.log.handle import StreamHandle
from meteor_py.records.config import InitialOffset, check_int
from meteor_py.records.descriptions import GroupDescription
from meteor_py.records.ordering_index import ORDERING_KEY_BYTES_MAX, read_entry
from meteor_py.redis import keys
from meteor_py.redis.scripts import (
    DELETE_STREAM,
    SHARED_DESCRIBE,
    SHARED_OPEN,
    SHARED_PURGE,
    SHARED_RESUME,
)
from meteor_py.shared.config import SharedConfig
from meteor_py.shared.frame_cache import FrameCache
from meteor_py.shared.fsck import find_flaws
from meteor_py.shared.group_state import (
    DELAYED,
    NOBODY,
    PARKED,
    KeyEntry,
    Member,
    Progress,
    read_line,
)
from meteor_py.shared.protocol import PORTION, SharedProtocol

if TYPE_CHECKING:
    from meteor_py.stream import Stream

#: Maximum number of index entries to read with one command, because the server runs nothing else
#: during a command.
_ENTRIES = 64
#: Maximum number of chunks of waiting offsets to read with one command, for the same reason.
_CHUNKS = 64
#: Maximum number of records to read from the store at a time, to limit the memory needed.
_STORED = 4_096

_COUNTERS = ("acked", "dead", "lost", "purged", "returned", "reaped")

Condition = Literal["ready", "owned", "delayed", "parked"]


@dataclass(frozen=True)
class Consumer:
    """A snapshot of one consumer in a shared group."""

    id: str
    #: Host, process and a random part.
    name: str
    #: Number of ordering keys whose records it holds. With ``keyless="free"``, each record without
    #: an ordering key counts as one key.
    keys: int
    #: Number of records that it holds.
    records: int
    #: Seconds until its lease expires, unless the consumer renews it. If negative, the lease has
    #: expired, and the held records return to the group once other consumers call the server.
    lease: float


@dataclass(frozen=True)
class KeyState:
    """A snapshot of one ordering key that has unsettled records or is stopped."""

    #: The ordering key itself: the key or header value that its records share. With
    #: ``keyless="free"``, a record without an ordering key is listed under a zero byte and its
    #: offset.
    key: bytes
    #: Number of records that are held or waiting.
    count: int
    #: Number of records that its owner holds.
    acquired: int
    #: Number of waiting records. With ``look_ahead``, also those that no consumer has scanned yet.
    waiting: int
    #: The name of the consumer that owns this key; None if no live consumer does.
    owner: str | None
    #: The lowest offset that waits or that a live consumer holds; -1 if there is none.
    oldest: int
    #: "ready" for any consumer, "owned" by one consumer, or stopped: "delayed" or "parked".
    state: Condition


@dataclass(frozen=True)
class SharedDescription:
    """A snapshot of a shared group."""

    name: str
    config: SharedConfig
    #: All records below this offset are settled.
    confirmed: int
    #: Number of records from ``confirmed`` to the end of the stream.
    lag: int
    #: All records below this offset have been scanned. Each of them is settled, held or waiting, or
    #: is a dead letter that has not been published yet.
    scanned: int
    #: Number of records that wait for their ordering key or for a consumer.
    waiting: int
    #: Number of ordering keys that are free and have waiting records.
    ready: int
    #: Number of ordering keys whose waiting records no consumer can get yet, because the key is
    #: delayed or parked, its owner holds later records, or a consumer has reserved it for a
    #: record's last delivery attempt.
    blocked: int
    #: Number of dead letters that have not been published yet.
    dead_letters_pending: int
    #: Number of records acknowledged since the group was created.
    acked: int
    #: Number of records published as dead letters, or discarded because the group has no
    #: dead-letter stream.
    dead: int
    #: Number of records that were lost or unreadable.
    lost: int
    #: Number of records that ``purge()`` settled.
    purged: int
    #: Number of times that a record returned to the group.
    returned: int
    #: Number of consumers whose leases expired.
    reaped: int
    #: First and last offset of the latest range that a scan found lost or unreadable; None if there
    #: was none. Records lost after a consumer claimed them are not included.
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
        """Return the group's settings, counters and consumers.

        Raises:
            GroupNotFound, StreamNotFound: The group or the stream was deleted.
            LogTruncated: The stream was deleted and recreated.
        """
        found, members = self._describe_all()
        consumers: list[Consumer] = []
        for id, member in members.items():
            batches = self._protocol.batches(id).values()
            owned = {key or offset for batch in batches for offset, key in batch}
            consumers.append(replace(member, keys=len(owned)))
        return replace(found, consumers=tuple(consumers))

    def _describe_all(self) -> tuple[SharedDescription, dict[str, Consumer]]:
        """Return the description without consumers, and the consumers by id, with ``keys`` = 0."""
        found, tick = self._describe()
        members: dict[str, Consumer] = {}
        for portion in self._protocol.scan("HSCAN", "members"):
            for id, raw in portion:
                member = Member.parse(raw)
                if not member.dead:
                    left_s = (member.deadline - tick) / 1000
                    name = id.decode()
                    members[name] = Consumer(name, member.name, 0, member.holding, left_s)
        return found, members

    def _describe(self) -> tuple[SharedDescription, int]:
        """Return the description without consumers, and the lease clock's time in milliseconds."""
        protocol = self._protocol
        names = [protocol.meta, *protocol.keys("meta letters ready blocked unsettled")]
        reply = self._handle.connector.run(SHARED_DESCRIBE, names)
        if b"progress" not in reply[1][::2]:  # a release before 0.3 may have written the group
            protocol.ensure_converted()
            reply = self._handle.connector.run(SHARED_DESCRIBE, names)
        stream, meta, clock, ready, blocked, pending, *firsts = reply
        protocol.check_incarnations(stream[0], dict(_pairs(meta)).get(b"incarnation", b""))
        state = _fields([part for pair in _pairs(meta) for part in pair if pair[0] != b"progress"])
        progress = Progress.parse(dict(_pairs(meta))[b"progress"])
        confirmed = min([progress.next, *(int(float(first[1])) for first in firsts if first)])
        first, _, last = state.get("lost_last", "").partition(":")
        description = SharedDescription(
            name=self.name,
            config=SharedConfig.from_fields(state),
            confirmed=confirmed,
            lag=max(int(stream[1]) - confirmed, 0),
            scanned=progress.next,
            waiting=progress.waiting,
            ready=int(ready),
            blocked=int(blocked),
            dead_letters_pending=int(pending),
            **{counter: getattr(progress, counter) for counter in _COUNTERS},
            lost_last=(int(first), int(last)) if last else None,
        )
        # Add the full time since the last call of any consumer, so that a lease that has run out in
        # the meantime is shown as expired. The server itself ends the lease only after other
        # consumers have called.
        tick = progress.tick + int(clock[0]) * 1000 + int(clock[1]) // 1000 - progress.last
        return description, tick

    def keys(self, *, look_ahead: bool = False) -> list[KeyState]:
        """Return the ordering keys with unsettled records and the stopped keys, oldest first.

        Reads the state in portions, so the result is not a snapshot of a single instant.

        Args:
            look_ahead: If true, include records that no consumer has scanned yet, up to the end of
                the stream. If false, leave them out.

        Raises:
            GroupNotFound, StreamNotFound: The group or the stream was deleted.
            LogTruncated: The stream was deleted and recreated.
            StoreUnavailable: ``look_ahead`` needs the store, which cannot be reached.
            CorruptSegment: ``look_ahead`` found damaged records in the store.
        """
        _, members = self._describe_all()
        held: dict[bytes, list[int]] = {}
        found: dict[bytes, KeyState] = {}
        for id, member in members.items():
            for batch in self._protocol.batches(id).values():
                for offset, key in batch:
                    held.setdefault(key, []).append(offset)
                    if not key:
                        name = b"\0%d" % offset
                        found[name] = KeyState(name, 1, 1, 0, member.name, offset, "owned")
        for portion in self._protocol.scan("HSCAN", "keys"):
            for key, raw in portion:
                if key:  # the empty field is padding
                    state = _key_state(key, KeyEntry.parse(raw), members, held.get(key, []))
                    if state is not None:
                        found[key] = state
        if look_ahead:
            self._look_ahead(found)
        return sorted(found.values(), key=lambda state: (state.oldest, state.key))

    def _look_ahead(self, found: dict[bytes, KeyState]) -> None:
        """Add the records that no consumer has scanned yet, except those that will be purged."""
        description, _ = self._describe()
        portions = self._protocol.scan("ZSCAN", "purges")
        marks = {key: int(float(score)) for portion in portions for key, score in portion}
        for offset, key in self._unscanned(description, description.scanned, None):
            if offset < marks.get(key, 0):
                continue
            known = found.get(key)
            if known is None:
                found[key] = KeyState(key, 1, 0, 1, None, offset, "ready")
            else:
                count, waiting = known.count + 1, known.waiting + 1
                oldest = known.oldest if known.count else offset
                found[key] = replace(known, count=count, waiting=waiting, oldest=oldest)

    def _unscanned(
        self, description: SharedDescription, start: int, end: int | None
    ) -> Iterator[tuple[int, bytes]]:
        """Yield offsets and their keys from ``start`` up to ``end``, or up to the stream's end.

        Reads the index, and the store for records that are not in the index. Leaves out lost
        records.
        """
        call, at = self._handle.connector.call, start
        end = self.stream.end().offset if end is None else end
        config = description.config
        with closing(FrameCache(self._handle)) as frames:
            while at < end:  # terminates, because each round passes at least one record or a gap
                index = keys.index(self.stream.name)
                entries = call("XRANGE", index, f"{at}-0", "+", "COUNT", _ENTRIES)
                rows = [read_entry(*entry) for entry in entries]
                if not rows or rows[0][0] > at:
                    first, found = self._stored_keys(frames, at, rows[0][0] if rows else end)
                    rows, at = [(first, found)], max(at, first)
                for first, found in rows:
                    if first > at:
                        break  # a gap between two entries
                    for offset in range(at, min(first + len(found), end)):
                        key = found[offset - first]
                        if not key:
                            free = config.keyless == "free"
                            key = b"\0%d" % offset if free else config.default_key.encode()
                        yield offset, key
                    at = max(at, first + len(found))

    def _stored_keys(self, frames: FrameCache, at: int, end: int) -> tuple[int, list[bytes]]:
        """Return the ordering keys of records that the store or the ring has, but not the index.

        Returns:
            The first record's offset, and the keys of that record and those after it. If records
            are lost, the offset after the gap, and an empty list.
        """
        rule = self.stream.config.ordering_rule
        assert rule is not None, "a shared group needs an ordering key"
        try:
            chunk = frames.read_stored(at, _STORED)[0]
        except RecordsLost as gap:
            return min(gap.last + 1, end), []
        return chunk.first, rule.keys_of_rows(chunk.to_arrow())

    @property
    def confirmed(self) -> int:
        """All records below this offset are settled."""
        return self._describe()[0].confirmed

    def fsck(self) -> list[str]:
        """Check the group's state, and return one sentence for each contradiction.

        Reads the state in portions, each at a single instant. Contradictions between portions, such
        as wrong counters, are reported only if the group did not change in the meantime.

        Raises:
            GroupNotFound, StreamNotFound: The group or the stream was deleted.
            LogTruncated: The stream was deleted and recreated.
        """
        self._protocol.ensure_converted()
        return find_flaws(self._protocol)

    # -- changing ------------------------------------------------------------------------------

    def purge(self, key: bytes | str, limit: int | None = None) -> int:
        """Settle unprocessed records of one ordering key, the oldest first.

        Records that a consumer holds are not purged. Records that no consumer has scanned yet are
        settled when a consumer scans them; this call reads the index to count them.

        Args:
            key: The ordering key.
            limit: The maximum number of records to purge. None purges all records up to the end of
                the stream.

        Returns:
            The number of records purged, including those that are still to be scanned.

        Raises:
            GroupNotFound, StreamNotFound: The group or the stream was deleted.
            LogTruncated: The stream was deleted and recreated.
            StoreUnavailable: Counting the records needs the store, which cannot be reached.
            CorruptSegment: Records to count are damaged in the store.
        """
        name = _check_key(key)
        if limit is not None:
            check_int("limit", limit, 1, 2**53)
        description, _ = self._describe()
        # The script takes an offset, not a count, so that repeating it after a lost reply is safe.
        end = self._purge_end(description, name, limit)
        protocol = self._protocol
        names: list[Any] = [protocol.meta]
        names += protocol.keys("meta keys waiting ready blocked delayed failures idle purges")
        args = [protocol.incarnation, name, protocol.prefix, end]
        purged, more, scanned = 0, True, -1
        while more:
            reply = protocol.check(self._handle.connector.run(SHARED_PURGE, names, args))
            purged, more = purged + int(reply[1]), bool(reply[2])
            if scanned < 0:
                scanned = max(int(reply[3]), int(reply[4]))
        unscanned = self._unscanned(description, scanned, end)
        return purged + sum(found == name for _, found in unscanned)

    def _purge_end(self, description: SharedDescription, name: bytes, limit: int | None) -> int:
        """Return the offset after the last record to purge."""
        end = self.stream.end().offset
        if limit is None:
            return end
        waiting = self._waiting(name, limit)
        if len(waiting) >= limit:
            return waiting[limit - 1] + 1
        left = limit - len(waiting)
        mark = self._handle.connector.call("ZSCORE", self._protocol.key("purges"), name)
        # Skip records that an earlier purge covers but that were not scanned yet.
        start = max(description.scanned, int(float(mark or 0)))
        for offset, key in self._unscanned(description, start, end):
            left -= key == name
            if not left:
                return offset + 1
        return end

    def _waiting(self, name: bytes, limit: int) -> list[int]:
        """Return at least the first ``limit`` waiting offsets of a key, or all if it has fewer."""
        call = self._handle.connector.call
        raw = call("HGET", self._protocol.key("keys"), name)
        entry = KeyEntry.parse(raw) if raw else KeyEntry(NOBODY, 0, [])
        found, fields = list(entry.waiting), entry.chunks(name)
        while len(found) < limit and (part := list(islice(fields, _CHUNKS))):
            for line in call("HMGET", self._protocol.key("waiting"), *part):
                found += read_line(line or b"")
        return found

    def resume(self, key: bytes | str) -> bool:
        """Make a parked or delayed ordering key available again.

        Also resets the failure count of its first waiting record.

        Returns:
            Whether the key was parked or delayed.

        Raises:
            GroupNotFound, StreamNotFound: The group or the stream was deleted.
            LogTruncated: The stream was deleted and recreated.
        """
        self._protocol.ensure_converted()
        name, protocol = _check_key(key), self._protocol
        names: list[Any] = [protocol.meta]
        names += protocol.keys("meta keys ready blocked delayed failures idle")
        args = [protocol.incarnation, name, protocol.prefix]
        return bool(protocol.check(self._handle.connector.run(SHARED_RESUME, names, args))[1])

    def delete(self, *, force: bool = False) -> None:
        """Delete the group, including the information about which records are settled.

        Args:
            force: Delete it even if it has consumers; their next calls raise ``GroupNotFound``.

        Raises:
            GroupActive: The group has live consumers, and ``force`` is False.
            GroupNotFound, StreamNotFound: The group or the stream was deleted.
            LogTruncated: The stream was deleted and recreated.
        """
        _, members = self._describe_all()
        consumers = [found for found in members.values() if found.lease > 0]
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
        client, meta = self._handle.connector, self._protocol.key("meta")
        self._protocol.find()  # if the user may not list the group's keys, fail before deleting any
        # Delete the meta key first: without it, no script changes or creates a key of the group.
        client.run(DELETE_STREAM, [meta], [client.call("HGET", meta, "incarnation") or ""])
        left = self._protocol.find()
        if b"meta" not in left:
            names = [self._protocol.whole(part) for part in sorted(left)]
            for start in range(0, len(names), PORTION):
                client.call("UNLINK", *names[start : start + PORTION])
        # Remove the name last: a crash before this line leaves a harmless name in the list, and
        # never a group that is not listed.
        client.call("SREM", keys.shared_groups(self.stream.name), self.name)
        if client.call("EXISTS", meta):  # another client has recreated the group
            client.call("SADD", keys.shared_groups(self.stream.name), self.name)

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
        GroupConfigMismatch: The group exists with other settings, or an ordinary group (with one
            reader at a time) has the same name.
        GroupNotFound: The group does not exist, and ``start`` is NONE.
        MeteorError: The stream has no ``ordering_key``.
        ValueError: A setting is invalid, or ``start`` is an offset beyond the end of the stream.
    """
    shared = SharedGroup(stream, handle, name)
    if stream.config.ordering_key is None:
        raise MeteorError(
            f"Stream {stream.name!r} has no ordering key, which shared groups need. Add one with "
            'stream.configure(ordering_key="key").'
        )
    config = SharedConfig(**asked)
    if config.dead_letter == stream.name:
        raise ValueError("A stream cannot receive its own dead letters. Choose another stream.")
    first = ""
    if not isinstance(start, InitialOffset):
        first = str(_check_end(stream, handle.resolve(start)[0]))
    elif start in (InitialOffset.EARLIEST, InitialOffset.AUTO):
        first = str(stream.bounds()[0])
    create = "" if start == InitialOffset.NONE else "create"
    args = [stream.incarnation, name, create, first, secrets.token_hex(8)]
    args += [item for pair in config.to_fields().items() for item in pair]
    protocol = shared._protocol
    names = [protocol.meta, protocol.key("meta"), keys.shared_groups(stream.name)]
    names += [keys.group(stream.name, name), *protocol.keys("keys state")]
    reply = handle.connector.run(SHARED_OPEN, names, args)
    if reply[0] == b"CONVERT":
        protocol.convert()
        reply = handle.connector.run(SHARED_OPEN, names, args)
    if reply[0] == b"EXCLUSIVE":
        raise GroupConfigMismatch(
            f"Stream {stream.name!r} already has a group {name!r} for one reader at a time. Choose "
            "another name for the shared group.",
            stream=stream.name,
            group=name,
        )
    state = _fields(protocol.check(reply)[1])
    protocol.incarnation, protocol.converted = state["incarnation"], True
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
            f"Offset {offset} is beyond the end of stream {stream.name!r}, which ends at {end}."
        )
    return offset


def list_shared(stream: StreamHandle) -> list[str]:
    """Return the names of a stream's shared groups, sorted."""
    members = stream.connector.call("SMEMBERS", keys.shared_groups(stream.name))
    return sorted(name.decode(errors="backslashreplace") for name in members)


def summarize_shared(stream: Stream, handle: StreamHandle) -> list[GroupDescription]:
    """Describe a stream's shared groups in the form that is common to all kinds of groups."""
    summaries: list[GroupDescription] = []
    for name in list_shared(handle):
        try:
            found, members = SharedGroup(stream, handle, name)._describe_all()
        except (GroupNotFound, ValueError):
            continue  # the group was just deleted, or another program added an invalid name
        live = sum(consumer.lease > 0 for consumer in members.values())
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


def _key_state(
    key: bytes, entry: KeyEntry, members: dict[str, Consumer], held: list[int]
) -> KeyState | None:
    if not (entry.held or entry.waiting or entry.stop):
        return None
    owner = members.get(entry.owner.decode(errors="replace"))
    oldest = min([*held, *entry.waiting[:1]], default=-1)
    condition: Condition = "ready" if entry.owner == NOBODY else "owned"
    if entry.stop in (DELAYED, PARKED):
        condition = "delayed" if entry.stop == DELAYED else "parked"
    name = owner.name if owner is not None else None
    count = entry.held + entry.total
    return KeyState(key, count, entry.held, entry.total, name, oldest, condition)


def _pairs(flat: list[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _fields(flat: list[bytes]) -> dict[str, str]:
    pairs = _pairs(flat)
    return {name.decode(): value.decode(errors="replace") for name, value in pairs}
