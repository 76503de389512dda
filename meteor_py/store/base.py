"""What a store must be able to do, and what it may rely on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

#: Terms of one epoch, in the numbers that a store knows terms by: epoch x TERMS + term.
TERMS = 1_000_000
#: Called with what is done and what there is to do, in records.
Progress = Callable[[int, int], object]


class Bounds(NamedTuple):
    """What a store holds of one life of a stream."""

    #: The first offset, and the one behind the last; equal if there is nothing.
    first: int
    end: int
    #: The highest term that anything was appended in; 0 if there is nothing.
    term: int


class Flaw(NamedTuple):
    """Something that ``verify`` has found."""

    #: "missing": no readable record; "corrupt": not what was written; "overlap" and "leftover":
    #: offsets that are there twice, or bytes that count for nothing. These two do no harm.
    kind: Literal["missing", "corrupt", "overlap", "leftover"]
    #: The offsets concerned, both included.
    first: int
    last: int
    #: The file, or whatever the store has in place of files.
    place: str
    #: A sentence for people.
    problem: str

    @property
    def harmless(self) -> bool:
        """Whether every record can be read in spite of it."""
        return self.kind in ("overlap", "leftover")


@runtime_checkable
class RingbufferStore(Protocol):
    """The history of one stream: all its lives, one after the other.

    A stream that is deleted and created anew begins another *life* (its incarnation, a word of
    ``[0-9a-f]``), with offsets from 0. Tables and batches have the columns of ``ARROW_SCHEMA`` and
    consecutive offsets.

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
        """Give it an id, if it has none, or has the one to replace.

        Called when a stream is created, and with ``replacing`` when one is resumed: the server
        that had it before, should it come back, then finds the id of another.
        """

    def lives(self) -> list[str]:
        """The lives that it holds records of, the one that was last appended to last."""

    def bounds(self, life: str) -> Bounds:
        """How far a life goes, whether all of it counts or not. Called before each append."""

    def epochs(self, life: str) -> dict[int, int]:
        """The first offset of each epoch (``term // TERMS``) that counts. For ``resume=True``."""

    def append(self, life: str, term: int, records: pa.Table) -> None:
        """Keep records for good: when it returns, a crash of this machine does not lose them.

        The order in which an archiver appends is that of the offsets. The same records may come
        again, alone or with more behind them, after a failure whose outcome was unknown.

        Raises:
            StoreUnavailable: They are not kept, or it is not known.
        """

    def read(self, life: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """The records from ``start`` to before ``stop``, in order and without a hole.

        Called for a run of records or a single one; often not read to the end.

        Raises:
            RecordsLost: From the first offset on that is not there, to before the next that is.
            CorruptSegment: Some are damaged.
        """

    def locate(self, life: str, ms: int, start: int, stop: int) -> int:
        """The first offset from ``start`` to before ``stop`` that was appended at ``ms`` or later.

        ``stop`` if there is none. The column ``appended`` never goes back.
        """

    def verify(
        self, life: str, start: int, stop: int, progress: Progress | None = None
    ) -> Iterator[Flaw]:
        """Read everything from ``start`` to before ``stop``, and tell what is wrong with it."""

    def tidy(self, life: str, term: int, end: int, still: Callable[[], bool]) -> None:
        """Remove what does not count, at leisure. Called by the archiver now and then.

        Nothing of a later term than ``term``: that is for those to judge who know it. All else that
        counts lies below ``end``; that is certain only as long as ``still()`` is true,
        which must be asked after looking at what there is, and before anything is removed.
        """

    def delete(self, life: str, below: int | None = None) -> None:
        """Delete what lies below an offset, as far as that is easy; None: the whole life."""
