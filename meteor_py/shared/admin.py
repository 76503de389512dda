"""Shared groups as seen from outside: begin, look at, purge, resume, check and delete them."""

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
from meteor_py.shared.frame_cache import FrameCache
from meteor_py.shared.fsck import find_flaws
from meteor_py.shared.protocol import Answer, Entry, SharedProtocol
from meteor_py.shared.stored_frames import cold_entry

if TYPE_CHECKING:
    from meteor_py.redis.connection import Connection
    from meteor_py.stream import Stream

_log = logging.getLogger(__name__)

#: Records that are looked at in one step ahead.
_AHEAD = 4_096
#: Groups that are asked about in one go.
_LIST = 500

Condition = Literal["ready", "owned", "delayed", "parked"]


@dataclass(frozen=True)
class Consumer:
    """A consumer of a shared group, as it was when it was looked at."""

    id: str
    #: Host, process, and something of its own.
    name: str
    #: Groups, and records of them, that it holds.
    groups: int
    records: int
    #: Seconds until it is taken for dead, unless it is heard of. Below 0 it is dead, and whoever
    #: asks for records next gets what it holds.
    lease: float


@dataclass(frozen=True)
class GroupState:
    """A group of records that are not all settled, as it was when it was looked at."""

    #: Its id: the key, or the header, of its records.
    id: bytes
    #: Records that are held or wait.
    count: int
    #: Records that its owner holds.
    acquired: int
    #: Records that wait.
    waiting: int
    #: The name of the consumer that holds it; None if it is free.
    owner: str | None
    #: The lowest offset that is not settled.
    oldest: int
    #: "ready" for whoever comes, "owned", or stopped: "delayed" or "parked".
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
    #: All records below were looked at: they are settled, held, or wait for their group.
    looked: int
    #: Records that wait for their group, or for a consumer.
    waiting: int
    #: Groups that are free and have records, and those that are delayed or parked.
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
        self.books = SharedProtocol(handle, name)

    # -- looking -------------------------------------------------------------------------------

    def describe(self) -> SharedDescription:
        """Look at it.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
        """
        books = self.books
        names = [books.meta, *books.keys("state ready blocked leases consumers letters")]
        args = [books.incarnation, books.prefix]
        answer = books.check(self._handle.connector.run(SHARED_DESCRIBE, names, args))
        state = _fields(answer[1])
        confirmed, looked, end = int(answer[2]), int(state["next"]), self.stream.end().offset
        flat = answer[6]
        first, _, last = state.get("lost_last", "").partition(":")
        return SharedDescription(
            name=self.name,
            config=SharedConfig.from_fields(state),
            confirmed=confirmed,
            lag=max(end - confirmed, 0),
            looked=looked,
            waiting=int(state["waiting"]),
            ready=int(answer[3]),
            blocked=int(answer[4]),
            dying=int(answer[5]),
            acked=int(state.get("acked", 0)),
            dead=int(state.get("dead", 0)),
            lost=int(state.get("lost", 0)),
            purged=int(state.get("purged", 0)),
            returned=int(state.get("returned", 0)),
            reaped=int(state.get("reaped", 0)),
            lost_last=(int(first), int(last)) if last else None,
            consumers=tuple(
                Consumer(
                    *(flat[i].decode(), flat[i + 1].decode(), int(flat[i + 2]), int(flat[i + 3])),
                    lease=int(flat[i + 4]) / 1000,
                )
                for i in range(0, len(flat), 5)
            ),
        )

    def groups(self, *, look_ahead: bool = False) -> list[GroupState]:
        """The groups with records that are not settled, by their oldest record.

        Args:
            look_ahead: Look at all records up to the end first, as consumers would; else groups
                that only have records which nobody has looked at yet are not among them.

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
        found: list[GroupState] = []
        cursor = b"0"
        while True:
            cursor, flat = self._handle.connector.call(
                "HSCAN", self.books.key("groups"), cursor, "COUNT", _LIST
            )
            values = dict(zip(flat[::2], flat[1::2], strict=True))
            values.pop(b"", None)  # see shared/join.lua
            found += self._states(values, owners)
            if cursor == b"0":
                break
        unique = {state.id: state for state in found}  # HSCAN may tell twice
        return sorted(unique.values(), key=lambda state: (state.oldest, state.id))

    def _states(self, values: dict[bytes, bytes], owners: dict[bytes, str]) -> list[GroupState]:
        books = self.books
        commands: list[tuple[Any, ...]] = []
        parsed = {group: _parse(value) for group, value in values.items()}
        for group, (owner, _, _) in parsed.items():
            commands.append(("LINDEX", books.whole(b"waiting:" + group), 0))
            commands.append(("HGET", books.whole(b"held:" + owner), group))
        answers = self._handle.connector.pipeline(commands) if commands else []
        states: list[GroupState] = []
        for number, (group, (owner, waiting, stopped)) in enumerate(parsed.items()):
            head, held = answers[2 * number : 2 * number + 2]
            offsets = [int(o) for o in held.split(b",")] if held else []
            if not offsets and head is None and not stopped:
                continue  # settled since
            condition: Condition = "owned" if owner else "ready"
            states.append(
                GroupState(
                    id=group,
                    count=len(offsets) + waiting,
                    acquired=len(offsets),
                    waiting=waiting,
                    owner=owners.get(owner) if owner else None,
                    oldest=min([*offsets, *([int(head)] if head is not None else [])], default=-1),
                    state={b"d": "delayed", b"p": "parked"}.get(stopped, condition),  # type: ignore[arg-type]
                )
            )
        return states

    def summary(self) -> GroupDescription:
        """What it has in common with other groups."""
        found = self.describe()
        consumers = sum(consumer.lease > 0 for consumer in found.consumers)
        return GroupDescription(self.name, found.confirmed, found.lag, None, 0, "shared", consumers)

    @property
    def confirmed(self) -> int:
        """All records below this offset are settled."""
        return self.describe().confirmed

    def fsck(self) -> list[str]:
        """Check the books for contradictions, and return a sentence for each; none is fine.

        Reads all of them at one instant: for a large group the server is busy for a moment. Then
        compares open records with the index, which takes as long as it takes to read that.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
            MeteorError: It changes too fast to be read at one instant.
        """
        return find_flaws(self.books)

    # -- changing ------------------------------------------------------------------------------

    def purge(self, group: bytes | str, limit: int | None = None) -> int:
        """Settle waiting records of one group, the oldest first, without processing them.

        What a consumer holds stays with it. Looks ahead up to the end of the stream first.

        Args:
            group: Its id.
            limit: At most so many; None for all.

        Returns:
            How many.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
            StoreUnavailable: Some of what is to be looked at is only there.
        """
        name = check_group(group)
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
        books, client = self.books, self._handle.connector
        names: list[Any] = [books.meta]
        names += books.keys("state groups ready blocked delayed failures suspects")
        names += [waiting := books.whole(b"waiting:" + name), books.key("bell")]
        # Up to an offset, and not so many: that may be repeated when an answer is lost.
        last = client.call("LINDEX", waiting, -1 if limit is None else limit - 1)
        if last is None:
            last = client.call("LINDEX", waiting, -1)
        args = [books.incarnation, name, last, books.prefix]
        purged, more = 0, last is not None
        while more:
            _, count, more = books.check(client.run(SHARED_PURGE, names, args))
            purged += int(count)
        return purged

    def resume(self, group: bytes | str) -> bool:
        """Let a group that is parked, or delayed, go on; its first record starts afresh.

        Returns:
            Whether it was stopped.

        Raises:
            GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
        """
        name, books = check_group(group), self.books
        names: list[Any] = [books.meta]
        names += books.keys("state groups ready blocked delayed failures")
        names += [books.whole(b"waiting:" + name), books.key("bell")]
        args = [books.incarnation, name, books.prefix]
        return bool(books.check(self._handle.connector.run(SHARED_RESUME, names, args))[1])

    def delete(self, *, force: bool = False) -> None:
        """Delete it, with what it has settled.

        Args:
            force: Even if it has consumers; they will be told.

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
            )
        client, state = self._handle.connector, self.books.key("state")
        others: list[Any] = sorted(self.books.find() - {b"state"})
        names: list[Any] = [state, *map(self.books.whole, others)]
        client.run(DELETE_STREAM, names, [client.call("HGET", state, "incarnation") or ""])
        # What a consumer has made in between: now that there is no state, none can make more.
        left = self.books.find()
        if left and b"state" not in left:
            client.call("UNLINK", *map(self.books.whole, sorted(left)))
        # Last: who crashes before leaves a name that is in the way of nobody, and not a group that
        # nobody sees.
        client.call("SREM", keys.shared_groups(self.stream.name), self.name)
        if client.call("EXISTS", state):  # it was begun anew meanwhile
            client.call("SADD", keys.shared_groups(self.stream.name), self.name)

    def _look_ahead(self, end: int) -> bool:
        """Look at all records below ``end``, as consumers would: then each is known to wait.

        Returns:
            Whether all were looked at; if not, as many wait as may.
        """
        grouping = self.stream.config.ordering_rule
        assert grouping is not None, "else there is no shared group"
        entry: Entry | None = None
        before = -1
        with ExitStack() as opened:
            payloads: FrameCache | None = None
            while True:
                answer = self._handle.connector.use(partial(self._look, entry))
                for first, last in answer.lost:
                    _log.warning(
                        "Records %d to %d of stream %r were dropped by the ring before shared "
                        "group %r had processed them, and no store has them.",
                        *(first, last, self.stream.name, self.name),
                    )
                if answer.next >= end:
                    return True
                if answer.next == before and (entry is not None or not answer.cold):
                    return False
                before = answer.next
                if not answer.cold:
                    entry = None
                    continue
                payloads = payloads or opened.enter_context(closing(FrameCache(self._handle)))
                entry = cold_entry(payloads, grouping, answer, entry)

    def _look(self, entry: Entry | None, connection: Connection) -> Answer:
        return self.books.step(connection, "", 0, want=0, acks={}, entry=entry, scan=_AHEAD)

    def __repr__(self) -> str:
        return f"<SharedGroup {self.name!r} of {self.stream.name!r}>"


