"""Observers of a run, which bypass the proxies: they record server state, the log and the store.

A redis-py client takes the samples one after another, so that they do not depend on meteor_py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq
import redis

import meteor_py as meteor
from meteor_py.redis import keys
from tests.chaos.archiving import UNAVAILABLE
from tests.chaos.backend import Backend
from tests.chaos.history import Event, Writer, now, value_of
from tests.chaos.worker_config import STREAM
from tests.support.servers import plain_client

SAMPLE_S = 0.05
REPLY_S = 5.0

# This script reads the ring's bounds, `archived`, each group's confirmed offset, and whether there
# are zero, one, or more unarchived frames, all at the same moment.
_SAMPLE = """
local entry = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1)[1]
local meta = redis.call('HMGET', KEYS[1], 'next', 'archived')
local waiting = redis.call('XRANGE', KEYS[2], (meta[2] or '0') .. '-0', '+', 'COUNT', 2)
local found = {meta[1], entry and entry[1] or '', meta[2] or '-1', tostring(#waiting)}
for k = 3, #KEYS do
  local group = redis.call('HMGET', KEYS[k], 'confirmed', 'start')
  found[k + 2] = group[1] or group[2] or ''
end
return found
"""

#: Errors from a server that is loading its data, or from a cluster that is moving the slot.
_NOT_NOW = (
    redis.exceptions.BusyLoadingError,
    redis.exceptions.AskError,
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,
)


class Sampler(threading.Thread):
    """A thread that samples the state of the server until ``stop()`` is called."""

    def __init__(self, backend: Backend, groups: Sequence[str], writer: Writer) -> None:
        super().__init__(name="sampler", daemon=True)
        self._client = plain_client(backend.server.url, socket_timeout=REPLY_S)
        self._groups = groups
        self._keys = [keys.meta(STREAM), keys.log(STREAM)]
        self._keys += [keys.group(STREAM, group) for group in groups]
        self._writer = writer
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(SAMPLE_S):
            self.sample()

    def sample(self) -> Event | None:
        """Take one sample; return None if the server is unavailable or no longer has the slot."""
        with self._lock:
            began = now()
            try:
                found: Any = self._client.eval(_SAMPLE, len(self._keys), *self._keys)
            except redis.exceptions.MovedError as error:
                self._client.close()
                moved = f"redis://{error.host}:{error.port}"
                self._client = plain_client(moved, socket_timeout=REPLY_S)
                return None
            except (redis.ConnectionError, redis.TimeoutError, *_NOT_NOW):
                return None
            last, entry, archived, waiting, *places = [item.decode() for item in found]
            first = last
            if entry:
                end, _, records = entry.partition("-")
                first = int(end) - int(records) + 1
            confirmed = {
                group: int(place)
                for group, place in zip(self._groups, places, strict=True)
                if place
            }
            return self._writer.add(
                "sample",
                began=began,
                first=int(first),
                last=int(last),
                archived=int(archived),
                waiting=int(waiting),
                confirmed=confirmed,
            )

    def stop(self) -> None:
        self._stopped.set()
        if self.is_alive():
            self.join()
        self._client.close()


class Recorder(threading.Thread):
    """A thread that records the log as it grows, so that the checker knows dropped records."""

    def __init__(self, stream: meteor.Stream, writer: Writer) -> None:
        super().__init__(name="recorder", daemon=True)
        self._subscriber = stream.subscriber(
            initial_offset="earliest", on_gap="skip", on_gap_skipped=self._on_gap
        )
        self._writer = writer
        self._reached = 0
        self._stopped = threading.Event()

    def run(self) -> None:
        self._writer.add("reading", who="recorder", first=0)
        while not self._stopped.is_set():
            began = now()
            try:
                batch = self._subscriber.poll(0.2)
            except meteor.ConnectionFailed:
                continue
            except UNAVAILABLE as error:
                self._writer.add("unavailable", who="recorder", began=began, text=repr(error))
                self._stopped.wait(SAMPLE_S)
                continue
            except meteor.LogTruncated as error:
                self._writer.add("truncated", who="recorder", first=error.first, last=error.last)
                return
            except meteor.MeteorError as error:
                self._writer.add("error", who="recorder", text=repr(error))
                return
            if batch:
                record_batch(self._writer, "seen", "recorder", batch)
                self._reached = batch.last_offset + 1

    def catch_up(self, end: int, timeout_s: float) -> None:
        """Wait, with a timeout, until the recorder has read all records below `end` or failed."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive() and self._reached < end and time.monotonic() < deadline:
            time.sleep(SAMPLE_S)

    def stop(self) -> None:
        self._stopped.set()
        if self.is_alive():
            self.join()
        self._subscriber.close()

    def _on_gap(self, first: int, last: int) -> None:
        self._writer.add("gap", who="recorder", first=first, last=last)


def read_log(stream: meteor.Stream, writer: Writer, *, whole: bool) -> None:
    """Record the log, from offset 0 if it must be `whole`, or else from its first record."""
    if whole:
        writer.add("reading", who="log", first=0)
    for batch in stream.read(0 if whole else "earliest"):
        record_batch(writer, "log", "log", batch)


def record_batch(writer: Writer, kind: Any, who: str, batch: meteor.RecordBatch) -> None:
    values = [value_of(value) for value in batch.values()]
    writer.add(kind, who=who, first=batch.first_offset, values=values)


def record_store(stream: meteor.Stream, writer: Writer) -> None:
    """Record where the store ends, its flaws, and the contents of each of its files."""
    writer.add("archived", last=stream.store.bounds()[1])
    for flaw in stream.store.verify():
        if not flaw.harmless:
            text = f"{flaw.kind}: {flaw.place} {flaw.problem}"
            writer.add("flaw", first=flaw.first, last=flaw.last, text=text)
    for path in stream.store.files():
        with pq.ParquetFile(path) as file:
            table = file.read(columns=["offset", "value"])
        offsets = table.column("offset").to_pylist()
        values = [value_of(value) for value in table.column("value").to_pylist()]
        writer.add("stored", offsets=offsets, values=values, text=path.rpartition("/")[2])


def is_in_order(stream: meteor.Stream) -> bool:
    """Return False if the files cannot be listed at the moment, for example during a merge."""
    try:
        stream.store.files()
    except meteor.StoreUnavailable:
        return False
    except meteor.RecordsLost:
        pass  # waiting would not bring the records back
    return True


def wait_for(sampler: Sampler, enough: Any, timeout_s: float) -> bool:
    """Sample until ``enough(sample)`` is true; return whether that happened in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        sample = sampler.sample()
        if sample is not None and enough(sample):
            return True
        time.sleep(SAMPLE_S)
    return False
