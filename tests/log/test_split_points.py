"""Streams can be split at frame ends, and stored positions are validated."""

from __future__ import annotations

from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_py.log.split_points import split_points
from tests.support.proxied_stream import ReplicatedStream


@pytest.fixture
def stream(any_url: str) -> meteor.Stream:
    """A stream with frames of 3, 1 and 4 records. The ring has dropped the first frame."""
    stream = meteor.connect(any_url).stream("orders", capacity=5)
    with stream.publisher() as pub:
        for size in (3, 1, 4):
            pub.publish_many([b"x"] * size).result()
    return stream


def test_a_records_split_point_is_the_end_of_its_frame(stream: meteor.Stream) -> None:
    assert split_points(stream._handle, [3, 4, 5, 7]) == [4, 8, 8, 8]
    assert split_points(stream._handle, []) == []


def test_without_a_store_an_offset_outside_the_ring_is_its_own_split_point(
    stream: meteor.Stream,
) -> None:
    assert split_points(stream._handle, [0, 2, 8, 99]) == [0, 2, 8, 99]


def test_split_points_in_the_store_are_the_ends_of_segments(url: str, tmp_path: Path) -> None:
    with meteor.connect(url) as m:
        stream = m.stream("old", capacity=100, store=str(tmp_path))
        with stream.publisher() as pub:
            for _ in range(3):
                pub.publish_many([b"x" * 10] * 1_000).result()
                stream.store.flush()
        ends = [segment.last + 1 for segment in stream.store.segments()]
        assert split_points(stream._handle, [0, 999, 1_000, 1_700]) == [
            min(end for end in ends if end > offset) for offset in (0, 999, 1_000, 1_700)
        ]
        for path in tmp_path.rglob("*.parquet"):
            path.unlink()
        assert split_points(stream._handle, [0]) == [0]  # only reading a missing file raises


def test_reading_continues_at_a_stored_position(url: str) -> None:
    with meteor.connect(url) as m:
        stream = m.stream("orders", create=True)
        with stream.publisher() as pub:
            pub.publish_many([b"%d" % n for n in range(5)]).result()
        with stream.subscriber(initial_offset="earliest") as sub:
            sub.poll(max_records=2)
            kept = sub.checkpoint
        assert kept.offset == 2
        assert stream.end()._replace(offset=2) == kept
        with stream.subscriber() as sub:
            sub.seek(kept)
            assert sub.poll().values() == [b"2", b"3", b"4"]


def test_a_position_from_an_older_incarnation_is_refused(url: str) -> None:
    with meteor.connect(url) as m:
        kept = m.stream("orders", create=True).end()
        m.stream("orders", create=True).delete()
        with (
            m.stream("orders", create=True).subscriber() as sub,
            pytest.raises(meteor.LogTruncated),
        ):
            sub.seek(kept)


def test_a_position_beyond_lost_records_is_refused_with_their_range(
    replicated: ReplicatedStream,
) -> None:
    proxied = replicated.proxied
    with proxied.stream.publisher() as pub:
        pub.publish_many([b"x"] * 3).result()
        replicated.lag()
        pub.publish_many([b"x"] * 2).result()
    kept = proxied.stream.end()
    replicated.fail_over()
    with proxied.stream.publisher() as pub:
        pub.publish_many([b"y"] * 9).result()
    with proxied.stream.subscriber() as sub, pytest.raises(meteor.LogTruncated) as error:
        sub.seek(kept)
    assert (error.value.first, error.value.last) == (3, 4)


def test_one_group_can_be_described(url: str) -> None:
    with meteor.connect(url) as m:
        stream = m.stream("orders", create=True)
        stream.seek_group("billing", 0)
        assert stream.group("billing") == stream.groups()[0]
        with pytest.raises(meteor.GroupNotFound):
            stream.group("nobody")
