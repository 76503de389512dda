"""Order: a stream is one sequence of records, and every reader sees them in that order.

Records have the offsets 0, 1, 2... without holes. Each publisher's records stay in the order in
which it published them, no matter how many publishers are active. Shared subscribers work in
parallel, but records with the same ordering key are processed in order, by one consumer at a time.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import ExitStack

import meteor_py as meteor
from tests.fundamentals.reading import values
from tests.support.waiting import eventually


def test_records_are_read_in_the_order_in_which_they_were_published(m: meteor.Client) -> None:
    stream = m.stream("orders", create=True)
    with stream.publisher() as pub:
        one = pub.publish(b"a")
        many = pub.publish_many([b"b", b"c", b"d"])
        last = pub.publish(b"e")
    assert (one.result(), many.result(), last.result()) == (0, 1, 4)
    with stream.subscriber(initial_offset="earliest") as sub:
        records = [next(iter(sub)) for _ in range(5)]
    assert [record.offset for record in records] == [0, 1, 2, 3, 4]
    assert [record.value for record in records] == [b"a", b"b", b"c", b"d", b"e"]


def test_each_publisher_keeps_its_order_when_several_publish_at_once(m: meteor.Client) -> None:
    stream = m.stream("orders", create=True)
    start = threading.Barrier(3)

    def publish(name: str) -> None:
        with stream.publisher() as pub:
            start.wait(10)
            for number in range(300):
                pub.publish(f"{name} {number}".encode())

    threads = [threading.Thread(target=publish, args=[name]) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [value.decode().split() for value in values(stream)]  # offsets are 0 to 899
    assert len(found) == 900
    for name in "abc":
        assert [int(number) for who, number in found if who == name] == list(range(300))


def test_all_subscribers_see_the_same_sequence(m: meteor.Client) -> None:
    stream = m.stream("orders", create=True)
    with ExitStack() as stack:
        subs = [stack.enter_context(stream.subscriber()) for _ in range(3)]
        pubs = [stack.enter_context(stream.publisher()) for _ in range(3)]
        for number in range(100):
            pubs[number % 3].publish(b"%d" % number)
        for pub in pubs:
            pub.flush(10)
        sequences = [[next(iter(sub)).value for _ in range(100)] for sub in subs]
    assert sequences[0] == sequences[1] == sequences[2] == values(stream)


def test_records_with_one_key_are_processed_in_order_by_one_consumer_at_a_time(
    m: meteor.Client,
) -> None:
    stream = m.stream("carts", ordering_key="key")
    with stream.publisher() as pub:
        for number in range(200):
            pub.publish(b"%d" % number, key=b"cart-%d" % (number % 7))
    done: dict[bytes | None, list[int]] = defaultdict(list)
    at_work: set[bytes | None] = set()

    def handle(record: meteor.SharedRecord) -> None:
        assert record.key not in at_work, "two consumers have records with the same key"
        at_work.add(record.key)
        done[record.key].append(int(record.value))
        at_work.remove(record.key)

    subs = [stream.shared_subscriber("billing", prefetch=8, max_deliveries=2) for _ in range(3)]
    threads = [threading.Thread(target=sub.run, args=[handle]) for sub in subs]
    for thread in threads:
        thread.start()
    eventually(lambda: sum(map(len, done.values())) >= 200)
    for sub, thread in zip(subs, threads, strict=True):
        sub.close()
        thread.join()
    assert done == {b"cart-%d" % k: list(range(k, 200, 7)) for k in range(7)}


def test_failed_record_holds_back_only_its_own_key(m: meteor.Client) -> None:
    stream = m.stream("carts", ordering_key="key")
    with stream.publisher() as pub:
        pub.publish_many([b"add", b"add", b"pay"], keys=[b"cart-1", b"cart-2", b"cart-1"])
    with stream.shared_subscriber("billing") as sub:
        add, other, _ = sub.poll(5)
        # "add" failed. The consumer also gives back "pay", which has the same key.
        add.release()
        other.ack()
        assert [(record.offset, record.failures) for record in sub.poll(5)] == [(0, 1), (2, 0)]
