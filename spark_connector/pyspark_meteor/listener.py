"""A listener that reports how far the streaming queries of a session are behind.

>>> from pyspark_meteor.listener import LagListener
>>> spark.streams.addListener(LagListener())  # doctest: +SKIP
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lag:
    """How far a query was behind the ends of its streams after a batch."""

    #: Id of the query, which survives restarts, and its name if it has one.
    query: str
    name: str | None
    batch: int
    #: For each stream, the records between the end of the batch and the end of the stream.
    streams: dict[str, int]

    @property
    def records(self) -> int:
        """All records that the query has not read."""
        return sum(self.streams.values())


def log_lag(lag: Lag) -> None:
    """Log a lag."""
    _log.info(
        "Query %s is %d records behind after batch %d: %s",
        *(lag.name or lag.query, lag.records, lag.batch, lag.streams),
    )


class LagListener(StreamingQueryListener):
    """Reports the lag of each query that reads meteor streams, after each of its batches.

    ``lags`` has the last one of each active query, for a metrics exporter. A stream that a query
    reads with several ``load()`` counts with the largest lag.

    Args:
        report: Called with each ``Lag``, in a thread of Spark; the default logs it.
    """

    def __init__(self, report: Callable[[Lag], None] = log_lag) -> None:
        self._report = report
        #: The last lag of each active query, by its id.
        self.lags: dict[str, Lag] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Does nothing: the first batch has the first lag."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Report the lag of a query after a batch."""
        progress = event.progress
        streams: dict[str, int] = {}
        for source in progress.sources:
            for name, records in _lag_of(source.endOffset, source.latestOffset).items():
                streams[name] = max(records, streams.get(name, 0))
        if streams:
            lag = Lag(str(progress.id), progress.name, progress.batchId, streams)
            self.lags[lag.query] = lag
            self._report(lag)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Does nothing: an idle query has read everything, and its last lag says so."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Forget the lag of a query that has ended."""
        self.lags.pop(str(event.id), None)


def _lag_of(end: Any, latest: Any) -> dict[str, int]:
    """Returns the lag of each stream of a source; nothing if it is another kind of source."""
    known, ends = _positions(end), _positions(latest)
    return {
        name: max(stop["offset"] - known[name]["offset"], 0)
        for name, stop in ends.items()
        if name in known and known[name]["incarnation"] == stop["incarnation"]
    }


def _positions(offset: Any) -> dict[str, Any]:
    try:
        found = json.loads(offset) if isinstance(offset, str) else offset
        streams = found["streams"]
        return streams if found.get("version") == 1 and isinstance(streams, dict) else {}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}
