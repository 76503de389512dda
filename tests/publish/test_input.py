"""Wrong arguments raise an error with a full sentence before anything is sent or written.

Most cases run against a real server whose whole contents must be the same afterwards. Well-formed
arguments that are too large, too late or beyond the end are refused in the same way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import redis

import meteor_py as meteor
from meteor_py.records.config import OFFSET_MAX, RECORD_BYTES_MAX
from tests.support.readers import everything, fill
from tests.support.servers import plain_client

NAIVE = datetime(2026, 1, 1)
MANY = 300  # so many values that publish_many() converts a list to Arrow


@pytest.fixture
def client(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


@pytest.fixture
def plain(url: str) -> Iterator[redis.Redis]:
    with plain_client(url) as p:
        yield p


def check_refused(use: Callable[[], object], plain: redis.Redis, *allowed: type[Exception]) -> str:
    """Check that ``use`` raises an error with a full sentence and changes nothing on the server."""
    before = everything(plain)
    with pytest.raises(allowed or (ValueError, TypeError)) as caught:
        use()
    message = str(caught.value)
    assert re.fullmatch(r"(?s)\S.{15,}\.", message), message
    assert everything(plain) == before
    return message


# Names and settings


@pytest.mark.parametrize(
    "name",
    [
        "", ".", ".hidden", "a b", "a/b", "../a", "a{b}", "{a}", "a:b", "a*", "\u00fc", "a\n",
        "a\0b", "x" * 129, "x" * 100_000, b"bytes", None, 5, True, "..", "a\\b", "a\rb", "\x1b[2J",
        "a\x9bb", "a\u202eb", "$(reboot)", "a'b", "a?b", "[a]", "a;b", "a\u200b", "\ud800",
    ],
)  # fmt: skip
@pytest.mark.parametrize("create", [True, False])
def test_an_invalid_name_is_refused_and_creates_nothing(
    client: meteor.Client, plain: redis.Redis, name: Any, create: bool
) -> None:
    message = check_refused(lambda: client.stream(name, create=create), plain)
    assert len(message) < 500


@pytest.mark.parametrize("name", ["a", "A.b-c_9", "-", "_", "9", "x" * 128])
def test_every_valid_name_is_accepted(client: meteor.Client, name: str) -> None:
    fill(client.stream(name, create=True), 1)
    assert client.streams() == [name]


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity": 0}, {"capacity": -1}, {"capacity": OFFSET_MAX + 1}, {"capacity": 1.5},
        {"capacity": "5"}, {"capacity": True}, {"compression": "gzip"}, {"compression": 1},
        {"checksum": 1}, {"checksum": "yes"}, {"codec": "pickle"}, {"codec": object()},
    ],
)  # fmt: skip
def test_invalid_stream_settings_create_and_change_nothing(
    client: meteor.Client, plain: redis.Redis, settings: dict[str, Any]
) -> None:
    check_refused(lambda: client.stream("new", **settings), plain)
    stream = client.stream("old", create=True)
    if "codec" not in settings:
        check_refused(lambda: stream.configure(**settings), plain)


# Reading


@pytest.mark.parametrize(
    "options",
    [
        *({"initial_offset": o} for o in ("first", 5, -1, 1.5, None, True, NAIVE)),
        {"initial_offset": 5, "group": "g"}, {"initial_offset": NAIVE, "group": "g"},
        {"on_gap": "ignore"}, {"on_gap": None}, {"codec": "pickle"}, {"codec": object()},
    ],
)  # fmt: skip
def test_invalid_subscriber_settings_are_refused(
    client: meteor.Client, plain: redis.Redis, options: dict[str, Any]
) -> None:
    stream = client.stream("s", create=True)
    check_refused(lambda: stream.subscriber(**options), plain)


@pytest.mark.parametrize(
    "options",
    [
        *({"timeout": t} for t in (-1, -0.001, math.inf, math.nan, 1e9, "1", True)),
        *({"max_records": n} for n in (0, -1, 1.5, "1", None, True)),
    ],
)
def test_invalid_poll_arguments_are_refused_and_the_subscriber_stays_usable(
    client: meteor.Client, plain: redis.Redis, options: dict[str, Any]
) -> None:
    stream = client.stream("s", create=True)
    fill(stream, 3)
    with stream.subscriber(initial_offset="earliest") as sub:
        check_refused(lambda: sub.poll(**options), plain)
        assert list(sub.poll(timeout=0).offsets) == [0, 1, 2]


@pytest.mark.parametrize(
    "to",
    [-1, 4, OFFSET_MAX, OFFSET_MAX + 1, 1.5, True, None, b"0", "first", "", "1", NAIVE],
)
def test_an_invalid_seek_is_refused_and_does_not_move_the_position(
    client: meteor.Client, plain: redis.Redis, to: Any
) -> None:
    stream = client.stream("s", create=True)
    fill(stream, 3)
    with stream.subscriber(initial_offset="earliest") as sub:
        check_refused(lambda: sub.seek(to), plain)
        assert sub.position == 0
        assert list(sub.poll(timeout=0).offsets) == [0, 1, 2]


@pytest.mark.parametrize(
    "time", [NAIVE, NAIVE.date(), 1.5, True, None, "now", -1, datetime(1969, 12, 31, tzinfo=UTC)]
)
def test_offset_at_refuses_an_invalid_time(
    client: meteor.Client, plain: redis.Redis, time: Any
) -> None:
    stream = client.stream("s", create=True)
    check_refused(lambda: stream.offset_at(time), plain)


@pytest.mark.parametrize(
    ("start", "stop"),
    [(-1, None), (0, -1), (0, 1.5), ("first", None), (NAIVE, None), (None, None), (1.5, None)],
)
def test_read_refuses_an_invalid_range(
    client: meteor.Client, plain: redis.Redis, start: Any, stop: Any
) -> None:
    stream = client.stream("s", create=True)
    check_refused(lambda: stream.read(start, stop), plain)


def test_reading_from_beyond_the_end_is_refused(client: meteor.Client, plain: redis.Redis) -> None:
    stream = client.stream("s", create=True)
    fill(stream, 3)
    check_refused(lambda: list(stream.read(4)), plain)
    assert list(stream.read(3)) == []


# Publishing


@pytest.mark.parametrize(
    "options",
    [
        {"linger": -1}, {"linger": math.nan}, {"linger": "1"}, {"compression": "gzip"},
        {"acks": -1}, {"acks": 1.5}, {"acks": True}, {"delivery_timeout": 0},
        {"delivery_timeout": math.inf}, {"max_pending_bytes": 0}, {"max_pending_bytes": 1.5},
    ],
)  # fmt: skip
def test_invalid_publisher_settings_are_refused(
    client: meteor.Client, plain: redis.Redis, options: dict[str, Any]
) -> None:
    stream = client.stream("s", create=True)
    check_refused(lambda: stream.publisher(**options), plain)


BAD_RECORDS: dict[str, dict[str, Any]] = {
    "text": {"value": "text"},
    "a number": {"value": 5},
    "nothing": {"value": None},
    "a list": {"value": [1]},
    "a key that is not text": {"value": b"", "key": "\ud800"},
    "a number as a key": {"value": b"", "key": 5},
    "headers in a list": {"value": b"", "headers": [("a", b"b")]},
    "a header value that is not text": {"value": b"", "headers": {"a": "\ud800"}},
    "a number as a header value": {"value": b"", "headers": {"a": 5}},
    "no header value": {"value": b"", "headers": {"a": None}},
    "bytes as a header name": {"value": b"", "headers": {b"a": b"b"}},
    "a header name that is not text": {"value": b"", "headers": {"\ud800": b"b"}},
    "too many headers": {"value": b"", "headers": {str(n): b"" for n in range(10_001)}},
    "a naive time": {"value": b"", "timestamp": NAIVE},
    "a time before 1970": {"value": b"", "timestamp": -1},
    "a time after 9999": {"value": b"", "timestamp": 10**15},
    "seconds": {"value": b"", "timestamp": 1.5},
    "whole seconds": {"value": b"", "timestamp": 1_700_000_000},
    "a boolean as a time": {"value": b"", "timestamp": True},
    "a word as a time": {"value": b"", "timestamp": "now"},
}


@pytest.mark.parametrize("what", BAD_RECORDS)
def test_an_invalid_record_is_refused_and_the_publisher_stays_usable(
    client: meteor.Client, plain: redis.Redis, what: str
) -> None:
    record = BAD_RECORDS[what]
    stream = client.stream("s", create=True)
    columns = {"key": "keys", "headers": "headers", "timestamp": "timestamps"}
    with stream.publisher() as pub:
        check_refused(lambda: pub.publish(**record), plain)
        for n in (3, MANY):
            values = [b"good"] * (n - 1) + [record["value"]]
            others = {columns[k]: [None] * (n - 1) + [v] for k, v in record.items() if k != "value"}
            check_refused(lambda v=values, o=others: pub.publish_many(v, **o), plain)  # type: ignore[misc]
        assert pub.publish(b"good").result() == 0


@pytest.mark.parametrize("n", [1, 3, MANY])
def test_text_keys_and_headers_are_published_as_utf8(client: meteor.Client, n: int) -> None:
    stream = client.stream("s", ordering_key="key")
    with stream.publisher() as pub:
        if n == 1:
            pub.publish(b"v", key="gr\u00fcn", headers={"h": "gr\u00fcn", "raw": b"\xff"})
        else:
            pub.publish_many(
                [b"v"] * n,
                keys=["gr\u00fcn", *[b"gr\xc3\xbcn"] * (n - 1)],
                headers=[{"h": "gr\u00fcn", "raw": b"\xff"}] * n,
            )
    for batch in stream.read():
        for record in batch:
            assert record.key == b"gr\xc3\xbcn"
            assert record.headers == {"h": b"gr\xc3\xbcn", "raw": b"\xff"}
    assert stream.end().offset == n


@pytest.mark.parametrize("times", [[5, 1_700_000_000, 10**12], [1_700_000_000]])
def test_timestamps_in_seconds_are_refused_with_a_hint(
    client: meteor.Client, plain: redis.Redis, times: list[int]
) -> None:
    column = times * MANY
    with client.stream("s").publisher() as pub:
        for timestamps in (column, pa.array(column)):
            message = check_refused(
                lambda t=timestamps: pub.publish_many([b""] * len(column), timestamps=t),  # type: ignore[misc]
                plain,
                ValueError,
            )
            assert "1700000000 looks like a time in seconds" in message
            assert "Multiply it by 1000" in message
        # As a datetime or an Arrow timestamp, a time in January 1970 is accepted.
        in_january = datetime(1970, 1, 20, tzinfo=UTC)
        assert pub.publish(b"", timestamp=in_january).result(10) == 0
        early = pa.array([in_january] * MANY, pa.timestamp("ms", tz="UTC"))
        assert pub.publish_many([b""] * MANY, timestamps=early).result(10) == 1


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        [1, {"a": -math.inf}],
        {"a": None, "b": math.nan},
        {"a": msgspec.Raw(b"null"), "b": math.nan},
    ],
)
def test_json_codec_refuses_nan_and_infinity(
    client: meteor.Client, plain: redis.Redis, value: Any
) -> None:
    with client.stream("s", codec="json").publisher() as pub:
        for call in (lambda: pub.publish(value), lambda: pub.publish_many([None, value])):
            assert "msgpack" in check_refused(call, plain, ValueError)
        assert pub.publish({"a": None, "b": 1e308}).result(10) == 0


@pytest.mark.parametrize("values", [b"bytes", "text", bytearray(b"b"), 5, None])
def test_publish_many_refuses_a_single_value(
    client: meteor.Client, plain: redis.Redis, values: Any
) -> None:
    with client.stream("s", codec="json").publisher() as pub:
        check_refused(lambda: pub.publish_many(values), plain, TypeError)


@pytest.mark.parametrize(
    ("value", "key", "headers"),
    [
        (RECORD_BYTES_MAX + 1, 0, 0),
        (RECORD_BYTES_MAX, 1, 0),
        (RECORD_BYTES_MAX - 5, 5, 5),
        (0, RECORD_BYTES_MAX + 1, 0),
        (0, 0, RECORD_BYTES_MAX),
    ],
)
def test_a_call_with_a_record_over_the_limit_is_refused_as_a_whole(
    client: meteor.Client, plain: redis.Redis, value: int, key: int, headers: int
) -> None:
    stream = client.stream("s", create=True)
    record: dict[str, Any] = {"value": b"x" * value}
    if key:
        record["key"] = b"x" * key
    if headers:
        record["headers"] = {"name": b"x" * headers}
    with stream.publisher() as pub:
        message = check_refused(lambda: pub.publish(**record), plain, meteor.RecordTooLarge)
        assert "max_record_bytes is 1048576" in message
        columns = {"key": "keys", "headers": "headers"}
        others = {columns[k]: [None, v, None] for k, v in record.items() if k != "value"}
        values = [b"good", record["value"], b"good"]
        for column in (values, pa.array(values)):
            check_refused(
                lambda v=column: pub.publish_many(v, **others),  # type: ignore[misc]
                plain,
                meteor.RecordTooLarge,
            )
        assert pub.publish(b"good").result() == 0


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_a_record_of_exactly_the_maximum_size_is_read_back_unchanged(
    client: meteor.Client, compression: meteor.Compression
) -> None:
    stream = client.stream("s", compression=compression, checksum=True)
    value, key = b"x" * (RECORD_BYTES_MAX - 7), b"key"
    with stream.publisher() as pub:
        pub.publish(value, key=key, headers={"n": b"abc"}).result()
        pub.publish_many([b"a", value, b"b"], keys=[key, key, None]).result()
        pub.publish_many(pa.array([b"a", value + b"1234567", b"b"])).result()
    with stream.subscriber(initial_offset="earliest") as sub:
        records: list[meteor.Record] = []
        while batch := sub.poll(timeout=0):
            records += batch
    assert [len(r.value) for r in records] == [
        len(value), 1, len(value), 1, 1, RECORD_BYTES_MAX, 1,
    ]  # fmt: skip
    assert records[0].value == value
    assert (records[0].key, records[0].headers) == (key, {"n": b"abc"})


MS = pa.timestamp("ms", tz="UTC")
BAD_COLUMNS: dict[str, dict[str, Any]] = {
    "no values": {"values": []},
    "no values in Arrow": {"values": pa.array([], pa.binary())},
    "fewer keys": {"values": [b"a", b"b"], "keys": [b"k"]},
    "more headers": {"values": [b"a"], "headers": [None, None]},
    "fewer times": {"values": [b"a", b"b"], "timestamps": [1]},
    "fewer keys in Arrow": {"values": pa.array([b"a", b"b"]), "keys": pa.array([b"k"])},
    "numbers in Arrow": {"values": pa.array([1, 2])},
    "a null in Arrow": {"values": pa.array([b"a", None])},
    "keys that are numbers in Arrow": {"values": pa.array([b"a"]), "keys": pa.array([1])},
    "times without a zone in Arrow": {
        "values": pa.array([b"a"]), "timestamps": pa.array([1], pa.timestamp("ms"))
    },
    "times out of range in Arrow": {"values": pa.array([b"a"]), "timestamps": pa.array([-1])},
    "times after 9999 in Arrow": {
        "values": pa.array([b"a"]), "timestamps": pa.array([2**60], pa.timestamp("s", tz="UTC"))
    },
    "fractions as times in Arrow": {"values": pa.array([b"a"]), "timestamps": pa.array([1.5])},
    "too large in Arrow": {"values": pa.array([b"a", b"x" * (RECORD_BYTES_MAX + 1)])},
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_COLUMNS)
def test_invalid_columns_are_refused_as_a_whole(
    client: meteor.Client, plain: redis.Redis, what: str
) -> None:
    with client.stream("s").publisher() as pub:
        check_refused(lambda: pub.publish_many(**BAD_COLUMNS[what]), plain)
        assert pub.publish(b"good").result() == 0


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_arrow_timestamps_can_have_any_unit_and_time_zone(client: meteor.Client, unit: str) -> None:
    time = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    stream = client.stream("s", create=True)
    with stream.publisher() as pub, stream.subscriber() as sub:
        times = pa.array([time, None], pa.timestamp(unit, tz="Europe/Berlin"))
        pub.publish_many(pa.array([b"a", b"b"]), timestamps=times).result()
        first, second = sub.poll()
    assert first.time == time
    assert second.timestamp == second.appended


def test_a_list_passed_to_publish_many_can_be_changed_right_after_the_call(
    client: meteor.Client,
) -> None:
    stream = client.stream("s", create=True)
    with stream.publisher(linger=0.05) as pub, stream.subscriber() as sub:
        for n in (3, MANY):
            values, keys_ = [b"v"] * n, [b"k"] * n
            ack = pub.publish_many(values, keys=keys_)
            values[:] = [b"changed"] * n
            keys_.clear()
            ack.result()
            batch = sub.poll(max_records=n)
            assert batch.values() == [b"v"] * n
            assert batch.keys() == [b"k"] * n


@pytest.mark.parametrize("timeout", [-1, math.nan, "1"])
def test_invalid_flush_and_close_timeouts_are_refused(
    client: meteor.Client, plain: redis.Redis, timeout: Any
) -> None:
    with client.stream("s").publisher() as pub:
        check_refused(lambda: pub.flush(timeout), plain)
        check_refused(lambda: pub.close(timeout), plain)
        assert pub.publish(b"still open").result() == 0


# Addresses


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan, "5", None, True])
def test_invalid_client_timeouts_are_refused(timeout: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^timeout must be .*\.$"):
        meteor.connect("fake://", timeout=timeout)


BAD_URLS = [
    "", "localhost", "localhost:6379", "http://h", "redis:/h", "REDIS", "redis://h:port",
    "redis://h:99999", "redis://[::1", "redis://h/first", "redis://h/1/2", "redis://h?db=x",
    "unix://", "embedded://data", "embedded://data/dir", "mysql://:geheim@h",
    "redis://:geheim@h:x", "redis://:ge/heim@h", "redis://:ge?heim@h", "redis://:ge#heim@h",
    "redis://u:1/geheim@h", "redis://u:geheim@h/x", "redis://:geheim@[::1", "u:geheim@h",
    "redis://h:x?password=geheim", "embedded://u:geheim@h", "redis://:geh eim@h:x",
    "redis://u:a'geheim@h:x", 5, b"redis://h",
]  # fmt: skip


@pytest.mark.parametrize("url", BAD_URLS)
def test_an_invalid_address_is_refused_without_showing_a_secret(url: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"(?s)^\S.{15,}\.$") as caught:
        meteor.connect(url)
    for part in ("geheim", "heim", "ge/", "ge?", "ge#"):
        assert part not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    "option",
    [
        "socket_timeout=1", "socket_connect_timeout=1", "retry_on_timeout=1", "retry_on_error=x",
        "retry=1", "protocol=3", "decode_responses=1", "health_check_interval=5", "encoding=utf-8",
        "max_connections=5", "driver_info=x", "socket_read_size=1", "maint_notifications_config=x",
        "legacy_responses=1", "connection_class=x", "anything=1", "anything=",
        "host=other", "path=/x",
    ],
)  # fmt: skip
def test_connection_options_that_affect_guarantees_cannot_be_set_in_the_address(
    option: str,
) -> None:
    name = option.partition("=")[0]
    with pytest.raises(ValueError, match=f"^'{name}' cannot be set in the URL, .*timeout"):
        meteor.connect(f"redis://h?{option}")
