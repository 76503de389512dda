"""``retain`` and ``retain_bytes``: archivers delete old records from the store automatically."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_py.archive import expiry
from meteor_py.redis import keys
from tests.support.readers import fill
from tests.support.stored_streams import NAME, archiving, fill_segments, kept, read_all, segments
from tests.support.waiting import eventually


@pytest.fixture
def m(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[meteor.Client]:
    monkeypatch.setattr(expiry, "_ENFORCE_S", 0.05)
    with meteor.connect(url) as m:
        yield m


def is_expired_to(stream: meteor.Stream, offset: int) -> bool:
    return stream.store.bounds()[0] == offset


def test_archiver_deletes_records_older_than_retain(m: meteor.Client, tmp_path: Path) -> None:
    stream = kept(m, tmp_path, retain=3600)
    fill_segments(stream, 30, 30)
    with archiving(stream):
        fill(stream, 30)
        stream.store.flush()
        assert is_expired_to(stream, 0)
        stream.configure(retain=0.001)
        eventually(lambda: is_expired_to(stream, 90), 10, "the expected records did not expire")
        eventually(lambda: segments(tmp_path) == [], 10, "expired files were not deleted")
    assert read_all(stream) == list(range(80, 90))  # the ring still has these


def test_archiver_keeps_as_many_files_as_fit_into_retain_bytes(
    m: meteor.Client, tmp_path: Path
) -> None:
    stream = kept(m, tmp_path, capacity=30)
    fill_segments(stream, 30, 30, 30, 30)
    sizes = [path.stat().st_size for path in segments(tmp_path)]
    assert len(sizes) == 4
    stream.configure(retain_bytes=sum(sizes[2:]))
    with archiving(stream):
        eventually(lambda: is_expired_to(stream, 60), 10, "the expected records did not expire")
    assert len(segments(tmp_path)) == 2
    assert read_all(stream, 60) == list(range(60, 120))
    with stream.subscriber() as sub:
        sub.seek(0)
        with pytest.raises(meteor.RecordsLost) as lost:
            sub.poll(5)
        assert (lost.value.first, lost.value.last) == (0, 59)


def test_archiver_does_not_delete_records_that_a_group_has_not_confirmed(
    m: meteor.Client, tmp_path: Path
) -> None:
    stream = kept(m, tmp_path, capacity=30)
    fill_segments(stream, 30, 30, 30)
    stream.seek_group("slow", 30)
    stream.configure(retain=0.001)
    with archiving(stream):
        eventually(lambda: is_expired_to(stream, 30), 10, "the expected records did not expire")
        stream.seek_group("slow", 90)
        eventually(lambda: is_expired_to(stream, 90), 10, "the rest did not expire")


def test_retain_and_retain_bytes_are_settings_of_streams_with_a_store(
    m: meteor.Client, tmp_path: Path
) -> None:
    stream = kept(m, tmp_path, retain=86_400, retain_bytes=10**12)
    found = m.stream(NAME, create=False).describe().config
    assert (found.retain, found.retain_bytes) == (86_400, 10**12)
    stream.configure(retain=0)
    found = stream.describe().config
    assert (found.retain, found.retain_bytes) == (None, 10**12)
    with pytest.raises(meteor.StreamConfigMismatch, match="retain_bytes"):
        m.stream(NAME, retain_bytes=5)
    for given in ({"retain": 5.0}, {"retain_bytes": 5}):
        with pytest.raises(ValueError, match="store"):
            m.stream("plain", **given)
    plain = m.stream("plain", create=True)
    with pytest.raises(ValueError, match="retain needs a stream with a store"):
        plain.configure(retain=5)


def test_failure_to_expire_does_not_stop_archiving_and_is_logged_once(
    m: meteor.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries = 0

    def fail(*_: object, **__: object) -> int:
        nonlocal tries
        tries += 1
        raise meteor.StoreUnavailable("the disk is gone", stream=NAME)

    monkeypatch.setattr(expiry, "first_kept", fail)
    stream = kept(m, tmp_path, retain=0.001)
    with archiving(stream):
        eventually(lambda: fill(stream, 10) and tries >= 3, 10, "the expiry was not retried")
        assert stream.store.flush() == stream.end().offset
    assert [r.getMessage() for r in caplog.records].count(
        f"Cannot expire records of stream {NAME!r}: the disk is gone"
    ) == 1


def test_archiver_whose_history_was_continued_elsewhere_deletes_nothing(
    m: meteor.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = kept(m, tmp_path, retain=0.001)
    monkeypatch.setattr(expiry, "_ENFORCE_S", 1e6)
    with archiving(stream, segment_age=1e6) as archiver:
        eventually(lambda: archiver._archive_term, 10, "the archiver did not begin a term")
        term = archiver._archive_term
        assert term is not None
        fill(stream, 30)
        stream.store.flush()
        enforced: list[int] = []
        monkeypatch.setattr(archiver._retain_policy, "enforce", lambda: enforced.append(1))
        monkeypatch.setattr(archiver._retain_policy, "is_due", lambda: True)
        eventually(lambda: enforced, 10, "retain was not enforced")
        monkeypatch.setattr(term, "_store_term", term._store_term - 1)
        fill(stream, 1)
        eventually(lambda: len(segments(tmp_path)) == 1, 10, "the segment was not written")
        enforced.clear()
        fill(stream, 1)
        eventually(lambda: term.records >= 2, 10, "the archiver did not gather the records")
        assert enforced == []
        monkeypatch.setattr(term, "_store_term", term._store_term + 1)
    assert m.redis.hget(keys.meta(NAME), "expired") == b"0"
