"""A subscriber without a group reads a stream from any position, in order.

The first tests follow Meteor's own; the others cover polling, iterating, seeking and waiting in
detail. ``test_interference.py`` covers outages, deletions and forks, and ``test_gaps.py`` covers
missing and unreadable records.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest
import redis

import meteor_py as meteor
from meteor_py import InitialOffset
from meteor_py.records.config import Start
from tests.support.readers import (
    background,
    blocked,
    check_values,
    drain,
    fill,
    later_than_all,
    value,
)
from tests.support.servers import plain_client
from tests.support.waiting import eventually


@pytest.fixture
def client(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


@pytest.fixture
def stream(client: meteor.Client) -> meteor.Stream:
    return client.stream("s", create=True)


@pytest.fixture
def plain(url: str) -> Iterator[redis.Redis]:
    with plain_client(url) as p:
        yield p


# As in Meteor's tests


def test_polling_an_empty_stream_returns_an_empty_batch(stream: meteor.Stream) -> None:
    with stream.subscriber() as sub:
        batch = sub.poll(timeout=0.01)
        assert not batch
        assert list(batch) == []
        assert sub.position == 0


@pytest.mark.parametrize("n", [1, 2])
def test_published_records_are_read(stream: meteor.Stream, n: int) -> None:
    with stream.subscriber() as sub:
        fill(stream, n)
        assert check_values(sub.poll()) == list(range(n))
        assert not sub.poll(timeout=0)


def test_records_are_read_again_after_a_seek(stream: meteor.Stream) -> None:
    fill(stream, 1, 1)
    with stream.subscriber(initial_offset="earliest") as sub:
        assert drain(sub) == [0, 1]
        sub.seek(1)
        assert drain(sub) == [1]


def test_negative_seek_is_refused_and_moves_nothing(stream: meteor.Stream) -> None:
    fill(stream, 2)
    with stream.subscriber(initial_offset="earliest") as sub:
        with pytest.raises(ValueError, match="must be from 0"):
            sub.seek(-5)
        assert drain(sub) == [0, 1]


def test_seek_beyond_the_end_is_refused_and_moves_nothing(stream: meteor.Stream) -> None:
    end = fill(stream, 5)
    with stream.subscriber(initial_offset="earliest") as sub:
        with pytest.raises(ValueError, match="beyond the end of stream 's', which ends at 5"):
            sub.seek(end + 1)
        assert drain(sub) == [0, 1, 2, 3, 4]
        sub.seek(end)  # the end itself is a valid position
        assert drain(sub) == []


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (InitialOffset.EARLIEST, [0, 1]),
        (InitialOffset.LATEST, []),
        (InitialOffset.AUTO, []),
        ("earliest", [0, 1]),
        ("latest", []),
    ],
)
def test_initial_offset_decides_where_reading_starts(
    stream: meteor.Stream, where: Start, expected: list[int]
) -> None:
    fill(stream, 2)
    with stream.subscriber(initial_offset=where) as sub:
        assert drain(sub) == expected


@pytest.mark.parametrize("group", [None, "g"])
def test_initial_offset_can_be_an_offset_or_a_time(
    stream: meteor.Stream, group: str | None
) -> None:
    fill(stream, 2)
    since = datetime.fromtimestamp(eventually(lambda: later_than_all(stream)) / 1000, UTC)
    fill(stream, 3)
    with stream.subscriber(group=group, initial_offset=since) as sub:
        assert check_values(sub.poll(5)) == [2, 3, 4]
    other = None if group is None else "another"
    with stream.subscriber(group=other, initial_offset=4) as sub:
        assert check_values(sub.poll(5)) == [4]
    beyond = None if group is None else "beyond"
    with pytest.raises(
        ValueError, match="Offset 6 is beyond the end of stream 's', which ends at 5"
    ):
        stream.subscriber(group=beyond, initial_offset=6)
    assert "beyond" not in [found.name for found in stream.groups()]
    if group is not None:  # the group already has a start
        with stream.subscriber(group=group, initial_offset=4) as sub:
            assert check_values(sub.poll(5)) == [2, 3, 4]


def test_initial_offset_none_is_refused_without_a_group(stream: meteor.Stream) -> None:
    with pytest.raises(meteor.InvalidInitialOffset, match="EARLIEST"):
        stream.subscriber(initial_offset=InitialOffset.NONE)


def test_ring_of_ten_keeps_the_last_ten_records(client: meteor.Client) -> None:
    stream = client.stream("ring", capacity=10)
    with stream.publisher() as pub:
        acks = [pub.publish(value(i)) for i in range(5)]
        assert [ack.result() for ack in acks] == [0, 1, 2, 3, 4]
        for i in range(5, 25):
            pub.publish(value(i)).result()
    with stream.subscriber(initial_offset="earliest") as sub:
        assert drain(sub) == list(range(15, 25))


def test_subscribers_from_several_clients_each_get_every_record(
    client: meteor.Client, url: str
) -> None:
    stream = client.stream("all", capacity=5)
    with meteor.connect(url) as other:
        handles = [stream, stream, other.stream("all", create=True)]
        subs = [handle.subscriber() for handle in handles]
        fill(stream, 1, 2, 2)
        for sub in subs:
            with sub:
                assert drain(sub) == [0, 1, 2, 3, 4]


# Polling


def test_polls_of_any_size_return_each_record_once(
    client: meteor.Client, rng: random.Random
) -> None:
    stream = client.stream("mixed", capacity=100_000)
    end = fill(stream, *(rng.choice([1, 1, 2, 31, 32, 33, 500]) for _ in range(60)))
    for _ in range(10):
        start = rng.randrange(end)
        got: list[int] = []
        with stream.subscriber() as sub:
            sub.seek(start)
            while sub.position < end:
                most = rng.choice([1, 2, 7, 100, 10_000])
                batch = sub.poll(timeout=0, max_records=most)
                assert 0 < len(batch) <= most
                got += check_values(batch)
                assert sub.position == got[-1] + 1
            assert not sub.poll(timeout=0)
        assert got == list(range(start, end))


def test_one_poll_merges_small_frames(stream: meteor.Stream) -> None:
    fill(stream, *[1] * 12)
    with stream.subscriber(initial_offset="earliest") as sub:
        assert check_values(sub.poll(timeout=0)) == list(range(12))


def test_timeout_zero_does_not_wait(stream: meteor.Stream) -> None:
    with stream.subscriber() as sub:
        start = time.monotonic()
        assert not sub.poll(timeout=0)
        assert time.monotonic() - start < 0.5


def test_poll_waits_for_its_timeout(stream: meteor.Stream) -> None:
    with stream.subscriber() as sub:
        start = time.monotonic()
        assert not sub.poll(timeout=0.3)
        assert 0.3 <= time.monotonic() - start < 2


def test_poll_can_wait_longer_than_the_connection_timeout(url: str) -> None:
    with meteor.connect(url, timeout=0.2) as m, m.stream("s", create=True).subscriber() as sub:
        assert not sub.poll(timeout=0.6)


def test_poll_can_wait_longer_than_one_blocking_read(stream: meteor.Stream) -> None:
    """A blocking read lasts only two seconds, so that a dead connection is noticed soon."""
    with stream.subscriber() as sub:
        start = time.monotonic()
        assert not sub.poll(timeout=2.3)
        assert time.monotonic() - start >= 2.3
        fill(stream, 1)
        assert drain(sub) == [0]


def test_waiting_poll_is_woken_at_once_by_a_publish(
    stream: meteor.Stream, plain: redis.Redis
) -> None:
    published: list[float] = []

    def publish(_: threading.Event) -> None:
        blocked(plain)
        with stream.publisher() as pub:
            pub.publish(value(0)).result()
            published.append(time.monotonic())

    with stream.subscriber() as sub, background(publish):
        assert check_values(sub.poll(timeout=20)) == [0]
        woken = time.monotonic()
    assert woken - published[0] < 0.5


def test_latest_starts_after_the_last_record_and_misses_none(
    stream: meteor.Stream,
) -> None:
    with stream.publisher() as pub:
        for i in range(20):
            pub.publish(value(2 * i)).result()
            with stream.subscriber() as sub:
                assert sub.position == 2 * i + 1
                assert pub.publish(value(2 * i + 1)).result() == 2 * i + 1
                assert drain(sub) == [2 * i + 1]


def test_earliest_on_a_fast_ring_never_raises(client: meteor.Client) -> None:
    stream = client.stream("fast", capacity=20)

    def publish(stop: threading.Event) -> None:
        with stream.publisher() as pub:
            while not stop.is_set():
                pub.publish_many([b"x"] * 20).result()

    with background(publish):
        eventually(lambda: stream.describe().first > 0)
        for _ in range(100):
            with stream.subscriber(initial_offset="earliest") as sub:
                assert sub.poll(timeout=5)
                assert sub.skipped == 0


def test_earliest_means_the_first_record_at_the_time_of_reading(client: meteor.Client) -> None:
    stream = client.stream("ring", capacity=10)
    fill(stream, 10)
    with stream.subscriber(initial_offset="earliest") as sub:
        assert sub.position == 0
        fill(stream, 10, 10)  # the ring now holds only the last ten records
        assert drain(sub) == list(range(20, 30))
        sub.seek("earliest")
        fill(stream, 10, 10)
        assert drain(sub) == list(range(40, 50))


# Iterating


def test_iteration_yields_records_and_moves_the_position(stream: meteor.Stream) -> None:
    fill(stream, 3, 40, 1)
    with stream.subscriber(initial_offset="earliest") as sub:
        for i, record in zip(range(44), sub, strict=False):
            assert (record.offset, record.value) == (i, value(i))
            assert sub.position == i + 1


def test_breaking_out_of_a_loop_loses_nothing(stream: meteor.Stream) -> None:
    fill(stream, 10, 50)
    with stream.subscriber(initial_offset="earliest") as sub:
        for record in sub:
            if record.offset == 4:
                break
        assert sub.position == 5
        assert [r.offset for r in islice(sub, 10)] == list(range(5, 15))
        assert drain(sub) == list(range(15, 60))


@pytest.mark.parametrize("to", [0, 3, 4, 5, 20, 59, "earliest"])
def test_seek_inside_a_loop_continues_from_there(stream: meteor.Stream, to: int | str) -> None:
    fill(stream, 10, 50)
    with stream.subscriber(initial_offset="earliest") as sub:
        seen = []
        for record in sub:
            seen.append(record.offset)
            if len(seen) == 5:
                sub.seek(to)
            if len(seen) > 5 and record.offset == 59:
                break
        start = to if isinstance(to, int) else 0
        assert seen == [0, 1, 2, 3, 4, *range(start, 60)]
        assert drain(sub) == []


def test_loop_does_not_repeat_records_that_a_poll_inside_it_returned(stream: meteor.Stream) -> None:
    fill(stream, 10, 50)
    with stream.subscriber(initial_offset="earliest") as sub:
        looped, polled = [], []
        for record in sub:
            looped.append(record.offset)
            if record.offset == 4:
                polled = check_values(sub.poll(max_records=3))
            if record.offset == 59:
                break
        assert polled == [5, 6, 7]
        assert looped == [*range(5), *range(8, 60)]


def test_closing_the_subscriber_inside_a_loop_ends_the_loop(stream: meteor.Stream) -> None:
    fill(stream, 10)
    seen = []
    with stream.subscriber(initial_offset="earliest") as sub:
        for record in sub:
            seen.append(record.offset)
            if record.offset == 4:
                sub.close()
    assert seen == [0, 1, 2, 3, 4]


def test_changing_the_values_of_a_batch_does_not_affect_reading(
    stream: meteor.Stream,
) -> None:
    fill(stream, 3)
    with stream.subscriber(initial_offset="earliest") as sub:
        collected = sub.poll(timeout=0).values()
        collected += [b"mine", b"mine too"]
        assert sub.position == 3
        fill(stream, 1)
        assert drain(sub) == [3]


# Seeking


def test_seek_by_offset_time_and_keyword_agree(client: meteor.Client, rng: random.Random) -> None:
    stream = client.stream("times", capacity=50)
    end = fill(stream, *[7] * 12)
    first = stream.describe().first
    with stream.subscriber() as sub:
        for offset in [first, end, *(rng.randrange(first, end) for _ in range(10))]:
            sub.seek(offset)
            assert sub.position == offset
            assert drain(sub) == list(range(offset, end))
        sub.seek("earliest")
        records = list(sub.poll(timeout=0))
        assert [r.offset for r in records] == list(range(first, end))
        sub.seek("latest")
        assert sub.position == end
        for record in records[::7]:
            sub.seek(datetime.fromtimestamp(record.appended / 1000, UTC))
            batch = sub.poll(timeout=0)
            assert batch[0].offset <= record.offset
            assert batch[0].appended == record.appended
        sub.seek(datetime.now(UTC) - timedelta(days=1))
        assert sub.position == first
        sub.seek(datetime.now(UTC) + timedelta(days=1))
        assert sub.position == end


def test_lag_is_the_number_of_unread_records(stream: meteor.Stream) -> None:
    fill(stream, 10)
    with stream.subscriber(initial_offset="earliest") as sub:
        assert sub.lag == 10
        sub.poll(max_records=4)
        assert sub.lag == 6
        fill(stream, 5)
        drain(sub)
        assert (sub.position, sub.lag) == (15, 0)
        sub.seek(3)
        assert sub.lag == 12
