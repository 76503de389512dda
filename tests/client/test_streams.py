"""A stream can be opened, described, read, searched by time, configured and deleted.

Most tests run on Valkey, Redis and the fake server.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.records.codec import CodecName
from meteor_py.redis import keys
from meteor_py.subscribe.subscriber import Subscriber
from tests.support.readers import check_values, drain, fill, value
from tests.support.servers import each_primary


@pytest.fixture
def client(any_url: str) -> Iterator[meteor.Client]:
    with meteor.connect(any_url) as m:
        yield m


@pytest.fixture
def real(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


def all_keys(client: meteor.Client) -> list[bytes]:
    with client.redis as plain:
        found: Any = plain.keys("*")
    return sorted(found)


def offsets(stream: meteor.Stream, *args: Any) -> list[int]:
    return [offset for batch in stream.read(*args) for offset in check_values(batch)]


def at(ms: int, us: int = 0) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms, microseconds=us)


# Opening


READERS: dict[str, Callable[[meteor.Stream], object]] = {
    "subscriber": lambda stream: stream.subscriber(),
    "member": lambda stream: stream.subscriber(group="g"),
    "consumer": lambda stream: stream.shared_subscriber("g"),
    "read": lambda stream: list(stream.read()),
    "describe": lambda stream: stream.describe(),
    "end": lambda stream: stream.end(),
    "groups": lambda stream: stream.groups(),
    "seek_group": lambda stream: stream.seek_group("g", 0),
    "configure": lambda stream: stream.configure(capacity=5),
    "delete": lambda stream: stream.delete(),
    "incarnation": lambda stream: stream.incarnation,
}


@pytest.mark.parametrize("how", READERS)
def test_readers_do_not_create_a_stream_and_their_error_suggests_similar_names(
    client: meteor.Client, how: str
) -> None:
    for name in ("orders", "order", "unlike"):
        client.stream(name, create=True)
    before = all_keys(client)
    with pytest.raises(meteor.StreamNotFound, match="no stream 'ordres'") as caught:
        READERS[how](client.stream("ordres"))
    assert caught.value.similar == ("orders", "order")
    assert "Did you mean 'orders' or 'order'?" in str(caught.value)
    assert "create=True" in caught.value.hint
    assert all_keys(client) == before


def test_the_first_publisher_also_creates_the_stream_for_objects_opened_earlier(
    client: meteor.Client,
) -> None:
    early, late = client.stream("s"), client.stream("s")
    assert (early.name, client.streams()) == ("s", [])
    assert repr(early).startswith("<Stream 's' on ")
    with pytest.raises(meteor.StreamNotFound):
        early.subscriber()
    with late.publisher() as pub:
        assert client.streams() == ["s"]
        pub.publish(value(0)).result()
    with early.subscriber(initial_offset="earliest") as sub:
        assert drain(sub) == [0]
    assert early.incarnation == late.incarnation


@pytest.mark.parametrize("settings", [{"create": True}, {"capacity": 5}, {"codec": "json"}])
def test_passing_a_setting_or_create_creates_the_stream_at_once(
    client: meteor.Client, settings: dict[str, Any]
) -> None:
    stream = client.stream("s", **settings)
    assert client.streams() == ["s"]
    with stream.subscriber(group="g") as sub:
        assert drain(sub) == []


def test_attaching_a_receiver_creates_its_dead_letter_stream(client: meteor.Client) -> None:
    stream, letters = client.stream("s", create=True), client.stream("letters")
    with stream.subscriber(group="g") as sub:
        sub.attach_receiver(print, on_error=letters)
    assert client.streams() == ["letters", "s"]
    assert letters.end().offset == 0


def test_a_stream_is_created_once_and_then_opened(client: meteor.Client) -> None:
    created = client.stream("s", capacity=5, compression="zstd", checksum=True, codec="json")
    opened = client.stream("s", create=True)
    assert opened.config == created.config == meteor.StreamConfig(5, "zstd", True, "json")
    assert opened.incarnation == created.incarnation
    assert client.stream("s", create=False).config == created.config


def test_a_stream_without_settings_has_the_documented_defaults(client: meteor.Client) -> None:
    assert client.stream("s", create=True).config == meteor.StreamConfig(
        10_000, "none", False, "bytes"
    )


@pytest.mark.parametrize(
    "other",
    [{"capacity": 7}, {"compression": "lz4"}, {"checksum": True}, {"codec": "text"}],
)
@pytest.mark.parametrize("create", [True, False])
def test_error_for_a_setting_that_differs_from_the_stream_names_the_setting(
    client: meteor.Client, other: dict[str, Any], create: bool
) -> None:
    client.stream("s", create=True)
    (setting,) = other
    with pytest.raises(meteor.StreamConfigMismatch, match=f"{setting}=") as caught:
        client.stream("s", create=create, **other)
    assert caught.value.stream == "s"
    assert client.stream("s", create=True).config == meteor.StreamConfig()


def test_only_one_of_several_concurrent_creators_sets_the_settings(any_url: str) -> None:
    def create(capacity: int) -> int | None:
        with meteor.connect(any_url) as m:
            try:
                return m.stream("s", capacity=capacity).config.capacity
            except meteor.StreamConfigMismatch:
                return None

    with ThreadPoolExecutor(4) as pool:
        outcome = list(pool.map(create, range(1, 9)))
    with meteor.connect(any_url) as m:
        assert [x for x in outcome if x] == [m.stream("s", create=True).config.capacity]


def test_with_create_false_nothing_is_created(client: meteor.Client) -> None:
    with pytest.raises(meteor.StreamNotFound, match="no stream 'nowhere'") as caught:
        client.stream("nowhere", create=False)
    assert caught.value.stream == "nowhere"
    assert all_keys(client) == []


def test_stream_list_is_sorted_and_omits_names_without_a_stream(client: meteor.Client) -> None:
    assert client.streams() == []
    for name in ("b", "a.1", "a"):
        client.stream(name, create=True)
    with client.redis as plain:
        plain.sadd(keys.STREAMS, *(f"ghost-{i}" for i in range(1500)))
    assert client.streams() == ["a", "a.1", "b"]


# Describing


def test_describe_returns_bounds_sizes_and_settings(client: meteor.Client) -> None:
    stream = client.stream("s", capacity=10)
    empty = stream.describe()
    assert (empty.first, empty.next, empty.length, empty.frames, empty.appended) == (0, 0, 0, 0, 0)
    fill(stream, 1, 4, 6, 3)
    full = stream.describe()
    assert (full.first, full.next, full.length, full.frames) == (1, 14, 13, 3)
    assert full.name == "s"
    assert full.config == stream.config
    assert full.incarnation == stream.incarnation
    assert (full.archived, full.archiver) == (None, None)
    assert (full.epoch, full.epoch_first) == (1, 0)
    assert abs(full.appended / 1000 - datetime.now(UTC).timestamp()) < 60
    assert full.bytes is None or full.bytes > 100


# Reading


def test_read_returns_exactly_the_requested_range(
    client: meteor.Client, rng: random.Random
) -> None:
    stream = client.stream("s", capacity=1000)
    end = fill(stream, *(rng.choice([1, 2, 40, 100]) for _ in range(15)))
    assert offsets(stream) == list(range(end))
    assert offsets(stream, "earliest", None) == list(range(end))
    assert offsets(stream, 0, end + 500) == list(range(end))
    assert offsets(stream, "latest") == offsets(stream, end) == []
    for _ in range(20):
        start, stop = rng.randrange(end), rng.randrange(end)
        assert offsets(stream, start, stop) == list(range(start, stop))
    assert offsets(stream, at(0)) == list(range(end))
    assert offsets(stream, datetime.now(UTC) + timedelta(days=1)) == []


def test_read_stops_where_the_stream_ended_when_read_was_called(client: meteor.Client) -> None:
    stream = client.stream("s", create=True)
    fill(stream, 5)
    batches = stream.read()
    fill(stream, 5)
    assert [offset for batch in batches for offset in batch.offsets] == [0, 1, 2, 3, 4]


def test_reading_dropped_records_raises(client: meteor.Client) -> None:
    stream = client.stream("s", capacity=5)
    fill(stream, 5, 5)
    assert offsets(stream) == [5, 6, 7, 8, 9]
    with pytest.raises(meteor.RecordsLost) as caught:
        offsets(stream, 2)
    assert (caught.value.first, caught.value.last) == (2, 4)


def test_read_returns_no_record_beyond_stop_even_if_the_ring_moves_past_it(
    real: meteor.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = real.stream("s", capacity=10)
    poll = Subscriber.poll
    late: list[int] = []

    def poll_late(sub: Subscriber, *args: Any, **options: Any) -> meteor.RecordBatch:
        fill(stream, *late)
        late.clear()
        return poll(sub, *args, **options)

    monkeypatch.setattr(Subscriber, "poll", poll_late)
    fill(stream, 5, 5, 5, 5)  # the ring holds 10 to 19
    late += [5]  # once these are published, it holds 15 to 24
    assert offsets(stream, "earliest", 18) == [15, 16, 17]
    late += [10, 10]  # then 35 to 44
    assert offsets(stream, "earliest", 23) == []


@pytest.mark.parametrize("bad", [(-1,), (0, -1), ("yesterday",), (datetime(2020, 1, 1),)])
def test_read_checks_its_arguments_when_it_is_called(real: meteor.Client, bad: Any) -> None:
    with pytest.raises(ValueError, match=r"\.$"):
        real.stream("s", create=True).read(*bad)


# Times


def with_times(
    client: meteor.Client, name: str, frames: list[tuple[int, int]]
) -> tuple[meteor.Stream, list[tuple[int, int]]]:
    """Create a stream with frames of (records, time); return each frame's (first offset, time)."""
    stream = client.stream(name, create=True)
    first, found = 0, []
    plain = client.redis  # not in a with block: a closed RedisCluster cannot be used again
    for n, time in frames:
        plain.xadd(keys.log(name), {"t": time, "0v": "x"}, id=f"{first + n - 1}-{n}")
        found.append((first, time))
        first += n
    plain.hset(keys.meta(name), mapping={"next": first, "appended": frames[-1][1]})
    return stream, found


