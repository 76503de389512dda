"""What a query makes of a server that has lost something, or never had it; without Spark.

The engine is that of ``tests.support.spark_engine``, in this process; real servers answer it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator

import pytest

import meteor_py as meteor
from meteor_py.runtime.clock import now
from pyspark_meteor import membership
from tests.support.proxied_stream import NAME, Pair
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


# A fail-over to a replica that lagged


class Lagging:
    """Of what a query has read, records 20 to 29 and all that came of it are lost."""

    def __init__(self, pair: Pair, group: str) -> None:
        self.pair = pair
        self.kept = Checkpoint()
        self.given = {"url": pair.bench.proxy.url}
        if group:
            self.given["group"] = group
        fill(pair.bench.stream, 20)

    def engine(self, **given: str) -> Engine:
        return Engine(self.kept, **self.given | {"failOnDataLoss": "false"} | given)

    def begin(self, engine: Engine) -> None:
        assert engine.batch() == [*range(20)]
        assert engine.batch() == []
        self.pair.lag()
        fill(self.pair.bench.stream, 10)

    def wait_until_confirmed(self, offset: int) -> None:
        stream, group = self.pair.bench.stream, self.given.get("group")
        if group:
            eventually(
                lambda: stream.group(group).confirmed == offset, 10, f"{offset} is not confirmed"
            )

    def fail_over(self, more: int) -> None:
        self.pair.fail_over()
        fill(self.pair.bench.stream, more)


@pytest.fixture(params=["", "g"])
def lagging(pair: Pair, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Lagging:
    monkeypatch.setattr(membership, "LEASE_S", 1.0)  # the replica does not hear that it is given up
    return Lagging(pair, request.param)


def test_a_query_that_may_lose_records_steps_back_to_those_in_their_place(
    lagging: Lagging, caplog: pytest.LogCaptureFixture
) -> None:
    with lagging.engine() as engine:
        lagging.begin(engine)
        assert engine.batch() == [*range(20, 30)]
        assert engine.batch() == []  # whose start confirms the last one
        lagging.wait_until_confirmed(30)
        lagging.fail_over(more=5)
        assert engine.batch() == [], "where it goes on is kept first"
        assert engine.batch() == [*range(20, 25)]
        assert engine.batch() == []
        lagging.wait_until_confirmed(25)
        fill(lagging.pair.bench.stream, 25)
        assert engine.batch() == [*range(25, 50)]
        assert engine.batch() == []
    assert "20 to 29" in caplog.text
    assert "failOnDataLoss is false" in caplog.text
    lagging.wait_until_confirmed(50)


def test_a_step_back_is_taken_by_the_run_after_a_crash_too(lagging: Lagging) -> None:
    with lagging.engine() as engine:
        lagging.begin(engine)
        assert engine.plan()
    lagging.fail_over(more=30)  # beyond the checkpoint: the offset alone would not tell
    strict = lagging.engine(failOnDataLoss="true")
    with strict, pytest.raises(meteor.LogTruncated, match="20 to 29"):
        strict.batch()
    with lagging.engine(maxOffsetsPerTrigger="25") as engine:
        engine.reader.prepareForTriggerAvailableNow()
        assert engine.batch() == [], "planned, and gone: of these, nothing is left to read"
        assert engine.batch() == [], "where it goes on is kept first"
        assert engine.batch() == [*range(20, 45)]
        assert engine.batch() == [*range(45, 50)]
        assert engine.batch() == []


# A stream that is deleted, or is not there


@pytest.mark.parametrize("parts", ["1", "3"])
def test_a_batch_whose_stream_was_deleted_is_told_or_ends_when_it_is_repeated(
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
        assert engine.batch() == [], "it is forgotten"
        fill(client.stream("orders", capacity=1000), 3)
        assert engine.batch() == [], "where it begins is kept first"
        assert engine.batch() == [0, 1, 2]


@pytest.mark.parametrize("anew", [False, True])
def test_a_stream_that_goes_while_a_task_reads_it_fails_the_task_or_ends_it(
    url: str, client: meteor.Client, anew: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for lenient in (False, True):
        stream = client.stream("orders", capacity=50_000)
        with stream.publisher() as pub:  # more than is fetched at once
            for _ in range(30):
                pub.publish_many([b"x" * 10_000] * 100).result()
        strictness = str(not lenient).lower()
        with Engine(Checkpoint(), url=url, failOnDataLoss=strictness) as engine:
            assert engine.plan()
            assert len(engine.read()) == 3000
            reading = pickle.loads(engine.pickled).read(pickle.loads(engine.parts[0]))
            rows = next(reading).num_rows
            stream.delete()
            if anew:
                fill(client.stream("orders", capacity=50_000), 4000)
            if lenient:
                rows += sum(batch.num_rows for batch in reading)
                assert rows < 3000
            else:
                with pytest.raises(meteor.LogTruncated if anew else meteor.StreamNotFound):
                    list(reading)
                assert caplog.text == ""
        if anew:
            client.stream("orders").delete()
    assert "What is left of Range('orders', 0, 3000) is skipped" in caplog.text


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of streams that are not there."""
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "There is no stream" in text]


