"""A stream's internal handle: its identity, settings, server and store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from meteor_py.errors import MeteorError, StoreMismatch, StoreUnavailable, StreamConfigMismatch
from meteor_py.log.catalog import check_settings, create_stream, find_stream, read_meta
from meteor_py.log.log_reader import LogReader
from meteor_py.records.config import (
    OFFSET_MAX,
    STORE_SETTINGS,
    StreamConfig,
    check_choice,
    check_int,
)
from meteor_py.records.descriptions import Meta
from meteor_py.records.frame import entry_span, foreign_entry
from meteor_py.records.position import Position, path_of
from meteor_py.records.times import to_ms
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import Connection
from meteor_py.redis.connector import Connector
from meteor_py.redis.scripts import DESCRIBE_STREAM, OFFSET_AT_TIME, Script
from meteor_py.store.base import RingbufferStore
from meteor_py.store.endpoints import check_endpoint
from meteor_py.store.identity import Store, bind, check_identity, open_store
from meteor_py.store.read_ahead import StoreReadAhead

_T = TypeVar("_T")

_POSITION = ("incarnation", "epoch", "next", "epochs")


class StreamHandle:
    """One incarnation of a stream, for other packages. Users get a ``Stream`` instead.

    Methods that read or change the stream on the server raise ``StreamNotFound`` if the stream was
    deleted, and ``LogTruncated`` if it was recreated.
    """

    def __init__(
        self, connector: Connector, name: str, meta: Meta, store: RingbufferStore | None = None
    ) -> None:
        self.connector = connector
        self.name = name
        self.incarnation = meta.incarnation
        self.config = meta.config
        #: The stream's epochs when this handle was created.
        self.epochs = meta.epochs
        #: The id of the stream's store; None without a store.
        self.store_id = meta.store
        self._verified = meta.verified
        self._store = store  # opened on first use if the user did not pass a store
        #: Groups for which publishers have already logged a warning about dropped records.
        self.overrun_groups: set[str] = set()
        #: The keys of the log and meta, in the order that most scripts expect.
        self.keys = [keys.log(name), keys.meta(name)]

    @property
    def index_keys(self) -> list[str]:
        """The key of the ordering index, if any, for scripts that write or trim the log."""
        return [] if self.config.ordering_key is None else [keys.index(self.name)]

    def adopt_ordering_key(self, ordering_key: str | None) -> None:
        """Adopt the stream's ordering key, if it was added after this handle was opened."""
        if self.config.ordering_key is None and ordering_key is not None:
            self.config = replace(self.config, ordering_key=ordering_key)

    def end(self) -> Position:
        """Return the position after the last record."""
        return self._position(self.connector.call("HMGET", self.keys[1], *_POSITION))

    def bounds(self) -> tuple[int, int]:
        """Return the first offset in the ring or the store, and the end of the stream."""
        meta, _, first = self.snapshot()
        return first_readable(meta, first), meta.next

    def snapshot(self) -> tuple[Meta, int, int]:
        """Return meta, the number of frames, and the first offset in the ring, read atomically.

        The meta includes the settings.
        """
        script_keys = [*self.keys, keys.settings(self.name)]
        flat, frames, first_id, settings = self.connector.run(DESCRIBE_STREAM, script_keys)
        if not flat:
            raise reply_errors.stream_gone(self.name, b"NOSTREAM")
        meta = Meta.parse(self.name, flat, settings)
        if meta.incarnation != self.incarnation:
            raise reply_errors.stream_gone(self.name, b"INCARNATION")
        self.adopt_ordering_key(meta.config.ordering_key)
        return meta, frames, entry_span(self.name, first_id)[0] if first_id else meta.next

    def open_connection(self) -> Connection:
        """Return a new connection to the stream's server. The caller must close it."""
        return self.connector.open_connection(self.name)

    def use(self, work: Callable[[Connection], _T]) -> _T:
        """Call ``work`` with a shared connection to the stream's server; see ``Connector.use``."""
        return self.connector.use(work, self.name)

    def clock(self) -> datetime:
        """Return the current time on the stream's server."""
        seconds, micros = self.use(lambda connection: connection.call("TIME"))
        return datetime.fromtimestamp(int(seconds), UTC) + timedelta(microseconds=int(micros))

    def run(self, script: Script, args: list[Any], script_keys: list[str] | None = None) -> Any:
        """Run a script on the stream and return its reply."""
        reply = self.connector.run(script, script_keys or self.keys, args)
        if reply[0] in (b"NOSTREAM", b"INCARNATION"):
            raise reply_errors.stream_gone(self.name, reply[0])
        return reply

    def reopen(self) -> StreamHandle:
        """Return a handle for the stream's current incarnation.

        The new handle shares the open store, unless the stream now has another store.
        """
        handle = StreamHandle(
            self.connector, self.name, find_stream(self.connector, self.name), self._store
        )
        if handle.store_id != self.store_id:
            handle._store = None
        return handle

    def open_reader(self) -> LogReader:
        """Return a reader positioned at the end of the stream. The caller must close it."""
        connection = self.open_connection()
        try:
            command = ("HMGET", self.keys[1], *_POSITION)
            reply = connection.retry_redirected(connection.call, *command)
            position = self._position(reply)
        except MeteorError:
            connection.close()
            raise
        ahead = None
        if self.store_id is not None:
            ahead = StoreReadAhead(self.find_store, self.check_store, self.name, self.incarnation)
        return LogReader(connection, self.name, position, ahead, reply[3].decode())

    def offset_at(self, time: datetime) -> int:
        """Return the offset of the first record appended at ``time`` or later.

        If there is no such record, return the end offset.

        Raises:
            ValueError: The datetime has no time zone.
            CorruptStream: The log holds an entry that is not a frame.
            StoreMismatch, StoreUnavailable: See ``check_store``.
        """
        reply = self.run(OFFSET_AT_TIME, [self.incarnation, to_ms(time)])
        if reply[0] == b"FOREIGN":
            raise foreign_entry(self.name, reply[1])
        found, ring = int(reply[1]), int(reply[2])
        if self.store_id is None or found > ring or ring == 0:
            return found
        # ``found`` is the first record in the ring; the store may hold earlier matches.
        self.check_store()
        first, archived = self.archived_bounds()
        if first >= min(ring, archived):
            return found
        return self.find_store().locate(self.incarnation, to_ms(time), first, min(ring, archived))

    def resolve(self, to: int | str | datetime) -> tuple[int, bool]:
        """Resolve a seek target to an offset. Also return whether the offset may still move.

        The offset of "earliest" may move. The word means the first record at the time of reading,
        and the ring may drop the current first record before then. If the stream is empty,
        "earliest" means the end, like "latest".

        Raises:
            ValueError: The offset is negative, the word is unknown, or the datetime has no
                time zone.
        """
        if isinstance(to, datetime):
            return self.offset_at(to), False
        if isinstance(to, str):
            check_choice("to", to, ("earliest", "latest"))
            first, end = self.bounds()
            return (first, first < end) if to == "earliest" else (end, False)
        return check_int("to", to, 0, OFFSET_MAX), False

    def find_store(self) -> RingbufferStore:
        """Return the stream's store. Open it by its address if the user did not pass it.

        Raises:
            StoreMismatch: The stream has no store, or another store is at its address.
            StoreUnavailable: The store cannot be reached.
        """
        if self.store_id is None:
            raise reply_errors.no_store(self.name)
        if self._store is None:
            if self.config.store is None:
                raise reply_errors.store_address_unknown(self.name, verified=self._verified)
            check_endpoint(self.config.store, self.name)
            store = open_store(self.config.store, self.name)
            check_identity(store, self.name, self.store_id)
            self._store = store
        return self._store

    def check_store(self) -> None:
        """Check that the store is still at its address: a disk may have been unmounted.

        Raises:
            StoreMismatch: The stream has no store, or its address is unknown.
            StoreUnavailable: The store cannot be reached, or its address now has a different store,
                or none.
        """
        store = self.find_store()
        try:
            check_identity(store, self.name, self.store_id or "")
        except StoreMismatch:
            self.store_id = self.snapshot()[0].store  # changes if another client resumes the stream
            try:
                check_identity(store, self.name, self.store_id or "")
            except StoreMismatch as error:
                raise StoreUnavailable(str(error), stream=self.name) from error

    def archived_bounds(self) -> tuple[int, int]:
        """Return the first offset in the store, and the offset after the last one."""
        fields = ("incarnation", "expired", "archived")
        incarnation, expired, archived = self.connector.call("HMGET", self.keys[1], *fields)
        reply_errors.check_incarnation(self.name, self.incarnation, incarnation)
        return int(expired), int(archived)

    def _position(self, reply: list[Any]) -> Position:
        """Return the end of the stream; raise if its incarnation has changed."""
        reply_errors.check_incarnation(self.name, self.incarnation, reply[0])
        path = path_of(reply[3].decode())
        return Position(self.incarnation, int(reply[1]), int(reply[2]), path)


