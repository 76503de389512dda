"""Streaming queries in Spark read each record once and report every loss."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import meteor_py as meteor
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, ReplicatedStream
from tests.support.readers import fill, later_than_all
from tests.support.spark import (
    PASSWORD,
    PASSWORD_ENV,
    batches,
    failure,
    offsets,
    run,
    start,
    stream_of,
)
from tests.support.waiting import eventually

#: Seconds per test. On a loaded machine, starting Java may take most of this time.
pytestmark = pytest.mark.timeout(400)

MANY = 200_000


@pytest.fixture
def client(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


def owners(stream: meteor.Stream) -> set[str]:
    return {group.owner for group in stream.groups() if group.owner}


def test_query_that_is_stopped_and_restarted_reads_each_record_once(
    spark: SparkSession, url: str, client: meteor.Client, tmp_path: Path
) -> None:
    stream = client.stream("orders", capacity=2 * MANY)
    with stream.publisher() as pub:
        for first in range(0, MANY, 10_000):
            pub.publish_many([b"%d" % n for n in range(first, first + 10_000)])
    frame = stream_of(
        spark, url, stream="orders", group="g", maxOffsetsPerTrigger=30_000, minPartitions=2
    ).selectExpr("offset", "cast(cast(value as string) as long) as number")
    query = start(frame, tmp_path, follow=True)
    eventually(lambda: len(batches(query)) >= 2, 60, "the query made no progress")
    found = stream.group("g")
    assert found.owner
    assert found.owner.startswith("spark:g:")
    assert 0 < found.confirmed < MANY
    assert 0 < found.lag < MANY
    assert found in stream.describe().groups
    query.stop()
    eventually(lambda: stream.group("g").owner is None, 5, "the lease was not released")
    done = sum(batches(query))
    assert done < MANY

    query = run(frame, tmp_path)  # with a limit per batch, until all records are read
    assert max(batches(query)) <= 30_000
    assert len(batches(query)) >= (MANY - done) // 30_000
    progress = query.recentProgress[-1]["sources"][0]
    end = stream.end()._replace(offset=MANY)._asdict()
    # The query's position and the stream's end show the lag.
    for offset in (progress["endOffset"], progress["latestOffset"]):
        found = json.loads(offset) if isinstance(offset, str) else offset
        assert found["streams"] == {"orders": end}
    eventually(lambda: stream.group("g").owner is None, 5, "the lease was not released")
    assert (stream.group("g").confirmed, stream.group("g").lag) == (MANY, 0)

    with stream.publisher() as pub:
        pub.publish_many([b"%d" % n for n in range(MANY, MANY + 10)])
    assert batches(run(frame, tmp_path)) == [10]
    sums = "count(*)", "count(distinct offset)", "sum(offset)", "sum(number)"
    (row,) = spark.read.parquet(str(tmp_path / "rows")).selectExpr(*sums).collect()
    total = sum(range(MANY + 10))
    assert tuple(row) == (MANY + 10, MANY + 10, total, total)


def test_group_keeps_the_start_of_a_failed_query(
    spark: SparkSession, url: str, client: meteor.Client, tmp_path: Path
) -> None:
    stream = client.stream("orders", capacity=1000)
    fill(stream, 5)
    frame = stream_of(spark, url, stream="orders", group="g", startingOffsets="latest")
    query = start(
        frame.selectExpr("offset", "if(offset >= 5, raise_error('no luck'), 1) as failed"),
        tmp_path / "first",
        follow=True,
    )
    eventually(lambda: owners(stream), 30, "the query does not start")
    fill(stream, 5)
    assert "no luck" in failure(query)
    eventually(lambda: not owners(stream), 5, "the lease was not released")
    fill(stream, 5)
    run(frame, tmp_path / "other")  # a new checkpoint: only the group knows the start
    assert offsets(spark, tmp_path / "other") == [*range(5, 15)]
    query = run(frame, tmp_path / "first")
    assert offsets(spark, tmp_path / "first") == [*range(5, 15)]
    assert batches(query) == [5, 5], "the failed batch was not repeated unchanged"


def test_query_starts_at_a_time_and_respects_batch_limits(
    spark: SparkSession, url: str, client: meteor.Client, tmp_path: Path
) -> None:
    stream = client.stream("orders", capacity=1000)
    fill(stream, 10)
    middle = eventually(lambda: later_than_all(stream), 10, "the clock did not advance")
    with stream.publisher() as pub:
        for _ in range(5):
            pub.publish_many([os.urandom(1000)] * 20).result()
    most = 40_000 // ((stream.describe().bytes or 0) // 110)
    assert 20 < most < 50
    given: dict[str, str | int] = {"stream": "orders", "startingTimestamp": middle}
    query = run(stream_of(spark, url, **given, maxBytesPerTrigger=40_000), tmp_path)
    assert batches(query) == [most, most, 100 - 2 * most]

    given = {"stream": "orders", "group": "g", "minOffsetsPerTrigger": 10, "maxTriggerDelay": "1h"}
    fill(stream, 5)
    # This query continues from the first query's checkpoint.
    query = start(stream_of(spark, url, **given), tmp_path, follow=True)
    # A query that owns the lease has already read the end: five new records, too few for a batch.
    eventually(lambda: owners(stream), 60, "the query does not start")
    fill(stream, 5)
    eventually(lambda: batches(query) == [10], 60, "the minimum batch was not read")
    query.stop()
    assert offsets(spark, tmp_path) == [*range(10, 120)]


def test_query_reads_records_from_the_store_after_the_ring_drops_them(
    spark: SparkSession, url: str, client: meteor.Client, tmp_path: Path
) -> None:
    stream = client.stream("orders", capacity=200, store=tmp_path / "store")
    fill(stream, 100)
    frame = stream_of(spark, url, stream="orders", maxOffsetsPerTrigger=1500, minPartitions=3)
    query = start(frame.select("offset"), tmp_path, follow=True)
    with stream.archiver(segment_age=0.0) as archiver:
        archiver.start()
        for _ in range(10):
            fill(stream, *[100] * 4)
        stream.store.flush()
        eventually(lambda: stream.describe().length < 1000, 20, "the ring was not trimmed")
        query.processAllAvailable()
        query.stop()
    assert offsets(spark, tmp_path) == [*range(4100)]


def test_lost_records_fail_the_query_unless_loss_is_allowed(
    spark: SparkSession, url: str, client: meteor.Client, tmp_path: Path
) -> None:
    stream = client.stream("orders", capacity=100)
    fill(stream, 10)
    strict = stream_of(spark, url, stream="orders").select("offset")
    run(strict, tmp_path)
    for _ in range(10):
        fill(stream, 100)
    first, end = stream.bounds()
    assert first > 10
    error = failure(start(strict, tmp_path))
    assert "RecordsLost" in error
    assert f"10 to {first - 1}" in error
    lenient = stream_of(spark, url, stream="orders", failOnDataLoss="false").select("offset")
    run(lenient, tmp_path)
    assert offsets(spark, tmp_path) == [*range(10), *range(first, end)]


def test_query_reads_all_streams_that_match_a_pattern_even_one_created_later(
    spark: SparkSession, url: str, client: meteor.Client, tmp_path: Path
) -> None:
    for name in ("shop.a", "shop.b", "other"):
        fill(client.stream(name, capacity=100), 4)
    client.stream("shop.empty", capacity=100)
    frame = stream_of(
        spark, url, streamsPattern=r"shop\..*", startingOffsets='{"shop.a": 3}', group="g"
    )
    query = start(frame, tmp_path, follow=True)
    query.processAllAvailable()
    late = client.stream("shop.late", capacity=100)
    fill(late, 2)
    fill(client.stream("shop.empty", create=False), 1)

    def found() -> list[tuple[str, int]]:
        query.processAllAvailable()
        rows = spark.read.parquet(str(tmp_path / "rows")).select("stream", "offset").collect()
        return sorted((row.stream, row.offset) for row in rows)

    # By default, the query reads only new records from existing streams, but later streams in full.
    wanted = [("shop.a", 3), ("shop.empty", 0), ("shop.late", 0), ("shop.late", 1)]
    eventually(lambda: found() == wanted, 30, "the stream created later was not read")
    eventually(lambda: late.group("g").confirmed == 2, 30, "the batch was not confirmed")
    query.stop()


def test_failover_that_loses_records_fails_the_query_unless_loss_is_allowed(
    spark: SparkSession, replicated: ReplicatedStream, tmp_path: Path
) -> None:
    url = replicated.proxied.proxy.url
    frame = stream_of(spark, url, stream=NAME, group="g").select("offset")
    fill(replicated.proxied.stream, 20)
    run(frame, tmp_path)
    eventually(lambda: not owners(replicated.proxied.stream), 10, "the lease was not released")
    replicated.lag()
    fill(replicated.proxied.stream, 10)
    run(frame, tmp_path)
    replicated.fail_over()
    # Fill beyond the checkpoint, so that the offset alone does not reveal the loss.
    fill(replicated.proxied.stream, 30)
    error = failure(start(frame, tmp_path))
    assert "LogTruncated" in error
    assert "20 to 29" in error
    assert offsets(spark, tmp_path) == [*range(30)]

    lenient = stream_of(spark, url, stream=NAME, group="g", failOnDataLoss="false")
    run(lenient.select("offset"), tmp_path)
    assert offsets(spark, tmp_path) == sorted([*range(30), *range(20, 50)])
    eventually(lambda: not owners(replicated.proxied.stream), 10, "the lease was not released")
    assert replicated.proxied.stream.group("g").confirmed == 50


def test_password_from_a_variable_or_file_is_used_but_never_shown(
    spark: SparkSession,
    private_server: ServerFactory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = private_server()
    with meteor.connect(server.url) as m:
        fill(m.stream("orders", capacity=100), 3)
    server.client().config_set("requirepass", PASSWORD)
    file = tmp_path / "password"
    file.write_text(PASSWORD)
    given = {"url": server.url, "stream": "orders"}
    by_file = spark.read.format("meteor").options(**given, passwordFile=str(file)).load()
    assert by_file.count() == 3
    frame = stream_of(spark, server.url, stream="orders", passwordEnv=PASSWORD_ENV)
    query = run(frame.select("offset"), tmp_path)
    assert offsets(spark, tmp_path) == [0, 1, 2]
    query.explain(True)
    by_file.explain(True)
    shown = capsys.readouterr().out + str(query.lastProgress)
    assert "offset" in shown

    file.write_text("wrong-" + PASSWORD)
    frame = stream_of(spark, server.url, stream="orders", passwordFile=str(file))
    shown += failure(start(frame, tmp_path / "wrong"))
    assert "AccessDenied" in shown
    in_url = server.url.replace("://", f"://:{PASSWORD}@")
    refused = failure(start(stream_of(spark, in_url, stream="orders"), tmp_path / "url"))
    assert "passwordEnv" in refused
    assert PASSWORD not in shown + refused
    kept = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if PASSWORD.encode() in path.read_bytes()]


def test_wrong_options_fail_the_query_with_a_clear_error(
    spark: SparkSession, url: str, client: meteor.Client, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match="has no option 'startingoffset'"):
        stream_of(spark, url, stream="orders", startingOffset="earliest")
    fill(client.stream("orders", capacity=100), 1)
    frame = stream_of(spark, url, stream="orders", endingOffsets="latest")
    assert "endingOffsets does not apply here" in failure(start(frame, tmp_path / "ending"))
    frame = stream_of(spark, url, stream="orders", startingOffsets="group", group="g")
    assert "has no group 'g' yet" in failure(start(frame, tmp_path / "group"))
