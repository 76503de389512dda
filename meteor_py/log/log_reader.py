"""The log reader: reads newer records from the ring and older ones from the store, as one log.

A fetch first asks for frames. In the same pipeline it then asks for the stream's incarnation, epoch
and end, and in a group for the owner's nonce. A new epoch begins before any record is written in
it. So the fetched records belong to the epoch in the reply or to an older one, and the group still
had the same owner when the server read them.

The reader reads the store in the same order: first the records, then meta. If there is a store, the
ring drops no record before it is archived, and the reader reads ``archived`` after the ring. So a
record that is missing from the ring is in the store, unless it has expired there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meteor_py.errors import MeteorError, RecordsLost
from meteor_py.log.ring_reader import RingReader
from meteor_py.log.store_reader import StoreReader
from meteor_py.records.frame import decode, decode_lone, entry_span
from meteor_py.records.position import Position, diverged_at, epoch_of, path_of
from meteor_py.records.record import Chunk
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import Connection
from meteor_py.store.read_ahead import StoreReadAhead

_FIELDS = ("incarnation", "epoch", "next")


class LogReader:
    """Fetches records from any offset in a stream, and detects missing ones.

    The caller keeps track of its offset. The reader keeps track of the incarnation and epoch of the
    fetched records, and owns its connection. Not thread-safe.
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
        #: The epoch in which the records fetched so far are valid.
        self.epoch = at.epoch
        # All epochs up to ``epoch``, in the format of the meta hash; empty if unknown.
        self._epochs = epochs
        #: The same epochs, in the form that positions use.
        self.path = path_of(epochs)
        # A reply with this incarnation and epoch needs no further check. Empty if unknown.
        self._expected = (b"", b"")
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
        """Return the epoch in which a fetched record was appended."""
        return epoch_of(self._epochs, offset) if self._epochs else self.epoch

    def fetch(
        self, offset: int, block_s: float = 0.0, *, records: int, anywhere: bool = False
    ) -> list[Chunk]:
        """Return consecutive records, starting at ``offset``.

        Return no records if none arrive within ``block_s`` seconds, or if the stream changes
        during the read.

        Args:
            offset: Offset of the first record, at most the end of the stream.
            block_s: Seconds to wait for a record if there is none.
            records: Number of records that the caller needs. A hint: the result may hold more or
                fewer.
            anywhere: If the record at ``offset`` is gone, start at the first existing record.

        Raises:
            OwnerChanged: The group has another nonce: it has a new owner, or was moved or deleted.
            RecordsLost: Neither the ring nor a store has the record at ``offset`` any longer.
            LogTruncated: The server lost records below ``offset``, or the stream was recreated.
            StreamNotFound: The stream was deleted.
            CorruptFrame, UnsupportedFrame, CorruptStream: See ``frame.decode``.
            MeteorError: The store could not be read; see ``StoreReader.read``.
            ConnectionFailed: The server did not reply.
        """
        while True:
            try:
                return self._fetch(offset, block_s, records, anywhere)
            except RecordsLost as lost:
                expired = 0 if self._store is None else self._store.expired
                if not anywhere or lost.last >= expired:
                    raise
                offset = lost.last + 1  # the store no longer has these records: try the next one

    def _fetch(self, offset: int, block_s: float, records: int, anywhere: bool) -> list[Chunk]:
        store = self._store
        if store is not None and store.holds(offset):
            try:
                return self._fetch_from_store(store, offset)
            except RecordsLost:
                pass  # try the ring: it may exceed its capacity and hold this or a later record
        epoch, known_end = self.epoch, self.end_offset
        if offset < known_end:
            block_s = 0.0  # do not wait: the record exists already, or it is lost
        entries, meta = self._ring.fetch(offset, block_s, records)
        self._check_fetched(meta, offset)
        if len(entries) == 1 and (lone := decode_lone(entries[0], offset)) is not None:
            self._ring.read_ahead(offset + 1, self.end_offset)
            return [lone]
        if epoch != self.epoch or known_end > self.end_offset:
            known_end = 0  # a failover: the log may end earlier, and offsets are reused
        found = entry_span(self._stream, entries[0][0])[0] if entries else self.end_offset
        if found > offset and store is not None and offset < store.archived:
            store.ring_start = found
            return self._fetch_from_store(store, offset)
        if not entries:
            if known_end > offset and not anywhere:
                raise self._lost(offset, known_end - 1)  # all of these records existed
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
        """Fetch from the store. Return no records if the stream changes during the read."""
        self._ring.forget_ahead()  # replies to a fetch sent ahead may be out of date
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
            return []  # a failover may have discarded these records
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback would keep this frame, and the store's files, alive
        return chunks

    def read_columns(self, columns: Sequence[str]) -> None:
        """Read only these columns from the store from now on.

        The ring always sends whole frames. In ``Chunk.to_arrow()``, unread columns are null, except
        the offset.
        """
        if self._store is not None:
            self._store.read_columns(columns)

    def seek(self, offset: int) -> None:
        """Prepare to read at ``offset`` in the current epoch.

        Raises:
            ValueError: ``offset`` is beyond the end.
        """
        self._ring.forget_ahead()
        meta = self._ring.read_meta(guarded=False)
        epoch, epochs = self.epoch, self._epochs
        self._check(meta, self.position(0))
        if offset > self.end_offset:
            self._enter(epoch, epochs)  # undo: the caller stays at its old position
            raise ValueError(
                f"Offset {offset} is beyond the end of stream {self._stream!r}, which ends at "
                f"{self.end_offset}. Seek to at most {self.end_offset}."
            )

    def resume(self, position: Position) -> None:
        """Prepare to read at a position that the application has stored.

        Raises:
            LogTruncated: The server has lost records before that position.
            StreamNotFound: The stream was deleted.
        """
        self._ring.forget_ahead()
        meta = self._ring.read_meta(guarded=False)
        self._check(meta, position)
        self._incarnation = position.incarnation
        self._expected = (b"", b"")

    def check_kept(self, offset: int, epoch: int, end_offset: int) -> None:
        """Check that the server still has all records below ``offset``, which were read earlier.

        Args:
            offset: The offset up to which the caller has read.
            epoch: The stream's epoch, according to the server.
            end_offset: The stream's end, according to the server.

        Raises:
            LogTruncated: The server has lost some of these records.
            StreamNotFound: The stream was deleted.
        """
        if epoch != self.epoch or end_offset < offset:
            self._ring.forget_ahead()
            self._check(self._ring.read_meta(guarded=False), self.position(offset))

    def start_term(self, start: Position, end_offset: int, group: str, nonce: str) -> None:
        """Prepare to read at the start of a new lease term, which the server has just granted.

        From now on, each fetch checks that ``nonce`` is still the group's nonce.
        """
        self._ring.forget_ahead()
        if start.epoch != self.epoch:
            self._enter(start.epoch, "")
        self._incarnation = start.incarnation
        self._expected = (b"", b"")
        self.end_offset = end_offset
        if self._store is not None:
            self._store.archived = 0  # unknown, because the epoch may be a new one
        self._ring.guard(keys.group(self._stream, group), nonce.encode())

    def interrupt(self) -> None:
        """Interrupt a wait in another thread."""
        self._ring.connection.interrupt()

    def close(self) -> None:
        self._ring.connection.close()
        if self._store is not None:
            self._store.close()

    def _check_fetched(self, meta: list[Any], offset: int) -> None:
        """Like ``_check``, but with less work if nothing has changed."""
        if (
            meta[0] == self._expected[0]
            and meta[1] == self._expected[1]
            and self._store is None
            and (end_offset := int(meta[2])) >= offset
        ):
            self.end_offset = end_offset
        else:
            self._check(meta, self.position(offset))
            if self._epochs:
                self._expected = self._incarnation.encode(), b"%d" % self.epoch

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
        self._expected = (b"", b"")

    def _lost(self, first: int, last: int) -> RecordsLost:
        return RecordsLost(
            f"Records {first} to {last} of stream {self._stream!r} are gone: the ring dropped them "
            "before they were read. Call skip_gap() to continue after them. A larger capacity "
            "keeps records longer.",
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
