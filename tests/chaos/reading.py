"""The reader program, for a stream with a store: everything from the first record on.

One thread reads slowly, far behind the ring; one from the beginning, or somewhere, to the end, over
and over; one lists the files of the store.
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
from tests.chaos.orders import STREAM, Orders, Signs

#: Records of a slow poll at most, and the seconds between two; records of one that hurries.
SLOW_RECORDS = (1, 10, 40)
SLOW_S = 0.8
FAST_RECORDS = 1000
#: Seconds between two passes, and between two lists, at most.
PASS_S = 2.0
LIST_S = 0.6
POLL_S = 0.2
LOOK_S = 0.05

Work = Callable[[random.Random], None]


class Reading:
    """All three, until the run ends; the slow one reads the rest then."""

    def __init__(self, orders: Orders, client: meteor.Client, writer: Writer, signs: Signs) -> None:
        self._who = orders.name
        self._rng = random.Random(orders.seed)
        self._writer = writer
        self._signs = signs
        self._stream = client.stream(STREAM, create=False)
        self._numbers = count()
        self._calm = threading.Event()
        self._end = threading.Event()
        self._began = threading.local()  # when each thread last asked for something

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._keep_on, args=(work, random.Random(self._rng.random())))
            for work in (self._read_slowly, self._pass_through, self._list)
        ]
        for thread in threads:
            thread.daemon = True
            thread.start()
        while not self._signs.end():
            self._end.wait(LOOK_S)
            if self._signs.calm():
                self._calm.set()
        self._end.set()
        for thread in threads:
            thread.join()

    def _keep_on(self, work: Work, rng: random.Random) -> None:
        """Begin again after whatever faults explain; a work that returns is done."""
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
            self._end.wait(LOOK_S)

    def _read_slowly(self, rng: random.Random) -> None:
        with self._stream.subscriber(initial_offset="earliest") as subscriber:
            who = self._begin(0)
            while not self._end.is_set() or subscriber.position < self._stream.bounds()[1]:
                self._ask()
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
            self._ask()
            end = self._stream.bounds()[1]
            start = 0 if rng.random() < 0.7 else rng.randint(0, end)
            who = self._begin(start)
            for batch in self._stream.read(start):
                self._see(who, batch)
                self._ask()

    def _list(self, rng: random.Random) -> None:
        while not self._end.wait(rng.uniform(0, LIST_S)):
            self._ask()
            store = self._stream.store
            before = store.bounds()[1]
            spans = [span_of(path) for path in store.files()]
            after = store.bounds()[1]
            self._writer.add("listed", who=self._who, first=before, last=after, values=spans)

    # What is written down

    def _begin(self, first: int) -> str:
        """The name of a reader that begins now."""
        who = f"{self._who}.{next(self._numbers)}"
        self._writer.add("reading", who=who, first=first)
        return who

    def _see(self, who: str, batch: meteor.RecordBatch) -> None:
        values = [value_of(value) for value in batch.values()]
        self._writer.add("seen", who=who, first=batch.first_offset, values=values)

    def _ask(self) -> None:
        self._began.at = now()

    def _note_unavailable(self, error: Exception) -> None:
        began = getattr(self._began, "at", -1)
        self._writer.add("unavailable", who=self._who, began=began, text=repr(error))


def span_of(path: str) -> str:
    """The offsets that a file has by its name, both included."""
    first, last, *_ = PurePath(path).name.split("-")
    return f"{int(first)}-{int(last)}"
