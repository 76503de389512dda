"""Readers for batch and streaming queries: they plan on the driver, and read in tasks.

For each run of a streaming query, the engine keeps one reader alive in a process on the driver.
Tasks get a copy that was pickled before the run, so they know only the options and their partition.
After a crash before the first commit, the engine calls ``initialOffset`` again, so the result must
not depend on the server (see ``offsets``). The engine calls ``commit`` one batch late, and never
for the last batch. So the reader confirms the ``start`` that the engine passes to ``latestOffset``.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from meteor_py import (
    LeaseLost,
    LogTruncated,
    MeteorError,
    OutcomeUnknown,
    Position,
    StreamNotFound,
)
from pyspark_meteor.columns import check_schema
from pyspark_meteor.membership import Membership, group_start
from pyspark_meteor.offsets import (
    INITIAL,
    Offsets,
    from_spark,
    is_initial,
    is_start,
    start_to_spark,
    to_spark,
)
from pyspark_meteor.options import SourceOptions, parse_source
from pyspark_meteor.outages import outlast
from pyspark_meteor.planning import Planner
from pyspark_meteor.ranges import Range, bounded, ranges_between
from pyspark_meteor.reading import read_range

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

#: A limit that has no effect. The engine passes it to ``latestOffset``, which applies our limits.
_UNLIMITED = 2**53


class BatchReader(DataSourceReader):
    """The reader for one batch query.

    It deliberately has no ``pushFilters``. Spark 4.3 reuses the plan that results from pushed
    filters whenever the DataFrame is used again: after ``frame.where("offset = 7")``,
    ``frame.count()`` would be 1.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_schema(schema, options)
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return the ranges that tasks read.

        Raises:
            StreamNotFound: A stream that the query names does not exist.
            ValueError: A starting or ending offset is beyond the stream's end.
        """
        return outlast(self._options.server, self._plan)

    def _plan(self) -> list[Range]:
        options, planner = self._options, Planner(self._options)
        ranges: list[Range] = []
        for name in planner.names():
            try:
                start = planner.resolve(name, options.starting[name])
                end = planner.resolve(name, options.ending[name])
            except StreamNotFound:
                if options.pattern is None:
                    raise
                continue  # deleted since the names were listed
            if start.offset < end.offset:
                ranges.append(Range(name, start.offset, end))
        return planner.divide(ranges)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of a partition as Arrow batches."""
        if isinstance(partition, Range):  # without ranges, Spark passes a partition of another type
            yield from read_range(self._options, self._schema, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader for a streaming query. The constructor neither raises nor contacts the server."""

    def __init__(self, given: dict[str, str], schema: StructType) -> None:
        self._given = given
        self._schema = schema
        # Parse the options here, on the driver, because a task might find another default server.
        # The engine would hide an error raised here, so a later call raises it.
        with suppress(Exception):
            _ = self._options
        #: The streams' ends when the engine last asked.
        self._ends: Offsets = {}
        #: The ends when a run with Trigger.AvailableNow began.
        self._target: Offsets | None = None
        self._members: dict[str, Membership] = {}
        #: Positions that the query had reached when the server lost records before them.
        self._lost: Offsets = {}
        self._logged_losses: Offsets = {}
        self._waiting_since: float | None = None
        self._missing_logged = False
        self._stopping = False

    # -- called by the engine on the driver ----------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """Return a fixed placeholder. The first batch determines where the query begins."""
        _ = self._options  # raises if the options are wrong
        return INITIAL

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next batch, or ``start`` if there are too few records."""
        return self._outlast(lambda: self._find_latest(start, limit))

    def _find_latest(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        known = from_spark(start)
        self._ends = self._find_ends()
        if is_initial(start):
            return start_to_spark(self._find_start())
        back = self._check_losses(known)
        self._confirm({name: known[name] for name in known if name not in back})
        # Drop deleted streams from the offsets, since they may be recreated. For a new stream,
        # first return its beginning, which must be in the checkpoint before any read.
        new = self._find_new(known)
        end = self._ends | new
        if self._target is not None:
            end = _cap(end, self._target, known)
            new = {name: first for name, first in new.items() if name in self._target}
        if not isinstance(limit, ReadAllAvailable):
            end = self._apply_limits(known, end)
        found = _ignore_new_epochs(known, end | new | back)
        return start if found == known else to_spark(found)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the record limit for Spark to report. ``latestOffset`` applies all limits."""
        limits = self._options.limits
        return ReadMaxRows(limits.max_records or _UNLIMITED) if limits else ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the streams' last known ends, from which the engine computes the lag."""
        return to_spark(self._ends) if self._ends else None

    def prepareForTriggerAvailableNow(self) -> None:
        """Record the streams' ends, at which this run will stop."""
        self._target = self._outlast(self._find_ends)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the ranges for a batch's tasks to read."""
        return self._outlast(lambda: self._find_partitions(start, end))

    def _find_partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Range]:
        known = from_spark(start)
        if is_initial(start) and not is_start(end):
            self._ends = self._find_ends()
            # An older release planned this batch and determined its start in the same way.
            known = self._find_start()
        return self._planner.divide(ranges_between(known, from_spark(end)))

    def commit(self, end: dict[str, Any]) -> None:
        """Confirm a batch to the group once Spark has committed it."""
        done = from_spark(end).items()
        # The server would refuse to confirm records that it has lost.
        kept = {name: at for name, at in done if self._lost.get(name) != at}
        self._outlast(lambda: self._confirm(kept))

    def stop(self) -> None:
        """Release the leases. The engine does not call this if it crashes."""
        self._stopping = True
        for name in list(self._members):
            self._leave(name)

    # -- called by the engine in a task --------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of a partition as Arrow batches."""
        if isinstance(partition, Range):
            yield from read_range(self._options, self._schema, partition)

    # -- internal ------------------------------------------------------------------------------

    @cached_property
    def _options(self) -> SourceOptions:
        options = parse_source(self._given, streaming=True)
        check_schema(self._schema, options)
        return options

    @cached_property
    def _planner(self) -> Planner:
        planner = Planner(self._options)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handle_sigterm)
        return planner

    def _outlast(self, work: Callable[[], _T]) -> _T:
        return outlast(self._options.server, work)

    def _handle_sigterm(self, number: int, frame: object) -> None:
        """Release the leases, then exit.

        The engine ends a query with SIGTERM, which would end Python without cleaning up. It also
        closes its connection, which makes Python call ``stop``. Whichever happens first cleans up.
        The signal must not interrupt ``stop``.
        """
        if not self._stopping:
            self.stop()
            sys.exit(0)

    def _find_ends(self) -> Offsets:
        """Return the streams' ends. Warn once if a stream is missing, perhaps misspelled."""
        ends = self._planner.ends()
        if not self._missing_logged:
            for name in self._options.streams:
                if name not in ends:
                    _log.warning(
                        "There is no stream %r. The query will read it once it exists. If the name "
                        "is misspelled, stop the query; `meteor streams ls` lists all streams.",
                        name,
                    )
            self._missing_logged = True
        return ends

    def _find_start(self) -> Offsets:
        """Return where the query begins. Streams found later are read from their first record."""
        return {
            name: end._replace(offset=self._resolve_start(name))
            for name, end in self._ends.items()
            if self._target is None or name in self._target
        }

    def _resolve_start(self, name: str) -> int:
        spec, group = self._options.starting[name], self._options.group

        def resolve() -> int:
            if spec.kind == "group":
                raise ValueError(
                    f"startingOffsets=group: stream {name!r} has no group {group!r} yet. Create it "
                    "with stream.seek_group(), or choose another start."
                )
            return self._planner.resolve(name, spec).offset

        if group is not None:
            return group_start(self._planner.open(name), group, resolve)
        return resolve()

    def _find_new(self, known: Offsets) -> Offsets:
        """Return the beginnings of streams that are new to the query or were recreated."""
        return {
            name: end._replace(offset=self._find_beginning(name, end.offset))
            for name, end in self._ends.items()
            if name not in known or known[name].incarnation != end.incarnation
        }

    def _find_beginning(self, name: str, end: int) -> int:
        first = min(self._planner.first(name), end)
        if self._options.group is None:
            return first
        return group_start(self._planner.open(name), self._options.group, lambda: first)

    def _check_losses(self, known: Offsets) -> Offsets:
        """Check whether the server has lost records that the query has read.

        Returns:
            The positions to go back to, because other records have replaced the lost ones there.

        Raises:
            LogTruncated: Records were lost or a stream was deleted, and failOnDataLoss is true.
        """
        back: Offsets = {}
        for name, position in known.items():
            end = self._ends.get(name)
            try:
                if end is None:
                    raise LogTruncated(
                        f"Stream {name!r}, which the query has read up to {position.offset}, was "
                        "deleted, or the query no longer reads it.",
                        stream=name,
                        first=0,
                        last=position.offset - 1,
                    )
                self._planner.check(name, position, end)
            except LogTruncated as loss:
                if self._options.fail_on_data_loss:
                    raise
                # The engine asks again every few ms while the query waits for more records.
                if self._logged_losses.get(name) != position:
                    _log.warning("%s The query continues: failOnDataLoss is false.", loss)
                    self._logged_losses[name] = position
                if end is not None and end.incarnation == position.incarnation:
                    back[name] = end._replace(offset=min(loss.first, end.offset))
                    self._lost[name] = position
                    self._leave(name)  # the session has confirmed records that are now lost
        return back

    def _confirm(self, done: Offsets) -> None:
        group = self._options.group
        if group is None:
            return
        for name, position in done.items():
            end = self._ends.get(name)
            if end is None or end.incarnation != position.incarnation:
                self._leave(name)  # the stream was deleted or recreated, and its group as well
                continue
            try:
                self._member(name, group, position).confirm(position)
            except (LeaseLost, OutcomeUnknown) as error:
                # A failover may have lost the term. If another member has taken over, rejoining
                # raises an error. Confirming again is harmless.
                _log.warning("%s Rejoining the group.", error)
                self._leave(name)
                self._member(name, group, position).confirm(position)

    def _member(self, name: str, group: str, position: Position) -> Membership:
        if name not in self._members:
            stream = self._planner.open(name)
            self._members[name] = Membership(stream, group, position.offset)
        return self._members[name]

    def _leave(self, name: str) -> None:
        member = self._members.pop(name, None)
        if member is not None:
            try:
                member.close()
            except MeteorError as error:
                _log.warning("The query could not leave its group for stream %r: %s", name, error)

    def _apply_limits(self, start: Offsets, end: Offsets) -> Offsets:
        """Return ``end`` within the batch limits, or ``start`` if there are too few records."""
        limits = self._options.limits
        ranges = ranges_between(start, end)
        available = sum(map(len, ranges))
        if self._target is None and available < limits.min_records:
            now = time.monotonic()
            if self._waiting_since is None:
                self._waiting_since = now
            if now - self._waiting_since < limits.max_delay_s:
                return start
        self._waiting_since = None
        max_records = limits.max_records or _UNLIMITED
        if limits.max_bytes:
            affordable = limits.max_bytes // self._planner.record_bytes(end)
            max_records = min(max_records, max(affordable, 1))
        return bounded(ranges, end, max_records)


def _ignore_new_epochs(start: Offsets, end: Offsets) -> Offsets:
    """Return ``end``, with the positions from ``start`` where only the epoch has changed.

    A new epoch alone must not cause a batch.
    """
    same = {
        name: known
        for name, known in start.items()
        if name in end
        and (known.incarnation, known.offset) == (end[name].incarnation, end[name].offset)
    }
    return end | same


def _cap(end: Offsets, target: Offsets, start: Offsets) -> Offsets:
    """Return ``end``, limited to the run's target, but never before ``start``."""
    capped: Offsets = {}
    for name, position in end.items():
        known, goal = start.get(name), target.get(name)
        if goal is not None and goal.incarnation == position.incarnation:
            limit = goal.offset
            if known is not None and known.incarnation == position.incarnation:
                limit = max(limit, known.offset)
            capped[name] = position._replace(offset=min(position.offset, limit))
        elif known is not None:
            capped[name] = known
    return capped
