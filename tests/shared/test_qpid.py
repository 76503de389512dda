"""Qpid's own tests for message groups, step by step: QueueTest.cpp and msg_groups.py.

The tests have the same names as in Qpid, except for the last two, which cover a note in Qpid's
manual. Record ``A-0`` has the key A and offset 0. Docstrings say where a stream differs from a Qpid
queue.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import meteor_py as meteor
from meteor_py.publish import transaction
from meteor_py.publish.transaction import Stage, Staged
from meteor_py.records.frame import Columns
from tests.support.sharing import STREAM, Queue, die, rest

# QueueTest.cpp


def test_groups_multi_consumer(any_url: str) -> None:
    with Queue(any_url, "aaabbbccc") as queue:
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "a-0"
        assert queue.get(c2) == "b-3"

        queue.ack(c1, "a-0")
        assert queue.get(c2) == "a-1"  # the oldest free record; c2 now owns a and b
        assert queue.get(c1) == "c-6"

        queue.ack(c2, "b-3")
        assert queue.get(c1) == "b-4"
        assert queue.get(c2) == "a-2"
        assert queue.get(c2) is None

        queue.ack(c1, "c-6")
        assert queue.get(c2) == "c-7"

        queue.release(c2, "a-1", only_this=True)
        assert queue.keys()["a"].owner == c2.member  # c2 still holds a-2
        queue.release(c2, "a-2", only_this=True)
        assert queue.keys()["a"].owner is None
        assert queue.get(c1) == "a-1"
        assert queue.get(c1) == "a-2"
        assert queue.get(c2) == "c-8"
        assert queue.get(c1) == "b-5"
        assert queue.get(c1) is None
        assert queue.get(c2) is None

        queue.release(c1, only_this=True)
        c1.close()
        assert queue.get(c2) == "a-1"
        queue.ack(c2)

        c3 = queue.consumer()  # remaining: a-2 b-4 b-5
        assert queue.get(c3) == "a-2"
        assert queue.get(c2) == "b-4"
        assert queue.get(c3) is None
        assert queue.get(c2) == "b-5"
        queue.ack(c2, "b-4", "b-5")

        queue.publish("a")
        assert queue.get(c2) is None  # c3 owns a
        queue.publish("b")
        assert queue.get(c2) == "b-10"
        assert queue.get(c3) == "a-9"
        assert queue.get(c3) is None


def test_groups_multi_consumer_defaults(any_url: str) -> None:
    with Queue(any_url, keyless="default") as queue:
        with queue.stream.publisher() as pub:
            for number in range(3):
                pub.publish(b"%d" % number)
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "meteor.no-group-0"
        assert queue.get(c2) is None
        assert queue.get(c1) == "meteor.no-group-1"
        assert queue.get(c2) is None
        queue.ack(c1)
        assert queue.get(c2) == "meteor.no-group-2"
        assert queue.get(c1) is None


# msg_groups.py


def test_simple(any_url: str) -> None:
    with Queue(any_url, "AAABBBCCC") as queue:
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "A-0"
        assert queue.get(c2) == "B-3"
        queue.ack(c1, "A-0")
        assert queue.get(c2) == "A-1"
        assert queue.get(c1) == "C-6"
        queue.ack(c2, "B-3")
        assert queue.get(c1) == "B-4"
        queue.ack(c1, "C-6")
        assert queue.get(c2) == "A-2"
        assert queue.get(c2) == "C-7"
        queue.ack(c2)
        assert queue.get(c2) == "C-8"  # not B-5, whose key c1 owns
        queue.ack(c1, "B-4")
        assert queue.get(c2) == "B-5"
        assert queue.get(c1) is None
        queue.ack(c2)
        assert queue.shared.confirmed == 9
        assert queue.keys() == {}


def test_simple_browse(any_url: str) -> None:
    """A browser is a plain subscriber here: it also sees held and settled records."""
    with Queue(any_url, "ABABC") as queue:
        c1 = queue.consumer()
        with queue.stream.subscriber(initial_offset="earliest") as browser:

            def browse() -> bytes:
                (record,) = browser.poll(5, max_records=1)
                return b"%b-%d" % (record.value, record.offset)

            assert browse() == b"A-0"
            assert queue.get(c1) == "A-0"
            assert browse() == b"B-1"
            assert browse() == b"A-2"  # although c1 owns key A
            assert browse() == b"B-3"
            assert queue.get(c1) == "B-1"
            assert browse() == b"C-4"
        assert queue.browse() == ["A-0", "B-1", "A-2", "B-3", "C-4"]


def test_release(any_url: str) -> None:
    with Queue(any_url, "AABB") as queue:
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "A-0"
        assert queue.get(c2) == "B-2"
        assert queue.record(c1, "A-0").failures == 0
        queue.release(c1, "A-0")
        assert queue.get(c2) == "A-0"
        assert queue.record(c2, "A-0").failures == 1  # corresponds to Qpid's "redelivered"


def test_reject(any_url: str) -> None:
    with Queue(any_url, "AABB", dead_letter="dead") as queue:
        dead = queue.client.stream("dead", create=True)
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "A-0"
        assert queue.get(c2) == "B-2"
        queue.reject(c1, "A-0")
        assert queue.get(c2) == "A-1"
        c1.close()  # publishes the resulting dead letter, as each poll does
        (letter,) = (record for batch in dead.read() for record in batch)
        assert (letter.value, letter.key) == (b"A", b"A")


def test_close(any_url: str) -> None:
    """A consumer stands for a receiver and its session, which both end when it is closed or dies.

    Unlike in Qpid, the group also detects a consumer that hangs with an open connection, when the
    consumer's lease expires.
    """
    with Queue(any_url, "AABB") as queue:
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "A-0"
        assert queue.get(c2) == "B-2"
        assert queue.get(c2) == "B-3"
        assert queue.get(c2) is None
        c1.close()
        assert queue.get(c2) == "A-0"
        assert queue.get(c2) == "A-1"
        assert queue.get(c2) is None
        assert queue.record(c2, "A-0").failures == 0  # leaving does not count as a failure

        c3 = queue.consumer()
        assert queue.get(c3) is None
        die(c2)
        # Each key's records now arrive one at a time, because any of them may have killed c2.
        assert [queue.get(c3) for _ in range(3)] == ["A-0", "B-2", None]
        queue.ack(c3)
        assert [queue.get(c3) for _ in range(3)] == ["A-1", "B-3", None]
        failures = [queue.record(c3, name).failures for name in ("A-0", "A-1", "B-2", "B-3")]
        assert failures == [1, 0, 1, 0]  # the first record of each key may have been in progress


def test_transaction(any_url: str) -> None:
    """``commit()`` and ``rollback()`` of a consumer stand for those of a Qpid transaction."""
    with Queue(any_url, "AABBAB") as queue:
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "A-0"
        assert queue.get(c2) == "B-2"
        c1.commit()
        c2.rollback()

        assert queue.get(c2) == "A-1"
        assert queue.get(c1) == "B-2"
        c1.commit()
        assert queue.get(c1) == "B-3"  # c2 still owns A, because it has not committed
        assert queue.get(c2) == "A-4"
        c2.rollback()

        assert queue.get(c1) == "A-1"
        assert queue.get(c2) is None
        assert queue.get(c1) == "A-4"
        assert queue.get(c2) is None  # c1 has not committed
        c1.commit()
        assert queue.get(c2) == "B-5"
        c2.commit()
        assert queue.shared.confirmed == 6


class Sender:
    """A session that sends in a transaction: its records are staged until it commits."""

    def __init__(self, stream: meteor.Stream) -> None:
        self._stream = stream
        self._stages: list[Staged] = []
        self._version = -1

    def send(self, group: str) -> None:
        stage = Stage(self._stream._handle, f"w.{self._version}.{len(self._stages)}")
        stage.write(Columns([group.encode()], [group.encode()]))
        self._stages.append(stage.finish())

    def commit(self) -> None:
        self._version += 1
        transaction.commit(self._stream._handle, "w", self._version, self._stages)
        self._stages = []


def test_send_transaction(any_url: str) -> None:
    """``publish()`` is not transactional, so the test stages frames and commits them."""
    with Queue(any_url) as queue:
        sender = Sender(queue.stream)
        sender.send("A")
        sender.send("B")
        sender.commit()
        sender.send("A")
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "A-0"
        assert queue.get(c2) == "B-1"
        assert queue.get(c1) is None
        assert queue.get(c2) is None
        sender.commit()
        sender.send("B")
        assert queue.get(c2) is None
        assert queue.get(c1) == "A-2"
        sender.commit()
        assert queue.get(c1) is None
        assert queue.get(c2) == "B-3"
        c1.rollback()
        assert queue.get(c2) == "A-0"
        assert queue.get(c2) == "A-2"


def test_query(any_url: str) -> None:
    with Queue(any_url, "ABCABCA") as queue:
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "A-0"
        assert queue.get(c2) == "B-1"
        groups = queue.keys()
        assert {name: (g.count, g.owner) for name, g in groups.items()} == {
            "A": (3, c1.member),
            "B": (2, c2.member),
            "C": (2, None),
        }
        assert {name: (g.acquired, g.waiting, g.oldest) for name, g in groups.items()} == {
            "A": (1, 2, 0),
            "B": (1, 1, 1),
            "C": (0, 2, 2),
        }
        assert {name: g.state for name, g in groups.items()} == {
            "A": "owned",
            "B": "owned",
            "C": "ready",
        }


def depth(queue: Queue) -> int:
    """Return Qpid's queue depth: the number of unsettled records."""
    return sum(group.count for group in queue.keys().values())


