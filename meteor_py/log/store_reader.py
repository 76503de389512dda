"""The store reader: reads records from the stream's store after the ring has dropped them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meteor_py.records.record import TableChunk
from meteor_py.redis import reply_errors
from meteor_py.store.read_ahead import StoreReadAhead


class StoreReader:
    """Reads the archived part of a stream. Not thread-safe.

    As of the last update, the store holds the offsets from ``expired`` up to ``archived``. The ring
    starts at about ``ring_start``: it may also hold some older records, or lack some newer ones.
    """

    #: The meta fields that ``update`` needs.
    FIELDS = ("archived", "expired", "capacity")

    def __init__(self, batches: StoreReadAhead, stream: str, epoch: int) -> None:
        self._batches = batches
        self._stream = stream
        self.archived = self.expired = self.ring_start = 0
        #: The epoch of the last update.
        self.epoch = epoch

    @property
    def stop(self) -> int:
        """Reads from the store stop at this offset: ``ring_start``, but at most ``archived``."""
        return min(self.archived, self.ring_start)

    def holds(self, offset: int) -> bool:
        return self.expired <= offset < self.stop

    def update(self, epoch: int, end_offset: int, fields: list[Any]) -> None:
        """Update the bounds from meta fields."""
        if epoch != self.epoch:
            self.epoch, self.ring_start = epoch, 0
            self.forget()
        self.archived, self.expired, capacity = map(int, fields)
        self.ring_start = max(self.ring_start, end_offset - capacity)

    def read(self, offset: int, epochs: str) -> TableChunk:
        """Return one or more records, starting at ``offset``.

        Args:
            epochs: The stream's epochs, in the format of its meta hash.

        Raises:
            RecordsLost: The records have expired from the store, though the ring may still hold
                some of them.
            MeteorError: See ``StoreReadAhead.read``.
        """
        if offset < self.expired:
            last = min(self.expired, self.stop) - 1
            raise reply_errors.records_lost(self._stream, offset, last)
        return TableChunk(offset, self._batches.read(offset, self.stop, self.epoch, epochs))

    def read_columns(self, columns: Sequence[str]) -> None:
        """Read only these columns from now on; see ``StoreReadAhead.columns``."""
        self._batches.forget()
        self._batches.columns = columns

    def forget(self) -> None:
        """Drop records that were read ahead, because they may have changed."""
        self._batches.forget()

    def close(self) -> None:
        self._batches.close()
