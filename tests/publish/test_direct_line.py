"""The direct line: sections 1 to 8 test the invariants in publish/direct_line.py.

A publishing thread sends a lone record itself and reads the reply. No record may be lost,
duplicated or reordered, whatever interrupts the thread.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.publish import sender as sender_module
from meteor_py.publish.accumulator import Accumulator
from meteor_py.publish.batch import Batch
from meteor_py.publish.direct_line import BYTES_MAX, State
from tests.support.forking import exit_code, fork
from tests.support.interrupts import Interrupts
from tests.support.proxied_stream import ProxiedStream, failure
from tests.support.proxied_stream import proxied as proxied
from tests.support.waiting import eventually


def wait_until_lent(pub: meteor.Publisher) -> None:
    """Publish records until the direct line is free, so that the next record can take it."""

    def is_lent() -> bool:
        if pub._sender._line.state is State.FREE:
            return True
        pub.publish(b"first").result(10)
        return False

    eventually(is_lent, message="the sender did not lend its connection")


def lent_publisher(proxied: ProxiedStream, **options: Any) -> meteor.Publisher:
    pub = proxied.warm_publisher(**options)
    wait_until_lent(pub)
    return pub


def publish_directly(proxied: ProxiedStream, pub: meteor.Publisher, value: bytes) -> meteor.Ack:
    """Publish a record on the direct line while replies are stalled."""
    wait_until_lent(pub)
    proxied.proxy.stall("replies")
    ack = pub.publish(value)
    assert pub._sender._line.batch is ack._completion, "the record did not take the direct line"
    return ack


def records(proxied: ProxiedStream) -> list[bytes]:
    """Return all values except those published to make the direct line free."""
    return [value for value in proxied.values() if value != b"first"]


# 1. One owner


def test_threads_that_share_a_publisher_get_their_own_offsets(
    proxied: ProxiedStream,
) -> None:
    pub = proxied.warm_publisher()
    found: dict[bytes, int] = {}

    def publish(name: int) -> None:
        for number in range(300):
            value = b"%d:%d" % (name, number)
            found[value] = pub.publish(value).result(20)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    log = proxied.values()
    assert {value: offset for offset, value in enumerate(log) if offset} == found


def test_several_threads_can_wait_for_the_same_record(proxied: ProxiedStream) -> None:
    pub = lent_publisher(proxied)
    ack = publish_directly(proxied, pub, b"x")
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(ack.result(20))) for _ in range(3)]
    for thread in threads:
        thread.start()
    proxied.proxy.resume()
    for thread in threads:
        thread.join(20)
    assert found == [proxied.values().index(b"x")] * 3


# 2. Order


def test_record_behind_an_unanswered_one_is_left_to_the_sender_and_keeps_its_place(
    proxied: ProxiedStream,
) -> None:
    pub = lent_publisher(proxied)
    first = publish_directly(proxied, pub, b"a")
    others = [pub.publish(b"%d" % number) for number in range(20)]
    eventually(lambda: pub._sender._line.state is State.SENDER, message="the line is still lent")
    proxied.proxy.resume()
    offsets = [ack.result(10) for ack in (first, *others)]
    assert offsets == list(range(offsets[0], offsets[0] + 21))
    assert records(proxied) == [b"a", *(b"%d" % number for number in range(20))]


def test_record_published_while_the_sender_takes_an_earlier_one_stays_behind_it(
    proxied: ProxiedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, published = threading.Event(), threading.Event()
    take = Accumulator.take

    def take_slowly(self: Accumulator, **options: bool) -> Batch | None:
        batch = take(self, **options)
        if batch is not None and batch.nbytes > BYTES_MAX:
            taken.set()
            published.wait(10)
        return batch

    monkeypatch.setattr(Accumulator, "take", take_slowly)
    pub = lent_publisher(proxied)
    large = pub.publish(bytes(BYTES_MAX + 1))  # too large for the line
    assert taken.wait(10)
    small = pub.publish(b"small")
    published.set()
    assert large.result(10) + 1 == small.result(10)


def test_records_of_all_kinds_are_appended_in_call_order(
    proxied: ProxiedStream, rng: random.Random
) -> None:
    pub = proxied.warm_publisher()
    expected: list[bytes] = []
    for number in range(400):
        value = b"%d" % number
        expected.append(value)
        match rng.randrange(6):
            case 0 | 1:
                pub.publish(value).result(10)
            case 2:
                pub.publish(value)
            case 3:
                pub.publish(value, key=b"", headers={"h": b""}, timestamp=0)
            case 4:
                pub.publish_many([value])
            case 5:
                pub.publish(value, key=b"k").result(10)
    pub.flush(10)
    assert records(proxied) == expected


# 3. One moment of publishing, 4. no guesses


def test_interrupts_at_any_point_neither_duplicate_a_record_nor_misplace_an_ack(
    url: str, rng: random.Random
) -> None:
    acks: list[tuple[bytes, meteor.Ack]] = []
    with meteor.connect(url) as m:
        stream = m.stream("s", capacity=1_000_000)
        with stream.publisher() as pub, Interrupts(rng) as interrupts:
            number = 0

            def publish() -> None:
                nonlocal number
                number += 1
                value = b"%d" % number
                ack = pub.publish(value)
                acks.append((value, ack))
                if number % 3:
                    ack.result(20)

            deadline = time.monotonic() + 2
            while time.monotonic() < deadline:
                interrupts.during(publish)
            assert interrupts.count > 50
            pub.flush(20)
        log = {record.offset: record.value for batch in stream.read() for record in batch}
        for value, ack in acks:
            assert log[ack.result(0)] == value
        assert max(Counter(log.values()).values()) == 1
        assert list(map(int, log.values())) == sorted(map(int, log.values()))


@pytest.mark.parametrize("cut", ["cut_after_request", "cut_before_request"])
def test_connection_cut_during_a_wait_neither_loses_nor_duplicates_records(
    proxied: ProxiedStream, cut: str
) -> None:
    pub = proxied.warm_publisher()
    for offset in range(1, 20):
        if offset % 3 == 0:
            getattr(proxied.proxy, cut)(match=b"EVAL")
        assert pub.publish(b"%d" % offset).result(10) == offset
    assert proxied.values()[1:] == [b"%d" % offset for offset in range(1, 20)]


def test_reply_that_arrives_in_pieces_is_read_whole(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher()
    proxied.proxy.chunk(1, pause_s=0.002)
    for offset in range(1, 10):
        ack = pub.publish(b"x")
        if offset % 2:
            eventually(ack.done)
        assert ack.result(10) == offset


# 5. The sender decides


def test_callbacks_run_in_the_senders_thread(proxied: ProxiedStream) -> None:
    pub = lent_publisher(proxied)
    for waits in (False, True):
        ack = publish_directly(proxied, pub, b"x")
        names: list[str] = []
        done = threading.Event()

        def callback(_: meteor.Ack) -> None:
            names.append(threading.current_thread().name)  # noqa: B023
            done.set()  # noqa: B023

        ack.add_done_callback(callback)
        proxied.proxy.resume()
        if waits:
            ack.result(10)
        assert done.wait(10)
        assert names[0].startswith("meteor-sender")


def test_callback_added_while_another_thread_reads_is_called_once_by_the_sender(
    proxied: ProxiedStream,
) -> None:
    pub = lent_publisher(proxied)
    ack = publish_directly(proxied, pub, b"x")
    reading = threading.Thread(target=ack.result, args=(20,))
    reading.start()
    eventually(lambda: pub._sender._line.state is State.READING)
    names: list[str] = []
    ack.add_done_callback(lambda _: names.append(threading.current_thread().name))
    proxied.proxy.resume()
    reading.join(20)
    eventually(lambda: bool(names))
    pub.flush(10)
    assert [name.startswith("meteor-sender") for name in names] == [True]


def test_acks_can_be_awaited_one_at_a_time(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher()

    async def publish() -> list[int]:
        return [await pub.publish(b"%d" % number) for number in range(50)]

    assert asyncio.run(publish()) == list(range(1, 51))


def test_replies_other_than_an_offset_are_handled_by_the_sender(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher()
    for offset in range(1, 5):
        proxied.direct.script_flush()
        assert pub.publish(b"x").result(5) == offset
    proxied.forget_producers()
    assert pub.publish(b"x").result(5) == 5
    proxied.direct.config_set("maxmemory", 1)
    try:
        refused = pub.publish(b"x")
        with pytest.raises(TimeoutError):
            refused.result(0.2)
    finally:
        proxied.direct.config_set("maxmemory", 0)
    assert refused.result(5) == 6
    proxied.stream.delete()
    with pytest.raises(meteor.StreamNotFound):
        pub.publish(b"x").result(5)


def test_refused_record_has_a_known_outcome_even_if_a_thread_read_the_reply(
    proxied: ProxiedStream,
) -> None:
    pub = lent_publisher(proxied)
    proxied.stream.delete()
    error = failure(pub.publish(b"x"))
    assert isinstance(error, meteor.StreamNotFound)


# 6. Exact counts


def test_flush_and_close_wait_for_the_record_in_flight(proxied: ProxiedStream) -> None:
    pub = lent_publisher(proxied)
    ack = publish_directly(proxied, pub, b"x")
    with pytest.raises(TimeoutError):
        pub.flush(timeout=0.2)
    assert not ack.done()
    proxied.proxy.resume()
    pub.flush(5)
    assert ack.done()
    wait_until_lent(pub)
    last = pub.publish(b"y")
    pub.close()
    assert last.offset == proxied.next - 1


def test_record_in_flight_counts_toward_max_pending_bytes(proxied: ProxiedStream) -> None:
    pub = lent_publisher(proxied, max_pending_bytes=1_000)
    publish_directly(proxied, pub, bytes(600))
    pub.publish(bytes(200))
    offsets: list[int] = []
    blocked = threading.Thread(target=lambda: offsets.append(pub.publish(bytes(210)).result(20)))
    blocked.start()
    eventually(lambda: pub._accumulator._waiters == 1, message="the record was accepted")
    proxied.proxy.resume()
    blocked.join(20)
    assert offsets == [proxied.next - 1]
    assert [len(value) for value in records(proxied)] == [600, 200, 210]


def test_full_publisher_continues_as_soon_as_the_record_in_flight_is_acknowledged(
    proxied: ProxiedStream,
) -> None:
    pub = lent_publisher(proxied, max_pending_bytes=1_000)
    publish_directly(proxied, pub, bytes(900))
    resume = threading.Timer(0.1, proxied.proxy.resume)
    resume.start()
    assert pub.publish(bytes(900)).result(10) == proxied.next - 1
    resume.join()


def test_ack_that_no_thread_waits_for_is_settled(proxied: ProxiedStream) -> None:
    pub = lent_publisher(proxied)
    ack = pub.publish(b"a")
    assert isinstance(ack._completion, Batch)
    batch = ack._completion
    eventually(lambda: batch.settled)  # unlike ack.done(), this does not read the reply
    assert ack.offset == proxied.next - 1


# 7. No stale server


def test_sender_publishes_and_lends_its_connection_again_after_an_idle_period(
    proxied: ProxiedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "_REPLICATION_ID_S", 0.1)
    pub = proxied.warm_publisher()
    eventually(lambda: pub._sender._line.state is State.SENDER)
    before = proxied.proxy.counters.requests
    assert pub.publish(b"x").result(10) == 1
    assert proxied.proxy.counters.requests == before + 2, "the server was not checked first"
    wait_until_lent(pub)


def test_producer_lifetime_is_renewed_even_if_records_take_the_direct_line(
    proxied: ProxiedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "_RENEW_PRODUCER_S", 0.3)
    pub = lent_publisher(proxied)
    (key,) = proxied.producer_keys()
    proxied.direct.pexpire(key, 20_000)
    ack = pub.publish(b"x")
    direct = pub._sender._line.batch is ack._completion
    ack.result(5)
    assert not direct or proxied.direct.pttl(key) <= 20_000

    def is_renewed() -> bool:
        pub.publish(b"x").result(5)
        return proxied.direct.pttl(key) > 20_000

    eventually(is_renewed)


# 8. Bounded waits, one lock


def test_signal_handler_publishes_and_waits_while_its_thread_waits(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher()
    inner: list[int] = []
    refused = 0

    def handle(*_: object) -> None:
        nonlocal refused
        try:
            inner.append(pub.publish(b"inner").result(5))
        except RuntimeError:
            refused += 1  # the handler interrupted a publish

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    outer = 0
    try:
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            pub.publish(b"outer").result(5)
            outer += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    values = Counter(proxied.values())
    assert values[b"outer"] == outer
    assert values[b"inner"] == len(inner) > 0


def test_signal_handler_flushes_while_its_thread_waits(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher()
    flushed = 0

    def handle(*_: object) -> None:
        nonlocal flushed
        signal.setitimer(signal.ITIMER_REAL, 0)
        pub.flush(5)
        flushed += 1
        signal.setitimer(signal.ITIMER_REAL, 0.005)

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.005)
    outer = 0
    try:
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            pub.publish(b"outer").result(5)
            outer += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert flushed > 10
    assert Counter(proxied.values())[b"outer"] == outer


def test_result_honours_its_timeout_and_the_record_arrives_later(proxied: ProxiedStream) -> None:
    pub = lent_publisher(proxied)
    ack = publish_directly(proxied, pub, b"x")
    with pytest.raises(TimeoutError, match=r"within 0\.05 seconds"):
        ack.result(0.05)
    proxied.proxy.resume()
    assert ack.result(10) == proxied.next - 1


@pytest.mark.parametrize("timeout", [0, -1])
def test_result_without_time_to_wait_keeps_the_connection(
    proxied: ProxiedStream, timeout: float
) -> None:
    pub = lent_publisher(proxied)
    ack = publish_directly(proxied, pub, b"x")
    connections = proxied.proxy.counters.connections
    with pytest.raises(TimeoutError):
        ack.result(timeout)
    proxied.proxy.resume()
    assert ack.result(10) == proxied.next - 1
    assert proxied.proxy.counters.connections == connections, "the publisher reconnected"


def test_unanswered_record_has_an_unknown_outcome_after_its_delivery_timeout(
    proxied: ProxiedStream,
) -> None:
    pub = lent_publisher(proxied, delivery_timeout=0.4)
    ack = publish_directly(proxied, pub, b"x")
    proxied.proxy.refuse()
    assert isinstance(failure(ack), meteor.OutcomeUnknown)


def test_forked_child_does_not_touch_the_record_in_flight(proxied: ProxiedStream) -> None:
    pub = lent_publisher(proxied)
    ack = publish_directly(proxied, pub, b"x")
    child = fork()
    if not child:
        code = 1
        try:
            right = "parent process" in str(ack.exception(1))
            code = 0 if right and ack.done() else 2
        finally:
            os._exit(code)
    assert exit_code(child) == 0
    proxied.proxy.resume()
    assert ack.result(5) == proxied.next - 1
    assert records(proxied) == [b"x"]


# Batching


@pytest.fixture
def loop_stream(url: str) -> Iterator[meteor.Stream]:
    with meteor.connect(url) as client:
        yield client.stream("s", capacity=1_000_000)


def test_publish_loop_still_makes_large_frames(loop_stream: meteor.Stream) -> None:
    """If each batch began with a direct send, the other frames would hold only a few records.

    100,000 records fill 25 frames. A busy machine may need more, so the test takes the best of
    three runs.
    """
    counts = []
    value = bytes(100)
    with loop_stream.publisher() as pub:
        for _ in range(3):
            pub.publish(b"first").result(10)
            wait_until_lent(pub)
            before = loop_stream.describe().frames
            for _ in range(100_000):
                pub.publish(value)
            pub.flush(60)
            counts.append(loop_stream.describe().frames - before)
    assert min(counts) <= 60, counts


def test_streams_with_an_ordering_key_use_the_direct_line(url: str) -> None:
    with meteor.connect(url) as client:
        stream = client.stream("keyed", ordering_key="key")
        with stream.publisher() as pub:
            pub.publish(b"first", key=b"a").result(10)
            wait_until_lent(pub)
            for number in range(4):
                ack = pub.publish(b"%d" % number, key=b"%d" % (number % 2))
                assert pub._sender._line.batch is ack._completion
                ack.result(10)
        found: list[bytes] = []
        with stream.shared_subscriber("g", initial_offset="earliest") as sub:

            def has_all() -> bool:
                for record in sub.poll(1.0):
                    found.append(record.value)
                    record.ack()
                return {b"first", b"0", b"1", b"2", b"3"} <= set(found)

            eventually(has_all)
