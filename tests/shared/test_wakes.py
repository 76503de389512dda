"""Every event that makes records available wakes a waiting consumer: no wake-up is lost.

Waits here are so long that a test fails unless a wake-up ends them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

import meteor_py as meteor
from meteor_py.redis.connection import Connection
from meteor_py.shared.protocol import StepReply, StepRequest
from meteor_py.shared.record import Standing
from tests.support.readers import background, blocked
from tests.support.sharing import Queue, die, offsets

#: Timeout for a poll that should be woken at once. If it expires, the wake-up was missed.
SOON_S = 15.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocking calls wait so long that only a wake-up ends them in time."""
    monkeypatch.setattr(Connection, "block_max_s", property(lambda connection: 100.0))


@pytest.fixture(params=["valkey", "redis"])
def served(request: pytest.FixtureRequest) -> str:
    from tests.conftest import emptied

    name = "redis_server" if request.param == "redis" else "server"
    return emptied(request.getfixturevalue(name).url)


@pytest.fixture
def open_queue(served: str) -> Iterator[Callable[..., Queue]]:
    queues: list[Queue] = []

    def start(records: str = "", **options: object) -> Queue:
        queue = Queue(served, records, **({"lease_ttl": 300.0} | options))  # type: ignore[arg-type]
        queues.append(queue)
        return queue

    yield start
    for queue in queues:
        with queue:
            pass


def woken(
    queue: Queue, consumer: meteor.SharedSubscriber, work: Callable[[], object], waiting: int = 1
) -> list[int]:
    """Return the offsets that a waiting consumer gets once ``work`` has run."""

    def later(stop: threading.Event) -> None:
        blocked(queue.client.redis, waiting)
        work()

    with background(later):
        return offsets(consumer.poll(SOON_S))


def test_new_record_wakes_a_waiting_consumer(open_queue: Callable[..., Queue]) -> None:
    queue = open_queue()
    assert woken(queue, queue.consumer(), lambda: queue.publish("A")) == [0]
    queue.consumer().close()


@pytest.mark.parametrize("how", ["ack", "reject", "release", "close", "commit", "rollback"])
def test_released_key_wakes_a_waiting_consumer(open_queue: Callable[..., Queue], how: str) -> None:
    queue = open_queue("AA", max_per_key=1)
    c1, c2 = queue.consumers(2)
    (record,) = c1.poll(5)

    def release() -> None:
        getattr(record if how in ("ack", "reject", "release") else c1, how)()

    gone = how in ("ack", "reject", "commit")
    assert woken(queue, c2, release) == ([1] if gone else [0])


def test_owner_is_woken_by_records_that_another_consumer_scanned(
    open_queue: Callable[..., Queue],
) -> None:
    queue = open_queue("A")
    c1, c2 = queue.consumers(2)
    assert offsets(c1.poll(5)) == [0]

    def more() -> None:
        queue.publish("A")
        assert c2.poll(0) == []

    assert woken(queue, c1, more) == [1]


def test_consumer_that_holds_max_per_key_records_is_woken_by_its_own_ack(
    open_queue: Callable[..., Queue],
) -> None:
    queue = open_queue("AAA", max_per_key=2)
    c1 = queue.consumer()
    first, second = c1.poll(5)
    assert woken(queue, c1, first.ack) == [2]
    second.ack()


