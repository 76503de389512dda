"""Reading ahead: records requested in advance are returned in order, or not at all.

After a few fetches in a row, the reader requests the next records before the caller has processed
the current ones. The hazard: the reply waits in the connection, and must not be mistaken for the
reply to another request.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import meteor_py as meteor
from tests.support.proxy import Proxy
from tests.support.servers import HOST, Server

RECORDS = 8_000
CAPACITY = RECORDS


@pytest.fixture
def stream(url: str) -> Iterator[meteor.Stream]:
    """A stream of small frames: reading it takes many fetches."""
    with meteor.connect(url) as m:
        stream = m.stream("ahead", capacity=CAPACITY)
        fill(stream, RECORDS)
        yield stream


def fill(stream: meteor.Stream, records: int) -> None:
    first = stream.describe().next
    with stream.publisher() as pub:
        for start in range(first, first + records, 10):
            pub.publish_many([b"%d" % n for n in range(start, start + 10)]).result()


def read(sub: meteor.Subscriber) -> None:
    batch = sub.poll(timeout=0)
    assert batch.values() == [b"%d" % offset for offset in batch.offsets]


def read_straight(sub: meteor.Subscriber) -> None:
    """Read until the reader has requested records in advance."""
    for _ in range(10):
        read(sub)
        if sub._fetcher.buffer._log._ring._ahead is not None:
            return
    pytest.fail("Nothing was requested in advance, so this test proves nothing.")


def read_all(sub: meteor.Subscriber, stop: int) -> None:
    while sub.position < stop:
        read(sub)


def test_all_records_are_read_once_and_in_order(stream: meteor.Stream) -> None:
    with stream.subscriber(initial_offset="earliest") as sub:
        read_straight(sub)
        read_all(sub, RECORDS)
        assert len(sub.poll(timeout=0)) == 0


def test_seek_does_not_return_records_requested_before_it(stream: meteor.Stream) -> None:
    with stream.subscriber() as sub:
        for target in (3, RECORDS - 5, 0, 777):
            sub.seek(0)
            read_straight(sub)
            sub.seek(target)
            assert sub.poll(max_records=1).values() == [b"%d" % target]


def test_random_seeks_request_nothing_in_advance(stream: meteor.Stream) -> None:
    with stream.subscriber() as sub:
        for target in range(0, RECORDS, 500):
            sub.seek(target)
            assert sub.poll(max_records=1).values() == [b"%d" % target]
            assert sub._fetcher.buffer._log._ring._ahead is None


def test_ring_that_overtakes_the_requested_records_causes_a_gap(stream: meteor.Stream) -> None:
    with stream.subscriber(initial_offset="earliest") as sub:
        read_straight(sub)
        fill(stream, 2 * CAPACITY)
        end = RECORDS + 2 * CAPACITY
        with pytest.raises(meteor.RecordsLost) as gap:
            read_all(sub, end)
        assert gap.value.first == sub.position
        assert gap.value.last == end - CAPACITY - 1


def test_lost_connection_loses_no_record(stream: meteor.Stream, server: Server) -> None:
    with (
        Proxy(HOST, server.port) as proxy,
        meteor.connect(proxy.url) as m,
        m.stream("ahead", create=False).subscriber(initial_offset="earliest") as sub,
    ):
        for _ in range(2):
            read_straight(sub)
            proxy.cut()
        read_all(sub, RECORDS)


def test_reader_notices_that_the_stream_was_deleted(stream: meteor.Stream) -> None:
    with stream.subscriber(initial_offset="earliest") as sub:
        read_straight(sub)
        stream.delete()
        with pytest.raises(meteor.StreamNotFound):
            read_all(sub, RECORDS)
