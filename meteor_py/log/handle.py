"""A handle of a stream: what everything that works on one needs of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meteor_py.errors import MeteorError, StoreMismatch, StoreUnavailable
from meteor_py.log.log_reader import LogReader
from meteor_py.records.descriptions import Meta
from meteor_py.records.frame import entry_span
from meteor_py.records.position import Position
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.scripts import DESCRIBE_STREAM, Script
from meteor_py.store.base import RingbufferStore
from meteor_py.store.identity import check_identity, open_store
from meteor_py.store.read_ahead import StoreReadAhead

if TYPE_CHECKING:
    from meteor_py.client import Client
    from meteor_py.stream import Stream

_SEEN = ("incarnation", "epoch", "next")


class StreamHandle:
    """For the other modules; users have a ``Stream``."""

    def __init__(
        self, client: Client, name: str, meta: Meta, store: RingbufferStore | None = None
    ) -> None:
        self.client = client
        self.name = name
        self.incarnation = meta.incarnation
        self.config = meta.config
        self._store_id = meta.store
        self._store = store  # the one that was given; else it is looked for when it is needed
        self._keys = [keys.log(name), keys.meta(name)]
        #: The index, if there is one: for the scripts that write or trim the log.
        self.index_keys = [] if meta.config.ordering_key is None else [keys.index(name)]

    def end(self) -> Position:
        """Where the next record will be; as ``Subscriber.checkpoint``, to be kept outside."""
        return self._seen(self.client.call("HMGET", self._keys[1], *_SEEN))

    def cursor(self) -> LogReader:
        """A place to read from, at the end of the stream."""
        connection = self.client.open_connection()
        try:
            position = self._seen(connection.call("HMGET", self._keys[1], *_SEEN))
        except MeteorError:
            connection.close()
            raise
        if self._store_id is None:
            return LogReader(connection, self.name, position)
        cold = StoreReadAhead(self._find_store, self.check_store, self.name, self.incarnation)
        return LogReader(connection, self.name, position, cold)

    def bounds(self) -> tuple[int, int]:
        """The first offset in the ring or the store, and the end of the stream."""
        meta, _, first = self._look()
        return first_of(meta, first), meta.next

    def _find_store(self) -> RingbufferStore:
        if self._store_id is None:
            raise reply_errors.no_store(self.name)
        if self._store is None:
            if self.config.store is None:
                raise reply_errors.hidden_store(self.name)
            store = open_store(self.config.store, self.name)
            check_identity(store, self.name, self._store_id)
            self._store = store
        return self._store

    def reopened(self) -> Stream:
        """The stream that has this name now, with the store that was given if it is still that."""
        stream = self.client.stream(self.name, create=False)
        if stream._store_id == self._store_id:
            stream._store = self._store
        return stream

    def check_store(self) -> None:
        """Raise unless the store that was found is still there: a disk may not be mounted now."""
        store = self._find_store()
        try:
            check_identity(store, self.name, self._store_id or "")
        except StoreMismatch:
            fields = ("incarnation", "store")
            incarnation, seen = self.client.call("HMGET", self._keys[1], *fields)
            reply_errors.check_incarnation(self.name, self.incarnation, incarnation)
            self._store_id = seen.decode()  # another, if the stream was resumed meanwhile
            try:
                check_identity(store, self.name, self._store_id)
            except StoreMismatch as error:
                raise StoreUnavailable(str(error), stream=self.name) from error

    def _look(self) -> tuple[Meta, int, int]:
        """Meta, the number of frames, and the first offset in the ring, at one instant."""
        flat, frames, first_id = self.client.run(DESCRIBE_STREAM, self._keys)
        if not flat:
            raise reply_errors.gone(self.name, b"NOSTREAM")
        meta = Meta.parse(self.name, flat)
        if meta.incarnation != self.incarnation:
            raise reply_errors.gone(self.name, b"INCARNATION")
        return meta, frames, entry_span(self.name, first_id)[0] if first_id else meta.next

    def _seen(self, answer: list[Any]) -> Position:
        """The end of the stream, if it is still this one."""
        reply_errors.check_incarnation(self.name, self.incarnation, answer[0])
        return Position(self.incarnation, int(answer[1]), int(answer[2]))

    def _run(self, script: Script, args: list[Any], script_keys: list[str] | None = None) -> Any:
        answer = self.client.run(script, script_keys or self._keys, args)
        if answer[0] in (b"NOSTREAM", b"INCARNATION"):
            raise reply_errors.gone(self.name, answer[0])
        return answer


def first_of(meta: Meta, ring: int) -> int:
    """The first offset that can be read, if the ring begins at ``ring``."""
    # Those that have expired may be in the ring still.
    return ring if meta.expired is None else min(ring, meta.expired)
