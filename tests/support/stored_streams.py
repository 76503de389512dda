"""Helpers for tests that read a store and a ring as one log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

import meteor_py as meteor
from meteor_py.store.base import DeferredBatch
from meteor_py.store.read_ahead import StoreReadAhead
from tests.support.readers import check_values, fill

NAME = "kept"


def kept(client: meteor.Client, root: Path, **settings: Any) -> meteor.Stream:
    """Open a stream with a file store and without a background archiver."""
    defaults: dict[str, Any] = {"capacity": 10, "store": root, "archive": False}
    return client.stream(NAME, **defaults | settings)


@contextmanager
def archiving(stream: meteor.Stream, **options: Any) -> Iterator[meteor.Archiver]:
    """During the block, run an archiver that writes records at once."""
    archiver = stream.archiver(**{"segment_age": 0.0} | options)
    archiver.start()
    try:
        yield archiver
    finally:
        archiver.close()


def archive(stream: meteor.Stream) -> int:
    """Archive all records, in one segment if they are few; return the end offset."""
    with archiving(stream, segment_age=1e6):
        return stream.store.flush()


def fill_segments(stream: meteor.Stream, *sizes: int) -> int:
    """Append frames of these sizes, and archive each as a segment; return the next offset."""
    end = 0
    with archiving(stream):
        for size in sizes:
            end = fill(stream, size)
            assert stream.store.flush() == end
    return end


def read_all(stream: meteor.Stream, *span: Any) -> list[int]:
    """Return the offsets from ``stream.read``, after checking the values."""
    return list(chain.from_iterable(check_values(batch) for batch in stream.read(*span)))


def records_of(stream: meteor.Stream, *span: Any) -> list[meteor.Record]:
    return list(chain.from_iterable(stream.read(*span)))


def segments(root: Path) -> list[Path]:
    """Return the files with records, in offset order."""
    return sorted(root.rglob("*.parquet"))


def read_ahead_of(sub: meteor.Subscriber) -> StoreReadAhead:
    """Return a subscriber's store reader."""
    store = sub._fetcher.buffer._log._store
    assert store is not None, "the stream has no store"
    return store._batches


def wait_fetched(ahead: StoreReadAhead) -> None:
    """Wait until the batches that are fetched ahead have arrived."""
    assert ahead._batches is not None, "nothing is fetched ahead"
    for prefetch in ahead._batches._ahead:
        assert prefetch._done.wait(30), "the store does not respond"


def read_straight(sub: meteor.Subscriber) -> list[int]:
    """Read until a batch from the store has been fetched in advance; return the offsets."""
    offsets: list[int] = []
    for _ in range(10):
        offsets += check_values(sub.poll(timeout=5))
        ahead = read_ahead_of(sub)
        if ahead.ahead > 0:
            wait_fetched(ahead)
            return offsets
    raise AssertionError("No batch was fetched in advance, so this test proves nothing.")


class ObservedStore(meteor.ParquetStore):
    """A store that reports each batch after reading it, before returning it."""

    def __init__(self, root: Path, stream: str = NAME) -> None:
        super().__init__(root, stream)
        #: Called with the first offset of a batch, in the thread that reads it.
        self.on_batch: Callable[[int], object] = lambda first: None
        #: The first offsets of all batches that were read.
        self.batches: list[int] = []

    def deferred_batches(
        self, incarnation: str, start: int, stop: int, columns: Sequence[str] | None = None
    ) -> Iterator[DeferredBatch]:
        for read_batch in super().deferred_batches(incarnation, start, stop, columns):
            yield partial(self._observed, read_batch)

    def _observed(self, read_batch: DeferredBatch) -> pa.RecordBatch:
        batch = read_batch()
        first = batch.column("offset")[0].as_py()
        self.batches.append(first)
        self.on_batch(first)
        return batch
