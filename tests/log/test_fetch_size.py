"""One fetch returns a bounded number of bytes, whatever the size of earlier frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.log.ring_reader import FETCH_BYTES_MAX, FETCH_FRAMES_MAX, LARGE_FRAME
from meteor_py.redis import keys

SMALL = 300
BIG = bytes(8 * 1024 * 1024)
BIG_FRAMES = 20  # 160 MiB in total


@pytest.fixture
def stream(url: str) -> Iterator[meteor.Stream]:
    with meteor.connect(url) as m:
        stream = m.stream("s", capacity=100_000)
        yield stream
        stream.delete()  # large values left on the server would slow down the next test


def publish_small(stream: meteor.Stream, frames: int = SMALL) -> None:
    with stream.publisher() as pub:
        for _ in range(frames):
            pub.publish(b"small").result(10)


def publish_big(stream: meteor.Stream) -> None:
    with stream.publisher(max_record_bytes=len(BIG)) as pub:
        for _ in range(BIG_FRAMES):
            pub.publish(BIG).result(10)


def fetch_sizes(sub: meteor.Subscriber, end: int) -> list[int]:
    """Read up to ``end``; return the size of each fetch in bytes."""
    sizes: list[int] = []
    while sub.position < end:
        batch = sub.poll(10, max_records=10_000)
        assert batch
        sizes.append(sum(map(len, batch.values())))
    return sizes


def fetches(stream: meteor.Stream) -> int:
    stats: Any = stream.client.redis.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("xread", "xrange"))


def test_fetch_is_bounded_when_frames_grow_after_the_last_fetch(stream: meteor.Stream) -> None:
    publish_small(stream)
    with stream.subscriber(initial_offset="earliest") as sub:
        fetch_sizes(sub, SMALL)
        publish_big(stream)
        assert max(fetch_sizes(sub, SMALL + BIG_FRAMES)) <= FETCH_BYTES_MAX


def test_fetch_is_bounded_when_frames_grow_within_the_backlog(stream: meteor.Stream) -> None:
    publish_small(stream)
    publish_big(stream)
    with stream.subscriber(initial_offset="earliest") as sub:
        assert max(fetch_sizes(sub, SMALL + BIG_FRAMES)) <= FETCH_BYTES_MAX


def test_fetch_is_bounded_if_an_older_release_has_written_the_frames(stream: meteor.Stream) -> None:
    publish_small(stream)
    publish_big(stream)
    stream.client.redis.hdel(keys.meta("s"), "large")
    with stream.subscriber(initial_offset="earliest") as sub:
        assert max(fetch_sizes(sub, SMALL + BIG_FRAMES)) <= FETCH_BYTES_MAX
    publish_small(stream, 1)  # this publish records that earlier frames may be large
    with stream.subscriber(initial_offset="earliest") as sub:
        assert max(fetch_sizes(sub, SMALL + BIG_FRAMES + 1)) <= FETCH_BYTES_MAX


def test_small_frames_are_fetched_together_after_large_frames(stream: meteor.Stream) -> None:
    with stream.publisher(max_record_bytes=len(BIG)) as pub:
        pub.publish(BIG).result(10)
    publish_small(stream, 8 * FETCH_FRAMES_MAX)
    with stream.subscriber() as sub:
        sub.seek(1)
        before = fetches(stream)
        fetch_sizes(sub, 1 + 8 * FETCH_FRAMES_MAX)
        assert fetches(stream) - before < 20


@pytest.mark.parametrize("older", [False, True])
def test_poll_returns_all_small_frames_that_exist(stream: meteor.Stream, older: bool) -> None:
    with stream.subscriber() as sub:
        publish_small(stream, 10)
        if older:
            stream.client.redis.hdel(keys.meta("s"), "large")
        assert len(sub.poll(0)) == 10


def test_frames_that_are_not_large_fit_into_one_fetch() -> None:
    assert LARGE_FRAME * FETCH_FRAMES_MAX <= FETCH_BYTES_MAX


def test_reader_that_the_ring_has_overtaken_finds_the_first_record(url: str) -> None:
    with meteor.connect(url) as m:
        stream = m.stream("s", capacity=10)
        publish_small(stream, 40)
        with stream.subscriber(on_gap="skip") as sub:
            sub.seek(35)
            publish_small(stream, 20)
            assert sub.poll(0).first_offset == 50
            assert sub.skipped == 15
