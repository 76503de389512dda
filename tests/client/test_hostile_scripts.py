"""Scripts do bounded work and lose no record, whatever data or arguments a client sends.

On real servers, each attack uses the role in docs/acl.md that has the required rights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.log.split_points import split_points
from meteor_py.redis import keys, scripts
from meteor_py.redis.connection import Connection
from meteor_py.shared.protocol import Settlement, StepReply, StepRequest
from tests.conftest import ServerFactory
from tests.support.acl_server import connect, guard

NAME = "orders"
#: The keys for publish.lua in a stream with an ordering key.
INDEXED_KEYS = [
    keys.log(NAME), keys.meta(NAME), keys.producer(NAME, "evil"), keys.index(NAME),
]  # fmt: skip


class Parties:
    """Clients for one server, each with a different role."""

    def __init__(self, connect: Callable[[str], meteor.Client]) -> None:
        self._connect = connect
        self._clients: dict[str, meteor.Client] = {}

    def client(self, role: str) -> meteor.Client:
        if role not in self._clients:
            self._clients[role] = self._connect(role)
        return self._clients[role]

    def stream(self, role: str) -> meteor.Stream:
        return self.client(role).stream(NAME, create=False)

    def create(self, **settings: Any) -> meteor.Stream:
        """Create the stream as an administrator, after deleting an existing one."""
        admin = self.client("admin")
        if NAME in admin.streams():
            admin.stream(NAME).delete()
        return admin.stream(NAME, create=True, **settings)

    def run(self, role: str, script: scripts.Script, script_keys: list[str], args: Any) -> Any:
        return self.client(role)._connector.run(script, script_keys, args)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


@pytest.fixture(params=["valkey", "redis", "fake"])
def parties(request: pytest.FixtureRequest, private_server: ServerFactory) -> Iterator[Parties]:
    """Clients for a server with roles, or for a fake server, which has none."""
    if request.param == "fake":
        found = Parties(lambda _: meteor.connect("fake://hostile-scripts"))
    else:
        server = guard(private_server(kind=request.param))
        found = Parties(lambda role: connect(server, role))
    yield found
    found.close()


def publish_args(stream: meteor.Stream, records: str, *index: bytes) -> list[bytes | str | int]:
    return [stream.incarnation, "", 1, 0, records, 7, 100_000, "0v", b"evil", "", "", *index]


@pytest.mark.parametrize("records", ["0", "-1", "1.5", "1e12", "1000000000000", "", "x"])
def test_publish_refuses_an_impossible_number_of_records(parties: Parties, records: str) -> None:
    stream = parties.create(capacity=10)
    with parties.stream("publisher").publisher() as publisher:
        publisher.publish_many([b"honest"] * 10).result()
    script_keys = [keys.log(NAME), keys.meta(NAME), keys.producer(NAME, "evil")]
    args = publish_args(stream, records)
    assert parties.run("publisher", scripts.PUBLISH, script_keys, args) == [b"INVALID"]
    assert [len(batch) for batch in stream.read()] == [10], "the ring was trimmed"


@pytest.mark.parametrize("entry", ["-3:", "9:", "x", ":", "1:a", "0000000:", ""])
def test_a_malformed_stage_is_not_moved(parties: Parties, entry: str) -> None:
    stream = parties.create(ordering_key="key")
    redis = parties.client("writer").redis
    redis.hset(keys.fences(NAME), "w", "1:0:1")
    fields: Any = {"0n": "1", "0f": "0v", "0p": "v", "0c": "", "0g": entry}
    redis.hset(keys.stage(NAME, "x"), mapping=fields)
    script_keys = [
        keys.log(NAME), keys.meta(NAME), keys.fences(NAME), keys.plan(NAME, "w"),
        keys.stage(NAME, "x"), keys.index(NAME),
    ]  # fmt: skip
    args = [stream.incarnation, "", "w", 1, 0, 0, 1, 10**12]
    assert parties.run("writer", scripts.MOVE_STAGED, script_keys, args) == [b"LOST"]
    assert stream.end().offset == 0


def test_finding_split_points_in_large_frames_takes_several_calls(parties: Parties) -> None:
    parties.create()
    with parties.stream("publisher").publisher() as publisher:
        for _ in range(3):
            publisher.publish(bytes(1_000_000)).result()
    offsets = [0, 1, 2] * 5
    found = parties.run("subscriber", scripts.SPLIT_POINTS, [keys.log(NAME)], offsets)
    assert 1 <= len(found) < len(offsets)
    assert split_points(parties.stream("subscriber")._handle, offsets) == [1, 2, 3] * 5
    many = parties.run("subscriber", scripts.SPLIT_POINTS, [keys.log(NAME)], [9] * 7_000)
    assert len(many) == 1_000


@pytest.mark.parametrize(
    "index", [(), (b"", b""), (b"\0" * 6, b"\x91\xa0"), (bytes(3), b"x" * 17_001), (bytes(3),)]
)
def test_publish_refuses_index_entries_that_do_not_match_the_frame(
    parties: Parties, index: tuple[bytes, ...]
) -> None:
    stream = parties.create(ordering_key="key")
    args = publish_args(stream, "3", *index)
    assert parties.run("publisher", scripts.PUBLISH, INDEXED_KEYS, args) == [b"INVALID"]
    assert stream.end().offset == 0


#: Malformed key lists in an index entry. meteor_py's publishers never write them.
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
#: The fields of index entries that a client adds with XADD, bypassing the scripts.
FOREIGN = {
    "old and empty": (b"", b""),
    "old with wild numbers": (b"\xff" * 6, b""),
    "raw": (b"a", b"b", b"c", b"d"),
}


@pytest.mark.parametrize("index", [*MALFORMED, *FOREIGN])
def test_a_malformed_index_entry_loses_no_valid_record(parties: Parties, index: str) -> None:
    stream = parties.create(ordering_key="key")
    reader = parties.stream("consumer")
    with parties.stream("publisher").publisher() as publisher:
        publisher.publish_many([b"x"] * 10, keys=[b"%d" % n for n in range(10)]).result()
        reader.shared_subscriber("g", prefetch=20).close()
        args = publish_args(stream, "3", bytes(3), MALFORMED.get(index, b"\x91\xa0"))
        assert parties.run("publisher", scripts.PUBLISH, INDEXED_KEYS, args)[0] == b"OK"
        if index in FOREIGN:
            call = parties.client("admin")._connector.call
            call("XDEL", keys.index(NAME), "12-3")
            call("XADD", keys.index(NAME), "12-4", *FOREIGN[index])
        publisher.publish(b"x", key=b"last").result()
    seen: list[int] = []
    refused: list[tuple[int, int]] = []
    with reader.shared_subscriber("g", prefetch=20) as consumer:
        while 13 not in seen:
            try:
                for record in consumer.poll(timeout=5):
                    seen.append(record.offset)
                    record.ack()
            except meteor.CorruptFrame as error:
                refused.append((error.first, error.last))
    assert sorted(seen) == [*range(10), 13]
    assert set(refused) <= {(10, 12)}


def test_a_consumer_cannot_make_one_step_do_unbounded_work(parties: Parties) -> None:
    parties.create(capacity=100_000, ordering_key="key")
    with parties.stream("publisher").publisher() as publisher:
        publisher.publish_many([b"x"] * 20_000, keys=[b"k"] * 20_000).result()
    with parties.stream("consumer").shared_subscriber("g", max_per_key=1) as consumer:
        protocol, deliveries = consumer._shared._protocol, consumer._deliveries

        def step(request: StepRequest) -> StepReply:
            def work(connection: Connection) -> StepReply:
                return protocol.step(connection, deliveries.consumer, request)

            return parties.client("consumer")._connector.use(work, protocol.stream.name)

        first = deliveries.holdings.number + 1
        reply = step(StepRequest(first, want=10**9))
        assert (reply.granted, reply.next) == (1, 512)
        with pytest.raises(meteor.ServerRefused, match="INVALID"):
            step(StepRequest(first + 1, acks=tuple(range(1_000))))
        many = tuple(Settlement("U", 1, (number,)) for number in range(1_000))
        with pytest.raises(meteor.ServerRefused, match="INVALID"):
            step(StepRequest(first + 1, settlements=many))
        assert consumer.keys()[0].acquired == 1
