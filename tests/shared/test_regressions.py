"""Bugs that other systems with message groups had; each test is named after its report."""

from __future__ import annotations

import pytest

import meteor_py as meteor
from tests.support.sharing import GROUP, Queue, die, expire, rest


def test_qpid_3804_rolled_back_records_come_before_later_ones(any_url: str) -> None:
    """Consumers skipped a group's released messages if they had already passed them."""
    with Queue(any_url, "ABACA") as queue:
        c1, c2 = queue.consumers(2)
        assert [queue.get(c1) for _ in range(3)] == ["A-0", "B-1", "A-2"]
        assert queue.get(c2) == "C-3"
        c1.rollback()
        assert [queue.get(c2) for _ in range(5)] == ["A-0", "B-1", "A-2", "A-4", None]


def test_qpid_3899_dropped_records_leave_their_key_usable(any_url: str) -> None:
    """Expiry of a group's message crashed the broker; here a full ring drops records."""
    with Queue(any_url, "AB" * 4, settings={"capacity": 8}) as queue:
        c1, c2 = queue.consumers(2, on_gap="skip")
        assert queue.get(c1) == "A-0"
        assert len(queue.keys()) == 2
        queue.publish("AB" * 3, frame=6)
        first = queue.stream.bounds()[0]
        assert first == 6
        assert rest(queue, c2) == ["B-7", "B-9", "B-11", "B-13"]
        queue.ack(c1, "A-0")  # c1 still holds the record, although the ring dropped it
        assert rest(queue, c1) == ["A-6", "A-8", "A-10", "A-12"]
        queue.ack(c1)
        queue.ack(c2)
        found = queue.shared.describe()
        assert (found.confirmed, found.lost, found.acked) == (14, 5, 9)


@pytest.mark.parametrize("ordering_key", ["key", "header:cart"])
def test_qpid_3577_empty_key_is_the_default_key(any_url: str, ordering_key: str) -> None:
    with Queue(any_url, ordering_key=ordering_key, keyless="default") as queue:
        with queue.stream.publisher() as pub:
            pub.publish(b"none")
            pub.publish(b"empty", key=b"", headers={"cart": b""})
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "meteor.no-group-0"
        assert queue.get(c2) is None
        assert queue.get(c1) == "meteor.no-group-1"


def test_qpid_5085_record_released_before_other_consumers_position_is_found(any_url: str) -> None:
    """A message released behind a consumer's cursor was never seen again."""
    with Queue(any_url, "ABCDE") as queue:
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "A-0"
        assert rest(queue, c2) == ["B-1", "C-2", "D-3", "E-4"]
        queue.release(c1, "A-0")
        assert queue.get(c2) == "A-0"
        queue.release(c2, "C-2", only_this=True)
        assert queue.get(c1) == "C-2"


def test_pulsar_24736_nothing_is_kept_for_a_consumer_that_left(any_url: str) -> None:
    """Keys stayed assigned to a consumer that had left and were never delivered."""
    with Queue(any_url, "ABAB") as queue:
        c1, c2, c3 = queue.consumers(3)
        assert queue.get(c1) == "A-0"
        assert queue.get(c2) == "B-1"
        queue.record(c1, "A-0").ack()
        c1.close()  # while a settlement is pending
        die(c2)
        c3.flush()  # c3 reaps the dead consumer
        assert rest(queue, c3) == ["B-1", "A-2", "B-3"]
        assert [consumer.name for consumer in queue.shared.describe().consumers] == [c3.member]
        parts = queue.shared._protocol.find()
        assert {part for part in parts if part.startswith((b"batches:", b"more:", b"wake:"))} == {
            b"batches:" + c3._deliveries._consumer.encode()
        }


