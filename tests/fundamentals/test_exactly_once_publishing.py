"""Exactly-once publishing: a record that was acknowledged is in the stream once.

If the connection breaks before the reply arrives, the publisher sends the batch again. The server
recognises the batch by its number, so it appends nothing twice. If the publisher cannot determine
the outcome before ``delivery_timeout``, it reports that: ``OutcomeUnknown`` means "the record may
be in the stream". Any other error means "it is not".
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Literal

import pytest

import meteor_py as meteor
from tests.fundamentals.reading import numbers, values
from tests.support.proxy import Proxy
from tests.support.servers import HOST, Server

PUBLISH = b"EVAL"  # part of every publish request


@pytest.fixture
def network(server: Server, url: str) -> Iterator[Proxy]:
    """The network between the publisher and the server. Tests can make it fail."""
    with Proxy(HOST, server.port) as network:
        yield network


@pytest.fixture
def far(network: Proxy, stream: meteor.Stream) -> Iterator[meteor.Stream]:
    """The same stream, reached through ``network``."""
    with meteor.connect(network.url) as client:
        yield client.stream("orders", create=True)


@pytest.fixture
def stream(m: meteor.Client) -> meteor.Stream:
    return m.stream("orders", create=True)


def test_lost_reply_does_not_duplicate_a_record(
    far: meteor.Stream, network: Proxy, stream: meteor.Stream
) -> None:
    with far.publisher() as pub:
        pub.publish(b"first").result(10)
        network.cut_after_request(match=PUBLISH)  # the record is appended, but the reply is lost
        assert pub.publish(b"second").result(10) == 1
        assert pub.publish(b"third").result(10) == 2
    assert network.counters.cuts == 1
    assert values(stream) == [b"first", b"second", b"third"]


def test_lost_request_does_not_lose_a_record(
    far: meteor.Stream, network: Proxy, stream: meteor.Stream
) -> None:
    with far.publisher() as pub:
        pub.publish(b"first").result(10)
        network.cut_before_request(match=PUBLISH)  # the server never gets the request
        assert pub.publish(b"second").result(10) == 1
    assert network.counters.cuts == 1
    assert values(stream) == [b"first", b"second"]


def test_repeated_network_failures_cause_no_loss_duplicates_or_reordering(
    far: meteor.Stream, network: Proxy, stream: meteor.Stream, rng: Random
) -> None:
    with far.publisher() as pub:
        network.chaos(rng, 0.2, ("lost_reply", "torn_reply", "lost_request"))
        for number in range(0, 1000, 10):
            pub.publish_many([b"%d" % n for n in range(number, number + 10)])
            if number % 50 == 0:
                pub.flush(30)
        pub.flush(30)
        network.heal()
    assert network.counters.cuts > 0
    assert numbers(stream) == list(range(1000))


@pytest.mark.parametrize(("lost", "is_there"), [("requests", False), ("replies", True)])
def test_publisher_that_gets_no_reply_reports_that_the_outcome_is_unknown(
    far: meteor.Stream,
    network: Proxy,
    stream: meteor.Stream,
    lost: Literal["requests", "replies"],
    is_there: bool,
) -> None:
    with far.publisher(delivery_timeout=0.4) as pub:
        pub.publish(b"first").result(10)
        network.stall(lost)
        with pytest.raises(meteor.OutcomeUnknown):
            pub.publish(b"second").result(10)
        assert (b"second" in values(stream)) == is_there  # the publisher cannot know this
        network.heal()


def test_record_that_was_never_sent_is_reported_as_not_published(
    far: meteor.Stream, network: Proxy, stream: meteor.Stream
) -> None:
    network.refuse()
    with far.publisher(delivery_timeout=0.4) as pub:
        with pytest.raises(meteor.ConnectionFailed):
            pub.publish(b"first").result(10)
        network.accept()
        assert pub.publish(b"second").result(10) == 0
    assert values(stream) == [b"second"]
