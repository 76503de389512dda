"""Shared subscribers during outages.

The server is cut off, fails over, restarts or is full, or the store is unavailable.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.shared import subscriber, worker_pool
from meteor_py.shared.record import Standing
from meteor_py.subscribe.dead_letters import bury
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, ProxiedStream, ReplicatedStream
from tests.support.readers import background
from tests.support.servers import plain_client
from tests.support.sharing import GROUP, STREAM, Queue, Runner, discard, expire, offsets
from tests.support.waiting import eventually

RECORDS = 3_000


class Witness:
    """Consumers in threads, with a check that only one at a time processes each key."""

    def __init__(self, stream: meteor.Stream, count: int, **options: Any) -> None:
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.at_work: dict[bytes, int] = {}
        self.done: list[tuple[bytes, int]] = []
        self.flaws: list[str] = []
        self.fenced = 0
        self.subscribers = [stream.shared_subscriber(GROUP, **options) for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._work, args=(number, sub))
            for number, sub in enumerate(self.subscribers)
        ]

    def __enter__(self) -> Witness:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        for sub in self.subscribers:
            discard(sub)

    def _work(self, number: int, sub: meteor.SharedSubscriber) -> None:
        while not self._stop.is_set():
            try:
                for record in sub.poll(0.5, 7):
                    with self._at_work(record, number):
                        if record.standing is Standing.HELD:
                            record.ack()
            except meteor.ConnectionFailed:
                pass
            except meteor.Fenced:
                self.fenced += 1
            except BaseException as error:
                self.flaws.append(repr(error))
                raise

    @contextmanager
    def _at_work(self, record: meteor.SharedRecord, number: int) -> Iterator[None]:
        with self._lock:
            other = self.at_work.setdefault(record.ordering_key, number)
            if other != number:
                self.flaws.append(f"both {other} and {number} process {record!r}")
        yield
        with self._lock:
            self.done.append((record.ordering_key, record.offset))
            self.at_work.pop(record.ordering_key, None)


def publish(stream: meteor.Stream, records: int, groups: int = 20) -> None:
    with stream.publisher() as pub:
        names = [b"g%d" % (number % groups) for number in range(records)]
        pub.publish_many([b"v"] * records, keys=names)


def wait_until_settled(stream: meteor.Stream, timeout_s: float = 60) -> meteor.SharedDescription:
    shared, end = stream.shared_group(GROUP), stream.end().offset
    eventually(
        lambda: shared.confirmed == end and not shared.describe().dead_letters_pending,
        timeout_s,
        "the group is stuck",
    )
    return shared.describe()


def test_each_record_is_processed_once_despite_lost_requests_and_replies(
    private_server: ServerFactory, rng: random.Random
) -> None:
    with ProxiedStream(private_server(), ordering_key="key") as proxied:
        publish(proxied.stream, RECORDS)
        through = proxied.through.stream(NAME, create=False)
        with Witness(through, 3, lease_ttl=60.0, prefetch=7) as witness:
            proxied.proxy.chaos(rng, 0.15, ("lost_reply", "torn_reply", "lost_request"))
            state = wait_until_settled(proxied.stream)
            proxied.proxy.heal()
        assert not witness.flaws, witness.flaws[:5]
        # No consumer lost its lease, so each record must be processed exactly once.
        assert witness.fenced == state.reaped == 0
        assert Counter(offset for _, offset in witness.done) == Counter(range(RECORDS))
        assert state.acked == RECORDS
        by_group: dict[bytes, int] = {}
        for group, offset in witness.done:
            assert offset > by_group.get(group, -1)
            by_group[group] = offset
        assert proxied.stream.shared_group(GROUP).fsck() == []
        print(proxied.proxy.counters)
        assert proxied.proxy.counters.cuts > 20


@pytest.mark.parametrize("lost", ["nothing", "a part"])
def test_every_record_is_settled_after_a_failover_that_loses_nothing_or_some_settlements(
    private_server: ServerFactory, lost: str
) -> None:
    with ExitStack() as stack:
        replicated = ReplicatedStream(stack, private_server(), ordering_key="key")
        proxied = replicated.proxied
        publish(proxied.stream, RECORDS)
        through = proxied.through.stream(NAME, create=False)
        with Witness(through, 3, lease_ttl=1.0, prefetch=20) as witness:
            eventually(lambda: len(witness.done) > RECORDS // 10, 30)
            if lost == "a part":
                replicated.lag()
                seen = len(witness.done)
                eventually(lambda: len(witness.done) > seen + RECORDS // 10, 30)
            else:
                replicated.replica.wait_in_sync()
            replicated.fail_over()
            state = wait_until_settled(proxied.stream)
        # The server may have lost a claim, so two consumers may process one key for a moment.
        flaws = [flaw for flaw in witness.flaws if not flaw.startswith("both")]
        assert not flaws, flaws[:5]
        assert {offset for _, offset in witness.done} == set(range(RECORDS))
        assert state.acked == RECORDS
        assert proxied.stream.shared_group(GROUP).fsck() == []
        print(f"{len(witness.done) - RECORDS} repeated, fenced {witness.fenced} times")


def test_dead_letter_lost_in_a_failover_before_it_is_settled_is_published_again(
    private_server: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        replicated = ReplicatedStream(stack, private_server(), ordering_key="key")
        proxied = replicated.proxied
        publish(proxied.stream, 1)
        proxied.client.stream("dead")
        published: list[str] = []

        def bury_and_fail_over(*args: Any, **options: Any) -> str:
            if not published:
                replicated.lag()
            published.append(bury(*args, **options))
            if len(published) == 1:
                replicated.fail_over()
            return published[-1]

        monkeypatch.setattr("meteor_py.shared.prefetcher.bury", bury_and_fail_over)
        through = proxied.through.stream(NAME, create=False)
        consumer = through.shared_subscriber(GROUP, lease_ttl=1.0, dead_letter="dead")
        stack.callback(discard, consumer)
        (record,) = consumer.poll(10)
        record.reject("bad")

        def settled() -> bool:
            with suppress(meteor.ConnectionFailed):
                consumer.poll(0.1)
            return proxied.stream.shared_group(GROUP).describe().dead == 1

        eventually(settled, 30)
        (letters,) = proxied.client.stream("dead").read()
        assert len(letters) == 1
        assert len(set(published)) == 2, "both servers had the same history"


def test_records_are_processed_once_despite_a_server_restart_without_loss(
    private_server: ServerFactory,
) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    with meteor.connect(server.url) as client:
        stream = client.stream(NAME, ordering_key="key")
        publish(stream, RECORDS)
        with Witness(stream, 3, lease_ttl=60.0, prefetch=50) as witness:
            eventually(lambda: len(witness.done) > RECORDS // 10, 30)
            server.kill()
            server.restart()
            state = wait_until_settled(stream)
        assert not witness.flaws, witness.flaws[:5]
        assert witness.fenced == state.reaped == 0
        assert Counter(offset for _, offset in witness.done) == Counter(range(RECORDS))
        assert stream.shared_group(GROUP).fsck() == []


@pytest.fixture
def archived(url: str, tmp_path: Path) -> Iterator[Queue]:
    """A queue of 100 records, most of which only the store in ``tmp_path / "store"`` has."""
    settings = {"capacity": 20, "store": tmp_path / "store", "max_unarchived": 1_000}
    with Queue(url, settings=settings) as queue:
        queue.publish("ABCD" * 25, frame=10)
        queue.stream.store.flush()
        eventually(lambda: queue.client.redis.xlen(keys.log(STREAM)) <= 3)
        yield queue


@contextmanager
def unavailable(
    store: Path, consumer: meteor.SharedSubscriber, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], None]]:
    """Make the store unavailable and polls short.

    Yields a function that waits until two polls have failed, and then restores the store.
    """
    failed: list[meteor.StoreUnavailable] = []
    fill, away = consumer._prefetcher.fill, store.with_name("away")

    def fill_briefly(timeout_s: float) -> None:
        try:
            fill(min(timeout_s, 0.05))
        except meteor.StoreUnavailable as error:
            failed.append(error)
            raise

    def restore() -> None:
        eventually(lambda: len(failed) >= 2, 20, "no second poll failed")
        away.rename(store)

    monkeypatch.setattr(consumer._prefetcher, "fill", fill_briefly)
    store.rename(away)
    try:
        yield restore
    finally:
        if away.exists():
            away.rename(store)


def test_run_continues_after_the_store_was_unavailable(
    archived: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = archived.consumer()
    with (
        unavailable(tmp_path / "store", consumer, monkeypatch) as restore,
        Runner(consumer, lambda record: None) as runner,
    ):
        restore()
        eventually(lambda: archived.shared.confirmed == 100, 20)
    assert runner.error is None


def test_iteration_continues_after_the_store_was_unavailable(
    archived: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = archived.consumer()
    with (
        unavailable(tmp_path / "store", consumer, monkeypatch) as restore,
        background(lambda stop: restore()),
    ):
        assert next(iter(consumer)).offset == 0


@pytest.mark.parametrize("receive", [lambda c: c.run(print), lambda c: next(iter(c))])
def test_run_and_iteration_raise_if_the_store_stays_unavailable(
    archived: Queue,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    receive: Callable[[meteor.SharedSubscriber], object],
) -> None:
    monkeypatch.setattr(worker_pool, "_AWAY_S", 0.1)
    monkeypatch.setattr(subscriber, "_RECONNECT_S", 0.1)
    consumer = archived.consumer()
    with (
        unavailable(tmp_path / "store", consumer, monkeypatch),
        pytest.raises(meteor.StoreUnavailable),
    ):
        receive(consumer)


def test_consumers_settle_and_claim_on_a_full_server(private_server: ServerFactory) -> None:
    server = private_server("--maxmemory-policy", "noeviction")
    with Queue(server.url, "AABBCC", dead_letter="letters") as queue:
        queue.client.stream("letters", create=True)
        consumer = queue.consumer(prefetch=3)
        first = consumer.poll(5)
        with plain_client(server.url) as plain:
            plain.config_set("maxmemory", 1)
            try:
                with pytest.raises(redis.OutOfMemoryError):
                    plain.set("full", "?")
                for record in first[1:]:
                    record.ack()
                first[0].reject("its dead letter must wait for room")
                found = [record for _ in range(3) for record in consumer.poll(0.1)]
                assert offsets(found) == [3, 4, 5]
                for record in found:
                    record.ack()
                consumer.flush()
                state = queue.shared.describe()
                assert (state.acked, state.dead_letters_pending, state.confirmed) == (5, 1, 0)
                assert queue.consumer().poll(0) == []
            finally:
                plain.config_set("maxmemory", 0)
        eventually(lambda: consumer.poll(0.1) == [] and queue.shared.confirmed == 6, 20)
        assert queue.shared.describe().dead == 1


def test_expired_consumer_is_fenced_and_changes_nothing(url: str) -> None:
    with Queue(url, "ABCABC") as queue:
        late, other = queue.consumers(2, prefetch=3)
        records = late.poll(5)
        assert offsets(records) == [0, 1, 2]
        expire(late)
        taken = other.poll(5)
        assert offsets(taken) == [0, 1, 2]
        before = queue.shared.describe()
        for record, how in zip(records, ("ack", "release", "reject"), strict=True):
            with pytest.raises((meteor.Fenced, ValueError)):
                settle_now(late, record, how)
        after = queue.shared.describe()
        assert (before.acked, before.dead, before.returned) == (
            after.acked,
            after.dead,
            after.returned,
        )
        for record in taken:
            record.ack()
        other.flush()
        assert offsets(late.poll(5)) == [3, 4, 5]
        assert queue.shared.describe().acked == 3


def settle_now(sub: meteor.SharedSubscriber, record: meteor.SharedRecord, how: str) -> None:
    getattr(record, how)()
    sub.flush()


def test_two_consumers_that_keep_expiring_neither_lose_nor_repeat_settlements(
    url: str, rng: random.Random
) -> None:
    with Queue(url, "ABCDEFGH" * 40, max_deliveries=0) as queue:
        fighters = queue.consumers(2, prefetch=16)
        acked: Counter[int] = Counter()
        eventually(lambda: _fight(queue, fighters, rng, acked), 60, "the consumers did not finish")
        state = queue.shared.describe()
        assert state.acked == 320 == state.confirmed
        assert state.reaped > 5
        assert sum(acked.values()) == 320
        assert set(acked.values()) == {1}


def _fight(
    queue: Queue,
    fighters: list[meteor.SharedSubscriber],
    rng: random.Random,
    acked: Counter[int],
) -> bool:
    late, other = rng.sample(fighters, 2)
    mine: list[int] = []
    try:
        records = late.poll(0)
        if rng.random() < 0.4:
            expire(late)
            other.flush()
        for record in records:
            record.ack()
            mine.append(record.offset)
        late.flush()
        acked.update(mine)
    except meteor.Fenced:
        pass
    queue.check()
    return queue.shared.confirmed == 320


def test_cost_of_an_empty_claim_does_not_grow_with_the_number_of_waiting_records(url: str) -> None:
    few, many = empty_claim(url, 1_000), empty_claim(url, 100_000)
    print(f"commands in an empty claim: {few} with 1,000 records, {many} with 100,000")
    assert few == many


def empty_claim(url: str, blocked: int) -> int:
    """Return the number of commands in a claim if another consumer owns all records' keys."""
    with plain_client(url) as plain:
        plain.flushall()
        with Queue(url, settings={"capacity": 10_000_000}) as queue:
            with queue.stream.publisher() as pub:
                pub.publish_many([b""] * blocked, keys=[b"g%d" % (n % 100) for n in range(blocked)])
            owner, other = queue.consumers(2, prefetch=100)
            assert len(owner.poll(5)) == 100
            eventually(lambda: queue.shared.describe().scanned == blocked or other.poll(0))
            plain.config_resetstat()
            reply = other._deliveries.exchange(100)
            stats: Any = plain.info("commandstats")
            assert not reply.granted
            assert queue.shared.describe().waiting == blocked - 100
            return sum(int(stat["calls"]) for stat in stats.values())
