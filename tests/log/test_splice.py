"""When the ring has dropped records, readers get them from the store: the two are one log.

Other files cover missing records and unavailable stores (test_splice_gaps), prefetching
(test_splice_ahead), groups, processes and failovers (test_splice_groups), and random operations
(test_splice_model).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import meteor_py as meteor
from meteor_py.records.config import COMPRESSIONS
from tests.support.group_members import Process
from tests.support.readers import check_values, drain, fill, value
from tests.support.receivers import Handler, right_values
from tests.support.stored_streams import (
    NAME,
    archive,
    archiving,
    fill_segments,
    kept,
    read_all,
    records_of,
)
from tests.support.waiting import eventually


@pytest.fixture
def client(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


@pytest.fixture
def stream(client: meteor.Client, tmp_path: Path) -> meteor.Stream:
    """A ring of ten records, with a store."""
    return kept(client, tmp_path)


# One log


def by_polling(stream: meteor.Stream) -> list[int]:
    with stream.subscriber(initial_offset="earliest") as sub:
        return drain(sub)


def by_a_group(stream: meteor.Stream) -> list[int]:
    with stream.subscriber(group="g") as sub:
        offsets: list[int] = []
        while len(offsets) < 25:
            offsets += check_values(sub.poll(timeout=5))
            sub.confirm()
        return offsets


def by_a_loop(stream: meteor.Stream) -> list[int]:
    with stream.subscriber(group="g", auto_confirm=True) as sub:
        records = list(islice(sub, 25))
    assert [record.value for record in records] == [value(n) for n in range(25)]
    return [record.offset for record in records]


def by_a_receiver(stream: meteor.Stream) -> list[int]:
    handler = Handler(right_values)
    with stream.subscriber(initial_offset="earliest") as sub:
        sub.attach_receiver(handler)
        eventually(lambda: len(handler.done) >= 25)
    return handler.done


@pytest.mark.parametrize("read", [by_polling, by_a_group, by_a_loop, by_a_receiver, read_all])
def test_all_25_records_are_read_from_a_ring_of_ten_and_a_store(
    any_url: str, tmp_path: Path, read: Callable[[meteor.Stream], list[int]]
) -> None:
    with meteor.connect(any_url) as m:
        stream = kept(m, tmp_path)
        with archiving(stream):
            with stream.publisher() as pub:
                for n in range(25):
                    pub.publish(value(n)).result()
            assert read(stream) == list(range(25))  # from ring, store or both
            assert stream.store.flush() == 25
        assert stream.describe().length == 10
        stream.seek_group("g", 0)
        assert read(stream) == list(range(25))


def test_all_records_are_read_from_a_ring_and_an_in_memory_store(any_url: str) -> None:
    with meteor.connect(any_url) as m:
        store = meteor.MemoryStore(NAME)
        stream = m.stream(NAME, capacity=10, store=store)
        fill(stream, *[5] * 5)
        stream.store.flush()
        assert stream.describe().length == 10
        assert read_all(stream) == list(range(25))
        with m.stream(NAME, store=store).subscriber(initial_offset="earliest") as sub:
            assert drain(sub, max_records=3) == list(range(25))


def test_values_from_ring_and_store_are_decoded(any_url: str, tmp_path: Path) -> None:
    with meteor.connect(any_url) as m:
        stream = kept(m, tmp_path, archive=True, codec="json")
        with stream.publisher() as pub:
            for n in range(25):
                pub.publish({"number": n})
        stream.store.flush()
        assert [r.value for r in records_of(stream)] == [{"number": n} for n in range(25)]
        with stream.subscriber(initial_offset="earliest") as sub:
            assert sub.poll().values()[:2] == [{"number": 0}, {"number": 1}]


@pytest.mark.parametrize("most", [1, 3, 7, 10, 25])
def test_batches_have_at_most_the_requested_size_across_store_and_ring(
    stream: meteor.Stream, most: int
) -> None:
    fill_segments(stream, 4, 9, 3)
    fill(stream, 6, 3)  # the store has 0 to 15, the ring 13 to 24
    with stream.subscriber(initial_offset="earliest") as sub:
        offsets: list[int] = []
        while batch := sub.poll(timeout=0, max_records=most):
            assert len(batch) <= most
            offsets += check_values(batch)
            assert sub.position == len(offsets)
    assert offsets == list(range(25))


def test_a_batch_from_the_store_can_be_sliced_and_iterated(
    stream: meteor.Stream,
) -> None:
    with stream.publisher() as pub:
        pub.publish_many([value(n) for n in range(10)], keys=[b"%d" % n for n in range(10)])
        pub.publish_many([value(n) for n in range(10, 20)])
    archive(stream)
    with stream.subscriber(initial_offset="earliest") as sub:
        batch = sub.poll(timeout=0)
    assert list(batch.offsets) == list(range(10))
    assert batch.keys() == [b"%d" % n for n in range(10)]
    assert [record.offset for record in batch] == list(range(10))
    part = batch[3:8]
    assert (part.first_offset, part.last_offset) == (3, 7)
    assert part.values() == [value(n) for n in range(3, 8)]
    assert part[1:3].keys() == [b"4", b"5"]
    assert part[-1] == batch[7] == list(batch)[7]
    assert part.to_arrow().column("offset").to_pylist() == [3, 4, 5, 6, 7]
    assert not batch[4:4]


# Records in every shape


def publish_every_shape(stream: meteor.Stream, rng: random.Random) -> None:
    """Publish small, medium and large frames, with and without each optional column."""

    def sometimes(make: Callable[[int], Any]) -> list[Any]:
        return [make(n) if rng.random() < 0.6 else None for n in range(300)]

    when = datetime(2001, 2, 3, 4, 5, 6, 789_000, tzinfo=UTC)
    full: dict[str, Any] = {
        "keys": sometimes(lambda n: b"k%d" % n),
        "headers": sometimes(lambda n: {f"h{n}": b"", "ü": b"\x00\xff"} if n % 3 else {}),
        "timestamps": sometimes(lambda n: n if n % 2 else when + timedelta(hours=n)),
    }
    values = [rng.randbytes(rng.choice([0, 1, 50])) for _ in range(300)]
    with stream.publisher(max_record_bytes=4 * 2**20) as pub:
        for row in (
            {"value": b"plain"},
            {"value": b""},
            {"value": b"v", "key": b"k", "headers": {"h": b"1"}, "timestamp": 1},
            {"value": b"v", "key": b"", "headers": {}, "timestamp": when},
            {"value": rng.randbytes(3 * 2**20), "key": b"big"},
        ):
            pub.publish(**row).result()
        for size in (3, 40, 300):
            pub.publish_many(values[:size]).result()
            for name, column in full.items():
                pub.publish_many(values[:size], **{name: column[:size]}).result()
            pub.publish_many(values[:size], **{k: v[:size] for k, v in full.items()}).result()
        pub.publish_many([b"a" * 100_000] * 8).result()
        pub.publish_many(pa.array([b"x", b"y", b""] * 200)).result()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_records_of_every_shape_are_the_same_in_store_and_ring(
    client: meteor.Client, tmp_path: Path, rng: random.Random, compression: meteor.Compression
) -> None:
    stream = kept(
        client, tmp_path, capacity=100_000, compression=compression, checksum=compression == "lz4"
    )
    publish_every_shape(stream, rng)
    before = list(stream.read())
    archive(stream)
    stream.configure(capacity=1)
    fill_segments(stream, 1)
    assert stream.describe().length == 1
    end = before[-1].last_offset + 1
    after = list(stream.read(0, end))
    assert [record for batch in after for record in batch] == [r for batch in before for r in batch]
    for read in ("values", "keys"):
        assert [x for batch in after for x in getattr(batch, read)()] == [
            x for batch in before for x in getattr(batch, read)()
        ]
    tables = [pa.concat_tables(b.to_arrow() for b in batches) for batches in (after, before)]
    assert all(table.schema.equals(meteor.ARROW_SCHEMA, check_metadata=True) for table in tables)
    assert tables[0].equals(tables[1])


# Moving


def test_seek_reaches_any_offset_in_store_and_ring(stream: meteor.Stream) -> None:
    fill_segments(stream, 4, 9, 3)
    fill(stream, 6, 3)
    with stream.subscriber() as sub:
        assert sub.position == 25
        for target in [*range(26), *range(25, -1, -1)]:
            sub.seek(target)
            assert drain(sub) == list(range(target, 25))
        sub.seek("earliest")
        assert check_values(sub.poll(timeout=0, max_records=1)) == [0]
        sub.seek("latest")
        assert drain(sub) == []
        with pytest.raises(ValueError, match="beyond the end"):
            sub.seek(26)
    assert read_all(stream, 3, 17) == list(range(3, 17))
    assert read_all(stream, "latest") == []


def spread_out(stream: meteor.Stream, *sizes: int) -> None:
    """Append frames. Leave at least two ms after each of them, except after every third."""
    for index, size in enumerate(sizes):
        fill(stream, size)
        if index % 3:
            eventually(partial(is_past, stream, stream.describe().appended + 1))


def is_past(stream: meteor.Stream, ms: int) -> bool:
    seconds, micros = stream.client._connector.call("TIME")
    return int(seconds) * 1000 + int(micros) // 1000 > ms


def check_times(stream: meteor.Stream) -> None:
    """Check that ``offset_at`` and ``seek`` agree with a scan of all records."""
    records = records_of(stream)
    end = stream.describe().next
    seen = {record.appended for record in records}
    for ms in sorted({0, 2**42, *(time + around for time in seen for around in (-1, 0, 1))}):
        first = next((r.offset for r in records if r.appended >= ms), end)
        time = datetime.fromtimestamp(ms / 1000, UTC)
        assert stream.offset_at(time) == first, f"at {ms}"
    with stream.subscriber() as sub:
        for record in records[:: max(len(records) // 5, 1)]:
            sub.seek(datetime.fromtimestamp(record.appended / 1000, UTC))
            assert sub.poll(timeout=0, max_records=1)[0].appended == record.appended


def test_times_are_found_in_the_store_in_the_ring_and_where_they_meet(
    any_url: str, tmp_path: Path
) -> None:
    with meteor.connect(any_url) as m:
        stream = kept(m, tmp_path)
        check_times(stream)
        spread_out(stream, 1, 4, 2, 3, 5)
        check_times(stream)
        archive(stream)
        check_times(stream)
        with archiving(stream):
            spread_out(stream, 2, 3, 3, 1, 6, 2, 2)
        spread_out(stream, 4, 4)
        check_times(stream)
        archive(stream)
        check_times(stream)
        stream.store.compact()
        check_times(stream)
        for _ in range(2):
            spread_out(stream, 3, 3, 4)
            archive(stream)
        assert stream.store.expire(offset=45) == 42
        assert records_of(stream)[0].offset == 42
        check_times(stream)


def test_times_are_found_in_an_in_memory_store(url: str) -> None:
    with meteor.connect(url) as m:
        stream = m.stream(NAME, capacity=4, store=meteor.MemoryStore(NAME), archive=False)
        spread_out(stream, 1, 4, 2, 3, 4)
        archive(stream)
        spread_out(stream, 2, 2, 4)
        check_times(stream)


def test_the_row_group_that_contains_a_time_is_found(
    stream: meteor.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meteor_py.store.segment_file.GROUP_RECORDS", 4)
    spread_out(stream, *[3] * 20)
    archive(stream)
    check_times(stream)


def test_describe_returns_the_first_readable_offset_and_the_archived_bounds(
    stream: meteor.Stream,
) -> None:
    def seen() -> tuple[int, int, int, int | None]:
        found = stream.describe()
        assert stream.bounds() == (found.first, found.next)
        return found.first, found.next, found.length, found.archived

    assert seen() == (0, 0, 0, 0)
    fill(stream, 6, 6, 6)
    assert seen() == (0, 18, 18, 0)  # nothing is dropped before it is archived
    archive(stream)
    assert seen() == (0, 18, 12, 18)  # archived frames are dropped whole
    fill_segments(stream, 6, 6)
    fill(stream, 6)
    assert seen() == (0, 36, 12, 30)
    assert stream.store.bounds() == (0, 30)
    assert stream.store.expire(offset=20) == 18
    assert seen() == (18, 36, 12, 30)
    assert stream.store.expire(offset=30) == 30
    assert seen() == (24, 36, 12, 30)  # the ring still holds some expired records
    assert read_all(stream) == list(range(24, 36))


# Clients that do not pass the store

READER = """
import sys
import meteor_py as meteor
from tests.support.stored_streams import read_all
with meteor.connect(sys.argv[1]) as m:
    print(read_all(m.stream("kept", create=False)) == list(range(25)))
