"""A publisher warns when the ring drops records that a group has not confirmed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import meteor_py as meteor
from tests.support.proxy import Proxy
from tests.support.servers import HOST, Server
from tests.support.waiting import eventually


@pytest.fixture
def client(any_url: str) -> Iterator[meteor.Client]:
    with meteor.connect(any_url) as m:
        yield m


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "has dropped records" in r.getMessage()]


def publish(stream: meteor.Stream, count: int) -> None:
    with stream.publisher() as pub:
        pub.publish_many([b"x"] * count).result(5)


def test_publisher_warns_once_about_each_group_whose_records_the_ring_drops(
    client: meteor.Client, caplog: pytest.LogCaptureFixture
) -> None:
    stream = client.stream("s", capacity=100)
    for group in ("billing", "audit", "done"):
        stream.subscriber(group=group).close()
    publish(stream, 100)
    assert warnings(caplog) == []
    stream.seek_group("done", 100)
    publish(stream, 100)
    publish(stream, 100)
    stream.seek_group("done", 300)
    assert [text.split(",")[0] for text in warnings(caplog)] == [
        "The ring of stream 's' has dropped records 0 to 99"
    ] * 2 + ["The ring of stream 's' has dropped records 100 to 199"]
    for text, group in zip(warnings(caplog), ("'audit'", "'billing'", "'done'"), strict=True):
        assert group in text
        assert "stream.configure()" in text


def test_publisher_that_stays_open_warns_while_it_publishes(
    client: meteor.Client, caplog: pytest.LogCaptureFixture
) -> None:
    stream = client.stream("s", capacity=100)
    stream.subscriber(group="billing").close()
    with stream.publisher() as pub:

        def warned() -> bool:
            pub.publish_many([b"x"] * 50).result(5)
            return bool(warnings(caplog))

        eventually(warned, 20, "there was no warning")
    assert len(warnings(caplog)) == 1


def test_publisher_also_warns_about_shared_groups(
    client: meteor.Client, caplog: pytest.LogCaptureFixture
) -> None:
    stream = client.stream("s", capacity=100, ordering_key="key")
    stream.shared_subscriber("workers").close()
    publish(stream, 100)
    publish(stream, 100)
    (text,) = warnings(caplog)
    assert "'workers'" in text


def test_publisher_warns_about_records_dropped_by_max_bytes(
    client: meteor.Client, caplog: pytest.LogCaptureFixture
) -> None:
    stream = client.stream("s", max_bytes=1_000)
    stream.subscriber(group="billing").close()
    for _ in range(100):
        publish(stream, 1)
    assert len(warnings(caplog)) == 1


def test_no_warning_for_streams_without_groups_or_with_a_store(
    url: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with meteor.connect(url) as m:
        publish(m.stream("alone", capacity=10), 100)
        stored = m.stream("stored", capacity=10, store=tmp_path)
        stored.subscriber(group="billing").close()
        for _ in range(5):
            publish(stored, 10)
            stored.store.flush()
    assert warnings(caplog) == []


def test_no_warning_for_a_group_left_over_from_a_deleted_stream(
    client: meteor.Client, caplog: pytest.LogCaptureFixture
) -> None:
    old = client.stream("s", capacity=10)
    old.subscriber(group="billing").close()
    left = client.redis.hgetall("meteor:{s}:group:billing")
    old.delete()
    stream = client.stream("s", capacity=10)
    client.redis.sadd("meteor:{s}:groups", "billing")
    client.redis.hset("meteor:{s}:group:billing", mapping=dict(left))  # type: ignore[arg-type]
    publish(stream, 100)
    publish(stream, 100)
    assert warnings(caplog) == []


def test_publisher_that_cannot_read_groups_publishes_without_warnings(
    client: meteor.Client, caplog: pytest.LogCaptureFixture
) -> None:
    stream = client.stream("s", capacity=10)
    client.redis.set("meteor:{s}:groups", "not a set")  # the server refuses SMEMBERS
    publish(stream, 100)
    publish(stream, 100)
    assert stream.end().offset == 200
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_connection_that_breaks_during_the_check_does_not_disturb_publishing(
    server: Server, url: str
) -> None:
    with Proxy(HOST, server.port) as proxy, meteor.connect(f"redis://{HOST}:{proxy.port}/0") as m:
        stream = m.stream("s", capacity=1_000)
        stream.subscriber(group="billing").close()
        with stream.publisher() as pub:
            proxy.cut_before_request(match=b"SMEMBERS")
            acks = [pub.publish(b"%d" % n) for n in range(3_000)]
            assert [ack.result(10) for ack in acks] == list(range(3_000))
        assert stream.end().offset == 3_000
