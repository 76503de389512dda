"""Publishing without faults: batching, order, columns, limits, memory, invalid input.

test_acks.py covers outcomes. test_publisher_faults.py, test_publisher_outages.py and
test_publisher_model.py cover faults.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from random import Random
from typing import Any

import pyarrow as pa
import pytest

import meteor_py as meteor
from meteor_py.records.codec import CodecName
from meteor_py.records.config import (
    FRAME_BYTES_MAX,
    FRAME_RECORDS_MAX,
    RECORD_BYTES_MAX,
)
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, ProxiedStream, failure
from tests.support.servers import Server
from tests.support.waiting import eventually


@pytest.fixture
def proxied(server: Server, url: str) -> Iterator[ProxiedStream]:
    with ProxiedStream(server) as running:
        yield running


@pytest.fixture
def pub(proxied: ProxiedStream) -> meteor.Publisher:
    return proxied.publisher()


# Batching and order


def test_records_are_collected_in_one_frame_while_another_is_in_flight(
    proxied: ProxiedStream,
) -> None:
    pub = proxied.warm_publisher()
    ahead, gathered = proxied.queue_behind_one(pub, [[b"%d" % n for n in range(10)]])
    single = pub.publish(b"10")
    proxied.proxy.resume()
    assert [ahead.result(5), gathered.result(5), single.result(5)] == [1, 2, 12]
    assert proxied.frames() == [1, 1, 11]


def test_five_full_batches_are_in_flight_at_a_time(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher()
    proxied.queue_behind_one(pub, [[b"x"] * (8 * FRAME_RECORDS_MAX)])
    proxied.direct.execute_command("CLIENT", "PAUSE", 10_000, "WRITE")
    sent = proxied.proxy.counters.requests
    proxied.proxy.resume()
    eventually(lambda: proxied.proxy.counters.requests == sent + 5)
    for _ in range(50):  # long enough to send a sixth batch
        proxied.direct.ping()
    assert proxied.proxy.counters.requests == sent + 5
    proxied.direct.execute_command("CLIENT", "UNPAUSE")
    pub.flush(10)
    assert proxied.frames() == [1, 1] + [FRAME_RECORDS_MAX] * 8


def test_each_threads_records_are_in_call_order(proxied: ProxiedStream) -> None:
    pub = proxied.publisher()
    acks: dict[bytes, meteor.Ack] = {}

    def publish(thread: int) -> None:
        for n in range(500):
            value = b"%d:%d" % (thread, n)
            acks[value] = pub.publish(value, key=b"k" if n % 7 == 0 else None)

    threads = [threading.Thread(target=publish, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pub.flush(10)
    values = proxied.values()
    assert [values[ack.result()] for ack in acks.values()] == list(acks)
    for number in range(4):
        mine = [value for value in values if value.startswith(b"%d:" % number)]
        assert mine == [b"%d:%d" % (number, n) for n in range(500)]


def test_records_published_in_different_ways_keep_their_order(
    proxied: ProxiedStream, pub: meteor.Publisher, rng: Random
) -> None:
    expected: list[bytes] = []
    for _ in range(150):
        values = [b"%d" % (len(expected) + n) for n in range(rng.choice([1, 2, 50, 5000]))]
        match rng.choice(["one", "list", "arrow", "keyed"]):
            case "one":
                values = values[:1]
                pub.publish(values[0])
            case "list":
                pub.publish_many(values)
            case "arrow":
                pub.publish_many(pa.array(values))
            case "keyed":
                pub.publish_many(values, keys=[None if n % 2 else b"k" for n in range(len(values))])
        expected += values
    pub.flush(20)
    assert proxied.values() == expected


# publish_many


def as_values(count: int) -> list[bytes]:
    return [b"%d" % n * (n % 5) for n in range(count)]


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        iter,
        lambda values: (bytearray(value) for value in values),
        lambda values: [memoryview(value) for value in values],
        pa.array,
        lambda values: pa.array([value.decode() for value in values]),
        lambda values: pa.array(values, pa.large_binary()),
        lambda values: pa.chunked_array([values[:100], values[100:101], values[101:]]),
        lambda values: pa.array([b"before", *values, b"after"]).slice(1, len(values)),
        lambda values: pa.chunked_array([[b"a", *values[:70]], [*values[70:], b"z"]]).slice(
            1, len(values)
        ),
        lambda values: pa.array(values).dictionary_encode(),
    ],
)
@pytest.mark.parametrize("count", [1, 9_000])
def test_publish_many_takes_iterables_and_arrow_arrays(
    proxied: ProxiedStream, pub: meteor.Publisher, form: Callable[[list[bytes]], Any], count: int
) -> None:
    values = as_values(count)
    ack = pub.publish_many(form(values))
    assert ack.result(10) == 0
    assert ack.ranges == [range(count)]
    assert proxied.values() == values


@pytest.mark.parametrize("arrow", [False, True])
def test_keys_headers_and_timestamps_stay_with_their_records(
    proxied: ProxiedStream, pub: meteor.Publisher, arrow: bool
) -> None:
    count = 100
    rows: list[tuple[bytes, bytes | None, dict[str, bytes] | None, int | None]] = [
        (
            b"%d" % n,
            b"k%d" % n if n % 2 else None,
            {"h": b"%d" % n, "ü": b""} if n % 3 else None,
            n * 1000 if n % 5 else None,
        )
        for n in range(count)
    ]
    values, keys, headers, timestamps = zip(*rows, strict=True)
    pub.publish_many(
        pa.array(values) if arrow else values,
        keys=pa.array(keys) if arrow else keys,
        headers=headers,
        timestamps=pa.array(timestamps) if arrow else timestamps,
    )
    for value, key, header, timestamp in rows:
        pub.publish(value, key=key, headers=header, timestamp=timestamp)
    pub.flush(10)
    records = [record for batch in proxied.stream.read() for record in batch]
    assert [record.offset for record in records] == list(range(2 * count))
    for record, (value, key, header, timestamp) in zip(records, rows * 2, strict=True):
        assert (record.value, record.key) == (value, key)
        assert record.headers == (header or {}) or record.headers == header
        assert record.timestamp == (record.appended if timestamp is None else timestamp)


def test_arrow_timestamps_in_any_unit_become_ms(
    proxied: ProxiedStream, pub: meteor.Publisher
) -> None:
    moment = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
    for unit in ("s", "ms", "us", "ns"):
        column = pa.array([moment], pa.timestamp(unit, tz="UTC"))
        pub.publish_many(pa.array([b"x"]), timestamps=column)
    pub.flush(5)
    times = [record.time for batch in proxied.stream.read() for record in batch]
    assert times == [moment] * 4
    with pytest.raises(ValueError, match="time zone"):
        pub.publish_many(pa.array([b"x"]), timestamps=pa.array([moment], pa.timestamp("us")))


def test_ranges_show_where_another_publisher_published_in_between(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher()
    proxied.proxy.stall("replies")
    many = pub.publish_many([b"m"] * (8 * FRAME_RECORDS_MAX))
    proxied.wait_for_next(1 + FRAME_RECORDS_MAX)
    with proxied.stream.publisher() as other:
        between = other.publish(b"other").result(5)
    proxied.proxy.resume()
    assert many.result(10) == 1
    assert many.ranges == [range(1, between), range(between + 1, 2 + 8 * FRAME_RECORDS_MAX)]
    assert proxied.values()[between] == b"other"


# Frames and their limits


def test_a_frame_holds_at_most_4096_records(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher()
    proxied.queue_behind_one(pub, [[b""] * 5000, pa.array([b""] * 5000)])
    for _ in range(5000):
        pub.publish(b"")
    proxied.proxy.resume()
    pub.flush(10)
    assert proxied.frames() == [1, 1, 4096, 904, 4096, 904, 4096, 904]


def test_a_frame_holds_at_most_1_mib_and_a_large_record_gets_its_own_frame(
    proxied: ProxiedStream,
) -> None:
    values = [bytes(400_000)] * 3 + [bytes(RECORD_BYTES_MAX), b"", bytes(RECORD_BYTES_MAX - 1)]
    pub = proxied.warm_publisher()
    proxied.queue_behind_one(pub, [values, pa.array(values)])
    for value in values:
        pub.publish(value)
    proxied.proxy.resume()
    pub.flush(10)
    assert proxied.values() == [b"first", b"ahead", *values, *values, *values]
    for _, fields in proxied.entries():
        assert max(map(len, fields.values())) <= FRAME_BYTES_MAX + 1024
    assert max(proxied.frames()) == 2


def test_a_frame_holds_at_most_capacity_records(private_server: ServerFactory) -> None:
    with ProxiedStream(private_server(), capacity=10) as proxied:
        pub = proxied.warm_publisher()
        proxied.queue_behind_one(pub, [[b"%d" % n for n in range(25)]])
        proxied.proxy.resume()
        pub.flush(10)
        assert proxied.frames() == [10, 5]
        pub.publish_many(pa.array([b"%d" % n for n in range(25)]))
        pub.flush(10)
        assert proxied.frames() == [10, 5]
        assert proxied.values() == [b"%d" % n for n in range(10, 25)]


def test_many_threads_cannot_make_a_frame_too_large(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher(max_pending_bytes=400_000)
    proxied.proxy.delay(0.01)

    def publish_many() -> None:
        for _ in range(3):
            pub.publish_many([b"m"] * 4096)

    def publish() -> None:
        for _ in range(3000):
            pub.publish(b"s")

    threads = [threading.Thread(target=work) for work in (publish_many, publish) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    proxied.proxy.heal()
    pub.flush(10)
    assert max(proxied.frames()) <= FRAME_RECORDS_MAX
    assert proxied.next == 1 + 2 * 3 * 4096 + 2 * 3000


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_frames_are_compressed(proxied: ProxiedStream, compression: meteor.Compression) -> None:
    values = [b"the same words again and again %d" % n for n in range(1000)]
    with proxied.stream.publisher(compression=compression) as pub:
        pub.publish_many(values)
    assert proxied.formats() == [b"1v." + compression.encode()]
    size = sum(len(field) for _, fields in proxied.entries() for field in fields.values())
    assert size < sum(map(len, values)) / 2
    assert proxied.values() == values


# Lingering, memory


def test_linger_time_collects_records_into_one_frame(proxied: ProxiedStream) -> None:
    pub = proxied.publisher(linger=0.3)
    begun = time.monotonic()
    acks = [pub.publish(b"%d" % n) for n in range(20)]
    assert acks[-1].result(5) == 19
    assert time.monotonic() - begun > 0.25
    assert proxied.frames() == [20]


@pytest.mark.parametrize("end", ["flush", "close", "fill", "fill with a list"])
def test_flush_close_and_a_full_frame_end_the_linger_time(proxied: ProxiedStream, end: str) -> None:
    pub = proxied.publisher(linger=60)
    ack: meteor.Ack | meteor.ManyAck = pub.publish(b"x")
    begun = time.monotonic()
    match end:
        case "flush":
            pub.flush()
        case "close":
            pub.close()
        case "fill":
            for _ in range(FRAME_RECORDS_MAX - 1):
                ack = pub.publish(b"x")
        case "fill with a list":
            ack = pub.publish_many([b"x"] * (FRAME_RECORDS_MAX - 1))
    ack.result(5)
    assert time.monotonic() - begun < 5


def test_publishing_blocks_at_max_pending_bytes_and_continues_when_there_is_room(
    proxied: ProxiedStream,
) -> None:
    limit = 100_000
    pub = proxied.warm_publisher(max_pending_bytes=limit)
    proxied.proxy.stall("replies")
    taken: list[int] = []

    def publish() -> None:
        for n in range(400):
            pub.publish(bytes(1000))
            taken.append(n)

    thread = threading.Thread(target=publish)
    thread.start()
    proxied.wait_for_next(2)
    eventually(lambda: limit - 2 * 1064 < len(taken) * 1064 <= limit)
    for _ in range(50):
        proxied.direct.ping()
    assert len(taken) * 1064 <= limit
    proxied.proxy.resume()
    thread.join(10)
    pub.flush(10)
    assert proxied.next == 401


def hold_sender(proxied: ProxiedStream, pub: meteor.Publisher) -> threading.Event:
    """Hold a publisher's sender in a callback until the returned event is set."""
    release = threading.Event()
    proxied.proxy.stall("replies")
    pub.publish(b"x").add_done_callback(lambda _: release.wait(10))
    proxied.wait_for_next(2)
    proxied.proxy.resume()
    return release


