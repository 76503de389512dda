"""The number of records that ``run()`` holds in advance of its worker threads."""

from __future__ import annotations

import time

#: Seconds of work to hold in advance. Long enough for the round trip of a claim, and short enough
#: that a new consumer gets its share at once.
_AHEAD_S = 0.1
#: Records for each thread: the one that it processes, and the next.
_PER_THREAD = 2
#: Seconds between two measurements of the speed.
_MEASURE_S = 1.0


class WorkAhead:
    """A limit on held records that follows the speed of the worker threads.

    A consumer that holds much more than it can process keeps records, and the ordering keys of
    these records, from other consumers. So the limit starts low. It doubles whenever a thread is
    idle although the consumer holds as many records as it may. If the limit exceeds ``_AHEAD_S``
    seconds of work, it is halved every ``_MEASURE_S`` seconds.

    For one thread, except ``note_done``, which needs the lock of the worker pool.
    """

    def __init__(self, threads: int, most: int) -> None:
        self._most = most
        self._least = min(_PER_THREAD * threads, most)
        #: The most records to hold now.
        self.limit = self._least
        self._done = 0
        self._measured_at = time.monotonic()

    def note_done(self) -> None:
        """Count a record that a thread has processed."""
        self._done += 1

    def adjust(self, *, idle: bool, full: bool) -> None:
        """Adapt the limit after a claim.

        Args:
            idle: Whether a thread had nothing to do before it.
            full: Whether the consumer now holds as many records as it may.
        """
        if idle and full:
            self.limit = min(2 * self.limit, self._most)
        elapsed = time.monotonic() - self._measured_at
        if elapsed >= _MEASURE_S:
            enough = max(int(self._done / elapsed * _AHEAD_S), self._least)
            if self.limit > enough:
                self.limit = min(max(enough, self.limit // 2), self._most)
            self._done, self._measured_at = 0, time.monotonic()
