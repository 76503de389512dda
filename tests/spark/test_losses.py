"""Queries report records and streams that the server has lost. Runs without Spark.

``tests.support.spark_engine`` stands in for Spark's engine in this process; servers are real.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.runtime.clock import now
from pyspark_meteor import membership
from tests.support.proxied_stream import NAME, ReplicatedStream
from tests.support.readers import fill
from tests.support.spark_engine import Checkpoint, Engine, own_process
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def cleaned_up() -> Iterator[None]:
    with own_process():
        yield


@pytest.fixture
def client(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


# A failover to a lagging replica


class Lagging:
    """A query during a failover that loses records 20 to 29 and their confirms."""

    def __init__(self, replicated: ReplicatedStream, group: str) -> None:
        self.replicated = replicated
        self.kept = Checkpoint()
        self.given = {"url": replicated.proxied.proxy.url}
        if group:
            self.given["group"] = group
        fill(replicated.proxied.stream, 20)

    def engine(self, **given: str) -> Engine:
        return Engine(self.kept, **self.given | {"failOnDataLoss": "false"} | given)

    def begin(self, engine: Engine) -> None:
        assert engine.batch() == [*range(20)]
        assert engine.batch() == []
        self.replicated.lag()
        fill(self.replicated.proxied.stream, 10)

    def wait_until_confirmed(self, offset: int) -> None:
        stream, group = self.replicated.proxied.stream, self.given.get("group")
        if group:
            eventually(
                lambda: stream.group(group).confirmed == offset, 10, f"{offset} was not confirmed"
            )

    def fail_over(self, more: int) -> None:
        self.replicated.fail_over()
        fill(self.replicated.proxied.stream, more)


@pytest.fixture(params=["", "g"])
def lagging(
    replicated: ReplicatedStream, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Lagging:
    # The replica never learns that the lease was released, so the lease must expire soon.
    monkeypatch.setattr(membership, "LEASE_S", 1.0)
    return Lagging(replicated, request.param)


def test_query_that_allows_loss_steps_back_to_the_records_that_replaced_lost_ones(
    lagging: Lagging, caplog: pytest.LogCaptureFixture
) -> None:
    with lagging.engine() as engine:
        lagging.begin(engine)
        assert engine.batch() == [*range(20, 30)]
        assert engine.batch() == []  # planning the next batch confirms the last one
        lagging.wait_until_confirmed(30)
        lagging.fail_over(more=5)
        assert engine.batch() == []  # the step back goes into the checkpoint first
        assert engine.batch() == [*range(20, 25)]
        assert engine.batch() == []
        lagging.wait_until_confirmed(25)
        fill(lagging.replicated.proxied.stream, 25)
        assert engine.batch() == [*range(25, 50)]
        assert engine.batch() == []
    assert "20 to 29" in caplog.text
    assert "failOnDataLoss is false" in caplog.text
    lagging.wait_until_confirmed(50)


def test_query_that_allows_loss_steps_back_after_a_crash_too(lagging: Lagging) -> None:
    with lagging.engine() as engine:
        lagging.begin(engine)
        assert engine.plan()
    lagging.fail_over(more=30)  # beyond the checkpoint, so the offset alone does not show the loss
    strict = lagging.engine(failOnDataLoss="true")
    with strict, pytest.raises(meteor.LogTruncated, match="20 to 29"):
        strict.batch()
    with lagging.engine(maxOffsetsPerTrigger="25") as engine:
        engine.reader.prepareForTriggerAvailableNow()
        assert engine.batch() == []  # the planned records are gone
        assert engine.batch() == []  # the step back goes into the checkpoint first
        assert engine.batch() == [*range(20, 45)]
        assert engine.batch() == [*range(45, 50)]
        assert engine.batch() == []


# Streams that are deleted or missing


@pytest.mark.parametrize("parts", ["1", "3"])
def test_repeated_batch_from_a_deleted_stream_fails_or_is_empty(
    url: str, client: meteor.Client, parts: str
) -> None:
    stream = client.stream("orders", capacity=1000)
    fill(stream, 10)
    kept = Checkpoint()
    with Engine(kept, url=url) as engine:
        assert len(engine.batch()) == 10
        fill(stream, 10)
        assert engine.plan()
    stream.delete()
    strict = Engine(kept, url=url, minPartitions=parts)
    with strict, pytest.raises(meteor.StreamNotFound, match="'orders'"):
        strict.batch()
    with Engine(kept, url=url, minPartitions=parts, failOnDataLoss="false") as engine:
        assert engine.batch() == []
        assert engine.batch() == []  # the query's offsets no longer include the stream
        fill(client.stream("orders", capacity=1000), 3)
        assert engine.batch() == []  # the stream's start goes into the checkpoint first
        assert engine.batch() == [0, 1, 2]


@pytest.mark.parametrize("recreated", [False, True])
def test_stream_deleted_during_a_read_fails_or_ends_the_task(
    url: str, client: meteor.Client, recreated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for lenient in (False, True):
        stream = client.stream("orders", capacity=50_000)
        with stream.publisher() as pub:  # more records than one fetch returns
            for _ in range(30):
                pub.publish_many([b"x" * 10_000] * 100).result()
        strictness = str(not lenient).lower()
        with Engine(Checkpoint(), url=url, failOnDataLoss=strictness) as engine:
            assert engine.plan()
            assert len(engine.read()) == 3000
            reading = pickle.loads(engine.pickled).read(pickle.loads(engine.parts[0]))
            rows = next(reading).num_rows
            stream.delete()
            if recreated:
                fill(client.stream("orders", capacity=50_000), 4000)
            if lenient:
                rows += sum(batch.num_rows for batch in reading)
                assert rows < 3000
            else:
                with pytest.raises(meteor.LogTruncated if recreated else meteor.StreamNotFound):
                    list(reading)
                assert "Skipping" not in caplog.text
        if recreated:
            client.stream("orders", create=True).delete()
    assert "Skipping the rest of Range('orders', 0, 3000)" in caplog.text


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log messages about missing streams."""
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "There is no stream" in text]


