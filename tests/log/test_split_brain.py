"""After a split brain, clients on the lost branch learn which records are gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pytest

import meteor_py as meteor
from meteor_py.records.position import Position, diverged_at, epoch_numbers, with_epoch
from meteor_py.records.record import ListChunk
from meteor_py.redis import keys
from meteor_py.store.base import TERMS
from meteor_py.store.memory import MemoryStore
from meteor_py.store.read_ahead import StoreReadAhead
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, ReplicatedStream, discard, poll_until
from tests.support.servers import Replica
from tests.support.waiting import eventually

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
#: The number of an epoch that began in 2096, by its server's clock.
AHEAD = 4_000_000_000_000


@dataclass
class Split:
    """Clients on a lost branch, whose next call reaches the surviving branch.

    Both branches have the same first 100 records. Then the lost branch gets 10 more. The surviving
    branch gets 20 more, a restart without new records, and another restart with 5 more. Each branch
    has begun its own epochs. In the variant "skew", the last common epoch is ahead of both servers'
    clocks, so both branches derive their next epoch number from it.
    """

    publisher: meteor.Publisher
    reader: meteor.Subscriber
    member: meteor.Subscriber
    checkpoint: Position
    survivors: meteor.Stream


@pytest.fixture(params=["valkey", "redis", "skew"])
def split(request: pytest.FixtureRequest, private_server: ServerFactory) -> Iterator[Split]:
    kind: Literal["valkey", "redis"] = "redis" if request.param == "redis" else "valkey"
    with ExitStack() as stack:
        replicated = ReplicatedStream(stack, private_server(*DURABLE, kind=kind))
        proxied, survivor = replicated.proxied, replicated.replica
        if request.param == "skew":
            epoch = {"epoch": f"{AHEAD}", "epochs": f"{AHEAD}:0"}
            proxied.direct.hset(keys.meta(NAME), mapping=epoch)  # type: ignore[arg-type]
        with proxied.stream.publisher() as publisher:
            publisher.publish_many([b"both"] * 100).result()
        member = proxied.subscriber(group="g", lease_ttl=60)
        poll_until(member, lambda values: len(values) >= 100)
        member.confirm().result(10)
        replicated.lag()
        eventually(lambda: has_written_its_log(survivor))
        survivor.promote()
        with meteor.connect(survivor.url) as client:
            publish(client, b"kept", 20)
        proxied.server.kill()
        proxied.server.restart()
        publisher = proxied.publisher()
        assert publisher.publish_many([b"lost"] * 10).result(10) == 100
        reader = proxied.subscriber(initial_offset="earliest")
        for subscriber, count in ((reader, 110), (member, 10)):
            poll_until(subscriber, lambda values, enough=count: len(values) >= enough)  # type: ignore[misc]
        for records in (0, 5):
            survivor.kill()
            survivor.restart()
            with meteor.connect(survivor.url) as client:
                publish(client, b"kept", records)
        checkpoint = reader.checkpoint
        proxied.move_to(survivor)
        yield Split(publisher, reader, member, checkpoint, proxied.stream)
        discard(publisher)


def has_written_its_log(replica: Replica) -> bool:
    """Return whether the replica has rewritten its append-only file since it synchronized.

    Until then, a kill could lose records.
    """
    info = replica.info("persistence")
    return not info["aof_rewrite_in_progress"] and not info["aof_rewrite_scheduled"]


def publish(client: meteor.Client, value: bytes, count: int) -> None:
    with client.stream(NAME).publisher() as publisher:
        for _ in range(count):
            publisher.publish(value).result(10)


def test_every_client_on_the_lost_branch_learns_which_records_are_gone(split: Split) -> None:
    with pytest.raises(meteor.LogTruncated) as reader:
        eventually(lambda: split.reader.poll(timeout=1))
    error = split.publisher.publish(b"next").exception(10)
    assert isinstance(error, meteor.LogTruncated)
    with pytest.raises(meteor.LogTruncated) as confirm:
        split.member.confirm(109).result(10)
    with split.survivors.subscriber() as other, pytest.raises(meteor.LogTruncated) as seek:
        other.seek(split.checkpoint)
    told = {
        "reader": reader.value,
        "publisher": error,
        "confirm": confirm.value,
        "seek": seek.value,
    }
    assert {who: (loss.first, loss.last) for who, loss in told.items()} == dict.fromkeys(
        told, (100, 109)
    )
    assert split.survivors.group("g").confirmed == 100


#: The epoch table up to the split, at offset 100 in epoch 5, and that of the surviving branch.
TRUNK = "1:0,+5:50"
KEPT = f"{TRUNK},+7:100,+9:120"


@pytest.mark.parametrize(
    ("epoch", "offset", "known", "expected"),
    [
        pytest.param(5, 100, "", None, id="nothing-read-after-the-split"),
        pytest.param(5, 101, "", 100, id="trunk"),
        pytest.param(7, 120, "", None, id="same-branch"),
        pytest.param(7, 121, "", 120, id="tail-of-an-epoch-lost"),
        pytest.param(8, 110, f"{TRUNK},+8:100", 100, id="other-branch"),
        pytest.param(8, 110, f"{TRUNK},+6:90,+8:105", 90, id="other-branch-that-lost-more"),
        pytest.param(8, 110, f"{TRUNK},+6:105,+8:105", 100, id="other-branch-that-lost-less"),
        pytest.param(8, 110, "", 0, id="other-branch-unknown-split"),
        pytest.param(8, 50, "", 0, id="other-branch-that-may-have-split-anywhere"),
        pytest.param(9, 131, "", 130, id="end-of-log"),
    ],
)
def test_a_position_is_valid_up_to_the_end_of_its_last_shared_epoch(
    epoch: int, offset: int, known: str, expected: int | None
) -> None:
    assert diverged_at(Position("i", epoch, offset, known), KEPT, 130) == expected


def test_epoch_tables_from_earlier_versions_are_compared_by_epoch_number() -> None:
    table = "1:0,5:50,+7:100"  # version 0.1 wrote the first two entries, and omitted empty epochs
    assert diverged_at(Position("i", 3, 50), table, 130) is None  # epoch 3 was empty
    assert diverged_at(Position("i", 3, 51), table, 130) == 50
    assert epoch_numbers(table) is None
    assert epoch_numbers(KEPT) == {1, 5, 7, 9}


def test_full_epoch_table_forgets_only_its_oldest_epoch(url: str) -> None:
    full = ",".join(["1:0", *(f"+{number}:{number}" for number in range(2, 1_001))])
    expected = full.replace("1:0,+2:2,", "2:-1,") + ",+1001:1001"
    assert with_epoch(full, 1_001, 1_001) == expected
    with meteor.connect(url) as client:
        publish(client, b"x", 1)
        stream, meta = client.stream(NAME), keys.meta(NAME)
        fields: dict[str, str | int] = {"epochs": full, "next": 1_001, "history": "another server"}
        client.redis.hset(meta, mapping=fields)  # type: ignore[arg-type]
        with stream.publisher() as pub:
            pub.publish(b"x").result(10)  # begins an epoch: the server's history is different
        table: Any = client.redis.hget(meta, "epochs")
    entries = table.decode().split(",")
    assert entries[:-1] == expected.split(",")[:-1]
    assert len(entries) == 1_000


@pytest.mark.parametrize(("epoch", "foreign"), [(7, False), (8, True), (10, True)])
def test_history_that_another_branch_archived_is_refused(epoch: int, foreign: bool) -> None:
    store = MemoryStore(NAME)
    records = ListChunk(0, [b"x"] * 110, None, None, None, [0] * 110).to_arrow()
    store.append("i", epoch * TERMS + 1, pa.Table.from_batches([records]))
    ahead = StoreReadAhead(lambda: store, lambda: None, NAME, "i")
    if foreign:
        with pytest.raises(meteor.StoreMismatch):
            ahead.read(0, 110, 9, KEPT)
    else:
        assert len(ahead.read(0, 110, 9, KEPT)) == 110
    ahead.close()
