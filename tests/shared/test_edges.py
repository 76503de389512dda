"""Edge cases of shared groups: huge offsets, unusual columns, hung handlers, resumed streams."""

from __future__ import annotations

import logging
import queue as queues
import random
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.subscribe.dead_letters import LETTERS_CAPACITY
from tests.conftest import emptied
from tests.support.sharing import STREAM, Queue, Runner, check, die, drain, offsets
from tests.support.waiting import eventually

# Offsets that Lua would write with too few digits


@pytest.mark.parametrize("start", [10**14 - 5, 10**15 + 1, 2**53 - 1_000])
def test_offsets_of_any_size_keep_all_their_digits(any_url: str, start: int) -> None:
    with Queue(any_url, max_deliveries=2, dead_letter="dead") as queue:
        queue.client._connector.call("HSET", keys.meta(STREAM), "next", start)
        c0 = queue.consumer(initial_offset="latest")
        queue.publish("AABAB", frame=3)
        queue.publish("AABAB")
        c0.close()
        c1, c2 = queue.consumers(2)
        records = c1.poll(5)
        assert offsets(records) == [*range(start, start + 10)]
        queue.check()
        records[2].release(delay=60.0)
        records[3].ack()
        records[1].release(only_this=True)
        c1.flush()
        queue.check()
        assert queue.keys()["B"].oldest == start + 2
        assert queue.shared.confirmed == start
        assert c1.resume("B")
        die(c1)
        c2.flush()  # also takes back the records of c1
        assert [o - start for o in offsets(c2.poll(5))] == [0]  # its last try is delivered alone
        queue.check()
        c2.poll(0)
        c2.commit()
        found: list[int] = []
        while records := c2.poll(0):
            found += offsets(records)
            c2.commit()
        assert sorted(o - start for o in found) == [1, 2, 4, 5, 6, 7, 8, 9]
        assert queue.shared.confirmed == start + 10


def test_lost_and_purged_offsets_keep_their_digits(any_url: str) -> None:
    start = 10**15 + 1
    with Queue(any_url, settings={"capacity": 10}) as queue:
        queue.client._connector.call("HSET", keys.meta(STREAM), "next", start)
        c1 = queue.consumer(initial_offset="latest")
        for _ in range(3):
            queue.publish("ABABABABAB", frame=10)
        with pytest.raises(meteor.RecordsLost) as lost:
            c1.poll(5)
        assert (lost.value.first - start, lost.value.last - start) == (0, 19)
        assert queue.shared.describe().lost_last == (start, start + 19)
        c1.rollback()
        c1.close()
        assert queue.shared.purge("A", limit=3) == 3
        queue.check()
        assert queue.keys()["A"].oldest == start + 26
        found = drain(queue.consumer())
        assert [o - start for o in offsets(found)] == [21, 23, 25, 26, 27, 28, 29]


# Columns


def test_ordering_keys_come_from_binary_text_sliced_and_chunked_columns(any_url: str) -> None:
    with Queue(any_url, settings={"capacity": 100_000}) as queue:
        count = 9_000
        ids = [b"%d" % (n % 7) if n % 5 else None for n in range(count + 10)]
        values = pa.array([b"v"] * (count + 10), pa.binary())
        with queue.stream.publisher() as pub:
            for kind in (pa.binary(), pa.large_binary(), pa.string()):
                column: Any = pa.array(
                    ids if kind != pa.string() else [each and each.decode() for each in ids], kind
                )
                pub.publish_many(values.slice(10), keys=column.slice(10))
            chunked = pa.chunked_array([pa.array(ids[10:5_000]), pa.array(ids[5_000:])])
            pub.publish_many(values.slice(10), keys=chunked)
        expected = [each or b"meteor.no-group" for each in ids[10:]] * 4
        with queue.consumer(prefetch=10_000, keyless="default") as c1:
            found = sorted(drain(c1), key=lambda record: record.offset)
        assert [record.ordering_key for record in found] == expected


# Worker pools


def test_other_consumers_get_unstarted_records_when_all_handlers_hang(url: str) -> None:
    with Queue(url, "ABCB") as queue:
        one = queue.consumer(max_poll_interval=0.2)
        go_on = threading.Event()
        begun: list[int] = []

        def hang(record: meteor.SharedRecord) -> None:
            begun.append(record.offset)
            assert go_on.wait(60)

        with Runner(one, hang):
            eventually(lambda: begun == [0])
            two = queue.consumer()
            found: list[int] = []

            def others_have_them() -> bool:
                for record in two.poll(0.1):
                    found.append(record.offset)
                    record.ack()
                return sorted(found) == [0, 1, 2, 3]

            eventually(others_have_them, 30)
            go_on.set()
            queue.publish("D")  # the worker pool continues with new records
            eventually(lambda: queue.shared.confirmed == 5, 30)
        assert begun == [0, 4]


