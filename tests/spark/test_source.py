"""Streams in Spark: nothing twice and nothing missing, and what is lost is told."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import meteor_py as meteor
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, Pair
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

#: Seconds: of this, a loaded machine may need most to start a Java.
pytestmark = pytest.mark.timeout(400)

MANY = 1_000_000


@pytest.fixture
def client(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


def owners(stream: meteor.Stream) -> set[str]:
    return {group.owner for group in stream.groups() if group.owner}


def test_a_million_records_come_once_each_though_the_query_is_stopped_in_the_middle(
    spark: SparkSession, url: str, client: meteor.Client, tmp_path: Path
) -> None:
    stream = client.stream("orders", capacity=2 * MANY)
    with stream.publisher() as pub:
        for first in range(0, MANY, 100_000):
            pub.publish_many([b"%d" % n for n in range(first, first + 100_000)])
    frame = stream_of(
        spark, url, stream="orders", group="g", maxOffsetsPerTrigger=150_000, minPartitions=2
    ).selectExpr("offset", "cast(cast(value as string) as long) as number")
    query = start(frame, tmp_path, follow=True)
    eventually(lambda: len(batches(query)) >= 2, 60, "the query does not get on")
    found = stream.group("g")
    assert found.owner
    assert found.owner.startswith("spark:g:")
    assert 0 < found.confirmed < MANY
    assert 0 < found.lag < MANY
    assert found in stream.describe().groups
    query.stop()
    eventually(lambda: stream.group("g").owner is None, 5, "the lease was not given up")
    done = sum(batches(query))
    assert done < MANY

    query = run(frame, tmp_path)  # a whole run more: it has its limit, and an end
    assert max(batches(query)) <= 150_000
    assert len(batches(query)) >= (MANY - done) // 150_000
    progress = query.recentProgress[-1]["sources"][0]
    end = {"epoch": stream.end().epoch, "incarnation": stream.incarnation, "offset": MANY}
    # Where it is, and where the stream ends: how far behind it is can be seen.
    for place in (progress["endOffset"], progress["latestOffset"]):
        assert (json.loads(place) if isinstance(place, str) else place)["streams"] == {
            "orders": end
        }
    eventually(lambda: stream.group("g").owner is None, 5, "the lease was not given up")
    assert (stream.group("g").confirmed, stream.group("g").lag) == (MANY, 0)

    with stream.publisher() as pub:
        pub.publish_many([b"%d" % n for n in range(MANY, MANY + 10)])
    assert batches(run(frame, tmp_path)) == [10]
    sums = "count(*)", "count(distinct offset)", "sum(offset)", "sum(number)"
    (row,) = spark.read.parquet(str(tmp_path / "rows")).selectExpr(*sums).collect()
    total = sum(range(MANY + 10))
    assert tuple(row) == (MANY + 10, MANY + 10, total, total)


def test_a_group_keeps_the_start_of_a_query_that_fails_and_its_lease_from_a_second_one(
    spark: SparkSession, url: str, client: meteor.Client, tmp_path: Path
) -> None:
    stream = client.stream("orders", capacity=1000)
    fill(stream, 5)
    with stream.subscriber(group="held") as sub:
        sub.poll()
        owner = stream.group("held").owner
        assert owner
        # It waits for twice the life of a lease; the rest of the test goes on meanwhile.
        waiting = start(stream_of(spark, url, stream="orders", group="held"), tmp_path / "held")

        frame = stream_of(spark, url, stream="orders", group="g", startingOffsets="latest")
        query = start(
            frame.selectExpr("offset", "if(offset >= 5, raise_error('no luck'), 1) as failed"),
            tmp_path / "first",
            follow=True,
        )
        eventually(lambda: len(owners(stream)) == 2, 30, "the query does not begin")
        fill(stream, 5)
        assert "no luck" in failure(query)
        eventually(lambda: stream.group("g").owner is None, 5, "the lease was not given up")
        fill(stream, 5)
        run(frame, tmp_path / "other")  # a new checkpoint: only the group knows the start
        assert offsets(spark, tmp_path / "other") == [*range(5, 15)]
        query = run(frame, tmp_path / "first")
        assert offsets(spark, tmp_path / "first") == [*range(5, 15)]
        assert batches(query) == [5, 5], "the batch that failed is read again as it was"

        run(stream_of(spark, url, stream="orders", startingOffsets="-3"), tmp_path / "last")
        assert offsets(spark, tmp_path / "last") == [12, 13, 14]
        told = failure(waiting)
        assert owner in told
        assert "GroupActive" in told


def test_a_batch_has_as_many_records_as_its_limit_of_bytes_has_room_for(
    spark: SparkSession, url: str, client: meteor.Client, tmp_path: Path
) -> None:
    stream = client.stream("orders", capacity=1000)
    with stream.publisher() as pub:
        for _ in range(5):
            pub.publish_many([os.urandom(1000)] * 20).result()
    most = 40_000 // ((stream.describe().bytes or 0) // 100)
    assert 20 < most < 40
    frame = stream_of(spark, url, stream="orders", maxBytesPerTrigger=40_000).select("offset")
    query = run(frame, tmp_path)
    assert batches(query) == [most, most, 100 - 2 * most]
    assert offsets(spark, tmp_path) == [*range(100)]


def test_a_batch_waits_for_its_minimum_but_not_longer_than_its_delay(
    spark: SparkSession, url: str, client: meteor.Client, tmp_path: Path
) -> None:
    stream = client.stream("orders", capacity=1000)
    fill(stream, 5)
    given: dict[str, str | int] = {"stream": "orders", "minOffsetsPerTrigger": 10}
    patient = stream_of(spark, url, **given, maxTriggerDelay="1h", group="patient")
    hasty = stream_of(spark, url, **given, maxTriggerDelay="1s", group="hasty")
    queries = [
        start(frame.select("offset"), tmp_path / name, follow=True)
        for name, frame in (("patient", patient), ("hasty", hasty))
    ]
    # Both have looked: so who does not wait has begun a batch of five.
    eventually(lambda: len(owners(stream)) == 2, 60, "the queries do not begin")
    eventually(lambda: batches(queries[1]) == [5], 60, "the delay does not end")
    fill(stream, 5)
    eventually(lambda: batches(queries[0]) == [10], 60, "the minimum is there, and not read")
    eventually(lambda: sum(batches(queries[1])) == 10, 60, "the rest is not read")
    for query in queries:
        query.stop()
    for name in ("patient", "hasty"):
        assert offsets(spark, tmp_path / name) == [*range(10)]


def test_a_query_starts_at_a_time_and_goes_on_from_its_checkpoint(
    spark: SparkSession, url: str, client: meteor.Client, tmp_path: Path
) -> None:
    stream = client.stream("orders", capacity=1000)
    fill(stream, 10)
    middle = eventually(lambda: later_than_all(stream), 10, "the clock stands still")
    fill(stream, 5, 5)
    frame = stream_of(spark, url, stream="orders", startingTimestamp=middle).select("offset")
    run(frame, tmp_path)
    assert offsets(spark, tmp_path) == [*range(10, 20)]
    fill(stream, 5)
    frame = stream_of(spark, url, stream="orders", startingTimestamp="1970-01-01T00:00:00Z")
    assert batches(run(frame.select("offset"), tmp_path)) == [5]
    assert offsets(spark, tmp_path) == [*range(10, 25)]


def test_what_the_ring_drops_during_a_query_comes_from_the_store(
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


def test_a_hole_or_another_stream_of_the_name_fails_the_query_unless_that_is_wanted(
    spark: SparkSession, url: str, client: meteor.Client, tmp_path: Path
) -> None:
    stream = client.stream("orders", capacity=100)
    fill(stream, 10)
    given = {"stream": "orders"}
    strict = stream_of(spark, url, **given).select("offset")
    run(strict, tmp_path)
    for _ in range(10):
        fill(stream, 100)
    first, end = stream.bounds()
    assert first > 10
    told = failure(start(strict, tmp_path))
    assert "RecordsLost" in told
    assert f"10 to {first - 1}" in told
    lenient = stream_of(spark, url, **given, failOnDataLoss="false").select("offset")
    run(lenient, tmp_path)
    seen = [*range(10), *range(first, end)]
    assert offsets(spark, tmp_path) == seen

    query = start(strict, tmp_path, follow=True)
    query.processAllAvailable()
    stream.delete()
    fill(client.stream("orders", capacity=100), 3)
    told = failure(query)
    assert "LogTruncated" in told
    assert "'orders'" in told
    run(lenient, tmp_path)
    assert offsets(spark, tmp_path) == sorted([*seen, 0, 1, 2])


def test_streams_of_a_pattern_are_read_together_also_one_that_is_created_later(
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

    # The default is the latest; what comes later is read whole.
    wanted = [("shop.a", 3), ("shop.empty", 0), ("shop.late", 0), ("shop.late", 1)]
    eventually(lambda: found() == wanted, 30, "the stream created later is not read")
    eventually(lambda: late.group("g").confirmed == 2, 30, "it is not confirmed")
    query.stop()


def test_a_server_promoted_behind_the_checkpoint_fails_the_query_unless_that_is_wanted(
    spark: SparkSession, pair: Pair, tmp_path: Path
) -> None:
    url = pair.bench.proxy.url
    frame = stream_of(spark, url, stream=NAME, group="g").select("offset")
    fill(pair.bench.stream, 20)
    run(frame, tmp_path)
    eventually(lambda: not owners(pair.bench.stream), 10, "the lease was not given up")
    pair.lag()
    fill(pair.bench.stream, 10)
    run(frame, tmp_path)
    pair.fail_over()
    fill(pair.bench.stream, 30)  # beyond the checkpoint: the offset alone would not tell
    told = failure(start(frame, tmp_path))
    assert "LogTruncated" in told
    assert "20 to 29" in told
    assert offsets(spark, tmp_path) == [*range(30)]

    lenient = stream_of(spark, url, stream=NAME, group="g", failOnDataLoss="false")
    run(lenient.select("offset"), tmp_path)
    assert offsets(spark, tmp_path) == sorted([*range(30), *range(20, 50)])
    eventually(lambda: not owners(pair.bench.stream), 10, "the lease was not given up")
    assert pair.bench.stream.group("g").confirmed == 50


def test_a_password_is_found_by_its_place_and_shown_nowhere(
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


def test_options_that_are_wrong_fail_the_query_with_a_sentence(
    spark: SparkSession, url: str, client: meteor.Client, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match="has no option 'startingoffset'"):
        stream_of(spark, url, stream="orders", startingOffset="earliest")
    fill(client.stream("orders", capacity=100), 1)
    frame = stream_of(spark, url, stream="orders", endingOffsets="latest")
    assert "endingOffsets has no meaning here" in failure(start(frame, tmp_path / "ending"))
    frame = stream_of(spark, url, stream="orders", startingOffsets="group", group="g")
    assert "has no group 'g' yet" in failure(start(frame, tmp_path / "group"))
