"""One log: with a store, a stream keeps every record, and readers need not know where records are.

The archiver writes records to Parquet files before the ring drops them. Readers and groups see
one log from offset 0 to the newest record: they read the old part from the files, and the rest from
the ring. If the archiver falls behind, publishers wait and then fail; the ring drops no record that
is not in the store.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.dataset
import pytest

import meteor_py as meteor
from tests.fundamentals.reading import numbers, publish


@pytest.fixture
def stream(m: meteor.Client, tmp_path: Path) -> meteor.Stream:
    """A stream of 100 records: the ring holds about the last 10, the store all but the last 5."""
    stream = m.stream("trades", capacity=10, store=tmp_path / "store", archive=False)
    with stream.archiver(segment_records=30, segment_age=0.0).start():
        publish(stream, range(95))
        stream.store.flush()
    publish(stream, range(95, 100))
    assert stream.store.bounds() == (0, 95)
    return stream


def test_all_records_are_read_even_if_the_ring_is_small(stream: meteor.Stream) -> None:
    assert stream.describe().length <= 15
    assert numbers(stream) == list(range(100))


def test_subscriber_reads_from_the_store_into_the_ring_and_on_to_new_records(
    stream: meteor.Stream,
) -> None:
    with stream.subscriber(initial_offset="earliest") as sub:
        records = iter(sub)
        assert [next(records).offset for _ in range(100)] == list(range(100))
        publish(stream, [100])
        assert next(records).value == b"100"
        sub.seek(42)
        assert next(iter(sub)).value == b"42"


def test_group_that_stopped_long_ago_continues_in_the_store(stream: meteor.Stream) -> None:
    stream.seek_group("reports", 7)
    with stream.subscriber(group="reports") as sub:
        assert next(iter(sub)).value == b"7"
        assert sub.confirm().result(5) == 8


def test_ring_drops_nothing_that_is_not_in_the_store(m: meteor.Client, tmp_path: Path) -> None:
    stream = m.stream(
        "full", capacity=10, max_unarchived=20, store=tmp_path / "full", archive=False
    )
    with stream.publisher(delivery_timeout=0.3) as pub:
        pub.publish_many([b"%d" % n for n in range(20)]).result(5)
        with pytest.raises(meteor.StreamFull):
            pub.publish(b"20").result(5)
        with stream.archiver(segment_age=0.0).start():
            stream.store.flush()
        assert pub.publish(b"20").result(5) == 20
    assert numbers(stream) == list(range(21))


def test_store_files_are_plain_parquet(stream: meteor.Stream) -> None:
    table = pyarrow.dataset.dataset(stream.store.files()).to_table()
    assert sorted(int(value) for value in table["value"].to_pylist()) == list(range(95))
    assert sorted(table["offset"].to_pylist()) == list(range(95))
