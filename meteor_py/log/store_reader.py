"""Reading records from the store of a stream that its ring has dropped."""

from __future__ import annotations

from typing import Any

from meteor_py.records.record import TableChunk
from meteor_py.redis import reply_errors
from meteor_py.store.read_ahead import StoreReadAhead


class StoreReader:
    """The part of a stream that is read from its store. For one thread at a time.

    Offsets, as last seen: the store holds those from ``expired`` up to ``archived``; the ring
    begins at ``ring_start``.
    """

    #: The fields of meta that ``update`` takes.
    FIELDS = ("archived", "expired", "capacity")

    def __init__(self, batches: StoreReadAhead, stream: str, epoch: int) -> None:
        self._batches = batches
        self._stream = stream
        self.archived = self.expired = self.ring_start = 0
        #: The epoch in which these were seen.
        self.epoch = epoch

    @property
    def stop(self) -> int:
        """Where the ring begins, or the archived records end: below it the store is read."""
        return min(self.archived, self.ring_start)

    def holds(self, offset: int) -> bool:
        return self.expired <= offset < self.stop

    def update(self, epoch: int, end_offset: int, fields: list[Any]) -> None:
        """Take over what the server says of the stream."""
        if epoch != self.epoch:
            self.epoch, self.ring_start = epoch, 0
            self.forget()
        self.archived, self.expired, capacity = map(int, fields)
        self.ring_start = max(self.ring_start, end_offset - capacity)

    def read(self, offset: int) -> TableChunk:
        """Return some records from ``offset`` on, at least one.

        Raises:
            RecordsLost: They have expired, though the ring may still hold some of them.
            MeteorError: As ``StoreReadAhead.read``.
        """
        if offset < self.expired:
            last = min(self.expired, self.stop) - 1
            raise reply_errors.records_lost(self._stream, offset, last)
        return TableChunk(offset, self._batches.read(offset, self.stop, self.epoch))

    def forget(self) -> None:
        """Drop what was read in advance: it may have changed."""
        self._batches.forget()

    def close(self) -> None:
        self._batches.close()
