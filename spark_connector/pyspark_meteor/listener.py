"""A listener that reports how far a session's streaming queries lag behind.

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
    """A query's lag after a batch."""

    #: The query's id, which stays the same after a restart, and its name, if any.
    query: str
    name: str | None
    batch: int
    #: For each stream, the number of records from the end of the batch to the end of the stream.
    streams: dict[str, int]

    @property
    def records(self) -> int:
        """The total number of records that the query has not read."""
        return sum(self.streams.values())


def log_lag(lag: Lag) -> None:
    """Log a query's lag."""
    _log.info(
        "Query %s is %d records behind after batch %d: %s",
        *(lag.name or lag.query, lag.records, lag.batch, lag.streams),
    )


class LagListener(StreamingQueryListener):
    """Reports the lag of each query that reads meteor streams, after each of its batches.

    ``lags`` holds the last lag of each active query, for a metrics exporter. If a query reads a
    stream with several ``load()`` calls, the largest lag counts.

    Args:
        report: Called with each ``Lag`` in one of Spark's threads. The default logs it.
    """

    def __init__(self, report: Callable[[Lag], None] = log_lag) -> None:
        self._report = report
        #: The last lag of each active query, by query id.
        self.lags: dict[str, Lag] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing: there is no lag to report before the first batch."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Report a query's lag after a batch."""
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
        """Do nothing: an idle query has run no batch, so there is no new lag to report."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Forget a query's lag when the query has ended."""
        self.lags.pop(str(event.id), None)


def _lag_of(end: Any, latest: Any) -> dict[str, int]:
    """Return the lag for each stream in a source; empty if it is not a meteor source."""
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
