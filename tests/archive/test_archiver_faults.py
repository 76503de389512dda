"""Archivers that are killed or stopped, and stores that are not where, or what, they should be."""

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
    Depot,
    files_in,
    harm_of,
    needs_mounts,
    offsets_of,
)
from tests.support.group_members import STREAM, Refused
from tests.support.proxied_stream import Pair, poll_until
from tests.support.readers import check_values, drain, everything, fill, value
from tests.support.waiting import eventually


@pytest.fixture
def depot(url: str, tmp_path: Path) -> Iterator[Depot]:
    with Depot(url, tmp_path / "store", max_unarchived=100_000) as depot:
        yield depot


# Killed

#: The steps of a commit of 25,000 records, which the stream is told in three calls: what is there
#: when it ends then, and how much of it counts.
KILLS = {
    "before append": (0, 0),
    "before fsync": (0, 0),  # the folder is made
    "before fsync 2": (0, 0),  # the file is written, and not forced to the disk
    "after write": (0, 0),  # it is whole, under a name that does not count
    "after rename": (1, 0),  # its name is not forced to the disk
    "before advance": (1, 0),
    "after advance": (1, 10_000),
    "after advance 2": (1, 20_000),
    "after advance 3": (1, 25_000),
}


@pytest.mark.parametrize("step", KILLS)
def test_an_archiver_that_is_killed_at_any_step_loses_and_doubles_nothing(
    depot: Depot, step: str
) -> None:
    depot.fill(*[2500] * 10)
    victim = depot.process(f"kill {step}", segment_records=25_000, segment_age=LONG_S)
    victim.wait_killed()
    assert (len(depot.segments()), depot.archived) == KILLS[step]
    assert depot.read() == list(range(25_000))
    assert depot.harm() == []
    end = depot.fill(100, 100)
    depot.archiver(lease_ttl=SHORT_S)
    depot.check(end)


def test_archivers_that_are_killed_one_after_the_other_come_to_an_end_all_the_same(
    depot: Depot, rng: random.Random
) -> None:
    steps = ["after write", "after rename", "after advance"]
    rng.shuffle(steps)
    for number, step in enumerate(steps, start=1):  # at the second segment of each
        end = depot.fill(rng.randrange(2000, 3000))
        depot.process(f"kill {step} 2", segment_records=700).wait_killed()
        assert depot.read() == list(range(end))
        assert len(depot.events("assigned")) == number
    depot.archiver()
    depot.check(end)


# Stopped


@pytest.mark.parametrize("step", ["before append", "before rename", "before advance"])
def test_what_an_archiver_does_after_its_lease_has_gone_to_another_does_not_count(
    depot: Depot, step: str
) -> None:
    depot.fill(1000)
    first = depot.process(f"stop {step}", segment_records=1000, segment_age=LONG_S)
    first.wait_stopped()
    depot.archiver(segment_records=300)
    depot.wait_archived(1000)
    end = depot.fill(500)
    depot.wait_archived(end)
    seen = depot.fields("archived", "next", "flush"), depot.field("term")
    first.resume()
    assert eventually(lambda: first.ask("refused")) == ["LeaseLost"]
    assert (depot.fields("archived", "next", "flush"), depot.field("term")) == seen
    assert any(name.split("-")[1].endswith("999") for name in depot.segments())  # it did write
    depot.check(end)
    assert first.ask("alive")  # it waits for its next turn


def test_an_archiver_that_was_stopped_goes_on_if_nobody_has_taken_its_place(depot: Depot) -> None:
    depot.fill(1000)
    only = depot.process("stop before advance", segment_records=1000)
    only.wait_stopped()
    eventually(lambda: depot.owner is None)
    only.resume()
    depot.wait_archived(1000)
    assert only.ask("refused") == []
    depot.check(1000)


def test_an_archiver_that_was_stopped_while_it_waited_for_records_waits_for_its_next_turn(
    depot: Depot,
) -> None:
    first = depot.process()
    depot.fill(500)
    depot.wait_archived(500)
    first.pause()
    with depot.archiver():
        depot.wait_archived(depot.fill(500))
        first.resume()
        depot.wait_archived(depot.fill(500))
        assert first.ask("alive")
    depot.check(depot.fill(500))  # by the first
    assert [event.what for event in depot.events()] == ["assigned"] * 2 + ["released", "assigned"]


