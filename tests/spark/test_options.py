"""Source options, and the queries that they produce, without Spark.

``tests.support.spark_engine`` stands in for Spark's engine in this process; the server is real.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections.abc import Iterator

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import meteor_py as meteor
from pyspark_meteor import membership, planning
from pyspark_meteor.offsets import to_spark
from pyspark_meteor.options import Limits, OffsetSpec, SourceOptions, parse_columns, parse_source
from pyspark_meteor.source import MeteorDataSource
from tests.support.readers import fill
from tests.support.spark_engine import Checkpoint, Engine, own_process


def parse(given: dict[str, str] | None = None, *, streaming: bool = True) -> SourceOptions:
    given = given or {}
    named = {"stream": "orders"} if not {"streams", "streamsPattern"} & {*given} else {}
    return parse_source(named | given, streaming=streaming)


# Options


def test_option_names_ignore_case() -> None:
    options = parse({"MAXOFFSETSPERTRIGGER": "7", "failondataloss": "FALSE", "minpartitions": "3"})
    assert options.limits == Limits(max_records=7)
    assert not options.fail_on_data_loss
    assert options.min_partitions == 3


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        ({}, OffsetSpec("latest")),
        ({"startingOffsets": "earliest"}, OffsetSpec("earliest")),
        ({"startingOffsets": "group", "group": "g"}, OffsetSpec("group")),
        ({"startingOffsets": "-10"}, OffsetSpec("before", 10)),
        ({"startingOffsets": '{"orders": 17}'}, OffsetSpec("offset", 17)),
        ({"startingOffsets": '{"orders": -2}'}, OffsetSpec("earliest")),  # Kafka's notation
        ({"startingOffsets": '{"orders": -1}'}, OffsetSpec("latest")),
        ({"startingOffsets": '{"orders": "-5"}'}, OffsetSpec("before", 5)),
        ({"startingTimestamp": "1794836508123"}, OffsetSpec("time", 1794836508123)),
        ({"startingTimestamp": "1970-01-01T01:00:00+01:00"}, OffsetSpec("time", 0)),
    ],
)
def test_start_position_accepts_every_documented_form(
    given: dict[str, str], spec: OffsetSpec
) -> None:
    assert parse(given).starting["orders"] == spec


def test_batch_starts_at_earliest_and_streaming_query_at_latest_by_default() -> None:
    assert parse(streaming=False).starting["orders"] == OffsetSpec("earliest")
    assert parse(streaming=False).ending["orders"] == OffsetSpec("latest")
    assert parse().starting["orders"] == OffsetSpec("latest")


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("30s", 30), ("15m", 900), ("2 h", 7200), ("250", 0.25)]
)
def test_delay_accepts_units(text: str, seconds: float) -> None:
    options = parse({"minOffsetsPerTrigger": "5", "maxTriggerDelay": text})
    assert options.limits == Limits(min_records=5, max_delay_s=seconds)


@pytest.mark.parametrize(
    ("streaming", "given", "words"),
    [
        (True, {"startingOffset": "earliest"}, ["'startingOffset'", "startingOffsets"]),
        (True, {"endingOffsets": "latest"}, ["endingOffsets", "does not apply here"]),
        (False, {"group": "g"}, ["group", "does not apply here"]),
        (False, {"maxOffsetsPerTrigger": "5"}, ["maxOffsetsPerTrigger", "does not apply here"]),
        (True, {"stream": "a", "streams": "a,b"}, ["stream and streams"]),
        (True, {"stream": ""}, ["The option stream is empty"]),
        (True, {"group": ""}, ["The option group is empty"]),
        (True, {"streams": " ,"}, ["The option streams contains no name: ' ,'"]),
        (True, {"streams": "a b"}, ["'a b'"]),
        (True, {"streamsPattern": "("}, ["streamsPattern"]),
        (True, {"startingOffsets": "soon"}, ["startingOffsets", "'soon'"]),
        (True, {"startingOffsets": "17"}, ["startingOffsets", "'17'"]),
        (True, {"startingOffsets": "{"}, ["startingOffsets", "JSON"]),
        (True, {"startingOffsets": '{"orders": true}'}, ["startingOffsets", "True"]),
        (True, {"startingOffsets": '{"orders": -5}'}, ["startingOffsets", 'write "-5", with quo']),
        (True, {"startingOffsets": '{"order": 1}'}, ["startingOffsets", "'order'", "not read"]),
        (True, {"startingOffsets": "group"}, ["startingOffsets=group", 'needs the option "group"']),
        (False, {"startingOffsets": "group"}, ["startingOffsets=group", "readStream"]),
        (False, {"endingOffsets": "group"}, ["endingOffsets", "'group'"]),
        (
            True,
            {"startingOffsets": "latest", "startingTimestamp": "0"},
            ["startingOffsets and startingTimestamp"],
        ),
        (
            False,
            {"startingOffsets": '{"orders": 9}', "endingOffsets": '{"orders": 8}'},
            ["startingOffsets", "'orders'", "endingOffsets"],
        ),
        (
            False,
            {"startingTimestamp": "2", "endingTimestamp": "1"},
            ["startingTimestamp", "endingTimestamp"],
        ),
        (False, {"startingOffsets": "-5", "endingOffsets": "-10"}, ["startingOffsets is after"]),
        (
            False,
            {"startingOffsets": "latest", "endingOffsets": "-1"},
            ["startingOffsets is after"],
        ),
        (
            False,
            {"startingOffsets": "latest", "endingOffsets": "earliest"},
            ["startingOffsets is after endingOffsets, so nothing can be read"],
        ),
        (
            False,
            {"startingOffsets": '{"orders": -1}', "endingOffsets": '{"orders": "-3"}'},
            ["startingOffsets for stream 'orders' is after"],
        ),
        (True, {"startingTimestamp": "2026-11-16T14:30:00"}, ["startingTimestamp", "zone"]),
        (
            True,
            {"maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "6"},
            ["minOffsetsPerTrigger is greater than maxOffsetsPerTrigger"],
        ),
        (True, {"maxOffsetsPerTrigger": "0"}, ["maxOffsetsPerTrigger", "'0'"]),
        (True, {"maxTriggerDelay": "soon"}, ["maxTriggerDelay", "'soon'"]),
        (True, {"maxTriggerDelay": "30s"}, ["maxTriggerDelay", "minOffsetsPerTrigger. Pass both"]),
        (True, {"failOnDataLoss": "yes"}, ["failOnDataLoss", "'yes'"]),
        (True, {"valueFormat": "json"}, ["valueFormat", "binary, string", "'json'"]),
        (True, {"url": "fake://"}, ["fake://", "one process"]),
        (True, {"passwordEnv": "X"}, ["password", "url"]),
        (
            True,
            {"url": "redis://h", "passwordEnv": "X", "passwordFile": "/x"},
            ["passwordEnv", "passwordFile", "not both"],
        ),
    ],
)
def test_error_names_the_invalid_option(
    streaming: bool, given: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ValueError, match=words[0]) as caught:
        parse(given, streaming=streaming)
    assert not [word for word in words if word not in str(caught.value)]


def test_source_without_a_stream_is_refused() -> None:
    with pytest.raises(ValueError, match=r"streamsPattern or load\(\)\. You used none of them"):
        parse_source({}, streaming=True)


def test_unknown_option_is_refused_when_the_schema_is_requested() -> None:
    with pytest.raises(ValueError, match=r"'streem'.*streamsPattern"):
        MeteorDataSource(CaseInsensitiveDict({"streem": "orders"})).schema()
    assert not parse_columns({"endingOffsets": "latest", "group": "g"}).headers


# Queries


@pytest.fixture(autouse=True)
def cleaned_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(planning, "LIST_S", 0.0)  # new streams are found at once
    with own_process():
        yield


@pytest.fixture
def stream(url: str) -> Iterator[meteor.Stream]:
    with meteor.connect(url) as m:
        yield m.stream("orders", capacity=1000)


def test_batches_respect_the_limit_and_stop_at_the_end_of_the_stream(
    url: str, stream: meteor.Stream
) -> None:
    fill(stream, 10, 10, 5)
    with Engine(Checkpoint(), url=url, maxOffsetsPerTrigger="10", minPartitions="3") as engine:
        assert engine.limit == ReadMaxRows(10)
        assert [engine.batch() for _ in range(4)] == [
            [*range(10)], [*range(10, 20)], [*range(20, 25)], [],
        ]  # fmt: skip
        assert len(engine.parts) == 3
    assert Engine(Checkpoint(), url=url).limit == ReadAllAvailable()


@pytest.mark.parametrize("group", ["", "g"])
@pytest.mark.parametrize(
    ("starting", "wanted"), [("-4", 6), ("latest", 10), ("earliest", 0), ('{"orders": "-2"}', 8)]
)
def test_crash_in_an_early_batch_changes_neither_the_start_nor_the_batch(
    url: str, stream: meteor.Stream, starting: str, wanted: int, group: str
) -> None:
    fill(stream, 10)
    given = {"url": url, "startingOffsets": starting} | ({"group": group} if group else {})
    kept = Checkpoint()
    with Engine(kept, **given) as engine:
        assert engine._plan()  # planned but never completed
    fill(stream, 10)  # -4 would now mean another offset
    with Engine(kept, **given) as engine:
        assert engine.plan()
        engine.read()
    fill(stream, 10)
    with Engine(kept, **given) as engine:  # planned but not done, so the same rows are read again
        assert engine.batch() == [*range(wanted, 20)]
        assert engine.batch() == [*range(20, 30)]


def test_records_that_the_ring_drops_after_the_first_batch_are_reported_lost(
    url: str, stream: meteor.Stream
) -> None:
    small = stream.client.stream("small", capacity=100)
    fill(small, 100)
    kept = Checkpoint()
    with Engine(kept, url=url, stream="small") as engine:
        engine.begin()
    fill(small, 100)
    with (
        Engine(kept, url=url, stream="small") as engine,
        pytest.raises(meteor.RecordsLost, match="0 to 99"),
    ):
        engine.batch()


def test_streams_that_appear_after_the_first_batch_are_read_in_full(
    url: str, stream: meteor.Stream
) -> None:
    given = {"stream": "late", "startingOffsets": "latest"}
    with Engine(Checkpoint(), url=url, **given) as engine:
        engine.begin()
        fill(stream.client.stream("late", capacity=100), 3)
        assert engine.batch() == []  # the stream's start goes into the checkpoint first
        assert engine.batch() == [0, 1, 2]


def test_first_batch_that_an_older_release_planned_is_read_as_planned(
    url: str, stream: meteor.Stream
) -> None:
    fill(stream, 10)
    kept = Checkpoint()
    kept.planned.append(json.dumps(to_spark({"orders": stream.end()})))
    fill(stream, 5)
    with Engine(kept, url=url) as engine:
        assert [offset for _, offset in engine.read()] == [*range(10)]
        kept.done = 1
        assert engine.batch() == [*range(10, 15)]


def test_group_confirms_committed_batches_and_stop_releases_the_lease(
    url: str, stream: meteor.Stream
) -> None:
    fill(stream, 30)
    kept = Checkpoint()
    with Engine(kept, url=url, group="g", maxOffsetsPerTrigger="20") as engine:
        engine.batch()
        found = stream.group("g")
        assert (found.confirmed, found.owner) == (0, f"spark:g:{os.getpid()}")
        engine.batch()
        member = engine.reader._members["orders"]
        assert engine.batch() == []  # the next batch's start shows that the last one is done
        assert member._session.wanted == 30
    found = stream.group("g")
    assert (found.confirmed, found.lag, found.owner) == (30, 0, None)


def test_sigterm_releases_the_lease_and_does_not_interrupt_stop(
    url: str, stream: meteor.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(stream, 3)
    with Engine(Checkpoint(), url=url, group="g") as engine:
        engine.batch()
        with pytest.raises(SystemExit):
            engine.reader._handle_sigterm(signal.SIGTERM, None)
        assert stream.group("g").owner is None
    engine = Engine(Checkpoint(), url=url, group="g")
    engine.batch()
    close = membership.Membership.close

    def interrupted(self: membership.Membership) -> None:
        engine.reader._handle_sigterm(signal.SIGTERM, None)
        close(self)

    monkeypatch.setattr(membership.Membership, "close", interrupted)
    assert stream.group("g").owner
    engine.reader.stop()
    assert stream.group("g").owner is None


def test_query_waits_for_the_lease_then_fails_naming_its_owner(
    url: str, stream: meteor.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "LEASE_S", 0.2)
    fill(stream, 3)
    with stream.subscriber(group="g") as sub, Engine(Checkpoint(), url=url, group="g") as engine:
        sub.poll()
        owner = stream.group("g").owner
        assert owner
        with pytest.raises(meteor.GroupActive, match=owner) as caught:
            engine.batch()
        assert caught.value.owner == owner
    with Engine(Checkpoint(), url=url, group="g") as engine:
        assert engine.batch() == [0, 1, 2]


def test_batch_waits_for_the_minimum_unless_the_trigger_is_available_now(
    url: str, stream: meteor.Stream
) -> None:
    fill(stream, 5)
    given = {"url": url, "minOffsetsPerTrigger": "10"}
    with Engine(Checkpoint(), **given, maxTriggerDelay="1h") as engine:
        assert engine.batch() == []
        fill(stream, 5)
        assert engine.batch() == [*range(10)]
        fill(stream, 5)
        assert engine.batch() == []
    with Engine(Checkpoint(), **given, maxTriggerDelay="0ms") as engine:
        assert len(engine.batch()) == 15
    with Engine(Checkpoint(), **given | {"startingOffsets": "-5"}) as engine:
        engine.reader.prepareForTriggerAvailableNow()
        engine.begin()
        fill(stream, 100)
        assert engine.batch() == [*range(10, 15)]
        assert engine.batch() == []


def test_byte_limit_uses_the_average_record_size(url: str, stream: meteor.Stream) -> None:
    with stream.publisher() as pub:
        for _ in range(5):
            pub.publish_many([os.urandom(1000)] * 20).result()
    given = {"url": url, "maxBytesPerTrigger": str(20_000)}
    with Engine(Checkpoint(), **given) as engine:
        sizes = [len(engine.batch()) for _ in range(3)]
    mean = (stream.describe().bytes or 0) // 100
    assert sizes[:2] == [20_000 // mean] * 2, (sizes, mean)
    with Engine(Checkpoint(), **given, maxOffsetsPerTrigger="5") as engine:
        assert engine.batch() == [*range(5)]  # the lower of the two limits applies


def test_frames_stay_whole_unless_max_records_per_partition_forbids_it(
    url: str, stream: meteor.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Unlike the default, an explicit limit is strict, even if it has the same value.
    monkeypatch.setattr(planning, "RECORDS_PER_PARTITION", 10)
    fill(stream, 15, 15)
    with Engine(Checkpoint(), url=url) as engine:
        assert len(engine.batch()) == 30
        assert [len(pickle.loads(part)) for part in engine.parts] == [15, 15]
    with Engine(Checkpoint(), url=url, maxRecordsPerPartition="10") as engine:
        assert len(engine.batch()) == 30
        assert [len(pickle.loads(part)) for part in engine.parts] == [10, 10, 10]


def test_late_stream_is_read_from_the_first_record_in_its_ring(
    url: str, stream: meteor.Stream
) -> None:
    given = {"url": url, "streamsPattern": "orders.*", "maxOffsetsPerTrigger": "10"}
    with Engine(Checkpoint(), **given) as engine:
        assert engine.batch() == []
        small = stream.client.stream("orders.late", capacity=20)
        for _ in range(10):
            fill(small, 10)
        first, end = small.bounds()
        assert first > 10, "the ring dropped too few records"
        assert engine.batch() == []  # the stream's start goes into the checkpoint first
        seen: list[int] = []
        while rows := engine.batch():
            seen += rows
        assert seen == [*range(first, end)]


def test_records_that_the_ring_of_a_late_stream_drops_are_reported_lost(
    url: str, stream: meteor.Stream
) -> None:
    with Engine(Checkpoint(), url=url, streamsPattern="orders.*") as engine:
        engine.batch()
        small = stream.client.stream("orders.late", capacity=20)
        fill(small, 10)
        assert engine.batch() == []
        assert engine.plan()
        for _ in range(10):
            fill(small, 10)
        with pytest.raises(meteor.RecordsLost):
            engine.read()


def test_late_stream_is_read_in_full_after_a_crash_before_its_first_commit(
    url: str, stream: meteor.Stream
) -> None:
    kept = Checkpoint()
    given = {"url": url, "stream": "late", "startingOffsets": "latest", "group": "g"}
    with Engine(kept, **given) as engine:
        engine.batch()
        late = stream.client.stream("late", create=True)
        fill(late, 5)
        engine.plan()
    fill(late, 3)
    with Engine(kept, **given) as engine:
        rows: list[int] = []
        for _ in range(4):
            rows += engine.batch()
    assert rows == [*range(8)]


@pytest.mark.parametrize("group", ["", "g"])
def test_recreated_stream_fails_the_query_or_is_read_from_its_beginning(
    url: str, stream: meteor.Stream, group: str
) -> None:
    fill(stream, 10)
    kept = Checkpoint()
    given = {"url": url} | ({"group": group} if group else {})
    with Engine(kept, **given) as engine:
        assert len(engine.batch()) == 10
        stream.delete()
        again = stream.client.stream("orders", capacity=1000)
        fill(again, 3)
        with pytest.raises(meteor.LogTruncated, match="orders"):
            engine.batch()
    with Engine(kept, **given, failOnDataLoss="false") as engine:
        assert engine.batch() == []  # the stream's start goes into the checkpoint first
        assert engine.batch() == [0, 1, 2]
        fill(again, 2)
        assert engine.plan()
        again.delete()
        assert engine.read() == []  # the planned records are gone
        kept.done += 1
        engine.batch()
        assert engine.batch() == []  # the batch is not planned again


def test_lost_records_fail_the_query_or_are_skipped_and_logged(
    url: str, stream: meteor.Stream, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Checkpoint()
    with Engine(kept, url=url) as engine:
        fill(stream, 10)
        assert len(engine.batch()) == 10
        for _ in range(20):
            fill(stream, 100)
        first, end = stream.bounds()
        assert engine.plan()
        with pytest.raises(meteor.RecordsLost) as caught:
            engine.read()
        assert (caught.value.first, caught.value.last) == (10, first - 1)
    with Engine(kept, url=url, failOnDataLoss="false") as engine:
        assert engine.batch() == [*range(first, end)]
    assert (
        f"Skipping {first - 10} lost or damaged records (10 to {first - 1}) in stream 'orders'"
        in caplog.text
    )
