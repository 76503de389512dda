"""Stores in everyday use: losses, expiry, private servers, archivers, wrong arguments."""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.testing.store_contract import INCARNATION, records
from tests.store.test_store_edges import NAME, archive, offsets, stored
from tests.support.readers import everything, fill
from tests.support.waiting import eventually


@pytest.fixture
def m(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


def segments(m: meteor.Client, root: Path, *, number: int = 4, size: int = 30) -> meteor.Stream:
    """Create a stream with ``number`` files; the ring holds only the last records."""
    stream = stored(m, root)
    for _ in range(number):
        fill(stream, size)
        archive(stream)
    assert len(stream.store.files()) == number
    return stream


# Loss


def start_of_group(stream: meteor.Stream) -> None:
    with stream.subscriber(group="new") as sub:
        sub.poll(20)


def start_of_reader(stream: meteor.Stream) -> None:
    with stream.subscriber(initial_offset="earliest") as sub:
        sub.poll(20)


READS: dict[str, Callable[[meteor.Stream], object]] = {
    "a new group": start_of_group,
    "a reader from the earliest offset": start_of_reader,
    "read()": lambda stream: list(stream.read()),
    "offset_at()": lambda stream: stream.offset_at(datetime(2000, 1, 1, tzinfo=UTC)),
    "files()": lambda stream: stream.store.files(),
}


@pytest.mark.parametrize("how", READS)
def test_missing_first_file_is_reported_as_records_lost(
    m: meteor.Client, tmp_path: Path, how: str
) -> None:
    stream = segments(m, tmp_path)
    Path(stream.store.files()[0]).unlink()
    with pytest.raises(meteor.RecordsLost) as caught:
        READS[how](stream)
    assert (caught.value.first, caught.value.last) == (0, 29)


def test_adjacent_missing_files_are_skipped_as_one_gap(m: meteor.Client, tmp_path: Path) -> None:
    stream = segments(m, tmp_path)
    for path in stream.store.files()[:2]:
        Path(path).unlink()
    gaps: list[tuple[int, int]] = []
    with stream.subscriber(
        initial_offset="earliest", on_gap="skip", on_gap_skipped=lambda *gap: gaps.append(gap)
    ) as sub:
        assert sub.poll(20).first_offset == 60
    assert gaps == [(0, 59)]


def test_skip_gap_lets_a_group_continue_after_damaged_records(
    m: meteor.Client, tmp_path: Path
) -> None:
    stream = segments(m, tmp_path)
    damaged = Path(stream.store.files()[1])
    damaged.write_bytes(b"PAR1 is not enough")
    with stream.subscriber(group="g", on_gap="skip") as sub:
        assert sub.poll(20).last_offset == 29
        sub.confirm()
        for _ in range(2):
            with pytest.raises(meteor.CorruptSegment, match="skip_gap") as caught:
                sub.poll(20)
            assert (caught.value.first, caught.value.last) == (30, 59)
            assert damaged.name in str(caught.value)
        sub.skip_gap()
        assert sub.poll(20).first_offset == 60
        assert sub.skipped == 30


def test_compaction_merges_the_segments_around_damage(m: meteor.Client, tmp_path: Path) -> None:
    stream = segments(m, tmp_path, number=5)
    Path(stream.store.files()[2]).write_bytes(b"x")
    assert stream.store.compact() == 2
    assert [flaw.kind for flaw in stream.store.verify() if not flaw.harmless] == ["corrupt"]
    with pytest.raises(meteor.CorruptSegment):
        offsets(stream)
    assert offsets(stream, 90) == list(range(90, 150))


# Expiry


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_expiry_dry_run_returns_the_new_start_and_changes_nothing(
    m: meteor.Client, tmp_path: Path, kind: str
) -> None:
    stream = stored(m, tmp_path if kind == "files" else meteor.MemoryStore(NAME))
    for _ in range(3):
        fill(stream, 30)
        archive(stream)
    stream.seek_group("slow", 30)
    found = stream.store
    for offset, force, first in ((60, False, 30), (60, True, 60), (200, True, 90)):
        start = found.bounds()[0]
        before = everything(m.redis)
        assert found.expire(offset=offset, force=force, dry_run=True) == first
        assert everything(m.redis) == before
        assert offsets(stream, start) == list(range(start, 90))
        assert found.expire(offset=offset, force=force) == first == found.bounds()[0]


# A private server


def test_closing_a_private_server_archives_all_records(
    tmp_path: Path,
) -> None:
    for start in (0, 50):
        with meteor.connect("embedded://") as m:
            stream = m.stream(NAME, store=tmp_path, resume=True)
            with stream.publisher() as pub:
                assert pub.publish_many([b"x"] * 50).result(20) == start
    with meteor.connect("embedded://") as m:
        assert m.stream(NAME, store=tmp_path, resume=True, archive=False).describe().next == 100


def test_records_lost_with_a_private_server_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "store"
    with meteor.connect("embedded://") as m:
        stream = m.stream(NAME, store=root)
        root.rename(tmp_path / "away")
        fill(stream, 10)
    assert "will be lost with its private server" in caplog.text


# Archivers


def test_archiver_cannot_be_started_twice(m: meteor.Client, tmp_path: Path) -> None:
    stream = stored(m, tmp_path)
    with stream.archiver().start() as archiver:
        assert ", running" in repr(archiver)
        for again in (archiver.start, archiver.run):
            with pytest.raises(meteor.MeteorError, match="already been started or closed"):
                again()
    with pytest.raises(meteor.MeteorError, match="already been started or closed"):
        archiver.start()
    assert ", not running" in repr(archiver)
    assert m.redis.exists(keys.lease(NAME, keys.ARCHIVERS)) == 0


def test_close_waits_for_an_archiver_in_another_thread(m: meteor.Client, tmp_path: Path) -> None:
    archiver = stored(m, tmp_path).archiver()
    thread = threading.Thread(target=archiver.run, name="meteor-of-the-test")
    thread.start()
    eventually(lambda: m.redis.exists(keys.lease(NAME, keys.ARCHIVERS)))
    archiver.close()
    assert m.redis.exists(keys.lease(NAME, keys.ARCHIVERS)) == 0
    thread.join(20)


def test_archiver_that_is_never_started_does_not_replace_the_automatic_archiver(
    m: meteor.Client, tmp_path: Path
) -> None:
    stream = m.stream(NAME, store=tmp_path)
    stream.archiver()
    fill(stream, 10)
    assert stream.store.flush(20) == 10


def test_moved_store_is_archived_to_its_new_address(m: meteor.Client, tmp_path: Path) -> None:
    m.stream(NAME, store=tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    stream = m.stream(NAME, store=tmp_path / "there")
    fill(stream, 10)
    assert stream.store.flush(20) == 10
    assert all("/there/" in path for path in stream.store.files())


def test_close_raises_the_error_that_stopped_the_archiver(
    m: meteor.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stored(m, tmp_path)
    denied = meteor.AccessDenied("No.")

    def deny(*_: object) -> None:
        raise denied

    monkeypatch.setattr("meteor_py.archive.archiver.open_group", deny)
    archiver = stream.archiver().start()
    eventually(lambda: not archiver.alive)
    with pytest.raises(meteor.AccessDenied):
        archiver.close()
    archiver.close()  # the error is raised only once


def test_flush_reports_the_archivers_error(
    m: meteor.Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "meteor_py")
    root = tmp_path / "store"
    stream = m.stream(NAME, store=root)
    found = stream.store
    incarnation = root / NAME / stream.incarnation
    incarnation.write_text("in the way")
    fill(stream, 10)
    eventually(lambda: _reports_the_error(found))
    incarnation.unlink()
    assert found.flush(20) == 10
    eventually(lambda: "Archiving works again" in caplog.text)


def _reports_the_error(found: meteor.Archive) -> bool:
    with pytest.raises(meteor.StoreUnavailable) as caught:
        found.flush(0.2)
    return "Not a directory" in str(caught.value)


# Arguments


def test_store_for_another_stream_or_of_the_wrong_type_is_refused(
    m: meteor.Client, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="belongs to stream 'other'"):
        m.stream(NAME, store=meteor.ParquetStore(tmp_path, "other"))
    with pytest.raises(ValueError, match="belongs to stream 'other'"):
        m.stream(NAME, store=meteor.MemoryStore("other"))
    wrong: Any
    for wrong in (meteor.MemoryStore, 5, object()):
        with pytest.raises(TypeError, match="must be an address or a RingbufferStore"):
            m.stream(NAME, store=wrong)
    assert m.streams() == []


def test_stream_without_a_store_raises_store_mismatch(m: meteor.Client, tmp_path: Path) -> None:
    stream = m.stream(NAME, create=True)
    with pytest.raises(meteor.StoreMismatch, match="created without a store"):
        stream.store  # noqa: B018
    for settings in ({"store": tmp_path}, {"max_unarchived": 100_000}):
        with pytest.raises(meteor.StreamConfigMismatch, match="exists without a store"):
            m.stream(NAME, **settings)


@pytest.mark.parametrize("history", [False, True])
def test_deleting_a_stream_deletes_its_files_only_with_history(
    m: meteor.Client, tmp_path: Path, history: bool
) -> None:
    stream = segments(m, tmp_path)
    files = [Path(path) for path in stream.store.files()]
    stream.delete(history=history)
    assert [path.exists() for path in files] == [not history] * 4


def test_file_is_synced_before_its_rename_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = meteor.ParquetStore(tmp_path, NAME)
    store.claim("id")
    steps: list[str] = []
    sync, rename = os.fsync, os.rename

    def note_sync(descriptor: int) -> None:
        steps.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        sync(descriptor)

    def note_rename(source: Path, target: Path) -> None:
        steps.append("rename")
        rename(source, target)

    store.append(INCARNATION, 1, records(0, 1))
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    store.append(INCARNATION, 1, records(1, 2))
    assert steps == ["file", "rename", "folder"]


@pytest.mark.parametrize("kind", [meteor.ParquetStore, meteor.MemoryStore])
def test_every_public_store_method_has_a_docstring(kind: type) -> None:
    methods = [name for name in vars(kind) if not name.startswith("_")]
    assert [name for name in methods if not inspect.getdoc(getattr(kind, name))] == []
