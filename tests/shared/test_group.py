"""Shared groups: settings, incarnations, look-ahead, purge, deletion, failures and clocks."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis.connector import Connector
from meteor_py.redis.scripts import DELETE_STREAM
from meteor_py.shared.config import SharedConfig
from tests.conftest import ServerFactory
from tests.support.sharing import GROUP, Queue, change_progress, die, drain, offsets
from tests.support.waiting import eventually

# Settings


@pytest.mark.parametrize("lease_ttl", [32.3, 1.001, 1 / 3, 0.1, 5.015, 86_400.0])
def test_group_can_be_reopened_with_its_own_lease_ttl_whatever_the_value(
    any_url: str, lease_ttl: float
) -> None:
    with Queue(any_url, lease_ttl=lease_ttl) as queue:
        for _ in range(2):
            queue.consumer().close()
        assert queue.shared.describe().config.lease_ttl == round(lease_ttl, 3)
        with pytest.raises(meteor.GroupConfigMismatch, match="lease_ttl"):
            queue.consumer(lease_ttl=lease_ttl - 0.002 if lease_ttl > 1 else 2.0)


def test_mismatch_error_names_the_setting_that_differs() -> None:
    present = SharedConfig(default_key="rest", keyless="default")
    assert present.differing({"keyless": "free"}) == "keyless"
    ordered = {"keyless": "default"}
    asked = {"max_per_key": 32, "default_key": "others"} | ordered
    assert present.differing(asked) == "default_key"
    assert present.differing({"default_key": "rest", "lease_ttl": 10} | ordered) is None


# Incarnations


@pytest.mark.parametrize("settings", [{}, {"keyless": "free"}, {"dead_letter": "dead"}])
def test_consumer_of_a_deleted_group_does_not_join_a_new_one_with_the_same_name(
    any_url: str, settings: dict[str, Any]
) -> None:
    with Queue(any_url, "ABC") as queue:
        old = queue.consumer()
        records = old.poll(5)
        queue.shared.delete(force=True)
        new = queue.consumer(**settings)
        with pytest.raises(meteor.GroupNotFound):
            old.poll(0)
        records[0].ack()
        for call in (old.flush, old.keys, old.fsck):
            with pytest.raises(meteor.GroupNotFound):
                call()
        assert [each.name for each in queue.shared.describe().consumers] == [new.member]
        assert offsets(new.poll(5)) == [0, 1, 2]
        with pytest.raises(meteor.GroupNotFound):
            old.close()


# Look-ahead and purge


def test_purge_reaches_records_beyond_max_waiting(any_url: str) -> None:
    with Queue(any_url) as queue:
        c1 = queue.consumer()
        queue.client._connector.call("HSET", queue.key("meta"), "max_waiting", 5)
        queue.publish("A" * 700 + "B", frame=100)
        assert queue.shared.purge("A") == 700
        assert queue.shared.purge("A") == 0
        assert offsets(drain(c1)) == [700]
        assert (queue.shared.confirmed, queue.shared.describe().purged) == (701, 700)
        queue.publish("C" * 700, frame=100)
        assert queue.shared.purge("C", limit=650) == 650
        assert offsets(drain(c1)) == [*range(1_351, 1_401)]


def test_purge_settles_unscanned_records_when_they_are_scanned(any_url: str) -> None:
    with Queue(any_url, "ABAB") as queue:
        queue.consumer().close()
        assert queue.shared.purge("A", limit=1) == 1
        assert queue.shared.describe().scanned == 0, "the purge scanned the stream"
        assert {name: state.count for name, state in queue.keys().items()} == {"A": 1, "B": 2}
        assert queue.shared.purge("A") == 1
        queue.publish("A")
        assert sorted(offsets(drain(queue.consumer()))) == [1, 3, 4]
        assert queue.client._connector.call("EXISTS", queue.key("purges")) == 0


def test_look_ahead_and_purge_leave_out_lost_records(any_url: str) -> None:
    with Queue(any_url, settings={"capacity": 10}) as queue:
        queue.consumer().close()
        for _ in range(3):
            queue.publish("ABABABABAB", frame=10)
        assert {name: state.count for name, state in queue.keys().items()} == {"A": 5, "B": 5}
        assert queue.shared.purge("A") == 5


# Deleting


def test_group_that_could_not_be_deleted_is_still_listed(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Queue(any_url, "A") as queue:
        queue.consumer().close()
        run = Connector.run

        def cut(self: Connector, script: Any, *others: Any) -> Any:
            if script is DELETE_STREAM:
                raise meteor.ConnectionFailed("cut")
            return run(self, script, *others)

        with monkeypatch.context() as patch:
            patch.setattr(Connector, "run", cut)
            with pytest.raises(meteor.ConnectionFailed):
                queue.shared.delete()
        assert [each.name for each in queue.stream.groups()] == [GROUP]
        queue.shared.delete()
        assert queue.stream.groups() == []


def test_group_name_left_by_an_interrupted_delete_is_harmless(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Queue(any_url, "A") as queue:
        queue.consumer().close()
        call = Connector.call

        def cut(self: Connector, *command: Any) -> Any:
            if command[0] == "SREM":
                raise meteor.ConnectionFailed("cut")
            return call(self, *command)

        with monkeypatch.context() as patch:
            patch.setattr(Connector, "call", cut)
            with pytest.raises(meteor.ConnectionFailed):
                queue.shared.delete()
        assert queue.stream.groups() == []
        assert offsets(queue.consumer().poll(5)) == [0]
        assert [each.name for each in queue.stream.groups()] == [GROUP]


def test_group_recreated_during_delete_stays_listed(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Queue(any_url, "A") as queue:
        queue.consumer().close()
        call = Connector.call

        def begin(self: Connector, *command: Any) -> Any:
            if command[0] == "SREM":
                queue.consumer()
            return call(self, *command)

        with monkeypatch.context() as patch:
            patch.setattr(Connector, "call", begin)
            queue.shared.delete()
        assert [each.name for each in queue.stream.groups()] == [GROUP]


# Failures


def test_cost_per_returned_record_does_not_grow_with_the_number_of_records(url: str) -> None:
    cost: dict[int, int] = {}
    for count in (200, 400):
        with Queue(url, max_deliveries=0) as queue:
            queue.publish("A" * count, frame=count)
            c1 = queue.consumer(prefetch=count)
            records = c1.poll(5)
            with c1._deliveries.condition:  # so that the lease renewer sends none of them
                for record in records:
                    record.release(only_this=True)
                queue.client.redis.config_resetstat()
            c1.flush()
            stats: Any = queue.client.redis.info("commandstats")
            cost[count] = sum(int(stat["calls"]) for stat in stats.values())
            again = c1.poll(5)
            assert offsets(again) == [*range(count)]
            assert {record.failures for record in again} == {1}
            queue.check()
            queue.stream.delete()
    assert cost[400] < 2.5 * cost[200]


def test_last_try_of_a_released_record_is_granted_together_with_other_records(any_url: str) -> None:
    with Queue(any_url, "ABCDEFGH", max_deliveries=2) as queue:
        c1 = queue.consumer()
        c1.poll(5)
        c1.rollback()
        again = c1.poll(5)
        assert [(record.offset, record.failures) for record in again] == [(n, 1) for n in range(8)]
        for record in again[1:]:
            record.ack()
        again[0].release()
        c1.flush()
        found = queue.shared.describe()
        assert (found.acked, found.dead, found.confirmed) == (7, 1, 8)


def test_last_try_of_a_dead_consumers_record_is_granted_alone(any_url: str) -> None:
    with Queue(any_url, "ABC", max_deliveries=2) as queue:
        c1, c2 = queue.consumers(2)
        assert len(c1.poll(5)) == 3
        die(c1)
        for number in range(3):
            assert [(r.offset, r.failures) for r in c2.poll(5)] == [(number, 1)]
            c2.commit()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("delays", [(1.0, 300.0), (300.0, 1.0)])
def test_longer_of_two_delays_applies(
    any_url: str, together: bool, delays: tuple[float, float]
) -> None:
    with Queue(any_url, "AAA") as queue:
        c1 = queue.consumer()
        a, b, c = c1.poll(5)
        with c1._deliveries.condition if together else nullcontext():
            c.release(delay=delays[0])
            if not together:
                c1.flush()
            b.release(delay=delays[1])
        c1.flush()
        a.ack()
        c1.flush()
        seconds, _ = queue.client._connector.call("TIME")
        end = float(queue.client._connector.call("ZSCORE", queue.key("delayed"), "A")) / 1000
        assert end > int(seconds) + 100
        assert queue.keys()["A"].state == "delayed"


# Time


def age(queue: Queue, ms: int) -> None:
    """Make the group's last script call look this much older to the server."""
    change_progress(queue.client._connector, queue.shared._protocol, last=-ms)