# Another store at the same address


@needs_mounts
def test_another_host_whose_disk_is_another_neither_reads_nor_archives(
    depot: Depot, tmp_path: Path
) -> None:
    depot.fill(1000)
    depot.archive()
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(Refused, match=r"StoreMismatch.*nothing is there"):
        depot.process(bind={str(depot.root): str(other)}).ready()
    with meteor.connect("fake://") as elsewhere:  # a stream of the same name has claimed it
        elsewhere.stream(STREAM, store=other, archive=False)
    claimed = files_in(other)
    with pytest.raises(Refused, match=r"StoreMismatch.*history of another"):
        depot.process(bind={str(depot.root): str(other)}, background=True).ready()
    assert files_in(other) == claimed
    depot.archiver()
    depot.check(1000)


@needs_mounts
def test_a_disk_that_is_mounted_over_the_store_gets_nothing_and_nothing_is_trimmed(
    depot: Depot, tmp_path: Path
) -> None:
    depot.fill(1000)
    host = depot.process(bind={}, lease_ttl=LONG_S)
    depot.wait_archived(1000)
    other = tmp_path / "other"
    other.mkdir()
    host.ask("mount", str(other), str(depot.root))
    end = depot.fill(1000)
    eventually(lambda: host.ask("error") == "StoreMismatch")
    assert (depot.archived, depot.ring()[0]) == (1000, 1000)
    assert files_in(other) == []
    depot.archiver()  # of a host that has the right disk: the other one has let go of the lease
    depot.check(end)
    assert files_in(other) == []


@pytest.mark.parametrize("what", ["gone", "empty", "of another stream", "of another life"])
def test_a_store_that_is_not_there_is_neither_written_nor_trimmed_for_until_it_is_back(
    depot: Depot, tmp_path: Path, what: str
) -> None:
    depot.fill(1000)
    archiver = depot.archiver()
    depot.wait_archived(1000)
    away, place = tmp_path / "away", depot.root
    place.rename(away)
    if what != "gone":
        place.mkdir()
    if what.startswith("of another"):
        name = STREAM if what == "of another life" else "other"
        with meteor.connect("fake://") as elsewhere:
            elsewhere.stream(name, store=place, archive=False)
        if name == "other":
            (place / "other").rename(place / STREAM)
    claimed = files_in(place)
    end = depot.fill(1000)
    eventually(lambda: isinstance(archiver.error, meteor.StoreMismatch))
    assert (depot.archived, depot.ring()[0]) == (1000, 1000)
    assert files_in(place) == claimed
    with pytest.raises(meteor.StoreUnavailable):
        depot.read()
    if place.exists():
        place.rename(tmp_path / "wrong")
    away.rename(place)
    depot.check(end)
    assert archiver.error is None


# A store that cannot be written to


