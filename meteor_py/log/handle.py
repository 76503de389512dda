"""A handle of one stream: its identity, its settings, and the way to its server and store."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from meteor_py.errors import MeteorError, StoreMismatch, StoreUnavailable, StreamConfigMismatch
from meteor_py.log.catalog import check_settings, create_stream, find_stream
from meteor_py.log.log_reader import LogReader
from meteor_py.records.config import OFFSET_MAX, StreamConfig, check_choice, check_int
from meteor_py.records.descriptions import Meta
from meteor_py.records.frame import entry_span, foreign_entry
from meteor_py.records.position import Position
from meteor_py.records.times import to_ms
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connector import Connector
from meteor_py.redis.scripts import DESCRIBE_STREAM, OFFSET_AT_TIME, Script
from meteor_py.store.base import RingbufferStore
from meteor_py.store.identity import Store, bind, check_identity, open_store
from meteor_py.store.read_ahead import StoreReadAhead

_POSITION = ("incarnation", "epoch", "next")


class StreamHandle:
    """One incarnation of a stream, for the other packages; users have a ``Stream``."""

    def __init__(
        self, connector: Connector, name: str, meta: Meta, store: RingbufferStore | None = None
    ) -> None:
        self.connector = connector
        self.name = name
        self.incarnation = meta.incarnation
        self.config = meta.config
        #: The id of the stream's store; None without a store.
        self.store_id = meta.store
        self._store = store  # as given by the user; otherwise opened when it is first needed
        #: The keys of the log and of meta, as most scripts take them.
        self.keys = [keys.log(name), keys.meta(name)]
        #: The key of the ordering index if there is one, for scripts that write or trim the log.
        self.index_keys = [] if meta.config.ordering_key is None else [keys.index(name)]

    def end(self) -> Position:
        """Return where the next record will be appended."""
        return self._position(self.connector.call("HMGET", self.keys[1], *_POSITION))

    def bounds(self) -> tuple[int, int]:
        """Return the first offset in the ring or the store, and the end of the stream."""
        meta, _, first = self.look()
        return first_readable(meta, first), meta.next

    def look(self) -> tuple[Meta, int, int]:
        """Return meta, the number of frames, and the first offset in the ring, at one instant.

        Raises:
            StreamNotFound, LogTruncated: The stream was deleted, or recreated.
        """
        flat, frames, first_id = self.connector.run(DESCRIBE_STREAM, self.keys)
        if not flat:
            raise reply_errors.stream_gone(self.name, b"NOSTREAM")
        meta = Meta.parse(self.name, flat)
        if meta.incarnation != self.incarnation:
            raise reply_errors.stream_gone(self.name, b"INCARNATION")
        return meta, frames, entry_span(self.name, first_id)[0] if first_id else meta.next

    def run(self, script: Script, args: list[Any], script_keys: list[str] | None = None) -> Any:
        """Run a script of the stream and return its reply.

        Raises:
            StreamNotFound, LogTruncated: The stream was deleted, or recreated.
        """
        reply = self.connector.run(script, script_keys or self.keys, args)
        if reply[0] in (b"NOSTREAM", b"INCARNATION"):
            raise reply_errors.stream_gone(self.name, reply[0])
        return reply

    def reopen(self) -> StreamHandle:
        """Return a handle of the stream that has this name now, keeping its store."""
        handle = StreamHandle(
            self.connector, self.name, find_stream(self.connector, self.name), self._store
        )
        if handle.store_id != self.store_id:
            handle._store = None
        return handle

    # -- places in the stream ------------------------------------------------------------------

    def open_reader(self) -> LogReader:
        """Return a reader that stands at the end of the stream; the caller closes it."""
        connection = self.connector.open_connection()
        try:
            position = self._position(connection.call("HMGET", self.keys[1], *_POSITION))
        except MeteorError:
            connection.close()
            raise
        if self.store_id is None:
            return LogReader(connection, self.name, position)
        ahead = StoreReadAhead(self.find_store, self.check_store, self.name, self.incarnation)
        return LogReader(connection, self.name, position, ahead)

    def offset_at(self, time: datetime) -> int:
        """Return the first offset appended at ``time`` or later; the end if there is none.

        Raises:
            ValueError: The datetime has no timezone.
            StreamNotFound, LogTruncated: The stream was deleted, or recreated.
            CorruptStream: The log holds an entry that is not a frame.
        """
        reply = self.run(OFFSET_AT_TIME, [self.incarnation, to_ms(time)])
        if reply[0] == b"FOREIGN":
            raise foreign_entry(self.name, reply[1])
        found, ring = int(reply[1]), int(reply[2])
        if self.store_id is None or found > ring or ring == 0:
            return found
        # It is the first record of the ring: the store may hold earlier ones appended since then.
        self.check_store()
        first, archived = self.archived_bounds()
        if first >= min(ring, archived):
            return found
        return self.find_store().locate(self.incarnation, to_ms(time), first, min(ring, archived))

    def resolve(self, to: int | str | datetime) -> tuple[int, bool]:
        """Return the offset that a place to seek means now, and whether it means "earliest".

        Raises:
            ValueError: A negative offset, an unknown word, or a datetime without a timezone.
        """
        if isinstance(to, datetime):
            return self.offset_at(to), False
        if isinstance(to, str):
            check_choice("to", to, ("earliest", "latest"))
            first, end = self.bounds()
            return (first, True) if to == "earliest" else (end, False)
        return check_int("to", to, 0, OFFSET_MAX), False

    # -- the store -----------------------------------------------------------------------------

    def find_store(self) -> RingbufferStore:
        """Return the stream's store, opened by its address if the user did not give it.

        Raises:
            StoreMismatch: The stream has no store, or the one at its address is another.
            StoreUnavailable: The store cannot be reached.
        """
        if self.store_id is None:
            raise reply_errors.no_store(self.name)
        if self._store is None:
            if self.config.store is None:
                raise reply_errors.store_address_unknown(self.name)
            store = open_store(self.config.store, self.name)
            check_identity(store, self.name, self.store_id)
            self._store = store
        return self._store

    def check_store(self) -> None:
        """Raise unless the store that was found is still there: a disk may have been unmounted.

        Raises:
            StoreUnavailable: Another store, or none, is at that place now.
        """
        store = self.find_store()
        try:
            check_identity(store, self.name, self.store_id or "")
        except StoreMismatch:
            fields = ("incarnation", "store")
            incarnation, seen = self.connector.call("HMGET", self.keys[1], *fields)
            reply_errors.check_incarnation(self.name, self.incarnation, incarnation)
            self.store_id = seen.decode()  # a new one, if the stream was resumed meanwhile
            try:
                check_identity(store, self.name, self.store_id)
            except StoreMismatch as error:
                raise StoreUnavailable(str(error), stream=self.name) from error

    def archived_bounds(self) -> tuple[int, int]:
        """Return the first offset in the store, and the one after the last.

        Raises:
            StreamNotFound, LogTruncated: The stream was deleted, or recreated.
        """
        fields = ("incarnation", "expired", "archived")
        incarnation, expired, archived = self.connector.call("HMGET", self.keys[1], *fields)
        reply_errors.check_incarnation(self.name, self.incarnation, incarnation)
        return int(expired), int(archived)

    def _position(self, reply: list[Any]) -> Position:
        """Return the end of the stream, if this is still its incarnation."""
        reply_errors.check_incarnation(self.name, self.incarnation, reply[0])
        return Position(self.incarnation, int(reply[1]), int(reply[2]))


def open_stream(
    connector: Connector,
    name: str,
    asked: dict[str, Any],
    max_unarchived: int | None = None,
    store: Store | None = None,
    *,
    create: bool = True,
    resume: bool = False,
) -> StreamHandle:
    """Open a stream, and create it if it does not exist and ``create`` is true.

    Args:
        connector: The way to the server.
        name: The name of the stream.
        asked: Settings of ``StreamConfig`` that the stream must have.
        max_unarchived: One more, which only a stream with a store has.
        store: The store that the stream must have.
        create: Whether to create it.
        resume: Whether a new stream continues the one archived in the store.

    Raises:
        StreamConfigMismatch, StoreMismatch: The stream exists with other settings or another store.
        StreamNotFound: The stream does not exist, and ``create`` is false.
        StoreUnavailable: The store cannot be reached.
    """
    keys.check_name(name)
    config = replace(StreamConfig(), **asked)
    if max_unarchived is not None:  # compared with the stream's capacity once that is known
        asked["max_unarchived"] = check_int("max_unarchived", max_unarchived, 1, OFFSET_MAX)
    backend = None if store is None else open_store(store, name)
    if create:
        created, meta = create_stream(
            connector, name, config, max_unarchived, backend, resume=resume
        )
    else:
        created, meta = False, find_stream(connector, name)
    if meta.store is None and (backend is not None or max_unarchived is not None):
        raise StreamConfigMismatch(
            f"Stream {name!r} exists without a store; open it without one, or create another "
            "stream.",
            stream=name,
        )
    check_settings(name, meta, asked)
    if backend is not None:
        bind(backend, name, meta, created=created, resume=resume)
    return StreamHandle(connector, name, meta, backend)


def first_readable(meta: Meta, ring: int) -> int:
    """Return the first offset that can be read, if the ring begins at ``ring``."""
    # The ring may still hold records that have expired from the store.
    return ring if meta.expired is None else min(ring, meta.expired)
