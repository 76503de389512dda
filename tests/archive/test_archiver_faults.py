"""Archivers that are killed or stopped, and stores that are missing, full or replaced."""

from __future__ import annotations

import logging
import random
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import meteor_py as meteor
from tests.conftest import ServerFactory
from tests.support.archivers import (
    LONG_S,
    SHORT_S,
    StoredStream,
    files_in,
    harm_of,
    needs_mounts,
    offsets_of,
)
from tests.support.group_members import STREAM, Refused
from tests.support.proxied_stream import ReplicatedStream, poll_until
from tests.support.readers import check_values, drain, everything, fill, value
from tests.support.waiting import eventually


@pytest.fixture
def stored(url: str, tmp_path: Path) -> Iterator[StoredStream]:
    with StoredStream(url, tmp_path / "store", max_unarchived=100_000) as stored:
        yield stored


# Killed archivers

#: Steps in a commit of 25,000 records, which takes three ``advance`` calls. Each step has the
#: number of segments and the archived offset that remain if the archiver is killed there.
KILLS = {
    "before fsync": (0, 0),  # the folder is created, but not synced
    "before fsync 2": (0, 0),  # the state is written, but not synced
    "after state": (0, 0),  # the state is on disk, but its records are not
    "before fsync 4": (0, 0),  # the file is written, but not synced
    "after write": (0, 0),  # the file is complete, under a temporary name
    "after rename 2": (1, 0),  # the file has its final name, but the name is not synced
    "before advance": (1, 0),
    "after advance": (1, 10_000),
    "after advance 3": (1, 25_000),
}


@pytest.mark.parametrize("step", KILLS)
def test_archiver_killed_at_any_step_neither_loses_nor_duplicates_records(
    stored: StoredStream, step: str
) -> None:
    stored.fill(*[2500] * 10)
    victim = stored.process(f"kill {step}", segment_records=25_000, segment_age=LONG_S)
    victim.wait_killed()
    assert (len(stored.segments()), stored.archived) == KILLS[step]
    assert stored.read() == list(range(25_000))
    assert stored.harm() == []
    end = stored.fill(100, 100)
    stored.archiver(lease_ttl=SHORT_S)
    stored.check(end)


def test_archivers_killed_one_after_another_still_make_progress(
    stored: StoredStream, rng: random.Random
) -> None:
    steps = ["after write 2", "after rename 3", "after advance 2"]
    rng.shuffle(steps)
    for number, step in enumerate(steps, start=1):
        # Each archiver is killed while it commits its second segment.
        end = stored.fill(rng.randrange(2000, 3000))
        stored.process(f"kill {step}", segment_records=700).wait_killed()
        assert stored.read() == list(range(end))
        assert len(stored.events("assigned")) == number
    stored.archiver()
    stored.check(end)


# Stopped archivers


@pytest.mark.parametrize(
    "step", ["before state", "before append", "before rename 2", "before advance"]
)
def test_segment_from_an_archiver_that_lost_its_lease_is_ignored(
    stored: StoredStream, step: str
) -> None:
    stored.fill(1000)
    first = stored.process(f"stop {step}", segment_records=1000, segment_age=LONG_S)
    first.wait_stopped()
    stored.archiver(segment_records=300)
    stored.wait_archived(1000)
    end = stored.fill(500)
    stored.wait_archived(end)
    seen = stored.fields("archived", "next", "flush"), stored.field("term")
    first.resume()
    assert eventually(lambda: first.ask("refused")) == ["LeaseLost"]
    assert (stored.fields("archived", "next", "flush"), stored.field("term")) == seen
    # The first archiver has written its segment.
    assert any(name.split("-")[1].endswith("999") for name in stored.segments())
    stored.check(end)
    assert first.ask("alive")  # the first archiver waits for the lease


def test_stopped_archiver_continues_if_no_other_archiver_took_over(stored: StoredStream) -> None:
    stored.fill(1000)
    only = stored.process("stop before advance", segment_records=1000)
    only.wait_stopped()
    eventually(lambda: stored.owner is None)
    only.resume()
    stored.wait_archived(1000)
    assert only.ask("refused") == []
    stored.check(1000)