def open_shared(
    stream: Stream,
    handle: StreamHandle,
    name: str,
    asked: dict[str, Any],
    start: InitialOffset,
) -> tuple[SharedGroup, SharedConfig]:
    """Begin a shared group if it does not exist; compare settings that were given if it does.

    Raises:
        GroupConfigMismatch: It exists with others, or as a group of one reader.
        GroupNotFound: ``start`` is NONE, and it does not exist.
        MeteorError: The stream has no ``ordering_key``.
    """
    shared = SharedGroup(stream, handle, name)
    if stream.config.ordering_key is None:
        raise MeteorError(
            f"Stream {stream.name!r} was created without ordering_key, so it has no groups to "
            'share out; create one with client.stream(name, ordering_key="key").'
        )
    config = replace(SharedConfig(), **asked)
    if config.dead_letter == stream.name:
        raise ValueError("The dead letters of a stream cannot go to the stream itself.")
    first = str(stream.bounds()[0]) if start == InitialOffset.EARLIEST else ""
    create = "" if start == InitialOffset.NONE else "create"
    args = [stream.incarnation, name, create, first, secrets.token_hex(8)]
    args += [item for pair in config.to_fields().items() for item in pair]
    names = [shared.books.meta, shared.books.key("state"), keys.shared_groups(stream.name)]
    answer = handle.connector.run(
        SHARED_OPEN, [*names, keys.group(stream.name, name), shared.books.key("groups")], args
    )
    if answer[0] == b"EXCLUSIVE":
        raise GroupConfigMismatch(
            f"Stream {stream.name!r} has a group {name!r} for one reader at a time; choose another "
            "name for a shared one.",
            stream=stream.name,
            group=name,
        )
    state = _fields(shared.books.check(answer)[1])
    shared.books.incarnation = state["incarnation"]
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
    """What the shared groups of a stream have in common with others."""
    found: list[GroupDescription] = []
    for name in list_shared(handle):
        try:
            found.append(SharedGroup(stream, handle, name).summary())
        except (GroupNotFound, ValueError):
            continue  # deleted since, or a name that is not ours
    return found


def check_group(group: bytes | str) -> bytes:
    """The id of a group, as bytes."""
    if isinstance(group, str):
        group = group.encode()
    if not isinstance(group, bytes):
        raise TypeError(f"A group is named by bytes or str, not {type(group).__name__}.")
    if not 1 <= len(group) <= ORDERING_KEY_BYTES_MAX:
        raise ValueError(
            f"The id of a group has 1 to {ORDERING_KEY_BYTES_MAX} bytes, not {len(group)}."
        )
    return group


def _parse(value: bytes) -> tuple[bytes, int, bytes]:
    """Owner, records waiting, and state of a group."""
    owner, waiting, stopped, _ = (*value.split(b":"), b"", b"", b"")[:4]
    return owner, int(waiting or 0), stopped


def _fields(flat: list[bytes]) -> dict[str, str]:
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {name.decode(): value.decode(errors="replace") for name, value in pairs}
