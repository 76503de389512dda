"""The fast path for publishing: a bare value costs one lock, one subtraction and one append.

The accumulator grants the fast path a number of bytes in its open batch. Until they are used up,
the fast path appends bare values without updating the batch's totals. Before the accumulator does
anything else with the batch, it adds these records to the totals and revokes the grant.

The accumulator reads and writes a grant's attributes itself, in statements that contain no calls: a
signal handler, which may flush or close the publisher, must not run in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from meteor_py.publish.ack import Ack
from meteor_py.publish.batch import Batch
from meteor_py.runtime.locks import SignalSafeCondition

#: Extra bytes counted for each record, so that the number of empty records is limited too.
RECORD_OVERHEAD = 64


class FastPath:
    """A grant of bytes for bare values that are appended to one batch.

    Args:
        records_max: Maximum number of records in a batch.
        put_slowly: Called with a value and its size in bytes, and with the lock held, if the grant
            or the batch has no room for the value.
    """

    __slots__ = (
        "_index_max", "_is_owned", "_lock", "_put_slowly", "batch", "count", "granted", "left",
        "sender_waits", "values", "work",
    )  # fmt: skip

    #: The batch with the grant; unset until the first grant.
    batch: Batch

    def __init__(self, records_max: int, put_slowly: Callable[[bytes, int], Ack]) -> None:
        self._index_max = records_max - 1
        self._put_slowly = put_slowly
        #: The batch's values, which are its only column, and their number.
        self.values: list[bytes] = []
        self.count = 0
        #: Bytes granted, and how many of them are unused. Both are 0 if there is no grant.
        self.granted = 0
        self.left = 0
        #: Whether the sender is waiting on ``work``, a condition of the accumulator's lock.
        self.sender_waits = False

    def use_lock(self, lock: threading.RLock, work: SignalSafeCondition) -> None:
        """Share the accumulator's lock, and the condition that wakes the sender."""
        self._lock = lock
        # A private method, but threading.Condition calls it as well.
        self._is_owned: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]
        self.work = work

    def put(self, value: bytes, size: int) -> Ack:
        """Accept one record of ``size`` bytes, without a key, headers or timestamp."""
        if self._is_owned():
            self.check_reentry()  # raises; the check above saves a call per record
        with self._lock:
            index = self.count
            left = self.left - size - RECORD_OVERHEAD
            if left >= 0 and index < self._index_max:
                batch = self.batch
                self.left = left
                self.count = index + 1
                self.values.append(value)
                if self.sender_waits:
                    self.work.notify_all()
                return Ack(batch, index)
            return self._put_slowly(value, size)

    def check_reentry(self) -> None:
        """Raise ``RuntimeError`` if this thread holds the lock.

        A finalizer or signal handler can interrupt a publish in the same thread and publish a
        record itself. It would find half-updated counts, and with a plain lock it would wait
        forever.
        """
        if self._is_owned():
            raise RuntimeError(
                "A finalizer or signal handler tried to publish while it was interrupting another "
                "publish. Set a flag in the handler, and publish from the main program."
            )
