"""The archiver program: archives, sometimes merges files, and dies or stops between two steps.

The library maintains a store every ten minutes, but every second here, so that short runs cover it.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import traceback
from typing import Any

import pyarrow as pa

import meteor_py as meteor
from meteor_py.archive import archive_term
from meteor_py.store import maintenance
from tests.chaos.history import Writer, now
from tests.chaos.orders import STREAM, Orders, Signs
from tests.chaos.process import DIED

#: Limits of a segment: some fill up soon, others are written because of their age.
RECORDS = (5, 50, 400)
AGES_S = (0.05, 0.2)
#: Limits of a merged segment.
MERGED_RECORDS = (40, 400, 3000)

#: Errors while the store is hidden.
UNAVAILABLE = (meteor.StoreUnavailable, meteor.StoreMismatch)

CHECK_S = 0.05


def hasten() -> None:
    """Make archivers clean up often. A paused archiver must still notice its pause."""
    archive_term._TIDY_S, archive_term._CERTAIN_S, maintenance.GRACE_S = 1.0, 0.4, 4.0


class Store(meteor.ParquetStore):
    """Records appends, and lets its archiver die or stop at the worst moments."""

    def __init__(self, orders: Orders, writer: Writer, signs: Signs, rng: random.Random) -> None:
        super().__init__(orders.store, STREAM)
        self._orders = orders
        self._writer = writer
        self._signs = signs
        self._rng = rng

    def append(self, incarnation: str, term: int, records: pa.Table) -> None:
        first, last = (records.column("offset")[index].as_py() for index in (0, -1))
        fields: dict[str, Any] = {
            "who": self._orders.name,
            "term": term,
            "first": first,
            "last": last,
        }
        self._writer.add("append", **fields)
        self._perhaps_die()
        super().append(incarnation, term, records)
        self._writer.add("appended", **fields)
        self._perhaps_die()
        if self._signs.stop(self._orders.name.partition(".")[0]):
            os.kill(os.getpid(), signal.SIGSTOP)

    def _perhaps_die(self) -> None:
        if not self._signs.calm() and self._rng.random() < self._orders.die:
            os._exit(DIED)


class Archiving:
    """One archiver, from its first term to its last."""

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
        other = threading.Thread(target=self._supervise, name="compactor", daemon=True)
        other.start()
        try:
            self._archiver.run()
        finally:
            self._ended.set()
            other.join()

    def _supervise(self) -> None:
        """Merge files until the run is calm; close the archiver at the end of the run."""
        pause_s = self._orders.compact_pause_s
        while not self._signs.calm() and not self._ended.is_set():
            if pause_s and not self._ended.wait(self._rng.uniform(0, 2 * pause_s)):
                self._compact()
            else:
                self._ended.wait(CHECK_S)
        while not self._signs.end() and not self._ended.is_set():
            self._ended.wait(CHECK_S)
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
