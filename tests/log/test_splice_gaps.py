"""Missing, damaged and unavailable records in a store are distinguished and reported by offset.

Expired or removed records are a gap, as in the ring. Damaged records are reported and can be
skipped. Readers wait for an unavailable store, and never mistake it for an empty one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import meteor_py as meteor
from meteor_py.records.config import OnGap
from meteor_py.store.storage import LocalStorage
from tests.support.readers import background, check_values, drain, fill
from tests.support.stored_streams import (
    NAME,
    archive,
    fill_segments,
    kept,
    read_all,
    read_straight,
    segments,
)
from tests.support.waiting import eventually


@pytest.fixture
def client(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


@pytest.fixture
def stream(client: meteor.Client, tmp_path: Path) -> meteor.Stream:
    """The store holds offsets 0 to 49 in segments of ten; the ring holds 40 to 49."""
    stream = kept(client, tmp_path)
    fill_segments(stream, *[10] * 5)
    return stream


@pytest.fixture
def segment(tmp_path: Path, stream: meteor.Stream) -> Path:
    """The segment with records 10 to 19."""
    return segments(tmp_path)[1]


def reported_range(error: type[Exception], call: Callable[[], object]) -> tuple[int, int]:
    """Return the first and last offset that an error reports."""
    with pytest.raises(error) as caught:
        call()
    found: Any = caught.value
    assert f"{found.first} to {found.last}" in str(found)
    return found.first, found.last


def range_lost(sub: meteor.Subscriber) -> tuple[int, int]:
    return reported_range(meteor.RecordsLost, lambda: sub.poll(timeout=0))


# Gaps


def test_reader_overtaken_by_an_expiry_learns_exactly_which_records_it_missed(
    stream: meteor.Stream,
) -> None:
    with stream.subscriber(initial_offset="earliest") as sub:
        assert drain_some(sub, 3) == [0, 1, 2]
        sub.seek(3)  # discards fetched records
        assert stream.store.expire(offset=25) == 20
        for _ in range(3):
            assert range_lost(sub) == (3, 19)
            assert sub.position == 3
        sub.skip_gap()
        assert (sub.position, sub.skipped) == (20, 17)
        assert drain(sub) == list(range(20, 50))
    assert read_all(stream) == list(range(20, 50))
    assert reported_range(meteor.RecordsLost, lambda: read_all(stream, 0)) == (0, 19)


def drain_some(sub: meteor.Subscriber, number: int) -> list[int]:
    return check_values(sub.poll(timeout=0, max_records=number))


def test_gap_left_by_an_expiry_ends_where_the_ring_begins(stream: meteor.Stream) -> None:
    assert stream.store.expire(offset=50) == 50
    with stream.subscriber() as sub:
        sub.seek(7)
        assert range_lost(sub) == (7, 39)
        sub.skip_gap()
        assert drain(sub) == list(range(40, 50))
        sub.seek("earliest")
        assert drain(sub) == list(range(40, 50))


@pytest.mark.parametrize("way", ["expired", "removed"])
def test_records_in_the_ring_beyond_its_capacity_are_not_a_gap(
    stream: meteor.Stream, tmp_path: Path, way: str
) -> None:
    stream.configure(capacity=4)  # the frame of 40 to 49 stays whole
    with stream.subscriber() as sub:
        for start, gap in ((37, (37, 39)), (42, None)):
            sub.seek(start)
            if way == "expired":
                stream.store.expire(offset=50)
            else:
                for path in segments(tmp_path):
                    path.unlink()
            if gap is not None:
                assert range_lost(sub) == gap
                sub.skip_gap()
            assert drain(sub) == list(range(max(start, 40), 50))


def test_on_gap_skip_continues_and_reports_each_gap(stream: meteor.Stream, segment: Path) -> None:
    gaps: list[tuple[int, int]] = []
    with stream.subscriber(on_gap="skip", on_gap_skipped=lambda a, b: gaps.append((a, b))) as sub:
        sub.seek(5)
        segment.unlink()
        assert drain(sub) == [*range(5, 10), *range(20, 50)]
        sub.seek(5)
        stream.store.expire(offset=30)
        assert drain(sub) == list(range(30, 50))
    assert gaps == [(10, 19), (5, 29)]
    assert sub.skipped == 35


@pytest.mark.parametrize("at_hand", [False, True])
def test_records_fetched_before_they_expired_are_still_delivered(
    stream: meteor.Stream, at_hand: bool
) -> None:
    with stream.subscriber(initial_offset="earliest") as sub:
        seen = read_straight(sub) if at_hand else drain_some(sub, 3)
        stream.store.expire(offset=40)
        while sub.position < 40:
            try:
                seen += check_values(sub.poll(timeout=0))
            except meteor.RecordsLost as gap:
                lost = (gap.first, gap.last)
                sub.skip_gap()
        assert lost == (len(seen), 39)
        assert drain(sub) == list(range(40, 50))


def test_only_the_records_in_a_missing_file_are_a_gap(stream: meteor.Stream, segment: Path) -> None:
    segment.unlink()
    with stream.subscriber(initial_offset="earliest") as sub:
        assert check_values(sub.poll(timeout=0)) == list(range(10))
        for _ in range(2):
            assert range_lost(sub) == (10, 19)
        sub.skip_gap()
        assert drain(sub) == list(range(20, 50))
        sub.seek(14)
        assert range_lost(sub) == (14, 19)
    assert read_all(stream, 20) == list(range(20, 50))
    assert [(flaw.kind, flaw.first, flaw.last) for flaw in stream.store.verify()] == [
        ("missing", 10, 19)
    ]


def test_a_file_removed_after_it_was_listed_is_a_gap(
    stream: meteor.Stream, segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = LocalStorage.open

    def too_late(folder: LocalStorage, path: str) -> Any:
        if path.endswith(segment.name):
            segment.unlink(missing_ok=True)
        return opening(folder, path)

    monkeypatch.setattr(LocalStorage, "open", too_late)
    time = datetime.fromtimestamp(0, UTC)
    assert stream.offset_at(time) == 0
    with stream.subscriber(initial_offset="earliest") as sub:
        assert check_values(sub.poll(timeout=0)) == list(range(10))
        assert range_lost(sub) == (10, 19)


def test_a_file_that_compaction_replaces_while_it_is_read_is_not_a_gap(
    stream: meteor.Stream, tmp_path: Path
) -> None:
    with stream.subscriber(initial_offset="earliest") as sub:
        assert drain_some(sub, 10) == list(range(10))
        small = segments(tmp_path)
        assert stream.store.compact() == 4
        for path in small:
            path.unlink()
        assert len(segments(tmp_path)) == 1
        assert drain(sub) == list(range(10, 50))


# Damage

Damage = Callable[[Path, random.Random], None]


def flip(path: Path, rng: random.Random, group: int = 0, name: str = "value") -> None:
    """Flip one bit at the end of a column in a row group."""
    metadata = pq.read_metadata(path)
    column = metadata.row_group(group).column(metadata.schema.names.index(name))
    data = bytearray(path.read_bytes())
    first = column.dictionary_page_offset or column.data_page_offset
    data[first + column.total_compressed_size - 1] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def fill_with_noise(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(path.stat().st_size))


@pytest.mark.parametrize("on_gap", ["raise", "skip"])
@pytest.mark.parametrize("damage", [flip, cut, fill_with_noise])
def test_damaged_records_are_reported_and_can_be_skipped_and_all_others_are_readable(
    stream: meteor.Stream,
    segment: Path,
    rng: random.Random,
    damage: Damage,
    on_gap: OnGap,
) -> None:
    damage(segment, rng)
    with stream.subscriber(initial_offset="earliest", on_gap=on_gap) as sub:
        assert check_values(sub.poll(timeout=0)) == list(range(10))
        for _ in range(2):
            with pytest.raises(meteor.CorruptSegment) as caught:
                sub.poll(timeout=0)
            assert (caught.value.first, caught.value.last) == (10, 19)
            assert (sub.position, sub.skipped) == (10, 0)
        sub.seek(caught.value.last + 1)
        assert drain(sub) == list(range(20, 50))
    assert segment.name in str(caught.value)
    assert read_all(stream, 0, 10) == list(range(10))


def test_damage_in_one_row_group_leaves_the_other_row_groups_readable(
    client: meteor.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rng: random.Random,
) -> None:
    monkeypatch.setattr("meteor_py.store.segment_file.GROUP_RECORDS", 10)
    stream = kept(client, tmp_path, capacity=40)
    fill(stream, 40)
    archive(stream)
    fill_segments(stream, 40)
    flip(segments(tmp_path)[0], rng, group=2)
    with stream.subscriber(initial_offset="earliest") as sub:
        for _ in range(2):
            assert reported_range(meteor.CorruptSegment, lambda: drain(sub)) == (20, 29)
            assert sub.position == 20
        sub.seek(25)
        assert reported_range(meteor.CorruptSegment, lambda: drain(sub)) == (20, 29)
        sub.seek(30)
        assert drain(sub) == list(range(30, 80))


@pytest.mark.parametrize("damage", [fill_with_noise, partial(flip, name="appended")])
def test_seeking_a_time_in_a_damaged_segment_raises_a_clear_error(
    stream: meteor.Stream, segment: Path, rng: random.Random, damage: Damage
) -> None:
    (record,) = (record for batch in stream.read(15, 16) for record in batch)
    damage(segment, rng)
    time = datetime.fromtimestamp(record.appended / 1000, UTC)
    assert reported_range(meteor.CorruptSegment, lambda: stream.offset_at(time)) == (10, 19)


# Expiring


def test_a_groups_unconfirmed_records_expire_only_by_force(
    stream: meteor.Stream,
) -> None:
    stream.seek_group("slow", 13)
    stream.seek_group("slower", 33)
    assert stream.store.expire(offset=45) == 10
    assert read_all(stream) == list(range(10, 50))
    with stream.subscriber(group="slow") as sub:
        assert drain_some(sub, 10) == list(range(13, 20))
        sub.confirm().result()
        assert stream.store.expire(offset=45) == 20
        assert stream.store.expire(offset=45, force=True) == 40
        assert range_lost(sub) == (20, 39)
        sub.skip_gap()
        assert drain(sub) == list(range(40, 50))
    assert [group.confirmed for group in stream.groups()] == [40, 33]


def test_archived_records_expire_by_offset_time_or_size_in_whole_files(
    stream: meteor.Stream, tmp_path: Path
) -> None:
    sizes = [path.stat().st_size for path in segments(tmp_path)]
    store = stream.store
    assert store.expire(offset=9) == 0
    assert store.expire(offset=10) == 10
    assert store.expire(max_bytes=sum(sizes[2:]) + 1) == 20
    assert store.expire(max_bytes=sum(sizes)) == 20
    assert store.expire(before=datetime.fromtimestamp(0, UTC)) == 20
    (record,) = (record for batch in stream.read(35, 36) for record in batch)
    assert store.expire(before=datetime.fromtimestamp(record.appended / 1000, UTC)) == 30
    assert len(segments(tmp_path)) == 2
    assert store.bounds() == (30, 50)
    assert read_all(stream) == list(range(30, 50))
    assert store.expire(max_bytes=0) == 50
    assert segments(tmp_path) == []
    assert read_all(stream) == list(range(40, 50))
    fill_segments(stream, 10, 10)
    assert store.bounds() == (50, 70)
    assert read_all(stream) == list(range(50, 70))


@pytest.mark.parametrize("group", [None, "g"])
def test_reading_from_earliest_works_if_the_first_record_expires_before_it_is_read(
    stream: meteor.Stream, group: str | None
) -> None:
    with stream.subscriber(initial_offset="earliest", group=group) as sub:
        stream.store.expire(offset=30, force=True)
        assert sub.position == 0
        assert check_values(sub.poll(timeout=5)) == list(range(30, 40))
        assert sub.skipped == 0


def test_an_in_memory_store_expires_exactly_the_requested_records(url: str) -> None:
    with meteor.connect(url) as m:
        stream = m.stream(NAME, capacity=10, store=meteor.MemoryStore(NAME), archive=False)
        fill_segments(stream, *[10] * 5)
        assert stream.store.expire(offset=13) == 13
        with stream.subscriber() as sub:
            sub.seek(2)
            assert range_lost(sub) == (2, 12)
            sub.skip_gap()
            assert drain(sub) == list(range(13, 50))


# Unavailable stores


@pytest.fixture
def missed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that a reader failed to find."""
    paths: list[str] = []
    reading = LocalStorage.read

    def read(folder: LocalStorage, path: str) -> bytes | None:
        data = reading(folder, path)
        if data is None:
            paths.append(path)
        return data

    monkeypatch.setattr(LocalStorage, "read", read)
    return paths


