"""Queries survive server restarts, failovers and dropped connections without losing records.

``tests.support.spark_engine`` stands in for Spark's engine; the last tests run Spark itself. Tests
with long outages are in tests/chaos/spark_outages.py.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import BinaryType, StructField, StructType

import meteor_py as meteor
from meteor_py.publish import transaction
from meteor_py.subscribe.group_session import GroupSession
from pyspark_meteor import membership, writers
from pyspark_meteor.sink_options import parse_sink
from pyspark_meteor.source import MeteorDataSource
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, ProxiedStream, ReplicatedStream
from tests.support.readers import fill
from tests.support.servers import Server
from tests.support.spark import offsets, start, stream_of
from tests.support.spark_engine import Checkpoint, Engine, Task, own_process
from tests.support.transactions import contents, numbers
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(400)

#: Seconds for which a server is down: long enough for several attempts.
AWAY_S = 1.0
KEEP = ("--appendonly", "yes", "--appendfsync", "always")
SCHEMA = StructType([StructField("value", BinaryType())])


@pytest.fixture(autouse=True)
def cleaned_up() -> Iterator[None]:
    with own_process():
        yield


@pytest.fixture
def durable(private_server: ServerFactory) -> Server:
    """A server that keeps its data when it is killed."""
    return private_server(*KEEP)


@contextmanager
def away(server: Server) -> Iterator[None]:
    """Kill the server, and restart it after ``AWAY_S`` seconds, while the block runs."""
    server.kill()
    timer = threading.Timer(AWAY_S, server.start)
    timer.start()
    try:
        yield
    finally:
        timer.join()


class Sink:
    """A query's sink in this process."""

    def __init__(self, url: str, **options: str) -> None:
        given = {"url": url, "stream": "copy"} | options
        self.writer = writers.StreamWriter(parse_sink(given, SCHEMA, streaming=True))

    def write(self, values: Iterator[list[int]]) -> writers.Written:
        batches = (pa.RecordBatch.from_pydict({"value": [b"%d" % n for n in v]}) for v in values)
        written = self.writer.write(batches)
        assert isinstance(written, writers.Written)
        return written


@pytest.fixture
def in_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "TaskContext", Task(0))


# The source


@pytest.mark.parametrize("group", ["", "g"])
def test_idle_query_waits_for_a_server_that_restarts(durable: Server, group: str) -> None:
    given = {"url": durable.url} | ({"group": group} if group else {})
    kept = Checkpoint()
    with meteor.connect(durable.url) as m, Engine(kept, **given) as engine:
        stream = m.stream(NAME, capacity=1000)
        with away(durable):
            engine.begin()
        fill(stream, 10)
        assert engine.batch() == [*range(10)]
        with away(durable):
            assert engine.batch() == []
        fill(stream, 10)
        assert engine.batch() == [*range(10, 20)]
        assert engine.batch() == []
    if group:
        with meteor.connect(durable.url) as m:
            assert m.stream(NAME).group(group).confirmed == 20


def test_planned_batch_is_read_completely_while_the_server_restarts(durable: Server) -> None:
    with meteor.connect(durable.url) as m, Engine(Checkpoint(), url=durable.url) as engine:
        with m.stream(NAME, capacity=50_000).publisher() as pub:  # more than one fetch returns
            for _ in range(30):
                pub.publish_many([b"x" * 10_000] * 100).result()
        assert engine.plan()
        with away(durable):  # while the driver divides the batch, and the first task starts
            rows = engine.read()
        assert [offset for _, offset in rows] == [*range(3000)]
        reading = pickle.loads(engine.pickled).read(pickle.loads(engine.parts[0]))
        count = next(reading).num_rows
        with away(durable):
            count += sum(batch.num_rows for batch in reading)
        assert count == 3000


