"""Missing or unreadable records are reported with their offsets, and reading continues after them.

No record is omitted silently, even if the ring overtakes a reader, a frame was deleted, damaged or
written by another program, or the server lost its last writes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import pytest
import redis

import meteor_py as meteor
from meteor_py.records.config import COMPRESSIONS, OnGap
from meteor_py.records.frame import Columns, encode
from meteor_py.redis import keys
from tests.conftest import ServerFactory
from tests.support.readers import (
    background,
    check_values,
    drain,
    entries,
    fill,
    frame_name,
    replace_frame,
    value,
)
from tests.support.servers import plain_client
from tests.support.waiting import eventually


@pytest.fixture
def client(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


@pytest.fixture
def plain(url: str) -> Iterator[redis.Redis]:
    with plain_client(url) as p:
        yield p


@pytest.fixture
def ring(client: meteor.Client) -> meteor.Stream:
    """A stream whose ring holds about ten records."""
    return client.stream("ring", capacity=10)


def range_lost(sub: meteor.Subscriber) -> tuple[int, int]:
    with pytest.raises(meteor.RecordsLost) as caught:
        sub.poll(timeout=0)
    error = caught.value
    assert error.stream == sub.stream.name
    assert f"{error.first} to {error.last}" in str(error)
    return error.first, error.last


# The ring overtakes a reader


def test_gap_is_reported_by_every_poll_until_it_is_skipped(ring: meteor.Stream) -> None:
    with ring.subscriber() as sub:
        fill(ring, 5, 5, 5, 5, 5)  # the ring keeps 15 to 24
        for _ in range(3):
            assert range_lost(sub) == (0, 14)
            assert sub.position == 0
        sub.skip_gap()
        assert sub.position == 15
        assert sub.skipped == 15
        assert drain(sub) == list(range(15, 25))


def test_gap_grows_with_the_ring_until_it_is_skipped(ring: meteor.Stream) -> None:
    with ring.subscriber() as sub:
        fill(ring, 10, 10)
        assert range_lost(sub) == (0, 9)
        fill(ring, 10)
        assert range_lost(sub) == (0, 19)


def test_seek_moves_past_a_gap(ring: meteor.Stream) -> None:
    with ring.subscriber() as sub:
        fill(ring, 10, 10)
        range_lost(sub)
        sub.seek(15)
        assert drain(sub) == list(range(15, 20))
        sub.seek(3)
        assert range_lost(sub) == (3, 9)
        assert sub.skipped == 0


def test_skip_gap_without_a_gap_does_nothing(ring: meteor.Stream) -> None:
    fill(ring, 5)
    with ring.subscriber(initial_offset="earliest") as sub:
        sub.skip_gap()
        assert sub.position == 0
        assert drain(sub) == [0, 1, 2, 3, 4]
        sub.skip_gap()
        assert (sub.position, sub.skipped) == (5, 0)


def test_records_fetched_before_the_ring_dropped_them_are_returned(ring: meteor.Stream) -> None:
    fill(ring, 5, 5)
    with ring.subscriber(initial_offset="earliest") as sub:
        sub.poll(timeout=0, max_records=2)
        fill(ring, 10, 10)
        assert check_values(sub.poll(timeout=0)) == list(range(2, 10))
        assert range_lost(sub) == (10, 19)


def test_records_dropped_while_a_gap_is_skipped_are_counted(
    ring: meteor.Stream,
) -> None:
    gaps: list[tuple[int, int]] = []
    with ring.subscriber(on_gap_skipped=lambda a, b: gaps.append((a, b))) as sub:
        fill(ring, 10, 10)
        assert range_lost(sub) == (0, 9)
        sub.skip_gap()
        fill(ring, 10, 10, 10)
        assert drain(sub) == list(range(40, 50))
        assert gaps == [(0, 9), (10, 39)]
        assert sub.skipped == 40


def test_overtaken_reader_at_earliest_raises_records_lost_after_its_first_poll(
    ring: meteor.Stream,
) -> None:
    with ring.subscriber(initial_offset="earliest") as sub:
        assert (len(sub.poll(timeout=0)), sub.position) == (0, 0)
        fill(ring, 5, 5, 5, 5, 5)
        assert range_lost(sub) == (0, 14)
        sub.skip_gap()
        assert drain(sub) == list(range(15, 25))
        sub.seek("earliest")
        assert (sub.position, drain(sub)) == (15, list(range(15, 25)))
        assert not sub.poll(timeout=0)
        fill(ring, 5, 5, 5)
        assert range_lost(sub) == (25, 29)


def test_overtaken_reader_at_earliest_raises_records_lost_if_the_stream_was_empty(
    ring: meteor.Stream,
) -> None:
    with ring.subscriber(initial_offset="earliest") as sub, ring.subscriber(group="g") as member:
        fill(ring, 5, 5, 5, 5, 5)
        assert range_lost(sub) == (0, 14)
        assert range_lost(member) == (0, 14)


def test_overtaken_group_raises_records_lost_after_its_first_poll(ring: meteor.Stream) -> None:
    fill(ring, 10)
    ring.seek_group("g", "earliest")
    with ring.subscriber(group="g") as sub:
        fill(ring, 10, 10)
        assert drain(sub) == list(range(20, 30))
        fill(ring, 10, 10)
        assert range_lost(sub) == (30, 39)


def test_on_gap_skip_continues_and_reports_each_gap(ring: meteor.Stream) -> None:
    gaps: list[tuple[int, int]] = []
    with ring.subscriber(on_gap="skip", on_gap_skipped=lambda a, b: gaps.append((a, b))) as sub:
        fill(ring, 10, 10)
        assert check_values(sub.poll(timeout=0)) == list(range(10, 20))
        fill(ring, 10, 10, 10)
        assert drain(sub) == list(range(40, 50))
        assert gaps == [(0, 9), (20, 39)]
        assert sub.skipped == 30


def test_callback_that_raises_does_not_lose_the_records_after_the_gap(
    ring: meteor.Stream,
) -> None:
    def refuse(first: int, last: int) -> None:
        raise LookupError(first, last)

    with ring.subscriber(on_gap="skip", on_gap_skipped=refuse) as sub:
        fill(ring, 10, 10)
        with pytest.raises(LookupError):
            sub.poll(timeout=0)
        assert drain(sub) == list(range(10, 20))


def test_every_record_is_either_returned_or_counted_as_skipped(
    client: meteor.Client, rng: random.Random
) -> None:
    stream = client.stream("busy", capacity=50)
    counted: list[int] = []

    def publish(stop: threading.Event) -> None:
        with stream.publisher() as pub:
            while not stop.is_set():
                pub.publish_many([b"x"] * rng.choice([1, 3, 20, 50])).result()

    def count(first: int, last: int) -> None:
        counted.extend(range(first, last + 1))

    with stream.subscriber(on_gap="skip", on_gap_skipped=count) as sub:
        seen: list[int] = []
        with background(publish):
            while len(seen) < 2000:
                seen += sub.poll(timeout=5, max_records=rng.choice([1, 10, 1000])).offsets
        while batch := sub.poll(timeout=0):
            seen += batch.offsets
        end = stream.describe().next
        assert seen == sorted(seen)
        assert sorted(seen + counted) == list(range(end))
        assert sub.skipped == len(counted)


def test_gap_ends_a_loop_and_another_loop_continues_after_it(ring: meteor.Stream) -> None:
    fill(ring, 5)
    with ring.subscriber(initial_offset="earliest") as sub:
        records = iter(sub)
        assert [record.offset for record in islice(records, 5)] == [0, 1, 2, 3, 4]
        fill(ring, 10, 10)
        with pytest.raises(meteor.RecordsLost):
            next(records)
        sub.skip_gap()
        assert [record.offset for record in islice(sub, 10)] == list(range(15, 25))


# Holes and an empty log


def test_hole_is_reported_after_the_records_before_it(
    client: meteor.Client, plain: redis.Redis
) -> None:
    stream = client.stream("s", create=True)
    fill(stream, 2, 3, 40, 1)
    plain.xdel(keys.log("s"), "4-3")
    with stream.subscriber(initial_offset="earliest") as sub:
        assert check_values(sub.poll(timeout=0)) == [0, 1]
        assert range_lost(sub) == (2, 4)
        sub.skip_gap()
        assert drain(sub) == list(range(5, 46))


@pytest.mark.parametrize("on_gap", ["raise", "skip"])
def test_log_emptied_by_hand_is_a_gap_up_to_its_end(
    client: meteor.Client, plain: redis.Redis, on_gap: OnGap
) -> None:
    stream = client.stream("s", create=True)
    fill(stream, 5)
    with stream.subscriber(initial_offset="earliest", on_gap=on_gap) as sub:
        sub.seek(1)
        plain.xtrim(keys.log("s"), 0)
        if on_gap == "raise":
            assert range_lost(sub) == (1, 4)
            sub.skip_gap()
        assert drain(sub) == []
        assert sub.skipped == 4
        assert sub.position == 5
        fill(stream, 2)
        assert drain(sub) == [5, 6]


# Bad frames among good ones

BAD = {
    "corrupt": (b"1v", b"no Arrow at all", meteor.CorruptFrame),
    "oversized": (b"1v.zstd", b"\xff\xff\xff\xff(", meteor.CorruptFrame),
    "newer": (b"7qv", b"from the future", meteor.UnsupportedFrame),
}


def damaged(client: meteor.Client, plain: redis.Redis, bad: str) -> meteor.Stream:
    """Create a stream whose records 0 to 9 and 15 to 19 are good, and 10 to 14 are bad."""
    stream = client.stream("s", create=True)
    fill(stream, 1, 9, 5, 5)
    name, payload, _ = BAD[bad]
    replace_frame(plain, "s", b"14-5", payload, name)
    return stream


@pytest.mark.parametrize("bad", BAD)
def test_bad_frame_is_reported_after_the_records_before_it_and_can_be_skipped(
    client: meteor.Client, plain: redis.Redis, bad: str
) -> None:
    stream = damaged(client, plain, bad)
    with stream.subscriber(initial_offset="earliest") as sub:
        assert check_values(sub.poll(timeout=0)) == list(range(10))
        for _ in range(3):
            with pytest.raises(BAD[bad][2]) as caught:
                sub.poll(timeout=0)
            assert isinstance(caught.value, meteor.CorruptFrame | meteor.UnsupportedFrame)
            assert (caught.value.first, caught.value.last) == (10, 14)
            assert sub.position == 10
        sub.seek(caught.value.last + 1)
        assert drain(sub) == list(range(15, 20))


@pytest.mark.parametrize("bad", BAD)
def test_loop_yields_all_records_before_a_bad_frame_then_raises(
    client: meteor.Client, plain: redis.Redis, bad: str
) -> None:
    stream = damaged(client, plain, bad)
    with stream.subscriber(initial_offset="earliest") as sub:
        records = iter(sub)
        assert [record.offset for record in islice(records, 10)] == list(range(10))
        with pytest.raises(BAD[bad][2]):
            next(records)
    with pytest.raises(BAD[bad][2]):
        list(stream.read())
    assert [list(batch.offsets) for batch in stream.read(15)] == [list(range(15, 20))]


def test_bad_frame_affects_no_other_stream_reader_or_publisher(
    client: meteor.Client, plain: redis.Redis
) -> None:
    stream = damaged(client, plain, "corrupt")
    other = client.stream("other", create=True)
    with stream.subscriber() as tail, other.subscriber() as elsewhere:
        with stream.subscriber() as sub:
            sub.seek(10)
            with pytest.raises(meteor.CorruptFrame):
                sub.poll(timeout=0)
        fill(stream, 3)
        fill(other, 3)
        assert drain(tail) == [20, 21, 22]
        assert drain(elsewhere) == [0, 1, 2]
    assert stream.describe().length == 23


def test_gap_before_a_bad_frame_is_reported_first(
    client: meteor.Client, plain: redis.Redis
) -> None:
    stream = damaged(client, plain, "corrupt")
    plain.xtrim(keys.log("s"), minid="10-0", approximate=False)
    with stream.subscriber() as sub:
        sub.seek(4)
        assert range_lost(sub) == (4, 9)
        sub.skip_gap()
        with pytest.raises(meteor.CorruptFrame):
            sub.poll(timeout=0)


@pytest.mark.parametrize("n", [1, 5, 50])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_checksum_detects_any_flipped_bit(
    client: meteor.Client,
    plain: redis.Redis,
    rng: random.Random,
    n: int,
    compression: meteor.Compression,
) -> None:
    stream = client.stream("s", checksum=True, compression=compression)
    fill(stream, n, n)
    assert drain_from_start(stream) == list(range(2 * n))
    entry_id, fields = entries(plain, "s")[1]
    assert b"crc" in fields
    flipped = bytearray(fields[frame_name(fields)])
    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    replace_frame(plain, "s", entry_id, bytes(flipped))
    with stream.subscriber() as sub:
        sub.seek(n)
        with pytest.raises(meteor.CorruptFrame, match="checksum") as caught:
            sub.poll(timeout=0)
        assert (caught.value.first, caught.value.last) == (n, 2 * n - 1)


def drain_from_start(stream: meteor.Stream) -> list[int]:
    with stream.subscriber(initial_offset="earliest") as sub:
        return drain(sub)


# Foreign entries


def test_foreign_entry_is_reported_by_its_id_and_can_be_deleted(
    client: meteor.Client, plain: redis.Redis
) -> None:
    stream = client.stream("s", create=True)
    fill(stream, 5, 5)
    log = keys.log("s")
    foreign: Any = plain.xadd(log, {"user": "1", "action": "login"})
    with stream.subscriber(initial_offset="earliest") as sub:
        assert check_values(sub.poll(timeout=0)) == list(range(10))
        for _ in range(2):
            with pytest.raises(meteor.CorruptStream) as caught:
                sub.poll(timeout=0)
            assert foreign.decode() in str(caught.value)
            assert sub.position == 10
        plain.xdel(log, foreign)
        assert drain(sub) == []
        assert not sub.poll(timeout=0.01)


def test_foreign_entry_at_the_start_is_reported_by_every_reader(
    client: meteor.Client, plain: redis.Redis
) -> None:
    stream = client.stream("s", create=True)
    plain.xadd(keys.log("s"), {"user": "1"}, id="3-0")
    plain.hset(keys.meta("s"), mapping={"next": 4, "appended": 2**50})
    with pytest.raises(meteor.CorruptStream, match="3-0"):
        stream.describe()
    with pytest.raises(meteor.CorruptStream, match="3-0"):
        stream.offset_at(datetime.now(UTC))
    with pytest.raises(meteor.CorruptStream, match="3-0"):
        stream.subscriber(initial_offset="earliest")
    with stream.subscriber() as sub:
        sub.seek(2)
        with pytest.raises(meteor.CorruptStream, match="3-0"):
            sub.poll(timeout=0)


def test_meta_key_that_this_version_cannot_read_is_refused_with_a_clear_error(
    client: meteor.Client, plain: redis.Redis
) -> None:
    plain.set(keys.meta("text"), "hello")
    plain.hset(keys.meta("hash"), mapping={"colour": b"\xff"})
    plain.hset(keys.meta("newer"), mapping={"version": "2"})
    for name, error, words in (
        ("text", meteor.ServerRefused, "WRONGTYPE"),
        ("hash", meteor.CorruptStream, "is not a stream's meta"),
        ("newer", meteor.CorruptStream, "upgrade"),
    ):
        for create in (True, False):
            with pytest.raises(error, match=words):
                client.stream(name, create=create)


# The server has lost records


def test_reader_gets_log_truncated_if_the_server_lost_its_records(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with meteor.connect(server.url) as m:
        stream = m.stream("s", create=True)
        fill(stream, 10)
        with stream.subscriber(initial_offset="earliest") as behind:
            check_values(behind.poll(timeout=0, max_records=3))
            behind.seek(3)  # drops the records that it has fetched ahead
            server.client().save()
            fill(stream, 10)
            with stream.subscriber(initial_offset="earliest") as ahead:
                assert drain(ahead) == list(range(20))
                server.kill()
                server.restart()
                fill(stream, 15)  # different records at the same offsets
                for _ in range(2):
                    with pytest.raises(meteor.LogTruncated) as caught:
                        ahead.poll(timeout=5)
                    assert (caught.value.first, caught.value.last) == (10, 19)
                ahead.skip_gap()
                assert drain(ahead) == list(range(10, 25))
            assert drain(behind) == list(range(3, 25))


def test_subscriber_raises_stream_not_found_if_the_server_lost_everything(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with meteor.connect(server.url) as m:
        stream = m.stream("s", create=True)
        fill(stream, 10)
        with stream.subscriber(initial_offset="earliest") as sub:
            drain(sub)
            server.kill()
            server.restart()
            with pytest.raises(meteor.StreamNotFound):
                eventually(lambda: sub.poll(timeout=0.1))
            fill(m.stream("s", create=True), 4)
            with pytest.raises(meteor.LogTruncated) as caught:
                sub.poll(timeout=5)
            assert (caught.value.first, caught.value.last) == (0, 9)
            sub.skip_gap()
            assert drain(sub) == [0, 1, 2, 3]


def test_frames_of_every_format_can_be_mixed(client: meteor.Client, plain: redis.Redis) -> None:
    """Includes sequences that no publisher in this version would write."""
    stream = client.stream("s", capacity=10_000)
    first = 0
    for n in (1, 40, 1, 33, 32, 1):
        for compression in COMPRESSIONS:
            columns = Columns([value(first + i) for i in range(n)])
            name, payload = encode(columns, compression)
            plain.xadd(keys.log("s"), {"t": 1, name: bytes(payload)}, id=f"{first + n - 1}-{n}")
            first += n
    plain.hset(keys.meta("s"), mapping={"next": first, "appended": 1})
    assert drain_from_start(stream) == list(range(first))
