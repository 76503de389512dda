"""The limit on how many records ``run()`` buffers ahead of its worker threads."""

from __future__ import annotations

import time

#: Buffer this many seconds of work. This is long enough for the round trip of a claim, and short
#: enough that a new consumer gets its share at once.
_AHEAD_S = 0.1
#: Minimum number of records per thread: the record that it processes, and the next one.
_PER_THREAD = 2
#: Seconds between two measurements of the threads' speed.
_MEASURE_S = 1.0


class WorkAhead:
    """A limit on held records that follows the speed of the worker threads.

    If a consumer holds many more records than it can soon process, other consumers cannot get these
    records or their ordering keys. The limit therefore starts low. It doubles whenever a thread is
    idle although the consumer has reached the limit. While the limit exceeds ``_AHEAD_S`` seconds
    of work, it decreases every ``_MEASURE_S`` seconds, by at most half.

    Only one thread may use it, but any thread that holds the pool's lock may call ``note_done``.
    """

    def __init__(self, threads: int, most: int) -> None:
        self._most = most
        self._least = min(_PER_THREAD * threads, most)
        #: The maximum number of records to hold at the moment.
        self.limit = self._least
        self._done = 0
        self._measured_at = time.monotonic()

    def note_done(self) -> None:
        """Count a record that a thread has processed."""
        self._done += 1

    def adjust(self, *, idle: bool, full: bool) -> None:
        """Adapt the limit after a claim.

        Args:
            idle: Whether a thread had nothing to do before the claim.
            full: Whether the consumer has reached the limit after the claim.
        """
        if idle and full:
            self.limit = min(2 * self.limit, self._most)
        elapsed = time.monotonic() - self._measured_at
        if elapsed >= _MEASURE_S:
            enough = max(int(self._done / elapsed * _AHEAD_S), self._least)
            if self.limit > enough:
                self.limit = min(max(enough, self.limit // 2), self._most)
            self._done, self._measured_at = 0, time.monotonic()
