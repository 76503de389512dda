"""The reader program, for a stream with a store.

One thread reads slowly, far behind the ring. A second repeatedly reads to the end, from offset 0 or
a random offset. A third lists the files in the store.
"""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import PurePath

import meteor_py as meteor
from tests.chaos.archiving import UNAVAILABLE
from tests.chaos.history import Writer, now, value_of
from tests.chaos.worker_config import STREAM, RunSignals, WorkerConfig

#: Record limits for slow polls (one is picked at random), the maximum seconds between slow polls,
#: and the record limit for fast polls.
SLOW_RECORDS = (1, 10, 40)
SLOW_S = 0.8
FAST_RECORDS = 1000
#: Maximum seconds between passes, and between listings.
PASS_S = 2.0
LIST_S = 0.6
POLL_S = 0.2
CHECK_S = 0.05

Work = Callable[[random.Random], None]


class Reading:
    """Runs the three threads until the run ends. The slow reader then reads the rest."""

    def __init__(
        self, config: WorkerConfig, client: meteor.Client, writer: Writer, signals: RunSignals
    ) -> None:
        self._who = config.name
        self._rng = random.Random(config.seed)
        self._writer = writer
        self._signals = signals
        self._stream = client.stream(STREAM, create=False)
        self._numbers = count()
        self._calm = threading.Event()
        self._end = threading.Event()
        self._began = threading.local()  # when each thread began its last request

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._repeat, args=(work, random.Random(self._rng.random())))
            for work in (self._read_slowly, self._pass_through, self._list)
        ]
        for thread in threads:
            thread.daemon = True
            thread.start()
        while not self._signals.end():
            self._end.wait(CHECK_S)
            if self._signals.calm():
                self._calm.set()
        self._end.set()
        for thread in threads:
            thread.join()

    def _repeat(self, work: Work, rng: random.Random) -> None:
        """Run a task, and restart it after errors that faults explain."""
        while True:
            try:
                return work(rng)
            except meteor.ConnectionFailed:
                pass
            except UNAVAILABLE as error:
                self._note_unavailable(error)
            except meteor.RecordsLost as error:
                self._writer.add("missing", who=self._who, first=error.first, last=error.last)
                return None
            except Exception:
                self._writer.add("error", who=self._who, text=traceback.format_exc(limit=-4))
                return None
            self._end.wait(CHECK_S)

    def _read_slowly(self, rng: random.Random) -> None:
        with self._stream.subscriber(initial_offset="earliest") as subscriber:
            who = self._begin(0)
            while not self._end.is_set() or subscriber.position < self._stream.bounds()[1]:
                self._mark_request()
                most = FAST_RECORDS if self._calm.is_set() else rng.choice(SLOW_RECORDS)
                try:
                    batch = subscriber.poll(POLL_S, most)
                except meteor.ConnectionFailed:
                    continue
                except UNAVAILABLE as error:
                    self._note_unavailable(error)
                    continue
                if batch:
                    self._see(who, batch)
                self._calm.wait(rng.uniform(0, SLOW_S))

    def _pass_through(self, rng: random.Random) -> None:
        while not self._end.wait(rng.uniform(0, PASS_S)):
            self._mark_request()
            end = self._stream.bounds()[1]
            start = 0 if rng.random() < 0.7 else rng.randint(0, end)
            who = self._begin(start)
            for batch in self._stream.read(start):
                self._see(who, batch)
                self._mark_request()

    def _list(self, rng: random.Random) -> None:
        while not self._end.wait(rng.uniform(0, LIST_S)):
            self._mark_request()
            store = self._stream.store
            before = store.bounds()[1]
            spans = [span_of(path) for path in store.files()]
            after = store.bounds()[1]
            self._writer.add("listed", who=self._who, first=before, last=after, values=spans)

    # Recording

    def _begin(self, first: int) -> str:
        """Record that a reader has started, and return its name."""
        who = f"{self._who}.{next(self._numbers)}"
        self._writer.add("reading", who=who, first=first)
        return who

    def _see(self, who: str, batch: meteor.RecordBatch) -> None:
        values = [value_of(value) for value in batch.values()]
        self._writer.add("seen", who=who, first=batch.first_offset, values=values)

    def _mark_request(self) -> None:
        self._began.at = now()

    def _note_unavailable(self, error: Exception) -> None:
        began = getattr(self._began, "at", -1)
        self._writer.add("unavailable", who=self._who, began=began, text=repr(error))


def span_of(path: str) -> str:
    """Return the first and last offset of a file, from its name."""
    first, last, *_ = PurePath(path).name.split("-")
    return f"{int(first)}-{int(last)}"