def test_purge_free(any_url: str) -> None:
    """A purge affects only its shared group. Other readers still see the records."""
    with Queue(any_url, "ABABCA") as queue:
        c1 = queue.consumer()
        assert depth(queue) == 6
        assert queue.shared.purge("B") == 2
        assert depth(queue) == 4
        assert "B" not in queue.keys()
        assert len(queue.browse()) == 6
        assert rest(queue, c1) == ["A-0", "A-2", "C-4", "A-5"]


def test_purge_acquired(any_url: str) -> None:
    with Queue(any_url, "ABABCA") as queue:
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "A-0"
        assert queue.shared.purge("A") == 2
        assert depth(queue) == 4  # including A-0, which c1 holds
        assert queue.keys()["A"].count == 1
        queue.check()
        queue.ack(c1, "A-0")
        assert depth(queue) == 3
        assert rest(queue, c2) == ["B-1", "B-3", "C-4"]


def test_purge_count(any_url: str) -> None:
    with Queue(any_url, "ABABCA") as queue:
        c1 = queue.consumer()
        assert queue.get(c1) == "A-0"
        assert queue.shared.purge("A", limit=1) == 1
        queue.check()
        groups = queue.keys()
        assert (groups["A"].acquired, groups["A"].waiting) == (1, 1)
        assert rest(queue, c1) == ["B-1", "B-3", "C-4", "A-5"]


