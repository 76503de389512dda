"""One term of an archiver: gathering records and committing them to the store.

Records are gathered from where the stream is archived up to; when there are enough of them, they
are appended to the store, and then the stream is told, which is the commit. The order makes a
crash at any point harmless: before the commit the stream still has them all, and what lies in the
store from there on does not count.

After a fail-over the old server may live on, and its archiver with it: a lease cannot keep that
one from appending. So the store is given terms that begin with the epoch, which is later on the new
server: whatever the old one appends counts for less. An archiver that sees a later epoch stops.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from meteor_py.archive.config import ArchiverConfig
from meteor_py.errors import (
    CorruptFrame,
    CorruptStream,
    MeteorError,
    RecordsLost,
    ServerRefused,
    UnsupportedFrame,
)
from meteor_py.log.epochs import begin_epoch
from meteor_py.log.log_reader import LogReader
from meteor_py.records.position import Position
from meteor_py.records.record import ARROW_SCHEMA, Chunk, Headers, ListChunk
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import parse_info
from meteor_py.redis.scripts import ADVANCE_ARCHIVED
from meteor_py.runtime.clock import now
from meteor_py.store.base import TERMS
from meteor_py.store.identity import check_identity
from meteor_py.subscribe.lease import Term

if TYPE_CHECKING:
    from meteor_py.log.handle import StreamHandle
    from meteor_py.store.base import RingbufferStore
    from meteor_py.subscribe.group_session import GroupSession

_log = logging.getLogger(__name__)

#: Records that one ``advance_archived`` covers. It trims as many entries, while other clients wait.
_ADVANCE_RECORDS_MAX = 10_000
#: Seconds between two looks at the stream while records are gathered.
_LOOK_S = 0.2
#: Seconds between two looks at the server's memory, and the part of it from which on not to wait.
_MEMORY_S = 1.0
_PRESSURE = 0.8
#: Seconds between two looks at what lies about in the store.
_TIDY_S = 600.0
#: Seconds for which it is certain that no other archiver has moved the end of what counts.
_CERTAIN_S = 60.0


class TermTooLow(Exception):
    """The store already has segments of this epoch in the same or a later term."""

    def __init__(self, term: int) -> None:
        self.term = term


class ArchiveTerm:
    """For one thread; made when a term begins.

    Raises:
        StoreMismatch, StoreUnavailable: The store is another, or cannot be reached.
        TermTooLow: What is appended in this term would not count.
    """

    def __init__(
        self,
        stream: StreamHandle,
        store: RingbufferStore,
        config: ArchiverConfig,
        session: GroupSession,
        term: Term,
    ) -> None:
        self._stream = stream
        self._store = store
        self._config = config
        self._session = session
        self._term = term
        #: Records that were gathered and are not archived yet.
        self.records = 0
        self._gathered: list[Chunk] = []
        self._bytes = 0
        self._since = 0.0  # when the first of them came
        self._looked_at = self._memory_at = 0.0
        self._settings = stream.config
        self._identity = ""
        self._flush = 0
        self._memory_is_short = False
        self._connection = stream.connector.open_connection()
        self._log: LogReader | None = None
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def step(self) -> None:
        """Wait for records, up to a short time, and write a segment if there are enough."""
        assert self._log is not None, "closed"
        self._session.alive_at = now()
        self._look()
        block_s = (
            min(_LOOK_S, self._connection.block_max_s)
            if self.records
            else self._connection.block_max_s
        )
        wanted = max(self._config.segment_records - self.records, 1)
        try:
            chunks = self._log.fetch(self._position, block_s, records=wanted)
        except (CorruptStream, CorruptFrame, UnsupportedFrame, RecordsLost):
            if self.records:
                self._commit()  # what lies before it is whole, and nothing will follow
            raise
        for chunk in chunks:
            if not self.records:
                self._since = time.monotonic()
            self._gathered.append(chunk)
            self.records += len(chunk)
            self._bytes += _size(chunk)
        if self.records and self._is_enough():
            self._commit()
        elif time.monotonic() >= self._tidy_at:
            self._tidy()

    def interrupt(self) -> None:
        """End a wait in another thread."""
        log = self._log
        if log is not None:
            log.interrupt()

    def close(self) -> None:
        self._connection.close()
        if self._log is not None:
            self._log.close()

    # -- beginning -----------------------------------------------------------------------------

    def _begin(self) -> None:
        stream = self._stream
        self._certain_at = now()
        self._begin_epoch()
        fields = ("incarnation", "epoch", "next", "archived", "store")
        reply = self._connection.call("HMGET", keys.meta(stream.name), *fields)
        reply_errors.check_incarnation(stream.name, stream.incarnation, reply[0])
        if reply[3] is None:
            raise reply_errors.no_store(stream.name)
        epoch, end, self._archived = map(int, reply[1:4])
        self._epoch = epoch
        self._identity = reply[4].decode()
        check_identity(self._store, stream.name, self._identity)
        self._store_term = epoch * TERMS + self._term.number
        highest = self._store.bounds(stream.incarnation).term
        if highest >= self._store_term:
            if highest // TERMS > epoch:
                raise reply_errors.store_continued_elsewhere(stream.name)
            raise TermTooLow(highest % TERMS)
        self._tidy()
        position = Position(stream.incarnation, epoch, self._archived)
        self._log = LogReader(stream.connector.open_connection(), stream.name, position)
        self._log.start_term(position, end, keys.ARCHIVERS, self._term.nonce)

    def _begin_epoch(self) -> None:
        """If this is another server than the one that was last written to, say so first."""
        found = self._connection.call("HGET", keys.meta(self._stream.name), "history")
        if found is not None and self._connection.history not in ("", found.decode()):
            begin_epoch(
                self._connection, self._stream.name, self._stream.incarnation, found.decode()
            )

    def _tidy(self) -> None:
        """Put the store in order. Not while its end is in doubt: what counts must not go."""
        self._tidy_at = time.monotonic() + _TIDY_S
        certain_until = self._certain_at + _CERTAIN_S
        try:
            incarnation, number = self._stream.incarnation, self._store_term
            self._store.tidy(incarnation, number, self._archived, lambda: now() < certain_until)
        except MeteorError as error:
            _log.warning("The store cannot be put in order now: %s", error)

    # -- gathering -----------------------------------------------------------------------------

    @property
    def _position(self) -> int:
        """The offset of the next record to gather."""
        return self._archived + self.records

    def _look(self) -> None:
        """Read the stream's settings, and whether a flush was requested."""
        at = time.monotonic()
        if at < self._looked_at + _LOOK_S:
            return
        self._looked_at = at
        fields = ("incarnation", "capacity", "max_unarchived", "flush")
        reply = self._connection.call("HMGET", keys.meta(self._stream.name), *fields)
        reply_errors.check_incarnation(self._stream.name, self._stream.incarnation, reply[0])
        capacity, most, flush = reply[1:]
        self._settings = replace(self._settings, capacity=int(capacity), max_unarchived=int(most))
        self._flush = int(flush or 0)
        if self.records and at >= self._memory_at + _MEMORY_S:
            self._memory_at = at
            self._memory_is_short = self._is_memory_short()

    def _is_memory_short(self) -> bool:
        """Whether the server needs the room."""
        try:
            facts = parse_info(self._connection.call("INFO", "memory"))
        except ServerRefused:
            return False  # this user may not look, or there is no memory to speak of
        most = int(facts.get("maxmemory", 0))
        return most > 0 and int(facts.get("used_memory", 0)) >= _PRESSURE * most

    def _is_enough(self) -> bool:
        assert self._log is not None, "closed"
        end = self._log.end_offset
        caught_up = self._position >= end
        return (
            self.records >= self._config.segment_records
            or (caught_up and self.records >= self._config.segment_limit(self._settings))
            or self._bytes >= self._config.segment_bytes
            or time.monotonic() - self._since >= self._config.segment_age
            or (self._flush > self._archived and self._position >= min(self._flush, end))
            or (caught_up and self._memory_is_short)
        )

    # -- committing ----------------------------------------------------------------------------

    def _commit(self) -> None:
        """Append what was gathered to the store, and tell the stream."""
        batches = [chunk.to_arrow() for chunk in self._gathered]
        table = pa.Table.from_batches(batches, schema=ARROW_SCHEMA)
        end = self._archived + len(table)
        check_identity(self._store, self._stream.name, self._identity)
        if self._store.bounds(self._stream.incarnation).term > self._store_term:
            raise reply_errors.store_continued_elsewhere(self._stream.name)
        self._store.append(self._stream.incarnation, self._store_term, table)
        while self._archived < end:
            self._advance(min(self._archived + _ADVANCE_RECORDS_MAX, end))
        self._gathered = []
        self.records = self._bytes = 0
        self._memory_is_short = False

    def _advance(self, to: int) -> None:
        stream, term = self._stream, self._term
        script_keys = [
            keys.log(stream.name),
            keys.meta(stream.name),
            keys.group(stream.name, keys.ARCHIVERS),
            *stream.index_keys,
        ]
        args: list[Any] = [stream.incarnation, self._connection.history, term.nonce, term.number]
        sent_at = now()
        # The epoch in which this term began; the log reader may have seen a later
        # one. The number under which all was appended begins with it. And never sent twice: a late
        # repeat could find a new epoch.
        reply = self._connection.run(
            ADVANCE_ARCHIVED, script_keys, [*args, self._epoch, self._archived, to]
        )
        if reply[0] == b"OK":
            self._archived, self._certain_at = to, sent_at
            return
        if reply[0] in (b"NOSTREAM", b"INCARNATION"):
            raise reply_errors.stream_gone(stream.name, reply[0])
        if reply[0] == b"FENCED":
            raise reply_errors.lease_lost(stream.name, keys.ARCHIVERS, reply[1])
        if reply[0] == b"HISTORY":
            begin_epoch(self._connection, stream.name, stream.incarnation, reply[1].decode())
        # The next term begins at what is archived now, in what is left of the stream.
        raise MeteorError(f"Stream {stream.name!r} has changed while it was archived.")


def _size(chunk: Chunk) -> int:
    """The bytes of a chunk, about."""
    if isinstance(chunk, ListChunk):
        keys_size = sum(len(key) for key in chunk.keys or () if key)
        headers = sum(len(name) + len(x) for row in chunk.headers or () for name, x in _items(row))
        return sum(map(len, chunk.values)) + keys_size + headers
    return int(chunk.columns.nbytes)


def _items(headers: Headers | None) -> Iterable[tuple[str, bytes]]:
    return headers.items() if headers else ()