def test_run_raises_records_lost_once_and_the_next_run_continues(any_url: str) -> None:
    with Queue(any_url, settings={"capacity": 10}) as queue:
        c1 = queue.consumer()
        for _ in range(3):
            queue.publish("ABABABABAB", frame=10)
        done: list[int] = []

        def handle(record: meteor.SharedRecord) -> None:
            done.append(record.offset)

        with pytest.raises(meteor.RecordsLost):
            c1.run(handle)
        with Runner(c1, handle):
            eventually(lambda: len(done) == 10)
        assert sorted(done) == [*range(20, 30)]
        assert c1.confirmed == 30


# Threads


def test_records_can_be_settled_in_many_threads_while_one_polls(
    any_url: str, rng: random.Random
) -> None:
    with Queue(any_url, max_deliveries=0) as queue:
        queue.publish([rng.choice("ABCDEFGH") for _ in range(600)], frame=20)
        c1 = queue.consumer(prefetch=32, max_per_key=10_000)
        handed: queues.Queue[meteor.SharedRecord | None] = queues.Queue()
        settled: list[int] = []
        fates = [rng.random() for _ in range(10_000)]

        def settle() -> None:
            while (record := handed.get()) is not None:
                try:
                    fate = fates.pop()
                    if fate < 0.1:
                        record.release()
                    elif fate < 0.2:
                        record.release(only_this=True)
                    else:
                        record.ack()
                        settled.append(record.offset)
                except meteor.Fenced:
                    pass  # returned with an earlier record, and redelivered

        threads = [threading.Thread(target=settle, name=f"test-{n}") for n in range(4)]
        for thread in threads:
            thread.start()
        try:

            def all_settled() -> bool:
                for record in c1.poll(0.02):
                    handed.put(record)
                return len(settled) >= 600

            eventually(all_settled, 60)
        finally:
            for _ in threads:
                handed.put(None)
            for thread in threads:
                thread.join(20)
        c1.flush()
        assert sorted(settled) == [*range(600)]
        assert c1.confirmed == 600


# A stream whose server was lost


def test_shared_group_on_a_resumed_stream_reads_archived_records(url: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ordering_key": "key", "capacity": 100, "store": str(tmp_path)}
    with meteor.connect(url) as client:
        stream = client.stream(STREAM, **settings)
        with stream.publisher() as pub:
            for _ in range(50):
                pub.publish_many([b"v"] * 10, keys=[b"A", b"B"] * 5)
        stream.store.flush()
    emptied(url)
    with meteor.connect(url) as client:
        stream = client.stream(STREAM, resume=True, **settings)
        with stream.publisher() as pub:
            pub.publish_many([b"v"] * 10, keys=[b"A", b"B"] * 5)
        with stream.shared_subscriber("billing") as sub:
            found = drain(sub)
            assert sorted(offsets(found)) == [*range(510)]
            for group in (b"A", b"B"):
                each = [record.offset for record in found if record.ordering_key == group]
                assert each == sorted(each)
        check(stream)


# Dead-letter streams that are created, deleted and recreated


def test_created_dead_letter_stream_has_room_for_many_letters(
    any_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Queue(any_url, "A", dead_letter="dead") as queue, caplog.at_level(logging.INFO):
        c1 = queue.consumer()
        c1.poll(5)[0].reject("no")
        c1.poll(0)
        assert queue.client.stream("dead").config.capacity == LETTERS_CAPACITY
        assert f"keeps the newest {LETTERS_CAPACITY} dead letters" in caplog.text


def test_deleted_dead_letter_stream_is_created_again(any_url: str) -> None:
    with Queue(any_url, "ABC", dead_letter="dead") as queue:
        c1 = queue.consumer()
        for number, record in enumerate(c1.poll(5)):
            record.reject("no")
            c1.poll(0)
            dead = queue.client.stream("dead", create=True)
            assert [r.value for batch in dead.read() for r in batch] == [record.value]
            dead.delete()
            if number == 1:
                queue.client.stream("dead", create=True)  # as another client might
        c1.flush()
        assert (c1.confirmed, queue.shared.describe().dead) == (3, 3)


# Limit on waiting records


def test_scanning_stops_at_max_waiting_and_continues_later(any_url: str) -> None:
    with Queue(any_url, max_per_key=1) as queue:
        c1, c2 = queue.consumers(2)
        queue.client._connector.call("HSET", queue.key("meta"), "max_waiting", 5)
        queue.publish("A" * 20 + "B", frame=7)
        (first,) = c1.poll(5)
        assert c2.poll(0) == []
        found = queue.shared.describe()
        assert found.waiting >= 5  # the number can exceed the limit slightly
        assert found.scanned < 20
        queue.check()
        first.ack()
        c1.flush()
        assert sorted(offsets(drain(c2))) == [*range(1, 21)]
        assert queue.shared.confirmed == 21
