"""Shared groups: settings, ordering keys, description, purge and deletion."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from tests.support.readers import later_than_all
from tests.support.sharing import GROUP, STREAM, Queue, check, discard, drain, offsets
from tests.support.waiting import eventually


@pytest.fixture
def client(any_url: str) -> Iterator[meteor.Client]:
    with meteor.connect(any_url) as client:
        yield client


@pytest.fixture
def stream(client: meteor.Client) -> Iterator[meteor.Stream]:
    stream = client.stream("s", ordering_key="key")
    yield stream
    check(stream)


def publish(stream: meteor.Stream, *records: tuple[bytes | None, dict[str, bytes] | None]) -> None:
    with stream.publisher() as pub:
        for key, headers in records:
            pub.publish(b"value", key=key, headers=headers)


def keys_of(stream: meteor.Stream, **options: Any) -> list[bytes]:
    """Return the ordering keys of all records, as a consumer sees them."""
    with stream.shared_subscriber("look", **options) as sub:
        return [record.ordering_key for record in sorted(drain(sub), key=lambda each: each.offset)]


# Settings


def test_default_key_implies_that_keyless_records_are_ordered(client: meteor.Client) -> None:
    stream = client.stream("t", ordering_key="key")
    stream.shared_subscriber("parallel").close()
    stream.shared_subscriber("ordered", default_key="rest").close()
    found = [stream.shared_group(name).describe().config for name in ("parallel", "ordered")]
    assert [config.keyless for config in found] == ["free", "default"]
    stream.shared_subscriber("ordered", default_key="rest").close()
    with pytest.raises(meteor.GroupConfigMismatch, match="default_key"):
        stream.shared_subscriber("parallel", default_key="rest")


def test_existing_group_keeps_its_keyless_setting(client: meteor.Client) -> None:
    stream = client.stream("t", ordering_key="key")
    stream.shared_subscriber("old", keyless="default").close()
    publish(stream, (None, None), (None, None))
    with stream.shared_subscriber("old") as one, stream.shared_subscriber("old") as two:
        assert one.settings.keyless == "default"
        (first,) = one.poll(5, max_records=1)
        assert (first.offset, two.poll(0)) == (0, [])


@pytest.mark.parametrize("max_per_key", [0, 10_000])
def test_one_key_can_use_the_whole_prefetch(client: meteor.Client, max_per_key: int) -> None:
    stream = client.stream("t", ordering_key="key")
    publish(stream, *[(b"A", None)] * 100)
    with stream.shared_subscriber("g", max_per_key=max_per_key, prefetch=80) as sub:
        assert offsets(sub.poll(5)) == [*range(80)]
    with stream.shared_subscriber("g", max_per_key=10_000) as sub:  # 0 means 10,000
        assert sub.settings.max_per_key == 10_000
    with stream.shared_subscriber("default", prefetch=80) as sub:
        assert offsets(sub.poll(5)) == [*range(32)]


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"max_per_key": -1}, ValueError, "max_per_key"),
        ({"max_per_key": 10_001}, ValueError, "max_per_key"),
        ({"max_per_key": "1"}, TypeError, "max_per_key"),
        ({"prefetch": 0}, ValueError, "prefetch"),
        ({"prefetch_bytes": 0}, ValueError, "prefetch_bytes"),
        ({"prefetch": 10_001}, ValueError, "prefetch"),
        ({"lease_ttl": 0.01}, ValueError, "lease_ttl"),
        ({"lease_ttl": 1e9}, ValueError, "lease_ttl"),
        ({"max_deliveries": -1}, ValueError, "max_deliveries"),
        ({"max_deliveries": 1}, ValueError, "only a second delivery shows"),
        ({"max_deliveries": 1_001}, ValueError, "max_deliveries"),
        ({"dead_letter": "a b"}, ValueError, "dead-letter stream"),
        ({"dead_letter": "s"}, ValueError, "its own dead letters"),
        ({"on_poison": "stop"}, ValueError, "on_poison"),
        ({"keyless": "all"}, ValueError, "keyless"),
        ({"keyless": "free", "default_key": "d"}, ValueError, "Omit default_key"),
        ({"default_key": ""}, ValueError, "1 to 256 bytes"),
        ({"default_key": "x" * 257}, ValueError, "1 to 256 bytes"),
        ({"default_key": b"d"}, TypeError, "default_key"),
        ({"max_poll_interval": 0}, ValueError, "max_poll_interval"),
        ({"on_gap": "ignore"}, ValueError, "on_gap"),
        ({"on_gap_skipped": 1}, TypeError, "on_gap_skipped"),
        ({"initial_offset": "first"}, ValueError, "initial_offset"),
    ],
)
def test_invalid_settings_are_refused_and_create_nothing(
    stream: meteor.Stream, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        stream.shared_subscriber("g", **settings)
    assert stream.groups() == []


@pytest.mark.parametrize("name", ["", "a b", ".archiver", "x" * 129])
def test_invalid_group_name_is_refused(stream: meteor.Stream, name: str) -> None:
    with pytest.raises(ValueError, match="name of a group"):
        stream.shared_subscriber(name)


def test_stream_without_an_ordering_key_refuses_shared_subscribers(client: meteor.Client) -> None:
    plain = client.stream("plain", create=True)
    with pytest.raises(meteor.MeteorError, match="has no ordering key"):
        plain.shared_subscriber("g")
    with pytest.raises(meteor.GroupNotFound):
        plain.shared_group("g")
    assert client.redis.exists(keys.index("plain")) == 0


@pytest.mark.parametrize(
    ("setting", "first", "other"),
    [
        ("max_per_key", 7, 8),
        ("lease_ttl", 20.0, 30.0),
        ("max_deliveries", 4, 0),
        ("dead_letter", "dead", "other"),
        ("on_poison", "park", "skip"),
        ("default_key", "mine", "yours"),
        ("keyless", "free", "default"),
    ],
)
def test_settings_must_match_those_of_an_existing_group_or_be_omitted(
    stream: meteor.Stream, setting: str, first: Any, other: Any
) -> None:
    with stream.shared_subscriber("g", **{setting: first}) as sub:
        assert getattr(sub.settings, setting) == first
        with stream.shared_subscriber("g") as second:
            assert second.settings == sub.settings
        with stream.shared_subscriber("g", **{setting: first}):
            pass
        with pytest.raises(meteor.GroupConfigMismatch, match=f"{setting}={first!r}") as refused:
            stream.shared_subscriber("g", **{setting: other})
        assert (refused.value.stream, refused.value.group) == ("s", "g")


def test_each_consumer_has_its_own_prefetch(stream: meteor.Stream) -> None:
    publish(stream, *[(b"%d" % n, None) for n in range(10)])
    with (
        stream.shared_subscriber("g", prefetch=2) as small,
        stream.shared_subscriber("g", prefetch=100) as large,
    ):
        assert len(small.poll(5)) == 2
        assert len(large.poll(5)) == 8


def test_shared_group_and_subscriber_group_cannot_share_a_name(stream: meteor.Stream) -> None:
    stream.subscriber(group="one").close()
    with pytest.raises(meteor.GroupConfigMismatch, match="one reader at a time"):
        stream.shared_subscriber("one")
    stream.shared_subscriber("many").close()
    with pytest.raises(meteor.GroupConfigMismatch, match="shared"):
        stream.subscriber(group="many")
    with pytest.raises(meteor.GroupConfigMismatch, match="shared"):
        stream.seek_group("many", 0, force=True)
    assert [(group.name, group.kind) for group in stream.groups()] == [
        ("many", "shared"),
        ("one", "exclusive"),
    ]
    stream.delete_group("many")
    stream.delete_group("one")
    with stream.subscriber(group="many") as now_for_one, stream.shared_subscriber("one") as shared:
        assert now_for_one.poll(0).values() == []
        assert shared.group == "one"


def test_new_group_starts_at_initial_offset(stream: meteor.Stream) -> None:
    publish(stream, (b"a", None), (b"b", None))
    with (
        stream.shared_subscriber("first") as first,
        stream.shared_subscriber("last", initial_offset="latest") as last,
    ):
        publish(stream, (b"c", None))
        assert offsets(first.poll(5)) == [0, 1, 2]
        assert offsets(last.poll(5)) == [2]
        assert (first.confirmed, last.confirmed) == (0, 2)
    with pytest.raises(meteor.GroupNotFound):
        stream.shared_subscriber("none", initial_offset="none")
    with stream.shared_subscriber("first", initial_offset="latest") as again:
        assert offsets(again.poll(5)) == [0, 1, 2]


def test_new_group_can_start_at_an_offset_or_a_time(stream: meteor.Stream) -> None:
    publish(stream, (b"a", None), (b"b", None))
    since = datetime.fromtimestamp(eventually(lambda: later_than_all(stream)) / 1000, UTC)
    publish(stream, (b"c", None))
    with (
        stream.shared_subscriber("offset", initial_offset=1) as first,
        stream.shared_subscriber("time", initial_offset=since) as second,
    ):
        assert offsets(first.poll(5)) == [1, 2]
        assert offsets(second.poll(5)) == [2]
    with pytest.raises(ValueError, match="beyond the end of stream"):
        stream.shared_subscriber("beyond", initial_offset=4)


# Ordering keys


@pytest.mark.parametrize("ordering_key", ["", "keys", "header", "header:", "value"])
def test_invalid_ordering_key_setting_is_refused(client: meteor.Client, ordering_key: str) -> None:
    with pytest.raises(ValueError, match="ordering_key must be"):
        client.stream("t", ordering_key=ordering_key)
    assert client.streams() == []


def test_ordering_key_setting_cannot_be_changed(client: meteor.Client) -> None:
    stream = client.stream("t", ordering_key="header:cart")
    assert client.stream("t", create=True).config.ordering_key == "header:cart"
    assert client.stream("t", ordering_key="header:cart").incarnation == stream.incarnation
    with pytest.raises(meteor.MeteorError, match="ordering_key"):
        client.stream("t", ordering_key="key")
    client.stream("plain", create=True)
    with pytest.raises(meteor.MeteorError, match="ordering_key"):
        client.stream("plain", ordering_key="key")
    with pytest.raises(meteor.StreamConfigMismatch, match="create another stream"):
        stream.configure(ordering_key="header:other")


@pytest.mark.parametrize("how", ["one by one", "lists", "arrow"])
@pytest.mark.parametrize("ordering_key", ["key", "header:cart"])
def test_ordering_key_comes_from_key_or_header_however_records_are_published(
    client: meteor.Client, ordering_key: str, how: str
) -> None:
    stream = client.stream("t", ordering_key=ordering_key)
    ids = [b"a", None, b"", b"b", b"a", b"\xff\x00:,", b"x" * 256]
    wanted = [each or b"meteor.no-group" for each in ids]
    other = b"irrelevant"
    if ordering_key == "key":
        key_column: list[Any] = ids
        headers: list[Any] = [{"cart": other}] * 7
    else:
        key_column = [other] * 7
        headers = [None if each is None else {"cart": each, "z": other} for each in ids]
    with stream.publisher() as pub:
        if how == "one by one":
            for key, header in zip(key_column, headers, strict=True):
                pub.publish(b"v", key=key, headers=header)
        elif how == "lists":
            pub.publish_many([b"v"] * 7, keys=key_column, headers=headers)
        else:
            key_array = pa.array(key_column, pa.binary())
            pub.publish_many(pa.array([b"v"] * 7, pa.binary()), keys=key_array, headers=headers)
    assert keys_of(stream, keyless="default") == wanted
    check(stream)


def test_records_without_keys_or_headers_have_the_default_key(client: meteor.Client) -> None:
    for ordering_key in ("key", "header:cart"):
        stream = client.stream(ordering_key.replace(":", "-"), ordering_key=ordering_key)
        with stream.publisher() as pub:
            pub.publish_many([b"a", b"b"])
            pub.publish_many(pa.array([b"c"], pa.binary()))
        assert keys_of(stream, default_key="rest") == [b"rest"] * 3


def test_record_whose_key_equals_the_default_key_is_ordered_with_keyless_ones(
    stream: meteor.Stream,
) -> None:
    publish(stream, (b"meteor.no-group", None), (None, None))
    one = stream.shared_subscriber("g", keyless="default")
    with one, stream.shared_subscriber("g") as two:
        assert offsets(one.poll(5)) == [0, 1]
        assert two.poll(0) == []


def test_keyless_records_are_free_and_keyed_records_keep_their_order(any_url: str) -> None:
    with Queue(any_url) as queue:
        publish(queue.stream, (None, None), (b"", None), (b"A", None), (b"A", None), (None, None))
        c1, c2 = queue.consumers(2)
        names = [queue.get(consumer) for consumer in (c1, c2, c1, c2, c1, c1)]
        assert names == ["\x000-0", "\x001-1", "A-2", "\x004-4", "A-3", None]
        queue.release(c1, "\x000-0")
        assert queue.get(c2) == "\x000-0"
        queue.ack(c2)
        queue.ack(c1)
        assert queue.shared.confirmed == 5


@pytest.mark.parametrize("ordering_key", ["key", "header:cart"])
def test_ordering_key_longer_than_256_bytes_is_refused_before_publishing(
    client: meteor.Client, ordering_key: str
) -> None:
    stream = client.stream("t", ordering_key=ordering_key)
    good, bad = b"g" * 256, b"g" * 257

    def columns(ids: list[bytes], *, arrow: bool) -> dict[str, Any]:
        if ordering_key == "key":
            return {"keys": pa.array(ids, pa.binary()) if arrow else ids}
        return {"headers": [{"cart": each} for each in ids]}

    with stream.publisher() as pub:
        for arrow in (False, True):
            values: Any = pa.array([b"v"] * 3, pa.binary()) if arrow else [b"v"] * 3
            with pytest.raises(ValueError, match="256 bytes, but this one has 257"):
                pub.publish_many(values, **columns([good, good, bad], arrow=arrow))
        one: dict[str, Any] = {"key": bad} if ordering_key == "key" else {"headers": {"cart": bad}}
        with pytest.raises(ValueError, match="256 bytes, but this one has 257"):
            pub.publish(b"v", **one)
        pub.flush()
        assert stream.end().offset == 0
        pub.publish_many([b"v"], **columns([good], arrow=False))
    assert keys_of(stream) == [good]


def test_keys_can_be_long_in_a_stream_without_an_ordering_key(client: meteor.Client) -> None:
    plain = client.stream("plain", create=True)
    publish(plain, (b"k" * 1000, {"h": b"v" * 1000}))
    assert plain.end().offset == 1


# Administration


def test_confirmed_is_the_lowest_unsettled_offset(any_url: str) -> None:
    with Queue(any_url, "ABCA") as queue:
        c1 = queue.consumer(prefetch=10)
        a0, b1, c2, a3 = c1.poll(5)
        c2.ack()
        a3.ack()
        c1.flush()
        assert (c1.confirmed, queue.shared.describe().lag) == (0, 4)
        a0.ack()
        c1.flush()
        assert (c1.confirmed, queue.shared.describe().lag) == (1, 3)
        assert [(g.lag, g.confirmed, g.kind) for g in queue.stream.describe().groups] == [
            (3, 1, "shared")
        ]
        b1.ack()
        c1.flush()
        assert (c1.confirmed, queue.shared.describe().lag) == (4, 0)
        assert queue.stream.group(GROUP).confirmed == 4


def test_description_counts_settled_records_by_kind(any_url: str) -> None:
    with Queue(any_url, "AABBCCDD") as queue:
        c1 = queue.consumer(prefetch=4)
        records = c1.poll(5)
        assert offsets(records) == [0, 1, 2, 3]
        records[0].ack()
        records[1].reject()
        records[2].release()
        c1.flush()
        assert queue.shared.purge("C") == 2
        found = queue.shared.describe()
        assert (found.acked, found.dead, found.returned, found.purged) == (1, 1, 2, 0)
        assert (found.waiting, found.ready, found.blocked, found.scanned) == (2, 1, 0, 4)
        (consumer,) = found.consumers
        assert (consumer.name, consumer.keys, consumer.records) == (c1.member, 0, 0)
        assert (found.name, found.config, found.reaped) == (GROUP, c1.settings, 0)
        c1.close()
        assert queue.shared.describe().consumers == ()


def test_keys_are_sorted_by_their_oldest_record(any_url: str) -> None:
    with Queue(any_url, "BAAC") as queue:
        c1 = queue.consumer(max_per_key=10_000)
        assert c1.keys() == []
        assert [state.key for state in c1.keys(look_ahead=True)] == [b"B", b"A", b"C"]
        c1.poll(5)
        c1.rollback()
        queue.publish("D")
        assert [state.key for state in c1.keys()] == [b"B", b"A", b"C"]  # D is not scanned yet
        drain(c1)
        assert c1.keys(look_ahead=True) == []


def test_purge_settles_waiting_records_of_one_key(any_url: str) -> None:
    with Queue(any_url, "AB" * 50) as queue:
        c1 = queue.consumer()
        shared = queue.shared
        assert shared.purge("A", limit=20) == 20
        queue.check()
        assert shared.purge(b"A") == 30
        assert shared.purge("A") == shared.purge("never seen") == 0
        queue.publish("A")
        assert offsets(drain(c1)) == [*range(1, 100, 2), 100]
        assert (shared.confirmed, shared.describe().purged) == (101, 50)


@pytest.mark.parametrize(
    ("group", "limit", "error"),
    [
        ("", None, ValueError),
        ("x" * 257, None, ValueError),
        (1, None, TypeError),
        ("A", 0, ValueError),
    ],
)
def test_purge_checks_its_arguments(
    any_url: str, group: Any, limit: Any, error: type[Exception]
) -> None:
    with Queue(any_url, "A") as queue:
        queue.consumer()
        with pytest.raises(error):
            queue.shared.purge(group, limit)


def test_purge_can_take_more_than_one_script_call(url: str) -> None:
    with Queue(url, max_per_key=1) as queue:
        queue.publish(["A"] * 10_000, frame=5_000)
        owner, other = queue.consumers(2, prefetch=1)
        assert offsets(owner.poll(5)) == [0]
        while queue.shared.describe().scanned < 10_000:
            assert other.poll(0) == []
        assert queue.shared.purge("A", limit=9_000) == 9_000
        queue.check()
        assert queue.shared.describe().waiting == 999
        assert [state.waiting for state in queue.keys().values()] == [999]


def test_group_with_consumers_is_deleted_only_by_force(any_url: str) -> None:
    with Queue(any_url, "AB") as queue:
        c1 = queue.consumer()
        shared = queue.shared
        with pytest.raises(meteor.GroupActive, match=c1.member) as refused:
            shared.delete()
        assert refused.value.owner == c1.member
        assert refused.value.shared
        with pytest.raises(meteor.GroupActive):
            queue.stream.delete_group(GROUP)
        shared.delete(force=True)
        with pytest.raises(meteor.GroupNotFound):
            c1.poll(0)
        with pytest.raises(meteor.GroupNotFound):
            shared.describe()
        assert queue.stream.groups() == []
        assert queue.client.redis.keys(queue.key("*")) == []
        discard(c1)
        with queue.stream.shared_subscriber(GROUP) as again:
            assert offsets(drain(again)) == [0, 1]


def test_binary_keys_are_deleted_with_their_group_and_stream(client: meteor.Client) -> None:
    stream = client.stream("t", ordering_key="key")
    publish(
        stream, *[(key, None) for key in (b"\xff\xfe", b"*", b"a:b:c", b"{x}", b"\r\n", b"0")] * 2
    )
    sub = stream.shared_subscriber("g", prefetch=1)
    assert len(sub.keys(look_ahead=True)) == 6
    check(stream)
    assert sub.purge(b"*") == 2
    sub.close()
    assert stream.shared_group("g").fsck() == []
    stream.shared_group("g").delete()
    assert client.redis.keys(keys.shared("t", "g", "*")) == []
    stream.shared_subscriber("g2").keys(look_ahead=True)
    stream.delete()
    assert client.redis.keys("meteor:{t}:*") == []


def test_deleting_a_stream_deletes_its_shared_groups(any_url: str) -> None:
    with Queue(any_url, "AB") as queue:
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "A-0"
        queue.stream.delete()
        assert queue.client.redis.keys(f"meteor:{{{STREAM}}}:*") == []
        with pytest.raises(meteor.StreamNotFound):
            c1.poll(0)
        new = queue.client.stream(STREAM, ordering_key="key")
        with pytest.raises(meteor.LogTruncated):
            c2.poll(0)
        assert new.groups() == []
        for consumer in (c1, c2):
            discard(consumer)
            assert consumer.closed
        assert queue.client.redis.keys(keys.shared(STREAM, "*", "*")) == []