def test_a_query_says_once_which_of_its_streams_it_waits_for(
    url: str, client: meteor.Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client.stream("orders", capacity=1000), 3)
    kept, given = Checkpoint(), {"url": url, "streams": "orders,oders"}
    with Engine(kept, **given) as engine:
        assert engine.batch() == [0, 1, 2]
        assert engine.batch() == []
    (said,) = warnings(caplog)
    assert "'oders'" in said
    assert "`meteor streams ls`" in said
    caplog.clear()
    with Engine(kept, **given) as engine:  # from its checkpoint: nobody asks where it begins
        engine.reader.prepareForTriggerAvailableNow()
        assert engine.batch() == []
    assert warnings(caplog) == [said]
    caplog.clear()
    fill(client.stream("oders", capacity=1000), 1)
    with Engine(kept, **given) as engine:
        assert engine.batch() == [], "where it begins is kept first"
        assert engine.batch() == [0]
    with Engine(Checkpoint(), url=url, streamsPattern="no.*") as engine:
        assert engine.batch() == []
    assert warnings(caplog) == []


@pytest.mark.parametrize("anew", [False, True])
def test_a_query_that_waits_for_more_records_says_once_that_a_stream_is_gone(
    url: str, client: meteor.Client, anew: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        fill(client.stream(name, capacity=1000), 5)
    given = {"failOnDataLoss": "false", "minOffsetsPerTrigger": "5", "maxTriggerDelay": "1h"}
    with Engine(Checkpoint(), url=url, streams="a,b", **given) as engine:
        assert len(engine.batch()) == 10
        client.stream("a").delete()
        if anew:
            client.stream("a", capacity=1000)
        for _ in range(5):
            engine.plan()
        fill(client.stream("b"), 5)
        while not engine.batch():
            pass
    (said,) = [each.getMessage() for each in caplog.records if "goes on" in each.getMessage()]
    assert "'a'" in said


# A lease


def test_a_query_keeps_its_lease_for_longer_than_a_batch_may_take(
    url: str, client: meteor.Client
) -> None:
    stream = client.stream("orders", capacity=1000)
    fill(stream, 3)
    with Engine(Checkpoint(), url=url, group="g") as engine:
        engine.batch()
        session = engine.reader._members[NAME]._session
        assert session is not None
        assert session.term is not None
        session.polling = True  # its thread must not look before the query has spoken again
        session.alive_at = now() - membership._BUSY_S - 1
        assert not engine.plan()
        session.polling = False
        term = session.term
        session.connection.use(lambda link: session.lapse(link, term))  # as its thread does
        assert stream.group("g").owner == f"spark:g:{os.getpid()}"