"""


def test_another_process_finds_the_store_by_its_address(url: str, stream: meteor.Stream) -> None:
    fill_segments(stream, 10, 10, 5)
    with meteor.connect(url) as other:
        assert read_all(other.stream(NAME, create=True)) == list(range(25))
    process = Process("-W", "ignore", "-c", READER, url)
    try:
        assert process.read() == "True"
    finally:
        process.close()


def test_only_readers_of_archived_records_notice_that_the_store_is_gone(
    url: str, stream: meteor.Stream, tmp_path: Path
) -> None:
    fill_segments(stream, 10, 10, 5)
    (tmp_path / NAME).rename(tmp_path / "elsewhere")
    with meteor.connect(url) as other:
        found = other.stream(NAME, create=True)
        with found.subscriber() as sub:
            fill(found, 3)
            assert check_values(sub.poll()) == [25, 26, 27]
            sub.seek(18)
            assert drain(sub) == list(range(18, 28))
            sub.seek(17)
            for _ in range(2):
                with pytest.raises(meteor.StoreMismatch, match="There is no store"):
                    sub.poll()
            assert sub.position == 17
            with pytest.raises(meteor.StoreMismatch):
                found.store.files()
            (tmp_path / "elsewhere").rename(tmp_path / NAME)
            assert drain(sub) == list(range(17, 28))


def test_in_memory_store_in_another_process_cannot_be_found(url: str) -> None:
    with meteor.connect(url) as m, meteor.connect(url) as other:
        store = meteor.MemoryStore(NAME)
        stream = m.stream(NAME, capacity=10, store=store, archive=False)
        found = other.stream(NAME, create=True)
        fill(stream, 10)
        assert found.offset_at(datetime.fromtimestamp(0, UTC)) == 0
        assert read_all(found) == list(range(10))
        fill(stream, 10)
        archive(stream)
        with found.subscriber(initial_offset="earliest") as sub:
            with pytest.raises(meteor.StoreMismatch, match="whose address is not recorded"):
                sub.poll()
            sub.seek(10)
            assert drain(sub) == list(range(10, 20))
        with pytest.raises(meteor.StoreMismatch, match="There is no store for stream"):
            other.stream(NAME, store=meteor.MemoryStore(NAME))
        assert read_all(other.stream(NAME, store=store, archive=False)) == list(range(20))
