"""The fast path of publishing: a bare value costs a lock, a subtraction and an append.

The accumulator grants a number of bytes to its open batch. As long as they last, records that are
nothing but a value are appended without being counted. Before the accumulator does anything else
with the batch, it counts them and revokes the grant.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from meteor_py.publish.ack import Ack
from meteor_py.publish.batch import Batch

#: Bytes that a record costs besides its own, so that empty records are bounded too.
RECORD_OVERHEAD = 64


class FastPath:
    """A grant of bytes for values that are appended to one batch.

    Args:
        records_max: Records that a batch may have.
        put_slowly: Takes a value and its size in bytes, where the grant does not cover it.
    """

    __slots__ = (
        "_batch",
        "_index_max",
        "_is_owned",
        "_lock",
        "_put_slowly",
        "_values",
        "granted",
        "left",
        "sender_waits",
        "work",
    )  # fmt: skip

    _batch: Batch  # unset until something was granted

    def __init__(self, records_max: int, put_slowly: Callable[[bytes, int], Ack]) -> None:
        self._index_max = records_max - 1
        self._put_slowly = put_slowly
        self._values: list[bytes] = []  # of the batch
        #: Bytes of the grant, and those of them that are unused. The accumulator revokes a grant by
        #: setting both to 0.
        self.granted = 0
        self.left = 0
        #: The sender waits for ``work``; both are guarded by the accumulator's lock.
        self.sender_waits = False

    def use_lock(self, lock: threading.RLock, work: threading.Condition) -> None:
        """Share the accumulator's lock, and its condition that wakes the sender."""
        self._lock = lock
        # Private, but what threading.Condition asks its lock as well.
        self._is_owned: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]
        self.work = work

    def put(self, value: bytes, size: int) -> Ack:
        """Take one record that is nothing but a value of ``size`` bytes."""
        if self._is_owned():
            raise reentry_error()
        with self._lock:
            values = self._values
            index = len(values)
            left = self.left - size - RECORD_OVERHEAD
            if left >= 0 and index < self._index_max:
                self.left = left
                values.append(value)
                if self.sender_waits:
                    self.work.notify()
                return Ack(self._batch, index)
        return self._put_slowly(value, size)

    # -- for the accumulator, with the lock held -----------------------------------------------

    def check_reentry(self) -> None:
        """Raise ``RuntimeError`` if this thread has the lock.

        A finalizer or signal handler can run in the middle of publishing, in the same thread, and
        publish. It would find counts that are half updated, and a plain lock would wait forever.
        """
        if self._is_owned():
            raise reentry_error()

    def grant(self, batch: Batch, values: list[bytes], nbytes: int) -> None:
        """Let ``nbytes`` bytes be appended to ``values``, the only column of ``batch``."""
        self._batch = batch
        self._values = values
        self.granted = self.left = nbytes

    def used(self) -> tuple[int, int]:
        """The records that the batch has now, and the bytes used of the grant."""
        return len(self._values), self.granted - self.left


def reentry_error() -> RuntimeError:
    return RuntimeError(
        "A finalizer or signal handler tried to publish while its thread was publishing; let it "
        "set a flag, and publish from the main program."
    )
