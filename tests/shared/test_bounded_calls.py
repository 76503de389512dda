"""Script calls do bounded work, and a record costs few calls, however many consumers wait."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.shared import deliveries
from meteor_py.shared.protocol import Maintenance, SharedProtocol
from tests.support.readers import blocked
from tests.support.servers import plain_client
from tests.support.sharing import Queue, die, drain, offsets
from tests.support.waiting import eventually


def script_calls(plain: Any) -> int:
    stats = plain.info("commandstats")
    return sum(
        int(stat["calls"])
        for name, stat in stats.items()
        # Consumers and publishers use these commands; describe() uses EVAL_RO and EVALSHA_RO.
        if name in ("cmdstat_eval", "cmdstat_evalsha")
    )


@pytest.mark.parametrize("waiting", [2, 200])
def test_one_record_costs_at_most_four_script_calls_however_many_consumers_wait(
    url: str, waiting: int
) -> None:
    with ExitStack() as stack, plain_client(url) as plain:
        queue = stack.enter_context(Queue(url, lease_ttl=300.0))
        consumers = queue.consumers(waiting)
        got: list[int] = []
        stop = threading.Event()

        def work(consumer: meteor.SharedSubscriber) -> None:
            while not stop.is_set():
                for record in consumer.poll(1.0):
                    got.append(record.offset)
                    record.ack()

        threads = [threading.Thread(target=work, args=[each]) for each in consumers]
        for thread in threads:
            thread.start()
        try:
            eventually(lambda: plain.info("clients")["blocked_clients"] == waiting, 60)
            plain.config_resetstat()
            for number in range(5):
                queue.publish("A")
                eventually(lambda n=number: len(got) == n + 1)  # type: ignore[misc]
                eventually(lambda n=number: queue.shared.confirmed == n + 1)  # type: ignore[misc]
                blocked(plain, waiting)
            calls = script_calls(plain)
        finally:
            stop.set()
            for thread in threads:
                thread.join(20)
        published = 5
        print(f"{(calls - published) / 5} script calls per record with {waiting} waiting")
        assert calls - published <= 4 * 5


@pytest.fixture
def portions(monkeypatch: pytest.MonkeyPatch) -> list[Maintenance]:
    done: list[Maintenance] = []
    real = SharedProtocol.maintain

    def maintain(self: SharedProtocol, *args: Any, **options: Any) -> Maintenance:
        done.append(real(self, *args, **options))
        return done[-1]

    monkeypatch.setattr(SharedProtocol, "maintain", maintain)
    return done


@pytest.mark.parametrize("how", ["die", "leave"])
@pytest.mark.parametrize("keys", [1, 2_000])
def test_records_of_a_departed_consumer_are_taken_back_in_portions(
    url: str, portions: list[Maintenance], how: str, keys: int
) -> None:
    with Queue(url, settings={"capacity": 100_000}) as queue:
        queue.publish([f"k{number % keys}" for number in range(2_000)], frame=2_000)
        c1, c2 = queue.consumer(prefetch=2_000), queue.consumer(prefetch=1)
        while len(c1._deliveries.holdings) < 2_000:
            c1._deliveries.exchange(512)
        if how == "die":
            die(c1)
            c2.flush()
        else:
            c1.close()
        assert len(portions) >= 2_000 // 96, "a call took back more than 96 records"
        assert queue.shared.describe().waiting == 2_000
        assert (queue.shared.confirmed, queue.shared.describe().consumers[0].records) == (0, 0)


def test_group_is_consistent_while_records_of_a_leaving_consumer_are_taken_back(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Queue(url, settings={"capacity": 10_000}) as queue:
        queue.publish([f"k{number}" for number in range(400)], frame=400)
        consumer = queue.consumer(prefetch=400)
        assert len(consumer.poll(5)) == 400
        real = SharedProtocol.maintain
        flaws: list[str] = []

        def maintain(self: SharedProtocol, *args: Any, **options: Any) -> Maintenance:
            done = real(self, *args, **options)
            flaws.extend(queue.shared.fsck())
            return done

        monkeypatch.setattr(SharedProtocol, "maintain", maintain)
        consumer.close()
        assert flaws == []


def test_record_purged_while_its_dead_consumer_is_reaped_is_not_blamed_for_the_death(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "_PORTIONS", 1)
    with Queue(url, settings={"capacity": 10_000}, max_deliveries=2) as queue:
        queue.publish(["A"] * 400, frame=400)
        c1, c2 = queue.consumers(2, prefetch=400)
        assert len(c1.poll(5)) == 400
        die(c1)
        purged = 0
        while queue.shared.describe().reaped == 0:
            c2.flush()
            purged += queue.shared.purge("A")
        assert purged >= 300
        assert queue.shared.fsck() == []
        assert queue.shared.describe().purged == purged


def test_buffered_records_are_bounded_in_bytes(url: str) -> None:
    with meteor.connect(url) as client:
        stream = client.stream("big", ordering_key="key")
        with stream.publisher() as pub:
            for number in range(40):
                pub.publish(bytes(20_000), key=b"%d" % number).result(5)
        with stream.shared_subscriber("g", prefetch=40, prefetch_bytes=100_000) as sub:
            sizes = []
            found: list[int] = []
            while len(found) < 40:
                records = sub.poll(5)
                sizes.append(sum(len(record.value) for record in records))
                found += offsets(records)
                for record in records:
                    record.ack()
            assert max(sizes) == 100_000
            assert sorted(found) == [*range(40)]


def test_reply_to_a_claim_of_one_record_does_not_grow_with_its_frame(url: str) -> None:
    with Queue(url) as queue, plain_client(url) as plain:
        queue.publish([f"k{number}" for number in range(4_096)], frame=4_096)
        consumer = queue.consumer(prefetch=1)
        consumer.poll(5)
        before = int(plain.info("stats")["total_net_output_bytes"])
        consumer._deliveries.exchange(1)
        # The script sends no index entries, and reads only one, with the keys of 64 records.
        assert int(plain.info("stats")["total_net_output_bytes"]) - before < 10_000
        index = plain.xrange("meteor:{orders}:index", count=1)
        assert len(index[0][1]) == 1


def test_recreated_group_publishes_a_records_dead_letter_again(any_url: str) -> None:
    with Queue(any_url, "A", dead_letter="dead") as queue:
        dead = queue.client.stream("dead", create=True)
        for number in (1, 2):
            consumer = queue.consumer()
            consumer.poll(5)[0].reject("why")
            consumer.close()
            assert sum(len(batch) for batch in dead.read()) == number
            queue.shared.delete()
        queue.consumer().close()


def test_late_joiner_gets_keys_that_a_busy_consumer_frees(url: str) -> None:
    with Queue(url, max_per_key=4, settings={"capacity": 100_000}) as queue:
        queue.publish("ABCDEFGH" * 100, frame=800)
        busy = queue.consumer(prefetch=32)
        held = busy.poll(5)
        assert len({record.ordering_key for record in held}) == 8
        late = queue.consumer(prefetch=32)
        found: list[meteor.SharedRecord] = []
        joiner = threading.Thread(target=lambda: found.extend(late.poll(10)))
        joiner.start()
        blocked(queue.client.redis, 1)
        # Hold the lock, so that the lease renewer cannot send the acks before the poll does.
        with busy._deliveries.condition:
            for record in held:
                if record.ordering_key in (b"A", b"B"):
                    record.ack()
            busy.poll(0)
        joiner.join(15)
        assert {record.ordering_key for record in found} <= {b"A", b"B"}
        assert found, "the busy consumer left no key to the idle one"
        drain(busy)
