"""Ring retention by age and by bytes: a stream's ``max_age`` and ``max_bytes`` settings.

Publishing drops records that exceed a limit, whatever the size of their frames. It keeps the newest
frame and, if the stream has a store, all records that are not archived. New limits also apply to
records that are already in the ring.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.publish.transaction import commit
from meteor_py.redis import keys
from tests.support.transactions import stage
from tests.support.waiting import eventually

#: Bytes that ``_append.lua`` counts for each frame besides its payload.
OVERHEAD = 32


@pytest.fixture
def client(any_url: str) -> Iterator[meteor.Client]:
    with meteor.connect(any_url) as m:
        yield m


@pytest.fixture
def clock(client: meteor.Client) -> Clock:
    return Clock(client)


class Clock:
    """Shifts the times stored in a stream into the past, as if time had passed."""

    def __init__(self, client: meteor.Client) -> None:
        self._redis: Any = client.redis

    def advance(self, stream: meteor.Stream, seconds: float) -> None:
        ms = round(seconds * 1000)
        log, meta = keys.log(stream.name), keys.meta(stream.name)
        entries = self._redis.xrange(log)
        self._redis.delete(log)
        for entry_id, fields in entries:
            fields[b"t"] = b"%d" % (int(fields[b"t"]) - ms)
            self._redis.xadd(log, fields, id=entry_id)
        appended = int(self._redis.hget(meta, "appended") or 0)
        self._redis.hset(meta, "appended", max(appended - ms, 0))
        marks = (self._redis.hget(meta, "marks") or b"").decode()
        parts = [marks[at : at + 48] for at in range(0, len(marks), 48)]
        moved = "".join(part[:32] + f"{int(part[32:]) - ms:016}" for part in parts)
        if moved:
            self._redis.hset(meta, "marks", moved)


def publish_each(stream: meteor.Stream, count: int, size: int = 10) -> None:
    """Publish each record in its own frame."""
    with stream.publisher() as pub:
        for _ in range(count):
            pub.publish(b"x" * size).result(5)


def frame_sizes(client: meteor.Client, stream: meteor.Stream) -> list[int]:
    entries: Any = client.redis.xrange(keys.log(stream.name))
    return [len(list(fields.values())[1]) + OVERHEAD for _, fields in entries]


def ring_bytes(client: meteor.Client, stream: meteor.Stream) -> int:
    return sum(frame_sizes(client, stream))


# By bytes


def test_ring_with_max_bytes_keeps_as_many_of_the_newest_records_as_fit(
    client: meteor.Client,
) -> None:
    stream = client.stream("s", max_bytes=4_200)
    publish_each(stream, 300)
    assert ring_bytes(client, stream) <= 4_200
    first, end = stream.bounds()
    assert end == 300
    assert 95 <= end - first <= 100  # the limit is 100 records of 42 bytes
    assert [len(batch) for batch in stream.read(first)]


def test_ring_never_exceeds_max_bytes_by_more_than_a_frame(
    client: meteor.Client, rng: random.Random
) -> None:
    stream = client.stream("s", max_bytes=20_000)
    with stream.publisher() as pub:
        for _ in range(400):
            size = rng.choice([1, 10, 100, 1_000, rng.randrange(1, 5_000)])
            pub.publish_many([b"x" * size] * rng.randrange(1, 4)).result(5)
            sizes = frame_sizes(client, stream)
            assert sum(sizes) <= 20_000 + max(sizes)
    first, end = stream.bounds()
    assert sum(len(batch) for batch in stream.read(first)) == end - first


def test_frame_larger_than_max_bytes_is_kept_until_others_fill_the_ring(
    client: meteor.Client,
) -> None:
    stream = client.stream("s", max_bytes=1_000)
    publish_each(stream, 10)
    publish_each(stream, 1, size=5_000)
    assert stream.bounds() == (10, 11)
    publish_each(stream, 50)
    assert ring_bytes(client, stream) <= 1_000 + 42


def test_ordering_key_index_is_trimmed_with_the_log(client: meteor.Client) -> None:
    stream = client.stream("s", ordering_key="key", max_bytes=1_000)
    publish_each(stream, 100)
    log: Any = client.redis.xrange(keys.log("s"))
    index: Any = client.redis.xrange(keys.index("s"))
    assert [entry for entry, _ in log] == [entry for entry, _ in index]
    assert len(log) < 30


def test_committed_transactions_respect_the_limits(client: meteor.Client) -> None:
    stream = client.stream("s", max_bytes=2_000)
    staged = stage(stream, "a", *["one two three four"] * 100)
    commit(stream._handle, "w", 1, [staged])
    assert stream.end().offset == 400
    assert ring_bytes(client, stream) <= 2_000 + 300


# By age


def test_publishing_drops_records_older_than_max_age(client: meteor.Client, clock: Clock) -> None:
    stream = client.stream("s", max_age=3600)
    publish_each(stream, 10)
    clock.advance(stream, 3500)
    publish_each(stream, 10)
    assert stream.bounds() == (0, 20)
    clock.advance(stream, 200)
    publish_each(stream, 1)
    assert stream.bounds() == (10, 21)
    clock.advance(stream, 3600)
    publish_each(stream, 1)
    assert stream.bounds() == (21, 22)


def test_steady_publishing_drops_records_at_most_a_32nd_of_max_age_late(
    client: meteor.Client, clock: Clock
) -> None:
    stream = client.stream("s", max_age=3200)
    for _ in range(100):
        publish_each(stream, 1)
        clock.advance(stream, 50)
    first, end = stream.bounds()
    assert 64 <= end - first <= 64 + 3


def test_reader_learns_which_records_max_age_dropped(client: meteor.Client, clock: Clock) -> None:
    stream = client.stream("s", max_age=10)
    with stream.subscriber() as sub:
        publish_each(stream, 10)
        clock.advance(stream, 20)
        publish_each(stream, 1)
        with pytest.raises(meteor.RecordsLost) as lost:
            sub.poll(timeout=5)
        assert (lost.value.first, lost.value.last) == (0, 9)
        sub.skip_gap()
        assert list(sub.poll(5).offsets) == [10]


def test_one_publish_drops_a_bounded_number_of_records(client: meteor.Client, clock: Clock) -> None:
    stream = client.stream("s", capacity=1_000_000, max_age=320)
    with stream.publisher() as pub:
        for _ in range(20):
            pub.publish_many([b""] * 4_000).result(5)
            clock.advance(stream, 11)
        clock.advance(stream, 1_000)
        firsts = []
        for _ in range(10):
            pub.publish(b"").result(5)
            firsts.append(stream.bounds()[0])
    assert max(b - a for a, b in zip([0, *firsts], firsts, strict=False)) <= 16_000
    assert firsts[-1] >= 80_000


# Changing the limits


def test_new_byte_limit_applies_to_records_in_the_ring(client: meteor.Client) -> None:
    stream = client.stream("s", create=True)
    publish_each(stream, 700)
    stream.configure(max_bytes=4_200)
    assert stream.bounds() == (600, 700)
    assert stream.describe().config.max_bytes == 4_200
    publish_each(stream, 5)
    assert 600 < stream.bounds()[0] <= 612
    publish_each(stream, 200)
    assert 800 <= stream.bounds()[0] <= 812


def test_new_age_limit_applies_to_records_in_the_ring(client: meteor.Client, clock: Clock) -> None:
    stream = client.stream("s", create=True)
    for _ in range(10):
        publish_each(stream, 10)
        clock.advance(stream, 100)
    stream.configure(max_age=450)
    assert stream.bounds() == (60, 100)
    clock.advance(stream, 100)
    publish_each(stream, 1)
    assert stream.bounds() == (70, 101)


def test_limits_are_changed_and_removed_one_by_one(client: meteor.Client) -> None:
    stream = client.stream("s", max_age=3600, max_bytes=10_000)
    stream.configure(max_bytes=5_000)
    assert (stream.config.max_age, stream.config.max_bytes) == (3600, 5_000)
    stream.configure(max_age=0)
    publish_each(stream, 300)
    found = client.stream("s", max_bytes=5_000).describe().config
    assert (found.max_age, found.max_bytes) == (None, 5_000)
    stream.configure(max_bytes=0)
    before = stream.bounds()[0]
    publish_each(stream, 300)
    assert stream.bounds() == (before, 600)
    assert stream.describe().config == meteor.StreamConfig()


def test_open_publisher_obeys_limits_set_later(client: meteor.Client) -> None:
    stream = client.stream("s", create=True)
    with stream.publisher() as pub:
        pub.publish(b"x").result(5)
        client.stream("s", create=True).configure(max_bytes=1_000)
        for _ in range(100):
            pub.publish(b"x" * 100).result(5)
    assert stream.bounds()[0] > 90


def test_limits_work_even_if_configure_dies_before_it_has_measured_the_ring(
    client: meteor.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = client.stream("s", create=True)
    publish_each(stream, 100)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meteor_py.log.retention._apply_limits", die)
    with pytest.raises(KeyboardInterrupt):
        stream.configure(max_bytes=2_000)
    publish_each(stream, 60)
    assert stream.bounds()[0] >= 100
    assert ring_bytes(client, stream) <= 2_000


@pytest.mark.parametrize("name", ["max_age", "max_bytes"])
def test_invalid_limits_are_refused(client: meteor.Client, name: str) -> None:
    wrong: Any
    for wrong, error in ((0, ValueError), (-1, ValueError), ("1h", TypeError), (True, TypeError)):
        given: Any = {name: wrong}
        with pytest.raises(error, match=name):
            client.stream("s", **given)
    stream = client.stream("s", create=True)
    for wrong, error in ((-1, ValueError), ("1h", TypeError), (False, TypeError)):
        given = {name: wrong}
        with pytest.raises(error, match=name):
            stream.configure(**given)
    given = {name: 10}
    with pytest.raises(meteor.StreamConfigMismatch, match=r"stream\.configure"):
        client.stream("s", **given)


# With a store


def test_unarchived_records_are_kept_beyond_every_limit(url: str, tmp_path: Path) -> None:
    with meteor.connect(url) as m:
        stream = m.stream("s", store=tmp_path, archive=False, max_bytes=1_000, max_age=0.001)
        publish_each(stream, 300)
        assert m.redis.xlen(keys.log("s")) == 300
        stream.configure(max_bytes=500)
        assert m.redis.xlen(keys.log("s")) == 300
        with stream.archiver().start():
            stream.store.flush()
            publish_each(stream, 50)
            stream.store.flush()
            publish_each(stream, 1)
            eventually(lambda: m.redis.xlen(keys.log("s")) < 20, 5, "the ring was not trimmed")
        assert sum(len(batch) for batch in stream.read(0)) == 351


def test_marks_field_stays_bounded_while_no_archiver_runs(client: meteor.Client) -> None:
    stream = client.stream("s", max_bytes=3_200)
    client.redis.hset(keys.meta("s"), mapping={"archived": 0, "max_unarchived": 10**6})
    publish_each(stream, 1_000, size=100)
    assert client.redis.xlen(keys.log("s")) == 1_000
    marks = client.redis.hget(keys.meta("s"), "marks")
    assert marks is not None
    assert len(marks) <= 48 * 128
    client.redis.hset(keys.meta("s"), "archived", 1_000)
    publish_each(stream, 3, size=100)
    assert ring_bytes(client, stream) <= 3_200 * 2
