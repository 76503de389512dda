"""Reading a stream as one log: from its ring, and from its store what the ring has dropped.

A fetch asks for frames and then, in the same pipeline, for the stream's incarnation, epoch and
end, and in a group for the nonce of its owner. The server replies to these after the frames, and a
new epoch begins before anything is written in it. So the records belong to the epoch that was seen,
or to an older one, and the group still had the same owner when they were read.

The store is read in the same order: first the records, then the look at the stream. Nothing is
trimmed before it is archived, and ``archived`` is looked at after the ring, so a record that is
missing in the ring is in the store.
"""

from __future__ import annotations

from typing import Any

from meteor_py.errors import MeteorError, RecordsLost
from meteor_py.log.ring_reader import RingReader
from meteor_py.log.store_reader import StoreReader
from meteor_py.records.frame import decode, entry_span
from meteor_py.records.position import Position, diverged_at
from meteor_py.records.record import Chunk
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import Connection
from meteor_py.store.read_ahead import StoreReadAhead

_FIELDS = ("incarnation", "epoch", "next")


class LogReader:
    """Fetches records from any offset of a stream, and notices whatever is missing.

    The caller owns the offset; the reader knows the incarnation and epoch that all records fetched
    so far are part of. Owns its connection. For one thread at a time.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        at: Position,
        store: StoreReadAhead | None = None,
    ) -> None:
        self._stream = stream
        self._incarnation = at.incarnation
        self._store = None if store is None else StoreReader(store, stream, at.epoch)
        fields = _FIELDS if store is None else (*_FIELDS, *StoreReader.FIELDS)
        self._ring = RingReader(connection, stream, fields)
        #: The epoch of the stream that everything fetched so far is part of.
        self.epoch = at.epoch
        #: The end of the stream when last seen.
        self.end_offset = at.offset

    @property
    def block_max_s(self) -> float:
        """As ``Connection.block_max_s``."""
        return self._ring.block_max_s

    def position(self, offset: int) -> Position:
        """Return ``offset`` with the incarnation and epoch that it was read in."""
        return Position(self._incarnation, self.epoch, offset)

    # -- fetching ------------------------------------------------------------------------------

    def fetch(
        self, offset: int, block_s: float = 0.0, *, records: int, anywhere: bool = False
    ) -> list[Chunk]:
        """Return consecutive records from ``offset`` on; none if the time is up.

        Also none if the stream has changed while it was read.

        Args:
            offset: The first record that is wanted, at most the end of the stream.
            block_s: Seconds to wait for a record if there is none.
            records: How many are wanted: a hint, there may be more.
            anywhere: Begin with the first record there is, if the one at ``offset`` is gone.

        Raises:
            OwnerChanged: The group has another nonce: what was read is not for us.
            RecordsLost: The record is neither in the ring nor in the store any more.
            LogTruncated: The server lost what lies below ``offset``.
            StreamNotFound: The stream was deleted.
            CorruptFrame, UnsupportedFrame, CorruptStream: As ``frame.decode``.
            ConnectionFailed: No reply.
        """
        while True:
            try:
                return self._fetch(offset, block_s, records, anywhere)
            except RecordsLost as lost:
                expired = 0 if self._store is None else self._store.expired
                if not anywhere or lost.last >= expired:
                    raise
                # Expired: so what "the first there is" means has moved. Else they are lost.
                offset = lost.last + 1

    def _fetch(self, offset: int, block_s: float, records: int, anywhere: bool) -> list[Chunk]:
        store = self._store
        if store is not None and store.holds(offset):
            try:
                return self._fetch_from_store(store, offset)
            except RecordsLost:
                pass  # the ring may have more than it must: perhaps this one, or some behind it
        known_end = self.end_offset
        if offset < known_end:
            block_s = 0.0  # it is there, or in the store, or lost
        entries, meta = self._ring.fetch(offset, block_s, records)
        self._check(meta, self.position(offset))
        found = entry_span(self._stream, entries[0][0])[0] if entries else self.end_offset
        if found > offset and store is not None and offset < store.archived:
            store.ring_start = found
            return self._fetch_from_store(store, offset)
        if not entries:
            if known_end > offset and not anywhere:
                raise self._lost(offset, known_end - 1)  # it was there, and so were its successors
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
        """The same from the store; none if the stream has changed meanwhile: ask again."""
        self._ring.forget_ahead()  # its replies must not be taken for the present stream
        epoch, archived = store.epoch, store.archived
        chunks: list[Chunk] = []
        failure: MeteorError | None = None
        try:
            chunks.append(store.read(offset))
        except MeteorError as error:
            failure = error
        self._check(self._ring.look(guarded=True), self.position(offset))
        if store.epoch != epoch or store.archived < archived:
            store.forget()
            return []  # that may have been read from a branch that is lost
        if failure is not None:
            raise failure
        return chunks

    # -- jumping -------------------------------------------------------------------------------

    def seek(self, offset: int) -> None:
        """Prepare to read from ``offset`` on, in the present epoch.

        Raises:
            ValueError: It is beyond the end.
        """
        self._ring.forget_ahead()
        meta = self._ring.look(guarded=False)
        epoch = self.epoch
        self._check(meta, self.position(0))
        if offset > self.end_offset:
            self.epoch = epoch  # the caller stays where it was, in its own epoch
            raise ValueError(
                f"Offset {offset} is beyond the end of stream {self._stream!r}, which is "
                f"{self.end_offset}; seek there, or wait."
            )

    def resume(self, position: Position) -> None:
        """Prepare to read from a position that was kept elsewhere.

        Raises:
            LogTruncated: The server has lost records before it.
            StreamNotFound: The stream was deleted.
        """
        self._ring.forget_ahead()
        meta = self._ring.look(guarded=False)
        self._check(meta, position)
        self._incarnation, self.epoch = position.incarnation, int(meta[1])

    def start_term(self, start: Position, end_offset: int, group: str, nonce: str) -> None:
        """Prepare to read where a group's term starts, as the server has just replied.

        From here on each fetch checks that the group still has that nonce.
        """
        self._ring.forget_ahead()
        self._incarnation, self.epoch = start.incarnation, start.epoch
        self.end_offset = end_offset
        if self._store is not None:
            self._store.archived = 0  # not known: the epoch may be a new one
        self._ring.guard(keys.group(self._stream, group), nonce)

    def interrupt(self) -> None:
        """End a wait in another thread."""
        self._ring.interrupt()

    def close(self) -> None:
        self._ring.close()
        if self._store is not None:
            self._store.close()

    # -- what the server says ------------------------------------------------------------------

    def _check(self, meta: list[Any], position: Position) -> None:
        """Compare a position with the server's stream; raise if the server knows less."""
        reply_errors.check_incarnation(
            self._stream, position.incarnation, meta[0], position.offset - 1
        )
        epoch, end_offset = int(meta[1]), int(meta[2])
        if epoch != position.epoch or end_offset < position.offset:
            first = diverged_at(position, self._ring.epochs(), end_offset)
            if first is not None:
                raise reply_errors.log_truncated(self._stream, first, position.offset - 1)
            self.epoch = epoch
        self.end_offset = end_offset
        if self._store is not None:
            self._store.update(epoch, end_offset, meta[3:6])

    def _lost(self, first: int, last: int) -> RecordsLost:
        return RecordsLost(
            f"Records {first} to {last} of stream {self._stream!r} are gone: the ring has dropped "
            "them before they were read. skip_gap() goes on behind them; a larger capacity gives "
            "more time.",
            stream=self._stream,
            first=first,
            last=last,
        )


def _without_holes(chunks: list[Chunk]) -> list[Chunk]:
    """The chunks up to the first hole; the next fetch begins at it and reports it."""
    end = chunks[0].first
    for index, chunk in enumerate(chunks):
        if chunk.first != end:
            return chunks[:index]
        end += len(chunk)
    return chunks
