"""Reading a stream as one log: from its ring, or from its store for records the ring has dropped.

A fetch asks for frames and then, in the same pipeline, for the stream's incarnation, epoch and
end, and in a group for the nonce of its owner. The server replies to these after the frames, and a
new epoch begins before anything is written in it. So the records belong to the epoch in the reply,
or to an older one, and the group still had the same owner when they were read.

The reader reads the store in the same order: first the records, then meta. The ring drops no record
before it is archived, and ``archived`` is read after the ring, so a record that is missing from the
ring is in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meteor_py.errors import MeteorError, RecordsLost
from meteor_py.log.ring_reader import RingReader
from meteor_py.log.store_reader import StoreReader
from meteor_py.records.frame import decode, entry_span
from meteor_py.records.position import Position, diverged_at, epoch_of, path_of
from meteor_py.records.record import Chunk
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import Connection
from meteor_py.store.read_ahead import StoreReadAhead

_FIELDS = ("incarnation", "epoch", "next")


class LogReader:
    """Fetches records from any offset of a stream, and detects missing ones.

    The caller owns the offset. The reader knows the incarnation and epoch to which all records
    fetched so far belong, and owns its connection. For one thread at a time.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        at: Position,
        store: StoreReadAhead | None = None,
        epochs: str = "",
    ) -> None:
        self._stream = stream
        self._incarnation = at.incarnation
        self._store = None if store is None else StoreReader(store, stream, at.epoch)
        fields = _FIELDS if store is None else (*_FIELDS, *StoreReader.FIELDS)
        self._ring = RingReader(connection, stream, fields)
        #: The epoch of the stream to which everything fetched so far belongs.
        self.epoch = at.epoch
        self._epochs = epochs  # the epochs up to that one, as in meta; empty if unknown
        #: The same epochs, in the form used in positions.
        self.path = path_of(epochs)
        #: The end of the stream as of the last reply.
        self.end_offset = at.offset

    @property
    def block_max_s(self) -> float:
        """See ``Connection.block_max_s``."""
        return self._ring.connection.block_max_s

    def position(self, offset: int) -> Position:
        """Return ``offset`` together with the incarnation and epoch in which it was read."""
        return Position(self._incarnation, self.epoch, offset, self.path)

    def epoch_of(self, offset: int) -> int:
        """Return the number of the epoch in which a fetched record was appended."""
        return epoch_of(self._epochs, offset) if self._epochs else self.epoch

    def fetch(
        self, offset: int, block_s: float = 0.0, *, records: int, anywhere: bool = False
    ) -> list[Chunk]:
        """Return consecutive records from ``offset`` on.

        Returns no records if ``block_s`` seconds have passed, or if the stream changed during the
        read.

        Args:
            offset: Offset of the first record wanted, at most the end of the stream.
            block_s: Seconds to wait for a record if there is none.
            records: How many records are wanted. This is a hint: the result may hold more.
            anywhere: Begin with the first existing record if the one at ``offset`` is gone.

        Raises:
            OwnerChanged: The group has another nonce, so another member reads for it.
            RecordsLost: The record is no longer in the ring or in the store.
            LogTruncated: The server lost records below ``offset``.
            StreamNotFound: The stream was deleted.
            CorruptFrame, UnsupportedFrame, CorruptStream: See ``frame.decode``.
            ConnectionFailed: The server did not reply.
        """
        while True:
            try:
                return self._fetch(offset, block_s, records, anywhere)
            except RecordsLost as lost:
                expired = 0 if self._store is None else self._store.expired
                if not anywhere or lost.last >= expired:
                    raise
                offset = lost.last + 1  # these records expired, so the first existing one has moved

    def _fetch(self, offset: int, block_s: float, records: int, anywhere: bool) -> list[Chunk]:
        store = self._store
        if store is not None and store.holds(offset):
            try:
                return self._fetch_from_store(store, offset)
            except RecordsLost:
                pass  # the ring may exceed its capacity and hold this record or later ones
        epoch, known_end = self.epoch, self.end_offset
        if offset < known_end:
            block_s = 0.0  # the record is in the ring or the store, or lost: do not wait
        entries, meta = self._ring.fetch(offset, block_s, records)
        self._check(meta, self.position(offset))
        if epoch != self.epoch or known_end > self.end_offset:
            known_end = 0  # a failover: the log may end before that, and offsets are reused
        found = entry_span(self._stream, entries[0][0])[0] if entries else self.end_offset
        if found > offset and store is not None and offset < store.archived:
            store.ring_start = found
            return self._fetch_from_store(store, offset)
        if not entries:
            if known_end > offset and not anywhere:
                raise self._lost(offset, known_end - 1)  # all of these records did exist
            return []
        if found > offset and not anywhere:
            raise self._lost(offset, found - 1)
        chunks = decode(self._stream, entries)
        if found < offset:
            chunks[0] = chunks[0].slice(offset - found, len(chunks[0]))
        whole = _without_holes(chunks)
        self._ring.read_ahead(whole[-1].first + len(whole[-1]), self.end_offset)
        return whole

    def _fetch_from_store(self, store: StoreReader, offset: int) -> list[Chunk]:
        """Fetch from the store. Returns no records if the stream changed meanwhile."""
        self._ring.forget_ahead()  # its replies do not show the current state
        epoch, archived = store.epoch, store.archived
        chunks: list[Chunk] = []
        failure: MeteorError | None = None
        try:
            chunks.append(store.read(offset, self._epochs))
        except MeteorError as error:
            failure = error
        self._check(self._ring.read_meta(guarded=True), self.position(offset))
        if store.epoch != epoch or store.archived < archived:
            store.forget()
            return []  # the records may be on a branch that a failover discarded
        if failure is not None:
            raise failure
        return chunks

    def read_columns(self, columns: Sequence[str]) -> None:
        """Read only these columns from the store from now on.

        The ring always sends whole frames. In ``Chunk.to_arrow()``, unread columns are null, except
        the offset.
        """
        if self._store is not None:
            self._store.read_columns(columns)

    def seek(self, offset: int) -> None:
        """Prepare to read from ``offset`` on, in the current epoch.

        Raises:
            ValueError: ``offset`` is beyond the end.
        """
        self._ring.forget_ahead()
        meta = self._ring.read_meta(guarded=False)
        epoch, epochs = self.epoch, self._epochs
        self._check(meta, self.position(0))
        if offset > self.end_offset:
            self._enter(epoch, epochs)  # the caller's offset has not changed
            raise ValueError(
                f"Offset {offset} is beyond the end of stream {self._stream!r}, which is "
                f"{self.end_offset}. Seek to at most {self.end_offset}."
            )

    def resume(self, position: Position) -> None:
        """Prepare to read from a position that the application has stored.

        Raises:
            LogTruncated: The server has lost records before that position.
            StreamNotFound: The stream was deleted.
        """
        self._ring.forget_ahead()
        meta = self._ring.read_meta(guarded=False)
        self._check(meta, position)
        self._incarnation = position.incarnation

    def start_term(self, start: Position, end_offset: int, group: str, nonce: str) -> None:
        """Prepare to read at the start of a new lease term, which the server has just granted.

        From now on, each fetch checks that the group still has that nonce.
        """
        self._ring.forget_ahead()
        if start.epoch != self.epoch:
            self._enter(start.epoch, "")
        self._incarnation = start.incarnation
        self.end_offset = end_offset
        if self._store is not None:
            self._store.archived = 0  # unknown, because the epoch may be a new one
        self._ring.guard = (keys.group(self._stream, group), nonce.encode())

    def interrupt(self) -> None:
        """End a wait in another thread."""
        self._ring.connection.interrupt()

    def close(self) -> None:
        self._ring.connection.close()
        if self._store is not None:
            self._store.close()

    def _check(self, meta: list[Any], position: Position) -> None:
        """Compare a position with meta; raise if the server has lost records below it."""
        reply_errors.check_incarnation(
            *(self._stream, position.incarnation, meta[0], position.offset - 1),
            data_lost=self._ring.connection.data_lost,
        )
        epoch, end_offset = int(meta[1]), int(meta[2])
        same_epoch = self.epoch == position.epoch == epoch
        if not (same_epoch and self._epochs) or end_offset < position.offset:
            epochs = self._ring.epochs()
            first = diverged_at(position, epochs, end_offset)
            if first is not None:
                raise reply_errors.log_truncated(self._stream, first, position.offset - 1)
            self._enter(epoch, epochs)
        self.end_offset = end_offset
        if self._store is not None:
            self._store.update(epoch, end_offset, meta[3:6])

    def _enter(self, epoch: int, epochs: str) -> None:
        self.epoch, self._epochs, self.path = epoch, epochs, path_of(epochs)

    def _lost(self, first: int, last: int) -> RecordsLost:
        return RecordsLost(
            f"Records {first} to {last} of stream {self._stream!r} are gone: the ring dropped them "
            "before they were read. skip_gap() continues after them; a larger capacity keeps "
            "records longer.",
            stream=self._stream,
            first=first,
            last=last,
        )


def _without_holes(chunks: list[Chunk]) -> list[Chunk]:
    """Return the chunks before the first hole. The next fetch starts at the hole and reports it."""
    end = chunks[0].first
    for index, chunk in enumerate(chunks):
        if chunk.first != end:
            return chunks[:index]
        end += len(chunk)
    return chunks