@pytest.mark.parametrize("trimmed", [0, 17])
def test_offset_at_finds_the_same_offset_as_a_scan(
    client: meteor.Client, rng: random.Random, trimmed: int
) -> None:
    time, frames = 1000, []
    for _ in range(60):
        time += rng.choice([0, 0, 0, 1, 5])
        frames.append((rng.choice([1, 1, 3, 100, 4096]), time))
    stream, found = with_times(client, "s", frames)
    end = stream.describe().next
    with client.redis as plain:
        plain.xtrim(keys.log("s"), minid=f"{found[trimmed][0]}-0", approximate=False)
    kept = found[trimmed:]
    for wanted in [0, 999, *range(1000, time + 3), time + 10**9]:
        expected = next((first for first, t in kept if t >= wanted), end)
        assert stream.offset_at(at(wanted)) == expected


def test_a_time_between_two_milliseconds_is_rounded_up(client: meteor.Client) -> None:
    stream, _ = with_times(client, "s", [(1, 1000), (1, 1001), (1, 1002)])
    assert stream.offset_at(at(1000)) == 0
    assert stream.offset_at(at(1000, us=1)) == 1
    assert stream.offset_at(at(1000, us=999)) == 1
    assert stream.offset_at(at(1001)) == 1


def test_offset_at_a_records_time_is_the_start_of_its_frame(client: meteor.Client) -> None:
    stream = client.stream("s", create=True)
    fill(stream, 3)
    with stream.subscriber(initial_offset="earliest") as sub:
        record = sub.poll(timeout=0)[2]
        assert stream.offset_at(record.time) == 0