def test_batch_query_waits_for_a_server_that_restarts(
    durable: Server,
) -> None:
    with meteor.connect(durable.url) as m:
        fill(m.stream(NAME, capacity=1000), 10)
    source = MeteorDataSource(CaseInsensitiveDict({"url": durable.url, "stream": NAME}))
    reader = source.reader(source.schema())
    with away(durable):
        (part,) = reader.partitions()
    with away(durable):
        batches: list[Any] = list(reader.read(part))
    assert sum(batch.num_rows for batch in batches) == 10


def test_query_fails_if_an_outage_lasts_longer_than_server_timeout(
    durable: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with meteor.connect(durable.url) as m:
        fill(m.stream(NAME, capacity=1000), 10)
    with Engine(Checkpoint(), url=durable.url, serverTimeout="300ms") as engine:
        assert engine.plan()
        durable.kill()
        with pytest.raises(meteor.ConnectionFailed, match="cannot be reached"):
            engine.read()
        with pytest.raises(meteor.ConnectionFailed, match="cannot be reached"):
            engine.batch()
    assert "Waiting up to 0.3 seconds for the server (serverTimeout)" in caplog.text


def test_query_with_a_group_continues_after_a_failover_that_lost_its_term(
    replicated: ReplicatedStream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(membership, "LEASE_S", 1.0)
    fill(replicated.proxied.stream, 10)
    with Engine(Checkpoint(), url=replicated.proxied.proxy.url, group="g") as engine:
        engine.begin()
        replicated.lag()  # the replica knows the group and the records, but not the term
        assert engine.batch() == [*range(10)]
        replicated.fail_over()
        assert engine.batch() == []
        fill(replicated.proxied.stream, 5)
        assert engine.batch() == [*range(10, 15)]
        assert engine.batch() == []
        stream = replicated.proxied.stream

        def confirmed() -> bool:
            # Like the engine, ask for records repeatedly: this confirms the last batch.
            assert engine.batch() == []
            return stream.group("g").confirmed == 15

        eventually(confirmed, 10, "15 was not confirmed")
    assert "Rejoining the group" in caplog.text


def test_query_that_cannot_get_the_lease_closes_its_session(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "LEASE_S", 0.2)
    sessions: list[GroupSession] = []
    hold = GroupSession.hold

    def holding(session: GroupSession, timeout_s: float) -> object:
        sessions.append(session)
        return hold(session, timeout_s)

    with meteor.connect(url) as m, m.stream(NAME, create=True).subscriber(group="g") as sub:
        sub.poll()
        monkeypatch.setattr(GroupSession, "hold", holding)
        engine = Engine(Checkpoint(), url=url, group="g")
        with pytest.raises(meteor.GroupActive), engine:
            engine.batch()
    (session,) = sessions
    assert session.closed


# The sink


@pytest.mark.usefixtures("in_task")
def test_task_and_commit_wait_for_a_server_that_restarts(
    durable: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "_SEND_BYTES", 1)
    with meteor.connect(durable.url) as m:
        m.stream("copy", capacity=1000)
    sink = Sink(durable.url)

    def rows() -> Iterator[list[int]]:
        yield [0, 1, 2]
        with away(durable):
            yield [3, 4]
        yield [5]

    with away(durable):
        written = sink.write(rows())
    with away(durable):
        sink.writer.commit([written], 0)
    with away(durable):
        sink.writer.commit([written], 0)
    with meteor.connect(durable.url) as m:
        assert contents(m.stream("copy", create=False)) == numbers(6)
        assert m.redis.keys("*stage*") == m.redis.keys("*plan*") == []


@pytest.mark.usefixtures("in_task")
def test_task_fails_and_can_be_repeated_if_the_server_lost_its_staged_frames(
    private_server: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "_SEND_BYTES", 1)
    server = private_server("--appendonly", "no", "--save", "")
    sink = Sink(server.url, capacity="100")

    def rows(fail: bool) -> Iterator[list[int]]:
        yield [0, 1]
        if fail:
            with away(server):
                yield [2]
        else:
            yield [2]

    with pytest.raises(meteor.PublishError, match="are gone"):
        sink.write(rows(fail=True))
    sink.writer.commit([sink.write(rows(fail=False))], 0)
    with meteor.connect(server.url) as m:
        assert contents(m.stream("copy", create=False)) == numbers(3)


@pytest.mark.usefixtures("in_task")
def test_commit_writes_each_row_once_whichever_reply_is_lost(
    private_server: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "MOVE_BYTES", 1)  # one frame per call
    with ProxiedStream(private_server()) as proxied:
        sink = Sink(proxied.proxy.url, stream=NAME)
        written = sink.write(iter([[n] for n in range(30)]))
        for number in range(1, 12):  # lose the reply to each call in turn
            proxied.proxy.cut_after_request(number)
            sink.writer.commit([written], 0)
            proxied.proxy.heal()
            assert contents(proxied.stream) == numbers(30)
            if number < 11:
                proxied.stream.delete()
                proxied.stream = proxied.client.stream(NAME, capacity=1000)
                written = sink.write(iter([[n] for n in range(30)]))


@pytest.mark.usefixtures("in_task")
def test_publishing_task_waits_for_a_server_that_restarts(durable: Server) -> None:
    sink = Sink(durable.url, delivery="atLeastOnce", capacity="100")

    def rows() -> Iterator[list[int]]:
        yield [0, 1, 2]
        with away(durable):
            yield [3, 4]

    with away(durable):
        sink.write(rows())
    with meteor.connect(durable.url) as m:
        assert contents(m.stream("copy", create=False)) == numbers(5)


@pytest.mark.usefixtures("in_task")
def test_sink_continues_on_the_promoted_replica(replicated: ReplicatedStream) -> None:
    sink = Sink(replicated.proxied.proxy.url, stream=NAME)

    def rows() -> Iterator[list[int]]:
        yield [0, 1]
        replicated.replica.wait_in_sync()
        replicated.fail_over()
        yield [2, 3]

    sink.writer.commit([sink.write(rows())], 0)
    assert contents(replicated.proxied.stream) == numbers(4)


# Spark itself


def test_spark_query_survives_server_restarts_while_busy_and_while_idle(
    spark: SparkSession, durable: Server, tmp_path: Path
) -> None:
    with meteor.connect(durable.url) as m:
        stream = m.stream(NAME, capacity=100_000)
        fill(stream, *[100] * 20)
        rows = stream_of(spark, durable.url, stream=NAME, maxOffsetsPerTrigger=100).select("value")
        writer = rows.writeStream.format("meteor").option("url", durable.url)
        writer = writer.option("stream", "copy").option("capacity", "100000")
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        try:
            eventually(lambda: "copy" in m.streams(), 60, "the query did not begin")
            copy = m.stream("copy", create=False)
            eventually(lambda: copy.end().offset >= 300, 60, "the query made no progress")
            with away(durable):
                assert query.isActive
            eventually(lambda: copy.end().offset == 2000, 60, "the query did not continue")
            with away(durable):  # while the query is idle
                assert query.isActive
            fill(stream, 50)
            eventually(lambda: copy.end().offset == 2050, 60, "the query did not continue")
            assert query.isActive
        finally:
            query.stop()
        values = [value for batch in stream.read() for value in batch.values()]
        assert [value for batch in copy.read() for value in batch.values()] == values


def test_spark_query_can_be_stopped_while_it_waits_for_the_server(
    spark: SparkSession, durable: Server, tmp_path: Path
) -> None:
    with meteor.connect(durable.url) as m:
        fill(m.stream(NAME, capacity=1000), 10)
    query = start(stream_of(spark, durable.url, stream=NAME), tmp_path, follow=True)
    query.processAllAvailable()
    durable.kill()
    eventually(lambda: "Getting offsets" in query.status["message"], 20, "the query is not polling")
    stopping = threading.Thread(target=query.stop)
    stopping.start()
    stopping.join(20)
    assert not stopping.is_alive(), "the query is still waiting for the server"
    durable.start()
    assert offsets(spark, tmp_path) == [*range(10)]
