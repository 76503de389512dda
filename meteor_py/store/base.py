"""The protocol that every store implements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

#: Number of terms per epoch. A store sees one number that only increases: epoch * TERMS + term.
TERMS = 1_000_000
#: Number of states to keep from terms later than the last term with records.
_STATES_AHEAD = 3
#: Called with the number of records processed so far and the total.
Progress = Callable[[int, int], object]


class Bounds(NamedTuple):
    """The range of offsets that a store holds for one incarnation of a stream."""

    #: The first offset, and the offset after the last record; equal if the store has no records.
    first: int
    end: int
    #: The highest term of any append; 0 if there was none.
    term: int


class Flaw(NamedTuple):
    """A problem that ``verify`` found."""

    #: "missing": no file holds these records; "corrupt": the bytes have changed since they were
    #: written; "overlap": some offsets are stored twice; "leftover": a file that is no longer read.
    #: The last two are harmless.
    kind: Literal["missing", "corrupt", "overlap", "leftover"]
    #: The first and last offsets that are affected.
    first: int
    last: int
    #: The file's name, the folder's name if records are missing, or this store's equivalent.
    place: str
    #: A human-readable description.
    problem: str

    @property
    def harmless(self) -> bool:
        """Whether every record is still readable despite the flaw."""
        return self.kind in ("overlap", "leftover")


@runtime_checkable
class RingbufferStore(Protocol):
    """The history of one stream: all its incarnations, one after another.

    If a stream is deleted and recreated, a new *incarnation* begins. Its offsets start at 0, and
    its id consists of the characters ``[0-9a-f]``. Tables and batches have the columns of
    ``ARROW_SCHEMA`` and consecutive offsets.

    **Live records.** Normally, one archiver at a time appends. But an archiver that was replaced
    during a pause may not have noticed, and may still append in its older *term*. Terms only
    increase, and each begins where the live records end. So the live record at an offset is the one
    that was appended in the newest term that begins at or before that offset. If an archiver
    repeats an append within a term, the records are the same. A store may ignore an append whose
    term is older than the newest term in the store.

    **Commits.** The stream records where its history ends, and callers never read beyond that
    offset. The store may hold more records: some from an append whose archiver died before the
    commit, or some that the server lost in a failover. Archivers will append other records at these
    offsets.

    **Concurrency.** Any number of threads and processes may read while one appends.

    **Errors.** Raise ``StoreUnavailable`` for temporary failures (disk full, no connection). After
    an append fails this way, ``read`` must not return any part of it. Raise ``RecordsLost`` or
    ``CorruptSegment``, with the offsets, for records that are gone or damaged. Other records must
    stay readable.

    ``meteor_py.testing.store_contract`` tests this contract. Run it against your own store.
    """

    @property
    def uri(self) -> str | None:
        """The address, without secrets, at which other processes find the store, if any."""

    def identity(self) -> str | None:
        """Return the id that ``claim`` has set; None if there is none, as on an empty disk.

        Called whenever a stream is opened with the store, and before each append. The id
        distinguishes two stores that have the same address, such as a local path on two hosts.

        Raises:
            StoreMismatch: The store belongs to another stream.
            StoreUnavailable: The id could not be read.
        """

    def claim(self, identity: str, *, replacing: str | None = None) -> None:
        """Set the store's id if it has none, or if its id is ``replacing``.

        Called when a stream is created, and with ``replacing`` when a stream is resumed. If the
        stream's former server then starts again, its archiver finds the new id and appends nothing.

        Raises:
            StoreUnavailable: The id was not set, or the outcome is unknown.
        """

    def incarnations(self) -> list[str]:
        """Return the incarnations that have records here, in the order of their last appends."""

    def bounds(self, incarnation: str) -> Bounds:
        """Return the offsets that the store holds, committed or not, and the highest term.

        Called before each append.
        """

    def epochs(self, incarnation: str) -> dict[int, int]:
        """Return each epoch (``term // TERMS``) with its first live offset.

        Used by ``resume=True``, and by readers to detect that another server has continued the
        stream.
        """

    def append(self, incarnation: str, term: int, records: pa.Table) -> None:
        """Store records durably: after this method returns, they survive a machine crash.

        An archiver appends in offset order. After a failure with an unknown outcome, it may append
        the same records again, alone or followed by more.

        Raises:
            StoreUnavailable: The records were not stored, or the outcome is unknown.
        """

    def read(self, incarnation: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield the records from ``start`` to ``stop`` - 1, in order and without gaps.

        Called for many records or for a single one. Callers often stop before the end.

        Raises:
            RecordsLost: Records are missing. The error covers the first gap: all offsets up to the
                next record that exists, or up to ``stop`` - 1.
            CorruptSegment: Some records are damaged.
            StoreUnavailable: The store cannot be read at the moment.
        """

    def locate(self, incarnation: str, ms: int, start: int, stop: int) -> int:
        """Return the offset of the first record that was appended at ``ms`` or later.

        Search ``range(start, stop)``; return ``stop`` if there is no such record. Append times
        never decrease.
        """

    def verify(
        self, incarnation: str, start: int, stop: int, progress: Progress | None = None
    ) -> Iterator[Flaw]:
        """Read all records from ``start`` to ``stop`` - 1, and yield each problem."""

    def tidy(self, incarnation: str, term: int, end: int, is_current: Callable[[], bool]) -> None:
        """Remove superseded data in the background. The archiver calls this occasionally.

        Keep all data from terms later than ``term``, because only the archivers of those terms know
        whether it is live. All other live records are below ``end``, but this is certain only while
        ``is_current()`` returns true. Call ``is_current`` after listing the data, and again before
        each removal.
        """

    def delete(self, incarnation: str, below: int | None = None) -> None:
        """Delete the records below an offset (None: all), in whatever units suit the store."""


@runtime_checkable
class StatefulStore(RingbufferStore, Protocol):
    """A store that also keeps its stream's state. Optional: a store need not have these methods.

    Besides the records, ``resume=True`` needs this state: transaction fences, group positions, and
    the stream's epochs. Without it, a resumed stream has only its records.
    """

    def save_state(self, incarnation: str, term: int, state: bytes) -> None:
        """Store a term's state, durably and atomically. Replace any earlier state of this term.

        Called before each append. Keep the states of other terms until ``tidy`` or ``append`` shows
        that the store has records from a later term with its own state.

        Raises:
            StoreUnavailable: The state was not stored, or the outcome is unknown.
        """

    def load_states(self, incarnation: str) -> dict[int, bytes]:
        """Return an incarnation's states by term. Used by ``resume=True`` and by archivers."""


@runtime_checkable
class ColumnStore(RingbufferStore, Protocol):
    """A store that can read individual columns. Optional."""

    def read_columns(
        self, incarnation: str, start: int, stop: int, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Like ``read``, but yield only these ``ARROW_SCHEMA`` columns, in this order.

        Raises:
            RecordsLost, CorruptSegment, StoreUnavailable: See ``read``.
        """


#: Reads one batch of records. Call it once, in any thread.
DeferredBatch = Callable[[], pa.RecordBatch]


@runtime_checkable
class ConcurrentStore(ColumnStore, Protocol):
    """A store from which several threads can read batches at once. Optional."""

    def deferred_batches(
        self, incarnation: str, start: int, stop: int, columns: Sequence[str] | None = None
    ) -> Iterator[DeferredBatch]:
        """Return the batches of ``read`` or ``read_columns`` as functions that read them.

        Threads may call the functions in any order and at the same time, but only one thread at a
        time uses the iterator. A function may be dropped without a call.

        Args:
            columns: The columns to read; None for all.

        Raises:
            RecordsLost, CorruptSegment, StoreUnavailable: The iterator or the functions raise
                these; see ``read``.
        """


def read_columns(
    store: RingbufferStore, incarnation: str, start: int, stop: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield some columns of the records in any store; see ``ColumnStore.read_columns``."""
    if isinstance(store, ColumnStore):
        yield from store.read_columns(incarnation, start, stop, columns)
        return
    for batch in store.read(incarnation, start, stop):
        yield batch.select(list(columns))


def deferred_batches(
    store: RingbufferStore,
    incarnation: str,
    start: int,
    stop: int,
    columns: Sequence[str] | None = None,
) -> Iterator[DeferredBatch]:
    """Return the batches of any store; see ``ConcurrentStore.deferred_batches``.

    If a subclass of a ``ConcurrentStore`` overrides only ``read`` or ``read_columns``, its methods
    are called.
    """
    if isinstance(store, ConcurrentStore) and _is_up_to_date(type(store)):
        yield from store.deferred_batches(incarnation, start, stop, columns)
        return
    batches = (
        store.read(incarnation, start, stop)
        if columns is None
        else read_columns(store, incarnation, start, stop, columns)
    )
    for batch in batches:
        yield partial(_same, batch)


def _is_up_to_date(store: type) -> bool:
    """Return whether no subclass changes how a store reads without changing deferred_batches."""
    reading = {"read", "read_columns", "deferred_batches"}
    newest = next((base for base in store.__mro__ if reading & vars(base).keys()), store)
    return "deferred_batches" in vars(newest)


def _same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def states_to_drop(states: Collection[int], term: int) -> list[int]:
    """Return the terms whose states no resume will need. ``term`` is the newest with records.

    Later terms have not appended any records yet, and only the last few of them can still do so.
    """
    below = sorted(each for each in states if each < term)
    above = sorted(each for each in states if each > term)
    return below[: None if term in states else -1] + above[:-_STATES_AHEAD]
