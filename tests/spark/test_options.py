"""The data source without Spark: its options, how it cuts ranges, and what an engine sees of it.

The engine is that of ``tests.support.spark_engine``, in this process; a real server answers it.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import meteor_py as meteor
from pyspark_meteor import membership, planning
from pyspark_meteor.options import Limits, Place, SourceOptions, parse_columns, parse_source
from pyspark_meteor.source import MeteorDataSource
from tests.support.readers import fill
from tests.support.spark_engine import Checkpoint, Engine, own_process


def parse(given: dict[str, str] | None = None, *, streaming: bool = True) -> SourceOptions:
    given = given or {}
    named = {"stream": "orders"} if not {"streams", "streamsPattern"} & {*given} else {}
    return parse_source(named | given, streaming=streaming)


# Options


def test_the_names_of_options_may_be_in_any_case() -> None:
    options = parse({"MAXOFFSETSPERTRIGGER": "7", "failondataloss": "FALSE", "minpartitions": "3"})
    assert options.limits == Limits(max_records=7)
    assert not options.fail_on_data_loss
    assert options.min_partitions == 3


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({}, Place("latest")),
        ({"startingOffsets": "earliest"}, Place("earliest")),
        ({"startingOffsets": "group", "group": "g"}, Place("group")),
        ({"startingOffsets": "-10"}, Place("before", 10)),
        ({"startingOffsets": '{"orders": 17}'}, Place("offset", 17)),
        ({"startingOffsets": '{"orders": -2}'}, Place("earliest")),  # as Kafka writes it
        ({"startingOffsets": '{"orders": -1}'}, Place("latest")),
        ({"startingOffsets": '{"orders": "-5"}'}, Place("before", 5)),
        ({"startingTimestamp": "1794836508123"}, Place("time", 1794836508123)),
        ({"startingTimestamp": "1970-01-01T01:00:00+01:00"}, Place("time", 0)),
    ],
)
def test_a_place_to_start_can_be_written_in_many_ways(given: dict[str, str], place: Place) -> None:
    assert parse(given).starting["orders"] == place


def test_a_batch_starts_at_the_earliest_record_and_a_stream_at_the_latest() -> None:
    assert parse(streaming=False).starting["orders"] == Place("earliest")
    assert parse(streaming=False).ending["orders"] == Place("latest")
    assert parse().starting["orders"] == Place("latest")


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("30s", 30), ("15m", 900), ("2 h", 7200), ("250", 0.25)]
)
def test_a_delay_is_a_span_of_time(text: str, seconds: float) -> None:
    options = parse({"minOffsetsPerTrigger": "5", "maxTriggerDelay": text})
    assert options.limits == Limits(min_records=5, max_delay_s=seconds)


@pytest.mark.parametrize(
    ("streaming", "given", "words"),
    [
        (True, {"startingOffset": "earliest"}, ["'startingOffset'", "startingOffsets"]),
        (True, {"endingOffsets": "latest"}, ["endingOffsets", "no meaning here"]),
        (False, {"group": "g"}, ["group", "no meaning here"]),
        (False, {"maxOffsetsPerTrigger": "5"}, ["maxOffsetsPerTrigger", "no meaning here"]),
        (True, {"stream": "a", "streams": "a,b"}, ["stream and streams"]),
        (True, {"stream": ""}, ["The option stream is empty"]),
        (True, {"group": ""}, ["The option group is empty"]),
        (True, {"streams": " ,"}, ["The option streams has no name in it: ' ,'"]),
        (True, {"streams": "a b"}, ["'a b' cannot be the name of a stream"]),
        (True, {"streamsPattern": "("}, ["streamsPattern"]),
        (True, {"startingOffsets": "soon"}, ["startingOffsets", "'soon'"]),
        (True, {"startingOffsets": "17"}, ["startingOffsets", "'17'"]),
        (True, {"startingOffsets": "{"}, ["startingOffsets", "JSON"]),
        (True, {"startingOffsets": '{"orders": true}'}, ["startingOffsets", "True"]),
        (True, {"startingOffsets": '{"orders": -5}'}, ["startingOffsets", 'write "-5", with quo']),
        (True, {"startingOffsets": '{"order": 1}'}, ["startingOffsets", "'order'", "not read"]),
        (True, {"startingOffsets": "group"}, ["startingOffsets=group", "name it with group"]),
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
        (False, {"startingOffsets": "-5", "endingOffsets": "-10"}, ["startingOffsets is behind"]),
        (
            False,
            {"startingOffsets": "latest", "endingOffsets": "-1"},
            ["startingOffsets is behind"],
        ),
        (
            False,
            {"startingOffsets": "latest", "endingOffsets": "earliest"},
            ["startingOffsets is behind endingOffsets: nothing lies between"],
        ),
        (
            False,
            {"startingOffsets": '{"orders": -1}', "endingOffsets": '{"orders": "-3"}'},
            ["startingOffsets of stream 'orders' is behind"],
        ),
        (True, {"startingTimestamp": "2026-11-16T14:30:00"}, ["startingTimestamp", "zone"]),
        (
            True,
            {"maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "6"},
            ["minOffsetsPerTrigger is above maxOffsetsPerTrigger"],
        ),
        (True, {"maxOffsetsPerTrigger": "0"}, ["maxOffsetsPerTrigger", "'0'"]),
        (True, {"maxTriggerDelay": "soon"}, ["maxTriggerDelay", "'soon'"]),
        (True, {"maxTriggerDelay": "30s"}, ["maxTriggerDelay", "minOffsetsPerTrigger; give that"]),
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
def test_options_that_are_wrong_are_refused_by_name(
    streaming: bool, given: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ValueError, match=words[0]) as caught:
        parse(given, streaming=streaming)
    assert not [word for word in words if word not in str(caught.value)]


def test_what_to_read_has_to_be_named() -> None:
    with pytest.raises(ValueError, match=r"streamsPattern or load\(\), not by none of them"):
        parse_source({}, streaming=True)


def test_an_unknown_option_is_refused_when_the_schema_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"'streem'.*streamsPattern"):
        MeteorDataSource(CaseInsensitiveDict({"streem": "orders"})).schema()
    assert not parse_columns({"endingOffsets": "latest", "group": "g"}).headers


# The engine


@pytest.fixture(autouse=True)
def cleaned_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(planning, "LIST_S", 0.0)  # new streams are found at once
    with own_process():
        yield


@pytest.fixture
def stream(url: str) -> Iterator[meteor.Stream]:
    with meteor.connect(url) as m:
        yield m.stream("orders", capacity=1000)


def test_batches_are_limited_and_end_when_nothing_is_left(url: str, stream: meteor.Stream) -> None:
    fill(stream, 10, 10, 5)
    with Engine(Checkpoint(), url=url, maxOffsetsPerTrigger="10", minPartitions="3") as engine:
        assert engine.limit == ReadMaxRows(10)
        assert [engine.batch() for _ in range(4)] == [
            [*range(10)], [*range(10, 20)], [*range(20, 25)], [],
        ]  # fmt: skip
        assert len(engine.parts) == 3
    assert Engine(Checkpoint(), url=url).limit == ReadAllAvailable()


def test_a_crash_before_the_first_batch_is_done_changes_nothing(
    url: str, stream: meteor.Stream
) -> None:
    fill(stream, 10)
    given = {"url": url, "group": "g", "startingOffsets": "-4"}
    crashed, kept = Engine(Checkpoint(), **given), Checkpoint()
    before = crashed.initial()
    crashed.reader.stop()  # so that the lease need not be waited for
    fill(stream, 10)  # -4 would mean another place now
    with Engine(kept, **given) as engine:
        assert engine.initial() == before
        assert engine.plan()
        engine.read()
    fill(stream, 10)
    with Engine(kept, **given) as engine:  # planned, and not done: the same rows once more
        assert engine.batch() == [*range(6, 20)]
        assert engine.batch() == [*range(20, 30)]


def test_what_is_done_is_confirmed_to_the_group_and_the_lease_given_up(
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
        assert engine.batch() == []  # its start says that the last one is done
        assert member._session is not None
        assert member._session.wanted == 30
    found = stream.group("g")
    assert (found.confirmed, found.lag, found.owner) == (30, 0, None)


def test_the_signal_that_ends_a_query_gives_up_the_lease_and_does_not_cut_that_short(
    url: str, stream: meteor.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(stream, 3)
    with Engine(Checkpoint(), url=url, group="g") as engine:
        engine.batch()
        with pytest.raises(SystemExit):
            engine.reader._end(signal.SIGTERM, None)
        assert stream.group("g").owner is None
    engine = Engine(Checkpoint(), url=url, group="g")
    engine.batch()
    close = membership.Membership.close

    def interrupted(self: membership.Membership) -> None:
        engine.reader._end(signal.SIGTERM, None)
        close(self)

    monkeypatch.setattr(membership.Membership, "close", interrupted)
    assert stream.group("g").owner
    engine.reader.stop()
    assert stream.group("g").owner is None


def test_a_lease_that_somebody_has_is_waited_for_and_then_told_by_name(
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


def test_the_minimum_is_waited_for_unless_the_run_takes_what_is_there(
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
        engine.initial()
        fill(stream, 100)
        assert engine.batch() == [*range(10, 15)]
        assert engine.batch() == []


def test_a_limit_of_bytes_is_kept_on_the_average(url: str, stream: meteor.Stream) -> None:
    with stream.publisher() as pub:
        for _ in range(5):
            pub.publish_many([os.urandom(1000)] * 20).result()
    given = {"url": url, "maxBytesPerTrigger": str(20_000)}
    with Engine(Checkpoint(), **given) as engine:
        sizes = [len(engine.batch()) for _ in range(3)]
    mean = (stream.describe().bytes or 0) // 100
    assert sizes[:2] == [20_000 // mean] * 2, (sizes, mean)
    with Engine(Checkpoint(), **given, maxOffsetsPerTrigger="5") as engine:
        assert engine.batch() == [*range(5)], "the lower of two limits"


def test_frames_stay_whole_unless_a_task_may_not_have_so_many_records(
    url: str, stream: meteor.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said counts, also if it is what would hold anyway."""
    monkeypatch.setattr(planning, "RECORDS_PER_PARTITION", 10)
    fill(stream, 15, 15)
    with Engine(Checkpoint(), url=url) as engine:
        assert len(engine.batch()) == 30
        assert [len(pickle.loads(part)) for part in engine.parts] == [15, 15]
    with Engine(Checkpoint(), url=url, maxRecordsPerPartition="10") as engine:
        assert len(engine.batch()) == 30
        assert [len(pickle.loads(part)) for part in engine.parts] == [10, 10, 10]


