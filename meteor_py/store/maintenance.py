"""Maintenance of a segment log: find damage, merge small segments, remove what does not count.

Nothing here changes what readers see. A segment that replaces others has their term and is at least
as long, so it counts instead of them from the moment it is visible. The others are removed once
every reader that may have listed them has had time to read them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pyarrow as pa

from meteor_py.errors import ReadError
from meteor_py.store.base import Flaw, Progress
from meteor_py.store.segment import Segment, Span, lay_out
from meteor_py.store.segment_file import examine
from meteor_py.store.segment_log import SegmentLog, unavailable
from meteor_py.store.storage import UNFINISHED

_log = logging.getLogger(__name__)

#: Seconds before a file is removed: a reader that has listed it may still want to read it.
GRACE_S = 600.0
#: Bytes of records held in memory to be written as one segment.
MEMORY_BYTES = 512 * 1024 * 1024


def verify(log: SegmentLog, start: int, stop: int, progress: Progress | None) -> Iterator[Flaw]:
    """As ``RingbufferStore.verify``."""
    segments = log.segments()
    spans = [span for span in lay_out(segments, stop) if span.stop > start]
    at = start
    for span in spans:
        if span.first > at:
            yield _missing(log, at, span.first - 1)
        yield from _verify_span(log, span)
        at = span.stop
        if progress is not None:
            progress(at - start, stop - start)
    if at < stop:
        yield _missing(log, at, stop - 1)
    used = {span.segment for span in spans}
    for segment in segments:
        if segment not in used and segment.first < stop and segment.last >= start:
            problem = "is not read: other segments hold these records"
            yield Flaw("leftover", segment.first, segment.last, segment.name, problem)


def _verify_span(log: SegmentLog, span: Span) -> Iterator[Flaw]:
    segment = span.segment
    with unavailable(log.stream, log.shown, "read"):
        data = log.storage.read(log.path(segment.name))
    if data is None:
        yield _missing(log, span.first, span.stop - 1)
        return
    problem = examine(data, segment)
    if problem is not None:
        yield Flaw("corrupt", span.first, span.stop - 1, segment.name, problem)
    if not span.exact:
        problem = f"counts only for {span.first} to {span.stop - 1}; the rest is elsewhere, or lost"
        yield Flaw("overlap", segment.first, segment.last, segment.name, problem)


def _missing(log: SegmentLog, first: int, last: int) -> Flaw:
    return Flaw("missing", first, last, log.path(""), "no segment holds these records")


def mend(log: SegmentLog, end: int) -> None:
    """Give each part of a segment that counts a file of its own, where the rest does not."""
    for span in log.spans(end):
        _try_merge(log, [span])


def compact(
    log: SegmentLog, start: int, stop: int, records: int, size: int, progress: Progress | None
) -> int:
    """As ``ParquetStore.compact``."""
    sizes = log.sizes()
    spans = [span for span in lay_out(sizes, stop) if span.stop > start]
    saved = done = 0
    for run in _runs(spans, sizes, records, size):
        saved += _try_merge(log, run)
        done += sum(span.stop - span.first for span in run)
        if progress is not None:
            progress(done, stop - start)
    return saved


def _runs(
    spans: list[Span], sizes: dict[Segment, int], records: int, size: int
) -> Iterator[list[Span]]:
    """Neighbours that together are not too large for one segment."""
    run: list[Span] = []
    rows = volume = 0
    for span in spans:
        more_rows, more_volume = span.stop - span.first, sizes[span.segment]
        if run and (
            run[-1].stop != span.first or rows + more_rows > records or volume + more_volume > size
        ):
            yield run
            run, rows, volume = [], 0, 0
        run.append(span)
        rows, volume = rows + more_rows, volume + more_volume
    if run:
        yield run


def _try_merge(log: SegmentLog, run: list[Span]) -> int:
    """Write one segment for what counts of adjacent spans; return how many fewer that makes.

    More than one if they are larger in memory than the files let think. Damage is left as it is:
    ``verify`` names it, and what is whole can still be read.
    """
    if len(run) == 1 and run[0].exact:
        return 0
    batches: list[pa.RecordBatch] = []
    size = written = 0
    try:
        for batch in log.read(run[0].first, run[-1].stop):
            batches.append(batch)
            size += batch.nbytes
            if size >= MEMORY_BYTES:
                written += _write(log, run, batches)
                batches, size = [], 0
    except ReadError as error:
        if len(run) > 1:  # those before and behind the damage
            half = len(run) // 2
            return _try_merge(log, run[:half]) + _try_merge(log, run[half:])
        _log.warning("A segment is left as it is: %s", error)
        return 0
    written += _write(log, run, batches)
    return len(run) - written


def _write(log: SegmentLog, run: list[Span], batches: list[pa.RecordBatch]) -> int:
    if not batches:
        return 0
    table = pa.Table.from_batches(batches)
    first, last = (table.column("offset")[index].as_py() for index in (0, -1))
    # Of those alone that it takes the place of.
    terms = [span.segment.term for span in run if span.first <= last and first < span.stop]
    log.write(max(terms), table)
    return 1


def sweep(log: SegmentLog, term: int, end: int, still: Callable[[], bool]) -> None:
    """Remove what is unfinished, covered by others, or above ``end``, after a while.

    Not what is of a later term: then we are the ones who have been overtaken.
    """
    entries = log.entries()
    if not still():
        return
    ages = {entry.name: entry.age_s for entry in entries}
    segments = [x for entry in entries if (x := Segment.parse(entry.name)) is not None]
    spans = lay_out(segments, end)
    used = {span.segment for span in spans}
    doomed = [name for name in ages if name.startswith(UNFINISHED)]
    for segment in segments:
        if segment in used or segment.term > term:
            continue
        covering = [ages[span.segment.name] for span in spans if span.meets(segment)]
        if min(covering, default=GRACE_S + 1) > GRACE_S:
            doomed.append(segment.name)
    for name in doomed:
        if ages[name] > GRACE_S and still():
            _remove(log, name)


def remove_below(log: SegmentLog, offset: int) -> None:
    """Remove the segments of which nothing counts from ``offset`` on.

    What counts decides, not the name: the tail of one that does not count must not begin to when
    those are gone that stood before it.
    """
    segments = log.segments()
    kept = {span.segment for span in lay_out(segments) if span.stop > offset}
    first = min((segment.first for segment in kept), default=offset)
    doomed = [x for x in segments if x not in kept and x.first < first]
    # By rising terms: the same must hold if this is cut short.
    for segment in sorted(doomed, key=lambda x: x.term):
        _remove(log, segment.name)


def _remove(log: SegmentLog, name: str) -> None:
    _log.info("Removing %s of stream %r at %s.", name, log.stream, log.shown)
    with unavailable(log.stream, log.shown, "written to"):
        log.storage.remove(log.path(name))