def test_publisher_full_is_raised_if_no_record_is_settled_within_the_delivery_timeout(
    proxied: ProxiedStream,
) -> None:
    pub = proxied.warm_publisher(max_pending_bytes=10_000, delivery_timeout=0.3)
    hold = hold_sender(proxied, pub)
    partly = pub.publish_many([bytes(1000)] * 50)  # there is room for nine of them
    begun = time.monotonic()
    with pytest.raises(meteor.PublisherFull, match="max_pending_bytes") as caught:
        pub.publish(bytes(1000))
    assert caught.value.retriable
    assert 0.25 < time.monotonic() - begun < 5
    assert not partly.done()  # the nine accepted records are still pending
    hold.set()
    assert isinstance(failure(partly), meteor.PublisherFull)
    assert partly.ranges == []  # the nine accepted records have timed out too
    assert pub.publish(b"later").result(5) == proxied.next - 1


def test_flush_reports_the_part_of_publish_many_that_found_no_room(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher(max_pending_bytes=10_000, delivery_timeout=0.3)
    hold = hold_sender(proxied, pub)
    pub.publish_many([bytes(1000)] * 50)
    hold.set()
    with pytest.raises(meteor.PublisherFull):
        pub.flush(5)


# Invalid input


NAIVE = datetime(2024, 1, 1)


def broken() -> Iterator[bytes]:
    yield b"a"
    raise LookupError


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda pub: pub.publish("text"), TypeError),
        (lambda pub: pub.publish(1), TypeError),
        (lambda pub: pub.publish(None), TypeError),
        (lambda pub: pub.publish(b"", key="\ud800"), ValueError),
        (lambda pub: pub.publish(b"", headers={"a": 5}), TypeError),
        (lambda pub: pub.publish(b"", headers={1: b""}), TypeError),
        (lambda pub: pub.publish(b"", headers=[("a", b"")]), TypeError),
        (lambda pub: pub.publish(b"", headers={"\ud800": b""}), ValueError),
        (lambda pub: pub.publish(b"", timestamp=NAIVE), ValueError),
        (lambda pub: pub.publish(b"", timestamp=-1), ValueError),
        (lambda pub: pub.publish(b"", timestamp=2**63), ValueError),
        (lambda pub: pub.publish(b"", timestamp=1.5), TypeError),
        (lambda pub: pub.publish(b"", timestamp=True), TypeError),
        (lambda pub: pub.publish(bytes(RECORD_BYTES_MAX + 1)), meteor.RecordTooLarge),
        (lambda pub: pub.publish(bytes(RECORD_BYTES_MAX), key=b"k"), meteor.RecordTooLarge),
        (lambda pub: pub.publish(bytes(RECORD_BYTES_MAX), headers={"h": b""}), ValueError),
        (lambda pub: pub.publish_many([]), ValueError),
        (lambda pub: pub.publish_many(pa.array([], pa.binary())), ValueError),
        (lambda pub: pub.publish_many(pa.chunked_array([], pa.binary())), ValueError),
        (lambda pub: pub.publish_many([b"a", "text"]), TypeError),
        (lambda pub: pub.publish_many(b"bytes"), TypeError),
        (lambda pub: pub.publish_many("text"), TypeError),
        (lambda pub: pub.publish_many(5), TypeError),
        (lambda pub: pub.publish_many(broken()), LookupError),
        (lambda pub: pub.publish_many([b"a"], keys=[]), ValueError),
        (lambda pub: pub.publish_many([b"a"], keys=[1]), TypeError),
        (lambda pub: pub.publish_many([b"a"], keys=b"k"), TypeError),
        (lambda pub: pub.publish_many([b"a"], headers=[{}, {}]), ValueError),
        (lambda pub: pub.publish_many([b"a"], headers={"h": b""}), TypeError),
        (lambda pub: pub.publish_many([b"a"], timestamps=[NAIVE]), ValueError),
        (lambda pub: pub.publish_many([b"", bytes(RECORD_BYTES_MAX + 1)]), ValueError),
        (lambda pub: pub.publish_many(pa.array([1])), TypeError),
        (lambda pub: pub.publish_many(pa.array([b"a", None])), TypeError),
        (lambda pub: pub.publish_many(pa.array([b"", bytes(RECORD_BYTES_MAX + 1)])), ValueError),
        (lambda pub: pub.publish_many(pa.array([b"a"]), keys=[b"k", b"k"]), ValueError),
        (lambda pub: pub.publish_many(pa.array([b"a"]), keys=[1]), TypeError),
        (lambda pub: pub.publish_many(pa.array([b"a"]), keys=["\ud800"]), ValueError),
        (lambda pub: pub.publish_many(pa.array([b"a"]), headers=[{"h": 5}]), TypeError),
        (lambda pub: pub.publish_many(pa.array([b"a"]), headers=[{"\ud800": b""}]), ValueError),
        (lambda pub: pub.publish_many(pa.array([b"a"]), timestamps=[NAIVE]), ValueError),
        (lambda pub: pub.publish_many(pa.array([b"a"]), timestamps=pa.array([-1])), ValueError),
        (lambda pub: pub.publish_many(pa.array([b"a"]), timestamps=pa.array([1.5])), TypeError),
    ],
)
def test_invalid_input_raises_and_nothing_is_written(
    proxied: ProxiedStream,
    pub: meteor.Publisher,
    call: Callable[[meteor.Publisher], object],
    error: type[Exception],
) -> None:
    with pytest.raises(error):
        call(pub)
    pub.flush(5)
    assert (proxied.entries(), proxied.producer_keys()) == ([], [])
    assert pub.publish(b"fine").result(5) == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("linger", -1), ("linger", float("nan")), ("acks", -1), ("delivery_timeout", 0),
        ("delivery_timeout", float("inf")), ("max_pending_bytes", 0), ("compression", "gzip"),
    ],
)  # fmt: skip
def test_error_names_the_invalid_publisher_setting(
    proxied: ProxiedStream, setting: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=setting):
        proxied.stream.publisher(**{setting: value})


