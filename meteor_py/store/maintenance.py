"""Segment log maintenance: finding damage, merging small segments, removing superseded ones.

Maintenance never changes the records that readers see. A segment that replaces others has the
highest of their terms and covers all of their live records, so it supersedes them as soon as it is
visible. The others are removed after a grace period. Until then, readers that have listed them can
still read them.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate

import pyarrow as pa

from meteor_py.errors import ReadError
from meteor_py.store.base import TERMS, Flaw, Progress, states_to_drop
from meteor_py.store.errors import unavailable
from meteor_py.store.segment import Segment, Span, live_spans, state_name, state_term
from meteor_py.store.segment_file import examine
from meteor_py.store.segment_log import SegmentLog
from meteor_py.store.storage import UNFINISHED

_log = logging.getLogger(__name__)

#: Seconds to wait before removing a file, because a reader that has listed it may still need it.
GRACE_S = 600.0
#: When merging, write a segment as soon as the records in memory have this many bytes.
MEMORY_BYTES = 512 * 1024 * 1024
#: Adjacent segments that each have fewer records than one of these levels are merged once they
#: reach that level together. As a result, a record is rewritten at most once per level, and each
#: level has few segments.
_LEVELS = (16, 256, 4_096, 65_536, 1_048_576)
#: Minimum and maximum number of segments to merge at a time, and the merged file's maximum bytes.
_MERGE_MIN, _MERGE_MAX = 4, 64
_MERGE_BYTES = 32 * 1024 * 1024
#: Segments with more than this many bytes do not count as small, however few records they have.
_SMALL_BYTES = 2 * 1024 * 1024


def verify(log: SegmentLog, start: int, stop: int, progress: Progress | None) -> Iterator[Flaw]:
    """See ``RingbufferStore.verify``."""
    table = log.table()
    segments, spans = table.segments, table.spans(stop, start)
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
        if segment in used or _is_merged(segment, spans):
            continue
        if segment.first < stop and segment.last >= start:
            problem = "the file is never read, because other segments hold these records"
            yield Flaw("leftover", segment.first, segment.last, segment.name, problem)


def _is_merged(segment: Segment, spans: list[Span]) -> bool:
    """Return whether another live segment holds all of this one's records.

    If so, ``tidy`` will remove this one.
    """
    at = bisect_right(spans, segment.first, key=lambda span: span.segment.first) - 1
    if at < 0:
        return False
    merged = spans[at].segment
    return merged.term >= segment.term and merged.last >= segment.last


def _verify_span(log: SegmentLog, span: Span) -> Iterator[Flaw]:
    segment = span.segment
    with unavailable(log.stream, log.location, "read"):
        data = log.storage.read(log.path(segment.name))
    if data is None:
        yield _missing(log, span.first, span.stop - 1)
        return
    problem = examine(data, segment)
    if problem is not None:
        yield Flaw("corrupt", span.first, span.stop - 1, segment.name, problem)
    if not span.exact:
        problem = f"only records {span.first} to {span.stop - 1} are live; others were replaced"
        yield Flaw("overlap", segment.first, segment.last, segment.name, problem)


def _missing(log: SegmentLog, first: int, last: int) -> Flaw:
    return Flaw("missing", first, last, log.path(""), "no segment holds these records")


def mend(log: SegmentLog, end: int) -> None:
    """Rewrite each partly live segment as a file that contains only the live records."""
    for span in log.spans(end):
        _try_merge(log, [span])


def compact(
    log: SegmentLog, start: int, stop: int, records: int, size: int, progress: Progress | None
) -> int:
    """See ``ParquetStore.compact``."""
    sizes = log.sizes()
    saved = done = 0
    for run in _runs(live_spans(sizes, stop, start), sizes, records, size):
        saved += _try_merge(log, run)
        done += sum(span.stop - span.first for span in run)
        if progress is not None:
            progress(done, stop - start)
    return saved


def _runs(
    spans: list[Span], sizes: dict[Segment, int], records: int, size: int
) -> Iterator[list[Span]]:
    """Yield runs of adjacent spans of one epoch that together fit into one segment."""
    run: list[Span] = []
    rows = volume = 0
    for span in spans:
        more_rows, more_volume = span.stop - span.first, sizes[span.segment]
        if run and (
            not _follows(run[-1], span) or rows + more_rows > records or volume + more_volume > size
        ):
            yield run
            run, rows, volume = [], 0, 0
        run.append(span)
        rows, volume = rows + more_rows, volume + more_volume
    if run:
        yield run


def merge_small(
    log: SegmentLog, term: int, end: int, is_current: Callable[[], bool], large: set[Segment]
) -> bool:
    """Merge one run of small segments; return whether a merge was attempted.

    Args:
        term: Segments from later terms are not merged.
        end: The end of the archived records.
        is_current: Whether ``end`` is certain; see ``RingbufferStore.tidy``.
        large: Segments that are not worth merging. The call adds any more that it finds.
    """
    spans = log.spans(end)
    while (run := _small_run(spans, term, large)) is not None:
        sizes = {span.segment: _size_of(log, span.segment) for span in run}
        too_large = {segment for segment, size in sizes.items() if size > _SMALL_BYTES}
        if not too_large:
            break
        large |= too_large
    if run is None or not is_current():
        return False
    volumes = accumulate(sizes[span.segment] for span in run)
    run = [span for span, volume in zip(run, volumes, strict=True) if volume <= _MERGE_BYTES]
    if _try_merge(log, run) <= 0:
        large |= {span.segment for span in run}  # no gain, perhaps due to damage: never try again
    return True


def _size_of(log: SegmentLog, segment: Segment) -> int:
    with unavailable(log.stream, log.location, "read"):
        return log.storage.size(log.path(segment.name))


def _small_run(spans: list[Span], term: int, large: set[Segment]) -> list[Span] | None:
    """Return adjacent segments from one epoch that should be merged, or None."""
    for level in _LEVELS:
        run: list[Span] = []
        for span in spans:
            segment = span.segment
            is_small = len(segment) < level and segment.term <= term and segment not in large
            is_small = is_small and span.exact
            if run and not (is_small and len(run) < _MERGE_MAX and _follows(run[-1], span)):
                if _is_enough(run, level):
                    return run
                run = []
            if is_small:
                run.append(span)
        if _is_enough(run, level):
            return run
    return None


def _follows(before: Span, span: Span) -> bool:
    """Return whether ``span`` directly follows ``before`` in the same epoch."""
    same_epoch = before.segment.term // TERMS == span.segment.term // TERMS
    return before.stop == span.first and same_epoch


def _is_enough(run: list[Span], level: int) -> bool:
    return len(run) >= _MERGE_MIN and run[-1].stop - run[0].first >= level


def _try_merge(log: SegmentLog, run: list[Span]) -> int:
    """Write the live records of adjacent spans as one segment; return how many segments this saves.

    Write several segments if the records need more memory than the file sizes suggest. Leave
    damaged segments unchanged: ``verify`` reports them, and their intact parts are readable.
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
        if len(run) > 1:  # merge the segments before and after the damage
            half = len(run) // 2
            return _try_merge(log, run[:half]) + _try_merge(log, run[half:])
        _log.warning("A damaged segment was not rewritten: %s", error)
        return 0
    written += _write(log, run, batches)
    return len(run) - written