def test_leases_do_not_expire_while_the_server_hears_from_no_consumer(any_url: str) -> None:
    with Queue(any_url, "ABCD") as queue:
        consumers = queue.consumers(4, prefetch=1)
        records = [consumer.poll(5)[0] for consumer in consumers]
        age(queue, 600_000)
        for consumer, record in zip(consumers, records, strict=True):
            record.ack()
            consumer.flush()
        assert (queue.shared.describe().reaped, queue.shared.confirmed) == (0, 4)


def test_consumer_that_died_during_a_server_outage_is_reaped_later(any_url: str) -> None:
    with Queue(any_url, "AB", lease_ttl=0.5) as queue:
        c1, c2 = queue.consumers(2, prefetch=1)
        c1.poll(5)
        c1._lease_renewer.stop()  # nothing renews its lease any more
        c1._lease_renewer.join(20)
        age(queue, 600_000)
        found: list[int] = []

        def has_both() -> bool:
            found.extend(offsets(c2.poll(0.1)))
            c2.commit()
            return sorted(found) == [0, 1]

        eventually(has_both, 30)
        assert queue.shared.describe().reaped == 1


def test_server_paused_for_longer_than_a_lease_reaps_no_consumer(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with Queue(server.url, "ABCD", lease_ttl=1.0) as queue:
        consumers = queue.consumers(4, prefetch=1)
        records = [consumer.poll(5)[0] for consumer in consumers]
        seconds = int(queue.client._connector.call("TIME")[0])
        server.pause()
        try:
            # Wait until the leases have expired by the server's clock, which is this machine's.
            eventually(lambda: time.time() > seconds + 4, 20)
        finally:
            server.resume()
        for consumer, record in zip(consumers, records, strict=True):
            record.ack()
            consumer.flush()
        assert (queue.shared.describe().reaped, queue.shared.confirmed) == (0, 4)