def test_offset_at_in_an_empty_stream_returns_its_end(client: meteor.Client) -> None:
    assert client.stream("s", create=True).offset_at(at(0)) == 0
    assert client.stream("s", create=True).offset_at(datetime.now(UTC)) == 0


def test_a_search_by_time_takes_few_steps_even_in_a_long_log(real: meteor.Client) -> None:
    stream, _ = with_times(real, "s", [(1, i) for i in range(1, 3000)])
    servers = each_primary(real.redis)
    for server in servers:
        server.config_resetstat()
    assert stream.offset_at(at(2000)) == 1999
    stats: list[Any] = [server.info("commandstats") for server in servers]
    assert sum(each["cmdstat_xrange"]["calls"] for each in stats if "cmdstat_xrange" in each) <= 53


# Configuring


def test_the_ring_holds_its_capacity_plus_at_most_one_frame_after_every_change(
    client: meteor.Client, rng: random.Random
) -> None:
    capacity = 100
    stream = client.stream("s", capacity=capacity)
    model: list[tuple[int, int]] = []  # first and last offset of each frame
    for _ in range(40):
        if rng.random() < 0.7:
            first = model[-1][1] + 1 if model else 0
            size = rng.randrange(1, min(60, capacity + 1))
            fill(stream, size)
            model.append((first, first + size - 1))
        else:
            capacity = rng.randrange(1, 200)
            stream.configure(capacity=capacity)
            assert client.stream("s", create=False).config.capacity == capacity
            assert stream.config.capacity == capacity
        end = model[-1][1] + 1 if model else 0
        model = [frame for frame in model if frame[1] >= end - capacity]
        described = stream.describe()
        assert (described.next, described.frames) == (end, len(model))
        if model:
            assert described.first == model[0][0]
            # Without its first frame, the ring would hold too few records.
            assert end - (model[0][1] + 1) < capacity
    assert offsets(stream) == list(range(model[0][0], end))