def test_a_stream_found_late_is_read_from_what_its_ring_still_has(
    url: str, stream: meteor.Stream
) -> None:
    given = {"url": url, "streamsPattern": "orders.*", "maxOffsetsPerTrigger": "10"}
    with Engine(Checkpoint(), **given) as engine:
        assert engine.batch() == []
        small = stream.client.stream("orders.late", capacity=20)
        for _ in range(10):
            fill(small, 10)
        first, end = small.bounds()
        assert first > 10, "the first batches would be of records that are gone"
        assert engine.batch() == [], "where it begins is kept first"
        seen: list[int] = []
        while rows := engine.batch():
            seen += rows
        assert seen == [*range(first, end)]


def test_what_a_ring_drops_of_a_stream_found_late_is_a_loss_once_it_has_begun(
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


def test_a_stream_found_late_is_read_whole_after_a_crash_before_its_first_commit(
    url: str, stream: meteor.Stream
) -> None:
    kept = Checkpoint()
    given = {"url": url, "stream": "late", "startingOffsets": "latest", "group": "g"}
    with Engine(kept, **given) as engine:
        engine.batch()
        late = stream.client.stream("late")
        fill(late, 5)
        engine.plan()
    fill(late, 3)
    with Engine(kept, **given) as engine:
        rows: list[int] = []
        for _ in range(4):
            rows += engine.batch()
    assert rows == [*range(8)]


@pytest.mark.parametrize("group", ["", "g"])
def test_a_stream_created_anew_fails_the_query_or_is_read_from_its_beginning(
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
        with pytest.raises(meteor.LogTruncated, match=r"orders.*created anew"):
            engine.batch()
    with Engine(kept, **given, failOnDataLoss="false") as engine:
        assert engine.batch() == [], "where it begins is kept first"
        assert engine.batch() == [0, 1, 2]
        fill(again, 2)
        assert engine.plan()
        again.delete()
        assert engine.read() == [], "planned, and gone: the batch has to end some day"
        kept.done += 1
        engine.batch()
        assert engine.batch() == []  # and is not asked for again and again


def test_a_hole_fails_the_query_or_is_skipped_and_logged(
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
    assert f"{first - 10} records are lost, 10 to {first - 1} of stream 'orders'" in caplog.text