def _write(log: SegmentLog, run: list[Span], batches: list[pa.RecordBatch]) -> int:
    if not batches:
        return 0
    table = pa.Table.from_batches(batches)
    first, last = (table.column("offset")[index].as_py() for index in (0, -1))
    # Use only the terms of the segments that this one replaces.
    terms = [span.segment.term for span in run if span.first <= last and first < span.stop]
    log.write(max(terms), table)
    return 1


def sweep(log: SegmentLog, term: int, end: int, is_current: Callable[[], bool]) -> None:
    """Remove files that are unfinished, superseded or above ``end``, after a grace period.

    Keep segments and states from later terms, because their archivers have replaced the caller.
    """
    entries = log.entries()
    if not is_current():
        return
    ages = {entry.name: entry.age_s for entry in entries}
    segments = [x for entry in entries if (x := Segment.parse(entry.name)) is not None]
    spans = live_spans(segments, end)
    firsts, stops = [span.first for span in spans], [span.stop for span in spans]
    used = {span.segment for span in spans}
    doomed = [name for name in ages if name.startswith(UNFINISHED)]
    for segment in segments:
        if segment in used or segment.term > term:
            continue
        replacing = spans[bisect_right(stops, segment.first) : bisect_right(firsts, segment.last)]
        replacements = [ages[span.segment.name] for span in replacing]
        if min(replacements, default=GRACE_S + 1) > GRACE_S:
            doomed.append(segment.name)
    states = [number for name in ages if (number := state_term(name)) is not None]
    newest = max((segment.term for segment in segments), default=0)
    doomed += [state_name(each) for each in states_to_drop(states, newest) if each <= term]
    for name in doomed:
        if ages[name] > GRACE_S and is_current():
            _remove(log, name)


def remove_below(log: SegmentLog, offset: int) -> None:
    """Remove the segments that have no live records at or above ``offset``.

    Consider the live part of a segment, not the range in its name. Otherwise the segments that
    supersede its tail could be removed before it, and the tail would become live again.
    """
    table = log.table()
    segments = table.segments
    kept = {span.segment for span in table.spans(start=offset)}
    first = min((segment.first for segment in kept), default=offset)
    doomed = [x for x in segments if x not in kept and x.first < first]
    # Remove older terms first, so that an interruption makes no superseded record live again.
    for segment in sorted(doomed, key=lambda x: x.term):
        _remove(log, segment.name)


def _remove(log: SegmentLog, name: str) -> None:
    _log.info("Removing %s from stream %r at %s.", name, log.stream, log.location)
    with unavailable(log.stream, log.location, "written to"):
        log.storage.remove(log.path(name))
