"""What others who have message groups got wrong once: each test has the name of its report."""

from __future__ import annotations

import pytest

import meteor_py as meteor
from tests.support.sharing import GROUP, Queue, die, expire, rest


def test_qpid_3804_what_a_rollback_returns_comes_before_what_is_behind_it(any_url: str) -> None:
    """Released messages of a group were skipped by consumers that stood behind them."""
    with Queue(any_url, "ABACA") as queue:
        c1, c2 = queue.consumers(2)
        assert [queue.get(c1) for _ in range(3)] == ["A-0", "B-1", "A-2"]
        assert queue.get(c2) == "C-3"
        c1.rollback()
        assert [queue.get(c2) for _ in range(5)] == ["A-0", "B-1", "A-2", "A-4", None]


def test_qpid_3899_records_that_go_by_themselves_leave_their_key_usable(any_url: str) -> None:
    """The expiry of a message of a group crashed the broker; ours go when the ring is full."""
    with Queue(any_url, "AB" * 4, settings={"capacity": 8}) as queue:
        c1, c2 = queue.consumers(2, on_gap="skip")
        assert queue.get(c1) == "A-0"
        assert len(queue.keys()) == 2  # by which all others are known to wait
        queue.publish("AB" * 3, frame=6)
        first = queue.stream.bounds()[0]
        assert first == 6
        assert rest(queue, c2) == ["B-7", "B-9", "B-11", "B-13"]
        queue.ack(c1, "A-0")  # it has it, gone or not
        assert rest(queue, c1) == ["A-6", "A-8", "A-10", "A-12"]
        queue.ack(c1)
        queue.ack(c2)
        found = queue.shared.describe()
        assert (found.confirmed, found.lost, found.acked) == (14, 5, 9)


@pytest.mark.parametrize("ordering_key", ["key", "header:cart"])
def test_qpid_3577_an_empty_key_is_the_default_key(any_url: str, ordering_key: str) -> None:
    with Queue(any_url, ordering_key=ordering_key) as queue:
        with queue.stream.publisher() as pub:
            pub.publish(b"none")
            pub.publish(b"empty", key=b"", headers={"cart": b""})
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "meteor.no-group-0"
        assert queue.get(c2) is None
        assert queue.get(c1) == "meteor.no-group-1"


def test_qpid_5085_what_is_released_behind_where_others_stand_is_found(any_url: str) -> None:
    """A message that was released behind a consumer's cursor was not seen any more."""
    with Queue(any_url, "ABCDE") as queue:
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "A-0"
        assert rest(queue, c2) == ["B-1", "C-2", "D-3", "E-4"]
        queue.release(c1, "A-0")
        assert queue.get(c2) == "A-0"
        queue.release(c2, "C-2", only_this=True)
        assert queue.get(c1) == "C-2"


def test_pulsar_24736_nothing_is_kept_for_a_consumer_that_has_gone(any_url: str) -> None:
    """Keys stayed with a consumer that had left, and were delivered to nobody."""
    with Queue(any_url, "ABAB") as queue:
        c1, c2, c3 = queue.consumers(3)
        assert queue.get(c1) == "A-0"
        assert queue.get(c2) == "B-1"
        queue.record(c1, "A-0").ack()
        c1.close()  # with something settled on its way
        die(c2)
        assert rest(queue, c3) == ["B-1", "A-2", "B-3"]
        assert [consumer.name for consumer in queue.shared.describe().consumers] == [c3.name]
        parts = queue.shared._protocol.find()
        assert {part for part in parts if part.startswith((b"held:", b"more:"))} == {
            b"held:" + c3._deliveries._consumer.encode()
        }


def test_groupmq_14_a_crash_leaves_no_key_that_is_held_by_nobody(any_url: str) -> None:
    """What was in flight stood in two places, and recovery cleaned one of them."""
    with Queue(any_url, "AABBCC") as queue:
        c1, c2 = queue.consumers(2)
        assert [queue.get(c1) for _ in range(3)] == ["A-0", "A-1", "B-2"]
        die(c1)
        c2.flush()  # it is found dead
        queue.check()
        assert {group.owner for group in queue.keys().values()} == {None}
        found: list[str] = []
        while names := rest(queue, c2):  # of what it held, one of each key at a time
            found += names
            queue.ack(c2)
        assert sorted(found) == ["A-0", "A-1", "B-2", "B-3", "C-4", "C-5"]
        assert found.index("A-0") < found.index("A-1")
        assert queue.keys() == {}


def test_bullmq_3929_records_dropped_while_a_dead_consumer_held_them_free_their_key(
    any_url: str,
) -> None:
    """A job that retention had deleted was counted as running for ever."""
    with Queue(any_url, "AAB", settings={"capacity": 3}) as queue:
        c1, c2 = queue.consumers(2, on_gap="skip")
        assert [queue.get(c1), queue.get(c1)] == ["A-0", "A-1"]
        queue.publish("BAB", frame=3)
        die(c1)
        assert rest(queue, c2) == ["B-3", "A-4", "B-5"]
        queue.ack(c2)
        assert queue.keys() == {}
        found = queue.shared.describe()
        assert (found.confirmed, found.lost) == (6, 3)


def test_bullmq_2774_after_a_failure_the_order_of_a_key_is_what_it_was(any_url: str) -> None:
    """A failed, and the order became B, C, A."""
    with Queue(any_url, "aaa") as queue:
        c1, c2 = queue.consumers(2)
        assert [queue.get(c1) for _ in range(3)] == ["a-0", "a-1", "a-2"]
        queue.release(c1, "a-0")
        assert [queue.get(c2) for _ in range(3)] == ["a-0", "a-1", "a-2"]
        queue.ack(c2, "a-0")
        queue.release(c2, "a-1")
        assert [queue.get(c1) for _ in range(2)] == ["a-1", "a-2"]


def test_aws_dotnet_messaging_174_those_behind_a_failure_in_a_batch_are_not_settled_with_it(
    any_url: str,
) -> None:
    """The rest of a group was skipped after a failure, and deleted as if it was done."""
    with Queue(any_url, "AABA") as queue:
        c1 = queue.consumer()
        batch = c1.poll(5)
        assert [record.offset for record in batch] == [0, 1, 2, 3]
        batch[0].release()
        batch[2].ack()
        c1.commit()  # all that it still holds: nothing
        again = c1.poll(5)
        assert [(record.offset, record.failures) for record in again] == [(0, 1), (1, 0), (3, 0)]
        c1.commit()
        assert queue.shared.confirmed == 4
        assert queue.shared.describe().acked == 4


# What Qpid has not: leases


def test_a_consumer_that_was_taken_for_dead_settles_nothing(any_url: str) -> None:
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
        assert queue.get(c1) is None  # it is one of them again
        queue.ack(c2, "A-0")
        assert queue.get(c1) == "A-1"
