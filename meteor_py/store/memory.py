"""A store in this process's memory, for tests and for ``fake://``."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from meteor_py.errors import RecordsLost
from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.redis import reply_errors
from meteor_py.store.base import (
    TERMS,
    Bounds,
    ColumnStore,
    Flaw,
    Progress,
    StatefulStore,
    states_to_drop,
)


class _Incarnation:
    """One incarnation: its live records as batches in offset order, its term, epochs and states."""

    def __init__(self) -> None:
        self.term = 0
        self.epochs: dict[int, int] = {}
        self.states: dict[int, bytes] = {}
        self.firsts: list[int] = []
        self.batches: list[pa.RecordBatch] = []

    @property
    def end(self) -> int:
        return self.firsts[-1] + len(self.batches[-1]) if self.firsts else 0

    def cut(self, end: int) -> None:
        """Drop all records at or above ``end``."""
        while self.firsts and self.firsts[-1] >= end:
            self.firsts.pop()
            self.batches.pop()
        self.epochs = {epoch: first for epoch, first in self.epochs.items() if first < end}
        if self.firsts and self.end > end:
            self.batches[-1] = self.batches[-1].slice(0, end - self.firsts[-1])


class MemoryStore(StatefulStore, ColumnStore):
    """A store that keeps one stream's history until the process ends.

    >>> store = MemoryStore("orders")
    >>> store.uri is None
    True
    """

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self._identity: str | None = None
        self._incarnations: dict[str, _Incarnation] = {}
        self._lock = threading.Lock()

    @property
    def uri(self) -> str | None:
        return None

    def __repr__(self) -> str:
        return f"<MemoryStore of {self.stream!r}>"

    def identity(self) -> str | None:
        return self._identity

    def claim(self, identity: str, *, replacing: str | None = None) -> None:
        with self._lock:
            if self._identity in (None, replacing):
                self._identity = identity

    def incarnations(self) -> list[str]:
        with self._lock:
            found = [(held.term, name) for name, held in self._incarnations.items() if held.firsts]
        return [name for _, name in sorted(found)]

    def bounds(self, incarnation: str) -> Bounds:
        with self._lock:
            found = self._incarnations.get(incarnation)
            if found is None or not found.firsts:
                return Bounds(0, 0, 0 if found is None else found.term)
            return Bounds(found.firsts[0], found.end, found.term)

    def epochs(self, incarnation: str) -> dict[int, int]:
        with self._lock:
            found = self._incarnations.get(incarnation)
            return {} if found is None else dict(found.epochs)

    def append(self, incarnation: str, term: int, records: pa.Table) -> None:
        first = records.column("offset")[0].as_py()
        with self._lock:
            found = self._incarnations.setdefault(incarnation, _Incarnation())
            if term < found.term:
                return  # another archiver has replaced the caller
            if term == found.term and first + len(records) <= found.end:
                return  # a repeated append
            found.term = term
            found.cut(first)
            found.epochs.setdefault(term // TERMS, first)
            for batch in records.to_batches():
                if len(batch):
                    found.firsts.append(batch.column("offset")[0].as_py())
                    found.batches.append(batch)

    def read(self, incarnation: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        while start < stop:
            with self._lock:
                found = self._incarnations.get(incarnation) or _Incarnation()
                index = bisect_right(found.firsts, start) - 1
                batch = found.batches[index] if index >= 0 else None
                first = found.firsts[index] if index >= 0 else 0
                following = found.firsts[index + 1] if index + 1 < len(found.firsts) else stop
            if batch is None or start >= first + len(batch):
                raise reply_errors.records_lost(self.stream, start, min(following, stop) - 1)
            part = batch.slice(start - first, stop - start)
            yield part
            start += len(part)

    def read_columns(
        self, incarnation: str, start: int, stop: int, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        for batch in self.read(incarnation, start, stop):
            yield batch.select(list(columns))

    def save_state(self, incarnation: str, term: int, state: bytes) -> None:
        with self._lock:
            found = self._incarnations.setdefault(incarnation, _Incarnation())
            found.states[term] = state
            for each in states_to_drop(found.states, found.term):
                del found.states[each]

    def load_states(self, incarnation: str) -> dict[int, bytes]:
        with self._lock:
            found = self._incarnations.get(incarnation)
            return {} if found is None else dict(found.states)

    def locate(self, incarnation: str, ms: int, start: int, stop: int) -> int:
        import pyarrow.compute as pc

        for batch in self.read(incarnation, start, stop):
            late = pc.greater_equal(batch.column("appended").cast(pa.int64()), ms)
            index = pc.index(late, True).as_py()
            if index >= 0:
                return int(batch.column("offset")[index].as_py())
        return stop

    def verify(
        self, incarnation: str, start: int, stop: int, progress: Progress | None = None
    ) -> Iterator[Flaw]:
        at = start
        while at < stop:
            try:
                for batch in self.read(incarnation, at, stop):
                    batch.validate(full=True)
                    assert batch.schema.equals(ARROW_SCHEMA)
                    at += len(batch)
                    if progress is not None:
                        progress(at - start, stop - start)
            except RecordsLost as error:
                yield Flaw("missing", error.first, error.last, "memory", str(error))
                at = error.last + 1

    def tidy(self, incarnation: str, term: int, end: int, is_current: Callable[[], bool]) -> None:
        """Do nothing: an append drops the records that it supersedes."""

    def delete(self, incarnation: str, below: int | None = None) -> None:
        with self._lock:
            if below is None:
                self._incarnations.pop(incarnation, None)
                return
            found = self._incarnations.get(incarnation)
            while found and found.firsts and found.firsts[0] + len(found.batches[0]) <= below:
                found.firsts.pop(0)
                found.batches.pop(0)
