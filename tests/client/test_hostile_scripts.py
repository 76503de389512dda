"""Scripts do bounded work and lose no record, whatever data or arguments a client sends."""

from __future__ import annotations

from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.log.split_points import split_points
from meteor_py.redis import keys, scripts

NAME = "orders"
#: The keys of a shared group that the step script takes, after meta and index.
PARTS = (
    "state groups ready blocked delayed leases consumers failures dying letters bell held: more: "
    "suspects"
)


@pytest.fixture
def client(any_url: str) -> meteor.Client:
    return meteor.connect(any_url)


def publish_args(stream: meteor.Stream, records: str, *index: bytes) -> list[bytes | str | int]:
    return [stream.incarnation, "", 1, 0, records, 7, 100_000, "0v", b"evil", "", *index]


@pytest.mark.parametrize("records", ["0", "-1", "1.5", "1e12", "1000000000000", "", "x"])
def test_publish_refuses_an_impossible_number_of_records(
    client: meteor.Client, records: str
) -> None:
    with client:
        stream = client.stream(NAME, capacity=10)
        with stream.publisher() as publisher:
            publisher.publish_many([b"honest"] * 10).result()
        script_keys = [keys.log(NAME), keys.meta(NAME), keys.producer(NAME, "evil")]
        args = publish_args(stream, records)
        assert client._connector.run(scripts.PUBLISH, script_keys, args) == [b"INVALID"]
        assert [len(batch) for batch in stream.read()] == [10], (
            "a batch with a valid count trims the ring"
        )


@pytest.mark.parametrize("entry", ["-3:", "9:", "x", ":", "1:a", "0000000:", ""])
def test_a_malformed_stage_is_not_moved(client: meteor.Client, entry: str) -> None:
    with client:
        stream = client.stream(NAME, ordering_key="key")
        redis = client.redis
        redis.hset(keys.fences(NAME), "w", "1:0:1")
        fields: Any = {"0n": "1", "0f": "0v", "0p": "v", "0c": "", "0g": entry}
        redis.hset(keys.stage(NAME, "x"), mapping=fields)
        script_keys = [
            keys.log(NAME), keys.meta(NAME), keys.fences(NAME), keys.plan(NAME, "w"),
            keys.stage(NAME, "x"), keys.index(NAME),
        ]  # fmt: skip
        args = [stream.incarnation, "", "w", 1, 0, 0, 1, 10**12]
        assert client._connector.run(scripts.MOVE_STAGED, script_keys, args) == [b"LOST"]
        assert stream.end().offset == 0


def test_finding_split_points_of_large_frames_takes_several_calls(client: meteor.Client) -> None:
    with client:
        stream = client.stream(NAME)
        with stream.publisher() as publisher:
            for _ in range(3):
                publisher.publish(bytes(1_000_000)).result()
        offsets = [0, 1, 2] * 5
        found = client._connector.run(scripts.SPLIT_POINTS, [keys.log(NAME)], offsets)
        assert 1 <= len(found) < len(offsets)
        assert split_points(stream._handle, offsets) == [1, 2, 3] * 5


@pytest.mark.parametrize("index", [(b"", b""), (b"\xff" * 6, b""), (bytes(6), b"k" * 1000)])
def test_a_malformed_index_entry_loses_no_valid_record(
    client: meteor.Client, index: tuple[bytes, ...]
) -> None:
    with client:
        stream = client.stream(NAME, ordering_key="key")
        with stream.publisher() as publisher:
            publisher.publish_many([b"x"] * 10, keys=[b"%d" % n for n in range(10)]).result()
            stream.shared_subscriber("g", prefetch=20).close()
            script_keys = [
                keys.log(NAME), keys.meta(NAME), keys.producer(NAME, "evil"), keys.index(NAME),
            ]  # fmt: skip
            args = publish_args(stream, "3", *index)
            assert client._connector.run(scripts.PUBLISH, script_keys, args)[0] == b"OK"
            publisher.publish(b"x", key=b"last").result()
        seen: list[int] = []
        refused: list[tuple[int, int]] = []
        with stream.shared_subscriber("g", prefetch=20) as consumer:
            while 13 not in seen:
                try:
                    for record in consumer.poll(timeout=5):
                        seen.append(record.offset)
                        record.ack()
                except meteor.CorruptFrame as error:
                    refused.append((error.first, error.last))
        assert sorted(seen) == [*range(10), 13]
        assert set(refused) <= {(10, 12)}


def test_a_consumer_cannot_make_one_step_scan_the_whole_stream(client: meteor.Client) -> None:
    with client:
        stream = client.stream(NAME, capacity=100_000, ordering_key="key")
        with stream.publisher() as publisher:
            publisher.publish_many([b"x"] * 20_000, keys=[b"k"] * 20_000).result()
        stream.shared_subscriber("g").close()
        state: bytes = client._connector.call(
            "HGET", keys.shared(NAME, "g", "state"), "incarnation"
        )
        parts = [keys.shared(NAME, "g", part) for part in PARTS.split()]
        args = [keys.shared(NAME, "g", ""), state, "", 0, "", 0, 10**9, 1000, "", 0, 0]
        reply = client._connector.run(
            scripts.SHARED_STEP, [keys.meta(NAME), keys.index(NAME), *parts], args
        )
        assert reply[:2] == [b"OK", 4096]
