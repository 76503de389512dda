"""Where a stream can be cut, and positions that were kept outside it."""

from __future__ import annotations

from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_py.log.split_points import split_points
from tests.support.proxied_stream import Pair


@pytest.fixture
def stream(any_url: str) -> meteor.Stream:
    """Frames of 3, 1 and 4 records; a ring that has dropped the first."""
    stream = meteor.connect(any_url).stream("orders", capacity=5)
    with stream.publisher() as pub:
        for size in (3, 1, 4):
            pub.publish_many([b"x"] * size).result()
    return stream


def test_the_split_point_of_a_record_is_the_end_of_its_frame(stream: meteor.Stream) -> None:
    assert split_points(stream._handle, [3, 4, 5, 7]) == [4, 8, 8, 8]
    assert split_points(stream._handle, []) == []


def test_what_is_not_in_the_ring_is_its_own_split_point(stream: meteor.Stream) -> None:
    assert split_points(stream._handle, [0, 2, 8, 99]) == [0, 2, 8, 99]


def test_in_the_store_row_groups_have_the_split_points(url: str, tmp_path: Path) -> None:
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
        assert split_points(stream._handle, [0]) == [0], "the reader of these records is told"


def test_a_position_that_was_kept_is_where_reading_goes_on(url: str) -> None:
    with meteor.connect(url) as m:
        stream = m.stream("orders")
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


def test_a_position_in_a_stream_that_was_created_anew_is_refused(url: str) -> None:
    with meteor.connect(url) as m:
        kept = m.stream("orders").end()
        m.stream("orders").delete()
        with m.stream("orders").subscriber() as sub, pytest.raises(meteor.LogTruncated):
            sub.seek(kept)


def test_a_position_that_the_server_has_lost_is_refused_with_the_range(pair: Pair) -> None:
    bench = pair.bench
    with bench.stream.publisher() as pub:
        pub.publish_many([b"x"] * 3).result()
        pair.lag()
        pub.publish_many([b"x"] * 2).result()
    kept = bench.stream.end()
    pair.fail_over()
    with bench.stream.publisher() as pub:
        pub.publish_many([b"y"] * 9).result()
    with bench.stream.subscriber() as sub, pytest.raises(meteor.LogTruncated) as error:
        sub.seek(kept)
    assert (error.value.first, error.value.last) == (3, 4)


def test_one_group_can_be_looked_at(url: str) -> None:
    with meteor.connect(url) as m:
        stream = m.stream("orders")
        stream.seek_group("billing", 0)
        assert stream.group("billing") == stream.groups()[0]
        with pytest.raises(meteor.GroupNotFound):
            stream.group("nobody")
