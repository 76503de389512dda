"""Spark queries survive 30-second outages, restarts and failovers, and lose nothing.

    pytest tests/chaos/spark_outages.py

This takes minutes, so it is part of ``make chaos``. ``make test`` covers one-second outages, in
tests/spark/test_outages.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import meteor_py as meteor
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, ReplicatedStream
from tests.support.servers import Server
from tests.support.spark import stream_of
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

AWAY_S = 30.0
KEEP = ("--appendonly", "yes", "--appendfsync", "always")
TARGET = "copy"


@contextmanager
def changed(after_s: float, undo: Callable[[], Any]) -> Iterator[None]:
    """Undo a fault after ``after_s`` seconds. The block does not end before that."""
    timer = threading.Timer(after_s, undo)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def copying(rows: DataFrame, url: str, folder: Path) -> StreamingQuery:
    writer = rows.writeStream.format("meteor").option("url", url).option("stream", TARGET)
    writer = writer.option("capacity", "1000000")
    return writer.option("checkpointLocation", str(folder / "checkpoint")).start()


class Progress:
    """The target stream of a query, and the numbers that the query has written to it."""

    def __init__(self, m: meteor.Client, query: StreamingQuery) -> None:
        self._m = m
        self._query = query

    @property
    def end(self) -> int:
        try:
            return self._m.stream(TARGET, create=False).end().offset
        except meteor.StreamNotFound:
            return 0

    def wait_for(self, rows: int) -> None:
        def reached() -> bool:
            assert self._query.isActive, self._query.exception()
            return self.end >= rows

        eventually(reached, 120, f"the query did not write {rows} rows")

    def values(self) -> list[int]:
        batches = self._m.stream(TARGET, create=False).read()
        return [int(value) for batch in batches for value in batch.values()]


def publish(m: meteor.Client, numbers: range) -> None:
    with m.stream(NAME).publisher() as pub:
        pub.publish_many([b"%d" % n for n in numbers]).result()


@pytest.mark.parametrize("fault", ["killed", "paused", "restarted"])
@pytest.mark.parametrize("group", ["", "g"])
def test_busy_and_idle_queries_survive_restarts_and_long_outages(
    spark: SparkSession, private_server: ServerFactory, tmp_path: Path, fault: str, group: str
) -> None:
    server = private_server(*KEEP)

    def outage() -> Any:
        if fault == "restarted":
            server.kill()
            return changed(0.0, server.start)
        if fault == "paused":
            server.pause()
            return changed(AWAY_S, server.resume)
        server.kill()
        return changed(AWAY_S, server.start)

    with meteor.connect(server.url) as m:
        m.stream(NAME, capacity=1_000_000)
        publish(m, range(5000))
        given: dict[str, str | int] = {"stream": NAME, "maxOffsetsPerTrigger": 100}
        rows = stream_of(spark, server.url, **given, **({"group": group} if group else {}))
        query = copying(rows.select("value"), server.url, tmp_path)
        try:
            progress = Progress(m, query)
            progress.wait_for(300)
            with outage():
                pass
            progress.wait_for(5000)
            with outage():
                pass
            publish(m, range(5000, 5100))
            progress.wait_for(5100)
        finally:
            query.stop()
        assert progress.values() == [*range(5100)]
        if group:
            assert m.stream(NAME).group(group).confirmed >= 5000


def test_sink_for_another_source_survives_a_long_outage(
    spark: SparkSession, private_server: ServerFactory, tmp_path: Path
) -> None:
    server: Server = private_server(*KEEP)
    rows = spark.readStream.format("rate").option("rowsPerSecond", 500).load()
    query = copying(rows.selectExpr("cast(value as string) value"), server.url, tmp_path)
    with meteor.connect(server.url) as m:
        try:
            progress = Progress(m, query)
            progress.wait_for(500)
            server.kill()
            with changed(AWAY_S, server.start):
                pass
            progress.wait_for(progress.end + 500)
        finally:
            query.stop()
        found = progress.values()
        assert sorted(found) == [*range(len(found))]


def test_query_survives_a_failover_that_loses_nothing(
    spark: SparkSession, replicated: ReplicatedStream, tmp_path: Path
) -> None:
    url = replicated.proxied.proxy.url
    with meteor.connect(url) as m:
        publish(m, range(5000))
        rows = stream_of(spark, url, stream=NAME, maxOffsetsPerTrigger=100, group="g")
        query = copying(rows.select("value"), url, tmp_path)
        try:
            progress = Progress(m, query)
            progress.wait_for(300)
            # Stop the primary's clients first, or the replica would lack their last writes.
            replicated.proxied.proxy.refuse()
            replicated.proxied.proxy.cut()
            replicated.replica.wait_in_sync()
            began = time.monotonic()
            replicated.fail_over()
            progress.wait_for(5000)
            assert time.monotonic() - began < 100
            publish(m, range(5000, 5100))
            progress.wait_for(5100)
        finally:
            query.stop()
        assert progress.values() == [*range(5100)]