def move(queue: Queue, group: str, limit: int | None = None) -> list[str]:
    """Copy a key's waiting records to another stream, purge them here, and return the copies."""
    state = queue.keys()[group]
    waiting = [
        record
        for batch in queue.stream.read()
        for record in batch
        if record.key == group.encode() and record.offset >= state.oldest
    ][state.acquired :][:limit]
    target = queue.client.stream("dest-q", ordering_key="key")
    with target.publisher() as pub:
        for record in waiting:
            pub.publish(b"%b-%d" % (record.value, record.offset), key=record.key)
    assert queue.shared.purge(group, limit) == len(waiting)
    queue.check()
    with target.shared_subscriber("movers") as sub:
        return [record.value.decode() for record in sub.poll(5)]


def test_move_all(any_url: str) -> None:
    """A log cannot move records, so copy and then purge. A crash in between leaves both copies."""
    with Queue(any_url, "ABABCA") as queue:
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "A-0"
        assert move(queue, "A") == ["A-2", "A-5"]
        assert rest(queue, c2) == ["B-1", "B-3", "C-4"]


def test_move_count(any_url: str) -> None:
    """See ``test_move_all``."""
    with Queue(any_url, "ABABCA") as queue:
        c1 = queue.consumer()
        assert move(queue, "B", 3) == ["B-1", "B-3"]
        assert rest(queue, c1) == ["A-0", "A-2", "C-4", "A-5"]