def test_a_publisher_waits_while_the_store_cannot_be_reached_and_goes_on_by_itself(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Depot(url, tmp_path / "store", max_unarchived=200) as depot:
        archiver = depot.archiver()
        depot.fill(100)
        depot.wait_archived(100)
        depot.root.rename(tmp_path / "away")
        depot.root.write_bytes(b"not a directory")
        with depot.stream.publisher() as pub:
            acks = [pub.publish_many([value(i) for i in range(at, at + 100)]) for at in (100, 200)]
            late = pub.publish_many([value(i) for i in range(300, 400)])
            assert [ack.result(20) for ack in acks] == [100, 200]
            eventually(lambda: isinstance(archiver.error, meteor.StoreUnavailable))
            assert "Not a directory" in str(archiver.error)
            with pytest.raises(TimeoutError):
                late.result(0.1)
            assert depot.archived == 100
            depot.root.unlink()
            (tmp_path / "away").rename(depot.root)
            assert late.result(20) == 300
        depot.check(400)
        assert archiver.error is None
    told = [record for record in caplog.records if "Nothing can be archived" in record.message]
    assert len(told) == 1  # and not at each try


def test_each_outage_of_the_store_is_logged_once(
    depot: Depot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archiver = depot.archiver()
    for outage in (1, 2):
        depot.root.rename(tmp_path / "away")
        depot.root.write_bytes(b"not a directory")
        end = depot.fill(100)
        eventually(lambda: isinstance(archiver.error, meteor.StoreUnavailable))
        depot.root.unlink()
        (tmp_path / "away").rename(depot.root)
        depot.wait_archived(end)
        eventually(lambda: archiver.error is None)
        told = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(told) == outage


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
def test_a_full_disk_stops_publishers_with_a_clear_error_and_more_space_is_enough_to_go_on(
    url: str, small_disk: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    with Depot(url, small_disk, max_unarchived=1000) as depot:
        archiver = depot.archiver()
        sent: list[bytes] = []
        with depot.stream.publisher(delivery_timeout=2) as pub:
            error: Exception | None = None
            while error is None:
                values = [rng.randbytes(1000) for _ in range(100)]  # which do not compress
                ack = pub.publish_many(values)
                error = ack.exception(20)
                sent += values if error is None else []
                assert len(sent) < 5000, "that cannot be on a disk of 2 MB"
        assert isinstance(error, meteor.StreamFull)
        assert f"below {depot.archived} are in the store" in str(error)
        assert isinstance(archiver.error, meteor.StoreUnavailable)
        assert "No space left" in str(archiver.error)
        assert "No space left" in caplog.text
        assert [x for batch in depot.stream.read() for x in batch.values()] == sent
        with depot.stream.publisher() as pub:
            waiting = pub.publish(b"more")
            subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
            assert waiting.result(20) == len(sent)
        assert depot.stream.store.flush() == len(sent) + 1
        assert [x for batch in depot.stream.read() for x in batch.values()] == [*sent, b"more"]
        assert depot.harm() == []
        assert not [name for name in depot.files() if name.endswith(".tmp")]


# A server that has lost everything


def test_a_stream_is_resumed_from_its_store_after_the_server_has_lost_it(depot: Depot) -> None:
    depot.fill(1000)
    depot.archive()
    with depot.stream.subscriber(initial_offset="earliest") as sub:
        assert drain(sub) == list(range(1000))
        kept = sub.checkpoint
    life = depot.stream.incarnation
    depot.redis.flushall()
    depot.open(resume=True)
    assert depot.stream.incarnation == life
    assert depot.stream.bounds() == (0, 1000)
    assert depot.read() == list(range(1000))
    depot.archiver()
    depot.check(depot.fill(500))
    # All that it had seen is still there.
    with depot.stream.subscriber(group="g", on_assigned=lambda _: kept) as sub:
        assert check_values(sub.poll(max_records=50)) == list(range(1000, 1050))


def test_who_had_seen_more_than_the_store_holds_is_told_after_a_resume(depot: Depot) -> None:
    depot.fill(1000)
    depot.archive()
    end = depot.fill(50)
    with depot.stream.subscriber(initial_offset="latest") as reader:
        kept = reader.checkpoint
        assert kept.offset == end
        depot.redis.flushall()
        depot.open(resume=True)
        depot.fill(100)  # so that the offsets are there, with other records
        with pytest.raises(meteor.LogTruncated) as told:
            reader.poll()
        assert (told.value.first, told.value.last) == (1000, 1049)
    with depot.stream.subscriber(group="g", on_assigned=lambda _: kept) as sub:
        with pytest.raises(meteor.LogTruncated) as told:
            sub.poll()
        assert (told.value.first, told.value.last) == (1000, 1049)
    depot.archiver()
    depot.check(1100)


def test_a_resume_of_a_stream_that_is_there_changes_nothing(depot: Depot) -> None:
    end = depot.fill(500)
    depot.archive()
    before = everything(depot.redis), depot.files()
    depot.open(resume=True)
    assert (everything(depot.redis), depot.files()) == before
    assert depot.read() == list(range(end))


def test_without_a_resume_a_new_life_begins_and_the_old_files_stay(
    depot: Depot, caplog: pytest.LogCaptureFixture
) -> None:
    depot.fill(1000)
    depot.archive()
    life, old = depot.stream.incarnation, depot.files()
    depot.redis.flushall()
    depot.open()
    assert depot.stream.incarnation != life
    assert "holds 1000 records of an earlier stream" in caplog.text
    assert depot.stream.bounds() == (0, 0)
    depot.archiver()
    depot.check(depot.fill(200))
    assert set(old) < set(depot.files())
    depot.redis.flushall()
    depot.open(resume=True)  # with the last one
    assert depot.read() == list(range(200))


def test_a_resumed_stream_is_archived_by_who_archived_it_before(url: str, tmp_path: Path) -> None:
    with meteor.connect(url) as client:
        for end in (300, 600, 900):
            stream = client.stream("s", store=tmp_path, capacity=100, resume=True)
            assert fill(stream, 300) == end
            assert stream.store.flush() == end
            client.redis.flushall()
        stream = client.stream("s", store=tmp_path, resume=True)
        assert offsets_of(stream) == list(range(900))
        assert harm_of(stream) == []


# A server that is full


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_publisher_waits_for_a_full_server_until_the_archiver_has_made_room(
    private_server: ServerFactory, tmp_path: Path, kind: Literal["valkey", "redis"]
) -> None:
    server = private_server("--maxmemory", "8mb", kind=kind)
    with Depot(server.url, tmp_path, max_unarchived=1_000_000) as depot:
        values = [b"%d " % number * 1000 for number in range(3000)]
        with depot.stream.publisher() as pub:
            acks = [pub.publish_many(values[at : at + 100]) for at in range(0, 3000, 100)]
            eventually(lambda: "errorstat_OOM" in server.info("errorstats"))
            assert not acks[-1].done()
            assert depot.archived == 0
            depot.archiver(segment_age=LONG_S)
            assert [ack.result(30) for ack in acks] == list(range(0, 3000, 100))
        assert depot.stream.store.flush() == 3000
        assert [x for batch in depot.stream.read() for x in batch.values()] == values
        assert depot.harm() == []


# A server that fails over


def other_value(offset: int) -> bytes:
    return b"after the fail-over %d" % offset


def test_after_a_fail_over_nothing_that_was_lost_is_read_from_the_store(
    private_server: ServerFactory, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        settings = {"store": tmp_path, "archive": False, "capacity": 100}
        pair = Pair(stack, private_server(), max_unarchived=100_000, **settings)
        bench = pair.bench
        through = bench.through.stream("orders", create=False)
        archiver = through.archiver(segment_age=0, lease_ttl=SHORT_S)
        stack.enter_context(archiver.start())
        fill(bench.stream, 1000)
        assert bench.stream.store.flush() == 1000
        pair.lag()
        fill(bench.stream, 700)  # 1000 to 1699: archived, and lost with the primary
        assert bench.stream.store.flush() == 1700
        ahead, behind = bench.subscriber(), bench.subscriber(initial_offset="earliest")
        assert ahead.position == 1700
        assert check_values(behind.poll(max_records=100)) == list(range(100))
        pair.fail_over()
        wanted = [value(i) for i in range(1000)]
        # Nobody has written to the new server yet, so the epoch is still the old one.
        assert poll_until(behind, lambda got: len(got) >= 900) == wanted[100:]
        with bench.stream.publisher() as pub:
            pub.publish_many([other_value(i) for i in range(1000, 1300)]).result(10)
        with pytest.raises(meteor.LogTruncated) as told:
            eventually(lambda: ahead.poll())
        assert (told.value.first, told.value.last) == (1000, 1699)
        wanted += [other_value(i) for i in range(1000, 1300)]
        assert poll_until(behind, lambda got: len(got) >= 300) == wanted[1000:]
        assert bench.values() == wanted
        eventually(lambda: bench.meta("archived") == "1300", 20)
        with bench.stream.publisher() as pub:  # past the end of what was lost
            pub.publish_many([other_value(i) for i in range(1300, 2000)]).result(10)
        wanted += [other_value(i) for i in range(1300, 2000)]
        assert bench.stream.store.flush() == 2000
        assert bench.values() == wanted
        files = [pq.ParquetFile(path).read() for path in bench.stream.store.files()]
        table = pa.concat_tables(files)
        assert table.column("offset").to_pylist() == list(range(2000))
        assert table.column("value").to_pylist() == wanted
        assert harm_of(bench.stream) == []
        eventually(lambda: archiver.error is None)
