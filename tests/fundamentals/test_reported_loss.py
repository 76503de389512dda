"""Reported loss: if records are lost, readers and publishers learn exactly which ones.

A ring drops its oldest records. A reader that is too slow gets ``RecordsLost`` with the first and
last offset that it missed. A server that crashes may restart without the records that it
acknowledged last. A client that has seen them gets ``LogTruncated`` with the first and last offset
that the server has lost. A reader's calls raise the error until ``skip_gap()`` is called, and a
shared consumer raises it once; no record is skipped silently.
"""

from __future__ import annotations

import pytest

import meteor_py as meteor
from tests.conftest import ServerFactory
from tests.fundamentals.reading import numbers, publish
from tests.support.servers import Server


def test_slow_reader_learns_which_records_the_ring_has_dropped(m: meteor.Client) -> None:
    stream = m.stream("orders", capacity=10)
    with stream.subscriber(initial_offset="earliest") as sub:
        for first in range(0, 30, 5):
            publish(stream, range(first, first + 5))
        sub.seek(3)
        for _ in range(2):  # each poll reports the gap until it is skipped
            with pytest.raises(meteor.RecordsLost) as lost:
                sub.poll(5)
            assert (lost.value.first, lost.value.last) == (3, 19)
        sub.skip_gap()
        assert list(sub.poll(5).offsets) == list(range(20, 30))
        assert sub.skipped == 17


def test_slow_group_learns_which_records_the_ring_has_dropped(m: meteor.Client) -> None:
    stream = m.stream("orders", capacity=10)
    publish(stream, range(5))
    with stream.subscriber(group="billing") as sub:
        sub.poll(5)
        sub.confirm().result(5)
        publish(stream, range(5, 15))
        publish(stream, range(15, 25))
        with pytest.raises(meteor.RecordsLost) as lost:
            sub.poll(5)
        assert (lost.value.first, lost.value.last) == (5, 14)
        sub.skip_gap()
        assert list(sub.poll(5).offsets) == list(range(15, 25))


def test_shared_group_learns_which_records_the_ring_has_dropped(m: meteor.Client) -> None:
    stream = m.stream("orders", capacity=10, ordering_key="key")
    with stream.shared_subscriber("billing") as sub:
        publish(stream, range(10))
        publish(stream, range(10, 20))
        with pytest.raises(meteor.RecordsLost) as lost:
            sub.poll(5)
        assert (lost.value.first, lost.value.last) == (0, 9)
        assert [record.offset for record in sub.poll(5)] == list(range(10, 20))


def crash(server: Server, stream: meteor.Stream) -> None:
    """Crash a server that has saved only the records 0 to 9, and publish five other records."""
    server.kill()
    server.restart()
    publish(stream, range(110, 115))  # these records get the offsets 10 to 14


def test_reader_learns_which_records_a_server_has_lost_in_a_crash(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with meteor.connect(server.url) as m:
        stream = m.stream("orders", create=True)
        publish(stream, range(10))
        server.client().save()
        publish(stream, range(10, 20))
        with stream.subscriber(initial_offset="earliest") as sub:
            assert [next(iter(sub)).offset for _ in range(20)] == list(range(20))
            crash(server, stream)
            with pytest.raises(meteor.LogTruncated) as lost:
                sub.poll(5)
            assert (lost.value.first, lost.value.last) == (10, 19)
            sub.skip_gap()
            assert sub.poll(5).values() == [b"110", b"111", b"112", b"113", b"114"]


def test_shared_consumer_learns_which_records_a_server_has_lost_in_a_crash(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with meteor.connect(server.url) as m:
        stream = m.stream("orders", ordering_key="key")
        publish(stream, range(10))
        with stream.shared_subscriber("billing") as sub:
            sub.ack(sub.poll(5))
            sub.flush()
            server.client().save()
            publish(stream, range(10, 20))
            assert [record.offset for record in sub.poll(5)] == list(range(10, 20))
            sub.commit()
            crash(server, stream)
            with pytest.raises(meteor.LogTruncated) as lost:
                sub.poll(5)
            assert (lost.value.first, lost.value.last) == (10, 19)
            values = [record.value for record in sub.poll(5)]  # the error is raised only once
            assert values == [b"110", b"111", b"112", b"113", b"114"]


def test_publisher_learns_which_of_its_records_a_server_has_lost_in_a_crash(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with meteor.connect(server.url) as m:
        stream = m.stream("orders", create=True)
        with stream.publisher() as pub:
            pub.publish_many([b"0", b"1", b"2"]).result(5)
            server.client().save()
            pub.publish_many([b"3", b"4", b"5"]).result(5)
            server.kill()
            server.restart()
            error = pub.publish(b"6").exception(10)
            assert isinstance(error, meteor.LogTruncated)
            assert (error.first, error.last) == (3, 5)
            with pytest.raises(meteor.LogTruncated):
                pub.flush()  # reports the loss again, in case no acknowledgement was checked
            assert pub.publish(b"3").result(10) == 3
        assert numbers(stream) == [0, 1, 2, 3]
