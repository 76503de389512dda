"""No call blocks the server for long, however large the group is. The tests count work, not time.

Each script or transaction must run a bounded number of commands with a bounded number of arguments,
and no command may read or free a whole collection. Each test also prints its longest call, as the
server measured it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from tests.support.previous_version import PreviousVersion
from tests.support.server_work import Work, counted
from tests.support.servers import plain_client
from tests.support.sharing import Queue, die, expire

pytestmark = pytest.mark.single_server("MONITOR shows the calls of one server")

#: Limits for one call. They correspond to about 1 ms on an idle machine.
COMMANDS = 500
ARGUMENTS = 2_500

MANY = 10_000


Bounded = Callable[[Callable[[], object]], Work]


@pytest.fixture
def bounded(url: str) -> Bounded:
    """A function that runs another one and checks that each of its server calls is bounded."""

    def run(work: Callable[[], object]) -> Work:
        with counted(url) as done:
            work()
        most = done.most("commands"), done.most("arguments")
        print(f"{done.scripts} scripts, longest {done.longest}, most work: {most}")
        assert not done.unbounded[:3]
        assert most[0].commands <= COMMANDS
        assert most[1].arguments <= ARGUMENTS
        return done

    return run


def hold(consumer: meteor.SharedSubscriber, records: int) -> None:
    """Claim records without fetching them."""
    while len(consumer._deliveries.holdings) < records:
        consumer._deliveries.exchange(512)


def queue_of(url: str, keys: int, records: int = MANY, **options: Any) -> Queue:
    queue = Queue(url, settings={"capacity": 1_000_000}, **options)
    queue.publish([f"k{number % keys}" for number in range(records)], frame=records)
    return queue


@pytest.mark.parametrize("how", ["die", "leave"])
@pytest.mark.parametrize("keys", [1, 500, MANY])
def test_claiming_and_returning_many_records_takes_bounded_calls(
    url: str, bounded: Bounded, keys: int, how: str
) -> None:
    with queue_of(url, keys) as queue:
        owner, other = queue.consumers(2, prefetch=MANY)
        bounded(lambda: hold(owner, MANY))
        if how == "leave":
            bounded(owner.close)
        else:
            die(owner)
            while queue.shared.describe().waiting < MANY:
                bounded(other.flush)
        assert queue.shared.describe().waiting == MANY


@pytest.mark.parametrize("keys", [1, 500])
def test_settling_many_records_in_any_order_takes_bounded_calls(
    url: str, bounded: Bounded, keys: int
) -> None:
    with queue_of(url, keys, 4_000) as queue:
        consumer = queue.consumer(prefetch=4_000)
        records = consumer.poll(5)
        while len(records) < 4_000:
            records += consumer.poll(5)
        consumer.ack(records[1::7])
        bounded(consumer.flush)
        for record in records[2::7]:
            record.release(only_this=True, failed=False)
        bounded(consumer.flush)
        bounded(consumer.rollback)
        assert queue.shared.describe().waiting == 4_000 - len(records[1::7])


def test_inspecting_and_deleting_a_large_group_takes_bounded_calls(
    url: str, bounded: Bounded
) -> None:
    with queue_of(url, MANY, lease_ttl=300.0, dead_letter="dead") as queue:
        queue.publish(["hot"] * 40_000, frame=40_000)
        owner, other = queue.consumers(2, prefetch=MANY)
        hold(owner, MANY)
        for record in owner.poll(5, 300):
            record.reject("so that there are many dead letters")
        owner._deliveries.exchange()  # sends the rejections, but publishes no dead letters

        def scan() -> None:
            while other._deliveries.exchange(1).next < MANY + 40_000:
                pass

        bounded(scan)
        queue.publish([f"new{number}" for number in range(2_000)], frame=2_000)
        shared = queue.shared
        assert bounded(lambda: shared.confirmed).scripts == 1
        bounded(shared.describe)
        bounded(lambda: shared.keys(look_ahead=True))
        bounded(lambda: shared.fsck())
        assert shared.fsck() == []
        bounded(lambda: shared.purge("hot", limit=30_000))
        expire(owner)
        bounded(other.flush)
        bounded(lambda: shared.purge("hot"))
        bounded(lambda: shared.delete(force=True))


def test_group_with_many_consumers_is_inspected_in_portions(url: str, bounded: Bounded) -> None:
    with Queue(url, "A") as queue, plain_client(url) as plain:
        consumer = queue.consumer()
        id = consumer._deliveries.consumer
        raw = plain.hget(queue.key("members"), id)
        for number in range(1_000):  # as if 1,000 more consumers had joined
            plain.hset(queue.key("members"), f"{number:06}", raw)
            plain.zadd(queue.key("leases"), {f"{number:06}": 2**50})
        done = bounded(lambda: queue.shared.describe())
        assert sum(call.name == "HSCAN" for call in done.calls) >= 5
        bounded(lambda: queue.shared.fsck())
        assert len(queue.shared.describe().consumers) == 1_001


def enlarge(plain: Any, keys: int, letters: int, held: int, consumers: int) -> None:
    """Add ordering keys, dead letters, held records and consumers to the group of version 0.1."""
    prefix = "meteor:{carts}:shared:billing:"
    owner = next(iter(plain.hkeys(prefix + "consumers"))).decode()
    pipe = plain.pipeline(transaction=False)
    for number in range(keys):
        pipe.hset(prefix + "groups", f"many-{number}", f":1::{100 + number}")
        pipe.rpush(prefix + f"waiting:many-{number}", 100 + number)
        pipe.sadd(prefix + "suspects", 100 + number)
    start = 100 + keys
    pipe.hset(prefix + "groups", "long", f"{owner}:{held}::{start}")
    offsets = [*range(start, start + 2 * held)]
    pipe.hset(prefix + f"held:{owner}", "long", ",".join(map(str, offsets[::-2])))
    pipe.rpush(prefix + "waiting:long", *offsets[::2])
    for number in range(letters):
        offset = offsets[-1] + 1 + number
        pipe.hset(prefix + "letters", str(offset), f"1:1:A{'why' * 10}")
        pipe.zadd(prefix + "dying", {str(offset): 0})
    for number in range(consumers):
        pipe.hset(prefix + "consumers", f"gone{number}", "2::host:1:x")
    pipe.execute()


def test_large_group_of_version_0_1_is_converted_in_bounded_calls(
    url: str, bounded: Bounded, tmp_path: Path
) -> None:
    PreviousVersion("version_0_1").load(url, store=tmp_path / "store")
    with plain_client(url) as plain, meteor.connect(url) as client:
        enlarge(plain, 3_000, 2_000, 4_000, 500)
        carts = client.stream("carts", create=False)
        assert bounded(lambda: carts.shared_group("billing")).scripts > 50
        group = carts.shared_group("billing")
        found = {state.key: state for state in group.keys()}
        assert found[b"long"].waiting == 8_000
        assert sum(key.startswith(b"many-") for key in found) == 3_000
        waiting = group._waiting(b"long", 10_000)
        assert waiting == sorted(waiting), "held records did not return to their places"
        assert group.describe().dead_letters_pending == 2_000
        assert plain.zcard("meteor:{carts}:shared:billing:unsettled") == 2_000
        parts = {part.split(b":")[0] for part in group._protocol.find()}
        assert not parts & {b"converting", b"groups", b"held", b"consumers", b"suspects", b"bell"}