def test_a_ring_with_a_raised_capacity_keeps_more_records(client: meteor.Client) -> None:
    stream = client.stream("s", capacity=3)
    fill(stream, *[1] * 5)
    stream.configure(capacity=6)
    assert stream.describe().length == 3
    fill(stream, *[1] * 5)
    assert stream.describe().length == 6


def test_a_large_ring_shrinks_in_small_steps_to_its_exact_size(real: meteor.Client) -> None:
    stream = real.stream("s", capacity=100_000)
    with real.redis as plain:
        with plain.pipeline(transaction=False) as pipe:
            for i in range(5000):
                pipe.xadd(keys.log("s"), {"t": 1, "0v": value(i)}, id=f"{i}-1")
            pipe.execute()
        plain.hset(keys.meta("s"), mapping={"next": 5000, "appended": 1})
        plain.config_resetstat()
        stream.configure(capacity=10)
        stats: Any = plain.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] >= 5
    assert offsets(stream) == list(range(4990, 5000))


def test_changed_compression_and_checksum_apply_to_later_publishers(client: meteor.Client) -> None:
    stream = client.stream("s", create=True)
    stream.configure(compression="lz4", checksum=True)
    later = client.stream("s", compression="lz4", checksum=True, capacity=10_000)
    fill(later, 100)
    with client.redis as plain:
        ((_, fields),) = plain.xrange(keys.log("s"))
    assert set(fields) == {b"t", b"1v.lz4", b"crc"}
    assert offsets(stream) == list(range(100))


def test_configuring_a_deleted_or_recreated_stream_is_refused(client: meteor.Client) -> None:
    stream = client.stream("s", create=True)
    stream.delete()
    with pytest.raises(meteor.StreamNotFound):
        stream.configure(capacity=5)
    client.stream("s", create=True)
    with pytest.raises(meteor.LogTruncated):
        stream.configure(capacity=5)
    assert client.stream("s", create=True).config.capacity == 10_000


# Deleting


def test_deleting_a_stream_leaves_no_key_and_does_not_touch_other_streams(
    client: meteor.Client,
) -> None:
    neighbours = [client.stream(name, create=True) for name in ("s.1", "s-1", "S", "ss")]
    for neighbour in neighbours:
        fill(neighbour, 1)
    before = all_keys(client)
    stream = client.stream("s", create=True)
    fill(stream, 5)
    fill(stream, 5)  # by another publisher, which has its own key
    stream.delete()
    assert all_keys(client) == before
    assert "s" not in client.streams()
    for use in (stream.describe, stream.delete, lambda: stream.offset_at(at(0)), stream.subscriber):
        with pytest.raises(meteor.StreamNotFound, match="'s' no longer exists"):
            use()


