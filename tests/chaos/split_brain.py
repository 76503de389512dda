"""Split brain with restarts, over many seeds; part of ``make chaos``.

Two servers continue one stream after a partition. Both accept records and are killed and restarted
at random, so that each branch begins its own epochs. Then the clients of one branch are connected
to the other server. Each of them must learn exactly which records are gone, and the surviving
branch must keep all its records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random

import pytest

import meteor_py as meteor
from meteor_py.records.position import Position
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, ReplicatedStream, discard, poll_until
from tests.support.servers import Replica, Server
from tests.support.waiting import eventually

SEEDS = 25
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
#: Counters over all seeds, printed at the end.
TOTALS: Counter[str] = Counter()


class Branch:
    """One side of a split: a server, restarted at random, and the values of its records."""

    def __init__(self, rng: Random, server: Server, name: bytes, values: list[bytes]) -> None:
        self._rng = rng
        self._server = server
        self._name = name
        self.values = list(values)

    def act(self) -> None:
        if self._rng.random() < 0.5:
            self._server.kill()
            self._server.start()
            TOTALS["restarts"] += 1
        self.publish(self._rng.choice((0, 1, 3, 20)))

    def publish(self, count: int) -> None:
        with meteor.connect(self._server.url) as client, client.stream(NAME).publisher() as pub:
            for _ in range(count):
                value = b"%s %d" % (self._name, len(self.values))
                assert pub.publish(value).result(10) == len(self.values)
                self.values.append(value)
        TOTALS["records acknowledged"] += count


class Clients:
    """A publisher, a reader and a group member, connected through the proxy."""

    def __init__(self, replicated: ReplicatedStream) -> None:
        self._proxied = replicated.proxied
        self.member = replicated.proxied.subscriber(group="g", lease_ttl=60)
        self.reader = replicated.proxied.subscriber(initial_offset="earliest")
        self.publisher = replicated.proxied.publisher()

    def read_all(self, values: list[bytes]) -> None:
        for subscriber in (self.reader, self.member):
            missing = len(values) - (subscriber.position or 0)
            if missing > 0:
                poll_until(subscriber, lambda got, missing=missing: len(got) >= missing)  # type: ignore[misc]

    def publish(self, branch: Branch, count: int) -> None:
        for _ in range(count):
            value = b"of a client %d" % len(branch.values)
            assert self.publisher.publish(value).result(10) == len(branch.values)
            branch.values.append(value)
        TOTALS["records acknowledged"] += count

    def losses(self, checkpoint: Position, last: int) -> dict[str, tuple[int, int]]:
        """Return the range of lost records that each client reports."""
        told: dict[str, meteor.LogTruncated] = {}
        with pytest.raises(meteor.LogTruncated) as reader:
            eventually(lambda: self.reader.poll(timeout=1))
        error = self.publisher.publish(b"next").exception(10)
        assert isinstance(error, meteor.LogTruncated)
        with pytest.raises(meteor.LogTruncated) as confirm:
            self.member.confirm(last).result(10)
        with self._proxied.stream.subscriber() as other, pytest.raises(meteor.LogTruncated) as seek:
            other.seek(checkpoint)
        told = {"reader": reader.value, "publisher": error}
        told |= {"confirm": confirm.value, "seek": seek.value}
        return {who: (loss.first, loss.last) for who, loss in told.items()}


def has_written_its_log(replica: Replica) -> bool:
    """Return whether the replica has rewritten its log after a sync, so a kill loses nothing."""
    info = replica.info("persistence")
    return not info["aof_rewrite_in_progress"] and not info["aof_rewrite_scheduled"]


@pytest.fixture(scope="module", autouse=True)
def totals() -> Iterator[None]:
    yield
    print("\n" + ", ".join(f"{count:,} {what}" for what, count in TOTALS.items()))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", range(SEEDS))
def test_clients_of_the_lost_branch_learn_exactly_which_records_are_gone(
    private_server: ServerFactory, rng: Random, number: int
) -> None:
    with ExitStack() as stack:
        replicated = ReplicatedStream(
            stack, private_server(*DURABLE, kind=rng.choice(("valkey", "redis")))
        )
        trunk = Branch(rng, replicated.proxied.server, b"both", [])
        for _ in range(rng.randint(1, 3)):
            trunk.publish(rng.choice((1, 5, 50)))
        clients = Clients(replicated)
        stack.callback(discard, clients.publisher)
        clients.publish(trunk, 1)
        clients.read_all(trunk.values)
        clients.member.confirm().result(10)
        replicated.lag()
        eventually(lambda: has_written_its_log(replicated.replica))
        replicated.replica.promote()
        split = len(trunk.values)
        lost = Branch(rng, replicated.proxied.server, b"lost", trunk.values)
        kept = Branch(rng, replicated.replica, b"kept", trunk.values)
        for _ in range(rng.randint(2, 6)):
            rng.choice((lost, kept)).act()
        clients.publish(lost, rng.choice((1, 10)))
        clients.read_all(lost.values)
        for _ in range(rng.randint(0, 3)):
            kept.act()
        checkpoint = clients.reader.checkpoint
        replicated.proxied.move_to(replicated.replica)
        last = len(lost.values) - 1
        learned = clients.losses(checkpoint, last)
        assert learned == dict.fromkeys(learned, (split, last))
        TOTALS["splits"] += 1
        TOTALS["clients that learned of a loss"] += len(learned)
        survivor = replicated.proxied.stream
        assert survivor.group("g").confirmed == split
        assert [value for batch in survivor.read() for value in batch.values()] == kept.values
