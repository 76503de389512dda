"""The archiver program: archives, sometimes merges files, and dies or stops between two steps.

An archiver cleans up its store every ten minutes. Here it does so every second, so that short runs
cover the cleanup.
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
from tests.chaos.process import DIED
from tests.chaos.worker_config import STREAM, RunSignals, WorkerConfig

#: Limits for a segment, in records and in seconds of age. Depending on the choice, segments are
#: written because they are full or because of their age.
RECORDS = (5, 50, 400)
AGES_S = (0.05, 0.2)
#: Limits for a merged segment, in records.
MERGED_RECORDS = (40, 400, 3000)

#: Errors that are expected while the store is hidden.
UNAVAILABLE = (meteor.StoreUnavailable, meteor.StoreMismatch)

CHECK_S = 0.05


def hasten() -> None:
    """Make archivers clean up often, and rely on a commit for less time than a pause lasts."""
    archive_term._TIDY_S, archive_term._CERTAIN_S, maintenance.GRACE_S = 1.0, 0.4, 4.0


class Store(meteor.ParquetStore):
    """A store that records appends, and at random ends its process before or after an append.

    If the run requests it, the store stops the process after an append.
    """

    def __init__(
        self, config: WorkerConfig, writer: Writer, signals: RunSignals, rng: random.Random
    ) -> None:
        super().__init__(config.store, STREAM)
        self._config = config
        self._writer = writer
        self._signals = signals
        self._rng = rng

    def append(self, incarnation: str, term: int, records: pa.Table) -> None:
        first, last = (records.column("offset")[index].as_py() for index in (0, -1))
        fields: dict[str, Any] = {
            "who": self._config.name,
            "term": term,
            "first": first,
            "last": last,
        }
        self._writer.add("append", **fields)
        self._perhaps_die()
        super().append(incarnation, term, records)
        self._writer.add("appended", **fields)
        self._perhaps_die()
        if self._signals.stop(self._config.name.partition(".")[0]):
            os.kill(os.getpid(), signal.SIGSTOP)

    def _perhaps_die(self) -> None:
        if not self._signals.calm() and self._rng.random() < self._config.die:
            os._exit(DIED)


class Archiving:
    """One archiver, from its first term to its last."""

    def __init__(
        self, config: WorkerConfig, client: meteor.Client, writer: Writer, signals: RunSignals
    ) -> None:
        hasten()
        self._config = config
        self._rng = random.Random(config.seed)
        self._writer = writer
        self._signals = signals
        store = Store(config, writer, signals, random.Random(self._rng.random()))
        self._stream = client.stream(STREAM, store=store, archive=False, create=False)
        self._archiver = self._stream.archiver(
            segment_records=self._rng.choice(RECORDS),
            segment_age=self._rng.choice(AGES_S),
            lease_ttl=config.lease_ttl_s,
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
        pause_s = self._config.compact_pause_s
        while not self._signals.calm() and not self._ended.is_set():
            if pause_s and not self._ended.wait(self._rng.uniform(0, 2 * pause_s)):
                self._compact()
            else:
                self._ended.wait(CHECK_S)
        while not self._signals.end() and not self._ended.is_set():
            self._ended.wait(CHECK_S)
        self._archiver.close()

    def _compact(self) -> None:
        who, began = self._config.name, now()
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