def test_reroute(any_url: str) -> None:
    """Streams have no exchanges, so this is like ``test_move_all``, but A-0 is settled later."""
    with Queue(any_url, "ABABCA") as queue:
        c1 = queue.consumer()
        assert queue.get(c1) == "A-0"
        assert move(queue, "A") == ["A-2", "A-5"]
        assert rest(queue, c1) == ["B-1", "B-3", "C-4"]
        queue.ack(c1)
        assert queue.shared.confirmed == 6


def test_queue_delete(any_url: str) -> None:
    with Queue(any_url, "ABCABC") as queue:
        c1, c2 = queue.consumers(2)
        assert queue.get(c1) == "A-0"
        assert queue.get(c2) == "B-1"
        queue.stream.delete()
        for consumer in (c1, c2):
            with pytest.raises(meteor.StreamNotFound):
                queue.get(consumer)
        assert queue.client.redis.keys(f"meteor:{{{STREAM}}}:*") == []


def test_default_group_id(any_url: str) -> None:
    with Queue(any_url, keyless="default") as queue:
        queue.consumer()
        with queue.stream.publisher() as pub:
            pub.publish(b"without a group")
        assert [*queue.keys()] == ["meteor.no-group"]


def test_transaction_order(any_url: str) -> None:
    with Queue(any_url, "ABA") as queue:
        c1 = queue.consumer()
        assert queue.get(c1) == "A-0"
        c1.rollback()
        assert [queue.get(c1) for _ in range(3)] == ["A-0", "B-1", "A-2"]
        c1.commit()


def test_ttl_expire(any_url: str) -> None:
    """Records have no time to live, so an application purges records that it no longer wants."""
    with Queue(any_url, "ABCABC") as queue:
        c1, c2 = queue.consumers(2)
        assert queue.shared.purge("B") == 2
        assert queue.get(c1) == "A-0"
        assert queue.get(c2) == "C-2"
        assert queue.get(c1) == "A-3"
        assert queue.get(c2) == "C-5"
        assert queue.get(c1) is None
        assert queue.get(c2) is None


# A note in Qpid's manual describes this case: release A-0, then acknowledge A-1


@pytest.fixture
def noted(any_url: str) -> Iterator[Queue]:
    with Queue(any_url, "AA") as queue:
        yield queue


def test_record_released_with_only_this_can_be_processed_after_the_next_one(noted: Queue) -> None:
    c1, c2 = noted.consumers(2)
    assert [noted.get(c1), noted.get(c1)] == ["A-0", "A-1"]
    noted.release(c1, "A-0", only_this=True)
    assert noted.get(c2) is None  # while c1 holds A-1
    noted.ack(c1, "A-1")
    assert noted.get(c2) == "A-0"
    noted.ack(c2)
    assert noted.shared.confirmed == 2


def test_release_returns_the_next_record_of_its_key_to_keep_order(noted: Queue) -> None:
    c1, c2 = noted.consumers(2)
    assert [noted.get(c1), noted.get(c1)] == ["A-0", "A-1"]
    later = noted.record(c1, "A-1")
    noted.release(c1, "A-0")
    with pytest.raises(meteor.Fenced) as refused:
        later.ack()
    assert refused.value.offsets == (1,)
    assert [noted.get(c2), noted.get(c2)] == ["A-0", "A-1"]
    noted.ack(c2)
    assert noted.shared.confirmed == 2