def test_ack_during_an_empty_claim_wakes_the_consumer(
    open_queue: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = open_queue("AB")
    c1 = queue.consumer(prefetch=1)
    (first,) = c1.poll(5)
    assert c1.poll(0.05) == []  # c1 has no room for a second record
    exchange = c1._prefetcher.exchange

    def settled_meanwhile(want: int, mode: str = "") -> StepReply:
        reply = exchange(want, mode)
        if first.standing is Standing.HELD:
            assert want == 0
            first.ack()
        return reply

    monkeypatch.setattr(c1._prefetcher, "exchange", settled_meanwhile)
    assert offsets(c1.poll(SOON_S)) == [1]


def test_consumer_is_woken_by_its_own_release(open_queue: Callable[..., Queue]) -> None:
    queue = open_queue("A")
    c1 = queue.consumer()
    (record,) = c1.poll(5)
    assert woken(queue, c1, record.release) == [0]


def test_end_of_a_last_try_wakes_a_waiting_consumer(open_queue: Callable[..., Queue]) -> None:
    queue = open_queue("ABC", max_deliveries=2)
    c1, dead = queue.consumers(2)
    assert len(dead.poll(5)) == 3
    die(dead)
    (first,) = c1.poll(5)
    assert (first.offset, first.failures) == (0, 1)
    assert woken(queue, c1, first.ack) == [1]


def test_end_of_a_delay_wakes_a_waiting_consumer(open_queue: Callable[..., Queue]) -> None:
    queue = open_queue("A")
    c1, c2 = queue.consumers(2)
    (record,) = c1.poll(5)
    assert woken(queue, c2, lambda: record.release(delay=0.1)) == [0]


def test_resuming_a_parked_key_wakes_a_waiting_consumer(open_queue: Callable[..., Queue]) -> None:
    queue = open_queue("AA", on_poison="park")
    c1 = queue.consumer()
    c1.poll(5)[0].reject()
    assert c1.poll(0) == []
    assert woken(queue, c1, lambda: queue.shared.resume("A")) == [0, 1]


def test_purge_that_makes_room_to_scan_wakes_a_waiting_consumer(
    open_queue: Callable[..., Queue],
) -> None:
    queue = open_queue()
    c1, c2 = queue.consumer(prefetch=1), queue.consumer()
    queue.publish("A" * 10 + "B", frame=10)
    queue.client._connector.call("HSET", queue.key("meta"), "max_waiting", 5)
    assert offsets(c1.poll(5)) == [0]
    assert c2.poll(0) == []
    assert queue.shared.describe().scanned == 10
    assert woken(queue, c2, lambda: queue.shared.purge("A", limit=8)) == [10]


def test_death_of_another_consumer_wakes_a_waiting_consumer(
    open_queue: Callable[..., Queue],
) -> None:
    queue = open_queue("A", lease_ttl=1.0)
    c1, c2 = queue.consumers(2)
    assert offsets(c1.poll(5)) == [0]

    def hang() -> None:
        c1._lease_renewer.stop()  # from now on, nothing renews the lease of c1

    assert woken(queue, c2, hang) == [0]


def test_all_waiting_consumers_get_their_records(open_queue: Callable[..., Queue]) -> None:
    queue = open_queue()
    c1, c2 = queue.consumers(2, prefetch=1)
    found: list[int] = []

    def other(stop: threading.Event) -> None:
        found.extend(offsets(c2.poll(SOON_S)))

    with background(other):
        blocked(queue.client.redis, 1)
        found += woken(queue, c1, lambda: queue.publish("AB", frame=2), waiting=2)
    assert sorted(found) == [0, 1]


def test_consumer_interrupted_as_it_starts_to_wait_stops_watching_at_once(
    open_queue: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step makes this consumer the one that watches the index, and Ctrl-C loses the reply.

    If this consumer kept watching, others would notice new records only after 0.3 lease TTLs.
    """
    queue = open_queue()
    c1, c2 = queue.consumers(2)
    protocol = c1._deliveries.protocol
    step = protocol.step

    def interrupted(connection: Connection, consumer: str, request: StepRequest) -> StepReply:
        reply = step(connection, consumer, request)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(protocol, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            c1.poll(SOON_S)
    assert woken(queue, c2, lambda: queue.publish("A")) == [0]
    queue.publish("B")
    assert offsets(c1.poll(SOON_S)) == [1], "the interrupted consumer cannot wait again"


def test_idle_consumer_claims_before_its_lease_must_be_renewed(
    open_queue: Callable[..., Queue],
) -> None:
    """The claim renews the lease, so that an idle consumer needs one call instead of two."""
    queue = open_queue()
    consumer = queue.consumer()
    assert consumer.poll(0.05) == []
    idle = consumer._deliveries.idle
    assert idle is not None
    assert consumer._prefetcher._patience_s(idle) < consumer.settings.lease_ttl / 3