@pytest.mark.parametrize("on_gap", ["raise", "skip"])
def test_reader_waits_for_a_store_that_is_briefly_unavailable(
    stream: meteor.Stream, tmp_path: Path, on_gap: OnGap, missed: list[str]
) -> None:
    home, away = tmp_path / NAME, tmp_path / "away"
    with stream.subscriber(initial_offset="earliest", on_gap=on_gap) as sub:
        offsets = drain_some(sub, 10)
        home.rename(away)

        def come_back(_: object) -> None:
            eventually(lambda: missed)
            away.rename(home)

        with background(come_back):
            offsets += check_values(sub.poll(timeout=30))
        assert offsets + drain(sub) == list(range(50))
        assert sub.skipped == 0


@pytest.mark.parametrize("on_gap", ["raise", "skip"])
def test_a_store_that_stays_unavailable_raises_an_error_and_loses_nothing(
    stream: meteor.Stream, tmp_path: Path, on_gap: OnGap
) -> None:
    home, away = tmp_path / NAME, tmp_path / "away"
    with stream.subscriber(initial_offset="earliest", on_gap=on_gap) as sub:
        assert drain_some(sub, 10) == list(range(10))
        home.rename(away)
        for timeout in (0.0, 0.05):
            with pytest.raises(meteor.StoreUnavailable) as caught:
                sub.poll(timeout=timeout)
            assert caught.value.retriable
            assert (sub.position, sub.skipped) == (10, 0)
        with pytest.raises(meteor.StoreUnavailable):
            stream.offset_at(datetime.fromtimestamp(0, UTC))
        sub.seek(40)  # in the ring, which is still available
        assert drain(sub) == list(range(40, 50))
        fill(stream, 5)
        assert drain(sub) == list(range(50, 55))
        away.rename(home)
        sub.seek(10)
        assert drain(sub) == list(range(10, 55))