def test_replaced_archiver_waits_for_its_next_turn(
    stored: StoredStream,
) -> None:
    first = stored.process()
    stored.fill(500)
    stored.wait_archived(500)
    first.pause()
    with stored.archiver():
        stored.wait_archived(stored.fill(500))
        first.resume()
        stored.wait_archived(stored.fill(500))
        assert first.ask("alive")
    stored.check(stored.fill(500))  # archived by the first archiver
    assert [event.what for event in stored.events()] == ["assigned"] * 2 + ["released", "assigned"]


# Another store at the same address


@needs_mounts
def test_host_with_another_disk_neither_reads_nor_archives(
    stored: StoredStream, tmp_path: Path
) -> None:
    stored.fill(1000)
    stored.archive()
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(Refused, match=r"StoreMismatch.*There is no store"):
        stored.process(bind={str(stored.root): str(other)}).ready()
    with meteor.connect("fake://") as elsewhere:  # a stream on another server claims the folder
        elsewhere.stream(STREAM, store=other, archive=False)
    claimed = files_in(other)
    with pytest.raises(Refused, match=r"StoreMismatch.*holds another stream"):
        stored.process(bind={str(stored.root): str(other)}, background=True).ready()
    assert files_in(other) == claimed
    stored.archiver()
    stored.check(1000)


@needs_mounts
def test_nothing_is_written_or_trimmed_if_another_disk_is_mounted_over_the_store(
    stored: StoredStream, tmp_path: Path
) -> None:
    stored.fill(1000)
    host = stored.process(bind={}, lease_ttl=LONG_S)
    stored.wait_archived(1000)
    other = tmp_path / "other"
    other.mkdir()
    host.ask("mount", str(other), str(stored.root))
    end = stored.fill(1000)
    eventually(lambda: host.ask("error") == "StoreMismatch")
    assert (stored.archived, stored.ring()[0]) == (1000, 1000)
    assert files_in(other) == []
    stored.archiver()  # on a host with the right disk; the other host has released the lease
    stored.check(end)
    assert files_in(other) == []


@pytest.mark.parametrize("what", ["gone", "empty", "of another incarnation"])
def test_nothing_is_written_or_trimmed_while_the_store_is_missing(
    stored: StoredStream, tmp_path: Path, what: str
) -> None:
    stored.fill(1000)
    archiver = stored.archiver()
    stored.wait_archived(1000)
    away, place = tmp_path / "away", stored.root
    place.rename(away)
    if what != "gone":
        place.mkdir()
    if what == "of another incarnation":
        with meteor.connect("fake://") as elsewhere:
            elsewhere.stream(STREAM, store=place, archive=False)
    claimed = files_in(place)
    end = stored.fill(1000)
    eventually(lambda: isinstance(archiver.error, meteor.StoreMismatch))
    assert (stored.archived, stored.ring()[0]) == (1000, 1000)
    assert files_in(place) == claimed
    with pytest.raises(meteor.StoreUnavailable):
        stored.read()
    if place.exists():
        place.rename(tmp_path / "wrong")
    away.rename(place)
    stored.check(end)
    assert archiver.error is None


# Unwritable stores


