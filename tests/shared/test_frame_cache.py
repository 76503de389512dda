"""How consumers of a shared group read records from ring and store, and report lost ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis.connection import Connection
from meteor_py.shared import admin, frame_cache, prefetcher
from meteor_py.shared.frame_cache import FrameCache
from meteor_py.shared.record import Standing
from tests.conftest import ServerFactory
from tests.shared.test_unreadable import archive as drop_from_ring
from tests.support.sharing import Queue, Steps, die, drain, make_due, offsets
from tests.support.waiting import eventually


def in_order(records: list[meteor.SharedRecord]) -> bool:
    """Return whether each key's records are in order. Assert that each value equals its key."""
    last: dict[bytes, int] = {}
    for record in records:
        assert record.value == record.ordering_key
        if last.get(record.ordering_key, -1) >= record.offset:
            return False
        last[record.ordering_key] = record.offset
    return True


# From the ring


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each XRANGE pipeline in this process, the number of frames that it requests."""
    found: list[int] = []
    real = Connection.pipeline

    def pipeline(self: Connection, commands: Any, *timeout_s: float) -> Any:
        if commands[0][0] == "XRANGE":
            found.append(len(commands))
        return real(self, commands, *timeout_s)

    monkeypatch.setattr(Connection, "pipeline", pipeline)
    return found


def test_each_consumer_fetches_a_frame_once(url: str, fetches: list[int]) -> None:
    with Queue(url, max_per_key=2) as queue:
        queue.publish("ABCD" * 25, frame=100)
        c1, c2 = queue.consumers(2, prefetch=4)
        found: list[meteor.SharedRecord] = []
        while records := [*c1.poll(0), *c2.poll(0)]:
            assert in_order(records)
            found += records
            for record in records:
                record.ack()
            c1.flush()
            c2.flush()
        assert sorted(offsets(found)) == [*range(100)]
        assert fetches == [1, 1]


@pytest.mark.parametrize("size", [20, 200])  # decoded to lists, and to Arrow arrays
@pytest.mark.parametrize("step", [1, 3])
def test_fetch_stops_within_a_frame_at_its_byte_limit(url: str, size: int, step: int) -> None:
    with Queue(url) as queue:
        queue.publish(["0123456789"] * size, frame=size)
        frames = queue.consumer()._prefetcher._frame_cache
        wanted = [*range(0, size, step)]
        for limit, count in ((1, 1), (30, 3), (31, 4)):
            found = frames.fetch(wanted, limit).found
            assert [*found] == wanted[:count]
            assert [record.offset for record in found.values()] == wanted[:count]
        assert [*frames.fetch(wanted).found] == wanted


def test_one_record_frames_are_fetched_in_two_round_trips(url: str, fetches: list[int]) -> None:
    with Queue(url, "AB" * 25) as queue:
        assert offsets(queue.consumer().poll(5)) == [*range(50)]
    assert fetches == [1, 49]  # the first fetch shows how large frames are


def test_consumer_does_not_keep_all_frames(any_url: str) -> None:
    with Queue(any_url) as queue:
        queue.publish("AB" * 500, frame=10)
        c1 = queue.consumer(prefetch=20)
        assert len(drain(c1)) == 1000
        frames = c1._prefetcher._frame_cache
        assert len(frames._frames) <= 40
        assert frames._firsts == sorted(frames._frames)


def test_values_are_decoded_and_decode_errors_are_left_to_the_application(any_url: str) -> None:
    with Queue(any_url, settings={"codec": "json"}, dead_letter="dead") as queue:
        with queue.stream.publisher() as pub:
            pub.publish({"a": 1}, key=b"A")
        with queue.stream.publisher(codec="bytes") as pub:
            pub.publish(b"{no", key=b"A")
        with queue.stream.publisher() as pub:
            pub.publish([2], key=b"A")
        c1 = queue.consumer()
        good, bad, last = c1.poll(5)
        assert (good.value, last.value) == ({"a": 1}, [2])
        with pytest.raises(meteor.DecodeError):
            _ = bad.value
        assert bad.record.value == b"{no"
        good.ack()
        bad.reject("not JSON")
        last.ack()
        c1.poll(0)
        c1.flush()
        assert c1.confirmed == 3
        (letter,) = (r for batch in queue.client.stream("dead", create=True).read() for r in batch)
        assert letter.value == b"{no"


def test_consumer_can_override_the_codec(any_url: str) -> None:
    with Queue(any_url, "A") as queue:
        (record,) = queue.consumer(codec="text").poll(5)
        assert record.value == "A"


# Dropped by the ring, without a store


def publish(queue: Queue, groups: str, frames: int) -> None:
    for _ in range(frames):
        queue.publish(groups, frame=len(groups))


def test_records_dropped_before_the_scan_are_reported_once_and_the_rest_is_delivered(
    any_url: str,
) -> None:
    with Queue(any_url, settings={"capacity": 20}) as queue:
        c1 = queue.consumer()
        publish(queue, "ABABABABAB", 10)
        first = queue.stream.bounds()[0]
        with pytest.raises(meteor.RecordsLost) as lost:
            c1.poll(5)
        assert (lost.value.first, lost.value.last) == (0, first - 1)
        assert lost.value.stream == queue.stream.name
        assert offsets(drain(c1)) == [*range(first, 100)]
        found = queue.shared.describe()
        assert (found.lost, found.lost_last, found.confirmed) == (first, (0, first - 1), 100)


def test_waiting_records_that_the_ring_dropped_are_reported_and_the_rest_is_delivered(
    any_url: str,
) -> None:
    with Queue(any_url, settings={"capacity": 20}) as queue:
        publish(queue, "AAAAAAAAAA", 2)
        c1 = queue.consumer(prefetch=1)
        (record,) = c1.poll(5)
        c2 = queue.consumer()
        assert not c2.poll(0)  # scans the other records, which wait for their key
        assert queue.shared.describe().waiting == 19
        publish(queue, "AAAAAAAAAA", 2)
        assert queue.stream.bounds()[0] == 20
        record.ack()
        c1.close()
        lost: list[int] = []
        while len(lost) < 19:
            with pytest.raises(meteor.RecordsLost) as caught:
                c2.poll(5)
            lost += range(caught.value.first, caught.value.last + 1)
        assert lost == [*range(1, 20)]
        assert offsets(drain(c2)) == [*range(20, 40)]
        assert queue.shared.describe().lost == 19


def test_gaps_can_be_skipped_and_on_gap_skipped_is_called(any_url: str) -> None:
    gaps: list[tuple[int, int]] = []
    with Queue(any_url, settings={"capacity": 20}) as queue:
        c1 = queue.consumer(on_gap="skip", on_gap_skipped=lambda *gap: gaps.append(gap))
        publish(queue, "ABABABABAB", 10)
        first = queue.stream.bounds()[0]
        assert offsets(drain(c1)) == [*range(first, 100)]
        assert gaps == [(0, first - 1)]


def test_held_records_survive_being_dropped_from_the_ring(any_url: str) -> None:
    with Queue(any_url, settings={"capacity": 20}) as queue:
        publish(queue, "ABABABABAB", 2)
        c1 = queue.consumer()
        records = c1.poll(5)
        publish(queue, "CCCCCCCCCC", 4)
        assert in_order(records)
        c1.commit()
        assert queue.shared.describe().acked == 20


def test_dead_letter_whose_record_is_gone_is_reported_as_lost(
    any_url: str,
) -> None:
    with Queue(any_url, "A", settings={"capacity": 10}, dead_letter="dead") as queue:
        c1, c2 = queue.consumers(2)
        c1.poll(5)[0].reject("why")
        c1.flush()
        die(c1)
        publish(queue, "BBBBBBBBBB", 3)
        # As if lease_ttl had passed: the server assigns the dead letter to the next consumer.
        make_due(queue.client._connector, queue.shared._protocol, "dying", 0)
        lost: list[tuple[int, int]] = []

        def all_named() -> bool:
            try:
                drain(c2)
            except meteor.RecordsLost as gap:
                lost.append((gap.first, gap.last))
            return queue.shared.confirmed == 31

        eventually(all_named)
        assert lost == [(0, 20)]
        assert list(queue.client.stream("dead", create=True).read()) == []
        found = queue.shared.describe()
        assert (found.lost, found.dead, found.dead_letters_pending) == (21, 0, 0)


def test_dead_letter_keeps_a_key_that_is_too_long_to_be_its_ordering_key(
    any_url: str,
) -> None:
    with Queue(any_url, ordering_key="header:cart", dead_letter="dead") as queue:
        letters = queue.client.stream("dead", ordering_key="key")
        with queue.stream.publisher() as pub:
            for key in (b"k" * 256, b"k" * 257, b"k" * 5_000):
                pub.publish(b"v", key=key, headers={"cart": b"7"})
        c1 = queue.consumer()
        for record in c1.poll(5):
            record.reject("no")
        c1.flush()
        c1.poll(0)
        with letters.shared_subscriber("readers", keyless="default") as sub:
            found = {len(record.key or b""): record.ordering_key for record in drain(sub)}
            assert found == {
                256: b"k" * 256,
                257: b"meteor.no-group",
                5_000: b"meteor.no-group",
            }
            assert sub.confirmed == 3
        assert letters.shared_group("readers").fsck() == []


# From the store


@pytest.fixture
def archived(url: str, tmp_path: Path) -> Iterator[Queue]:
    settings = {"capacity": 100, "store": str(tmp_path), "max_unarchived": 200_000}
    with Queue(url, settings=settings) as queue:
        yield queue


def archive(queue: Queue, groups: str, frames: int) -> int:
    """Publish, wait until the ring has dropped most records, and return its first offset."""
    publish(queue, groups, frames)
    queue.stream.store.flush()

    def dropped() -> int:
        ids = queue.client._connector.call(
            "XRANGE", f"meteor:{{{queue.stream.name}}}:log", "-", "+"
        )
        last, size = ids[0][0].split(b"-")
        ring = int(last) - int(size) + 1
        return ring if queue.stream.end().offset - ring <= 120 else 0

    eventually(dropped)
    return dropped()


def test_poll_that_can_wait_reads_records_from_the_store_at_once(archived: Queue) -> None:
    assert archive(archived, "ABCDEFGHIJ", 100) >= 880
    c1 = archived.consumer(prefetch=10)
    # A consumer that waits without a wake-up claims again only after 18 seconds.
    assert offsets(c1.poll(10)) == [*range(10)]


def test_unscanned_records_are_read_from_the_store_in_order(archived: Queue) -> None:
    c1, c2 = archived.consumers(2, prefetch=50)
    assert archive(archived, "ABCDEFGHIJ", 100) >= 880
    found: list[meteor.SharedRecord] = []
    while records := [*c1.poll(0), *c2.poll(0)]:
        found += records
        for record in records:
            record.ack()
        c1.flush()
        c2.flush()
    assert sorted(offsets(found)) == [*range(1000)]
    assert in_order(found)
    assert archived.shared.describe().lost == 0
    assert archived.shared.confirmed == 1000


def test_returned_records_are_read_from_the_store_after_the_ring_dropped_them(
    archived: Queue,
) -> None:
    publish(archived, "ABABABABAB", 10)
    c1, c2 = archived.consumers(2)
    first = c1.poll(5, max_records=1)[0]
    archive(archived, "CCCCCCCCCC", 50)
    first.release()
    c1.close()
    found = drain(c2)
    assert sorted(offsets(found)) == [*range(600)]
    assert in_order(found)


def test_a_dead_consumers_records_are_read_from_the_store(archived: Queue) -> None:
    publish(archived, "ABABABABAB", 1)
    c1, c2 = archived.consumers(2)
    assert len(c1.poll(5)) == 10
    archive(archived, "CCCCCCCCCC", 50)
    die(c1)
    found = drain(c2)
    assert sorted(offsets(found)) == [*range(510)]
    assert in_order(found)


def test_store_is_scanned_in_parts(archived: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_cache, "STORED_ENTRY_RECORDS", 7)
    c1 = archived.consumer(prefetch=5, max_per_key=3)
    archive(archived, "ABABCDCDEE", 30)
    found = drain(c1)
    assert sorted(offsets(found)) == [*range(300)]
    assert in_order(found)


def test_records_expired_from_the_store_are_reported_and_the_rest_is_delivered(
    archived: Queue,
) -> None:
    c1 = archived.consumer()
    archive(archived, "ABABABABAB", 50)
    archive(archived, "ABABABABAB", 50)
    # Without force, nothing expires, because the group still needs the records.
    assert archived.stream.store.expire(offset=500) == 0
    first = archived.stream.store.expire(offset=500, force=True)
    assert 0 < first <= 500
    with pytest.raises(meteor.RecordsLost) as lost:
        c1.poll(5)
    assert (lost.value.first, lost.value.last) == (0, first - 1)
    assert sorted(offsets(drain(c1))) == [*range(first, 1000)]


@pytest.mark.parametrize("size", [7, 4_096])
def test_purge_and_look_ahead_reach_records_in_the_store(
    archived: Queue, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(frame_cache, "STORED_ENTRY_RECORDS", min(size, 256))
    monkeypatch.setattr(admin, "_STORED", size)
    c1 = archived.consumer(prefetch=10)
    archive(archived, "ABABABABAC", 50)
    records = c1.poll(5)
    assert archived.shared.describe().scanned < 100
    held = [record.ordering_key for record in records].count(b"B")
    assert archived.shared.purge("B") == 200 - held > 0
    counts = {name: state.count for name, state in archived.keys().items()}
    assert counts == {"A": 250, "B": held, "C": 50}
    assert archived.shared.describe().lost == 0
    c1.commit()
    found = offsets([*records, *drain(c1)])
    others = [offset for offset in range(500) if offset % 2 == 0 or offset % 10 == 9]
    assert sorted({*found, *others}) == sorted(found)
    c1.flush()
    assert archived.shared.confirmed == 500


# Servers


def test_shared_group_works_on_a_server_with_persistence(private_server: ServerFactory) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    with Queue(server.url) as queue:
        publish(queue, "ABCDEFGHIJ", 20)
        c1, c2 = queue.consumers(2, prefetch=16)
        found: list[meteor.SharedRecord] = []
        lock = threading.Lock()

        def work(consumer: meteor.SharedSubscriber) -> None:
            records = drain(consumer, 0.5)
            with lock:
                found.extend(records)

        threads = [threading.Thread(target=work, args=[each]) for each in (c1, c2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(offsets(found)) == [*range(200)]


def test_only_a_few_frames_are_in_memory_at_a_time(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = [0]
    keep = FrameCache._keep

    def keeping(self: FrameCache, chunk: Any, size: int) -> None:
        keep(self, chunk, size)
        most[0] = max(most[0], sum(map(len, self._frames.values())))

    monkeypatch.setattr(FrameCache, "_keep", keeping)
    with Queue(url, max_per_key=1, settings={"capacity": 100_000}) as queue:
        for number in range(60):
            queue.publish(["A"] * 399 + [f"b{number}"], frame=400)
        owner, other = queue.consumers(2)
        assert queue.get(owner) == "A-0"
        found: list[int] = []
        while len(found) < 60:
            found += offsets(other.poll(10))
        assert found == [400 * number + 399 for number in range(60)]
        assert most[0] <= 33 * 400  # up to 16 kept and 16 requested frames, and a margin of one


def test_cached_chunk_replaces_overlapping_ones(any_url: str) -> None:
    with Queue(any_url) as queue:
        queue.publish("ABCDEFGHIJ", frame=10)
        frames = queue.consumer()._prefetcher._frame_cache
        chunk = frames.read_stored(0, 10)[0]
        frames._keep(chunk.slice(5, 8), 1)
        frames._keep(chunk.slice(2, 3), 1)
        assert [*frames.fetch([2, 6, 8, 9]).found] == [2, 6, 8, 9]
        assert frames._firsts == [0]


def test_poll_with_timeout_0_does_not_scan_the_whole_store(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_cache, "STORED_ENTRY_RECORDS", 2)
    settings = {"capacity": 20, "store": str(tmp_path), "max_unarchived": 200_000}
    with Queue(url, max_per_key=1, settings=settings) as queue:
        queue.publish("A" * 100 + "B", frame=10)
        drop_from_ring(queue)
        owner, other = queue.consumers(2, prefetch=1)
        (first,) = owner.poll(5)
        steps = Steps(monkeypatch, other)
        assert other.poll(0) == []
        assert 0 < len(steps.wants) <= prefetcher._ROUNDS_MIN
        # Each poll continues to scan where the last one stopped.
        eventually(lambda: offsets(other.poll(0)) == [100])
        assert first.standing is Standing.HELD