@pytest.mark.parametrize("stays", [True, False])
def test_a_store_that_returns_during_the_check_is_not_considered_empty(
    stream: meteor.Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    home, away = tmp_path / NAME, tmp_path / "away"
    check, checks = stream._handle.check_store, list[bool]()

    def come_back_and_check() -> None:
        if checks:
            check()
            return
        away.rename(home)
        check()
        checks.append(True)
        if not stays:
            home.rename(away)

    monkeypatch.setattr(stream._handle, "check_store", come_back_and_check)
    with stream.subscriber(on_gap="skip", initial_offset="earliest") as sub:
        home.rename(away)
        if not stays:
            with pytest.raises(meteor.StoreUnavailable):
                sub.poll(timeout=0)
            away.rename(home)
        assert drain(sub) == list(range(50))
        assert sub.skipped == 0


@pytest.mark.parametrize("way", ["with its history", "while the history is unavailable"])
def test_reading_a_deleted_streams_store_raises_stream_not_found(
    url: str, stream: meteor.Stream, tmp_path: Path, way: str
) -> None:
    with meteor.connect(url) as other:
        found = other.stream(NAME, create=True)
        with found.subscriber(initial_offset="earliest") as sub:
            assert drain_some(sub, 10) == list(range(10))
            if way == "with its history":
                stream.delete(history=True)
            else:
                (tmp_path / NAME).rename(tmp_path / "away")
                stream.delete()
            with pytest.raises(meteor.StreamNotFound):
                sub.poll(timeout=0)


def test_a_recreated_stream_does_not_return_the_deleted_streams_archived_records(
    client: meteor.Client, stream: meteor.Stream, tmp_path: Path
) -> None:
    with stream.subscriber(initial_offset="earliest") as sub:
        read_straight(sub)
        stream.delete()
        recreated = kept(client, tmp_path)
        fill_segments(recreated, 4, 10)
        with pytest.raises(meteor.LogTruncated):
            drain(sub)
        sub.skip_gap()
        assert drain(sub) == list(range(14))
    assert read_all(recreated) == list(range(14))
