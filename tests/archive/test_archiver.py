"""Archivers: which one is active, when it writes a segment, and when publishers wait for it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.archive import archive_term
from meteor_py.archive.archive_term import ArchiveTerm
from meteor_py.archive.config import ArchiverConfig
from meteor_py.records.config import SubscriberConfig
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.scripts import ADVANCE_ARCHIVED
from meteor_py.runtime.clock import now
from meteor_py.runtime.threads import JoinableThread
from meteor_py.shared.config import SharedConfig
from tests.conftest import ServerFactory
from tests.support.archivers import (
    LONG_S,
    SHORT_S,
    StoredStream,
    archiver_threads,
    harm_of,
    offsets_of,
)
from tests.support.group_members import STREAM
from tests.support.proxied_stream import ProxiedStream, failure
from tests.support.readers import background, entries, fill, replace_frame, value
from tests.support.waiting import eventually


@pytest.fixture
def stored(url: str, tmp_path: Path) -> Iterator[StoredStream]:
    with StoredStream(url, tmp_path / "store") as stored:
        yield stored


def gathering_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("meteor-gather")]


# Automatic archivers


def test_client_archives_streams_with_a_store_until_the_client_is_closed(
    url: str, tmp_path: Path
) -> None:
    with meteor.connect(url) as client:
        stream = client.stream("s", capacity=10, store=tmp_path)
        (thread,) = archiver_threads()
        assert client.stream("s", store=tmp_path).incarnation == stream.incarnation
        assert archiver_threads() == [thread]
        end = fill(stream, 1000)
        assert stream.store.flush() == end
        assert stream.describe().length < 30
        assert offsets_of(stream) == list(range(end))
    assert archiver_threads() == []


@pytest.mark.parametrize("starts", [False, True])
def test_archiver_interrupted_while_it_starts_can_be_closed(
    stored: StoredStream, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    start = JoinableThread.start

    def interrupted(thread: JoinableThread) -> None:
        is_archiver = thread.name.startswith("meteor-archiver")
        if starts or not is_archiver:
            start(thread)
        if is_archiver:
            raise KeyboardInterrupt

    archiver = stored.stream.archiver()
    with monkeypatch.context() as patch:
        patch.setattr(JoinableThread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            archiver.start()
    began = time.monotonic()
    archiver.close()
    assert time.monotonic() - began < 10
    eventually(lambda: archiver_threads() == [])


def test_opening_a_stream_with_archive_false_or_without_store_starts_no_archiver(
    stored: StoredStream,
) -> None:
    with stored.another_client() as client:
        client.stream(STREAM, store=stored.root, archive=False)
        client.stream(STREAM, create=True)
        stream = client.stream(STREAM, create=False)
        assert archiver_threads() == []
        stored.fill(50)
        with pytest.raises(meteor.StoreUnavailable, match="Is an archiver running"):
            stream.store.flush(timeout=0)
    assert stored.events() == []


def test_explicit_archiver_replaces_the_automatic_archiver(
    stored: StoredStream,
) -> None:
    client = stored.another_client()
    stream = client.stream(STREAM, store=stored.root)
    (thread,) = archiver_threads()
    eventually(lambda: stored.owner)
    before = stored.owner
    with stream.archiver(segment_records=25, segment_age=0, lease_ttl=LONG_S).start() as archiver:
        assert not thread.is_alive()
        assert len(archiver_threads()) == 1
        stored.fill(*[25] * 8)
        stored.wait_archived(200)
        assert stored.owner not in (None, before)
        assert stored.stream.describe().archiver == stored.owner
    assert stored.stream.describe().archiver is None
    assert not archiver.alive
    assert archiver_threads() == []
    assert stored.lease_left_ms == -2  # the lease key is gone: it was released
    stored.archiver()
    stored.check(200)


def test_archiver_can_run_in_the_callers_thread(stored: StoredStream) -> None:
    archiver = stored.stream.archiver(segment_age=0)
    with background(lambda _: archiver.run()):
        end = stored.fill(500)
        stored.wait_archived(end)
        assert not archiver.alive
        archiver.close()


def test_archiver_stops_when_its_client_closes(stored: StoredStream) -> None:
    client = meteor.connect(stored.url)
    stream = client.stream(STREAM, create=False)
    archiver = stream.archiver(segment_age=0, lease_ttl=LONG_S).start()
    eventually(lambda: stored.owner)
    client.close()
    eventually(lambda: not archiver.alive)
    assert stored.owner is None


def test_forked_child_does_not_archive_and_its_parent_continues(stored: StoredStream) -> None:
    parent = stored.process(background=True)
    parent.ready()
    eventually(lambda: stored.owner)
    owner, term = stored.owner, stored.field("term")
    assert parent.ask("fork") == ["", "0"]
    assert (stored.owner, stored.field("term")) == (owner, term)
    stored.check(stored.fill(500))
    assert stored.field("term") == term


#: A program that publishes more than max_unarchived, and closes nothing. Its second stream has an
#: archiver too.
PROGRAM = """
import sys, meteor_py as meteor
client = meteor.connect(sys.argv[1])
publisher = client.stream("s", store=sys.argv[2], capacity=100).publisher()
client.stream("t", store=sys.argv[2])
publisher.publish_many([b"x"] * 5000)
"""


def test_program_that_closes_nothing_archives_until_exit_and_releases_its_leases(
    stored: StoredStream, tmp_path: Path
) -> None:
    url = f"embedded://{tmp_path}/kept"
    program = stored.program(PROGRAM.replace("sys.argv[1]", repr(url)), str(tmp_path))
    assert program.wait() == 0
    with meteor.connect(url) as client:
        stream = client.stream("s", create=False)
        assert stream.describe().next == 5000
        assert stream.store.bounds()[1] >= 4000
        for name in ("s", "t"):
            assert client.redis.hget(keys.group(name, keys.ARCHIVERS), "owner") == b""


# Taking turns


def test_second_archiver_takes_over_at_once_when_the_first_closes(
    stored: StoredStream,
) -> None:
    first = stored.process(lease_ttl=LONG_S)
    first.ready()
    eventually(lambda: stored.owner)
    second = stored.archiver()
    end = stored.fill(500)
    stored.wait_archived(end)
    first.ask("close")
    end = stored.fill(500)
    stored.wait_archived(end)
    assert [event.what for event in stored.events()] == ["assigned", "released", "assigned"]
    assert second.error is None
    stored.check(end)


def test_second_archiver_takes_over_when_a_killed_archivers_lease_expires(
    stored: StoredStream,
) -> None:
    first = stored.process(lease_ttl=SHORT_S)
    stored.fill(500)
    stored.wait_archived(500)
    stored.archiver()
    first.kill()
    stored.check(stored.fill(500))
    assert [event.what for event in stored.events()] == ["assigned", "assigned"]


def test_waiting_archiver_does_not_count_as_hung(stored: StoredStream) -> None:
    first = stored.archiver()
    eventually(lambda: first._archive_term)
    second = stored.archiver()
    session = eventually(lambda: second._session)
    assert session is not None
    session.alive_at = now() - 10_000  # as if it had waited for hours
    eventually(lambda: session.alive_at > now() - 100)
    first.close()
    stored.check(stored.fill(500))
    assert [event.what for event in stored.events()] == ["assigned", "released", "assigned"]


# When a segment is written


@pytest.mark.parametrize(
    "settings",
    [
        {"segment_records": 200},
        {"segment_bytes": 2000},
        {"segment_age": 0.3},
        {"segment_age": 0},
    ],
    ids=str,
)
def test_segment_is_written_when_one_of_its_limits_is_reached(
    stored: StoredStream, settings: dict[str, Any]
) -> None:
    limits = {"segment_age": LONG_S} | settings
    stored.archiver(**limits)
    stored.fill(100, 100)
    stored.wait_archived(200)


def test_flush_archives_all_existing_records(stored: StoredStream) -> None:
    stored.archiver(segment_age=LONG_S)
    for size in (1, 99, 7):
        end = stored.fill(size)
        assert stored.stream.store.flush() == stored.archived == end
    assert len(stored.segments()) == 3
    assert stored.stream.store.flush() == end  # nothing is left to archive


@pytest.mark.parametrize("fails", [False, True])
def test_records_for_the_next_segment_are_gathered_during_an_append(
    stored: StoredStream, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(archive_term, "_OVERLAP_BYTES", 1)
    append = meteor.ParquetStore.append
    gathered: list[int] = []

    def slow_append(store: meteor.ParquetStore, *arguments: Any) -> None:
        if not gathered:
            stored.fill(100)
            term = archiver._archive_term
            assert term is not None
            gathered.append(eventually(lambda: term.records if term.records > 100 else 0))
            if fails:
                raise meteor.StoreUnavailable("The disk is full.", stream=STREAM)
        append(store, *arguments)

    monkeypatch.setattr(meteor.ParquetStore, "append", slow_append)
    stored.fill(100)
    archiver = stored.archiver(segment_records=100, segment_age=LONG_S)
    stored.wait_archived(200)
    assert gathered == [200]
    assert gathering_threads() == []
    stored.check(200)


@pytest.mark.parametrize(
    "setting", ["segment_records", "segment_bytes", "segment_age", "lease_ttl"]
)
def test_invalid_settings_are_refused_and_the_automatic_archiver_keeps_running(
    stored: StoredStream, setting: str
) -> None:
    client = stored.another_client()
    stream = client.stream(STREAM, store=stored.root)
    for wrong, error in ((-1, ValueError), ("1", TypeError)):
        settings: dict[str, Any] = {setting: wrong}
        with pytest.raises(error, match=setting):
            stream.archiver(**settings)
    assert len(archiver_threads()) == 1


@pytest.mark.parametrize("lease_ttl", [0.0001, 86_401])
def test_lease_ttl_has_the_same_limits_as_in_groups(lease_ttl: float) -> None:
    wanted = f"lease_ttl must be from 0.1 to 86400 seconds, not {lease_ttl}"
    for config in (ArchiverConfig, SubscriberConfig, SharedConfig):
        with pytest.raises(ValueError, match=wanted):
            config(lease_ttl=lease_ttl)


def test_archiver_and_store_raise_store_mismatch_without_a_store(url: str) -> None:
    with meteor.connect(url) as client:
        stream = client.stream("plain", create=True)
        for use in (stream.archiver, lambda: stream.store):
            with pytest.raises(meteor.StoreMismatch, match="without a store"):
                use()


# max_unarchived


def test_max_unarchived_is_ten_times_the_capacity_by_default(stored: StoredStream) -> None:
    assert stored.stream.config.max_unarchived == 1000
    stored.fill(*[100] * 10)
    with stored.stream.publisher(delivery_timeout=0.2) as pub:
        error = failure(pub.publish(b"one too many"))
    assert isinstance(error, meteor.StreamFull)
    assert stored.ring()[0] == 0


def test_max_unarchived_is_at_least_the_capacity(url: str, tmp_path: Path) -> None:
    with meteor.connect(url) as client:
        with pytest.raises(ValueError, match="at least the capacity"):
            client.stream("s", store=tmp_path, capacity=100, max_unarchived=99)
        with pytest.raises(ValueError, match="needs a stream with a store"):
            client.stream("s", max_unarchived=10_000)
        assert client.streams() == []
        stream = client.stream("s", store=tmp_path, capacity=100, max_unarchived=100, archive=False)
        with pytest.raises(ValueError, match="at least the capacity"):
            stream.configure(max_unarchived=99)
        with pytest.raises(ValueError, match="at least the capacity"):
            stream.configure(capacity=101)
        with pytest.raises(ValueError, match="has none"):
            client.stream("plain", create=True).configure(max_unarchived=10_000)
        with pytest.raises(meteor.StreamConfigMismatch, match="max_unarchived=100"):
            client.stream("s", max_unarchived=200)
        assert client.stream("s", max_unarchived=100).config == stream.config
        # Even with the lowest limit, publishers continue.
        with stream.archiver(segment_age=LONG_S).start():
            fill(stream, *[100] * 5)


def test_raising_max_unarchived_unblocks_a_publisher(stored: StoredStream) -> None:
    stored.fill(*[100] * 10)
    with stored.stream.publisher() as pub:
        ack = pub.publish(value(1000))
        with pytest.raises(TimeoutError):
            ack.result(0.1)
        stored.stream.configure(max_unarchived=1001)
        assert ack.result(10) == 1000


def test_lowering_max_unarchived_makes_the_archiver_write(url: str, tmp_path: Path) -> None:
    with StoredStream(url, tmp_path, max_unarchived=1_000_000) as stored:
        archiver = stored.archiver(segment_age=LONG_S)
        stored.fill(2000)
        eventually(
            lambda: archiver._archive_term is not None and archiver._archive_term.records == 2000
        )
        assert stored.archived == 0
        stored.stream.configure(max_unarchived=1000)
        stored.wait_archived(2000)
        stored.check(stored.fill(1000))


def test_ring_never_drops_unarchived_records(url: str, tmp_path: Path) -> None:
    with StoredStream(url, tmp_path, capacity=50, max_unarchived=400) as stored:
        samples = ends = 0

        def publish(_: threading.Event) -> None:
            stored.fill(*[1, 50, 7, 33] * 50)

        stored.archiver()
        with background(publish) as thread:
            while thread.is_alive():
                samples += 1
                pipe = stored.redis.pipeline(transaction=True)
                pipe.xrange(keys.log(STREAM), count=1)
                pipe.hmget(keys.meta(STREAM), "archived", "next", "expired")
                oldest, (archived, end, expired) = pipe.execute()
                if oldest:
                    last, count = map(int, oldest[0][0].split(b"-"))
                    assert last - count + 1 <= int(archived)
                    assert last - count + 1 <= max(int(end) - 50, 0)
                assert int(end) - int(archived) <= 400
                assert expired == b"0"
                ends = int(end)
        assert samples > 20
        assert ends > 0
        stored.check(4550)


# Deleted and recreated streams


def test_archiver_ends_and_leaves_nothing_behind_if_its_stream_is_deleted(
    stored: StoredStream,
) -> None:
    end = stored.fill(300)
    archiver = stored.archiver(segment_age=LONG_S)
    eventually(lambda: archiver._archive_term is not None and archiver._archive_term.records == end)
    stored.another_client().stream(STREAM, create=True).delete()
    eventually(lambda: not archiver.alive)
    assert isinstance(archiver.error, meteor.StreamNotFound)
    assert stored.redis.keys("*") == []
    assert stored.segments() == []


@pytest.mark.parametrize("step", ["before append", "before advance"])
def test_archiver_writes_nothing_into_the_next_incarnation(stored: StoredStream, step: str) -> None:
    stored.fill(500)
    old_life = stored.stream.incarnation
    old = stored.process(f"stop {step}", segment_records=500)
    old.wait_stopped()
    stored.stream.delete()
    stored.open()
    end = stored.fill(300)
    stored.archiver()
    stored.wait_archived(end)
    before = [name for name in stored.files() if old_life not in name]
    old.resume()
    eventually(lambda: not old.ask("alive"))
    assert old.ask("error") in ("LogTruncated", "StreamNotFound")
    assert [name for name in stored.files() if old_life not in name] == before
    stored.check(stored.fill(200))


def test_stream_reopened_while_its_archiver_ends_gets_a_new_archiver(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave, leaving = meteor.Archiver._leave, threading.Event()

    def leave_slowly(archiver: meteor.Archiver) -> None:
        if isinstance(archiver.error, meteor.StreamNotFound):
            leaving.set()
            time.sleep(0.2)  # leaves time for the stream to be reopened
        leave(archiver)

    monkeypatch.setattr(meteor.Archiver, "_leave", leave_slowly)
    with meteor.connect(url) as client:
        stream = client.stream("s", store=tmp_path)
        assert fill(stream, 10) == stream.store.flush()
        fill(stream, 10)  # an archiver with unwritten records checks the stream often
        client.redis.flushall()
        assert leaving.wait(10)
        stream = client.stream("s", store=tmp_path, resume=True)
        assert fill(stream, 10) == stream.store.flush()


# Records that cannot be archived


def test_damaged_frame_is_reported_after_everything_before_it_is_archived(
    stored: StoredStream,
) -> None:
    stored.fill(*[10] * 5)
    entry_id, fields = entries(stored.redis, STREAM)[2]
    whole = next(payload for name, payload in fields.items() if name != b"t")
    replace_frame(stored.redis, STREAM, entry_id, b"damaged")
    archiver = stored.archiver(segment_age=LONG_S)
    eventually(lambda: isinstance(archiver.error, meteor.CorruptFrame))
    error = archiver.error
    assert isinstance(error, meteor.CorruptFrame)
    assert (error.first, error.last) == (20, 29)
    stored.wait_archived(20)
    assert stored.stored() == list(range(20))
    end = stored.fill(100, 100)
    assert stored.ring()[0] == 20
    assert stored.archived == 20
    replace_frame(stored.redis, STREAM, entry_id, whole)
    stored.check(end)
    assert archiver.error is None


# Server outages


@pytest.mark.parametrize("lost", ["reply", "request"])
def test_commit_over_a_cut_connection_is_applied_once(
    private_server: ServerFactory, tmp_path: Path, lost: str
) -> None:
    with ProxiedStream(private_server(), store=tmp_path, archive=False, capacity=100) as proxied:
        archiver = proxied.through.stream("orders", create=False).archiver(segment_age=LONG_S)
        with archiver.start():
            end = 0
            for _ in range(2):
                end = fill(proxied.stream, 300)
                cut = proxied.proxy.cut_after_request
                if lost == "request":
                    cut = proxied.proxy.cut_before_request
                cut(match=ADVANCE_ARCHIVED.sha.encode())
                assert proxied.stream.store.flush() == end
            assert offsets_of(proxied.stream) == [*range(end)]
            assert harm_of(proxied.stream) == []
            proxied.stream.store.files()


def test_archiver_retries_when_it_cannot_check_its_stream(
    private_server: ServerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProxiedStream(private_server(), store=tmp_path, archive=False) as proxied:
        cut = threading.Event()

        def cut_off(_: ArchiveTerm) -> None:
            monkeypatch.undo()
            proxied.proxy.refuse()
            proxied.proxy.cut()
            cut.set()
            raise reply_errors.log_truncated("orders", 0, 0)

        monkeypatch.setattr(ArchiveTerm, "step", cut_off)
        archiver = proxied.through.stream("orders", create=False).archiver(lease_ttl=SHORT_S)
        with archiver.start():
            assert cut.wait(10)
            eventually(lambda: isinstance(archiver.error, meteor.LogTruncated))
            proxied.proxy.accept()
            assert fill(proxied.stream, 10) == proxied.stream.store.flush()


def test_automatic_archiver_survives_cuts_and_server_restarts(
    private_server: ServerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = ArchiverConfig(lease_ttl=SHORT_S)
    monkeypatch.setattr("meteor_py.archive.archiver.ArchiverConfig", lambda: quick)
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    with ProxiedStream(server, store=tmp_path, archive=False, capacity=100) as proxied:
        proxied.through.stream("orders", store=tmp_path)
        end = 0
        for fault in ("cut", "restart"):
            end = fill(proxied.stream, 300)
            assert proxied.stream.store.flush() == end
            end = fill(proxied.stream, 300)
            if fault == "cut":
                proxied.proxy.cut()
            else:
                server.kill()
                server.restart()
            assert proxied.stream.store.flush() == end
        assert offsets_of(proxied.stream) == [*range(end)]
        assert len(archiver_threads()) == 1
    assert archiver_threads() == []


def test_closing_a_private_server_does_not_wait_for_a_store_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flushed: list[object] = []
    monkeypatch.setattr("meteor_py.archive.archiver.flush", lambda *args: flushed.append(args))
    with meteor.connect("embedded://") as m:
        m.stream("trades", store=str(tmp_path / "store")).publisher().close()
        shutil.rmtree(tmp_path / "store")
    assert flushed == []
    assert "will be lost with its private server" in caplog.text