def test_publisher_waits_for_an_unreachable_store_and_continues(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with StoredStream(url, tmp_path / "store", max_unarchived=200) as stored:
        archiver = stored.archiver()
        stored.fill(100)
        stored.wait_archived(100)
        stored.root.rename(tmp_path / "away")
        stored.root.write_bytes(b"not a directory")
        with stored.stream.publisher() as pub:
            acks = [pub.publish_many([value(i) for i in range(at, at + 100)]) for at in (100, 200)]
            late = pub.publish_many([value(i) for i in range(300, 400)])
            assert [ack.result(20) for ack in acks] == [100, 200]
            eventually(lambda: isinstance(archiver.error, meteor.StoreUnavailable))
            assert "Not a directory" in str(archiver.error)
            with pytest.raises(TimeoutError):
                late.result(0.1)
            assert stored.archived == 100
            stored.root.unlink()
            (tmp_path / "away").rename(stored.root)
            assert late.result(20) == 300
        stored.check(400)
        assert archiver.error is None
    logged = [record for record in caplog.records if "Failed to archive stream" in record.message]
    assert len(logged) == 1  # not once per attempt


def test_each_store_outage_is_logged_once(
    stored: StoredStream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archiver = stored.archiver()
    for outage in (1, 2):
        stored.root.rename(tmp_path / "away")
        stored.root.write_bytes(b"not a directory")
        end = stored.fill(100)
        eventually(lambda: isinstance(archiver.error, meteor.StoreUnavailable))
        stored.root.unlink()
        (tmp_path / "away").rename(stored.root)
        stored.wait_archived(end)
        eventually(lambda: archiver.error is None)
        logged = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(logged) == outage


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@needs_mounts
def test_full_disk_stops_publishers_until_there_is_space(
    url: str, small_disk: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    with StoredStream(url, small_disk, max_unarchived=1000) as stored:
        archiver = stored.archiver()
        sent: list[bytes] = []
        with stored.stream.publisher(delivery_timeout=1) as pub:
            error: Exception | None = None
            while error is None:
                values = [rng.randbytes(1000) for _ in range(100)]  # incompressible
                ack = pub.publish_many(values)
                error = ack.exception(20)
                sent += values if error is None else []
                assert len(sent) < 5000, "the disk did not fill up"
        assert isinstance(error, meteor.StreamFull)
        assert f"below {stored.archived} are in the store" in str(error)
        assert isinstance(archiver.error, meteor.StoreUnavailable)
        assert "No space left" in str(archiver.error)
        assert "No space left" in caplog.text
        assert [x for batch in stored.stream.read() for x in batch.values()] == sent
        with stored.stream.publisher() as pub:
            waiting = pub.publish(b"more")
            subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
            assert waiting.result(20) == len(sent)
        assert stored.stream.store.flush() == len(sent) + 1
        assert [x for batch in stored.stream.read() for x in batch.values()] == [*sent, b"more"]
        assert stored.harm() == []
        assert not [name for name in stored.files() if name.endswith(".tmp")]


# Resuming after the server lost everything


def test_stream_is_resumed_from_its_store_after_the_server_has_lost_it(
    stored: StoredStream,
) -> None:
    stored.fill(1000)
    stored.archive()
    with stored.stream.subscriber(initial_offset="earliest") as sub:
        assert drain(sub) == list(range(1000))
        kept = sub.checkpoint
    incarnation = stored.stream.incarnation
    stored.redis.flushall()
    stored.open(resume=True)
    assert stored.stream.incarnation == incarnation
    assert stored.stream.bounds() == (0, 1000)
    assert stored.read() == list(range(1000))
    stored.archiver()
    stored.check(stored.fill(500))
    # No record before the checkpoint is lost, so a group can start there.
    with stored.stream.subscriber(group="g", on_assigned=lambda _: kept) as sub:
        assert check_values(sub.poll(max_records=50)) == list(range(1000, 1050))


def test_reader_ahead_of_the_store_gets_log_truncated_after_a_resume(stored: StoredStream) -> None:
    stored.fill(1000)
    stored.archive()
    end = stored.fill(50)
    with stored.stream.subscriber(initial_offset="latest") as reader:
        kept = reader.checkpoint
        assert kept.offset == end
        stored.redis.flushall()
        stored.open(resume=True)
        stored.fill(100)  # other records at the same offsets
        with pytest.raises(meteor.LogTruncated) as told:
            reader.poll()
        assert (told.value.first, told.value.last) == (1000, 1049)
    with stored.stream.subscriber(group="g", on_assigned=lambda _: kept) as sub:
        with pytest.raises(meteor.LogTruncated) as told:
            sub.poll()
        assert (told.value.first, told.value.last) == (1000, 1049)
    stored.archiver()
    stored.check(1100)


def test_resuming_an_existing_stream_changes_nothing(stored: StoredStream) -> None:
    end = stored.fill(500)
    stored.archive()
    before = everything(stored.redis), stored.files()
    stored.open(resume=True)
    assert (everything(stored.redis), stored.files()) == before
    assert stored.read() == list(range(end))


def test_without_resume_a_new_incarnation_starts_and_old_files_stay(
    stored: StoredStream, caplog: pytest.LogCaptureFixture
) -> None:
    stored.fill(1000)
    stored.archive()
    incarnation, old = stored.stream.incarnation, stored.files()
    stored.redis.flushall()
    stored.open()
    assert stored.stream.incarnation != incarnation
    assert "holds a history up to offset 1000 from an earlier stream" in caplog.text
    assert stored.stream.bounds() == (0, 0)
    stored.archiver()
    stored.check(stored.fill(200))
    assert set(old) < set(stored.files())
    stored.redis.flushall()
    stored.open(resume=True)  # resumes the last incarnation
    assert stored.read() == list(range(200))


def test_resumed_stream_is_archived_by_the_same_client(url: str, tmp_path: Path) -> None:
    with meteor.connect(url) as client:
        for end in (300, 600, 900):
            stream = client.stream("s", store=tmp_path, capacity=100, resume=True)
            assert fill(stream, 300) == end
            assert stream.store.flush() == end
            client.redis.flushall()
        stream = client.stream("s", store=tmp_path, resume=True)
        assert offsets_of(stream) == list(range(900))
        assert harm_of(stream) == []


# A full server


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_publisher_waits_for_a_full_server_until_the_archiver_makes_room(
    private_server: ServerFactory, tmp_path: Path, kind: Literal["valkey", "redis"]
) -> None:
    server = private_server("--maxmemory", "8mb", kind=kind)
    with StoredStream(server.url, tmp_path, max_unarchived=1_000_000) as stored:
        values = [b"%d " % number * 1000 for number in range(3000)]
        with stored.stream.publisher() as pub:
            acks = [pub.publish_many(values[at : at + 100]) for at in range(0, 3000, 100)]
            eventually(lambda: "errorstat_OOM" in server.info("errorstats"))
            assert not acks[-1].done()
            assert stored.archived == 0
            stored.archiver(segment_age=LONG_S)
            assert [ack.result(30) for ack in acks] == list(range(0, 3000, 100))
        assert stored.stream.store.flush() == 3000
        assert [x for batch in stored.stream.read() for x in batch.values()] == values
        assert stored.harm() == []


# Failover


def other_value(offset: int) -> bytes:
    return b"after the failover %d" % offset


def test_lost_records_are_not_read_from_the_store_after_a_failover(
    private_server: ServerFactory, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        settings = {"store": tmp_path, "archive": False, "capacity": 100}
        replicated = ReplicatedStream(stack, private_server(), max_unarchived=100_000, **settings)
        proxied = replicated.proxied
        through = proxied.through.stream("orders", create=False)
        archiver = through.archiver(segment_age=0, lease_ttl=SHORT_S)
        stack.enter_context(archiver.start())
        fill(proxied.stream, 1000)
        assert proxied.stream.store.flush() == 1000
        replicated.lag()
        fill(proxied.stream, 700)  # 1000 to 1699: archived, and lost with the primary
        assert proxied.stream.store.flush() == 1700
        ahead, behind = proxied.subscriber(), proxied.subscriber(initial_offset="earliest")
        assert ahead.position == 1700
        assert check_values(behind.poll(max_records=100)) == list(range(100))
        replicated.fail_over()
        wanted = [value(i) for i in range(1000)]
        # No client has written to the new server yet, so the epoch has not changed.
        assert poll_until(behind, lambda got: len(got) >= 900) == wanted[100:]
        with proxied.stream.publisher() as pub:
            pub.publish_many([other_value(i) for i in range(1000, 1300)]).result(10)
        with pytest.raises(meteor.LogTruncated) as told:
            eventually(lambda: ahead.poll())
        assert (told.value.first, told.value.last) == (1000, 1699)
        wanted += [other_value(i) for i in range(1000, 1300)]
        assert poll_until(behind, lambda got: len(got) >= 300) == wanted[1000:]
        assert proxied.values() == wanted
        eventually(lambda: proxied.meta("archived") == "1300", 20)
        with proxied.stream.publisher() as pub:
            pub.publish_many([other_value(i) for i in range(1300, 2000)]).result(10)
        wanted += [other_value(i) for i in range(1300, 2000)]
        assert proxied.stream.store.flush() == 2000
        assert proxied.values() == wanted
        files = [pq.ParquetFile(path).read() for path in proxied.stream.store.files()]
        table = pa.concat_tables(files)
        assert table.column("offset").to_pylist() == list(range(2000))
        assert table.column("value").to_pylist() == wanted
        assert harm_of(proxied.stream) == []
        eventually(lambda: archiver.error is None)