def test_an_old_handle_cannot_delete_a_recreated_stream(client: meteor.Client) -> None:
    old = client.stream("s", create=True)
    old.delete()
    new = client.stream("s", create=True)
    fill(new, 3)
    for use in (old.delete, old.subscriber, lambda: offsets(old)):
        with pytest.raises(meteor.LogTruncated, match="recreated"):
            use()
    assert offsets(new) == [0, 1, 2]


# Codecs


@pytest.mark.parametrize(
    ("codec", "values"),
    [
        ("bytes", [b"", b"\x00\xff"]),
        ("text", ["", "gr\u00fc\u00df"]),
        ("json", [None, 1.5, {"a": [1, "x"]}, "text"]),
        ("msgpack", [None, 1.5, {"a": [1, b"x"]}, b"bytes"]),
    ],
)
def test_a_streams_codec_encodes_and_decodes(
    client: meteor.Client, codec: CodecName, values: list[Any]
) -> None:
    stream = client.stream("s", codec=codec)
    with stream.publisher() as pub, stream.subscriber() as sub:
        for each in values:
            pub.publish(each).result()
        pub.publish_many(values).result()
        found: list[Any] = []
        while len(found) < 2 * len(values):
            found += sub.poll(timeout=5).values()
        assert found == values * 2
        sub.seek(0)
        assert sub.poll().values() == values * 2
    with stream.subscriber(initial_offset="earliest", codec="bytes") as raw:
        assert {type(each) for each in raw.poll().values()} == {bytes}


def test_a_value_that_cannot_be_decoded_is_reported_with_its_raw_record_and_can_be_skipped(
    client: meteor.Client,
) -> None:
    stream = client.stream("s", create=True)
    with stream.publisher() as pub:
        pub.publish_many([b"1", b"{", b"3"], keys=[b"a", b"b", b"c"]).result()
    with stream.subscriber(initial_offset="earliest", codec="json") as sub:
        records = iter(sub)
        assert next(records).value == 1
        with pytest.raises(meteor.DecodeError) as caught:
            next(records)
        bad = caught.value.record
        assert (bad.offset, bad.value, bad.key) == (1, b"{", b"b")
        assert caught.value.stream == "s"
        sub.seek(bad.offset + 1)
        assert next(iter(sub)).value == 3


def test_a_codec_can_be_any_object_that_encodes_and_decodes(client: meteor.Client) -> None:
    class Upper:
        def encode(self, value: Any) -> bytes:
            return str(value).lower().encode()

        def decode(self, data: bytes) -> str:
            return data.decode().upper()

    stream = client.stream("s", create=True)
    with stream.publisher(codec=Upper()) as pub:
        pub.publish("Value 0")
        pub.publish_many(["Value 1"])
    with stream.subscriber(initial_offset="earliest", codec="bytes") as raw:
        assert raw.poll().values() == [b"value 0", b"value 1"]
    with stream.subscriber(initial_offset="earliest", codec=Upper()) as sub:
        assert sub.poll().values() == ["VALUE 0", "VALUE 1"]


def test_fake_server_wakes_waiting_readers() -> None:
    with meteor.connect("fake://") as m:
        stream = m.stream("s", create=True)
        with stream.subscriber() as sub, ThreadPoolExecutor(1) as pool:
            polled = pool.submit(sub.poll, 20)
            fill(stream, 2)
            assert check_values(polled.result(10)) in ([0, 1], [0])
            drain(sub)


def test_an_old_handle_for_a_recreated_stream_raises(client: meteor.Client) -> None:
    old = client.stream("s", create=True)
    old.delete()
    client.stream("s", create=True)
    now = datetime.now(UTC)
    for call in (old.describe, lambda: old.offset_at(now), old.subscriber, old.delete):
        with pytest.raises(meteor.LogTruncated, match="recreated"):
            call()