def test_query_warns_once_about_each_missing_stream(
    url: str, client: meteor.Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client.stream("orders", capacity=1000), 3)
    kept, given = Checkpoint(), {"url": url, "streams": "orders,oders"}
    with Engine(kept, **given) as engine:
        assert engine.batch() == [0, 1, 2]
        assert engine.batch() == []
    (warning,) = warnings(caplog)
    assert "'oders'" in warning
    assert "`meteor streams ls`" in warning
    caplog.clear()
    with Engine(kept, **given) as engine:  # a restarted query does not determine its start again
        engine.reader.prepareForTriggerAvailableNow()
        assert engine.batch() == []
    assert warnings(caplog) == [warning]
    caplog.clear()
    fill(client.stream("oders", capacity=1000), 1)
    with Engine(kept, **given) as engine:
        assert engine.batch() == []  # the stream's start goes into the checkpoint first
        assert engine.batch() == [0]
    with Engine(Checkpoint(), url=url, streamsPattern="no.*") as engine:
        assert engine.batch() == []
    assert warnings(caplog) == []


@pytest.mark.parametrize("recreated", [False, True])
def test_query_that_waits_for_more_records_logs_a_loss_once(
    url: str, client: meteor.Client, recreated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        fill(client.stream(name, capacity=1000), 5)
    given = {"failOnDataLoss": "false", "minOffsetsPerTrigger": "5", "maxTriggerDelay": "1h"}
    with Engine(Checkpoint(), url=url, streams="a,b", **given) as engine:
        assert len(engine.batch()) == 10
        client.stream("a", create=True).delete()
        if recreated:
            client.stream("a", capacity=1000)
        for _ in range(5):
            engine.plan()
        fill(client.stream("b", create=True), 5)
        while not engine.batch():
            pass
    texts = [record.getMessage() for record in caplog.records]
    (warning,) = [text for text in texts if "The query continues" in text]
    assert "'a'" in warning


# Leases


def test_query_keeps_its_lease_when_a_batch_outlasts_the_poll_interval(
    url: str, client: meteor.Client
) -> None:
    stream = client.stream("orders", capacity=1000)
    fill(stream, 3)
    with Engine(Checkpoint(), url=url, group="g") as engine:
        engine.batch()
        session = engine.reader._members[NAME]._session
        assert session.term is not None
        session.polling = True  # so that the renewal thread does not let the lease lapse yet
        session.alive_at = now() - membership._BUSY_S - 1
        assert not engine.plan()
        session.polling = False
        term = session.term
        session.connection.use(lambda link: session.lapse(link, term))  # as the renewal thread does
        assert stream.group("g").owner == f"spark:g:{os.getpid()}"


# Damaged frames


def test_query_that_allows_loss_skips_only_the_damaged_frame(
    url: str, client: meteor.Client, caplog: pytest.LogCaptureFixture
) -> None:
    stream = client.stream("orders", capacity=1000)
    fill(stream, 10, 10, 10)
    log, entry = keys.log("orders"), b"19-10"
    entries: Any = client.redis.xrange(log)
    client.redis.delete(log)
    for entry_id, fields in entries:
        if entry_id == entry:
            (frame,) = set(fields) - {b"t", b"crc"}
            fields[frame] = fields[frame][:-20]
        client.redis.xadd(log, fields, id=entry_id)
    strict = Engine(Checkpoint(), url=url)
    with strict, pytest.raises(meteor.CorruptFrame, match="10 to 19"):
        strict.batch()
    with Engine(Checkpoint(), url=url, failOnDataLoss="false") as engine:
        assert engine.batch() == [*range(10), *range(20, 30)]
        assert engine.batch() == []
    # A task may begin or end in the middle of the frame.
    given = {"failOnDataLoss": "false", "maxRecordsPerPartition": "4"}
    with Engine(Checkpoint(), url=url, **given) as engine:
        assert engine.batch() == [*range(10), *range(20, 30)]
        assert len(engine.parts) > 5
    assert "Skipping 10 lost or damaged records (10 to 19) in stream 'orders'" in caplog.text