@pytest.mark.parametrize(
    ("codec", "value", "wire", "wrong"),
    [
        ("text", "grün", "grün".encode(), b"bytes"),
        ("json", {"a": [1, None]}, b'{"a":[1,null]}', object()),
        ("msgpack", {"a": 1}, b"\x81\xa1a\x01", object()),
    ],
)
def test_the_streams_codec_encodes_values(
    url: str, codec: CodecName, value: Any, wire: bytes, wrong: Any
) -> None:
    with meteor.connect(url) as m, m.stream(NAME, codec=codec).publisher() as pub:
        with pytest.raises(TypeError):
            pub.publish(wrong)
        with pytest.raises(TypeError):
            pub.publish_many([value, wrong])
        assert pub.publish(value).result(5) == 0
        assert pub.publish_many([value, value]).result(5) == 1
        assert pub.publish_many(pa.array([wire])).result(5) == 3
        batches = list(m.stream(NAME, create=True).read())
        assert [row for batch in batches for row in batch.to_arrow()["value"].to_pylist()] == [
            wire
        ] * 4
        with m.stream(NAME, create=True).subscriber(initial_offset="earliest") as sub:
            assert sub.poll().values() == [value] * 4


def test_a_record_over_the_frame_limit_gets_its_own_frame_if_allowed(url: str) -> None:
    large = bytes(5 * RECORD_BYTES_MAX)
    with meteor.connect(url) as m:
        stream = m.stream("s", create=True)
        with stream.publisher(max_record_bytes=len(large)) as pub:
            pub.publish_many([b"before", large, b"after"])
            pub.publish_many(pa.array([b"x", large]))
            pub.publish(large, key=b"").result()
            with pytest.raises(meteor.RecordTooLarge, match="max_record_bytes"):
                pub.publish(large, key=b"k")
        lengths = [len(value) for batch in stream.read() for value in batch.values()]
        assert lengths == [6, len(large), 5, 1, len(large), len(large)]


@pytest.mark.parametrize("column", ["keys", "headers", "timestamps"])
@pytest.mark.parametrize("count", [1, 1000])
def test_a_single_value_as_a_column_is_refused(url: str, column: str, count: int) -> None:
    with meteor.connect(url) as m, m.stream("s").publisher() as pub:
        wrongs: list[Any] = [5, "text", b"bytes", {"a": b"b"}]
        for wrong in wrongs:
            with pytest.raises(TypeError, match=f"takes {column} as a list"):
                pub.publish_many([b"x"] * count, **{column: wrong})
