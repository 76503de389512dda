"""The streaming source: what the engine asks the driver, and what its tasks read.

The engine keeps one of these alive in a process on the driver for a run of a query. Tasks get a
copy that was pickled before the run: they know only their partition. ``initialOffset`` is asked for
several times, and again after a crash before the first commit; ``commit`` comes a batch late, and
not at all for the last one: so what is done is confirmed by the ``start`` of ``latestOffset``.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from meteor_py import LogTruncated, MeteorError, Position
from pyspark_meteor.columns import check_schema
from pyspark_meteor.membership import Membership
from pyspark_meteor.offsets import Offsets, from_spark, to_spark
from pyspark_meteor.options import SourceOptions, parse_source
from pyspark_meteor.planning import Planner
from pyspark_meteor.ranges import Range, bounded, ranges_between
from pyspark_meteor.reading import read_range

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_log = logging.getLogger(__name__)

#: A limit that is none: the engine hands it back, and so says that ours are to be kept.
_OURS = 2**53


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """For one query. No server is asked, and nothing raised, before the engine asks."""

    def __init__(self, given: dict[str, str], schema: StructType) -> None:
        self._given = given
        self._schema = schema
        self._parsed: SourceOptions | None = None
        try:
            # Here, on the driver: tasks get a copy, and would find another server by themselves.
            self._parsed = self._options
        except Exception:
            pass  # it comes again when we are asked; what the engine makes of it here helps nobody
        self._planner: Planner | None = None
        self._initial: Offsets | None = None
        self._ends: Offsets = {}
        self._target: Offsets | None = None
        self._members: dict[str, Membership] = {}
        self._lost: Offsets = {}
        self._told: Offsets = {}
        self._waiting_since: float | None = None
        self._looked = False
        self._stopping = False

    # -- for the engine, on the driver ---------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins; the same as long as the group is there."""
        planner, options = self._begin()
        if self._initial is None:
            self._initial = {
                name: end._replace(offset=self._start(planner, name, options))
                for name, end in self._look(planner).items()
            }
        return to_spark(self._initial)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """How far the next batch goes; ``start`` itself if there is nothing for one."""
        planner, options = self._begin()
        known = from_spark(start)
        self._ends = self._look(planner)
        back = self._check(planner, known, options)
        self._confirm({name: place for name, place in known.items() if name not in back})
        # One that was deleted is forgotten, as it may come anew; one that is new begins, with
        # nothing to read yet: so where it begins is in the checkpoint before anything is read.
        begun = self._begun(planner, known, options)
        end = self._ends | begun
        if self._target is not None:
            end = _capped(end, self._target, known)
            begun = {name: place for name, place in begun.items() if name in self._target}
        if not isinstance(limit, ReadAllAvailable):
            end = self._limited(planner, known, end, options)
        return to_spark(_unmoved(known, end | begun | back))

    def getDefaultReadLimit(self) -> ReadLimit:
        """What the options say; more than one of them cannot be told to the engine."""
        limits = self._options.limits
        return ReadMaxRows(limits.max_records or _OURS) if limits else ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Where the streams end, as was seen a moment ago: how far a query is behind."""
        return to_spark(self._ends) if self._ends else None

    def prepareForTriggerAvailableNow(self) -> None:
        """Note where the streams end: what comes later is not for this run."""
        self._target = self._look(self._begin()[0])

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """What the tasks of a batch read."""
        return self._begin()[0].divide(ranges_between(from_spark(start), from_spark(end)))

    def commit(self, end: dict[str, Any]) -> None:
        """A batch is done for good: tell the group."""
        self._begin()
        done = from_spark(end).items()
        # What the server has lost since it was read, it would refuse to hear of.
        self._confirm({name: place for name, place in done if self._lost.get(name) != place})

    def stop(self) -> None:
        """Let others have the groups at once; the engine calls it only if it is asked to end."""
        self._stopping = True
        for name in list(self._members):
            self._leave(name)

    # -- for a task ----------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of a partition, as Arrow."""
        if isinstance(partition, Range):
            yield from read_range(self._options, self._schema, partition)

    # -- inside --------------------------------------------------------------------------------

    @property
    def _options(self) -> SourceOptions:
        if self._parsed is None:
            options = parse_source(self._given, streaming=True)
            check_schema(self._schema, options)
            self._parsed = options
        return self._parsed

    def _begin(self) -> tuple[Planner, SourceOptions]:
        if self._planner is None:
            self._planner = Planner(self._options)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._end)
        return self._planner, self._options

    def _end(self, number: int, frame: object) -> None:
        """The engine ends a query with a signal, which would end Python without cleaning up.

        It also closes its connection, whereupon ``stop`` is called: whichever is seen first does
        it, and the signal must not cut that short.
        """
        if not self._stopping:
            self.stop()
            sys.exit(0)

    def _look(self, planner: Planner) -> Offsets:
        """Where the streams end; say it, once, if one is not there: its name may be mistyped."""
        ends = planner.ends()
        if not self._looked:
            for name in self._options.streams:
                if name not in ends:
                    _log.warning(
                        "There is no stream %r; the query reads it as soon as there is one. If the "
                        "name is mistyped, stop it: `meteor streams ls` shows what there is.",
                        name,
                    )
            self._looked = True
        return ends

    def _start(self, planner: Planner, name: str, options: SourceOptions) -> int:
        place = options.starting[name]
        if options.group is None:
            if place.kind == "latest":
                _log.warning(
                    "A query without a group that starts at the latest record starts later if it "
                    "is restarted before its first batch is done; give it a group."
                )
            return planner.resolve(name, place).offset

        def resolve() -> int:
            if place.kind == "group":
                raise ValueError(
                    f"startingOffsets=group: stream {name!r} has no group {options.group!r} yet."
                )
            return planner.resolve(name, place).offset

        return Membership(planner.open(name), options.group).start(resolve)

    def _begun(self, planner: Planner, known: Offsets, options: SourceOptions) -> Offsets:
        """Where streams begin that the query does not know yet, or that were created anew."""
        begun: Offsets = {}
        for name, end in self._ends.items():
            if name in known and known[name].incarnation == end.incarnation:
                continue
            first = min(planner.first(name), end.offset)
            if options.group is not None:
                member = Membership(planner.open(name), options.group)
                first = member.start(lambda first=first: first)  # type: ignore[misc]
            begun[name] = end._replace(offset=first)
        return begun

    def _check(self, planner: Planner, known: Offsets, options: SourceOptions) -> Offsets:
        """Notice what the server has lost, before anything is built on it.

        Returns:
            Where to go back to, if the query is to go on all the same: to what is there in place
            of what was lost.
        """
        back: Offsets = {}
        for name, place in known.items():
            end = self._ends.get(name)
            try:
                if end is None:
                    raise LogTruncated(
                        f"Stream {name!r}, which the query has read up to {place.offset}, was "
                        "deleted, or is no longer among those that it reads.",
                        stream=name,
                        first=0,
                        last=place.offset - 1,
                    )
                planner.check(name, place, end)
            except LogTruncated as loss:
                if options.fail_on_data_loss:
                    raise
                if self._told.get(name) != place:  # once, though it waits for minOffsetsPerTrigger
                    _log.warning("%s The query goes on: failOnDataLoss is false.", loss)
                    self._told[name] = place
                if end is not None and end.incarnation == place.incarnation:
                    back[name] = end._replace(offset=min(loss.first, end.offset))
                    self._lost[name] = place
                    self._leave(name)  # the group has confirmed what is lost
        return back

    def _confirm(self, done: Offsets) -> None:
        group = self._options.group
        if group is None or self._planner is None:
            return
        for name, position in done.items():
            end = self._ends.get(name)
            if end is None or end.incarnation != position.incarnation:
                # Lost, and the query goes on without: there is nobody left to tell.
                self._leave(name)
                continue
            if name not in self._members:
                member = Membership(self._planner.open(name), group)
                member.start(lambda position=position: position.offset)  # type: ignore[misc]
                member.hold()
                self._members[name] = member
            self._members[name].confirm(position)

    def _leave(self, name: str) -> None:
        member = self._members.pop(name, None)
        if member is not None:
            try:
                member.close()
            except MeteorError as error:
                _log.warning("When a query left its group: %s", error)

    def _limited(
        self, planner: Planner, start: Offsets, end: Offsets, options: SourceOptions
    ) -> Offsets:
        """Not more than a batch may have; nothing while there is too little for one."""
        limits = options.limits
        ranges = ranges_between(start, end)
        available = sum(map(len, ranges))
        if self._target is None and available < limits.min_records:
            now = time.monotonic()
            if self._waiting_since is None:
                self._waiting_since = now
            if now - self._waiting_since < limits.max_delay_s:
                return start
        self._waiting_since = None
        most = limits.max_records or _OURS
        if limits.max_bytes:
            most = min(most, max(limits.max_bytes // planner.record_bytes(end), 1))
        return bounded(ranges, end, most)


def _unmoved(start: Offsets, end: Offsets) -> Offsets:
    """``end``, with what has not moved as it was: a new epoch alone is no reason for a batch."""
    return {
        name: start[name] if name in start and _same_place(start[name], place) else place
        for name, place in end.items()
    }


def _same_place(one: Position, other: Position) -> bool:
    return (one.incarnation, one.offset) == (other.incarnation, other.offset)


def _capped(end: Offsets, target: Offsets, start: Offsets) -> Offsets:
    """Not beyond what was there when the run began; nor before where it stands."""
    capped: Offsets = {}
    for name, place in end.items():
        known, goal = start.get(name), target.get(name)
        if goal is not None and goal.incarnation == place.incarnation:
            is_same = known is not None and known.incarnation == place.incarnation
            least = known.offset if known is not None and is_same else 0
            offset = min(place.offset, max(goal.offset, least))
            capped[name] = place._replace(offset=offset)
        elif known is not None:
            capped[name] = known
    return capped
