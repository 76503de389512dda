"""Scripts do bounded work and lose nothing, whatever a client wrote or passes as an argument."""

from __future__ import annotations

from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.log.split_points import split_points
from meteor_py.redis import keys, scripts
from meteor_py.redis.connection import Connection
from meteor_py.shared.protocol import Settlement, StepReply, StepRequest

NAME = "orders"


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
        assert [len(batch) for batch in stream.read()] == [10], "a count that counts trims the ring"


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


def test_split_points_of_large_frames_are_found_in_several_calls(client: meteor.Client) -> None:
    with client:
        stream = client.stream(NAME)
        with stream.publisher() as publisher:
            for _ in range(3):
                publisher.publish(bytes(1_000_000)).result()
        offsets = [0, 1, 2] * 5
        found = client._connector.run(scripts.SPLIT_POINTS, [keys.log(NAME)], offsets)
        assert 1 <= len(found) < len(offsets)
        assert split_points(stream._handle, offsets) == [1, 2, 3] * 5


@pytest.mark.parametrize(
    "index", [(), (b"", b""), (b"\0" * 6, b"\x91\xa0"), (bytes(3), b"x" * 17_001), (bytes(3),)]
)
def test_publish_refuses_index_entries_that_do_not_match_the_frame(
    client: meteor.Client, index: tuple[bytes, ...]
) -> None:
    with client:
        stream = client.stream(NAME, ordering_key="key")
        script_keys = [
            keys.log(NAME), keys.meta(NAME), keys.producer(NAME, "evil"), keys.index(NAME),
        ]  # fmt: skip
        args = publish_args(stream, "3", *index)
        assert client._connector.run(scripts.PUBLISH, script_keys, args) == [b"INVALID"]
        assert stream.end().offset == 0


#: Keys of an index entry that no publisher of ours writes.
MALFORMED = {
    "not MessagePack": b"\xc1",
    "cut off": b"\xdc\xff\xff\xa1a",
    "a number": b"\x07",
    "nothing": b"",
    "numbers": b"\x93\x01\x02\x03",
    "nested": b"\x91" * 5_000 + b"\xa0",
    "a map": b"\x81\xa1a\xa1b",
    "a long key": b"\x91\xda\x03\xe8" + b"k" * 1_000,
    "too few": b"\x90",
}


@pytest.mark.parametrize("index", [*MALFORMED, "old and empty", "old with wild numbers", "raw"])
def test_a_malformed_index_entry_loses_no_honest_record(client: meteor.Client, index: str) -> None:
    with client:
        stream = client.stream(NAME, ordering_key="key")
        with stream.publisher() as publisher:
            publisher.publish_many([b"x"] * 10, keys=[b"%d" % n for n in range(10)]).result()
            stream.shared_subscriber("g", prefetch=20).close()
            script_keys = [
                keys.log(NAME), keys.meta(NAME), keys.producer(NAME, "evil"), keys.index(NAME),
            ]  # fmt: skip
            packed = MALFORMED.get(index, b"\x91\xa0")
            args = publish_args(stream, "3", bytes(3), packed)
            assert client._connector.run(scripts.PUBLISH, script_keys, args)[0] == b"OK"
            if index not in MALFORMED:  # a publisher may also write to the index directly
                client._connector.call("XDEL", keys.index(NAME), "12-3")
                fields = {
                    "old and empty": (b"", b""),
                    "old with wild numbers": (b"\xff" * 6, b""),
                    "raw": (b"a", b"b", b"c", b"d"),
                }[index]
                client._connector.call("XADD", keys.index(NAME), "12-4", *fields)
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


def test_a_consumer_cannot_make_one_step_do_unbounded_work(client: meteor.Client) -> None:
    with client:
        stream = client.stream(NAME, capacity=100_000, ordering_key="key")
        with stream.publisher() as publisher:
            publisher.publish_many([b"x"] * 20_000, keys=[b"k"] * 20_000).result()
        with stream.shared_subscriber("g", max_per_key=1) as consumer:
            protocol, deliveries = consumer._shared._protocol, consumer._deliveries

            def step(request: StepRequest) -> StepReply:
                def work(connection: Connection) -> StepReply:
                    return protocol.step(connection, deliveries.consumer, request)

                return client._connector.use(work)

            first = deliveries.holdings.number + 1
            reply = step(StepRequest(first, want=10**9))
            assert (reply.granted, reply.next) == (1, 512)
            with pytest.raises(meteor.ServerRefused, match="INVALID"):
                step(StepRequest(first + 1, acks=tuple(range(1_000))))
            many = tuple(Settlement("U", 1, (number,)) for number in range(1_000))
            with pytest.raises(meteor.ServerRefused, match="INVALID"):
                step(StepRequest(first + 1, settlements=many))
            assert consumer.keys()[0].acquired == 1