def test_groupmq_14_crash_leaves_no_key_locked(any_url: str) -> None:
    """Messages in flight were stored in two places, and recovery cleaned only one."""
    with Queue(any_url, "AABBCC") as queue:
        c1, c2 = queue.consumers(2)
        assert [queue.get(c1) for _ in range(3)] == ["A-0", "A-1", "B-2"]
        die(c1)
        c2.flush()  # c2 reaps the dead consumer
        queue.check()
        assert {group.owner for group in queue.keys().values()} == {None}
        found: list[str] = []
        while names := rest(queue, c2):  # c1's records are granted one per key at a time
            found += names
            queue.ack(c2)
        assert sorted(found) == ["A-0", "A-1", "B-2", "B-3", "C-4", "C-5"]
        assert found.index("A-0") < found.index("A-1")
        assert queue.keys() == {}


def test_bullmq_3929_dropped_records_of_a_dead_consumer_free_their_key(
    any_url: str,
) -> None:
    """A job that retention had deleted was counted as running forever."""
    with Queue(any_url, "AAB", settings={"capacity": 3}) as queue:
        c1, c2 = queue.consumers(2, on_gap="skip")
        assert [queue.get(c1), queue.get(c1)] == ["A-0", "A-1"]
        queue.publish("BAB", frame=3)
        die(c1)
        c2.flush()  # c2 reaps the dead consumer
        assert sorted(rest(queue, c2)) == ["A-4", "B-3", "B-5"]
        queue.ack(c2)
        assert queue.keys() == {}
        found = queue.shared.describe()
        assert (found.confirmed, found.lost) == (6, 3)


def test_bullmq_2774_failure_keeps_a_keys_order(any_url: str) -> None:
    """After job A failed, the order became B, C, A."""
    with Queue(any_url, "aaa") as queue:
        c1, c2 = queue.consumers(2)
        assert [queue.get(c1) for _ in range(3)] == ["a-0", "a-1", "a-2"]
        queue.release(c1, "a-0")
        assert [queue.get(c2) for _ in range(3)] == ["a-0", "a-1", "a-2"]
        queue.ack(c2, "a-0")
        queue.release(c2, "a-1")
        assert [queue.get(c1) for _ in range(2)] == ["a-1", "a-2"]


def test_aws_dotnet_messaging_174_failure_does_not_settle_later_records_of_its_batch(
    any_url: str,
) -> None:
    """After a failure, the rest of a group was skipped and deleted as if processed."""
    with Queue(any_url, "AABA") as queue:
        c1 = queue.consumer()
        batch = c1.poll(5)
        assert [record.offset for record in batch] == [0, 1, 2, 3]
        batch[0].release()
        batch[2].ack()
        c1.commit()  # acknowledges nothing else, because c1 holds no other record
        again = c1.poll(5)
        assert [(record.offset, record.failures) for record in again] == [(0, 1), (1, 0), (3, 0)]
        c1.commit()
        assert queue.shared.confirmed == 4
        assert queue.shared.describe().acked == 4


# Leases, which Qpid does not have


def test_expired_consumer_settles_nothing(any_url: str) -> None:
    with Queue(any_url, "AAB") as queue:
        c1, c2 = queue.consumers(2)
        assert [queue.get(c1), queue.get(c1)] == ["A-0", "A-1"]
        queue.record(c1, "A-0").ack()
        expire(c1)
        c2.flush()
        before = queue.shared.describe()
        with pytest.raises(meteor.Fenced) as refused:
            c1.flush()
        assert refused.value.offsets == (0,)
        assert refused.value.group == GROUP
        with pytest.raises(meteor.Fenced):
            queue.record(c1, "A-1").ack()
        after = queue.shared.describe()
        assert (after.acked, after.confirmed) == (before.acked, before.confirmed) == (0, 0)
        assert [queue.get(c2), queue.get(c2)] == ["A-0", "B-2"]
        assert queue.get(c1) is None  # c1 has rejoined, but c2 owns both keys
        queue.ack(c2, "A-0")
        assert queue.get(c1) == "A-1"
