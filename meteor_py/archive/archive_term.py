"""One term of an archiver: gathering records and committing them to the store.

The archiver gathers records, starting at the stream's ``archived`` offset. When there are enough,
it saves the stream's state, appends the records to the store, and then commits them by advancing
``archived``. A crash at any point is harmless: until the commit, the ring keeps the records, and
readers ignore segments beyond ``archived``. While the archiver appends a large segment, a second
thread gathers records for the next one. ``store/state.py`` explains why a segment ends where a
snapshot of the state was taken, and why the archiver saves the state first.

After a failover, the old server and its archiver may still be running, and no lease stops that
archiver from appending. Term numbers in the store therefore begin with the epoch, which is higher
on the new server. So the new server's segments supersede those of the old one. An archiver that
finds a later epoch in the store appends nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa

from meteor_py.archive.config import ArchiverConfig
from meteor_py.archive.expiry import RetainPolicy
from meteor_py.archive.snapshots import take_snapshot
from meteor_py.errors import (
    AccessDenied,
    CorruptFrame,
    CorruptStream,
    MeteorError,
    RecordsLost,
    ServerRefused,
    UnsupportedFrame,
)
from meteor_py.log.epochs import begin_epoch
from meteor_py.log.handle import StreamHandle
from meteor_py.log.log_reader import LogReader
from meteor_py.log.ring_reader import OwnerChanged
from meteor_py.records.position import Position
from meteor_py.records.record import ARROW_SCHEMA, Chunk, ListChunk
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import parse_info
from meteor_py.redis.scripts import ADVANCE_ARCHIVED
from meteor_py.runtime.clock import now
from meteor_py.runtime.threads import JoinableThread
from meteor_py.store.base import TERMS, RingbufferStore, StatefulStore
from meteor_py.store.identity import check_identity
from meteor_py.store.parquet import ParquetStore
from meteor_py.store.state import StreamState, encode, last_snapshot
from meteor_py.subscribe.group_session import GroupSession
from meteor_py.subscribe.lease import Term

_log = logging.getLogger(__name__)

#: Maximum number of records per ``advance_archived`` call. The call may trim that many entries, and
#: the server serves no other client until the call is done.
_ADVANCE_RECORDS_MAX = 10_000
#: Minimum seconds between two checks of the stream's settings. Once records have been gathered, a
#: fetch waits no longer than this, so that the next check is not late.
_REFRESH_S = 0.2
#: Seconds between two checks of the server's memory, and the fraction of ``maxmemory`` at which
#: memory counts as short.
_MEMORY_S = 1.0
_PRESSURE = 0.8
#: Seconds between two cleanups of the store.
_TIDY_S = 600.0
#: Seconds after a commit, or after the start of the term, during which the archiver may remove or
#: merge segments. Later, what it knows about ``archived`` may be out of date.
_CERTAIN_S = 60.0
#: Maximum number of snapshots to take for a segment if each contains a partial transaction, and the
#: seconds to wait for more of the transaction before the next snapshot.
_SNAPSHOTS = 3
_REST_S = 0.05
#: Maximum number of fetches to reach a snapshot's end, and the maximum distance to that end: a
#: segment's maximum records divided by ``_NEAR``.
_ALIGN_FETCHES = 8
_NEAR = 4
#: After a search that found no small segments to merge, search again after this many commits.
_MERGE_COMMITS = 8
#: Minimum size in bytes of a segment for which a second thread gathers records during the append,
#: and the seconds that the thread pauses if there are no records.
_OVERLAP_BYTES = 1024 * 1024
_NO_RECORDS_S = 0.05
#: Errors which show that the next record cannot be read, and therefore cannot be archived.
_UNREADABLE = (CorruptStream, CorruptFrame, UnsupportedFrame, RecordsLost)
#: Minimum seconds between two checks of an idle stream's state.
_IDLE_S = 1.0


class TermTooLow(Exception):
    """The store already has segments of the same or a later term in this epoch."""

    def __init__(self, term: int) -> None:
        self.term = term


class ArchiveTerm:
    """The work of an archiver during one term. Only ``interrupt`` is thread-safe.

    Raises:
        StreamNotFound: The stream was deleted.
        LogTruncated: The stream was recreated.
        StoreMismatch: The stream has no store, the store belongs to another stream, or another
            server has continued the stream.
        StoreUnavailable: The store cannot be reached.
        TermTooLow: Readers would ignore segments of this term.
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
        #: Deletes expired records from the store. With None, no records expire.
        self.retain_policy: RetainPolicy | None = None
        #: Number of records that were gathered but are not archived yet.
        self.records = 0
        self._gathered: list[Chunk] = []
        self._bytes = 0
        self._since = 0.0  # when the first record in ``_gathered`` was added
        self._refreshed_at = self._memory_at = 0.0
        self._settings = stream.config
        self._identity = ""
        self._flush = 0
        self._memory_is_short = False
        # The store, if it can keep the stream's state and the ACL lets this user read the state;
        # otherwise None.
        self._states = store if isinstance(store, StatefulStore) else None
        # Sorted by ``end``: the last snapshot at or below ``archived``, if known, and all later
        # snapshots.
        self._snapshots: list[StreamState] = []
        self._saved: list[StreamState] = []
        self._until_merge = 0  # commits until the next search for small segments
        self._idle_at = time.monotonic() + self._idle_s
        self._connection = stream.open_connection()
        self._log: LogReader | None = None
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def step(self) -> None:
        """Wait a short time for records, and write a segment if there are enough."""
        assert self._log is not None, "closed"
        self._session.alive_at = now()
        self._refresh()
        self._enforce_retain()
        # The second thread may already have gathered enough records during the last commit.
        if not (self.records and self._is_enough()):
            self._fetch()
        if self.records and self._is_enough():
            self._commit()
            self._until_merge -= 1
        elif self._until_merge <= 0:
            self._merge_small()
        elif time.monotonic() >= self._tidy_at:
            self._tidy()
        elif not self.records and time.monotonic() >= self._idle_at:
            self._save_idle_state()

    def _fetch(self) -> None:
        """Wait a short time for records, and gather them."""
        assert self._log is not None, "closed"
        block_s = self._connection.block_max_s
        if self.records:
            block_s = min(_REFRESH_S, block_s)
        wanted = max(self._config.segment_records - self.records, 1)
        try:
            self._gather(self._log.fetch(self._position, block_s, records=wanted))
        except _UNREADABLE:
            if self.records:
                self._commit()  # save at least the records before the unreadable one
            raise

    def finish(self) -> None:
        """Save the state at the end of the term, if all records are archived."""
        if self.records:
            return
        try:
            self._save_idle_state()
        except MeteorError as error:
            _log.warning("Could not save the state of stream %r: %s", self._stream.name, error)

    def interrupt(self) -> None:
        """Interrupt a wait in another thread."""
        if self._log is not None:
            self._log.interrupt()

    def close(self) -> None:
        self._connection.close()
        if self._log is not None:
            self._log.close()

    # -- starting ------------------------------------------------------------------------------

    def _begin(self) -> None:
        stream, meta, call = self._stream, keys.meta(self._stream.name), self._connection.call
        self._certain_at = now()
        history = call("HGET", meta, "history")
        if history is not None and self._connection.history not in ("", history.decode()):
            # The stream was last written in another replication history. Begin a new epoch first.
            begin_epoch(self._connection, stream.name, stream.incarnation, history.decode())
        reply = call("HMGET", meta, "incarnation", "epoch", "next", "archived", "store")
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
        self._find_last_snapshot()
        position = Position(stream.incarnation, epoch, self._archived)
        self._log = LogReader(stream.open_connection(), stream.name, position)
        self._log.start_term(position, end, keys.ARCHIVERS, self._term.nonce)

    def _tidy(self) -> None:
        """Remove superseded data from the store. Stop once another archiver may have taken over."""
        self._tidy_at = time.monotonic() + _TIDY_S
        certain_until = self._certain_at + _CERTAIN_S
        try:
            incarnation, number = self._stream.incarnation, self._store_term
            self._store.tidy(incarnation, number, self._archived, lambda: now() < certain_until)
        except MeteorError as error:
            _log.warning("Could not remove leftovers from the store: %s", error)

    def _merge_small(self) -> None:
        """Merge a run of small segments. If there is none, search again after some commits."""
        certain_until = self._certain_at + _CERTAIN_S
        merged = False
        if isinstance(self._store, ParquetStore):
            try:
                incarnation, number = self._stream.incarnation, self._store_term
                merged = self._store.merge_small(
                    incarnation, number, self._archived, lambda: now() < certain_until
                )
            except MeteorError as error:
                _log.warning("Could not merge small segments: %s", error)
        self._until_merge = 0 if merged else _MERGE_COMMITS

    # -- gathering -----------------------------------------------------------------------------

    @property
    def _position(self) -> int:
        """The offset of the next record to gather."""
        return self._archived + self.records

    def _gather(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if not self.records:
                self._since = time.monotonic()
            self._gathered.append(chunk)
            self.records += len(chunk)
            self._bytes += _size(chunk)

    def _refresh(self) -> None:
        """Read the stream's settings and the requested flush, and check the server's memory."""
        at = time.monotonic()
        if at < self._refreshed_at + _REFRESH_S:
            return
        self._refreshed_at = at
        fields = ("incarnation", "capacity", "max_unarchived", "flush")
        reply = self._connection.call("HMGET", keys.meta(self._stream.name), *fields)
        reply_errors.check_incarnation(self._stream.name, self._stream.incarnation, reply[0])
        capacity, most, flush = reply[1:]
        self._settings = replace(self._settings, capacity=int(capacity), max_unarchived=int(most))
        self._flush = int(flush or 0)
        if self.records and at >= self._memory_at + _MEMORY_S:
            self._memory_at = at
            self._memory_is_short = self._is_memory_short()

    def _enforce_retain(self) -> None:
        """Delete expired records, unless a later archiver has already appended to the store."""
        policy = self.retain_policy
        if policy is None or not policy.is_due():
            return
        if self._store.bounds(self._stream.incarnation).term <= self._store_term:
            policy.enforce()

    def _is_memory_short(self) -> bool:
        try:
            facts = parse_info(self._connection.call("INFO", "memory"))
        except ServerRefused:
            return False  # the ACL denies INFO, or the server is a fake
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
        """Save the state, append gathered records to the store, then advance ``archived``."""
        self._align()
        end = self._segment_end()
        size = end - self._archived
        taken, _ = _split(self._gathered, size)
        table = pa.Table.from_batches([chunk.to_arrow() for chunk in taken], schema=ARROW_SCHEMA)
        self._check_store()
        self._save_states()
        with self._gathering():
            self._store.append(self._stream.incarnation, self._store_term, table)
        while self._archived < end:
            self._advance(min(self._archived + _ADVANCE_RECORDS_MAX, end))
        _, left = _split(self._gathered, size)
        self._gathered, self.records, self._bytes = [], 0, 0
        self._gather(left)
        self._memory_is_short = False
        self._forget_snapshots()

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Gather more records in a second thread until the block ends, if the segment is large.

        The block must not use the log reader or the gathered records, because the thread uses them.
        """
        if self._bytes < _OVERLAP_BYTES:
            yield
            return
        stop = threading.Event()
        thread = JoinableThread(self._gather_until, f"meteor-gather-{self._stream.name}", stop)
        try:
            thread.start()
            yield
        finally:
            stop.set()
            thread.join()  # the thread ends after its current fetch, which has a timeout

    def _gather_until(self, stop: threading.Event) -> None:
        """Gather up to one more segment of records. Stop early once ``stop`` is set."""
        records = self.records + self._config.segment_records
        size = self._bytes + self._config.segment_bytes
        try:
            while not stop.is_set() and self.records < records and self._bytes < size:
                before = self.records
                if not self._try_gather(0.0, records - before):
                    return
                if self.records == before:
                    stop.wait(_NO_RECORDS_S)
        except (MeteorError, OwnerChanged):
            pass  # the next commit or fetch raises the error

    def _check_store(self) -> None:
        """Raise if the store now belongs to another stream or server, or the epoch has changed."""
        check_identity(self._store, self._stream.name, self._identity)
        if self._store.bounds(self._stream.incarnation).term > self._store_term:
            raise reply_errors.store_continued_elsewhere(self._stream.name)
        if self._log is None or self._log.epoch != self._epoch:
            raise self._changed("EPOCH")  # the records and the snapshots may not match

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
        # Send the epoch in which this term began: the segments' term numbers contain it, and the
        # log reader may have seen a later epoch. Never retry: a delayed copy of the request could
        # arrive in a new epoch.
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
        # Abandon this term. The next one starts at the stream's current ``archived`` offset.
        raise self._changed(reply[0].decode())

    def _changed(self, what: str) -> MeteorError:
        return MeteorError(
            f"Stream {self._stream.name!r} changed while its records were being archived: {what}."
        )

    # -- state ---------------------------------------------------------------------------------

    @property
    def _idle_s(self) -> float:
        return max(self._config.segment_age, _IDLE_S)

    def _find_last_snapshot(self) -> None:
        """Find the last snapshot of earlier terms: this term's state files must also contain it."""
        if self._states is not None:
            incarnation = self._stream.incarnation
            saved, epochs = self._states.load_states(incarnation), self._store.epochs(incarnation)
            found = last_snapshot(self._stream.name, saved, epochs, self._archived)
            self._snapshots = [] if found is None else [found]

    def _take_snapshot(self) -> StreamState | None:
        """Return the stream's current state; None if the ACL denies access to it."""
        try:
            epoch, snapshot = take_snapshot(self._connection, self._stream)
        except AccessDenied as error:
            _log.warning(
                "The state of stream %r is not archived, so resume=True would restore only its "
                "records: %s",
                *(self._stream.name, error),
            )
            self._states = None
            return None
        if epoch != self._epoch:
            raise self._changed("EPOCH")
        return snapshot

    def _align(self) -> None:
        """Take a snapshot, and gather records up to its end if that is near.

        Repeat this a few times if the snapshot contains a partial transaction.
        """
        if self._states is None or self._log is None:
            return
        for attempt in range(_SNAPSHOTS):
            if self._snapshots and self._snapshots[-1].end > self._position:
                return  # the last snapshot was too far ahead: a later segment will reach it
            snapshot = self._take_snapshot()
            if snapshot is None:
                return
            self._snapshots.append(snapshot)
            for _ in range(_ALIGN_FETCHES):
                wanted = snapshot.end - self._position
                is_near = wanted <= max(self._config.segment_records // _NEAR, 1)
                if wanted <= 0 or not is_near or self._bytes >= 2 * self._config.segment_bytes:
                    break
                if not self._try_gather(0.0, wanted):
                    return
            if snapshot.is_whole or attempt == _SNAPSHOTS - 1:
                return
            if not self._try_gather(_REST_S, 1):
                return

    def _try_gather(self, block_s: float, records: int) -> bool:
        """Gather more records; return False if the next one is unreadable. ``step`` reports it."""
        assert self._log is not None, "closed"
        try:
            self._gather(self._log.fetch(self._position, block_s, records=records))
        except _UNREADABLE:
            return False
        return True

    def _segment_end(self) -> int:
        """Return the offset at which the segment ends.

        This is the end of the last snapshot that the gathered records reach, preferably of one
        without a partial transaction. Without such a snapshot, the segment has all of the records.
        """
        reached = [x for x in self._snapshots if self._archived < x.end <= self._position]
        whole = [snapshot for snapshot in reached if snapshot.is_whole]
        return max((snapshot.end for snapshot in whole or reached), default=self._position)

    def _save_states(self) -> None:
        if self._states is not None and self._snapshots != self._saved:
            data = encode(self._snapshots)
            self._states.save_state(self._stream.incarnation, self._store_term, data)
            self._saved = list(self._snapshots)
        self._idle_at = time.monotonic() + self._idle_s

    def _forget_snapshots(self) -> None:
        """Drop all snapshots before the last one at or below ``archived``."""
        before = [x for x in self._snapshots if x.end <= self._archived]
        self._snapshots = before[-1:] + [x for x in self._snapshots if x.end > self._archived]

    def _save_idle_state(self) -> None:
        """If all records are archived, save the state if it has changed, as after a confirm."""
        self._idle_at = time.monotonic() + self._idle_s
        snapshot = None if self._states is None else self._take_snapshot()
        if snapshot is None or snapshot.end != self._archived:
            return
        self._snapshots = [snapshot]
        if self._snapshots != self._saved:
            self._check_store()
            self._save_states()


def _split(chunks: list[Chunk], records: int) -> tuple[list[Chunk], list[Chunk]]:
    """Split chunks after a number of records."""
    taken: list[Chunk] = []
    for index, chunk in enumerate(chunks):
        if records < len(chunk):
            if records:
                taken.append(chunk.slice(0, records))
            return taken, [chunk.slice(records, len(chunk)), *chunks[index + 1 :]]
        taken.append(chunk)
        records -= len(chunk)
    return taken, []


def _size(chunk: Chunk) -> int:
    """Return the approximate size of a chunk in bytes."""
    if not isinstance(chunk, ListChunk):
        return int(chunk.columns.nbytes)
    texts = [*chunk.values, *(key for key in chunk.keys or () if key)]
    rows = [row for row in chunk.headers or () if row]
    headers = sum(len(name) + len(text) for row in rows for name, text in row.items())
    return sum(map(len, texts)) + headers
