"""The protocol that every store implements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

#: Terms of one epoch, in the numbers that a store knows terms by: epoch x TERMS + term.
TERMS = 1_000_000
#: Called with the number of records processed so far and in total.
Progress = Callable[[int, int], object]


class Bounds(NamedTuple):
    """The range of one incarnation of a stream that a store holds."""

    #: The first offset, and the one behind the last; equal if there is nothing.
    first: int
    end: int
    #: The highest term that anything was appended in; 0 if there is nothing.
    term: int


class Flaw(NamedTuple):
    """A problem that ``verify`` found."""

    #: "missing": no readable record; "corrupt": not what was written; "overlap" and "leftover":
    #: offsets that are there twice, or bytes that count for nothing. These two do no harm.
    kind: Literal["missing", "corrupt", "overlap", "leftover"]
    #: The offsets concerned, both included.
    first: int
    last: int
    #: The file, or its equivalent in this store.
    place: str
    #: A sentence for people.
    problem: str

    @property
    def harmless(self) -> bool:
        """Whether every record can be read in spite of it."""
        return self.kind in ("overlap", "leftover")


@runtime_checkable
class RingbufferStore(Protocol):
    """The history of one stream: all its incarnations, one after the other.

    A stream that is deleted and created again begins another *incarnation*, with offsets from 0 and
    an id of the characters ``[0-9a-f]``. Tables and batches have the columns of ``ARROW_SCHEMA``
    and consecutive offsets.

    **Who calls.** One archiver at a time appends: mostly. One that was paused, and does not know
    yet that another has taken its place, may still append, in its older *term*. Terms only rise,
    and each begins where the records end that count. So of everything that was ever appended,
    what counts at an offset is what was appended in the newest term that begins at or before it;
    within a term, repeats hold the same records. An append in an older term than one that is there
    already may be ignored.

    **What counts.** The stream itself knows how far its history goes. Callers ask for nothing from
    there on, whatever the store holds: an append whose archiver died before it was committed, or
    the tail of a server that was failed over. Such offsets will be appended again.

    **Concurrency.** Any number of threads and processes read while one appends.

    **Errors.** ``StoreUnavailable`` for what may pass by itself (disk full, no connection): it
    must leave nothing visible that ``read`` could return. ``RecordsLost`` and ``CorruptSegment``
    for records that are gone or damaged, with their offsets; others stay readable.

    ``meteor_py.testing.store_contract`` is this text as tests; run it on your own store.
    """

    @property
    def uri(self) -> str | None:
        """The address at which other processes find it, without secrets; None: nowhere."""

    def identity(self) -> str | None:
        """The id that was claimed for this stream; None if there is nothing at this address.

        Called whenever a stream is opened with the store, and before each append: two places with
        the same address (a local path on two hosts) have different ids.

        Raises:
            StoreUnavailable: It could not be looked at.
        """

    def claim(self, identity: str, *, replacing: str | None = None) -> None:
        """Set its id, if it has none or has the id ``replacing``.

        Called when a stream is created, and with ``replacing`` when a stream is resumed. If the
        server that had the stream before comes back, it finds that the id has changed.
        """

    def incarnations(self) -> list[str]:
        """The incarnations with records here; the one that was last appended to comes last."""

    def bounds(self, incarnation: str) -> Bounds:
        """The range that it holds, whether all of it counts or not. Called before each append."""

    def epochs(self, incarnation: str) -> dict[int, int]:
        """The first offset of each epoch (``term // TERMS``) that counts. For ``resume=True``."""

    def append(self, incarnation: str, term: int, records: pa.Table) -> None:
        """Keep records for good: when it returns, a crash of this machine does not lose them.

        The order in which an archiver appends is that of the offsets. The same records may come
        again, alone or with more behind them, after a failure whose outcome was unknown.

        Raises:
            StoreUnavailable: They are not kept, or it is not known.
        """

    def read(self, incarnation: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """The records from ``start`` to before ``stop``, in order and without a hole.

        Called for a run of records or a single one; often not read to the end.

        Raises:
            RecordsLost: From the first offset on that is not there, to before the next that is.
            CorruptSegment: Some are damaged.
        """

    def locate(self, incarnation: str, ms: int, start: int, stop: int) -> int:
        """The first offset from ``start`` to before ``stop`` that was appended at ``ms`` or later.

        ``stop`` if there is none. The column ``appended`` never goes back.
        """

    def verify(
        self, incarnation: str, start: int, stop: int, progress: Progress | None = None
    ) -> Iterator[Flaw]:
        """Read everything from ``start`` to before ``stop``, and tell what is wrong with it."""

    def tidy(self, incarnation: str, term: int, end: int, still: Callable[[], bool]) -> None:
        """Remove what does not count, at leisure. Called by the archiver now and then.

        Nothing of a later term than ``term``: that is for those to judge who know it. All else that
        counts lies below ``end``; that is certain only as long as ``still()`` is true,
        which must be asked after looking at what there is, and before anything is removed.
        """

    def delete(self, incarnation: str, below: int | None = None) -> None:
        """Delete what lies below an offset, as far as that is easy; None: all of it."""