def open_stream(
    connector: Connector,
    name: str,
    requested: dict[str, Any],
    max_unarchived: int | None = None,
    store: Store | None = None,
    *,
    create: bool | None = None,
    resume: bool = False,
) -> StreamHandle | None:
    """Open or create a stream; see ``Client.stream``.

    ``requested`` has the ``StreamConfig`` settings that the caller passed, except
    ``max_unarchived``.

    Returns:
        The handle; or None if the stream does not exist and the caller passed no ``create``, no
        setting and no store.
    """
    keys.check_name(name)
    if resume and store is None:
        raise ValueError("resume=True continues an archived stream. Pass its store with store=.")
    if create is None and not requested and store is None and max_unarchived is None:
        found = read_meta(connector, name)
        return None if found is None else StreamHandle(connector, name, found)
    config = replace(StreamConfig(), **requested)
    requested = {setting: getattr(config, setting) for setting in requested}
    if max_unarchived is not None:  # its lower limit, the stream's capacity, is not known yet
        requested["max_unarchived"] = check_int("max_unarchived", max_unarchived, 1, OFFSET_MAX)
    backend = None if store is None else open_store(store, name)
    if create is not False:
        created, meta = create_stream(
            connector, name, config, max_unarchived, backend, resume=resume
        )
    else:
        created, meta = False, find_stream(connector, name)
    if meta.store is None and (backend is not None or requested.keys() & set(STORE_SETTINGS)):
        names = ", ".join(f"{setting}=" for setting in ("store", *STORE_SETTINGS))
        raise StreamConfigMismatch(
            f"Stream {name!r} already exists without a store. Open it without {names}, or create "
            "another stream.",
            stream=name,
        )
    check_settings(name, meta, requested)
    if backend is not None:
        bind(backend, name, meta, created=created, resume=resume)
    return StreamHandle(connector, name, meta, backend)


def first_readable(meta: Meta, ring: int) -> int:
    """Return the first readable offset in a stream whose ring starts at ``ring``."""
    # The ring may still hold records that have expired from the store.
    return ring if meta.expired is None else min(ring, meta.expired)
