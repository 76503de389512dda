"""A cursor: reads a stream from a position on, and notices whatever is missing.

A fetch asks for frames and then, in the same pipeline, for the stream's incarnation, epoch and
end, and in a group for the nonce of its owner. These are answered after the frames, and a new
epoch is begun before anything is written in it: so whatever was read belongs to the epoch that was
seen, or an older one; and the group's owner was still the same when it was read.

What the ring has dropped is read from the store, if there is one, in the same order: first the
records, then the look at the stream. Nothing is trimmed before it is archived, and ``archived`` is
looked at after the ring: so what is missing there is in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meteor_py.errors import (
    ConnectionFailed,
    MeteorError,
    RecordsLost,
)
from meteor_py.records.frame import decode, entry_span
from meteor_py.records.position import Position, diverged_at
from meteor_py.records.record import Chunk, TableChunk
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.connection import Connection
from meteor_py.store.read_ahead import StoreReadAhead

#: What a fetch aims at, in bytes and in frames. Frames may turn from small to large between two
#: fetches, so the second bounds the memory: 256 frames of 1 MiB at the very worst.
FETCH_BYTES = 1024 * 1024
FETCH_FRAMES_MAX = 256

_ID_MAX = 2**64 - 1
#: Fetches in a row after which the next one is asked for in advance.
_STRAIGHT = 3


class Overtaken(Exception):
    """Somebody else reads for the group now, or it was moved or deleted."""


class LogReader:
    """Where a reader stands. Owns its connection; for one thread at a time."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        position: Position,
        cold: StoreReadAhead | None = None,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._log = keys.log(stream)
        self._meta = keys.meta(stream)
        self._frames = 16  # to ask for; follows their size
        self._straight = 0  # fetches since the last jump
        self._ahead: int | None = None  # the offset that was asked for in advance
        self._guard: tuple[str, bytes] | None = None
        self._cold = cold
        # As last seen: what is archived, what of that has expired, and the first offset in the
        # ring; all below the last is read from the store.
        self._archived = self._expired = self._ring = 0
        self._epoch = position.epoch  # in which that was seen
        self._seen = _SEEN if cold is None else (*_SEEN, "archived", "expired", "capacity")
        self.position = position
        #: The end of the stream when last seen.
        self.next = position.offset

    @property
    def block_max_s(self) -> float:
        """As ``Connection.block_max_s``."""
        return self._connection.block_max_s

    def fetch(self, block_s: float = 0.0, *, records: int, anywhere: bool = False) -> list[Chunk]:
        """Return records from the position on, without a hole, and move past them.

        Args:
            block_s: Seconds to wait for a record if there is none.
            records: How many are wanted: a hint, there may be more.
            anywhere: Take the first that is there, if the one at the position is gone.

        Raises:
            Overtaken: The group has another nonce: what was read is not for us.
            RecordsLost: The record at the position is not in the ring any more.
            LogTruncated: The server lost what lies below the position.
            StreamNotFound: The stream was deleted.
            CorruptFrame, UnsupportedFrame, CorruptStream: As ``frame.decode``.
            ConnectionFailed: No answer.
        """
        while True:
            chunks = self._fetch(block_s, records, anywhere)
            if chunks is not None:
                return chunks

    def _fetch(self, block_s: float, records: int, anywhere: bool) -> list[Chunk] | None:
        """The same; None if the position was moved over a gap."""
        wanted = self.position.offset
        if self._expired <= wanted < self._cold_below:
            try:
                return self._fetch_cold(anywhere=False)
            except RecordsLost:
                pass  # the ring may have more than it must: perhaps this one, or some behind it
        known_end = self.next
        entries = self._ask(block_s, records)
        found = entry_span(self._stream, entries[0][0])[0] if entries else self.next
        if found > wanted and self._cold is not None and wanted < self._archived:
            self._ring = found
            return self._fetch_cold(anywhere)
        if not entries:
            if known_end > wanted and not anywhere:
                raise self.lost(known_end - 1)  # it was there, and so must be its successors
            return []
        if found > wanted and not anywhere:
            raise self.lost(found - 1)
        chunks = decode(self._stream, entries)
        if found < wanted:
            chunks[0] = chunks[0].slice(wanted - found, len(chunks[0]))
        whole = self._without_holes(chunks)
        self.position = self.position._replace(offset=whole[-1].first + len(whole[-1]))
        self._read_ahead()
        return whole

    @property
    def _cold_below(self) -> int:
        """Where the ring begins, or what is archived ends: below it the store is read."""
        return min(self._archived, self._ring)

    def _fetch_cold(self, anywhere: bool) -> list[Chunk] | None:
        """The same from the store; nothing if the stream has changed meanwhile: ask again."""
        assert self._cold is not None, "only with a store is anything archived"
        self._forget_ahead()  # another answer must not be taken for what the stream is like
        epoch, archived, start = self._epoch, self._archived, self.position.offset
        failure: MeteorError | None = None
        try:
            if start < self._expired:  # and yet some of these may be in the ring
                last = min(self._expired, self._cold_below) - 1
                raise reply_errors.records_lost(self._stream, start, last)
            batch = self._cold.read(start, self._cold_below, epoch)
        except MeteorError as error:
            failure = error
        self._look()
        if self._epoch != epoch or self._archived < archived:
            self._cold.forget()
            return []  # that may have been read from a branch that is lost
        if failure is None:
            self.position = self.position._replace(offset=start + len(batch))
            return [TableChunk(start, batch)]
        if anywhere and isinstance(failure, RecordsLost) and failure.last < self._expired:
            # Expired: so what is meant by "the first there is" has moved. Else they are lost.
            self.position = self.position._replace(offset=failure.last + 1)
            return None
        raise failure

    def _look(self) -> None:
        """Look at the stream, and at the group if we read for one."""
        commands: list[Sequence[Any]] = [("HMGET", self._meta, *self._seen)]
        if self._guard is not None:
            commands.append(("HGET", self._guard[0], "nonce"))
        seen, *nonce = self._pipeline(commands)
        if self._guard is not None and nonce != [self._guard[1]]:
            raise Overtaken
        self._check(seen, self.position)

    def move(self, offset: int) -> None:
        """Stand before ``offset``, in the present epoch."""
        self._forget_ahead()
        (seen,) = self._pipeline([("HMGET", self._meta, *self._seen)])
        before = self.position
        self._check(seen, self.position._replace(offset=0))
        if offset > self.next:
            self.position = before  # it stays where it was, in its own epoch
            raise ValueError(
                f"Offset {offset} is beyond the end of stream {self._stream!r}, which is "
                f"{self.next}; seek there, or wait."
            )
        self.position = self.position._replace(offset=offset)

    def resume(self, position: Position) -> None:
        """Stand at a position that was kept elsewhere.

        Raises:
            LogTruncated: The server has lost records before it.
            StreamNotFound: The stream was deleted.
        """
        self._forget_ahead()
        (seen,) = self._pipeline([("HMGET", self._meta, *self._seen)])
        self._check(seen, position)
        self.position = Position(position.incarnation, int(seen[1]), position.offset)

    def stand_at(self, offset: int) -> None:
        """The same without a look at the server, for an offset that was passed before."""
        if self.position.offset != offset:
            self.position = self.position._replace(offset=offset)

    def start(self, position: Position, end: int, group: str, nonce: str) -> None:
        """Stand where the term of a group begins, as the server has just said.

        From here on each fetch looks whether the group still has that nonce.
        """
        self._forget_ahead()
        self.position = position
        self.next = end
        self._archived = 0  # not known: the epoch may be a new one
        self._guard = (keys.group(self._stream, group), nonce.encode())

    def lost(self, last: int) -> RecordsLost:
        first = self.position.offset
        return RecordsLost(
            f"Records {first} to {last} of stream {self._stream!r} are gone: the ring has dropped "
            "them before they were read. skip_gap() goes on behind them; a larger capacity gives "
            "more time.",
            stream=self._stream,
            first=first,
            last=last,
        )

    def interrupt(self) -> None:
        """End a wait in another thread."""
        self._connection.interrupt()

    def close(self) -> None:
        self._connection.close()
        if self._cold is not None:
            self._cold.close()

    def _ask(self, block_s: float, records: int) -> list[Any]:
        answers = self._collect_ahead()
        if answers is None:
            frames = min(self._frames, records)
            if self.position.offset < self.next:
                block_s = 0.0  # it is there, or in the store, or lost
            answers = self._pipeline(self._request(frames, block_s), block_s)
        answer, seen, *nonce = answers
        if self._guard is not None and nonce != [self._guard[1]]:
            raise Overtaken
        self._check(seen, self.position)
        if not answer:
            return []
        entries: list[Any] = answer[0][1]
        self._adapt(entries)
        return entries

    def _request(self, frames: int, block_s: float = 0.0) -> list[Sequence[Any]]:
        offset = self.position.offset
        after = f"{offset - 1}-{_ID_MAX}" if offset else "0-0"
        block = ("BLOCK", max(int(block_s * 1000), 1)) if block_s > 0 else ()
        read = ("XREAD", "COUNT", frames, *block, "STREAMS", self._log, after)
        look: list[Sequence[Any]] = [read, ("HMGET", self._meta, *self._seen)]
        if self._guard is not None:
            look.append(("HGET", self._guard[0], "nonce"))
        return look

    def _read_ahead(self) -> None:
        """Let the server fetch the next records while these are looked at.

        Only for who reads straight on, and only what is known to be there: nothing waits.
        """
        self._straight += 1
        if self._straight < _STRAIGHT or self.next <= self.position.offset:
            return
        try:
            self._connection.send(self._request(self._frames))
            self._ahead = self.position.offset
        except ConnectionFailed:
            pass  # the next fetch connects again, or says so
        except BaseException:  # Ctrl-C: the next fetch must not read the answer to this
            self._connection.close()
            raise

    def _collect_ahead(self) -> list[Any] | None:
        """The answers to what was asked in advance; None if that was nothing, or not this."""
        if self._ahead is None:
            return None
        try:
            if self._ahead == self.position.offset and self._connection.connected:
                count = 2 if self._guard is None else 3
                return self._connection.read_all(count, self._connection.timeout_s)
            self._connection.close()
        except ConnectionFailed:
            pass  # tried again in the ordinary way
        except MeteorError:
            raise  # all answers were read
        except BaseException:  # Ctrl-C: the next fetch must not read the answer to this
            self._connection.close()
            raise
        finally:
            self._ahead = None
        return None

    def _forget_ahead(self) -> None:
        self._straight = 0
        if self._ahead is not None:
            self._ahead = None
            self._connection.close()

    def _pipeline(self, commands: list[Sequence[Any]], block_s: float = 0.0) -> list[Any]:
        """Once more on a new connection, where there is no waiting: an idle one may have died."""
        timeout_s = block_s + self._connection.timeout_s
        if block_s:
            return self._connection.pipeline(commands, timeout_s)
        return self._connection.retry_idle(lambda: self._connection.pipeline(commands, timeout_s))

    def _adapt(self, entries: list[Any]) -> None:
        """Ask for as many frames next time as make a good fetch, growing by steps."""
        size = sum(len(fields[3]) for _, fields in entries if len(fields) > 3) + len(entries)
        fitting = FETCH_BYTES * len(entries) // size
        self._frames = max(1, min(fitting, self._frames * 4, FETCH_FRAMES_MAX))

    def _check(self, seen: list[Any], position: Position) -> None:
        """Compare with what the server says of the stream; raise if it knows less than we."""
        reply_errors.check_incarnation(
            self._stream, position.incarnation, seen[0], position.offset - 1
        )
        epoch, end = int(seen[1]), int(seen[2])
        if epoch != position.epoch or end < position.offset:
            epochs = self._connection.call("HGET", self._meta, "epochs")
            first = diverged_at(position, (epochs or b"0:0").decode(), end)
            if first is not None:
                raise reply_errors.log_truncated(self._stream, first, position.offset - 1)
            self.position = self.position._replace(epoch=epoch)
        self.next = end
        if self._cold is not None:
            if epoch != self._epoch:
                self._epoch, self._ring = epoch, 0
                self._cold.forget()
            self._archived, self._expired, capacity = map(int, seen[3:6])
            self._ring = max(self._ring, end - capacity)

    def _without_holes(self, chunks: list[Chunk]) -> list[Chunk]:
        """The chunks up to the first hole; the next fetch begins at it and names it."""
        end = chunks[0].first
        for index, chunk in enumerate(chunks):
            if chunk.first != end:
                return chunks[:index]
            end += len(chunk)
        return chunks


_SEEN = ("incarnation", "epoch", "next")
