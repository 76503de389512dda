"""The archiver program: archives, merges files now and then, and dies or stops between two steps.

What the library does every ten minutes is done every second here, or no run would see it.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import traceback

import pyarrow as pa

import meteor_py as meteor
from meteor_py.archive import archive_term
from meteor_py.store import maintenance
from tests.chaos.history import Writer, now
from tests.chaos.orders import STREAM, Orders, Signs
from tests.chaos.process import DIED

#: Of a segment, at most: soon full, and one that is written because of its age.
RECORDS = (5, 50, 400)
AGES_S = (0.05, 0.2)
#: Of a merged segment.
MERGED_RECORDS = (40, 400, 3000)

#: What happens while the store is away.
UNAVAILABLE = (meteor.StoreUnavailable, meteor.StoreMismatch)

LOOK_S = 0.05


def hasten() -> None:
    """Let archivers tidy up often, and soon; who was paused must still notice that it was."""
    archive_term._TIDY_S, archive_term._CERTAIN_S, maintenance.GRACE_S = 1.0, 0.4, 4.0


class Store(meteor.ParquetStore):
    """Writes down what is appended; at the worst moments its archiver dies, or stops."""

    def __init__(self, orders: Orders, writer: Writer, signs: Signs, rng: random.Random) -> None:
        super().__init__(orders.store, STREAM)
        self._orders = orders
        self._writer = writer
        self._signs = signs
        self._rng = rng

    def append(self, life: str, term: int, records: pa.Table) -> None:
        first, last = (records.column("offset")[index].as_py() for index in (0, -1))
        told = {"who": self._orders.name, "term": term, "first": first, "last": last}
        self._writer.add("append", **told)
        self._perhaps_die()
        super().append(life, term, records)
        self._writer.add("appended", **told)
        self._perhaps_die()
        if self._signs.stop(self._orders.name.partition(".")[0]):
            os.kill(os.getpid(), signal.SIGSTOP)

    def _perhaps_die(self) -> None:
        if not self._signs.calm() and self._rng.random() < self._orders.die:
            os._exit(DIED)


class Archiving:
    """One archiver from its first term to its last."""

    def __init__(self, orders: Orders, client: meteor.Client, writer: Writer, signs: Signs) -> None:
        hasten()
        self._orders = orders
        self._rng = random.Random(orders.seed)
        self._writer = writer
        self._signs = signs
        store = Store(orders, writer, signs, random.Random(self._rng.random()))
        self._stream = client.stream(STREAM, store=store, archive=False, create=False)
        self._archiver = self._stream.archiver(
            segment_records=self._rng.choice(RECORDS),
            segment_age=self._rng.choice(AGES_S),
            lease_ttl=orders.lease_ttl_s,
        )
        self._ended = threading.Event()

    def run(self) -> None:
        other = threading.Thread(target=self._look_after, name="compactor", daemon=True)
        other.start()
        try:
            self._archiver.run()
        finally:
            self._ended.set()
            other.join()

    def _look_after(self) -> None:
        """Merge files until it is calm; end the archiver when told to."""
        pause_s = self._orders.compact_pause_s
        while not self._signs.calm() and not self._ended.is_set():
            if pause_s and not self._ended.wait(self._rng.uniform(0, 2 * pause_s)):
                self._compact()
            else:
                self._ended.wait(LOOK_S)
        while not self._signs.end() and not self._ended.is_set():
            self._ended.wait(LOOK_S)
        self._archiver.close()

    def _compact(self) -> None:
        who, began = self._orders.name, now()
        try:
            saved = self._stream.store.compact(max_records=self._rng.choice(MERGED_RECORDS))
        except meteor.ConnectionFailed:
            pass
        except UNAVAILABLE as error:
            self._writer.add("unavailable", who=who, began=began, text=repr(error))
        except Exception:
            self._writer.add("error", who=who, text=traceback.format_exc(limit=-4))
        else:
            if saved:
                self._writer.add("compacted", who=who, began=began, last=saved)
