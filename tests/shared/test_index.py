"""The index of a stream with an ordering key: it is written and trimmed with the log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.publish import transaction
from meteor_py.publish.transaction import Stage
from meteor_py.records.frame import Columns
from meteor_py.records.ordering_index import read_entry
from meteor_py.redis import keys
from meteor_py.shared.admin import open_shared
from meteor_py.shared.deliveries import Deliveries
from tests.support.sharing import GROUP, Queue, check, drain
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


def keys_of(stream: meteor.Stream) -> list[bytes]:
    """Return the ordering keys of all records, as a consumer sees them."""
    with stream.shared_subscriber("look", keyless="default") as sub:
        return [record.ordering_key for record in sorted(drain(sub), key=lambda each: each.offset)]


def index(client: meteor.Client, name: str = "s") -> list[tuple[bytes, list[bytes]]]:
    """Return the raw entries of the index."""
    found = client._connector.call("XRANGE", keys.index(name), "-", "+")
    return [(entry_id, list(strings)) for entry_id, strings in found]


def log_ids(client: meteor.Client, name: str = "s") -> list[bytes]:
    return [entry[0] for entry in client._connector.call("XRANGE", keys.log(name), "-", "+")]


def test_index_entries_have_at_most_64_records_and_no_payload(
    client: meteor.Client, stream: meteor.Stream
) -> None:
    with stream.publisher() as pub:
        pub.publish_many([b"secret"] * 4, keys=[b"a", b"b", b"a", None]).result(5)
        pub.publish_many([b"secret"] * 130, keys=[b"a"] * 129 + [b"c"]).result(5)
    assert index(client) == [
        (b"3-4", [b"\0\1\0\2", b"\x93\xa1a\xa1b\xa0"]),
        (b"67-64", [bytes(64), b"\x91\xa1a"]),
        (b"131-128", [bytes(64), b"\x91\xa1a"]),
        (b"133-130", [b"\0\1", b"\x92\xa1a\xa1c"]),
    ]
    assert log_ids(client) == [b"3-4", b"133-130"]
    assert keys_of(stream)[-2:] == [b"a", b"c"]


def claimed(stream: meteor.Stream, group: str, want: int) -> list[tuple[int, bytes]]:
    """Claim up to 64 records, ``want`` per step; return their offsets and ordering keys."""
    asked = {"lease_ttl": 60.0, "keyless": "free"}
    shared, settings = open_shared(
        stream, stream._handle, group, asked, meteor.InitialOffset.EARLIEST
    )
    rule = stream.config.ordering_rule
    assert rule is not None
    with closing(Deliveries(shared._protocol, settings, rule, None, "c")) as consumer:
        for _ in range(64 // want):
            consumer.exchange(want)
        found = shared._protocol.batches(consumer.consumer).values()
        return sorted(each for batch in found for each in batch)


def test_records_claimed_one_by_one_have_the_same_keys_as_in_bulk(stream: meteor.Stream) -> None:
    """A step that claims one record unpacks only its key, if the keys before it are short."""
    short = [b"%d" % 7**n for n in range(20)]
    long = [b"a" * 31, b"b" * 32, b"c", b"d" * 255, b"e" * 256, b"f"]
    sent = [*short, None, *short[5:9], *long, b"g", None, b"\xa1", b"\0"]
    for frame in (sent[:8], sent, [None] * 3):
        with stream.publisher() as pub:
            pub.publish_many([b""] * len(frame), keys=frame).result(5)
    wanted = list(enumerate(key or b"" for key in (*sent[:8], *sent, None, None, None)))
    assert claimed(stream, "many", 64) == wanted
    assert claimed(stream, "one", 1) == wanted


def test_step_reads_an_index_entry_with_more_keys_than_lua_can_unpack(
    client: meteor.Client, stream: meteor.Stream
) -> None:
    """A publisher's permissions suffice to write index entries that no meteor_py client writes."""
    call = client._connector.call
    names = [b"%d" % n for n in range(9_001)]
    with stream.publisher() as pub:
        pub.publish(b"", key=b"a").result(5)
    call("XADD", keys.index("s"), "2-2", b"\0\0\1\0", *names)
    call("HSET", keys.meta("s"), "next", 3)
    assert claimed(stream, "g", 1) == [(0, b"a"), (1, b"0"), (2, b"1")]


def indexed(client: meteor.Client) -> list[int]:
    """Return the offsets that the index lists."""
    rows = [read_entry(*entry) for entry in index(client)]
    return [offset for first, found in rows for offset in range(first, first + len(found))]


def offsets_in_log(client: meteor.Client) -> list[int]:
    spans = [map(int, entry.split(b"-")) for entry in log_ids(client)]
    return [offset for last, size in spans for offset in range(last - size + 1, last + 1)]


@pytest.mark.parametrize("frame", [10, 300])
def test_index_is_trimmed_with_the_log_by_publishing_and_by_configure(
    client: meteor.Client, frame: int
) -> None:
    """If only some records of a frame exceed the limit, the frame and its index entries stay."""
    stream = client.stream("s", ordering_key="key", capacity=1_000)
    with stream.publisher() as pub:
        for _ in range(5_000 // frame):
            pub.publish_many([b"v"] * frame, keys=[b"k"] * frame).result(5)
    assert len(log_ids(client)) <= 1_000 // frame + 1
    assert indexed(client) == offsets_in_log(client)
    stream.configure(capacity=200)
    assert len(log_ids(client)) <= 200 // frame + 1
    assert indexed(client) == offsets_in_log(client)


def test_index_is_trimmed_with_the_log_when_records_are_archived(url: str, tmp_path: Any) -> None:
    with meteor.connect(url) as client:
        stream = client.stream("s", ordering_key="key", capacity=1_000, store=str(tmp_path))
        with stream.publisher() as pub:
            for _ in range(17):
                pub.publish_many([b"v"] * 300, keys=[b"k"] * 300).result(5)
        stream.store.flush()
        eventually(lambda: len(log_ids(client)) <= 5)
        assert indexed(client) == offsets_in_log(client)


def test_committed_stages_are_indexed_by_their_ordering_keys(
    client: meteor.Client, stream: meteor.Stream
) -> None:
    stages = []
    for number, group in enumerate([b"a", b"b"]):
        stage = Stage(stream._handle, f"w.0.{number}")
        stage.write(Columns([b"1", b"2"], [group, b"c"]))
        stage.write(Columns([b"3"]))
        stages.append(stage.finish())
    transaction.commit(stream._handle, "w", 0, stages)
    assert [entry[0] for entry in index(client)] == log_ids(client)
    none = b"meteor.no-group"
    assert keys_of(stream) == [b"a", b"c", none, b"b", b"c", none]


def test_dead_letters_have_ordering_keys_if_their_stream_does(any_url: str) -> None:
    with Queue(any_url, "AB", dead_letter="dead") as queue:
        dead = queue.client.stream("dead", ordering_key="header:meteor-group")
        c1 = queue.consumer()
        for record in c1.poll(5):
            record.reject()
        c1.close()
        assert keys_of(dead) == [GROUP.encode()] * 2
