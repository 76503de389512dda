"""Archivers: which one is active, when it writes a segment, and how that affects publishers."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.archive.archive_term import ArchiveTerm
from meteor_py.archive.config import ArchiverConfig
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.scripts import ADVANCE_ARCHIVED
from meteor_py.runtime.clock import now
from meteor_py.runtime.threads import JoinableThread
from tests.conftest import ServerFactory
from tests.support.archivers import LONG_S, SHORT_S, Depot, archiver_threads, harm_of, offsets_of
from tests.support.group_members import STREAM
from tests.support.proxied_stream import Bench, failure
from tests.support.readers import background, entries, fill, replace_frame, value
from tests.support.waiting import eventually


@pytest.fixture
def depot(url: str, tmp_path: Path) -> Iterator[Depot]:
    with Depot(url, tmp_path / "store") as depot:
        yield depot


# Automatic archivers


def test_client_archives_a_stream_with_a_store_until_it_is_closed(url: str, tmp_path: Path) -> None:
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
def test_ctrl_c_while_an_archiver_starts_leaves_nothing_to_wait_for(
    depot: Depot, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    start = JoinableThread.start

    def interrupted(thread: JoinableThread) -> None:
        is_archiver = thread.name.startswith("meteor-archiver")
        if starts or not is_archiver:
            start(thread)
        if is_archiver:
            raise KeyboardInterrupt

    archiver = depot.stream.archiver()
    with monkeypatch.context() as patch:
        patch.setattr(JoinableThread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            archiver.start()
    began = time.monotonic()
    archiver.close()
    assert time.monotonic() - began < 10
    eventually(lambda: archiver_threads() == [])


def test_client_without_archive_or_store_does_not_archive(depot: Depot) -> None:
    with depot.another_client() as client:
        client.stream(STREAM, store=depot.root, archive=False)
        client.stream(STREAM, create=True)
        stream = client.stream(STREAM, create=False)
        assert archiver_threads() == []
        depot.fill(50)
        with pytest.raises(meteor.StoreUnavailable, match="Is an archiver running"):
            stream.store.flush(timeout=0)
    assert depot.events() == []


def test_explicit_archiver_replaces_the_automatic_one(
    depot: Depot,
) -> None:
    client = depot.another_client()
    stream = client.stream(STREAM, store=depot.root)
    (thread,) = archiver_threads()
    eventually(lambda: depot.owner)
    before = depot.owner
    with stream.archiver(segment_records=25, segment_age=0, lease_ttl=LONG_S).start() as archiver:
        assert not thread.is_alive()
        assert len(archiver_threads()) == 1
        depot.fill(*[25] * 8)
        depot.wait_archived(200)
        assert depot.owner not in (None, before)
        assert depot.stream.describe().archiver == depot.owner
    assert depot.stream.describe().archiver is None
    assert not archiver.alive
    assert archiver_threads() == []
    assert depot.lease_left_ms == -2  # released
    depot.archiver()
    depot.check(200)


def test_archiver_may_run_in_the_callers_thread(depot: Depot) -> None:
    archiver = depot.stream.archiver(segment_age=0)
    with background(lambda _: archiver.run()):
        end = depot.fill(500)
        depot.wait_archived(end)
        assert not archiver.alive
        archiver.close()


def test_archiver_ends_with_its_client(depot: Depot) -> None:
    client = meteor.connect(depot.url)
    stream = client.stream(STREAM, create=False)
    archiver = stream.archiver(segment_age=0, lease_ttl=LONG_S).start()
    eventually(lambda: depot.owner)
    client.close()
    eventually(lambda: not archiver.alive)
    assert depot.owner is None


def test_forked_child_does_not_archive_and_its_parent_continues(depot: Depot) -> None:
    parent = depot.process(background=True)
    parent.ready()
    eventually(lambda: depot.owner)
    owner, term = depot.owner, depot.field("term")
    assert parent.ask("fork") == ["", "0"]
    assert (depot.owner, depot.field("term")) == (owner, term)
    depot.check(depot.fill(500))
    assert depot.field("term") == term


#: Publishes more than max_unarchived, and closes nothing. The second stream adds an archiver.
PROGRAM = """
import sys, meteor_py as meteor
client = meteor.connect(sys.argv[1])
publisher = client.stream("s", store=sys.argv[2], capacity=100).publisher()
client.stream("t", store=sys.argv[2])
publisher.publish_many([b"x"] * 5000)
"""


def test_program_that_closes_nothing_archives_until_exit_and_releases_its_leases(
    depot: Depot, tmp_path: Path
) -> None:
    url = f"embedded://{tmp_path}/kept"
    program = depot.program(PROGRAM.replace("sys.argv[1]", repr(url)), str(tmp_path))
    assert program.wait() == 0
    with meteor.connect(url) as client:
        stream = client.stream("s", create=False)
        assert stream.describe().next == 5000
        assert stream.store.bounds()[1] >= 4000
        for name in ("s", "t"):
            assert client.redis.hget(keys.group(name, keys.ARCHIVERS), "owner") == b""


# Taking turns


def test_second_archiver_takes_over_at_once_when_the_first_closes(
    depot: Depot,
) -> None:
    first = depot.process(lease_ttl=LONG_S)
    first.ready()
    eventually(lambda: depot.owner)
    second = depot.archiver()
    end = depot.fill(500)
    depot.wait_archived(end)
    first.ask("close")
    end = depot.fill(500)
    depot.wait_archived(end)
    assert [event.what for event in depot.events()] == ["assigned", "released", "assigned"]
    assert second.error is None
    depot.check(end)


def test_second_archiver_takes_over_when_the_lease_of_a_killed_one_expires(depot: Depot) -> None:
    first = depot.process(lease_ttl=SHORT_S)
    depot.fill(500)
    depot.wait_archived(500)
    depot.archiver()
    first.kill()
    depot.check(depot.fill(500))
    assert [event.what for event in depot.events()] == ["assigned", "assigned"]


def test_waiting_archiver_does_not_count_as_hung(depot: Depot) -> None:
    first = depot.archiver()
    eventually(lambda: first._archive_term)
    second = depot.archiver()
    session = eventually(lambda: second._session)
    assert session is not None
    session.alive_at = now() - 10_000  # as if it had waited for hours
    eventually(lambda: session.alive_at > now() - 100)
    first.close()
    depot.check(depot.fill(500))
    assert [event.what for event in depot.events()] == ["assigned", "released", "assigned"]


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
    depot: Depot, settings: dict[str, Any]
) -> None:
    limits = {"segment_age": LONG_S} | settings
    depot.archiver(**limits)
    depot.fill(100, 100)
    depot.wait_archived(200)


def test_flush_archives_all_existing_records(depot: Depot) -> None:
    depot.archiver(segment_age=LONG_S)
    for size in (1, 99, 7):
        end = depot.fill(size)
        assert depot.stream.store.flush() == depot.archived == end
    assert len(depot.segments()) == 3
    assert depot.stream.store.flush() == end  # nothing to archive


@pytest.mark.parametrize(
    "setting", ["segment_records", "segment_bytes", "segment_age", "lease_ttl"]
)
def test_invalid_settings_are_refused_and_the_automatic_archiver_stays(
    depot: Depot, setting: str
) -> None:
    client = depot.another_client()
    stream = client.stream(STREAM, store=depot.root)
    for wrong, error in ((-1, ValueError), ("1", TypeError)):
        settings: dict[str, Any] = {setting: wrong}
        with pytest.raises(error, match=setting):
            stream.archiver(**settings)
    assert len(archiver_threads()) == 1


def test_stream_without_a_store_has_no_archiver(url: str) -> None:
    with meteor.connect(url) as client:
        stream = client.stream("plain", create=True)
        for use in (stream.archiver, lambda: stream.store):
            with pytest.raises(meteor.StoreMismatch, match="without a store"):
                use()


# max_unarchived


def test_max_unarchived_is_ten_times_the_capacity_by_default(depot: Depot) -> None:
    assert depot.stream.config.max_unarchived == 1000
    depot.fill(*[100] * 10)
    with depot.stream.publisher(delivery_timeout=0.2) as pub:
        error = failure(pub.publish(b"one too many"))
    assert isinstance(error, meteor.StreamFull)
    assert depot.ring()[0] == 0


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
        with stream.archiver(segment_age=LONG_S).start():  # the lowest limit works, too
            fill(stream, *[100] * 5)


def test_raising_max_unarchived_unblocks_a_publisher(depot: Depot) -> None:
    depot.fill(*[100] * 10)
    with depot.stream.publisher() as pub:
        ack = pub.publish(value(1000))
        with pytest.raises(TimeoutError):
            ack.result(0.1)
        depot.stream.configure(max_unarchived=1001)
        assert ack.result(10) == 1000


def test_lowering_max_unarchived_makes_the_archiver_write(url: str, tmp_path: Path) -> None:
    with Depot(url, tmp_path, max_unarchived=1_000_000) as depot:
        archiver = depot.archiver(segment_age=LONG_S)
        depot.fill(2000)
        eventually(
            lambda: archiver._archive_term is not None and archiver._archive_term.records == 2000
        )
        assert depot.archived == 0
        depot.stream.configure(max_unarchived=1000)
        depot.wait_archived(2000)
        depot.check(depot.fill(1000))


def test_ring_never_drops_unarchived_records(url: str, tmp_path: Path) -> None:
    with Depot(url, tmp_path, capacity=50, max_unarchived=400) as depot:
        samples = ends = 0

        def publish(_: threading.Event) -> None:
            depot.fill(*[1, 50, 7, 33] * 50)

        depot.archiver()
        with background(publish) as thread:
            while thread.is_alive():
                samples += 1
                pipe = depot.redis.pipeline(transaction=True)
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
        depot.check(4550)


# Deleted and recreated streams


def test_archiver_of_a_deleted_stream_ends_and_leaves_nothing_behind(depot: Depot) -> None:
    end = depot.fill(300)
    archiver = depot.archiver(segment_age=LONG_S)
    eventually(lambda: archiver._archive_term is not None and archiver._archive_term.records == end)
    depot.another_client().stream(STREAM, create=True).delete()
    eventually(lambda: not archiver.alive)
    assert isinstance(archiver.error, meteor.StreamNotFound)
    assert depot.redis.keys("*") == []
    assert depot.segments() == []


@pytest.mark.parametrize("step", ["before append", "before advance"])
def test_archiver_writes_nothing_into_the_next_incarnation(depot: Depot, step: str) -> None:
    depot.fill(500)
    old_life = depot.stream.incarnation
    old = depot.process(f"stop {step}", segment_records=500)
    old.wait_stopped()
    depot.stream.delete()
    depot.open()
    end = depot.fill(300)
    depot.archiver()
    depot.wait_archived(end)
    before = [name for name in depot.files() if old_life not in name]
    old.resume()
    eventually(lambda: not old.ask("alive"))
    assert old.ask("error") in ("LogTruncated", "StreamNotFound")
    assert [name for name in depot.files() if old_life not in name] == before
    depot.check(depot.fill(200))


def test_stream_reopened_while_its_archiver_ends_gets_another(
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
        fill(stream, 10)  # an archiver that holds records checks the stream often
        client.redis.flushall()
        assert leaving.wait(10)
        stream = client.stream("s", store=tmp_path, resume=True)
        assert fill(stream, 10) == stream.store.flush()


# Records that cannot be archived


def test_damaged_frame_is_reported_after_everything_before_it_is_archived(
    depot: Depot,
) -> None:
    depot.fill(*[10] * 5)
    entry_id, fields = entries(depot.redis, STREAM)[2]
    whole = next(payload for name, payload in fields.items() if name != b"t")
    replace_frame(depot.redis, STREAM, entry_id, b"damaged")
    archiver = depot.archiver(segment_age=LONG_S)
    eventually(lambda: isinstance(archiver.error, meteor.CorruptFrame))
    error = archiver.error
    assert isinstance(error, meteor.CorruptFrame)
    assert (error.first, error.last) == (20, 29)
    depot.wait_archived(20)
    assert depot.stored() == list(range(20))
    end = depot.fill(100, 100)
    assert depot.ring()[0] == 20
    assert depot.archived == 20
    replace_frame(depot.redis, STREAM, entry_id, whole)
    depot.check(end)
    assert archiver.error is None


# Outages of the server


@pytest.mark.parametrize("answer", ["answered", "unanswered"])
def test_commit_over_a_cut_connection_is_applied_once(
    private_server: ServerFactory, tmp_path: Path, answer: str
) -> None:
    with Bench(private_server(), store=tmp_path, archive=False, capacity=100) as bench:
        archiver = bench.through.stream("orders", create=False).archiver(segment_age=LONG_S)
        with archiver.start():
            end = 0
            for _ in range(2):
                end = fill(bench.stream, 300)
                cut = bench.proxy.cut_after_request
                if answer == "unanswered":
                    cut = bench.proxy.cut_before_request
                cut(match=ADVANCE_ARCHIVED.sha.encode())
                assert bench.stream.store.flush() == end
            assert offsets_of(bench.stream) == [*range(end)]
            assert harm_of(bench.stream) == []
            bench.stream.store.files()


def test_archiver_retries_when_it_cannot_check_its_stream(
    private_server: ServerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bench(private_server(), store=tmp_path, archive=False) as bench:
        cut = threading.Event()

        def cut_off(_: ArchiveTerm) -> None:
            monkeypatch.undo()
            bench.proxy.refuse()
            bench.proxy.cut()
            cut.set()
            raise reply_errors.log_truncated("orders", 0, 0)

        monkeypatch.setattr(ArchiveTerm, "step", cut_off)
        archiver = bench.through.stream("orders", create=False).archiver(lease_ttl=SHORT_S)
        with archiver.start():
            assert cut.wait(10)
            eventually(lambda: isinstance(archiver.error, meteor.LogTruncated))
            bench.proxy.accept()
            assert fill(bench.stream, 10) == bench.stream.store.flush()


def test_automatic_archiver_survives_cuts_and_server_restarts(
    private_server: ServerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = ArchiverConfig(lease_ttl=SHORT_S)
    monkeypatch.setattr("meteor_py.archive.archiver.ArchiverConfig", lambda: quick)
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    with Bench(server, store=tmp_path, archive=False, capacity=100) as bench:
        bench.through.stream("orders", store=tmp_path)
        end = 0
        for fault in ("cut", "restart"):
            end = fill(bench.stream, 300)
            assert bench.stream.store.flush() == end
            end = fill(bench.stream, 300)
            if fault == "cut":
                bench.proxy.cut()
            else:
                server.kill()
                server.restart()
            assert bench.stream.store.flush() == end
        assert offsets_of(bench.stream) == [*range(end)]
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
